//! Tiny models for tests of the program: written in code, so that nothing need be fetched or stored.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

pub mod model;
pub mod server;

use std::io::Write;
use std::process::{Command, Stdio};

/// What a run of the program left.
#[derive(Debug)]
pub struct Outcome {
    pub stdout: String,
    pub stderr: String,
    /// The exit code; `None` if a signal ended it.
    pub code: Option<i32>,
}

impl Outcome {
    /// Asserts that the run failed with `code`, one error line that holds all of `says`, and no other output.
    #[track_caller]
    pub fn assert_error(&self, code: i32, says: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        for part in says {
            assert!(self.stderr.contains(part), "{part:?} is not in {self:?}");
        }
    }

    /// Asserts exit code 0 and returns standard output.
    #[track_caller]
    pub fn assert_ok(&self) -> &str {
        assert_eq!(self.code, Some(0), "{self:?}");
        &self.stdout
    }
}

/// The program with `words`, in an environment of its own.
pub fn lmx(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lmx"));
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in ["LMX_ISA", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_STATE_HOME", "COLUMNS"] {
        command.env_remove(name);
    }
    command.env("HF_HUB_CACHE", "/nonexistent/hub").env("RUST_BACKTRACE", "1");
    command
}

/// Runs the program to its end.
pub fn run(words: &[&str]) -> Outcome {
    outcome(&mut lmx(words), b"")
}

/// Runs the program to its end with `stdin`.
pub fn run_with_input(words: &[&str], stdin: &[u8]) -> Outcome {
    outcome(lmx(words).stdin(Stdio::piped()), stdin)
}

/// Runs `command` to its end with `stdin`, if that is a pipe.
pub fn outcome(command: &mut Command, stdin: &[u8]) -> Outcome {
    let mut child = command.spawn().unwrap();
    if let Some(mut pipe) = child.stdin.take() {
        // A program that fails early need not read all of it.
        let _ = pipe.write_all(stdin);
    }
    let output = child.wait_with_output().unwrap();
    Outcome {
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        code: output.status.code(),
    }
}

/// Sends what Ctrl-C sends.
pub fn interrupt(child: &std::process::Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}
