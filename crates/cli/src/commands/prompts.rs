//! `lmx generate --prompts-file`: every line of a file is a request; they run together.

use crate::adapters::{self, Adapters};
use crate::args::generate::{GenerateArgs, GenerateOptions};
use crate::args::sampling::MaxTokens;
use crate::chat::conversation::message;
use crate::end::End;
use crate::interrupt::Hold;
use crate::progress::Progress;
use crate::prompts::input::{AdapterChoice, Line, Lines, Source, Stop};
use crate::prompts::output::Output;
use crate::report::{self, Notices};
use crate::running::Outcome;
use crate::session::{Models, Reuse, Session, Tail, notice_dropped_system};
use crate::terminal;
use anyhow::{Context, anyhow};
use lmx::engine::{FinishReason, Request, RequestError, RequestId, Stats, Update};
use lmx::grammar::Grammars;
use lmx::text::TemplateError;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Requests that are read and not yet written, for each that runs: a long one holds back the replies after it.
const AHEAD: usize = 4;

/// Runs the command.
pub(crate) fn run(options: &GenerateOptions, path: &Path) -> Result<(), End> {
    let args = &options.args;
    let total = Lines::count(path)?;
    let output = open_output(args, path)?;
    let mut notices = Notices::new(false);
    let concurrency = args.prompts.concurrency();
    let session = Session::open(
        Models { model: &args.model, draft: args.speculation.draft_model(), progress: None },
        &args.adapter,
        &args.run,
        &args.template,
        Reuse::Prefixes(&args.prefix),
        concurrency,
        &mut notices,
    )?;
    session.check_speculation(options.speculation)?;
    report::filters_without_effect(&options.sampling, &options.processors, &mut notices);
    if output.written() > 0 {
        notices.add(format!("{} of {total} replies are there already", output.written()));
    }
    let mut lines = Lines::open(path)?;
    for _ in 0..output.written() {
        lines.next()?;
    }
    let begin = output.written();
    let mut batch = Batch {
        options,
        notices,
        session,
        grammars: None,
        adapters: Adapters::default(),
        lines,
        output,
        read: begin,
        pending: BTreeMap::new(),
        failed: 0,
        sum: Stats::default(),
    };
    let started = Instant::now();
    batch.work(total)?;
    if args.verbose {
        batch.say_statistics(total - begin, started);
    }
    match batch.failed {
        0 => Ok(()),
        failed => {
            Err(End::Failed(anyhow!("{failed} of {} requests failed; their lines say why", total - begin)))
        }
    }
}

/// The output, ready for the first reply that it does not hold.
fn open_output(args: &GenerateArgs, path: &Path) -> anyhow::Result<Output> {
    let Some(output) = &args.prompts.output else { return Ok(Output::stdout()) };
    let mut lines = Lines::open(path)?;
    let mut id = |index: usize| {
        let (_, text) = lines.next()?.with_context(|| format!("there is no request {index}"))?;
        Ok(Line::id_of(&text))
    };
    Output::file(output, args.model.name(), &mut id)
}

struct Batch<'a> {
    options: &'a GenerateOptions,
    session: Session,
    /// Of the run as a whole.
    notices: Notices,
    /// Made when the first line asks for a form.
    grammars: Option<Grammars>,
    adapters: Adapters,
    lines: Lines,
    output: Output,
    /// Requests read.
    read: usize,
    pending: BTreeMap<RequestId, Pending>,
    failed: usize,
    /// Tokens, guesses and preemptions of all replies.
    sum: Stats,
}

/// A request that runs or waits.
struct Pending {
    index: usize,
    id: Option<Value>,
    limit: MaxTokens,
    outcome: Outcome,
    notices: Notices,
}

impl Batch<'_> {
    fn work(&mut self, total: usize) -> Result<(), End> {
        let hold = Hold::new();
        let mut progress = Progress::slow("replies", total as u64);
        loop {
            self.fill()?;
            if self.pending.is_empty() {
                return Ok(());
            }
            if hold.is_pressed() {
                return Err(End::Interrupted);
            }
            for (id, update) in self.session.engine.step() {
                self.take(id, update)?;
            }
            self.session.note_prefix_warnings(&mut self.notices);
            progress.set(self.output.written() as u64, total as u64);
        }
    }

    /// Submits requests until enough are on their way; those that wait are what a priority chooses from.
    fn fill(&mut self) -> Result<(), End> {
        let concurrency = self.options.args.prompts.concurrency().replies;
        while self.read - self.output.written() < AHEAD * concurrency {
            let Some((number, text)) = self.lines.next()? else { return Ok(()) };
            let index = self.read;
            self.read += 1;
            let id = Line::id_of(&text);
            let submitted = Line::parse(&text).and_then(|line| self.submit(&line));
            match submitted {
                Ok((request, limit, notices)) => {
                    let outcome = Outcome::default();
                    self.pending.insert(request, Pending { index, id, limit, outcome, notices });
                }
                Err(error) => {
                    let error = format!("{:#}", error.context(format!("line {number}")));
                    self.fail(index, id, &error)?;
                }
            }
        }
        Ok(())
    }

    fn fail(&mut self, index: usize, id: Option<Value>, error: &str) -> Result<(), End> {
        self.failed += 1;
        self.output.put(index, json!({"index": index, "id": id, "error": error}))
    }

    fn submit(&mut self, line: &Line) -> anyhow::Result<(RequestId, MaxTokens, Notices)> {
        let options = self.options;
        let mut notices = Notices::new(true);
        let limit = match line.max_tokens {
            None => options.args.max_tokens,
            Some(0) => return Err(anyhow!("max_tokens must not be 0 (-1 for no limit)")),
            Some(n) => MaxTokens(usize::try_from(n).ok()),
        };
        let common = || options.form.clone().map(|form| ("the form of the command line", form));
        let grammar = match line.form()?.or_else(common) {
            None => None,
            Some((field, form)) => {
                if self.grammars.is_none() {
                    self.grammars = Some(self.session.engine.grammars()?);
                }
                let grammar = self.grammars.as_ref().map(|grammars| grammars.compile(&form));
                grammar.transpose().context(field)?
            }
        };
        let adapter = match &line.adapter {
            None => self.session.adapter.clone(),
            Some(AdapterChoice::None) => None,
            Some(AdapterChoice::Path(name)) => {
                Some(self.adapters.load(name, self.session.engine.model()).context("adapter")?)
            }
        };
        adapter.iter().for_each(|adapter| adapters::note(adapter, &mut notices));
        let [queue_deadline, stall_deadline] = line.deadlines()?;
        let request = Request {
            queue_deadline,
            stall_deadline,
            adapter,
            tokens: self.tokens(line, &mut notices)?,
            max_tokens: limit.0,
            sampling: self.session.sampling(&line.sampling(&options.sampling)),
            processors: line.processors(&options.processors),
            stop: match &line.stop {
                None => options.stop.clone(),
                Some(Stop::One(stop)) => vec![stop.clone()],
                Some(Stop::Many(stops)) => stops.clone(),
            },
            seed: line.seed.or(options.args.seed),
            grammar,
            speculation: line.speculation(options.speculation)?,
            ignore_eos: line.ignore_eos.unwrap_or(false),
            priority: line.priority.unwrap_or(0),
            ..Request::default()
        };
        report::filters_without_effect(&request.sampling, &request.processors, &mut notices);
        let of_prompt = |error: &RequestError| {
            use RequestError::{ContextExceeded, EmptyPrompt, Token};
            matches!(error, EmptyPrompt | Token { .. } | ContextExceeded { .. })
        };
        let request = self.session.engine.submit(request).map_err(|error| match line.source() {
            Ok(source) if of_prompt(&error) => anyhow!(error).context(source.field()),
            _ => error.into(),
        })?;
        Ok((request, limit, notices))
    }

    /// The prompt of a line, as the model sees it.
    fn tokens(&self, line: &Line, notices: &mut Notices) -> anyhow::Result<Vec<u32>> {
        let args = &self.options.args;
        let source = line.source()?;
        let system = line.system_prompt.as_ref().or(args.template.system_prompt.as_ref());
        let prefill = line.prefill_response.as_ref().or(args.prefill_response.as_ref());
        let plain = args.ignore_chat_template || matches!(self.session.template, Err(TemplateError::None));
        let without_template = [
            ("system_prompt", system.is_some()),
            ("prefill_response", prefill.is_some()),
            ("chat_template_config", line.chat_template_config.is_some()),
        ];
        let idle = |why: &str, notices: &mut Notices| {
            let given = without_template.iter().filter(|(_, given)| *given);
            given.for_each(|(field, _)| notices.add(format!("{field} has no effect: {why}")));
        };
        let (system, prefill) =
            (system.map(|text| message("system", text)), prefill.map(|text| message("assistant", text)));
        let messages: Vec<Value> = match source {
            Source::Tokens(tokens) => {
                idle("token_ids are taken as they are", notices);
                return Ok(tokens.to_vec());
            }
            Source::Prompt(prompt) if plain => {
                idle("no chat template is used", notices);
                return Ok(self.session.tokenizer.encode(prompt, true)?);
            }
            Source::Messages(_) if args.ignore_chat_template => {
                return Err(anyhow!(
                    "messages need the chat template that --ignore-chat-template leaves out"
                ));
            }
            Source::Prompt(prompt) => system.into_iter().chain([message("user", prompt)]).collect(),
            Source::Messages(messages) => system.into_iter().chain(messages.iter().cloned()).collect(),
        };
        let tail = if prefill.is_some() { Tail::Open } else { Tail::Reply };
        let messages: Vec<Value> = messages.into_iter().chain(prefill).collect();
        let prompt = self.session.render(&messages, tail, line.chat_template_config.as_ref());
        let prompt = prompt.context(source.field())?;
        notice_dropped_system(&prompt, notices);
        Ok(prompt.ids)
    }

    fn take(&mut self, id: RequestId, update: Update) -> Result<(), End> {
        match update {
            Update::Prefill { .. } | Update::Prompt(_) | Update::Embedding(_) => {}
            Update::Failed(error) => {
                if let Some(pending) = self.pending.remove(&id) {
                    self.fail(pending.index, pending.id, &error.to_string())?;
                }
            }
            Update::Token(event) => {
                let Some(pending) = self.pending.get_mut(&id) else { return Ok(()) };
                let outcome = &mut pending.outcome;
                outcome.token_ids.extend(event.token);
                outcome.text.push_str(&event.text);
                outcome.stats = event.stats;
                outcome.finish = event.finish;
                if event.finish.is_some() {
                    self.finish(id)?;
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self, id: RequestId) -> Result<(), End> {
        let Some(Pending { index, id, limit, outcome, mut notices }) = self.pending.remove(&id) else {
            return Ok(());
        };
        if outcome.finish == Some(FinishReason::Length) {
            notices.add(report::cut(limit, &outcome));
        }
        self.sum.prompt_tokens += outcome.stats.prompt_tokens;
        self.sum.generation_tokens += outcome.stats.generation_tokens;
        self.sum.drafted_tokens += outcome.stats.drafted_tokens;
        self.sum.accepted_tokens += outcome.stats.accepted_tokens;
        self.sum.preemptions += outcome.stats.preemptions;
        let mut reply = json!({"index": index, "id": id});
        let object =
            report::json(&outcome, self.options.args.model.name(), &self.session.kv_format, &notices);
        if let (Value::Object(reply), Value::Object(object)) = (&mut reply, object) {
            reply.extend(object);
        }
        self.output.put(index, reply)
    }

    fn say_statistics(&self, replies: usize, started: Instant) {
        let seconds = started.elapsed().as_secs_f64();
        let rate = |tokens: usize| tokens as f64 / seconds.max(1e-9);
        let Stats { prompt_tokens, generation_tokens, .. } = self.sum;
        terminal::say("==========");
        terminal::say(&format!("Replies: {} of {replies} in {seconds:.3} s", replies - self.failed));
        terminal::say(&format!("Prompt: {prompt_tokens} tokens, {:.3} tokens-per-sec", rate(prompt_tokens)));
        let generation = rate(generation_tokens);
        terminal::say(&format!("Generation: {generation_tokens} tokens, {generation:.3} tokens-per-sec"));
        report::say_events(&self.sum);
        terminal::say(&format!("Peak memory: {:.3} GB", report::gigabytes(report::peak_memory())));
    }
}
