//! `lmx benchmark`: how fast a model runs here, alone or beside a server.

use crate::args::benchmark::BenchmarkArgs;
use crate::args::model::TemplateArgs;
use crate::benchmark::client::{Client, Form, Prompt};
use crate::benchmark::machine::{CpuTime, Machine, Roofline};
use crate::benchmark::prompts::Prompts;
use crate::benchmark::report::{Cell, Measured, Program, Report};
use crate::benchmark::trial::Trial;
use crate::benchmark::{charts, engine, report};
use crate::end::End;
use crate::env;
use crate::interrupt::Hold;
use crate::plot;
use crate::progress::Progress;
use crate::report::Notices;
use crate::session::{Concurrency, Reuse, Session};
use crate::terminal;
use anyhow::Context;
use std::num::NonZeroUsize;
use std::time::Duration;

/// Tokens that are generated for warming up: what is done once has been done by then.
const WARM_UP_TOKENS: usize = 16;

/// Runs the command.
pub(crate) fn run(args: &BenchmarkArgs) -> Result<(), End> {
    let mut notices = Notices::new(args.json);
    if let Some(path) = &args.plot {
        // Known before anything is measured.
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
        opened.with_context(|| format!("--plot: cannot write {}", path.display()))?;
    }
    let most = args.batch_size.iter().copied().max().map_or(1, NonZeroUsize::get);
    let template = TemplateArgs::default();
    let mut session = Session::open(
        &args.model,
        &args.adapter,
        &args.run,
        &template,
        Reuse::Nothing,
        Concurrency::of(most),
        &mut notices,
    )?;
    let cells = cells(args, session.engine.model().context_length())?;
    let against = &args.against;
    let server = against.against.as_deref().map(|url| {
        let key = against.against_key.clone().or_else(env::openai_api_key);
        Client::connect(url, against.against_model.as_deref(), key)
    });
    let server = server.transpose().map_err(|error| error.context("--against"))?;
    let hold = Hold::new();
    let prompts = Prompts::new(&session.engine, args.seed);
    let mut bench = Bench { args, session: &mut session, server, prompts, hold: &hold };
    let begin = CpuTime::now();
    let measured = bench.run(&cells, &mut notices)?;
    let others = begin.zip(CpuTime::now()).and_then(|(begin, end)| begin.others_until(&end));
    let server = bench.server.take();
    let roofline = Roofline::measure(&session.engine);
    let report = Report {
        model: args.model.name(),
        server: server
            .as_ref()
            .zip(against.against.as_deref())
            .map(|(client, url)| (url, client.model.as_str())),
        machine: Machine::of(session.engine.model().device()),
        others,
        kv_format: &session.kv_format,
        roofline,
        generation_tokens: args.generation_tokens.get(),
        prefill_step_size: args.run.prefill_step_size.get(),
        seed: args.seed,
        cells: &cells,
        kv_bytes: cells.iter().map(|cell| kv_bytes(&session, args, cell)).collect(),
        measured: &measured,
    };
    report.note(&mut notices);
    if let Some(path) = &args.plot {
        let title = format!("lmx benchmark: {}", args.model.name());
        plot::write(path, &title, &charts::panels(&report), &charts::notes(&report))?;
    }
    if args.json {
        let object = report.json(&notices);
        return terminal::print(&format!("{object:#}\n"));
    }
    terminal::print(&report.text())
}

/// What is measured: each prompt length with each batch size.
fn cells(args: &BenchmarkArgs, context: usize) -> Result<Vec<Cell>, End> {
    let tokens = args.generation_tokens.get();
    let mut cells = Vec::new();
    for prompt_tokens in args.prompt_tokens.iter().map(|n| n.get()) {
        let needed = prompt_tokens.saturating_add(tokens);
        if needed > context {
            return Err(End::Usage(format!(
                "--prompt-tokens {prompt_tokens} and --generation-tokens {tokens} need a context of {needed}, but the \
                 model's is {context}"
            )));
        }
        let batches = args.batch_size.iter().map(|n| n.get());
        cells.extend(batches.map(|batch_size| Cell { prompt_tokens, batch_size }));
    }
    Ok(cells)
}

/// Bytes of keys and values that a step reads of a sequence, half-way through its reply.
fn kv_bytes(session: &Session, args: &BenchmarkArgs, cell: &Cell) -> usize {
    session.engine.kv().spec().bytes_at(cell.prompt_tokens + args.generation_tokens.get() / 2)
}

struct Bench<'a> {
    args: &'a BenchmarkArgs,
    session: &'a mut Session,
    server: Option<Client>,
    prompts: Prompts,
    hold: &'a Hold,
}

impl Bench<'_> {
    /// All trials, for each program and cell. A round runs every cell once, and rounds alternate in direction, so that
    /// what the machine does to one it does to the others.
    fn run(&mut self, cells: &[Cell], notices: &mut Notices) -> Result<Vec<Measured>, End> {
        let of = |program| Measured { program, trials: vec![Vec::new(); cells.len()] };
        let mut measured = vec![of(Program::Lmx)];
        measured.extend(self.server.as_ref().map(|_| of(Program::Server)));
        let rounds = self.args.num_trials.get();
        let total = ((rounds + 1) * cells.len() * measured.len()) as u64;
        let (mut done, mut progress) = (0, Progress::slow("measuring", total));
        for round in 0..=rounds {
            for step in 0..cells.len() {
                let index = if round % 2 == 0 { step } else { cells.len() - 1 - step };
                let cell = &cells[index];
                let drawn = self.prompts.draw(cell.batch_size, cell.prompt_tokens);
                for turn in 0..measured.len() {
                    let turn = if round % 2 == 0 { turn } else { measured.len() - 1 - turn };
                    if self.args.delay > 0 && round > 0 {
                        std::thread::sleep(Duration::from_secs(self.args.delay as u64));
                    }
                    let Measured { program, trials } = &mut measured[turn];
                    let trial = self.trial(*program, &drawn, round == 0, notices)?;
                    trials[index].extend(trial.filter(|_| round > 0));
                    done += 1;
                    progress.set(done, total);
                }
            }
        }
        Ok(measured)
    }

    fn trial(
        &mut self,
        program: Program,
        prompts: &[Vec<u32>],
        warm_up: bool,
        notices: &mut Notices,
    ) -> Result<Option<Trial>, End> {
        let all = self.args.generation_tokens.get();
        let tokens = if warm_up { all.min(WARM_UP_TOKENS) } else { all };
        let Some(client) = self.server.as_mut().filter(|_| program == Program::Server) else {
            let adapter = self.session.adapter.clone();
            return engine::run(&mut self.session.engine, prompts, tokens, adapter.as_ref(), self.hold)
                .map(Some);
        };
        let text = |ids: &Vec<u32>| self.session.tokenizer.decode(ids);
        let prompts: Vec<Prompt> =
            prompts.iter().map(|ids| Prompt { ids: ids.clone(), text: text(ids) }).collect();
        let done = if warm_up {
            client.warm_up(&prompts, tokens, self.hold).map(|form| {
                if form == Form::Text {
                    notices.add(report::SENT_AS_TEXT);
                }
                None
            })
        } else {
            client.run(&prompts, tokens, self.hold).map(Some)
        };
        if self.hold.is_pressed() {
            return Err(End::Interrupted);
        }
        done.map_err(|error| error.context("--against").into())
    }
}
