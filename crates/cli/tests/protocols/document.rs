//! `/openapi.json`

use crate::common::model::{Model, Then};
use crate::common::server::Server;
use serde_json::{Value, json};

#[test]
fn every_path_is_described_and_every_description_is_a_path() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &["--api-key", "k"]);
    let document = server.get("/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().unwrap();
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            let filled = path.replace("{name}", "none").replace("{id}", "none");
            let answer = server.ask(&method.to_uppercase(), &filled, &["x-api-key: k"], "{}");
            assert_ne!(answer.status, 405, "{method} {path}");
            assert!(!answer.body.contains("there is no such path"), "{method} {path}");
            let status = answer.status.to_string();
            assert!(operation["responses"].get(&status).is_some(), "{method} {path} answers {status}");
            if answer.status >= 400 {
                let kind = if path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
                let schema =
                    &operation["responses"][&status]["content"]["application/json"]["schema"]["$ref"];
                assert_eq!(schema, &json!(format!("#/components/schemas/{kind}")));
                assert!(answer.json()["error"]["message"].is_string());
            } else if let Some(fields) = operation
                .pointer("/responses/200/content/application~1json/schema/required")
                .and_then(Value::as_array)
            {
                let body = answer.json();
                assert!(
                    fields.iter().all(|field| body.get(field.as_str().unwrap()).is_some()),
                    "{method} {path}"
                );
            }
        }
    }
    // What docs/server.md lists.
    let told = include_str!("../../../../docs/server.md");
    let listed: Vec<&str> = told
        .lines()
        .filter(|line| line.starts_with("| `"))
        .flat_map(|line| line.split('|').nth(1).unwrap().split('`'))
        .filter_map(|word| {
            word.trim_start_matches(|c: char| !c.is_ascii_lowercase() && c != '/')
                .strip_prefix('/')
                .map(|_| word)
        })
        .collect();
    for word in listed {
        let path = word.split(' ').next_back().unwrap().replace("NAME", "{name}").replace("ID", "{id}");
        assert!(paths.contains_key(&path), "{path} of docs/server.md is not described");
    }
}

#[test]
fn the_fields_of_bodies_and_what_they_name_are_there() {
    let model = Model::script(&[b"a"], Then::End);
    let server = Server::start(model.path(), &[]);
    let document = server.get("/openapi.json").json();
    let schema = |path: &str| {
        document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].clone()
    };
    let chat = schema("/v1/chat/completions");
    for field in
        ["messages", "temperature", "max_completion_tokens", "tools", "response_format", "min_tokens"]
    {
        assert!(chat["properties"].get(field).is_some(), "{field}");
    }
    let items = |field: &str| {
        let reference =
            chat["properties"][field]["items"]["$ref"].as_str().unwrap_or_else(|| panic!("{field}"));
        document.pointer(reference.trim_start_matches('#')).unwrap().clone()
    };
    assert!(items("messages")["anyOf"].as_array().unwrap().len() > 1);
    assert_eq!(items("tools")["properties"]["function"]["required"], json!(["name"]));
    assert_eq!((&chat["required"], &chat["additionalProperties"]), (&json!(["messages"]), &json!(false)));
    assert!(schema("/v1/responses")["properties"].get("max_tokens").is_none());
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
                map.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    /// Fails for a list of which nothing is said, and for a schema that is only a reference to itself.
    fn check(at: &str, value: &Value) {
        match value {
            Value::Object(map) => {
                let list =
                    map.get("type").is_some_and(|kind| kind == "array" || *kind == json!(["array", "null"]));
                let said = map.get("items").and_then(Value::as_object).is_some_and(|items| !items.is_empty());
                assert!(!list || said, "{at}");
                assert!(map.get("$ref").is_none_or(|to| at != to), "{at}");
                map.iter().for_each(|(key, value)| check(&format!("{at}/{key}"), value));
            }
            Value::Array(list) => {
                list.iter().enumerate().for_each(|(i, value)| check(&format!("{at}/{i}"), value))
            }
            _ => {}
        }
    }
    check("#", &document);
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 100);
    for reference in found {
        assert!(document.pointer(reference.trim_start_matches('#')).is_some(), "{reference}");
    }
    assert_eq!(document["components"]["securitySchemes"]["bearer"]["scheme"], "bearer");
}
