//! From records to the windows that are scored.

use crate::args::perplexity::{Bos, ProtocolName, ProtocolOptions};
use crate::data::{Data, Record};
use crate::end::End;
use crate::session::Session;
use anyhow::anyhow;
use lmx::eval::{Plan, Protocol, numpy_permutation};
use lmx::text::{RenderOptions, SpecialContent, Tokenizer};

/// What is scored, and how it was chosen.
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    /// Records whose tokens were taken.
    pub(crate) records: usize,
    /// Records without text, which were left out.
    pub(crate) empty: usize,
    /// The token before every window, if there is one.
    pub(crate) prefix: Option<u32>,
}

/// Records as tokens.
struct Reader<'a> {
    data: &'a Data,
    session: &'a Session,
    /// Whether the tokenizer puts around texts what it does.
    special: bool,
    records: usize,
    empty: usize,
}

impl Reader<'_> {
    /// The tokens of a record, none if it has no text. Behind a text stands `end`, unless it ends so.
    fn tokens(&mut self, index: usize, end: Option<u32>) -> anyhow::Result<Vec<u32>> {
        let tokenizer = &self.session.tokenizer;
        let tokens = match self.data.record(index)? {
            Record::Text(text) if text.trim().is_empty() => Vec::new(),
            Record::Text(text) => {
                let mut ids = encode(tokenizer, &text, self.special)?;
                ids.extend(end.filter(|end| ids.last() != Some(end)));
                ids
            }
            Record::Chat { messages, .. } if messages.is_empty() => Vec::new(),
            Record::Chat { messages, tools } => {
                let template = self.session.template.as_ref().map_err(Clone::clone)?;
                let options = RenderOptions { tools, ..RenderOptions::default() };
                // As in mlx-lm: texts of control tokens are those tokens, and BOS is where the template has it.
                let control = SpecialContent::Control;
                tokenizer.encode_chat_after("", template, &messages, &options, control)?.ids
            }
        };
        self.records += usize::from(!tokens.is_empty());
        self.empty += usize::from(tokens.is_empty());
        Ok(tokens)
    }
}

/// The tokens of a text, without what the tokenizer puts behind it.
fn encode(tokenizer: &Tokenizer, text: &str, special: bool) -> anyhow::Result<Vec<u32>> {
    let mut ids = tokenizer.encode(text, false)?;
    let bos = tokenizer.bos().filter(|_| special && tokenizer.adds_bos());
    ids.splice(0..0, bos.filter(|bos| ids.first() != Some(bos)));
    Ok(ids)
}

/// Cuts what the options want of the data into windows.
///
/// # Errors
/// Records that cannot be read, and too few tokens for a single window.
pub(crate) fn plan(data: &Data, session: &Session, options: &ProtocolOptions) -> Result<Planned, End> {
    let special = options.bos != Bos::Never;
    let mut reader = Reader { data, session, special, records: 0, empty: 0 };
    let protocol = match options.name {
        ProtocolName::Windows => Protocol::Windows { length: options.length },
        ProtocolName::Strided => Protocol::Strided { length: options.length, stride: options.stride },
        ProtocolName::Documents => {
            let context = options.length + 1 - options.stride;
            Protocol::Documents { max_length: options.length, context }
        }
    };
    let tokenizer = &*session.tokenizer;
    let begin = tokenizer.bos().or_else(|| tokenizer.eos());
    let no_prefix = || anyhow!("--bos always: the tokenizer has neither a BOS nor an EOS token");
    let mut texts = match options.name {
        ProtocolName::Windows => vec![rows(&mut reader, options)?],
        ProtocolName::Strided => vec![joined(&mut reader)?],
        ProtocolName::Documents => documents(&mut reader, options)?,
    };
    if options.name == ProtocolName::Documents && special {
        let begin = begin.ok_or_else(|| {
            anyhow!("the tokenizer has neither BOS nor EOS to begin a text with: --bos never")
        })?;
        texts.iter_mut().filter(|ids| ids.first() != Some(&begin)).for_each(|ids| ids.insert(0, begin));
    }
    let prefix = (options.bos == Bos::Always).then(|| begin.ok_or_else(no_prefix)).transpose()?;
    let tokens: usize = texts.iter().map(Vec::len).sum();
    let mut plan = Plan::new(tokenizer, texts, protocol, prefix);
    if options.name != ProtocolName::Documents {
        plan.truncate(options.samples.unwrap_or(usize::MAX));
    }
    if plan.windows() == 0 {
        let needed = if options.name == ProtocolName::Windows { options.length } else { 2 };
        let all = data.len();
        return Err(anyhow!(
            "{}: its {all} records have {tokens} tokens, and a window needs {needed} (--sequence-length)",
            data.source
        )
        .into());
    }
    Ok(Planned { plan, records: reader.records, empty: reader.empty, prefix })
}

/// mlx-lm's stream: shuffled records, each text with EOS behind it, until there are enough tokens.
fn rows(reader: &mut Reader<'_>, options: &ProtocolOptions) -> anyhow::Result<Vec<u32>> {
    let enough = options.samples.map_or(usize::MAX, |samples| samples.saturating_mul(options.length));
    let (eos, mut stream) = (reader.session.tokenizer.eos(), Vec::new());
    for index in order(reader.data) {
        if stream.len() >= enough {
            break;
        }
        stream.extend(reader.tokens(index, eos)?);
    }
    stream.truncate(enough);
    Ok(stream)
}

/// The first records of the shuffled order.
fn documents(reader: &mut Reader<'_>, options: &ProtocolOptions) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut texts = Vec::new();
    for index in order(reader.data) {
        if texts.len() >= options.samples.unwrap_or(usize::MAX) {
            break;
        }
        texts.extend(Some(reader.tokens(index, None)?).filter(|tokens| !tokens.is_empty()));
    }
    Ok(texts)
}

/// All records in the order of the file: texts with an empty line between them, conversations one after the other.
fn joined(reader: &mut Reader<'_>) -> anyhow::Result<Vec<u32>> {
    let (mut text, mut stream) = (String::new(), Vec::new());
    for index in 0..reader.data.len() {
        match reader.data.record(index)? {
            Record::Text(part) if part.trim().is_empty() => reader.empty += 1,
            Record::Text(part) => {
                reader.records += 1;
                text.push_str(if text.is_empty() { "" } else { "\n\n" });
                text.push_str(&part);
            }
            Record::Chat { .. } => stream.extend(reader.tokens(index, None)?),
        }
    }
    if !text.is_empty() {
        stream.extend(encode(&reader.session.tokenizer, &text, reader.special)?);
    }
    Ok(stream)
}

/// The seed's order of the records.
fn order(data: &Data) -> Vec<usize> {
    numpy_permutation(data.seed, data.len())
}
