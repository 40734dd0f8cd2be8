//! Texts that the harness asks for.

use crate::interrupt::Hold;
use anyhow::{Context, bail};
use lmx::engine::{Engine, FinishReason, Request, RequestId, Update};
use lmx::sample::SamplingParams;
use lmx::text::StopMatcher;
use lmx::text::reply::{ReplyEnd, ReplyOptions, ReplyParser, ReplyPart};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The harness's names of what a task may say of a reply's length, the first of which counts.
const LENGTHS: [&str; 4] = ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"];

/// What a task wants of a reply: its `generation_kwargs`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// Texts that end the answer. They count in the answer only, not in the thoughts before it.
    pub(crate) until: Vec<String>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) sampling: SamplingParams,
    /// Names of what lmx does not know.
    pub(crate) ignored: Vec<String>,
}

impl Wanted {
    /// Reads a task's words.
    ///
    /// # Errors
    /// A value of the wrong type.
    pub(crate) fn read(words: &Map<String, Value>) -> anyhow::Result<Self> {
        let mut wanted = Self::default();
        let mut samples = None;
        for (name, value) in words {
            let number = || value.as_f64().with_context(|| wrong(name, value));
            let count =
                || value.as_u64().and_then(|n| usize::try_from(n).ok()).with_context(|| wrong(name, value));
            let sampling = &mut wanted.sampling;
            match name.as_str() {
                _ if value.is_null() => {}
                "until" => wanted.until = texts(value).with_context(|| wrong(name, value))?,
                "do_sample" => samples = Some(value.as_bool().with_context(|| wrong(name, value))?),
                "temperature" => sampling.temperature = number()?,
                "top_p" => sampling.top_p = number()?,
                "min_p" => sampling.min_p = number()?,
                "top_k" => sampling.top_k = count()?,
                name if LENGTHS.contains(&name) => {}
                _ => wanted.ignored.push(name.clone()),
            }
        }
        let length = LENGTHS.iter().find_map(|name| words.get(*name).filter(|value| !value.is_null()));
        wanted.max_tokens = length
            .map(|value| {
                value.as_u64().and_then(|n| usize::try_from(n).ok()).with_context(|| wrong(LENGTHS[0], value))
            })
            .transpose()?;
        match samples {
            // transformers' default where a task asks for sampling.
            Some(true) if !words.contains_key("temperature") => wanted.sampling.temperature = 1.0,
            Some(true) => {}
            // A temperature alone counts, as in the harness.
            None if wanted.sampling.temperature > 0.0 => {}
            Some(false) | None => wanted.sampling = SamplingParams::default(),
        }
        Ok(wanted)
    }
}

fn wrong(name: &str, value: &Value) -> String {
    format!("generation_kwargs: {name} is {value}")
}

fn texts(value: &Value) -> Option<Vec<String>> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    value.as_array().map_or_else(|| Some(vec![text(value)?]), |texts| texts.iter().map(text).collect())
}

/// A request and how its reply is read.
pub(crate) struct Asked {
    pub(crate) request: Request,
    /// How thoughts are told from the answer.
    pub(crate) reply: ReplyOptions,
    pub(crate) until: Vec<String>,
}

/// A reply while it comes.
struct Answer {
    place: usize,
    parser: ReplyParser,
    until: StopMatcher,
    text: String,
}

impl Answer {
    /// Takes parts of the reply; whether the answer has ended.
    fn take(&mut self, parts: Vec<ReplyPart>) -> bool {
        for part in parts {
            let ReplyPart::Content(text) = part else { continue };
            let shown = self.until.push(&text);
            self.text.push_str(&shown.text);
            if shown.matched {
                return true;
            }
        }
        false
    }
}

/// Runs all requests, as many at a time as the engine does, and returns the answers in their order: thoughts are left
/// out, and what follows a text of `until`.
///
/// # Errors
/// The first request that fails, and Ctrl-C.
pub(crate) fn run(engine: &mut Engine, asked: Vec<Asked>, hold: &Hold) -> anyhow::Result<Vec<String>> {
    let mut answers = vec![String::new(); asked.len()];
    let mut open: BTreeMap<RequestId, Answer> = BTreeMap::new();
    for (place, Asked { request, reply, until }) in asked.into_iter().enumerate() {
        let id = engine.submit(request).with_context(|| format!("request {place}"))?;
        let answer = Answer {
            place,
            parser: ReplyParser::new(reply),
            until: StopMatcher::new(&until),
            text: String::new(),
        };
        open.insert(id, answer);
    }
    while !open.is_empty() {
        let failed = if hold.is_pressed() {
            Some(anyhow::anyhow!("interrupted"))
        } else {
            step(engine, &mut open, &mut answers)
        };
        if let Some(error) = failed {
            open.keys().for_each(|&id| engine.cancel(id));
            bail!(error);
        }
    }
    Ok(answers)
}

/// Runs a step; the error of a request, if one failed.
fn step(
    engine: &mut Engine,
    open: &mut BTreeMap<RequestId, Answer>,
    answers: &mut [String],
) -> Option<anyhow::Error> {
    for (id, update) in engine.step() {
        let Some(answer) = open.get_mut(&id) else { continue };
        match update {
            Update::Token(event) => {
                let parts = answer.parser.push(&event.text);
                let mut ended = answer.take(parts);
                if let Some(finish) = event.finish.filter(|_| !ended) {
                    let end = if finish == FinishReason::Stop { ReplyEnd::Stop } else { ReplyEnd::Cut };
                    let parts = answer.parser.finish(end);
                    if !answer.take(parts) {
                        answer.text += &answer.until.finish();
                    }
                    ended = true;
                }
                if ended {
                    engine.cancel(id);
                    if let Some(Answer { place, text, .. }) = open.remove(&id) {
                        answers[place] = text;
                    }
                }
            }
            Update::Failed(error) => {
                return Some(anyhow::Error::new(error).context(format!("request {}", answer.place)));
            }
            Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use serde_json::json;

    fn read(words: Value) -> anyhow::Result<Wanted> {
        Wanted::read(words.as_object().unwrap())
    }

    #[test]
    fn a_tasks_words() {
        let wanted =
            read(json!({"until": "\n", "max_new_tokens": 5, "max_gen_toks": 7, "num_beams": 2})).unwrap();
        assert_eq!((wanted.until, wanted.max_tokens), (vec!["\n".to_owned()], Some(7)));
        assert_eq!((wanted.ignored, wanted.sampling.temperature), (vec!["num_beams".to_owned()], 0.0));
        for words in [json!({"until": 3}), json!({"max_gen_toks": -1}), json!({"temperature": "hot"})] {
            assert!(read(words.clone()).is_err(), "{words}");
        }
    }

    #[test]
    fn sampling_is_asked_for() {
        for (words, temperature) in [
            (json!({"do_sample": true}), 1.0),
            (json!({"do_sample": true, "temperature": 0.3}), 0.3),
            (json!({"do_sample": false, "temperature": 0.3}), 0.0),
            (json!({"temperature": 0.3}), 0.3),
            (json!({"until": null, "top_p": 0.5}), 0.0),
        ] {
            assert_eq!(read(words.clone()).unwrap().sampling.temperature, temperature, "{words}");
        }
    }
}
