//! `lmx cache-prompt`: the keys and values of a prompt's beginning, in a file.

use super::generate::read_prompt;
use crate::args::cache_prompt::CachePromptArgs;
use crate::args::model::{ModelArgs, PrefixArgs, refused};
use crate::chat::conversation::message;
use crate::end::End;
use crate::report::{self, Notices};
use crate::running;
use crate::session::{Concurrency, Reuse, Session, Tail, open_options};
use crate::terminal;
use anyhow::anyhow;
use lmx::KvType;
use lmx::cache::KvSpec;
use lmx::checkpoint::Checkpoint;
use lmx::engine::Request;
use lmx::prompt_cache::Notes;
use lmx::text::TemplateError;

/// That files have a place for what this model's cache is, which its configuration tells.
fn check_savable(args: &CachePromptArgs, model: &ModelArgs) -> Result<(), End> {
    let checkpoint = Checkpoint::open(model.name(), &open_options(model)).map_err(anyhow::Error::new)?;
    let config = checkpoint.describe().map_err(anyhow::Error::new)?;
    // Files have a place for any float type.
    let spec = KvSpec::new(&config.layer_kv(), KvType::F32).with_states(config.states());
    let spec = args.run.kv_window()?.into_iter().fold(spec, KvSpec::bounded);
    lmx::prompt_cache::check_savable(&spec).map_err(anyhow::Error::new)?;
    let Some(how) = args.run.kv_quant.quantization()? else { return Ok(()) };
    let spec = spec.quantized(how).map_err(|error| refused(&error))?;
    lmx::prompt_cache::check_savable(&spec).map_err(|error| End::Usage(format!("--kv-bits: {error}")))
}

/// Runs the command.
pub(crate) fn run(args: &CachePromptArgs) -> Result<(), End> {
    let prompt = match args.prompt.as_str() {
        "-" => read_prompt(std::io::stdin().lock())?,
        text => text.to_owned(),
    };
    let mut notices = Notices::new(false);
    let (model, template) = (args.model_args(), args.template_args());
    check_savable(args, &model)?;
    let prefixes = PrefixArgs::default();
    let mut session = Session::open(
        &model,
        &args.adapter,
        &args.run,
        &template,
        Reuse::Prefixes(&prefixes),
        Concurrency::of(1),
        &mut notices,
    )?;
    let messages = vec![message("user", &prompt)];
    let tokens = match &session.template {
        // The text ends where the user's does, so that it can go on.
        Ok(_) => session.render(&messages, Tail::Open, None)?.ids,
        Err(TemplateError::None) => {
            notices.add("the model has no chat template: the prompt is cached as plain text");
            session.tokenizer.encode(&prompt, true).map_err(anyhow::Error::new)?
        }
        Err(error) => return Err(anyhow::Error::new(error.clone()).into()),
    };
    session.notice_quantization_out_of_reach(tokens.len(), Some(0), &mut notices);
    let identity = session.identity()?;
    let request = Request { adapter: session.adapter.clone(), ..Request::new(tokens.clone(), 0) };
    let outcome = running::run(&mut session.engine, request, &mut |_| Ok(()))?;
    if outcome.finish.is_none() {
        return Err(End::Interrupted);
    }
    let adapter = session.adapter.as_ref();
    let cache = session.engine.prompt_cache(&tokens, adapter).map_err(anyhow::Error::new)?;
    if cache.len() < tokens.len() {
        let (held, all) = (cache.len(), tokens.len());
        return Err(anyhow!("--kv-memory holds {held} of the prompt's {all} tokens only").into());
    }
    let eos_token = args.eos_token.clone();
    let notes =
        Notes { model: args.model.clone(), eos_token, messages: Some(messages), identity: Some(identity) };
    cache.save(&args.prompt_cache_file, &notes).map_err(anyhow::Error::new)?;
    terminal::say(&format!("Processed {} tokens", tokens.len()));
    terminal::say(&format!("Peak memory: {:.3} GB", report::gigabytes(report::peak_memory())));
    terminal::say(&format!("Saved {}", args.prompt_cache_file.display()));
    cache.to_string().lines().for_each(|line| terminal::say(&format!("  {line}")));
    Ok(())
}
