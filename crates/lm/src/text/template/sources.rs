//! Where chat templates come from, and which one counts.

use crate::text::error::TokenizerError;
use serde_json::Value;

/// The templates of a model: one without a name, or several with names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TemplateSources {
    /// (name, source); a single template is called `default`.
    pub(crate) named: Vec<(String, String)>,
    /// The file or metadata key they come from.
    pub(crate) origin: String,
    /// `chat_template_type`: the prompt is made by code of mlx-lm's, not by a template.
    pub(crate) by_code: Option<String>,
}

pub(crate) const DEFAULT: &str = "default";

impl TemplateSources {
    /// Template files win over the configuration, as in transformers.
    pub(crate) fn read(
        config: &serde_json::Map<String, Value>,
        file: Option<&str>,
        additional: &[(String, String)],
    ) -> Result<Self, TokenizerError> {
        let mut this = Self {
            by_code: config.get("chat_template_type").and_then(Value::as_str).map(str::to_owned),
            ..Self::default()
        };
        if file.is_some() || !additional.is_empty() {
            this.named.extend(file.map(|source| (DEFAULT.to_owned(), source.to_owned())));
            this.named.extend_from_slice(additional);
            this.origin =
                if file.is_some() { "chat_template.jinja" } else { "additional_chat_templates" }.to_owned();
        } else if let Some(value) = config.get("chat_template").filter(|v| !v.is_null()) {
            this.named = from_config(value)?;
            this.origin = "tokenizer_config.json".to_owned();
        }
        Ok(this)
    }

    /// A single template.
    pub(crate) fn single(source: &str, origin: &str) -> Self {
        let named = vec![(DEFAULT.to_owned(), source.to_owned())];
        Self { named, origin: origin.to_owned(), by_code: None }
    }

    /// The default template, or any.
    pub(crate) fn get_any(&self) -> Option<&str> {
        self.get(DEFAULT).or_else(|| self.named.first().map(|(_, source)| source.as_str()))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().rev().find(|(n, _)| n == name).map(|(_, source)| source.as_str())
    }
}

fn from_config(value: &Value) -> Result<Vec<(String, String)>, TokenizerError> {
    let bad = |why| TokenizerError::invalid("tokenizer_config.json", "chat_template", "", why);
    match value {
        Value::String(source) => Ok(vec![(DEFAULT.to_owned(), source.clone())]),
        Value::Array(list) => {
            let text = |entry: &Value, key| entry.get(key).and_then(Value::as_str).map(str::to_owned);
            let pair = |entry: &Value| Some((text(entry, "name")?, text(entry, "template")?));
            let pairs: Option<Vec<_>> = list.iter().map(pair).collect();
            pairs.ok_or_else(|| bad("each entry of the list must have a name and a template"))
        }
        _ => Err(bad("must be a template or a list of named templates")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a test may stop at the first surprise
    use super::*;
    use serde_json::json;

    fn config(value: Value) -> serde_json::Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn files_win_over_the_configuration() {
        let config = config(json!({"chat_template": "C"}));
        let from_config = TemplateSources::read(&config, None, &[]).unwrap();
        assert_eq!(
            (from_config.get("default"), from_config.origin.as_str()),
            (Some("C"), "tokenizer_config.json")
        );
        let from_file = TemplateSources::read(&config, Some("F"), &[]).unwrap();
        assert_eq!((from_file.get("default"), from_file.origin.as_str()), (Some("F"), "chat_template.jinja"));
        let extra = [("rag".to_owned(), "R".to_owned())];
        let only_extra = TemplateSources::read(&config, None, &extra).unwrap();
        assert_eq!((only_extra.get("default"), only_extra.get("rag")), (None, Some("R")));
    }

    #[test]
    fn lists_have_names() {
        let list = json!({"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]});
        let sources = TemplateSources::read(&config(list), None, &[]).unwrap();
        assert_eq!((sources.get("default"), sources.get("tool_use")), (Some("D"), Some("T")));
        for bad in [json!(7), json!([{"name": "x"}]), json!(["x"])] {
            assert!(TemplateSources::read(&config(json!({"chat_template": bad})), None, &[]).is_err());
        }
        assert_eq!(TemplateSources::read(&config(json!({})), None, &[]).unwrap(), TemplateSources::default());
    }
}
