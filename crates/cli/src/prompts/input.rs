//! The lines of a prompts file.

use anyhow::{Context, anyhow, bail};
use lmx::engine::{DraftSpeculation, NgramSpeculation, Speculation};
use lmx::grammar::Form;
use lmx::sample::{ProcessorParams, SamplingParams};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

/// Bytes of a line at most.
const LINE_MAX: u64 = 64 << 20;

/// One request. A field that is absent or null is what the command line says; an unknown one is an error.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Line {
    id: Option<Value>,
    pub(crate) prompt: Option<String>,
    pub(crate) messages: Option<Vec<Value>>,
    pub(crate) token_ids: Option<Vec<u32>>,
    pub(crate) system_prompt: Option<String>,
    pub(crate) prefill_response: Option<String>,
    pub(crate) chat_template_config: Option<Map<String, Value>>,
    pub(crate) max_tokens: Option<i64>,
    pub(crate) seed: Option<u64>,
    pub(crate) stop: Option<Stop>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) adapter: Option<AdapterChoice>,
    pub(crate) priority: Option<i32>,
    queue_deadline: Option<f64>,
    stall_deadline: Option<f64>,
    num_draft_tokens: Option<usize>,
    filter_tempered: Option<bool>,
    json_schema: Option<Value>,
    regex: Option<String>,
    grammar: Option<String>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    min_tokens_to_keep: Option<usize>,
    top_k: Option<usize>,
    xtc_probability: Option<f64>,
    xtc_threshold: Option<f64>,
    logit_bias: Option<BTreeMap<u32, f64>>,
    repetition_penalty: Option<f64>,
    repetition_context_size: Option<usize>,
    presence_penalty: Option<f64>,
    presence_context_size: Option<usize>,
    frequency_penalty: Option<f64>,
    frequency_context_size: Option<usize>,
}

/// One stop string or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub(crate) enum Stop {
    One(String),
    Many(Vec<String>),
}

/// The adapter of a line: one by name, or with `false` none.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub(crate) enum AdapterChoice {
    None,
    Path(String),
}

impl TryFrom<Value> for AdapterChoice {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        match value {
            Value::String(path) => Ok(Self::Path(path)),
            Value::Bool(false) => Ok(Self::None),
            _ => Err("adapter must be a path, or false for none"),
        }
    }
}

/// What a request continues.
#[derive(Debug)]
pub(crate) enum Source<'a> {
    Prompt(&'a str),
    Messages(&'a [Value]),
    Tokens(&'a [u32]),
}

impl Source<'_> {
    /// The field that it came from.
    pub(crate) fn field(&self) -> &'static str {
        match self {
            Self::Prompt(_) => "prompt",
            Self::Messages(_) => "messages",
            Self::Tokens(_) => "token_ids",
        }
    }
}

impl Line {
    /// Reads a line of JSON.
    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        let mut json = serde_json::Deserializer::from_str(text);
        let line: Self = serde_path_to_error::deserialize(&mut json)
            .map_err(|error| {
                // Of unknown fields and wrong JSON serde itself says where.
                let path = error.path().to_string();
                let named = path.starts_with(|c: char| c.is_ascii_alphabetic());
                let said = error.into_inner().to_string();
                if named && !said.contains(&path) { anyhow!("{path}: {said}") } else { anyhow!(said) }
            })
            .context("not a request")?;
        json.end().context("not a request")?;
        if line.id.is_some() && Self::id_of(text).is_none() {
            bail!("id must be a text or a number");
        }
        Ok(line)
    }

    /// The id of a line, be the line a request or not.
    pub(crate) fn id_of(text: &str) -> Option<Value> {
        #[derive(Deserialize)]
        struct Named {
            id: Option<Value>,
        }
        let named: Named = serde_json::from_str(text).ok()?;
        named.id.filter(|id| id.is_string() || id.is_number())
    }

    /// What is to be continued: exactly one of prompt, messages and `token_ids`.
    pub(crate) fn source(&self) -> anyhow::Result<Source<'_>> {
        match (&self.prompt, &self.messages, &self.token_ids) {
            (Some(prompt), None, None) => Ok(Source::Prompt(prompt)),
            (None, Some(messages), None) if messages.is_empty() => bail!("messages is empty"),
            (None, Some(messages), None) => Ok(Source::Messages(messages)),
            (None, None, Some(tokens)) => Ok(Source::Tokens(tokens)),
            _ => bail!("exactly one of prompt, messages and token_ids must be given"),
        }
    }

    /// The form of the reply, if this line gives one, and by which field.
    pub(crate) fn form(&self) -> anyhow::Result<Option<(&'static str, Form)>> {
        match (&self.json_schema, &self.regex, &self.grammar) {
            (None, None, None) => Ok(None),
            (Some(Value::Bool(true)), None, None) => Ok(Some(("json_schema", Form::Json))),
            (Some(schema), None, None) => Ok(Some(("json_schema", Form::JsonSchema(schema.clone())))),
            (None, Some(regex), None) => Ok(Some(("regex", Form::Regex(regex.clone())))),
            (None, None, Some(grammar)) => Ok(Some(("grammar", Form::Lark(grammar.clone())))),
            _ => bail!("at most one of json_schema, regex and grammar can be given"),
        }
    }

    /// The longest times in seconds to wait, and without progress.
    pub(crate) fn deadlines(&self) -> anyhow::Result<[Option<Duration>; 2]> {
        let duration = |field: &str, seconds: Option<f64>| {
            let duration = seconds.map(Duration::try_from_secs_f64).transpose();
            duration.map_err(|error| anyhow!("{field} must be a number of seconds: {error}"))
        };
        Ok([
            duration("queue_deadline", self.queue_deadline)?,
            duration("stall_deadline", self.stall_deadline)?,
        ])
    }

    /// The sampling of this line, where it says nothing that of `base`.
    pub(crate) fn sampling(&self, base: &SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            min_tokens_to_keep: self.min_tokens_to_keep.unwrap_or(base.min_tokens_to_keep),
            top_k: self.top_k.unwrap_or(base.top_k),
            xtc_probability: self.xtc_probability.unwrap_or(base.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(base.xtc_threshold),
            temperature_first: self.filter_tempered.unwrap_or(base.temperature_first),
            ..base.clone()
        }
    }

    /// How this line's tokens are guessed: with 0 not at all, otherwise as the command line says.
    pub(crate) fn speculation(&self, base: Option<Speculation>) -> anyhow::Result<Option<Speculation>> {
        let Some(draft_tokens) = self.num_draft_tokens else { return Ok(base) };
        let speculation: Speculation = match base {
            _ if draft_tokens == 0 => return Ok(None),
            Some(Speculation::Ngram(base)) => NgramSpeculation { draft_tokens, ..base }.into(),
            Some(Speculation::Draft(base)) => DraftSpeculation { draft_tokens, ..base }.into(),
            None => bail!("num_draft_tokens needs --ngram-spec or --draft-model: nothing is guessed without"),
        };
        let checked = speculation.validate();
        checked.map_err(|e| anyhow!("num_draft_tokens must be {}, but is {}", e.allowed, e.value))?;
        Ok(Some(speculation))
    }

    /// The processors of this line, where it says nothing those of `base`.
    pub(crate) fn processors(&self, base: &ProcessorParams) -> ProcessorParams {
        ProcessorParams {
            logit_bias: self.logit_bias.clone().unwrap_or_else(|| base.logit_bias.clone()),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            repetition_context_size: self.repetition_context_size.unwrap_or(base.repetition_context_size),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            presence_context_size: self.presence_context_size.unwrap_or(base.presence_context_size),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            frequency_context_size: self.frequency_context_size.unwrap_or(base.frequency_context_size),
        }
    }
}

/// Reads the lines that are not blank, one at a time.
#[derive(Debug)]
pub(crate) struct Lines {
    file: BufReader<File>,
    path: String,
    number: usize,
}

impl Lines {
    /// Opens a prompts file.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let path = path.display().to_string();
        let file = File::open(&path).with_context(|| format!("cannot open {path}"))?;
        Ok(Self { file: BufReader::new(file), path, number: 0 })
    }

    /// The next line with its number in the file, from 1.
    pub(crate) fn next(&mut self) -> anyhow::Result<Option<(usize, String)>> {
        loop {
            let mut bytes = Vec::new();
            let read = (&mut self.file).take(LINE_MAX + 1).read_until(b'\n', &mut bytes);
            let read = read.with_context(|| format!("cannot read {}", self.path))?;
            self.number += 1;
            if read == 0 {
                return Ok(None);
            }
            if bytes.len() as u64 > LINE_MAX {
                bail!("line {} of {} is longer than {LINE_MAX} bytes", self.number, self.path);
            }
            let text = String::from_utf8(bytes)
                .with_context(|| format!("line {} of {} is not UTF-8", self.number, self.path))?;
            if !text.trim().is_empty() {
                return Ok(Some((self.number, text)));
            }
        }
    }

    /// How many requests a file holds.
    pub(crate) fn count(path: &Path) -> anyhow::Result<usize> {
        let mut lines = Self::open(path)?;
        let mut count = 0;
        while lines.next()?.is_some() {
            count += 1;
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_what_is_wrong_with_it() {
        let error = |text: &str| format!("{:#}", Line::parse(text).unwrap_err());
        assert!(error(r#"{"prompt": "a", "temprature": 1}"#).contains("temprature"));
        assert!(error(r#"{"prompt": "a", "prompt": "b"}"#).contains("duplicate field"));
        assert!(error(r#"{"prompt": "a""#).contains("not a request"));
        assert!(error(r#"{"prompt": "a", "id": [1]}"#).contains("id must be"));
        let two = Line::parse(r#"{"prompt": "a", "token_ids": [1]}"#).unwrap();
        assert!(two.source().unwrap_err().to_string().contains("exactly one"));
        let forms = Line::parse(r#"{"prompt": "a", "regex": "a", "grammar": "b"}"#).unwrap();
        assert!(forms.form().is_err());
    }

    #[test]
    fn a_line_overrides_the_command_line_and_null_does_not() {
        let line =
            Line::parse(r#"{"prompt": "a", "temperature": 0.5, "top_k": null, "stop": ["x"]}"#).unwrap();
        let base = SamplingParams { temperature: 1.0, top_k: 7, ..SamplingParams::default() };
        let sampling = line.sampling(&base);
        assert_eq!((sampling.temperature, sampling.top_k), (0.5, 7));
        assert!(matches!(line.stop, Some(Stop::Many(_))) && line.seed.is_none());
    }
}
