//! A response while it is made: its items, and the events that tell of them.

use super::item::encode_thoughts;
use super::request::Ask;
use crate::app::App;
use crate::blocks::{Block, Blocks, Change, Kind};
use crate::error::ApiError;
use crate::logprobs;
use crate::openai::{Cost, now};
use crate::sse::{Events, Gone};
use crate::stream::Protocol;
use axum::http::StatusCode;
use lmx::engine::{Event, FinishReason};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A response, while it is made.
pub(super) struct Written {
    app: Arc<App>,
    ask: Ask,
    blocks: Blocks,
    /// Log-probabilities of tokens whose text is held back.
    pending: Vec<Value>,
    /// And those of each block's tokens.
    logprobs: Vec<Vec<Value>>,
    cost: Cost,
    finish: Option<FinishReason>,
    /// Events that were sent.
    sequence: u64,
}

/// An event without its number.
type Told = (&'static str, Value);

impl Written {
    pub(super) fn new(app: Arc<App>, ask: Ask) -> Self {
        let blocks = Blocks::new(&ask.shape);
        Self {
            app,
            ask,
            blocks,
            pending: Vec::new(),
            logprobs: Vec::new(),
            cost: Cost::default(),
            finish: None,
            sequence: 0,
        }
    }

    /// Takes what a token released; returns the events that tell of it.
    pub(super) fn take(&mut self, event: &Event) -> Vec<Told> {
        if self.ask.logprobs {
            self.pending.extend(logprobs::of_chat(&self.ask.model.tokenizer, event));
        }
        let mut changes = self.blocks.push(event);
        if event.finish.is_some() {
            self.finish = event.finish;
            self.cost.add(&event.stats, self.blocks.parts().reasoning_tokens(), false);
            if self.blocks.list().is_empty() {
                changes = self.blocks.add_empty();
            }
        }
        let mut told = Vec::new();
        for (index, change) in changes {
            let Some(block) = self.blocks.list().get(index) else { continue };
            if block.kind != Kind::Text {
                self.pending.clear();
            }
            match change {
                Change::Open => {
                    self.logprobs.push(Vec::new());
                    self.open(index, block, &mut told);
                }
                Change::More(text) => {
                    let tokens = std::mem::take(&mut self.pending);
                    told.push(self.more(index, block, &text, &tokens));
                    if let Some(of_block) = self.logprobs.get_mut(index) {
                        of_block.extend(tokens);
                    }
                }
                Change::Close => self.close(index, block, &mut told),
            }
        }
        told
    }

    fn item_id(&self, index: usize, block: &Block) -> String {
        let prefix = match block.kind {
            Kind::Text => "msg_",
            Kind::Thoughts => "rs_",
            Kind::Call { .. } => "fc_",
        };
        self.ask.ids.item(prefix, self.ask.input.len() + index)
    }

    /// A block's text as part of its item; `None` for calls, which have no parts.
    fn part(&self, index: usize, kind: &Kind, text: &str) -> Option<Value> {
        let logprobs = self.logprobs.get(index).filter(|_| !text.is_empty());
        match kind {
            Kind::Text => Some(
                json!({"type": "output_text", "annotations": [], "logprobs": logprobs.unwrap_or(&Vec::new()), "text": text}),
            ),
            Kind::Thoughts => Some(json!({"type": "reasoning_text", "text": text})),
            Kind::Call { .. } => None,
        }
    }

    /// A block as an item, which says `text` up to here; empty while it has only begun.
    fn item(&self, index: usize, block: &Block, status: &str, text: Option<&str>) -> Value {
        let id = self.item_id(index, block);
        let content: Vec<Value> =
            text.and_then(|text| self.part(index, &block.kind, text)).into_iter().collect();
        match &block.kind {
            Kind::Text => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Kind::Thoughts => {
                let mut item = json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content});
                if self.ask.encoded_thoughts {
                    item["encrypted_content"] = text.map(encode_thoughts).into();
                }
                item
            }
            Kind::Call { id: call, name } => json!({
                "id": id, "type": "function_call", "status": status,
                "call_id": call, "name": name, "arguments": text.unwrap_or_default(),
            }),
        }
    }

    /// A whole block as an item.
    fn whole(&self, index: usize, block: &Block) -> Value {
        let status = if block.complete { "completed" } else { "incomplete" };
        self.item(index, block, status, Some(&block.text))
    }

    fn open(&self, index: usize, block: &Block, told: &mut Vec<Told>) {
        let item = self.item(index, block, "in_progress", None);
        told.push(("response.output_item.added", json!({"output_index": index, "item": item})));
        if let Some(part) = self.part(index, &block.kind, "") {
            let mut event = self.place(index, block);
            event["part"] = part;
            told.push(("response.content_part.added", event));
        }
    }

    fn more(&self, index: usize, block: &Block, text: &str, tokens: &[Value]) -> Told {
        let mut event = self.place(index, block);
        event["delta"] = text.into();
        match block.kind {
            Kind::Text => {
                event["logprobs"] = tokens.into();
                ("response.output_text.delta", event)
            }
            Kind::Thoughts => ("response.reasoning_text.delta", event),
            Kind::Call { .. } => ("response.function_call_arguments.delta", event),
        }
    }

    fn close(&self, index: usize, block: &Block, told: &mut Vec<Told>) {
        let mut event = self.place(index, block);
        told.push(match &block.kind {
            Kind::Text => {
                event["text"] = block.text.as_str().into();
                event["logprobs"] = self.logprobs.get(index).cloned().unwrap_or_default().into();
                ("response.output_text.done", event)
            }
            Kind::Thoughts => {
                event["text"] = block.text.as_str().into();
                ("response.reasoning_text.done", event)
            }
            Kind::Call { name, .. } => {
                event["name"] = name.as_str().into();
                event["arguments"] = block.text.as_str().into();
                ("response.function_call_arguments.done", event)
            }
        });
        if let Some(part) = self.part(index, &block.kind, &block.text) {
            let mut event = self.place(index, block);
            event["part"] = part;
            told.push(("response.content_part.done", event));
        }
        let item = self.whole(index, block);
        told.push(("response.output_item.done", json!({"output_index": index, "item": item})));
    }

    /// Where a block is.
    fn place(&self, index: usize, block: &Block) -> Value {
        let mut place = json!({"item_id": self.item_id(index, block), "output_index": index});
        if !matches!(block.kind, Kind::Call { .. }) {
            place["content_index"] = 0.into();
        }
        place
    }

    /// The response as it is now.
    fn response(&self, status: &str) -> Map<String, Value> {
        let mut response = self.ask.echo.clone();
        let output = self.blocks.list().iter().enumerate().map(|(index, block)| self.whole(index, block));
        response.insert("status".to_owned(), status.into());
        response.insert("output".to_owned(), output.collect());
        response
    }

    /// The whole response, and whether it is complete; it is stored if that is wanted.
    pub(super) fn end(&mut self) -> Value {
        let complete = self.finish == Some(FinishReason::Stop);
        let mut response = self.response(if complete { "completed" } else { "incomplete" });
        if complete {
            response.insert("completed_at".to_owned(), now().into());
        } else {
            response.insert("incomplete_details".to_owned(), json!({"reason": "max_output_tokens"}));
        }
        response.insert("usage".to_owned(), self.cost.responses_usage());
        response.insert("timings".to_owned(), self.cost.timings());
        let response = Value::Object(response);
        if self.ask.store {
            let texts = (Value::from(std::mem::take(&mut self.ask.input)).to_string(), response.to_string());
            let id = self.ask.ids.response();
            if !self.app.responses.keep(&id, self.ask.owner, self.ask.previous.take(), texts) {
                tracing::warn!(id, "the conversation is too long to be stored (--stored-responses-bytes)");
            }
        }
        response
    }

    async fn tell(&mut self, events: &Events, (name, mut event): Told) -> Result<(), Gone> {
        if let Value::Object(map) = &mut event {
            map.shift_insert(0, "type".to_owned(), name.into());
            map.shift_insert(1, "sequence_number".to_owned(), self.sequence.into());
        }
        self.sequence += 1;
        events.event(name, &event).await
    }
}

impl Protocol for Written {
    async fn begin(&mut self, events: &Events) -> Result<(), Gone> {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.tell(events, (name, json!({"response": response}))).await?;
        }
        Ok(())
    }

    async fn event(&mut self, events: &Events, _index: usize, event: Event) -> Result<(), Gone> {
        for told in self.take(&event) {
            self.tell(events, told).await?;
        }
        Ok(())
    }

    async fn end(&mut self, events: &Events) -> Result<(), Gone> {
        let response = Self::end(self);
        let name =
            if response["status"] == "completed" { "response.completed" } else { "response.incomplete" };
        self.tell(events, (name, json!({"response": response}))).await
    }

    async fn error(&mut self, events: &Events, error: ApiError) -> Result<(), Gone> {
        let limited = error.status == StatusCode::TOO_MANY_REQUESTS;
        let code = if limited { "rate_limit_exceeded" } else { "server_error" };
        let mut response = self.response("failed");
        response.insert("error".to_owned(), json!({"code": code, "message": error.message}));
        self.tell(events, ("response.failed", json!({"response": response}))).await
    }
}
