//! `lmx evaluate`: the tasks of lm-evaluation-harness.

use crate::args::evaluate::EvaluateOptions;
use crate::args::model::PrefixArgs;
use crate::end::End;
use crate::env;
use crate::evaluate::generate::{self, Asked, Wanted};
use crate::evaluate::harness::{Harness, installed_python};
use crate::evaluate::protocol::{Ask, Finished};
use crate::interrupt::Hold;
use crate::report::Notices;
use crate::session::{Concurrency, Reuse, Session, Tail};
use crate::terminal;
use anyhow::{Context, anyhow, bail};
use lmx::engine::Request;
use lmx::eval::{LogLikelihood, ScoreError, Scorer};
use lmx::sample::{SamplingParams, fold_seed};
use lmx::text::TemplateError;
use lmx::text::reply::ReplyOptions;
use serde_json::{Map, Value, json};
use std::ops::ControlFlow;

/// Tokens of a reply at most where neither the user nor the task says (mlx-lm's).
const MAX_TOKENS: usize = 8192;

/// Runs the command.
pub(crate) fn run(options: &EvaluateOptions) -> Result<(), End> {
    let folder = &options.args.output_dir;
    std::fs::create_dir_all(folder).with_context(|| format!("--output-dir {}", folder.display()))?;
    let hold = Hold::new();
    let python = options.args.python.clone().unwrap_or_else(|| installed_python(env::path()));
    let mut harness = Harness::start(&python, &hold)?;
    let mut notices = Notices::new(options.args.json);
    let mut evaluated: Option<Evaluated> = None;
    loop {
        let asked = harness.next(&hold)?;
        let answer = match (asked, &mut evaluated) {
            (Ask::Hello { key, .. }, _) if !harness.knows(&key) => {
                return Err(anyhow!("another process than the harness asked").into());
            }
            (Ask::Hello { harness, .. }, _) => {
                notices.add_fact(format!("lm-evaluation-harness {harness} of {}", python.display()));
                Ok(options.for_harness())
            }
            (Ask::Failed(why), _) => return Err(anyhow!(why).into()),
            (Ask::Finished(finished), Some(evaluated)) => {
                harness.answer(Ok(Value::Null))?;
                harness.finish()?;
                evaluated.counts.note(&mut notices);
                return report(options, &finished, &notices);
            }
            (Ask::Load {}, _) => {
                let loaded = evaluated.insert(Evaluated::load(options, &mut notices)?);
                Ok(loaded.settings()?)
            }
            (asked, Some(evaluated)) => evaluated.answer(asked, &hold, &mut notices),
            (_, None) => Err(anyhow!("the model is not loaded yet")),
        };
        if hold.is_pressed() {
            return Err(End::Interrupted);
        }
        harness.answer(answer.map_err(|error| format!("{error:#}")))?;
    }
}

fn report(options: &EvaluateOptions, finished: &Finished, notices: &Notices) -> Result<(), End> {
    if options.args.json {
        let object = json!({
            "model": options.args.model.name(),
            "results": finished.results,
            "files": finished.files,
            "notices": notices.lines(),
        });
        return terminal::print(&format!("{object:#}\n"));
    }
    notices.say_facts();
    finished.files.iter().for_each(|file| terminal::note(&format!("written: {file}")));
    terminal::print(&finished.table)
}

/// What was done to the harness's texts that its results do not show.
#[derive(Debug, Default)]
struct Counts {
    /// Pairs of context and continuation.
    pairs: usize,
    /// Contexts that lost their beginning.
    truncated: usize,
    /// Pairs with a token across their border.
    merged: usize,
    /// Texts that were read in several windows.
    windowed: usize,
    /// Prompts of generated texts.
    prompts: usize,
    /// Those that lost their beginning.
    cut: usize,
}

impl Counts {
    fn note(&self, notices: &mut Notices) {
        let Self { pairs, truncated, merged, windowed, prompts, cut } = self;
        for (count, what) in [
            (
                truncated,
                format!("of {pairs} contexts were longer than the model is given and lost their beginning"),
            ),
            (
                merged,
                format!(
                    "of {pairs} continuations share a token with their context, whose own tokens were read"
                ),
            ),
            (windowed, "texts were longer than the model is given and were scored in windows".to_owned()),
            (cut, format!("of {prompts} prompts left no room for their reply and lost their beginning")),
        ] {
            if *count > 0 {
                notices.add(format!("{count} {what}"));
            }
        }
    }
}

/// The model that is evaluated.
struct Evaluated<'a> {
    options: &'a EvaluateOptions,
    session: Session,
    /// Prompts go through the chat template, which brings what special tokens they need.
    chat: bool,
    max_length: usize,
    counts: Counts,
}

impl<'a> Evaluated<'a> {
    fn load(options: &'a EvaluateOptions, notices: &mut Notices) -> Result<Self, End> {
        let args = &options.args;
        let session = Session::open(
            &args.model,
            &args.adapter,
            &args.run,
            &args.template,
            // Answers to one question share its tokens, and examples those of a task.
            Reuse::Prefixes(&PrefixArgs::default()),
            Concurrency::of(args.batch_size.get()),
            notices,
        )?;
        // A template that cannot be used is not the same as none.
        let has_template = !matches!(session.template, Err(TemplateError::None));
        let chat = options.apply_chat_template.unwrap_or(has_template);
        if let (true, Err(error)) = (chat, &session.template) {
            return Err(End::Failed(anyhow!(error.clone()).context("--apply-chat-template")));
        }
        let context = session.engine.model().context_length();
        let max_length = args.max_length.map_or(context, std::num::NonZeroUsize::get);
        if max_length > context {
            return Err(End::Usage(format!(
                "--max-length {max_length} is more than the model's context of {context}"
            )));
        }
        Ok(Self { options, session, chat, max_length, counts: Counts::default() })
    }

    /// What the harness needs to know of the model.
    fn settings(&self) -> anyhow::Result<Value> {
        let template = self.session.template.as_ref().ok().filter(|_| self.chat);
        Ok(json!({
            "apply_chat_template": self.chat,
            "chat_template": template.and_then(|template| template.source(false)),
            "tokenizer": self.options.args.model.name().replace('/', "__"),
        }))
    }

    fn answer(&mut self, asked: Ask, hold: &Hold, notices: &mut Notices) -> anyhow::Result<Value> {
        match asked {
            Ask::Loglikelihood(pairs) => self.log_likelihoods(&pairs, hold),
            Ask::LoglikelihoodRolling(texts) => self.rolling(&texts, hold),
            Ask::GenerateUntil(requests) => self.generate(&requests, hold, notices),
            Ask::ApplyChatTemplate { messages, add_generation_prompt } => {
                let tail = if add_generation_prompt { Tail::Reply } else { Tail::Open };
                Ok(json!(self.session.render(&messages, tail, None)?.text))
            }
            Ask::Describe {} => Ok(self.describe()),
            Ask::Hello { .. } | Ask::Load {} | Ask::Finished(_) | Ask::Failed(_) => {
                bail!("this was not to be asked now")
            }
        }
    }

    fn scorer(&mut self) -> anyhow::Result<Scorer<'_>> {
        let adapter = self.session.adapter.clone();
        let scorer = Scorer::new(&mut self.session.engine).with_adapter(adapter).with_bos(!self.chat);
        Ok(scorer.with_max_length(self.max_length)?)
    }

    fn log_likelihoods(&mut self, pairs: &[(String, String)], hold: &Hold) -> anyhow::Result<Value> {
        let scored = self.scorer()?.log_likelihood(pairs, &mut |_| go_on(hold));
        let scored = all("pairs of context and continuation", scored)?;
        self.counts.pairs += scored.len();
        self.counts.truncated += scored.iter().filter(|pair| pair.truncated > 0).count();
        self.counts.merged += scored.iter().filter(|pair| pair.merged).count();
        let answers = scored.iter().map(|LogLikelihood { sum, greedy, .. }| json!([sum, greedy]));
        Ok(answers.collect())
    }

    fn rolling(&mut self, texts: &[(String,)], hold: &Hold) -> anyhow::Result<Value> {
        let texts: Vec<&str> = texts.iter().map(|(text,)| text.as_str()).collect();
        let scored = self.scorer()?.rolling_log_likelihood(&texts, &mut |_| go_on(hold));
        let scored = all("texts", scored)?;
        self.counts.windowed += scored.iter().filter(|text| text.windows > 1).count();
        Ok(scored.iter().map(|text| json!(text.sum)).collect())
    }

    fn generate(
        &mut self,
        requests: &[(String, Map<String, Value>)],
        hold: &Hold,
        notices: &mut Notices,
    ) -> anyhow::Result<Value> {
        let asked = requests.iter().map(|(prompt, words)| self.request(prompt, words, notices));
        let asked = asked.collect::<anyhow::Result<Vec<Asked>>>()?;
        let adapter = &self.session.adapter;
        let asked = asked.into_iter().map(|asked| {
            let request = Request { adapter: adapter.clone(), ..asked.request };
            Asked { request, ..asked }
        });
        let asked: Vec<Asked> = asked.collect();
        Ok(json!(generate::run(&mut self.session.engine, asked, hold)?))
    }

    fn request(
        &mut self,
        prompt: &str,
        words: &Map<String, Value>,
        notices: &mut Notices,
    ) -> anyhow::Result<Asked> {
        let wanted = Wanted::read(words)?;
        for name in &wanted.ignored {
            notices.add(format!("the task's generation_kwargs {name} has no effect: lmx does not know it"));
        }
        let tokens = self.scorer()?.encode(prompt)?;
        let asked = self.options.args.max_tokens.map(std::num::NonZeroUsize::get).or(wanted.max_tokens);
        let room = self.max_length;
        // Without a wish a reply may take what the prompt leaves; a wish makes the prompt give way.
        let keep = room.saturating_sub(asked.unwrap_or(1));
        if keep == 0 {
            bail!(
                "a reply of {} tokens leaves no room for a prompt: the model is given {room} at a time",
                asked.unwrap_or(1)
            );
        }
        let lost = tokens.len().saturating_sub(keep);
        let tokens = tokens[lost..].to_vec();
        let sampling = self.options.sampling.clone().unwrap_or(wanted.sampling);
        // Each request has draws of its own, the same in every run.
        let seed = fold_seed(self.options.args.seed.into(), self.counts.prompts as u64);
        let thinking = self.session.tokenizer.thinking_markers();
        let in_reasoning = thinking.as_ref().is_some_and(|markers| markers.opened_by(&tokens));
        self.counts.prompts += 1;
        self.counts.cut += usize::from(lost > 0);
        let request = Request {
            sampling: SamplingParams {
                xtc_special_tokens: self.session.xtc_special_tokens.clone(),
                ..sampling
            },
            seed: Some(seed),
            ..Request::new(tokens, asked.unwrap_or(MAX_TOKENS))
        };
        let reply = ReplyOptions { thinking, in_reasoning, ..ReplyOptions::default() };
        Ok(Asked { request, reply, until: wanted.until })
    }

    /// What is written beside the results.
    fn describe(&self) -> Value {
        let Counts { pairs, truncated, merged, windowed, prompts, cut } = self.counts;
        json!({
            "lmx": env!("CARGO_PKG_VERSION"),
            "kv_format": self.session.kv_format,
            "max_length": self.max_length,
            "loglikelihood_pairs": pairs,
            "truncated_contexts": truncated,
            "merged_borders": merged,
            "windowed_texts": windowed,
            "generated_texts": prompts,
            "truncated_prompts": cut,
        })
    }
}

fn go_on(hold: &Hold) -> ControlFlow<()> {
    if hold.is_pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// All results, or how many there are not and why: a score without them would be of other data than it says.
fn all<T>(what: &str, scored: Vec<Result<T, ScoreError>>) -> anyhow::Result<Vec<T>> {
    let (count, mut results, mut failed) = (scored.len(), Vec::with_capacity(scored.len()), Vec::new());
    for (place, scored) in scored.into_iter().enumerate() {
        match scored {
            Ok(result) => results.push(result),
            Err(error) => failed.push((place, error)),
        }
    }
    let failures = failed.len();
    match failed.into_iter().next() {
        None => Ok(results),
        Some((place, error)) => Err(anyhow!(error)
            .context(format!("{failures} of {count} {what} have no likelihood; the first, number {place}"))),
    }
}
