//! What a tokenizer puts around a text: usually BOS before, sometimes EOS after.

use serde_json::Value;

/// Ids before and after an encoded text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Surround {
    pub(crate) before: Vec<u32>,
    pub(crate) after: Vec<u32>,
}

/// The kinds of post-processor that can be read.
pub(crate) const KNOWN: &str = "BertProcessing, ByteLevel, RobertaProcessing, Sequence, TemplateProcessing";

impl Surround {
    /// Reads the `post_processor` of a tokenizer.json; the error says what is not known.
    pub(crate) fn from_json(value: &Value) -> Result<Self, String> {
        let mut surround = Self::default();
        if !value.is_null() {
            surround.wrap(value)?;
        }
        Ok(surround)
    }

    fn wrap(&mut self, value: &Value) -> Result<(), String> {
        match value.get("type").and_then(Value::as_str).unwrap_or("without type") {
            // Changes only the offsets of tokens.
            "ByteLevel" => Ok(()),
            "Sequence" => {
                let list = value.get("processors").and_then(Value::as_array);
                list.ok_or("Sequence without processors")?.iter().try_for_each(|v| self.wrap(v))
            }
            "TemplateProcessing" => self.wrap_in_template(value),
            "BertProcessing" | "RobertaProcessing" => {
                let id = |key: &str| {
                    let id = value.pointer(&format!("/{key}/1")).and_then(token_id);
                    id.ok_or_else(|| format!("{key} without a token id"))
                };
                self.before.insert(0, id("cls")?);
                self.after.push(id("sep")?);
                Ok(())
            }
            kind => Err(kind.to_owned()),
        }
    }

    fn wrap_in_template(&mut self, value: &Value) -> Result<(), String> {
        let single = value.get("single").and_then(Value::as_array);
        let (mut before, mut after, mut sequences) = (Vec::new(), Vec::new(), 0);
        for part in single.ok_or("TemplateProcessing without single")? {
            if part.get("Sequence").is_some() {
                sequences += 1;
                continue;
            }
            let name = part.pointer("/SpecialToken/id").and_then(Value::as_str).unwrap_or_default();
            let ids = value.get("special_tokens").and_then(|t| t.get(name)).and_then(|t| t.get("ids"));
            let ids: Option<Vec<u32>> =
                ids.and_then(Value::as_array).and_then(|ids| ids.iter().map(token_id).collect());
            let ids =
                ids.ok_or_else(|| format!("TemplateProcessing with special token {name:?} without ids"))?;
            if sequences == 0 { before.extend(ids) } else { after.extend(ids) }
        }
        if sequences != 1 {
            return Err(format!("TemplateProcessing that holds the text {sequences} times"));
        }
        before.append(&mut self.before);
        self.before = before;
        self.after.append(&mut after);
        Ok(())
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reads_the_processors_of_language_models() {
        let template = json!({"type": "Sequence", "processors": [{"type": "ByteLevel"},
            {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                        {"SpecialToken": {"id": "</s>", "type_id": 0}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [7]}, "</s>": {"id": "</s>", "ids": [8, 9]}}}]});
        let want = Surround { before: vec![7], after: vec![8, 9] };
        assert_eq!(Surround::from_json(&template), Ok(want));
        let roberta = json!({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]});
        let want = Surround { before: vec![0], after: vec![2] };
        assert_eq!(Surround::from_json(&roberta), Ok(want));
        assert_eq!(Surround::from_json(&Value::Null), Ok(Surround::default()));
    }

    #[test]
    fn names_what_it_cannot_read() {
        for bad in [
            json!({"type": "Nonsense"}),
            json!({"type": "Sequence"}),
            json!({"type": "TemplateProcessing", "single": []}),
            json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]}),
            json!({"type": "BertProcessing", "sep": ["</s>", -1], "cls": ["<s>", 0]}),
        ] {
            assert!(Surround::from_json(&bad).is_err(), "{bad}");
        }
    }
}
