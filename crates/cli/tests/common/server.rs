//! A server of the real program, and a client of a few lines.

use super::lmx;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A running server; stopped when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    pub port: u16,
    log: Arc<Mutex<String>>,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The data of a stream's events, without comments; the last one must be `[DONE]`.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{self:?}");
        let mut data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{self:?}");
        data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

impl Server {
    /// Starts a server for a model with further words, on a free port.
    pub fn start(model: &str, words: &[&str]) -> Self {
        Self::start_with(&[&["--model", model], words].concat())
    }

    /// Starts a server with words that name its models, on a free port.
    pub fn start_with(words: &[&str]) -> Self {
        Self::spawn(&mut lmx(&[&["server", "--port", "0"], words].concat()))
    }

    /// The same, but started by another program, which gets the words of its own after `program`'s.
    pub fn start_below(program: &[&str], words: &[&str]) -> Self {
        let own = lmx(&[&["server", "--port", "0"], words].concat());
        let mut command = std::process::Command::new(program[0]);
        command.args(&program[1..]).arg(own.get_program()).args(own.get_args());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Self::spawn(&mut command)
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("lmx serves ") {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "it did not start");
        }
        let port = line.trim_end().rsplit(':').next().and_then(|port| port.parse().ok());
        let port = port.unwrap_or_else(|| panic!("no port in {line:?}"));
        // A pipe that nobody reads would stop the server.
        let log = Arc::new(Mutex::new(String::new()));
        let written = Arc::clone(&log);
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).for_each(|line| *written.lock().unwrap() += &(line + "\n"));
        });
        Self { child, port, log }
    }

    /// What it has said on standard error since it started.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Its number among the processes.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A connection on which a request was sent.
    pub fn send(&self, method: &str, path: &str, headers: &[&str], body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|header| header.starts_with("content-length:")) {
            head += &format!("content-length: {}\r\n", body.len());
        }
        if !headers.iter().any(|header| header.to_lowercase().starts_with("host:")) {
            head += "host: localhost\r\n";
        }
        headers.iter().for_each(|header| head += &format!("{header}\r\n"));
        stream.write_all(format!("{head}\r\n{body}").as_bytes()).unwrap();
        stream
    }

    /// The answer to a request.
    pub fn ask(&self, method: &str, path: &str, headers: &[&str], body: &str) -> Answer {
        let mut bytes = Vec::new();
        self.send(method, path, headers, body).read_to_end(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let chunked = head.to_lowercase().contains("transfer-encoding: chunked");
        let body = if chunked { unchunk(body) } else { body.to_owned() };
        Answer { status, head: head.to_lowercase(), body }
    }

    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, &["content-type: application/json"], &body.to_string())
    }

    /// A value of `/metrics`, of all models together where each has its own.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let of = |line: &str| Some(line.strip_prefix(name)?.rsplit_once(' ')?.1.parse::<f64>().unwrap());
        let lines = text.lines().filter(|line| line.split([' ', '{']).next() == Some(name));
        lines.filter_map(of).reduce(|a, b| a + b).unwrap_or_else(|| panic!("{name} is not in {text}"))
    }

    /// Waits until a metric has a value.
    pub fn await_metric(&self, name: &str, value: f64) {
        let begin = Instant::now();
        while self.metric(name) != value {
            assert!(begin.elapsed() < Duration::from_secs(30), "{name} does not become {value}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        let status = Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(status.success());
    }

    /// Waits for the end of the program.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The bytes of a chunked body, whose chunks may cut characters.
fn unchunk(body: &str) -> String {
    let (mut rest, mut joined) = (body.as_bytes(), Vec::new());
    while let Some(end) = rest.windows(2).position(|pair| pair == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        joined.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 4 + size..];
    }
    String::from_utf8(joined).unwrap()
}
