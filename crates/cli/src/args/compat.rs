//! Where Python's argparse and clap read a command line differently, or speak differently of an error in it.

use std::ffi::OsString;

/// Rewrites what argparse accepts and clap does not:
/// * `-qa`, a short flag of two letters;
/// * a value that begins with a dash but holds a blank (`--prompt "- one"`), which argparse takes as a value.
pub(super) fn as_clap_reads(words: Vec<OsString>) -> Vec<OsString> {
    let mut read: Vec<OsString> = Vec::with_capacity(words.len());
    for word in words {
        match (read.last_mut(), word.to_str()) {
            (Some(flag), Some(text)) if is_dashed_text(text) && takes_value(flag) => {
                flag.push("=");
                flag.push(&word);
            }
            (_, Some("-qa")) => read.push("--quantize-activations".into()),
            _ => read.push(word),
        }
    }
    read
}

fn is_dashed_text(word: &str) -> bool {
    // `--flag=some text` is a flag; what has a blank before any `=` cannot be one.
    word.starts_with('-') && word.split('=').next().is_some_and(|name| name.contains(char::is_whitespace))
}

fn takes_value(flag: &OsString) -> bool {
    flag.to_str().is_some_and(|f| f.starts_with('-') && f.len() > 1 && !f.contains('=') && f != "--")
}

/// clap's message as one line: what is wrong, and a hint if it has one.
pub(super) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let mut parts: Vec<String> = Vec::new();
    for line in text.lines().map(str::trim) {
        let line = line.strip_prefix("error: ").unwrap_or(line);
        let line = line.strip_prefix("tip: ").unwrap_or(line);
        if line.starts_with("Usage:") || line.starts_with("For more information") {
            break;
        }
        if !line.is_empty() {
            parts.push(line.to_owned());
        }
    }
    join(&parts)
}

/// Joins with semicolons, but keeps what belongs to a line ending in a colon behind it.
fn join(parts: &[String]) -> String {
    let mut joined = String::new();
    for part in parts {
        if joined.ends_with(':') || part.starts_with('[') {
            joined.push(' ');
        } else if !joined.is_empty() {
            joined.push_str("; ");
        }
        joined.push_str(part);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Vec<String> {
        let words = words.iter().map(OsString::from).collect();
        as_clap_reads(words).into_iter().filter_map(|w| w.into_string().ok()).collect()
    }

    #[test]
    fn rewrites_only_what_argparse_takes_as_a_value() {
        assert_eq!(read(&["--prompt", "- one\n- two"]), ["--prompt=- one\n- two"]);
        assert_eq!(read(&["-p", "--a b"]), ["-p=--a b"]);
        assert_eq!(read(&["--prompt", "-"]), ["--prompt", "-"]);
        assert_eq!(read(&["--prompt=x", "--system-prompt=a b"]), ["--prompt=x", "--system-prompt=a b"]);
        assert_eq!(read(&["--prompt", "--system-prompt=a b"]), ["--prompt", "--system-prompt=a b"]);
        assert_eq!(read(&["generate", "-qa"]), ["generate", "--quantize-activations"]);
    }
}
