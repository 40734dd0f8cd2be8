//! A trial of a server that speaks OpenAI's protocol.

use super::trial::{Sequence, Trial};
use crate::interrupt::Hold;
use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

const CONNECT: Duration = Duration::from_secs(10);
/// Bytes of an answer that is not a stream, and of a stream's line, at most.
const ANSWER_MAX: u64 = 4 << 20;

/// A server and how it is asked.
#[derive(Debug)]
pub(crate) struct Client {
    agent: ureq::Agent,
    /// The address before `/completions`.
    base: String,
    key: Option<String>,
    pub(crate) model: String,
    form: Form,
}

/// How prompts are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// As token ids.
    Ids,
    /// As text, which the server may cut into other tokens.
    Text,
}

/// A prompt in both forms.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) ids: Vec<u32>,
    pub(crate) text: String,
}

impl Client {
    /// A client for the server at `url`, with or without `/v1` at its end.
    ///
    /// # Errors
    /// No server, or one that lists no models although none is given.
    pub(crate) fn connect(url: &str, model: Option<&str>, key: Option<String>) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/');
        let base = if url.ends_with("/v1") { url.to_owned() } else { format!("{url}/v1") };
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT))
            // Every byte on the way is part of what is measured.
            .proxy(None)
            .build();
        let mut client = Self {
            agent: config.into(),
            base,
            key,
            model: model.unwrap_or_default().to_owned(),
            form: Form::Ids,
        };
        if model.is_none() {
            let address = format!("{}/models", client.base);
            let request = client.authorized(client.agent.get(&address));
            let models = answer(request.call().with_context(|| format!("no answer from {address}"))?)?;
            let first = models["data"][0]["id"].as_str();
            client.model =
                first.with_context(|| format!("{address} lists no model (--against-model)"))?.to_owned();
        }
        Ok(client)
    }

    fn authorized<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    /// Warms the server up, and finds out which form of prompt it takes.
    ///
    /// # Errors
    /// What the server says of both forms.
    pub(crate) fn warm_up(&mut self, prompts: &[Prompt], tokens: usize, hold: &Hold) -> anyhow::Result<Form> {
        let Err(refused) = self.run(prompts, tokens, hold) else { return Ok(self.form) };
        if self.form == Form::Text || hold.is_pressed() {
            return Err(refused);
        }
        self.form = Form::Text;
        match self.run(prompts, tokens, hold) {
            Ok(_) => Ok(Form::Text),
            // What it says of the better form tells more.
            Err(_) => Err(refused),
        }
    }

    /// Sends all prompts at once and follows the streams of their replies.
    ///
    /// # Errors
    /// The first stream that failed, or ended without a token.
    pub(crate) fn run(&self, prompts: &[Prompt], tokens: usize, hold: &Hold) -> anyhow::Result<Trial> {
        let start = Instant::now();
        let sequences = std::thread::scope(|scope| {
            let streams: Vec<_> =
                prompts.iter().map(|prompt| scope.spawn(|| self.reply(prompt, tokens, hold))).collect();
            let joined = streams.into_iter().map(|stream| stream.join());
            joined
                .map(|reply| reply.unwrap_or_else(|_| Err(anyhow!("the thread of a stream died"))))
                .collect()
        });
        let sequences: anyhow::Result<Vec<Sequence>> = sequences;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Trial { sequences: sequences?, seconds, ..Trial::default() })
    }

    fn reply(&self, prompt: &Prompt, tokens: usize, hold: &Hold) -> anyhow::Result<Sequence> {
        let address = format!("{}/completions", self.base);
        let body = json!({
            "model": self.model,
            "prompt": match self.form { Form::Ids => json!(prompt.ids), Form::Text => json!(prompt.text) },
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let request = self.authorized(self.agent.post(&address)).header("content-type", "application/json");
        let start = Instant::now();
        let response = request.send(body.to_string()).with_context(|| format!("no answer from {address}"))?;
        if !response.status().is_success() {
            answer(response)?;
            bail!("{address} answers with neither a reply nor an error");
        }
        let mut stream = Stream { sequence: Sequence::default(), counted: false };
        let mut lines = BufReader::new(response.into_body().into_reader());
        let mut line = String::new();
        while !hold.is_pressed() {
            line.clear();
            let read = lines.by_ref().take(ANSWER_MAX).read_line(&mut line);
            if read.with_context(|| format!("the stream of {address} broke"))? == 0 {
                break;
            }
            let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
            if data == "[DONE]" {
                break;
            }
            let chunk =
                serde_json::from_str(data).with_context(|| format!("{address} sent no JSON: {data}"))?;
            stream.take(&chunk, start.elapsed().as_secs_f64())?;
        }
        stream.end(prompt.ids.len())
    }
}

/// What a stream has brought so far.
struct Stream {
    sequence: Sequence,
    /// Whether the server has told how many tokens there were.
    counted: bool,
}

impl Stream {
    fn take(&mut self, chunk: &Value, at: f64) -> anyhow::Result<()> {
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            bail!("the server says: {}", said(error));
        }
        if chunk["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
            self.sequence.arrivals.push(at);
        }
        let usage = &chunk["usage"];
        let number = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        if let Some(tokens) = number(&usage["completion_tokens"]) {
            self.counted = true;
            self.sequence.tokens = tokens;
            self.sequence.prompt_tokens = number(&usage["prompt_tokens"]).unwrap_or(0);
            let cached = &usage["prompt_tokens_details"]["cached_tokens"];
            self.sequence.cached_tokens = number(cached).unwrap_or(0);
        }
        Ok(())
    }

    fn end(mut self, prompt_tokens: usize) -> anyhow::Result<Sequence> {
        if self.sequence.arrivals.is_empty() {
            bail!("the server's stream ended without any text");
        }
        if !self.counted {
            self.sequence.tokens = self.sequence.arrivals.len();
        }
        if self.sequence.prompt_tokens == 0 {
            self.sequence.prompt_tokens = prompt_tokens;
        }
        Ok(self.sequence)
    }
}

/// The JSON of an answer that is not a stream.
///
/// # Errors
/// What the server says is wrong.
fn answer(mut response: ureq::http::Response<ureq::Body>) -> anyhow::Result<Value> {
    let status = response.status();
    let mut text = String::new();
    response.body_mut().as_reader().take(ANSWER_MAX).read_to_string(&mut text).context("the answer broke")?;
    let body: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
    if !status.is_success() {
        let why = body.get("error").map_or_else(|| text.trim().to_owned(), said);
        bail!("the server says {status}: {why}");
    }
    Ok(body)
}

/// An error of OpenAI's form, or of another.
fn said(error: &Value) -> String {
    error["message"].as_str().or(error.as_str()).map_or_else(|| error.to_string(), str::to_owned)
}
