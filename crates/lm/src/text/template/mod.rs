//! Chat templates: Jinja, rendered byte for byte as transformers renders them.

mod engine;
mod error;
mod filters;
mod json;
mod messages;
mod python;
mod sources;
mod variables;

pub use error::TemplateError;
pub(crate) use sources::TemplateSources;

use super::special::SpecialTokens;
use minijinja::Environment;
use serde_json::{Map, Value, json};
use sources::DEFAULT;
use std::collections::HashMap;
use variables::Variables;

/// What a rendering may be told besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Ends the text with the head of an assistant's message.
    pub add_generation_prompt: bool,
    /// Leaves the last message open, so that the model goes on with it.
    pub continue_final_message: bool,
    /// Tools that the model may call, as JSON schemas.
    pub tools: Option<Vec<Value>>,
    /// Documents with `title` and `text` to answer from.
    pub documents: Option<Vec<Value>>,
    /// Further variables for the template; they win over the special tokens.
    pub variables: Map<String, Value>,
    /// The time that `strftime_now` tells; without it the local time.
    pub now: Option<chrono::NaiveDateTime>,
}

/// The variable with which most templates of models that think turn that on and off.
pub const THINKING: &str = "enable_thinking";
/// What a rendering sets itself.
const SET: [&str; 3] = ["messages", "tools", "add_generation_prompt"];
/// The functions of a rendering beside those of the environment.
const FUNCTIONS: [&str; 2] = ["strftime_now", "loop"];

/// A model's chat template, or its several ones.
pub struct ChatTemplate {
    environment: Environment<'static>,
    sources: TemplateSources,
    special: SpecialTokens,
    /// Of each template, by its name.
    variables: HashMap<String, Variables>,
    /// What `enable_thinking` is when the caller does not say: whether the model thinks.
    thinking: bool,
}

impl ChatTemplate {
    /// A template given as text.
    ///
    /// # Errors
    /// If it is not Jinja.
    pub fn new(source: &str, special: &SpecialTokens, thinking: bool) -> Result<Self, TemplateError> {
        Self::from_sources(TemplateSources::single(source, "given"), special, thinking)
    }

    pub(crate) fn from_sources(
        sources: TemplateSources,
        special: &SpecialTokens,
        thinking: bool,
    ) -> Result<Self, TemplateError> {
        if let Some(kind) = sources.by_code {
            return Err(TemplateError::ByCode { kind });
        }
        if sources.named.is_empty() {
            return Err(TemplateError::None);
        }
        let mut environment = engine::environment()?;
        let mut variables = HashMap::new();
        for (name, source) in &sources.named {
            let added = environment.add_template_owned(name.clone(), engine::prepare(source));
            added.map_err(|error| TemplateError::from_engine(&error))?;
            variables.insert(name.clone(), Variables::of(source));
        }
        Ok(Self { environment, sources, special: special.clone(), variables, thinking })
    }

    /// The text of the template that is used without (or with) tools.
    pub fn source(&self, with_tools: bool) -> Option<&str> {
        self.sources.get(self.choose(with_tools).ok()?)
    }

    /// Where it comes from: a file, a metadata key, or `given`.
    pub fn origin(&self) -> &str {
        &self.sources.origin
    }

    /// Whether the template that is used without (or with) tools looks at a variable of the rendering.
    pub fn reads(&self, variable: &str, with_tools: bool) -> bool {
        self.variables_of(with_tools).is_some_and(|variables| variables.reads(variable))
    }

    fn variables_of(&self, with_tools: bool) -> Option<&Variables> {
        self.variables.get(self.choose(with_tools).ok()?)
    }

    /// Refuses variables (of [`RenderOptions::variables`]) that would be left out without a word: those that a
    /// rendering sets itself, and those that the template that is used without (or with) tools does not look at. Nobody
    /// looks at `enable_thinking` where it is what the model does anyway.
    ///
    /// # Errors
    /// [`TemplateError::Variable`] names the first.
    pub fn check_variables(
        &self,
        variables: &Map<String, Value>,
        with_tools: bool,
    ) -> Result<(), TemplateError> {
        let Some(known) = self.variables_of(with_tools) else { return Ok(()) };
        let granted = |name: &str, value: &Value| name == THINKING && *value == self.thinking;
        let unread = |(name, value): &(&String, &Value)| {
            let idle = SET.contains(&name.as_str()) || !(known.reads(name) || granted(name, value));
            idle && !value.is_null()
        };
        let Some((name, _)) = variables.iter().find(unread) else { return Ok(()) };
        let special = |name: &&str| self.special.iter().any(|(role, _)| role == *name);
        let function = |name: &&str| self.environment.globals().any(|(global, _)| global == *name);
        let inner =
            |name: &&str| SET.contains(name) || FUNCTIONS.contains(name) || special(name) || function(name);
        let read: Vec<&str> = known.outer().into_iter().filter(|name| !inner(name)).collect();
        let read = if read.is_empty() { "none".to_owned() } else { read.join(", ") };
        Err(TemplateError::Variable { name: name.clone(), read })
    }

    /// As transformers: `tool_use` if there are tools and such a template, else `default`.
    fn choose(&self, with_tools: bool) -> Result<&str, TemplateError> {
        let has = |name: &str| self.sources.get(name).is_some();
        if with_tools && has("tool_use") {
            return Ok("tool_use");
        }
        if has(DEFAULT) {
            return Ok(DEFAULT);
        }
        let names: Vec<&str> = self.sources.named.iter().map(|(name, _)| name.as_str()).collect();
        Err(TemplateError::NoDefault { names: names.join(", ") })
    }

    /// The conversation as one text.
    ///
    /// # Errors
    /// If the template refuses or fails, or a message is not an object.
    pub fn render(&self, messages: &[Value], options: &RenderOptions) -> Result<String, TemplateError> {
        let name = self.choose(options.tools.is_some())?;
        let mut messages = messages::normalize(messages)?;
        let tag = if options.continue_final_message {
            let source = self.sources.get(name).unwrap_or_default();
            Some(messages::mark_end(&mut messages, options.add_generation_prompt, source)?)
        } else {
            None
        };
        let text = self.render_with(name, &messages, options)?;
        match tag {
            Some(final_text) => messages::cut_at_mark(text, &final_text),
            None => Ok(text),
        }
    }

    /// Whether the conversation has a system message of which nothing shows in the rendered `text`.
    pub(crate) fn drops_system(&self, messages: &[Value], options: &RenderOptions, text: &str) -> bool {
        // A text that templates do not change, wherever they put it.
        const PROBE: &str = "SystemPromptProbe";
        let is_system = |m: &&Value| m.get("role").and_then(Value::as_str) == Some("system");
        let shown = |message: &Value| {
            let texts = messages::texts(message);
            texts.is_empty() || texts.iter().any(|t| text.contains(python::trim(t)))
        };
        if messages.iter().filter(is_system).all(shown) {
            return false;
        }
        let probe = |message: &Value| match is_system(&message) {
            true => messages::with_text(message, PROBE),
            false => message.clone(),
        };
        let probed: Vec<Value> = messages.iter().map(probe).collect();
        !self.render(&probed, options).is_ok_and(|text| text.contains(PROBE))
    }

    fn render_with(
        &self,
        name: &str,
        messages: &[Value],
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let mut context: Map<String, Value> =
            self.special.iter().map(|(role, text)| (role.to_owned(), text.into())).collect();
        context.insert(THINKING.to_owned(), self.thinking.into());
        context.insert("documents".to_owned(), Value::Null);
        context.extend(options.variables.clone());
        context.insert("messages".to_owned(), messages.into());
        context.insert("tools".to_owned(), json!(options.tools));
        context.extend(options.documents.clone().map(|list| ("documents".to_owned(), list.into())));
        context.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        let now = options.now.unwrap_or_else(|| chrono::Local::now().naive_local());
        let strftime = minijinja::Value::from_function(move |format: &str| engine::strftime(now, format));
        let functions = minijinja::context! { strftime_now => strftime };
        let context =
            minijinja::context! { ..functions, ..minijinja::Value::from(minijinja::value::Serde(&context)) };
        let failed = |error| TemplateError::from_engine(&error);
        let template = self.environment.get_template(name).map_err(failed)?;
        let mut out = Limited::default();
        template.render_captured_to(context, &mut out).map_err(failed)?;
        String::from_utf8(out.bytes).map_err(|_| TemplateError::TooLong)
    }
}

/// Collects output up to the limit.
#[derive(Default)]
struct Limited {
    bytes: Vec<u8>,
}

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > engine::OUTPUT_BYTES_MAX {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
