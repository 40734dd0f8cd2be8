//! A tokenizer from the files of a model folder.

use super::added::AddedTokens;
use super::decoder::{Decoder, KNOWN_DECODERS};
use super::error::TokenizerError;
use super::parts;
use super::post::{self, Surround};
use super::reply::ToolFormat;
use super::special::{TokenConfig, TokenTable};
use super::template::TemplateSources;
use super::tokenizer::{Model, Parts, Tokenizer};
use super::tokenizer_json::{ModelJson, TokenizerJson, VocabJson};
use super::vocab::{TOKEN_ID_LIMIT, Vocab};
use serde_json::{Map, Value};
use std::path::Path;
use tokenizers::models::unigram::Unigram;
use tokenizers::{NormalizedString, Normalizer as _, normalizers::NormalizerWrapper};

/// The largest tokenizer files in use have 35 MB.
const FILE_BYTES_MAX: u64 = 1 << 28;
const TOKENIZER_JSON: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";

/// The contents of a folder's tokenizer files.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// tokenizer.json.
    pub tokenizer: Vec<u8>,
    /// tokenizer_config.json.
    pub config: Option<Vec<u8>>,
    /// special_tokens_map.json.
    pub special_tokens_map: Option<Vec<u8>>,
    /// chat_template.jinja.
    pub chat_template: Option<String>,
    /// The templates of additional_chat_templates/, by name.
    pub additional_templates: Vec<(String, String)>,
}

impl TokenizerFiles {
    /// Reads the files of a folder.
    ///
    /// # Errors
    /// If tokenizer.json is missing or a file cannot be read.
    pub fn read(folder: &Path) -> Result<Self, TokenizerError> {
        let read = |name: &str| read_if_there(&folder.join(name));
        let path = folder.join(TOKENIZER_JSON);
        let missing =
            || TokenizerError::Read { path: path.clone(), source: std::io::ErrorKind::NotFound.into() };
        let mut files = Self {
            tokenizer: read_if_there(&path)?.ok_or_else(missing)?,
            config: read(CONFIG)?,
            special_tokens_map: read("special_tokens_map.json")?,
            chat_template: read("chat_template.jinja")?
                .map(|b| text(b, "chat_template.jinja"))
                .transpose()?,
            additional_templates: Vec::new(),
        };
        let extra = folder.join("additional_chat_templates");
        let Ok(entries) = std::fs::read_dir(&extra) else { return Ok(files) };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
            if path.extension().is_some_and(|e| e == "jinja")
                && let Some(bytes) = read_if_there(&path)?
            {
                let source = text(bytes, &path.display().to_string())?;
                files.additional_templates.push((name, source));
            }
        }
        files.additional_templates.sort();
        Ok(files)
    }
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    let failed = |source| TokenizerError::Read { path: path.to_owned(), source };
    let bytes = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
        Ok(metadata) => metadata.len(),
    };
    if bytes > FILE_BYTES_MAX {
        let file = path.display().to_string();
        return Err(TokenizerError::TooLarge { file, bytes, limit: FILE_BYTES_MAX });
    }
    std::fs::read(path).map(Some).map_err(failed)
}

fn text(bytes: Vec<u8>, file: &str) -> Result<String, TokenizerError> {
    let parse = |error: std::string::FromUtf8Error| TokenizerError::Parse {
        file: file.to_owned(),
        why: error.utf8_error().to_string(),
    };
    String::from_utf8(bytes).map_err(parse)
}

fn json<'a, T: serde::Deserialize<'a>>(file: &str, bytes: &'a [u8]) -> Result<T, TokenizerError> {
    let parse = |why: String| TokenizerError::Parse { file: file.to_owned(), why };
    // Checking UTF-8 once is faster than once for every string.
    let text = std::str::from_utf8(bytes).map_err(|error| parse(error.to_string()))?;
    serde_json::from_str(text).map_err(|error| parse(error.to_string()))
}

impl Tokenizer {
    /// Reads tokenizer.json and the files beside it.
    ///
    /// # Errors
    /// If a file is missing or damaged, or the tokenizer is of a kind that lmx does not know.
    pub fn from_folder(folder: &Path) -> Result<Self, TokenizerError> {
        Self::from_files(&TokenizerFiles::read(folder)?)
    }

    /// As [`from_folder`](Self::from_folder), from the contents of the files.
    ///
    /// # Errors
    /// See [`from_folder`](Self::from_folder).
    pub fn from_files(files: &TokenizerFiles) -> Result<Self, TokenizerError> {
        let config: Map<String, Value> =
            files.config.as_deref().map_or_else(|| Ok(Map::new()), |bytes| json(CONFIG, bytes))?;
        let map = files.special_tokens_map.as_deref();
        let map: Option<Map<String, Value>> =
            map.map(|bytes| json("special_tokens_map.json", bytes)).transpose()?;
        let token_config = TokenConfig::read(&config, map.as_ref())?;
        let templates =
            TemplateSources::read(&config, files.chat_template.as_deref(), &files.additional_templates)?;
        let mut file: TokenizerJson = json(TOKENIZER_JSON, &files.tokenizer)?;
        let normalizer = parts::normalizer(TOKENIZER_JSON, &file.normalizer)?;
        let unknown = |field: &str, known: &str| {
            let field = field.to_owned();
            let known = known.to_owned();
            move |value: String| TokenizerError::unknown(TOKENIZER_JSON, &field, value, known)
        };
        let surround =
            Surround::from_json(&file.post_processor).map_err(unknown("post_processor.type", post::KNOWN))?;
        let decoder = Decoder::from_json(&file.decoder).map_err(unknown("decoder.type", KNOWN_DECODERS))?;
        let (vocab, scores) = take_vocab(&mut file.model)?;
        let added = added_tokens(&file, &vocab, &token_config, normalizer.as_ref())?;
        let model = model(&file.model, &vocab, scores, &added)?;
        let control = added.iter().filter(|(_, t)| t.special).map(|(id, _)| id).collect();
        Ok(Self::new(Parts {
            pre_tokenizer: parts::pre_tokenizer(TOKENIZER_JSON, &file.pre_tokenizer)?,
            tool_format: tool_format(&config)?,
            special: token_config.special,
            extra_eos: Vec::new(),
            vocab,
            model,
            added,
            normalizer,
            surround,
            decoder,
            control,
            templates,
        }))
    }
}

fn tool_format(config: &Map<String, Value>) -> Result<Option<ToolFormat>, TokenizerError> {
    let Some(value) = config.get("tool_parser_type").filter(|v| !v.is_null()) else { return Ok(None) };
    match value.as_str().and_then(ToolFormat::from_name) {
        Some(format) => Ok(Some(format)),
        None => {
            let known = ToolFormat::ALL.map(ToolFormat::name).join(", ");
            Err(TokenizerError::unknown(CONFIG, "tool_parser_type", value, known))
        }
    }
}

/// Texts with their scores, in the order of their ids.
type Pieces = Vec<(String, f64)>;

fn take_vocab(model: &mut ModelJson) -> Result<(Vocab, Option<Pieces>), TokenizerError> {
    match std::mem::replace(&mut model.vocab, VocabJson::Scores(Vec::new())) {
        VocabJson::Ids(vocab) => Ok((vocab, None)),
        VocabJson::Scores(pieces) => {
            let mut vocab = Vocab::new();
            for (id, (piece, _)) in pieces.iter().enumerate() {
                vocab
                    .insert(piece, id as u64)
                    .map_err(|error| TokenizerError::invalid(TOKENIZER_JSON, "model.vocab", id, error))?;
            }
            Ok((vocab, Some(pieces)))
        }
    }
}

fn added_tokens(
    file: &TokenizerJson,
    vocab: &Vocab,
    config: &TokenConfig,
    normalizer: Option<&NormalizerWrapper>,
) -> Result<AddedTokens, TokenizerError> {
    let vocab_id = |token: &str| vocab.id(token);
    let mut table = TokenTable::new(&vocab_id);
    let in_range = |origin: &str, id: u64| match u32::try_from(id) {
        Ok(id) if id < TOKEN_ID_LIMIT => Ok(id),
        _ => {
            let why = format!("ids must be below {TOKEN_ID_LIMIT}");
            Err(TokenizerError::invalid(origin, "added token id", id, why))
        }
    };
    for entry in &file.added_tokens {
        let missing = || TokenizerError::invalid(TOKENIZER_JSON, "added_tokens", &entry.content, "has no id");
        table.add(in_range(TOKENIZER_JSON, entry.id.ok_or_else(missing)?)?, entry.clone().into_token());
    }
    for (id, token) in &config.added {
        table.add(in_range(CONFIG, *id)?, token.clone());
    }
    for (text, flags) in &config.named {
        table.mark_special(text, flags.clone());
    }
    let normalize = |text: &str| {
        let mut text = NormalizedString::from(text);
        normalizer?.normalize(&mut text).ok()?;
        Some(text.get().to_owned())
    };
    let failed = |error| TokenizerError::invalid(TOKENIZER_JSON, "added_tokens", "", error);
    AddedTokens::new(table.tokens, normalize).map_err(failed)
}

fn model(
    model: &ModelJson,
    vocab: &Vocab,
    scores: Option<Pieces>,
    added: &AddedTokens,
) -> Result<Model, TokenizerError> {
    let invalid =
        |field: &str, value: String, why: String| TokenizerError::invalid(TOKENIZER_JSON, field, value, why);
    match (model.kind(), scores) {
        ("BPE", None) => {
            let bpe = model.bpe(vocab, |token| added.id(token));
            Ok(Model::Bpe(bpe.map_err(|(field, value, why)| invalid(field, value, why))?))
        }
        ("WordLevel", None) => {
            Ok(Model::WordLevel { unk: model.unk_token.as_deref().and_then(|unk| vocab.id(unk)) })
        }
        ("Unigram", Some(pieces)) => {
            let bad = pieces.iter().find(|(piece, score)| piece.is_empty() || !score.is_finite());
            if let Some((piece, score)) = bad {
                let why = "pieces must not be empty and scores must be finite".to_owned();
                return Err(invalid("model.vocab", format!("[{piece:?}, {score}]"), why));
            }
            let unigram = Unigram::from(pieces, model.unk_id, model.byte_fallback);
            let failed = |e: tokenizers::Error| invalid("model", "Unigram".to_owned(), e.to_string());
            Ok(Model::Unigram(Box::new(unigram.map_err(failed)?)))
        }
        (kind @ ("BPE" | "WordLevel" | "Unigram"), _) => {
            Err(invalid("model.vocab", kind.to_owned(), "is not of the form for this model".to_owned()))
        }
        (kind, _) => {
            Err(TokenizerError::unknown(TOKENIZER_JSON, "model.type", kind, "BPE, Unigram, WordLevel"))
        }
    }
}
