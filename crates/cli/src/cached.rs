//! `--prompt-cache-file`: which flags agree with the file, and the prompt that goes on from it.

use crate::args::generate::GenerateArgs;
use crate::args::model::KvDtype;
use crate::chat::conversation::message;
use crate::device;
use crate::end::End;
use crate::report::Notices;
use crate::session::{Session, Tail};
use anyhow::anyhow;
use lmx::prompt_cache::PromptCacheFile;
use serde_json::Value;
use std::path::Path;

/// Stands for the prompt where only what comes before it is wanted.
const QUERY: &str = "<query>";

/// Opens the file and checks the flags that were given against it, before the model is loaded.
///
/// # Errors
/// What is wrong with the file, or [`End::Usage`] naming a flag and both values.
pub(crate) fn open(path: &Path, args: &GenerateArgs) -> Result<PromptCacheFile, End> {
    let file = PromptCacheFile::open(path).map_err(anyhow::Error::new)?;
    let conflict = |flag: &str, given: &str, has: &str| {
        Err(End::Usage(format!("{flag} is {given}, but {} was made with {has}", path.display())))
    };
    let own = file.kv_type();
    let asked = device::kv_type(args.run.kv_dtype, own);
    if args.run.kv_dtype != KvDtype::Auto && asked != own {
        return conflict("--kv-dtype", device::name(asked), device::name(own));
    }
    if let Some(how) = file.quantization()
        && let Some((flag, given, has)) = args.run.kv_quant.conflict(how)
    {
        return conflict(flag, &given.to_string(), &has.to_string());
    }
    if let Some(window) = args.run.kv_window()?
        && !file.windows().contains(&window)
    {
        let has: Vec<String> = file.windows().iter().map(ToString::to_string).collect();
        let has = if has.is_empty() { "no bound".to_owned() } else { has.join(", ") };
        return conflict("--max-kv-size", &format!("a {window} positions"), &has);
    }
    let (made_with, given) = (&file.notes().model, args.model.model.as_deref());
    // Where the weights can be compared, a name does not matter.
    if file.notes().identity.is_none()
        && let Some(given) = given
        && given != made_with
    {
        return conflict("--model", given, made_with);
    }
    if given.is_none() && made_with.is_empty() {
        let path = path.display();
        return Err(End::Usage(format!("{path} does not name its model: give --model")));
    }
    Ok(file)
}

/// The request's tokens: of a file that says which messages it holds, the whole prompt; else what follows the cached
/// tokens.
///
/// # Errors
/// The chat template's.
pub(crate) fn prompt_tokens(
    session: &Session,
    file: &PromptCacheFile,
    args: &GenerateArgs,
    prompt: &str,
    notices: &mut Notices,
) -> Result<Vec<u32>, End> {
    let template = session.template.as_ref().ok().filter(|_| !args.ignore_chat_template);
    let prefill = args.prefill_response.iter().map(|text| message("assistant", text));
    let tail = if args.prefill_response.is_some() { Tail::Open } else { Tail::Reply };
    match (file.notes().messages.as_deref().filter(|_| file.tokens().is_some()), template) {
        (Some(messages), Some(_)) => {
            let messages: Vec<Value> = longer(messages, prompt).into_iter().chain(prefill).collect();
            Ok(session.render(&messages, tail, None)?.ids)
        }
        (Some(messages), None) => {
            let text: String = longer(messages, prompt).iter().filter_map(content).collect();
            Ok(session.tokenizer.encode(&text, true).map_err(anyhow::Error::new)?)
        }
        (None, template) => {
            notices.add(format!(
                "{} does not say which tokens it holds: its {} tokens are used unverified",
                file.path().display(),
                file.token_count()
            ));
            let Some(_) = template else {
                return Ok(session.tokenizer.encode(prompt, false).map_err(anyhow::Error::new)?);
            };
            let before = session.render(&[message("user", QUERY)], Tail::Reply, None)?.text;
            let at = before.find(QUERY).ok_or_else(|| anyhow!("the chat template leaves the prompt out"))?;
            let messages: Vec<Value> = [message("user", prompt)].into_iter().chain(prefill).collect();
            Ok(session.render_after(&before[..at], &messages, tail)?.ids)
        }
    }
}

/// The messages, the last of which goes on with `prompt`.
fn longer(messages: &[Value], prompt: &str) -> Vec<Value> {
    let mut messages = messages.to_vec();
    if let Some(last) = messages.last_mut() {
        let text = format!("{}{prompt}", content(last).unwrap_or_default());
        *last = message("user", &text);
    }
    messages
}

fn content(message: &Value) -> Option<&str> {
    message.get("content").and_then(Value::as_str)
}

/// Says so where `--kv-bits` acts on a file of floats from a position on that the file has passed.
pub(crate) fn note_late_quantization(file: &PromptCacheFile, args: &GenerateArgs, notices: &mut Notices) {
    let asked = args.run.kv_quant.quantization().ok().flatten().filter(|_| file.quantization().is_none());
    if let Some(how) = asked.filter(|how| how.start() < file.token_count()) {
        notices.add(format!(
            "the {} tokens of {} were run over floats: those from position {} on would have read --kv-bits {} otherwise",
            file.token_count(),
            file.path().display(),
            how.start(),
            how.bits()
        ));
    }
}

/// Says how much of a file was of use.
pub(crate) fn note_reuse(file: &PromptCacheFile, cached_tokens: usize, notices: &mut Notices) {
    let Some(known) = file.tokens() else { return };
    let (all, path) = (known.len(), file.path().display());
    match all - cached_tokens.min(all) {
        0 => notices.add_fact(format!("all {all} tokens of {path} are reused")),
        rest => notices
            .add(format!("{cached_tokens} of the {all} tokens of {path} are reused; {rest} are run again")),
    }
}
