//! Environment variables: the only place that reads them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The caches of hub models, as `huggingface_hub` finds its one: `HF_HUB_CACHE`, its old name
/// `HUGGINGFACE_HUB_CACHE`, `HF_HOME/hub`, `XDG_CACHE_HOME/huggingface/hub`, `~/.cache/huggingface/hub`.
pub(crate) fn hub_cache() -> Option<PathBuf> {
    hub_cache_from(&variable)
}

/// Where the chat keeps its history: `XDG_STATE_HOME/lmx`, else `~/.local/state/lmx`.
pub(crate) fn state_dir() -> Option<PathBuf> {
    let base = variable("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    base.or_else(|| Some(home(&variable)?.join(".local/state"))).map(|base| base.join("lmx"))
}

/// `LMX_ISA`: the instruction set to use in place of the best one.
pub(crate) fn isa() -> Option<String> {
    variable("LMX_ISA").map(|value| value.to_string_lossy().into_owned())
}

/// A variable that is set to something.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

fn hub_cache_from(get: Lookup) -> Option<PathBuf> {
    let path = |name: &str| get(name).map(|value| expand_home(Path::new(&value), get));
    path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(path("HF_HOME")?.join("hub")))
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(home(get)?.join(".cache/huggingface/hub")))
}

fn home(get: Lookup) -> Option<PathBuf> {
    get("HOME").map(PathBuf::from)
}

/// A leading `~/` as the home folder, which a shell does not expand within quotes.
fn expand_home(path: &Path, get: Lookup) -> PathBuf {
    match (path.strip_prefix("~"), home(get)) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path.to_owned(),
    }
}

/// The key that `lmx server` asks for where the command line names none.
pub(crate) fn api_key() -> Option<String> {
    variable("LMX_API_KEY").map(|value| value.to_string_lossy().into_owned())
}

/// `PATH`: the folders in which programs are looked for.
pub(crate) fn path() -> Vec<PathBuf> {
    variable("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default()
}

/// The key that a server to be measured is given where the command line names none.
pub(crate) fn openai_api_key() -> Option<String> {
    variable("OPENAI_API_KEY").map(|value| value.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(variables: &[(&str, &str)]) -> Option<PathBuf> {
        hub_cache_from(&|name| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
    }

    #[test]
    fn the_hub_cache_is_where_huggingface_hub_keeps_it() {
        let all = [("HF_HUB_CACHE", "/a"), ("HF_HOME", "~/b"), ("XDG_CACHE_HOME", "/c"), ("HOME", "/d")];
        for (skip, path) in
            [(0, "/a"), (1, "/d/b/hub"), (2, "/c/huggingface/hub"), (3, "/d/.cache/huggingface/hub")]
        {
            assert_eq!(cache(&all[skip..]), Some(PathBuf::from(path)));
        }
        assert_eq!(cache(&[]), None);
    }
}
