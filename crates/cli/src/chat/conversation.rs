//! The messages of a chat.

use anyhow::Context;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

/// One message, as chat templates and servers know it.
pub(crate) fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// What has been said, and what the model was told before.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    system: Option<String>,
    turns: Vec<Value>,
    /// Files that this conversation was written to: they may be written again.
    saved: BTreeSet<PathBuf>,
}

impl Conversation {
    /// Nothing has been said yet.
    pub(crate) fn new(system: Option<String>) -> Self {
        Self { system, ..Self::default() }
    }

    /// All messages, the system prompt first.
    pub(crate) fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| message("system", text));
        system.chain(self.turns.iter().cloned()).collect()
    }

    /// Changes the system prompt; what was said stays.
    pub(crate) fn set_system(&mut self, text: Option<&str>) {
        self.system = text.map(str::to_owned);
    }

    /// The user says something.
    pub(crate) fn ask(&mut self, text: &str) {
        self.turns.push(message("user", text));
    }

    /// The model replied, perhaps only in part.
    pub(crate) fn answer(&mut self, text: &str) {
        self.turns.push(message("assistant", text));
    }

    /// Takes back a question that got no answer.
    pub(crate) fn take_back(&mut self) {
        self.turns.pop();
    }

    /// Forgets what was said; the system prompt stays.
    pub(crate) fn reset(&mut self) {
        self.turns.clear();
    }

    /// Writes the messages as a JSON array. A file is replaced only if this conversation has written it before.
    pub(crate) fn save(&mut self, path: &Path) -> anyhow::Result<()> {
        let mut text = serde_json::to_string_pretty(&self.messages()).context("cannot write JSON")?;
        text.push('\n');
        if self.saved.contains(path) {
            replace(path, &text)
        } else {
            std::fs::File::create_new(path).and_then(|mut file| file.write_all(text.as_bytes()))
        }
        .with_context(|| format!("cannot save to {}", path.display()))?;
        self.saved.insert(path.to_owned());
        Ok(())
    }
}

/// Writes beside the file, then renames, so that no failure loses what it held.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".part");
    std::fs::write(&beside, text)?;
    std::fs::rename(&beside, path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_saved_file_is_replaced_only_by_its_own_conversation() {
        let dir = tempfile::tempdir().unwrap();
        let (own, other) = (dir.path().join("own.json"), dir.path().join("other.json"));
        std::fs::write(&other, "precious").unwrap();
        let mut conversation = Conversation::new(Some("be brief".into()));
        conversation.ask("hi");
        conversation.save(&own).unwrap();
        conversation.answer("ho");
        conversation.save(&own).unwrap();
        assert!(conversation.save(&other).is_err());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
        let saved: Value = serde_json::from_str(&std::fs::read_to_string(&own).unwrap()).unwrap();
        assert_eq!(
            saved,
            json!([
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "ho"},
            ])
        );
    }

    #[test]
    fn reset_keeps_the_system_prompt() {
        let mut conversation = Conversation::new(Some("a".into()));
        conversation.ask("hi");
        conversation.take_back();
        conversation.ask("ho");
        conversation.answer("hm");
        conversation.reset();
        assert_eq!(conversation.messages(), [message("system", "a")]);
        conversation.set_system(None);
        assert_eq!(conversation.messages(), [Value::Null; 0]);
    }
}
