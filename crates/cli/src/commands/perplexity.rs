//! `lmx perplexity`: how well a model, or two, predict a text.

use crate::args::adapter::AdapterArgs;
use crate::args::model::{ModelArgs, RunArgs, TemplateArgs};
use crate::args::perplexity::PerplexityArgs;
use crate::data::Data;
use crate::device;
use crate::end::End;
use crate::interrupt::Hold;
use crate::perplexity::plan::{Planned, plan};
use crate::perplexity::report::{Measured, Run};
use crate::progress::Progress;
use crate::report::Notices;
use crate::session::{Concurrency, Reuse, Session, open_options};
use crate::terminal;
use anyhow::anyhow;
use lmx::checkpoint::Checkpoint;
use lmx::eval::{CompareError, Plan, ScoreError, Scorer, compare};
use serde_json::{Map, Value, json};
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::time::Instant;

/// With two models: prompt tokens of a step, each of which has two distributions to hold.
const STEP_OF_TWO: usize = 512;

/// Runs the command.
pub(crate) fn run(args: &PerplexityArgs) -> Result<(), End> {
    let mut notices = Notices::new(false);
    let data = match &args.data.data {
        Some(file) => Data::file(file, args.data.seed)?,
        None => Data::named(args.data.path(), &args.data.split, args.data.seed)?,
    };
    let (model, against) = (args.model_args(), args.against.as_deref().map(named));
    let most = std::iter::once(&model).chain(&against).map(context).collect::<Result<Vec<_>, End>>()?;
    let options = args.protocol.options(most.into_iter().min().unwrap_or(0))?;
    let run_args = shared(args);
    let mut session = open(args, &model, &args.adapter, &run_args, &mut notices)?;
    let against = against.map(|model| open(args, &model, &AdapterArgs::default(), &run_args, &mut notices));
    let against = against.transpose()?;
    let planned = plan(&data, &session, &options)?;
    note_exclusions(&planned, &data, options.samples, &mut notices);
    session.notice_quantization_out_of_reach(options.length, Some(0), &mut notices);
    let mut identities = vec![identity(&session)?];
    let adapter = session.adapter.clone();
    let started = Instant::now();
    let (first, second) = match against {
        None => {
            let mut scorer = Scorer::new(&mut session.engine).with_adapter(adapter);
            let loss = watched(&planned.plan, |progress| scorer.loss(&planned.plan, progress));
            (Measured::new(&args.model, loss.map_err(of_score)?)?, None)
        }
        Some(mut against) => {
            identities.push(identity(&against)?);
            let mut first = Scorer::new(&mut session.engine).with_adapter(adapter);
            let mut second = Scorer::new(&mut against.engine);
            let compared =
                watched(&planned.plan, |progress| compare(&mut first, &mut second, &planned.plan, progress));
            let comparison = compared.map_err(|error| match error {
                CompareError::Stopped => End::Interrupted,
                error => anyhow::Error::new(error).into(),
            })?;
            let [first, second] = comparison.losses.clone();
            let name = args.against.as_deref().unwrap_or_default();
            (Measured::new(&args.model, first)?, Some((Measured::new(name, second)?, comparison)))
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    let (data, planned) = (&data, &planned);
    let notices = notices.lines();
    let run = Run { args, options, data, planned, identities, first, second, seconds, notices };
    if let Some(path) = &args.plot {
        run.plot(path)?;
        terminal::say(&format!("Saved {}", path.display()));
    }
    match args.json {
        true => terminal::print(&format!("{:#}\n", run.json())),
        false => terminal::print(&run.table()),
    }
}

fn named(model: &str) -> ModelArgs {
    ModelArgs { model: Some(model.to_owned()), revision: None, trust_remote_code: false }
}

/// The most tokens that a model reads, which its configuration tells before the weights are read.
fn context(model: &ModelArgs) -> Result<usize, End> {
    let checkpoint = Checkpoint::open(model.name(), &open_options(model)).map_err(anyhow::Error::new)?;
    Ok(checkpoint.describe().map_err(anyhow::Error::new)?.context_length)
}

/// How each of the models runs: two of them share the memory.
fn shared(args: &PerplexityArgs) -> RunArgs {
    let mut run = args.run.clone();
    if args.against.is_some() {
        run.kv_memory = Some(run.kv_memory.unwrap_or_else(device::default_kv_memory) / 2);
        let step = run.prefill_step_size.get().min(STEP_OF_TWO);
        run.prefill_step_size = NonZeroUsize::new(step).unwrap_or(NonZeroUsize::MIN);
    }
    run
}

fn open(
    args: &PerplexityArgs,
    model: &ModelArgs,
    adapter: &AdapterArgs,
    run: &RunArgs,
    notices: &mut Notices,
) -> Result<Session, End> {
    let (template, concurrency) = (TemplateArgs::default(), Concurrency::of(args.batch_size.get()));
    Session::open(model, adapter, run, &template, Reuse::Nothing, concurrency, notices)
}

/// Says what of the data is not in the number.
fn note_exclusions(planned: &Planned, data: &Data, samples: Option<usize>, notices: &mut Notices) {
    if planned.empty > 0 {
        notices.add(format!("{} records without text are left out", planned.empty));
    }
    let all = planned.records + planned.empty == data.len();
    if let Some(samples) = samples.filter(|&samples| all && planned.plan.windows() < samples) {
        let windows = planned.plan.windows();
        notices.add(format!("all of the data makes {windows} windows, not the {samples} of --num-samples"));
    }
}

/// What the model is, in fingerprints.
fn identity(session: &Session) -> anyhow::Result<Map<String, Value>> {
    let identity = session.identity()?;
    let entries =
        identity.entries().map(|(key, value)| (key.trim_start_matches("lmx_").to_owned(), json!(value)));
    let mut fingerprints: Map<String, Value> = entries.collect();
    fingerprints.remove("version");
    let adapter = session.adapter.as_ref().map(|adapter| adapter.name().to_owned());
    let mut map = Map::new();
    map.insert("fingerprints".to_owned(), Value::Object(fingerprints));
    map.insert("adapter".to_owned(), json!(adapter));
    map.insert("kv_format".to_owned(), json!(session.kv_format));
    Ok(map)
}

/// Runs something long that tells how many windows are done, until Ctrl-C.
fn watched<T>(plan: &Plan, run: impl FnOnce(&mut dyn FnMut(usize) -> ControlFlow<()>) -> T) -> T {
    let hold = Hold::new();
    let total = plan.windows() as u64;
    let mut progress = Progress::slow("scoring", total);
    run(&mut |done| {
        progress.set(done as u64, total);
        if hold.is_pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

fn of_score(error: ScoreError) -> End {
    match error {
        ScoreError::Stopped => End::Interrupted,
        error => End::Failed(anyhow!(error)),
    }
}
