//! From a conversation to the ids of a prompt.

use super::error::TokenizerError;
use super::template::{ChatTemplate, RenderOptions, TemplateError};
use super::tokenizer::{Hidden, Tokenizer};
use aho_corasick::{AhoCorasick, AhoCorasickKind};
use hashbrown::{HashMap, HashSet};
use serde_json::Value;
use std::cell::OnceCell;

/// What the texts of control tokens (`<|im_end|>`) mean that stand in messages, tools and documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialContent {
    /// Text like any other: nobody can end his own turn or begin another's. Only the template's own text
    /// yields control tokens.
    Plain,
    /// The tokens themselves, as in transformers.
    Control,
}

/// A prompt made from a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The rendered conversation.
    pub text: String,
    /// Its ids, with exactly one BOS if the tokenizer has one and puts it before texts.
    pub ids: Vec<u32>,
    /// The conversation has a system message that the template leaves out.
    pub system_dropped: bool,
}

/// A conversation that cannot become a prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template refuses or fails.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The conversation does not begin as the one that it is to continue.
    #[error("the chat template begins the conversation otherwise than where it is to go on")]
    Head,
}

impl Tokenizer {
    /// Whether the model comes with a chat template.
    pub fn has_chat_template(&self) -> bool {
        !self.inner.templates.named.is_empty()
    }

    /// The model's own chat template.
    ///
    /// # Errors
    /// If there is none, or it is not Jinja.
    pub fn chat_template(&self) -> Result<ChatTemplate, TemplateError> {
        let thinking = self.thinking_markers().is_some();
        ChatTemplate::from_sources(self.inner.templates.clone(), self.special_tokens(), thinking)
    }

    /// The template that a user gives: the name of one of the model's, or a template itself.
    ///
    /// # Errors
    /// If it is not Jinja.
    pub fn chat_template_given(&self, name_or_source: &str) -> Result<ChatTemplate, TemplateError> {
        let own = self.inner.templates.get(name_or_source);
        let thinking = self.thinking_markers().is_some();
        ChatTemplate::new(own.unwrap_or(name_or_source), self.special_tokens(), thinking)
    }

    /// Renders a conversation and encodes it.
    ///
    /// With [`SpecialContent::Plain`] the ids are those of the same text, but for the control tokens that come
    /// from outside. One exception: thinking and tool call tags in the assistant's own messages stay
    /// tags if the template looks for them, since the model wrote them.
    ///
    /// # Errors
    /// If the template refuses the conversation or the text cannot be encoded.
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        messages: &[Value],
        options: &RenderOptions,
        special: SpecialContent,
    ) -> Result<ChatPrompt, ChatError> {
        let mut prompt = self.encode_rendered(template, messages, options, special, "")?;
        if let Some(bos) = self.bos().filter(|_| self.adds_bos())
            && prompt.ids.first() != Some(&bos)
        {
            prompt.ids.insert(0, bos);
        }
        Ok(prompt)
    }

    /// As [`Tokenizer::encode_chat`], but only what follows `head`, with which the rendered conversation begins,
    /// and without a BOS before it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_chat`]; [`ChatError::Head`] if it begins otherwise.
    pub fn encode_chat_after(
        &self,
        head: &str,
        template: &ChatTemplate,
        messages: &[Value],
        options: &RenderOptions,
        special: SpecialContent,
    ) -> Result<ChatPrompt, ChatError> {
        self.encode_rendered(template, messages, options, special, head)
    }

    fn encode_rendered(
        &self,
        template: &ChatTemplate,
        messages: &[Value],
        options: &RenderOptions,
        special: SpecialContent,
        head: &str,
    ) -> Result<ChatPrompt, ChatError> {
        // Several renderings must show the same time.
        let now = options.now.unwrap_or_else(|| chrono::Local::now().naive_local());
        let options = RenderOptions { now: Some(now), ..options.clone() };
        let text = template.render(messages, &options)?;
        let system_dropped = template.drops_system(messages, &options, &text);
        let guard = Guard::new(self, template, options.tools.is_some());
        let Marked { text, positions } = match special {
            SpecialContent::Control => Marked { text, positions: Vec::new() },
            SpecialContent::Plain => guard.mark(template, messages, &options, text)?,
        };
        let text = text.strip_prefix(head).ok_or(ChatError::Head)?.to_owned();
        let positions: Vec<usize> = positions.iter().filter_map(|at| at.checked_sub(head.len())).collect();
        let hidden = Hidden { positions: &positions, control: &guard.control };
        let hidden = Some(&hidden).filter(|hidden| !hidden.positions.is_empty());
        let mut ids = Vec::new();
        self.encode_into(&text, hidden, &mut ids)?;
        Ok(ChatPrompt { text, ids, system_dropped })
    }
}

/// Tells text that came from outside from the template's own.
///
/// The first character of a control token's text is replaced in all input by a private one, and put back
/// after rendering: where one came out, input stands. Templates look at their input, so the
/// rendering may turn out another; then less is replaced.
struct Guard {
    control: HashSet<u32>,
    /// The texts of the control tokens.
    texts: Vec<String>,
    /// Those that the template may look for in the assistant's messages.
    tags: HashSet<String>,
    /// Finds `texts`; built when first needed, since a vocabulary may have thousands.
    matcher: OnceCell<Option<AhoCorasick>>,
}

/// A text, and the places in it at which a control token's text from outside begins or may begin.
#[derive(Debug, PartialEq)]
struct Marked {
    text: String,
    positions: Vec<usize>,
}

/// How much of the input is replaced.
#[derive(Clone, Copy, PartialEq)]
enum Reach {
    /// Every character with which a control token begins.
    Everywhere,
    /// Only where a control token's text stands or may be completed by what follows.
    Tokens,
    /// As `Tokens`, but not the tags in the assistant's messages.
    TokensButTags,
}

impl Guard {
    fn new(tokenizer: &Tokenizer, template: &ChatTemplate, with_tools: bool) -> Self {
        let source = template.source(with_tools).unwrap_or_default();
        let marker_texts: Vec<String> =
            tokenizer.thinking_markers().into_iter().flat_map(|m| [m.start, m.end]).collect();
        let mut control = tokenizer.inner.control.clone();
        let (mut texts, mut tags) = (Vec::new(), HashSet::new());
        for (id, token) in tokenizer.inner.added.iter() {
            let content = &token.content;
            // Vocabularies also list white space and HTML tags as added tokens: those are text.
            let written = source.contains(content.as_str()) && !content.trim().is_empty();
            let framed = content.starts_with("<|") && content.ends_with("|>");
            if token.special || written || framed || marker_texts.contains(content) {
                control.insert(id);
                texts.push(content.clone());
                if written && !token.special {
                    tags.insert(content.clone());
                }
            }
        }
        Self { control, texts, tags, matcher: OnceCell::new() }
    }

    fn mark(
        &self,
        template: &ChatTemplate,
        messages: &[Value],
        options: &RenderOptions,
        text: String,
    ) -> Result<Marked, ChatError> {
        let firsts: HashSet<char> = self.texts.iter().filter_map(|text| text.chars().next()).collect();
        let mut used = HashSet::new();
        for_each_text(messages, options, &mut |text| used.extend(text.chars()));
        if !firsts.iter().any(|c| used.contains(c)) {
            return Ok(Marked { text, positions: Vec::new() });
        }
        let stand_ins = StandIns::new(&firsts, &used)?;
        for reach in [Reach::Everywhere, Reach::Tokens] {
            let marked = self.render(template, messages, options, reach, &stand_ins);
            if let Ok(marked) = marked
                && marked.text == text
            {
                return Ok(marked);
            }
        }
        Ok(self.render(template, messages, options, Reach::TokensButTags, &stand_ins)?)
    }

    fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Value],
        options: &RenderOptions,
        reach: Reach,
        stand_ins: &StandIns,
    ) -> Result<Marked, TemplateError> {
        let hide = |value: &Value, keep_tags: bool| {
            map_texts(value, &|text| self.hide(text, reach, keep_tags, stand_ins))
        };
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| {
                let assistant = message.get("role").and_then(Value::as_str) == Some("assistant");
                hide(message, assistant && reach == Reach::TokensButTags)
            })
            .collect();
        let list =
            |list: &Option<Vec<Value>>| list.as_ref().map(|l| l.iter().map(|v| hide(v, false)).collect());
        let variables = options.variables.iter();
        let options = RenderOptions {
            tools: list(&options.tools),
            documents: list(&options.documents),
            variables: variables.map(|(name, value)| (name.clone(), hide(value, false))).collect(),
            ..options.clone()
        };
        Ok(stand_ins.put_back(&template.render(&messages, &options)?))
    }

    /// Replaces characters of a text as far as `reach` says.
    fn hide(&self, text: &str, reach: Reach, keep_tags: bool, stand_ins: &StandIns) -> String {
        if reach == Reach::Everywhere {
            return text.chars().map(|c| stand_ins.of(c)).collect();
        }
        // Overlapping ones too: where one is hidden, another that begins inside it would be found.
        let build =
            || AhoCorasick::builder().kind(Some(AhoCorasickKind::ContiguousNFA)).build(&self.texts).ok();
        let matcher = self.matcher.get_or_init(build).iter();
        let found = matcher.flat_map(|matcher| matcher.find_overlapping_iter(text));
        let found = found.filter(|m| !keep_tags || !self.tags.contains(text.get(m.range()).unwrap_or("")));
        let mut starts: HashSet<usize> = found.map(|m| m.start()).collect();
        starts.extend(self.texts.iter().filter_map(|token| unfinished(text, token)));
        let hidden =
            text.char_indices().map(|(at, c)| if starts.contains(&at) { stand_ins.of(c) } else { c });
        hidden.collect()
    }
}

/// Where a text ends in the beginning of `token`.
fn unfinished(text: &str, token: &str) -> Option<usize> {
    let ends = token.char_indices().map(|(end, _)| end).skip(1);
    let longest = ends.filter(|&end| token.get(..end).is_some_and(|head| text.ends_with(head))).last();
    longest.map(|length| text.len() - length)
}

/// Private characters that stand for others during a rendering.
struct StandIns {
    of: HashMap<char, char>,
    back: HashMap<char, char>,
}

impl StandIns {
    fn new(chars: &HashSet<char>, used: &HashSet<char>) -> Result<Self, TokenizerError> {
        let private = ('\u{F0000}'..='\u{FFFFD}').chain('\u{100000}'..='\u{10FFFD}');
        let of: HashMap<char, char> =
            chars.iter().copied().zip(private.filter(|c| !used.contains(c))).collect();
        if of.len() < chars.len() {
            let why = "the conversation uses all private characters of Unicode".to_owned();
            return Err(TokenizerError::Encode { why });
        }
        let back = of.iter().map(|(&c, &private)| (private, c)).collect();
        Ok(Self { of, back })
    }

    fn of(&self, c: char) -> char {
        self.of.get(&c).copied().unwrap_or(c)
    }

    fn put_back(&self, text: &str) -> Marked {
        let mut marked = Marked { text: String::with_capacity(text.len()), positions: Vec::new() };
        for c in text.chars() {
            if let Some(&original) = self.back.get(&c) {
                marked.positions.push(marked.text.len());
                marked.text.push(original);
            } else {
                marked.text.push(c);
            }
        }
        marked
    }
}

/// Calls `f` with every text that comes from outside.
fn for_each_text(messages: &[Value], options: &RenderOptions, f: &mut dyn FnMut(&str)) {
    let lists = [&options.tools, &options.documents].into_iter().flatten().flatten();
    for value in messages.iter().chain(lists).chain(options.variables.values()) {
        visit(value, f);
    }
}

fn visit(value: &Value, f: &mut dyn FnMut(&str)) {
    match value {
        Value::String(text) => f(text),
        Value::Array(list) => list.iter().for_each(|v| visit(v, f)),
        Value::Object(map) => map.iter().for_each(|(key, v)| {
            f(key);
            visit(v, f);
        }),
        _ => {}
    }
}

/// The same value with every text replaced, those of field names too: templates print the names of
/// parameters, and the fields that they ask for by name hold no character that is replaced.
fn map_texts(value: &Value, f: &dyn Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(f(text)),
        Value::Array(list) => list.iter().map(|v| map_texts(v, f)).collect(),
        Value::Object(map) => map.iter().map(|(key, v)| (f(key), map_texts(v, f))).collect(),
        other => other.clone(),
    }
}
