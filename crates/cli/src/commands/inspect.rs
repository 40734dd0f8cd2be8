//! `lmx inspect`: what a model is and what it will need, without loading its weights.

use crate::args::inspect::InspectArgs;
use crate::args::model::refused;
use crate::chat::conversation::message;
use crate::device;
use crate::end::{End, single_line};
use crate::report::gigabytes;
use crate::session::open_options;
use crate::terminal;
use anyhow::Context;
use lmx::cache::Census;
use lmx::inspect::{Architecture, LayerInfo, Memory, Opened, RopeInfo};
use lmx::text::{ChatTemplate, RenderOptions, SpecialContent, TemplateError};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// What is said of a model.
struct Inspection {
    architecture: Architecture,
    bos: Option<u32>,
    eos: Vec<EosToken>,
    template: Option<Sample>,
    thinking: Option<(String, String)>,
    tool_parser: Option<String>,
    flags_without_effect: Vec<&'static str>,
    memory: Memory,
    /// What a sequence of that length holds of keys and values.
    census: Census,
    isa: String,
    notices: Vec<String>,
}

struct EosToken {
    id: u32,
    text: String,
    source: String,
}

/// A short conversation as the chat template renders it.
struct Sample {
    source: String,
    text: String,
    ids: Vec<u32>,
    /// The template leaves the system prompt out.
    system_dropped: bool,
}

/// Runs the command.
pub(crate) fn run(args: &InspectArgs) -> Result<(), End> {
    args.kv_quant.quantization()?;
    let model = Opened::open(args.model.name(), &open_options(&args.model)).map_err(anyhow::Error::new)?;
    let inspection = Inspection::of(&model, args)?;
    if args.json {
        let object = inspection.json()?;
        return terminal::print(&format!("{object:#}\n"));
    }
    terminal::print(&inspection.table(args.model.name()))
}

impl Inspection {
    fn of(model: &Opened, args: &InspectArgs) -> Result<Self, End> {
        let kv = model.kv_spec(device::kv_type(args.kv_dtype, model.kv_type));
        let kv = match args.kv_quant.quantization()? {
            Some(how) => kv.quantized(how).map_err(|error| refused(&error))?,
            None => kv,
        };
        let architecture = Architecture::of(model, &kv).map_err(anyhow::Error::new)?;
        let context = args.context.map_or(architecture.context_length, |n| n.get());
        let memory = Memory::forecast(model, &kv, context, args.prefill_step_size.get());
        let eos = model.eos.iter().map(|(id, source)| EosToken {
            id,
            text: model.tokenizer.decode(&[id]),
            source: source.to_string(),
        });
        let mut notices = model.checkpoint.notices();
        if context > architecture.context_length {
            notices.push(format!("--context {context} exceeds the model's context"));
        }
        if let Some(how) = kv.quantization.filter(|how| how.start() >= context) {
            notices.push(format!(
                "--kv-bits has no effect on {context} tokens: keys and values are quantized from position {} on \
                (--quantized-kv-start)",
                how.start()
            ));
        }
        let sample = match model.tokenizer.chat_template() {
            Ok(template) => Some(Sample::of(model, &template, &mut notices)?),
            Err(TemplateError::None) => None,
            Err(error) => {
                notices.push(error.to_string());
                None
            }
        };
        Ok(Self {
            bos: model.tokenizer.bos().filter(|_| model.tokenizer.adds_bos()),
            eos: eos.collect(),
            thinking: model.tokenizer.thinking_markers().map(|markers| (markers.start, markers.end)),
            tool_parser: model.tokenizer.tool_format().map(|format| format.name().to_owned()),
            flags_without_effect: flags_without_effect(sample.as_ref()),
            template: sample,
            memory: memory.map_err(anyhow::Error::new)?,
            census: kv.census(context),
            isa: device::isa()?.to_string(),
            architecture,
            notices,
        })
    }
}

/// What the sample's system message says.
const SYSTEM: &str = "You are a helpful assistant.";

impl Sample {
    fn of(model: &Opened, template: &ChatTemplate, notices: &mut Vec<String>) -> Result<Self, End> {
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let (system, user) = (message("system", SYSTEM), message("user", "Hello"));
        let encode = |messages: &[Value]| {
            model.tokenizer.encode_chat(template, messages, &options, SpecialContent::Plain)
        };
        let prompt = encode(&[system, user.clone()]).or_else(|error| {
            notices.push(format!("a system prompt is refused: {error}"));
            encode(&[user])
        });
        let prompt = prompt.context("the sample conversation").map_err(End::Failed)?;
        let source = template.origin().to_owned();
        Ok(Self { source, text: prompt.text, ids: prompt.ids, system_dropped: prompt.system_dropped })
    }
}

/// Flags of generate and chat that cannot change anything for this model.
fn flags_without_effect(sample: Option<&Sample>) -> Vec<&'static str> {
    let of_template: &[&str] = match sample {
        None => {
            &["--system-prompt", "--prefill-response", "--chat-template-config", "--ignore-chat-template"]
        }
        Some(Sample { system_dropped: false, .. }) => &["--use-default-chat-template"],
        Some(_) => &["--use-default-chat-template", "--system-prompt"],
    };
    [of_template, &["--trust-remote-code", "--pipeline"]].concat()
}

impl Inspection {
    fn json(&self) -> Result<Value, End> {
        let value =
            |result: serde_json::Result<Value>| result.context("cannot write JSON").map_err(End::Failed);
        let mut object = match value(serde_json::to_value(&self.architecture))? {
            Value::Object(object) => object,
            other => Map::from_iter([("architecture".to_owned(), other)]),
        };
        let eos = |e: &EosToken| json!({"id": e.id, "text": e.text, "source": e.source});
        let sample = |s: &Sample| json!({"source": s.source, "text": s.text, "ids": s.ids});
        let markers = |(start, end): &(String, String)| json!({"start": start, "end": end});
        let rest = json!({
            "bos": self.bos,
            "eos": self.eos.iter().map(eos).collect::<Vec<_>>(),
            "template": self.template.as_ref().map(sample),
            "thinking": self.thinking.as_ref().map(markers),
            "tool_parser": self.tool_parser,
            "flags_without_effect": self.flags_without_effect,
            "memory": value(serde_json::to_value(&self.memory))?,
            "isa": self.isa,
            "notices": self.notices,
        });
        object.extend(rest.as_object().cloned().unwrap_or_default());
        Ok(Value::Object(object))
    }

    /// For people: a line for each thing.
    fn table(&self, name: &str) -> String {
        let (architecture, memory) = (&self.architecture, &self.memory);
        let eos: Vec<String> =
            self.eos.iter().map(|e| format!("{} {:?} ({})", e.id, e.text, e.source)).collect();
        let none = || "none".to_owned();
        let mut rows = vec![
            ("model", format!("{name} ({})", architecture.model_type)),
            (
                "parameters",
                format!(
                    "{:.1} million, {:.2} bits per weight",
                    architecture.parameters as f64 / 1e6,
                    architecture.bits_per_weight
                ),
            ),
            ("context", format!("{} tokens", architecture.context_length)),
            ("positions", list(architecture.rope.iter().map(rope))),
            ("layers", layers(&architecture.layers)),
            ("cache", cache(&architecture.layers)),
            ("bos", self.bos.map_or_else(none, |id| id.to_string())),
            ("end of reply", list(eos)),
            ("thinking", self.thinking.as_ref().map_or_else(none, |(start, end)| format!("{start} … {end}"))),
            ("tool calls", self.tool_parser.clone().unwrap_or_else(none)),
            ("no effect", self.flags_without_effect.join(" ")),
            (
                "memory",
                format!(
                    "{:.2} GB for {} tokens: weights {:.2}, cache {:.2}, activations {:.2}, program {:.2}",
                    gigabytes(memory.total_bytes),
                    memory.context,
                    gigabytes(memory.weights_bytes),
                    gigabytes(memory.kv_bytes),
                    gigabytes(memory.activations_bytes),
                    gigabytes(memory.program_bytes)
                ),
            ),
            ("kernels", self.isa.clone()),
        ];
        let census = self.census.to_string();
        let at = rows.iter().position(|(title, _)| *title == "cache").map_or(rows.len(), |at| at + 1);
        rows.splice(at..at, census.lines().map(|line| ("", line.to_owned())));
        rows.extend(self.notices.iter().map(|notice| ("note", notice.clone())));
        match &self.template {
            None => rows.push(("template", none())),
            Some(sample) => {
                rows.push((
                    "template",
                    format!("{}; a sample of {} tokens:", sample.source, sample.ids.len()),
                ));
                rows.extend(sample.text.lines().map(|line| ("", line.to_owned())));
            }
        }
        let mut table = String::new();
        for (title, text) in rows {
            let line = single_line(&format!("{title:<14}{text}"));
            table.push_str(line.trim_end());
            table.push('\n');
        }
        table
    }
}

fn list(items: impl IntoIterator<Item = String>) -> String {
    let items: Vec<String> = items.into_iter().collect();
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

fn rope(rope: &RopeInfo) -> String {
    let mut text = format!("rope {} (base {}, {} dimensions", rope.kind, rope.base, rope.dims);
    if let Some(factor) = rope.factor {
        let _ = write!(text, ", factor {factor}");
    }
    if let Some(context) = rope.original_context {
        let _ = write!(text, ", from {context} tokens");
    }
    text + ")"
}

fn cache(layers: &[LayerInfo]) -> String {
    let bytes = |grows: bool| -> usize {
        layers.iter().filter(|l| l.window.is_none() == grows).map(|l| l.bytes_per_token).sum()
    };
    let mut text = match (bytes(true), bytes(false)) {
        (full, 0) => format!("{full} bytes per token"),
        (full, window) => format!("{full} bytes per token, and {window} more until the windows are full"),
    };
    match layers.iter().map(|layer| layer.state_bytes).sum::<usize>() {
        0 => {}
        state => {
            let _ = write!(text, "; {state} bytes of state, and as many for each snapshot of it");
        }
    }
    text
}

/// The kinds of layers in order of first appearance, with how many there are.
fn layers(layers: &[LayerInfo]) -> String {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for layer in layers {
        let heads = format!("{} x {} key/value heads", layer.kv_heads, layer.head_dim);
        let mut kind = match (layer.kind, layer.window) {
            ("conv", _) => "with a short convolution".to_owned(),
            ("chunk", Some(size)) => format!("in chunks of {size} ({heads})"),
            (_, Some(window)) => format!("with a window of {window} ({heads})"),
            (_, None) => format!("full ({heads})"),
        };
        if layer.kind != "conv" && layer.state_bytes > 0 {
            kind += " with convolutions of k and v";
        }
        if layer.experts > 0 {
            let _ = write!(kind, " with {} experts", layer.experts);
        }
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    list(kinds.into_iter().map(|(kind, count)| format!("{count} {kind}")))
}
