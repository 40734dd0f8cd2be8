//! `lmx generate`: one prompt, one reply.

use super::{choices, prompts};
use crate::args::generate::{GenerateArgs, GenerateOptions, Prompt};
use crate::args::values::universal_newlines;
use crate::cached;
use crate::chat::conversation::message;
use crate::end::End;
use crate::report::{self, Notices};
use crate::running::{self, Outcome};
use crate::session::{Concurrency, Models, Reuse, Session, Tail, notice_dropped_system};
use crate::terminal::{self, Reply};
use anyhow::{Context, bail};
use lmx::engine::{FinishReason, Request};
use lmx::text::TemplateError;
use std::io::{IsTerminal, Read};

/// The longest prompt that is read from standard input, in bytes.
const PROMPT_BYTES_MAX: u64 = 64 << 20;

/// Replies to one prompt that are made at the same time.
const RUNNING: usize = 32;

/// Runs the command.
pub(crate) fn run(options: &GenerateOptions) -> Result<(), End> {
    let args = &options.args;
    if let Some(file) = &args.prompts.prompts_file {
        return prompts::run(options, file);
    }
    let prompt = match &options.prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Stdin => {
            if std::io::stdin().is_terminal() {
                terminal::say("reading the prompt; end it with Ctrl-D on a line of its own");
            }
            read_prompt(std::io::stdin().lock())?
        }
    };
    let mut notices = Notices::new(args.json);
    let file = args.prompt_cache_file.as_deref().map(|path| cached::open(path, args)).transpose()?;
    let reuse = match &file {
        Some(file) => Reuse::File(file),
        None if args.prefix.dir().is_some() || options.choices.is_some() => Reuse::Prefixes(&args.prefix),
        None => Reuse::Nothing,
    };
    let model = match &file {
        Some(file) => args.model.or(&file.notes().model),
        None => args.model.clone(),
    };
    let models = Models { model: &model, draft: args.speculation.draft_model(), progress: None };
    let concurrency = Concurrency::of(RUNNING);
    let mut session =
        Session::open(models, &args.adapter, &args.run, &args.template, reuse, concurrency, &mut notices)?;
    session.check_speculation(options.speculation)?;
    let tokens = match &file {
        Some(file) => {
            cached::note_late_quantization(file, args, &mut notices);
            cached::prompt_tokens(&session, file, args, &prompt, &mut notices)?
        }
        None => prompt_tokens(&session, args, &prompt, &mut notices)?,
    };
    session.notice_quantization_out_of_reach(tokens.len(), args.max_tokens.0, &mut notices);
    report::filters_without_effect(&options.sampling, &options.processors, &mut notices);
    if let Some(choices) = &options.choices {
        return choices::run(options, choices, &mut session, &tokens, model.name(), notices);
    }
    let request = Request {
        tokens,
        cache: session.cache.take(),
        max_tokens: args.max_tokens.0,
        sampling: session.sampling(&options.sampling),
        processors: options.processors.clone(),
        stop: options.stop.clone(),
        grammar: session.grammar(options.form.as_ref())?,
        seed: args.seed,
        speculation: options.speculation,
        adapter: session.adapter.clone(),
        ..Request::default()
    };
    let mut reply = Reply::default();
    let outcome = running::run(&mut session.engine, request, &mut |text| {
        if args.json { Ok(()) } else { reply.push(text) }
    })?;
    reply.finish()?;
    session.note_prefix_warnings(&mut notices);
    if outcome.finish.is_none() {
        return Err(End::Interrupted);
    }
    if let Some(file) = &file {
        cached::note_reuse(file, outcome.stats.cached_tokens, &mut notices);
    }
    conclude(args, model.name(), &outcome, &session.kv_format, &mut notices)
}

/// What is said after the reply.
fn conclude(
    args: &GenerateArgs,
    model: &str,
    outcome: &Outcome,
    kv_format: &str,
    notices: &mut Notices,
) -> Result<(), End> {
    if outcome.finish == Some(FinishReason::Length) {
        notices.add(report::cut(args.max_tokens, outcome));
    }
    if args.json {
        let object = report::json(outcome, model, kv_format, notices);
        return terminal::print(&format!("{object}\n"));
    }
    if args.verbose {
        report::say_statistics(outcome, notices);
    }
    Ok(())
}

/// All of standard input, with line ends as `\n`.
pub(super) fn read_prompt(input: impl Read) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let read = input.take(PROMPT_BYTES_MAX + 1).read_to_end(&mut bytes);
    read.context("cannot read the prompt from standard input")?;
    if bytes.len() as u64 > PROMPT_BYTES_MAX {
        bail!("the prompt on standard input is longer than {PROMPT_BYTES_MAX} bytes");
    }
    let text = String::from_utf8(bytes).context("the prompt on standard input is not UTF-8")?;
    Ok(universal_newlines(&text))
}

/// The prompt as the model sees it: through its chat template, if it has one and that is not to be ignored.
fn prompt_tokens(
    session: &Session,
    args: &GenerateArgs,
    prompt: &str,
    notices: &mut Notices,
) -> Result<Vec<u32>, End> {
    let template = match &session.template {
        _ if args.ignore_chat_template => Err("the chat template is ignored"),
        Err(TemplateError::None) => {
            notices.add("the model has no chat template: the prompt is continued as plain text");
            Err("the model has no chat template")
        }
        Err(error) => return Err(anyhow::Error::new(error.clone()).into()),
        Ok(template) => Ok(template),
    };
    let template = match template {
        Ok(template) => template,
        Err(why) => return plain_tokens(session, args, prompt, why, notices),
    };
    let system = args.template.system_prompt.iter().map(|text| message("system", text));
    let prefill = args.prefill_response.iter().map(|text| message("assistant", text));
    let messages: Vec<_> = system.chain([message("user", prompt)]).chain(prefill).collect();
    let tail = if args.prefill_response.is_some() { Tail::Open } else { Tail::Reply };
    notices.add_fact(format!("chat template: {}", template.origin()));
    let prompt = session.render(&messages, tail, None)?;
    notice_dropped_system(&prompt, notices);
    Ok(prompt.ids)
}

/// The prompt as it is, with the tokenizer's own frame; `why` there is no template.
fn plain_tokens(
    session: &Session,
    args: &GenerateArgs,
    prompt: &str,
    why: &str,
    notices: &mut Notices,
) -> Result<Vec<u32>, End> {
    for (flag, given) in [
        ("--system-prompt", args.template.system_prompt.is_some()),
        ("--prefill-response", args.prefill_response.is_some()),
        ("--chat-template-config", args.template.chat_template_config.is_some()),
    ] {
        if given {
            notices.add(format!("{flag} has no effect: {why}"));
        }
    }
    Ok(session.tokenizer.encode(prompt, true).map_err(anyhow::Error::new)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_on_standard_input() {
        assert_eq!(read_prompt(&b"a\r\nb\\n\r\n"[..]).ok().as_deref(), Some("a\nb\\n\n"));
        assert!(read_prompt(&b"\xff"[..]).is_err());
        assert!(read_prompt(std::io::repeat(b'x')).is_err());
    }
}
