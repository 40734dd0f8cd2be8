//! The harness's process, and the socket on which it asks.

use super::protocol::Ask;
use crate::end::End;
use crate::interrupt::Hold;
use anyhow::{Context, anyhow};
use lmx::sample::random_seed;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DRIVER: &str = include_str!("driver.py");
/// How long the process may take to ask its first question: importing the harness may take a minute on a slow disk.
const START: Duration = Duration::from_secs(300);
/// How often it is looked whether the user or the process has given up.
const TICK: Duration = Duration::from_millis(100);

/// A running harness; killed when dropped.
#[derive(Debug)]
pub(crate) struct Harness {
    child: Child,
    stream: BufReader<TcpStream>,
    key: String,
}

impl Harness {
    /// Starts `python` and waits until it has connected.
    ///
    /// # Errors
    /// No such program, or it ends at once; [`End::Interrupted`].
    pub(crate) fn start(python: &Path, hold: &Hold) -> Result<Self, End> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on loopback")?;
        listener.set_nonblocking(true).context("cannot listen on loopback")?;
        let address = listener.local_addr().context("cannot listen on loopback")?;
        let key = format!("{:016x}{:016x}", random_seed(), random_seed());
        let mut child = Command::new(python)
            .arg("-")
            .env("LMX_ENDPOINT", format!("{} {} {key}", address.ip(), address.port()))
            .stdin(Stdio::piped())
            // Standard output is for the table.
            .stdout(std::io::stderr())
            .spawn()
            .with_context(|| format!("cannot run {} (--python)", python.display()))?;
        let written = child.stdin.take().map(|mut stdin| stdin.write_all(DRIVER.as_bytes()));
        let connected = match written {
            Some(Ok(())) => connection(&listener, &mut child, hold),
            _ => Err(anyhow!("{} reads no program (--python)", python.display()).into()),
        };
        match connected {
            Ok(stream) => Ok(Self { child, stream: BufReader::new(stream), key }),
            Err(end) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(end)
            }
        }
    }

    /// Whether this is the key that the process was given.
    pub(crate) fn knows(&self, key: &str) -> bool {
        self.key == key
    }

    /// The next question.
    ///
    /// # Errors
    /// If the process ends instead, or asks what there is no answer to; [`End::Interrupted`].
    pub(crate) fn next(&mut self, hold: &Hold) -> Result<Ask, End> {
        let mut line = Vec::new();
        loop {
            if hold.is_pressed() {
                return Err(End::Interrupted);
            }
            // A time-out leaves what has come so far in the line.
            match self.stream.read_until(b'\n', &mut line) {
                Ok(0) => return Err(ended(&mut self.child).into()),
                Ok(_) if line.ends_with(b"\n") => break,
                Ok(_) => {}
                Err(error) if is_time_out(&error) => {}
                Err(error) => return Err(anyhow!(error).context("the harness's connection broke").into()),
            }
        }
        Ok(serde_json::from_slice(&line).context("the harness asks what lmx cannot answer")?)
    }

    /// Answers the question.
    ///
    /// # Errors
    /// If the process has gone.
    pub(crate) fn answer(&mut self, result: Result<Value, String>) -> anyhow::Result<()> {
        let answer = match result {
            Ok(result) => json!({"result": result}),
            Err(error) => json!({"error": error}),
        };
        let written = self.stream.get_mut().write_all(format!("{answer}\n").as_bytes());
        written.context("the harness's connection broke")
    }

    /// Waits for the end of the process, which has nothing more to ask.
    ///
    /// # Errors
    /// If it ends badly.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        let status = self.child.wait().context("the harness's end cannot be awaited")?;
        if status.success() { Ok(()) } else { Err(anyhow!("the harness ended with {status}")) }
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connection(listener: &TcpListener, child: &mut Child, hold: &Hold) -> Result<TcpStream, End> {
    let begin = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                let ready = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(TICK)));
                ready.context("the harness's connection broke")?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(anyhow!(error).context("cannot listen on loopback").into()),
        }
        if hold.is_pressed() {
            return Err(End::Interrupted);
        }
        if child.try_wait().is_ok_and(|status| status.is_some()) {
            return Err(ended(child).into());
        }
        if begin.elapsed() > START {
            return Err(anyhow!("the harness did not start within {} s", START.as_secs()).into());
        }
        std::thread::sleep(TICK);
    }
}

fn ended(child: &mut Child) -> anyhow::Error {
    match child.wait() {
        Ok(status) => anyhow!("the harness ended early with {status}; what it said stands above"),
        Err(error) => anyhow!(error).context("the harness ended early"),
    }
}

fn is_time_out(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// The Python that an installed `lm_eval` runs with: the one in its first line; else the first `python3`.
pub(crate) fn installed_python(path: impl IntoIterator<Item = PathBuf>) -> PathBuf {
    let script = path.into_iter().map(|folder| folder.join("lm_eval")).find(|script| script.is_file());
    let first_line = script.and_then(|script| {
        let mut line = String::new();
        BufReader::new(std::fs::File::open(script).ok()?).read_line(&mut line).ok()?;
        Some(line)
    });
    let named = first_line.as_deref().and_then(|line| line.strip_prefix("#!"));
    let python = named.and_then(|line| line.split_whitespace().last());
    let python = python.filter(|python| python.contains("python"));
    python.map_or_else(|| PathBuf::from("python3"), PathBuf::from)
}
