//! The body of a request, and what it asks for.

use super::Ids;
use super::item::{self, Item};
use super::store::Stored;
use crate::app::App;
use crate::body::in_range;
use crate::conversation::Conversation;
use crate::error::{ApiError, ApiResult};
use crate::fields::{self, Sampling};
use crate::model::Model;
use crate::openai::{messages, tools};
use crate::reply::{Shape, Tooling};
use crate::schemas::{ResponsesInput, ResponsesTool, ResponsesToolChoice, TextFormat};
use axum::http::StatusCode;
use lmx::engine::Request;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

/// The fields of this endpoint alone.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Body {
    model: Option<String>,
    /// A text, or a list of items: messages, function calls, their outputs, reasoning, references to items.
    #[schema(value_type = Option<ResponsesInput>)]
    input: Option<Value>,
    /// What the system says first; not taken over by requests that go on from here.
    instructions: Option<String>,
    /// Go on from a response that is stored.
    previous_response_id: Option<String>,
    /// Keep the response for `previous_response_id` (default true).
    store: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Tokens to generate at most, thoughts included.
    max_output_tokens: Option<i64>,
    text: Option<Text>,
    #[schema(value_type = Option<Vec<ResponsesTool>>)]
    tools: Option<Vec<Value>>,
    /// `auto`, `none`, `required`, or an object that names a function or lists those that are allowed.
    #[schema(value_type = Option<ResponsesToolChoice>)]
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning: Option<Reasoning>,
    /// `message.output_text.logprobs`, `reasoning.encrypted_content`.
    include: Option<Vec<String>>,
    /// With log-probabilities: of so many likely tokens too, from 0 to 20.
    top_logprobs: Option<i64>,
    /// Up to 16 texts, told again.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
    /// Tokens of thoughts at most.
    max_reasoning_tokens: Option<usize>,
    /// Variables of the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Only `disabled`.
    truncation: Option<String>,
    /// Only false.
    background: Option<bool>,
    /// Of tools of the server's own, of which there are none.
    max_tool_calls: Option<u64>,
    /// Accepted without effect on the reply.
    #[serde(rename = "service_tier")]
    _service_tier: Option<String>,
    /// Accepted without effect on the reply.
    safety_identifier: Option<String>,
    /// Accepted without effect: what begins alike is found without it.
    prompt_cache_key: Option<String>,
    /// Accepted without effect.
    #[serde(rename = "prompt_cache_retention")]
    _prompt_cache_retention: Option<String>,
}

/// `stream_options`
#[derive(Deserialize, ToSchema)]
#[schema(as = ResponsesStreamOptions)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    /// Accepted: events are never padded.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

/// `text`
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Text {
    /// `{"type": "json_schema", "name": …, "schema": …}`, `json_object`, `text`, `regex` or `grammar`.
    #[schema(value_type = Option<TextFormat>)]
    format: Option<Value>,
    /// Only `medium`.
    verbosity: Option<String>,
}

/// `reasoning`
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Reasoning {
    /// For models that think: `none` turns thinking off, other words go to the chat template.
    effort: Option<String>,
    /// Only `auto`: thoughts are told in full, there is no summary.
    summary: Option<String>,
    /// The older name of `summary`.
    generate_summary: Option<String>,
}

/// Pairs of `metadata`, letters of a name and of a value at most, as OpenAI has them.
const METADATA_MAX: [usize; 3] = [16, 64, 512];

/// What is asked for, checked.
pub(super) struct Ask {
    pub(super) model: Arc<Model>,
    pub(super) shape: Shape,
    pub(super) ids: Ids,
    /// The request's own items, as they are kept.
    pub(super) input: Vec<Value>,
    pub(super) previous: Option<Arc<Stored>>,
    /// Whose it is.
    pub(super) owner: usize,
    pub(super) store: bool,
    pub(super) logprobs: bool,
    pub(super) encoded_thoughts: bool,
    /// What the response says again of its request.
    pub(super) echo: Map<String, Value>,
}

impl Body {
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Whether the reply is to be streamed.
    pub(super) fn stream(&self) -> ApiResult<bool> {
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "stream_options needs stream"));
        }
        Ok(stream)
    }

    /// What is asked for, and the engine's request for it.
    ///
    /// # Errors
    /// Names the field that is wrong or not supported.
    pub(super) fn prepare(
        self,
        app: &App,
        model: Arc<Model>,
        owner: usize,
        sampling: &Sampling,
    ) -> ApiResult<(Ask, Request)> {
        self.check(app)?;
        let logprobs = self.includes("message.output_text.logprobs");
        let top_logprobs = match self.top_logprobs {
            None | Some(0) => 0,
            Some(_) if !logprobs => {
                let why = "top_logprobs needs message.output_text.logprobs in include";
                return Err(ApiError::field("top_logprobs", why));
            }
            Some(top) => in_range("top_logprobs", top, 0, 20)? as usize,
        };
        let max_tokens = fields::max_tokens(
            &[("max_output_tokens", self.max_output_tokens)],
            app.options.defaults.max_tokens,
        )?;
        let previous = self.previous(app, owner)?;
        let own = self.items(app, owner)?;
        let items = self.conversation(app, previous.as_ref(), &own)?;
        let chat = item::messages(self.instructions.as_deref(), &items);
        let about_input = |error: ApiError| error.renamed("messages", "input");
        let chat = messages::normalize(chat, usize::MAX).map_err(about_input)?;
        let (prompt, shape) = self.render(app, &model, chat).map_err(about_input)?;
        let request = sampling.request(prompt, max_tokens, &model, &app.options).map_err(about_input)?;
        let mut request = Request { top_logprobs, ..request };
        shape.constrain(shape.grammar(&model, sampling)?, &mut request);
        let ids = Ids::new();
        let input = own.iter().enumerate().map(|(n, item)| item.json(&ids.item(item.prefix(), n)));
        let input = input.collect();
        let encoded_thoughts = self.includes("reasoning.encrypted_content");
        let store = self.store.unwrap_or(true) && app.responses.is_on();
        let echo = self.echo(&model, &ids, &request, store);
        let ask = Ask { model, shape, ids, input, previous, owner, store, logprobs, encoded_thoughts, echo };
        Ok((ask, request))
    }

    fn includes(&self, what: &str) -> bool {
        self.include.iter().flatten().any(|included| included == what)
    }

    /// Refuses what is not supported.
    fn check(&self, app: &App) -> ApiResult<()> {
        let refused = |field: &str, why: &str| Err(ApiError::field(field, format!("{field} {why}")));
        if self.background == Some(true) {
            return refused("background", "must be false: a response ends when nobody waits for it");
        }
        if self.truncation.as_ref().is_some_and(|word| word != "disabled") {
            return refused("truncation", "must be disabled: what is too long is refused");
        }
        if self.store == Some(true) && !app.responses.is_on() {
            return refused("store", "must be false: this server stores none (--stored-responses)");
        }
        let known = ["message.output_text.logprobs", "reasoning.encrypted_content"];
        let other = |word: &String| !known.contains(&word.as_str());
        if let Some(index) = self.include.iter().flatten().position(other) {
            return refused(&format!("include[{index}]"), &format!("must be one of {}", known.join(", ")));
        }
        if self.text.as_ref().and_then(|text| text.verbosity.as_ref()).is_some_and(|word| word != "medium") {
            return refused("text.verbosity", "must be medium: the model cannot be told how much to say");
        }
        let reasoning = self.reasoning.as_ref();
        for (field, summary) in [
            ("reasoning.summary", reasoning.and_then(|reasoning| reasoning.summary.as_ref())),
            (
                "reasoning.generate_summary",
                reasoning.and_then(|reasoning| reasoning.generate_summary.as_ref()),
            ),
        ] {
            if summary.is_some_and(|word| word != "auto") {
                return refused(field, "must be auto: thoughts are told in full, there is no summary");
            }
        }
        let [pairs, name, value] = METADATA_MAX;
        let short =
            |value: &Value, most: usize| value.as_str().is_some_and(|text| text.chars().count() <= most);
        let metadata = self.metadata.iter().flatten();
        let fits = |(key, text): (&String, &Value)| key.chars().count() <= name && short(text, value);
        if metadata.clone().count() > pairs || !metadata.clone().all(fits) {
            let why = format!("may have {pairs} texts of {value} letters, with names of {name}");
            return refused("metadata", &why);
        }
        Ok(())
    }

    fn previous(&self, app: &App, owner: usize) -> ApiResult<Option<Arc<Stored>>> {
        let Some(id) = &self.previous_response_id else { return Ok(None) };
        let found = app.responses.get(id, owner);
        let missing = || ApiError {
            code: Some("previous_response_not_found"),
            ..ApiError::field("previous_response_id", format!("there is no stored response {id:?}"))
        };
        found.ok_or_else(missing).map(Some)
    }

    /// The request's own items.
    fn items(&self, app: &App, owner: usize) -> ApiResult<Vec<Item>> {
        let most = app.options.limits.messages;
        match &self.input {
            None if self.previous_response_id.is_some() => Ok(Vec::new()),
            None => Err(ApiError::field("input", "input is required")),
            Some(Value::String(text)) => {
                Ok(vec![Item::Message { role: item::Role::User, text: text.clone() }])
            }
            Some(Value::Array(items)) if items.len() > most => {
                let message = format!("input has {} items: at most {most} are allowed", items.len());
                Err(ApiError::field("input", message))
            }
            Some(Value::Array(items)) => {
                let read = |(index, value): (usize, &Value)| {
                    let at = format!("input[{index}]");
                    let referred = value["type"] == "item_reference"
                        || (value["type"].is_null() && value["role"].is_null() && value["id"].is_string());
                    if referred {
                        return Item::read(&at, &referenced(app, owner, &at, value)?);
                    }
                    Item::read(&at, value)
                };
                items.iter().enumerate().map(read).collect()
            }
            Some(_) => Err(ApiError::field("input", "input must be a text or a list of items")),
        }
    }

    /// All items of the conversation.
    fn conversation(&self, app: &App, previous: Option<&Arc<Stored>>, own: &[Item]) -> ApiResult<Vec<Item>> {
        let mut turns: Vec<&Arc<Stored>> =
            previous.map(|stored| stored.chain().collect()).unwrap_or_default();
        turns.reverse();
        let mut items = Vec::new();
        for value in turns.into_iter().flat_map(|stored| stored.items()) {
            items.push(Item::read("previous_response_id", &value)?);
        }
        let first = items.len();
        items.extend_from_slice(own);
        if items.is_empty() && self.instructions.is_none() {
            return Err(ApiError::field("input", "input is empty: at least one item is needed"));
        }
        let most = app.options.limits.messages;
        if items.len() > most {
            let message = format!("the conversation has {} items: at most {most} are allowed", items.len());
            return Err(ApiError::field("input", message));
        }
        item::check_outputs(&items, first)?;
        Ok(items)
    }

    fn render(&self, app: &App, model: &Model, messages: Vec<Value>) -> ApiResult<(Vec<u32>, Shape)> {
        let mut tools = nested(self.tools.as_deref().unwrap_or_default())?;
        tools::check(&tools)?;
        let choice = tools::choose(self.tool_choice.as_ref(), &mut tools)?;
        let format = self.text.as_ref().and_then(|text| text.format.as_ref());
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone());
        let conversation = Conversation {
            messages,
            continues: false,
            tooling: Tooling { tools, choice, parallel: self.parallel_tool_calls.unwrap_or(true) },
            form: tools::form("text.format", format, true)?,
            effort: effort.map(|word| ("reasoning.effort", word)),
            budget: self.max_reasoning_tokens,
            variables: self.chat_template_kwargs.clone().unwrap_or_default(),
        };
        conversation.render(app, model)
    }

    /// What the response says of its request.
    fn echo(self, model: &Model, ids: &Ids, request: &Request, store: bool) -> Map<String, Value> {
        let format = self.text.and_then(|text| text.format).unwrap_or_else(|| json!({"type": "text"}));
        let echo = json!({
            "id": ids.response(),
            "object": "response",
            "created_at": crate::openai::now(),
            "status": null,
            "background": false,
            "completed_at": null,
            "error": null,
            "incomplete_details": null,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "model": model.name,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.and_then(|reasoning| reasoning.effort), "summary": null},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": store,
            "temperature": request.sampling.temperature,
            "text": {"format": format, "verbosity": "medium"},
            "tool_choice": self.tool_choice.unwrap_or_else(|| "auto".into()),
            "tools": self.tools.unwrap_or_default(),
            "top_logprobs": request.top_logprobs,
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "usage": null,
            "metadata": self.metadata.unwrap_or_default(),
        });
        match echo {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}

/// The item that an `item_reference` means.
fn referenced(app: &App, owner: usize, at: &str, reference: &Value) -> ApiResult<Value> {
    let field = format!("{at}.id");
    let id = reference["id"].as_str();
    let id = id.ok_or_else(|| ApiError::field(&field, format!("{field} is required")))?;
    let found = Ids::of_item(id).and_then(|ids| app.responses.get(&ids.response(), owner));
    let found = found.and_then(|stored| stored.items().into_iter().find(|item| item["id"] == id));
    found.ok_or_else(|| ApiError {
        param: Some(field),
        ..ApiError::new(
            StatusCode::NOT_FOUND,
            format!("there is no stored item {id:?}; without store items are not kept"),
        )
    })
}

/// Functions as chats have them.
fn nested(tools: &[Value]) -> ApiResult<Vec<Value>> {
    let nest = |(index, tool): (usize, &Value)| {
        let refused = |key: &str, why: &str| {
            let field = format!("tools[{index}].{key}");
            Err(ApiError::field(&field, format!("{field} {why}")))
        };
        if tool["type"] != "function" {
            return refused("type", "must be function: the server has no tools of its own");
        }
        if tool["name"].as_str().is_none_or(str::is_empty) {
            return refused("name", "is required");
        }
        if !tool["parameters"].is_null() && !tool["parameters"].is_object() {
            return refused("parameters", "must be a JSON schema");
        }
        if !tools::is_flag(tool.get("strict")) {
            return refused("strict", "must be true or false");
        }
        let mut function = Map::new();
        for key in ["name", "description", "parameters", "strict"] {
            if let Some(value) = tool.get(key).filter(|value| !value.is_null()) {
                function.insert(key.to_owned(), value.clone());
            }
        }
        Ok(json!({"type": "function", "function": function}))
    };
    tools.iter().enumerate().map(nest).collect()
}
