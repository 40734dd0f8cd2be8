//! Adapters by name: opened before the model is loaded, and loaded once each.

use crate::args::adapter::AdapterArgs;
use crate::end::End;
use crate::env;
use crate::report::Notices;
use lmx::checkpoint::OpenOptions;
use lmx::models::Model;
use lmx::{Adapter, AdapterError, AdapterFiles};
use std::collections::BTreeMap;

/// Adapters that are kept for requests to come; those of requests that run are kept by these.
const KEPT_MAX: usize = 16;

/// Opens the adapter of `--adapter-path`, so that what is wrong with it is said before the model is loaded.
///
/// # Errors
/// Whatever is wrong with its files.
pub(crate) fn open(args: &AdapterArgs) -> Result<Option<AdapterFiles>, End> {
    Ok(args.adapter_path.as_deref().map(files).transpose().map_err(anyhow::Error::new)?)
}

fn files(name: &str) -> Result<AdapterFiles, AdapterError> {
    let hub_cache_dirs = env::hub_cache().into_iter().collect();
    AdapterFiles::open(name, &OpenOptions { revision: None, hub_cache_dirs })
}

/// Says which adapter a reply was made with.
pub(crate) fn note(adapter: &Adapter, notices: &mut Notices) {
    notices.add_fact(format!("adapter {}: {adapter}", adapter.name()));
}

/// The adapters of the lines of a prompts file.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    loaded: BTreeMap<String, Adapter>,
}

impl Adapters {
    /// The adapter of this name, from its files if it is not there yet.
    pub(crate) fn load(&mut self, name: &str, model: &dyn Model) -> anyhow::Result<Adapter> {
        if let Some(adapter) = self.loaded.get(name) {
            return Ok(adapter.clone());
        }
        let adapter = files(name)?.fit(model)?;
        if self.loaded.len() >= KEPT_MAX {
            self.loaded.clear();
        }
        self.loaded.insert(name.to_owned(), adapter.clone());
        Ok(adapter)
    }
}
