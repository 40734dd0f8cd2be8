//! The paths of the server: one list of which both the router and `/openapi.json` are made.

use crate::app::App;
use axum::Router;
use axum::handler::Handler;
use axum::routing::{MethodFilter, on};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

/// A method of a path, and what is said of it.
pub(crate) struct Route {
    path: &'static str,
    method: &'static str,
    summary: &'static str,
    router: Router<Arc<App>>,
    body: Option<Value>,
    /// Schemas that the body's names.
    components: Vec<(String, RefOr<Schema>)>,
    /// Fields of the answer.
    answer: &'static [&'static str],
    kind: &'static str,
    streams: bool,
    queries: &'static [(&'static str, &'static str)],
    open: bool,
}

impl Route {
    fn new<T: 'static>(
        (method, filter): (&'static str, MethodFilter),
        path: &'static str,
        handler: impl Handler<T, Arc<App>>,
        summary: &'static str,
    ) -> Self {
        Self {
            path,
            method,
            summary,
            router: Router::new().route(path, on(filter, handler)),
            body: None,
            components: Vec::new(),
            answer: &[],
            kind: "application/json",
            streams: false,
            queries: &[],
            open: false,
        }
    }

    /// What GET answers.
    pub(crate) fn get<T: 'static>(
        path: &'static str,
        handler: impl Handler<T, Arc<App>>,
        summary: &'static str,
    ) -> Self {
        Self::new(("get", MethodFilter::GET), path, handler, summary)
    }

    /// What POST answers.
    pub(crate) fn post<T: 'static>(
        path: &'static str,
        handler: impl Handler<T, Arc<App>>,
        summary: &'static str,
    ) -> Self {
        Self::new(("post", MethodFilter::POST), path, handler, summary)
    }

    /// What DELETE answers.
    pub(crate) fn delete<T: 'static>(
        path: &'static str,
        handler: impl Handler<T, Arc<App>>,
        summary: &'static str,
    ) -> Self {
        Self::new(("delete", MethodFilter::DELETE), path, handler, summary)
    }

    /// Its body has the fields of `T`, beside those of other types.
    pub(crate) fn body<T: ToSchema>(mut self) -> Self {
        T::schemas(&mut self.components);
        let own = serde_json::to_value(T::schema()).unwrap_or_default();
        let body = self.body.get_or_insert_with(
            || json!({"type": "object", "properties": {}, "required": [], "additionalProperties": false}),
        );
        if let (Some(Value::Object(fields)), Some(all)) =
            (own.get("properties"), body["properties"].as_object_mut())
        {
            all.extend(fields.clone());
        }
        if let (Some(Value::Array(names)), Some(all)) = (own.get("required"), body["required"].as_array_mut())
        {
            all.extend(names.clone());
        }
        self
    }

    /// Its answer is an object with these fields.
    pub(crate) fn answers(self, fields: &'static [&'static str]) -> Self {
        Self { answer: fields, ..self }
    }

    /// Its answer is not JSON.
    pub(crate) fn of_kind(self, kind: &'static str) -> Self {
        Self { kind, ..self }
    }

    /// With `stream` it answers with events.
    pub(crate) fn streams(self) -> Self {
        Self { streams: true, ..self }
    }

    /// Parameters behind the path, and their types.
    pub(crate) fn queries(self, queries: &'static [(&'static str, &'static str)]) -> Self {
        Self { queries, ..self }
    }

    /// Anyone may ask for it.
    pub(crate) fn open(self) -> Self {
        Self { open: true, ..self }
    }

    fn operation(&self) -> Value {
        let id = format!("{} {}", self.method, self.path).replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        let mut operation = json!({
            "operationId": id,
            "summary": self.summary,
            "parameters": self.parameters(),
            "responses": self.responses(),
        });
        if let Some(body) = &self.body {
            operation["requestBody"] =
                json!({"required": true, "content": {"application/json": {"schema": body}}});
        }
        if self.open {
            operation["security"] = json!([]);
        }
        operation
    }

    fn parameters(&self) -> Vec<Value> {
        let of_path = self.path.split('{').skip(1).filter_map(|rest| rest.split('}').next());
        let of_path = of_path.map(|name| {
            let name = name.trim_start_matches('*');
            json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}})
        });
        let queries = self.queries.iter();
        let queries =
            queries.map(|(name, kind)| json!({"name": name, "in": "query", "schema": {"type": kind}}));
        of_path.chain(queries).collect()
    }

    fn responses(&self) -> Map<String, Value> {
        let schema = match self.kind {
            "application/json" => json!({"type": "object", "required": self.answer}),
            _ => json!({"type": "string"}),
        };
        let mut content = Map::new();
        content.insert(self.kind.to_owned(), json!({"schema": schema}));
        if self.streams {
            content.insert("text/event-stream".to_owned(), json!({"schema": {"type": "string"}}));
        }
        let mut responses = Map::new();
        responses.insert("200".to_owned(), json!({"description": "The answer", "content": content}));
        let error = if self.path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
        for (code, why) in ERRORS {
            let schema = json!({"$ref": format!("#/components/schemas/{error}")});
            let content = json!({"application/json": {"schema": schema}});
            responses.insert(code.to_owned(), json!({"description": why, "content": content}));
        }
        if self.path == "/health" {
            responses.insert("503".to_owned(), json!({"description": "Nothing is delivered"}));
        }
        responses
    }
}

/// What may go wrong anywhere.
const ERRORS: [(&str, &str); 9] = [
    ("400", "A field, the JSON, or the context length"),
    ("401", "No key, or a wrong one"),
    ("403", "A host that is not this server's"),
    ("404", "No such model or response"),
    ("408", "The body did not come in time"),
    ("413", "The body is too long"),
    ("429", "The queue is full, or the key's requests of this minute are used up"),
    ("500", "A step of the engine failed"),
    ("503", "The server stops, memory is short, or a model cannot be loaded"),
];

/// The router of the routes.
pub(crate) fn router(routes: &[Route]) -> Router<Arc<App>> {
    routes.iter().fold(Router::new(), |router, route| router.merge(route.router.clone()))
}

/// The document of the routes.
pub(crate) fn document(routes: &[Route]) -> Value {
    let mut paths: BTreeMap<String, Map<String, Value>> = BTreeMap::new();
    let mut schemas = Map::new();
    for route in routes {
        let path = paths.entry(route.path.replace("{*", "{")).or_default();
        path.insert(route.method.to_owned(), route.operation());
        for (name, schema) in &route.components {
            schemas.insert(name.clone(), serde_json::to_value(schema).unwrap_or_default());
        }
    }
    schemas.extend(crate::schemas::definitions());
    let text = json!({"type": "string"});
    let maybe = json!({"type": ["string", "null"]});
    schemas.insert(
        "Error".to_owned(),
        json!({"type": "object", "required": ["error"], "properties": {"error": {
            "type": "object", "required": ["message", "type", "param", "code"],
            "properties": {"message": text, "type": text, "param": maybe, "code": maybe},
        }}}),
    );
    schemas.insert(
        "AnthropicError".to_owned(),
        json!({"type": "object", "required": ["type", "error"], "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": ["type", "message"], "properties": {"type": text, "message": text}},
        }}),
    );
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "lmx server",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The protocols of OpenAI and Anthropic over one engine.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        // The empty one: a server that was started without keys asks for none.
        "security": [{"bearer": []}, {"key": []}, {}],
    })
}
