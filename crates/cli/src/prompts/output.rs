//! The replies of a prompts file: in order, each written once, also after the program was killed.

use crate::end::End;
use crate::terminal;
use anyhow::{Context, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::Path;

/// Where the replies go.
#[derive(Debug)]
pub(crate) struct Output {
    /// `None` is standard output.
    file: Option<(File, String)>,
    /// The index of the reply that is written next.
    next: usize,
    /// Replies that came before their turn.
    early: BTreeMap<usize, Value>,
}

impl Output {
    /// Standard output.
    pub(crate) fn stdout() -> Self {
        Self { file: None, next: 0, early: BTreeMap::new() }
    }

    /// A file. What an earlier run left in it stays, but for a last line that was cut; `expected` gives the id of
    /// the request with an index, and must agree.
    ///
    /// # Errors
    /// If the file holds anything but the first replies of these requests by `model`.
    pub(crate) fn file(
        path: &Path,
        model: &str,
        expected: &mut dyn FnMut(usize) -> anyhow::Result<Option<Value>>,
    ) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.with_context(|| format!("cannot open {name}"))?;
        let (mut next, mut good) = (0, 0);
        let mut reader = BufReader::new(&file);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).with_context(|| format!("cannot read {name}"))? > 0 {
            if line.last() != Some(&b'\n') {
                break;
            }
            let reply: Value = serde_json::from_slice(&line).unwrap_or_default();
            let id = expected(next)?;
            let same = reply["index"] == next
                && reply.get("model").is_none_or(|written| written == model)
                && id.as_ref() == reply.get("id").filter(|id| !id.is_null());
            if !same {
                bail!(
                    "{name} line {} is not the reply to request {next} by {model}: it was not written for these \
                     prompts (name another --output, or remove it)",
                    next + 1
                );
            }
            good += line.len() as u64;
            next += 1;
            line.clear();
        }
        let cut = file.set_len(good).and_then(|()| file.seek(SeekFrom::End(0)));
        cut.with_context(|| format!("cannot write {name}"))?;
        Ok(Self { file: Some((file, name)), next, early: BTreeMap::new() })
    }

    /// Replies that are written, which is the index of the first that is not.
    pub(crate) fn written(&self) -> usize {
        self.next
    }

    /// Writes the reply with an index as soon as all before it are written.
    pub(crate) fn put(&mut self, index: usize, reply: Value) -> Result<(), End> {
        self.early.insert(index, reply);
        while let Some(reply) = self.early.remove(&self.next) {
            let line = format!("{reply}\n");
            match &mut self.file {
                None => terminal::print(&line)?,
                // One write a line: whatever ends the program, at most the last line is cut.
                Some((file, name)) => {
                    file.write_all(line.as_bytes()).with_context(|| format!("cannot write {name}"))?;
                }
            }
            self.next += 1;
        }
        Ok(())
    }
}
