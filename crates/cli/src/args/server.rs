//! `lmx server`: its words and what they mean.

use super::adapter::AdapterArgs;
use super::model::{ModelArgs, PrefixArgs, RunArgs, TemplateArgs, positive};
use super::sampling::SamplingArgs;
use super::speculation::SpeculationArgs;
use super::values::{count, size};
use crate::device;
use crate::end::End;
use lmx::engine::Speculation;
use lmx_server::{Defaults, Entries, Folder, Limits, ServerOptions, Tls};
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The words of `lmx server`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Serves OpenAI's and Anthropic's protocols; docs/server.md lists paths and fields.")]
pub(crate) struct ServerArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,
    /// A folder of models that requests may name, each a folder or a .gguf file in it, loaded when it is first asked for
    #[arg(long, value_name = "DIR")]
    models_dir: Option<PathBuf>,
    /// Bytes that loaded models may hold together, like 20GB: those that nobody uses make room for others [default, with
    /// --models-dir: three quarters of the free memory]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    models_memory: Option<usize>,
    /// A folder of adapters that requests may name, each a folder in it
    #[arg(long, value_name = "DIR")]
    adapters_dir: Option<PathBuf>,
    /// Further models, each loaded when it is first asked for
    #[arg(long, value_name = "MODEL")]
    pub(crate) also: Vec<String>,
    /// The name under which requests ask for the model [default: as it was given]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_name: Option<String>,
    /// The address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// The port to listen on (0: any that is free)
    #[arg(long, value_name = "N", default_value = "8080")]
    pub(crate) port: u16,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
    /// The chat template to use instead of the model's: its text, or the name of one of the model's
    #[arg(long, value_name = "TEMPLATE")]
    pub(crate) chat_template: Option<String>,
    /// How the model writes tool calls [default: found by its chat template]
    #[arg(long, value_name = "NAME", value_parser = tool_format)]
    pub(crate) tool_parser: Option<lmx::text::reply::ToolFormat>,
    /// Tokens of a reply at most, where a request does not say
    #[arg(long, short, value_name = "N", default_value = "512", value_parser = positive)]
    max_tokens: NonZeroUsize,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) prefix: PrefixArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Replies that are made at the same time
    #[arg(long, value_name = "N", default_value = "32", value_parser = positive, help_heading = "Running")]
    pub(crate) decode_concurrency: NonZeroUsize,
    /// Prompts that are read at the same time; they share --prefill-step-size
    #[arg(long, value_name = "N", default_value = "8", value_parser = positive, help_heading = "Running")]
    pub(crate) prompt_concurrency: NonZeroUsize,
    /// What is logged, on standard error
    #[arg(long, value_enum, ignore_case = true, default_value_t, help_heading = "Output")]
    pub(crate) log_level: LogLevel,
    /// How it is logged
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    pub(crate) log_format: LogFormat,
}

fn tool_format(word: &str) -> Result<lmx::text::reply::ToolFormat, String> {
    use lmx::text::reply::ToolFormat;
    ToolFormat::from_name(word).ok_or_else(|| {
        let names: Vec<&str> = ToolFormat::ALL.iter().map(|format| format.name()).collect();
        format!("known are {}", names.join(", "))
    })
}

/// `--log-level`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogLevel {
    // No doc comments: clap would print each value on lines of its own.
    Debug,
    #[default]
    Info,
    Warning,
    Error,
    Critical,
}

/// `--log-format`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Who may ask.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Access")]
struct AccessArgs {
    /// A key that requests must have; may be given several times [default: $LMX_API_KEY]
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// A file with a key a line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen on an address that others can reach although no key is asked for
    #[arg(long)]
    insecure: bool,
    /// Origins whose pages may use the server, with commas between; * for all [default: its own page only]
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    allowed_origins: Vec<String>,
    /// Names of this server besides loopback ones, with commas between; * for any
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    allowed_hosts: Vec<String>,
    /// The certificate chain for TLS, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its private key, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

/// Bounds of requests.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Replies that wait or are being made at most; more get 429
    #[arg(long, value_name = "N", default_value = "256", value_parser = positive)]
    max_queue: NonZeroUsize,
    /// Requests of a key in a minute; more get 429 (0: any number)
    #[arg(long, value_name = "N", default_value = "0", value_parser = count)]
    rate_limit: usize,
    /// Bytes of a request's body at most
    #[arg(long, value_name = "SIZE", default_value = "32MB", value_parser = size)]
    max_body: usize,
    /// Messages of a conversation at most
    #[arg(long, value_name = "N", default_value = "10000", value_parser = positive)]
    max_messages: NonZeroUsize,
    /// Replies to one request at most
    #[arg(long, value_name = "N", default_value = "128", value_parser = positive)]
    max_choices: NonZeroUsize,
    /// Responses that are kept for previous_response_id; the least recently used go first (0: none)
    #[arg(long, value_name = "N", default_value = "1000", value_parser = count)]
    stored_responses: usize,
    /// Memory that they may take
    #[arg(long, value_name = "SIZE", default_value = "64MB", value_parser = size)]
    stored_responses_bytes: usize,
    /// Connections at a time
    #[arg(long, value_name = "N", default_value = "8192", value_parser = positive)]
    max_connections: NonZeroUsize,
    /// Seconds that a client may take to send a request
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = some_seconds)]
    read_timeout: Duration,
    /// Seconds without a token, with requests in flight, after which /health says 503
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = some_seconds)]
    generation_stall_timeout: Duration,
    /// Seconds after which a silent stream gets a comment
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = some_seconds)]
    keep_alive: Duration,
    /// Seconds that running replies may take when the server is stopped
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    grace_period: Duration,
}

fn seconds(word: &str) -> Result<Duration, String> {
    let seconds: f64 = word.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "expected a number of seconds".to_owned())
}

/// A length of time that is not 0.
fn some_seconds(word: &str) -> Result<Duration, String> {
    seconds(word).and_then(|time| {
        if time.is_zero() { Err("expected a number of seconds above 0".to_owned()) } else { Ok(time) }
    })
}

/// What `lmx server` is to do.
#[derive(Debug)]
pub(crate) struct ServerCommand {
    pub(crate) address: IpAddr,
    pub(crate) options: ServerOptions,
    pub(crate) tls: Option<Tls>,
    pub(crate) speculation: Option<Speculation>,
    pub(crate) args: Box<ServerArgs>,
}

impl ServerArgs {
    /// Flags that need several models, or a certain one.
    fn check_models(&self) -> Result<(), End> {
        let usage = |message: String| Err(End::Usage(message));
        let several = match (&self.models_dir, self.also.is_empty()) {
            (Some(_), _) => Some("--models-dir"),
            (None, false) => Some("--also"),
            (None, true) => None,
        };
        if let (Some(flag), Some(_)) = (several, self.speculation.draft_model()) {
            return usage(format!("--draft-model cannot be used with {flag}: it guesses for one model"));
        }
        if self.models_memory.is_some() && several.is_none() {
            return usage("--models-memory needs --models-dir or --also".to_owned());
        }
        if self.models_dir.is_some() && self.model.model.is_none() {
            let given = [
                ("--adapter-path", self.adapter.adapter_path.is_some()),
                ("--served-name", self.served_name.is_some()),
            ];
            if let Some((flag, _)) = given.iter().find(|(_, given)| *given) {
                return usage(format!("{flag} needs --model: it is about that model alone"));
            }
        }
        Ok(())
    }

    fn models_bytes(&self) -> usize {
        let default = || self.models_dir.as_ref().map_or(usize::MAX, |_| device::default_models_memory());
        self.models_memory.unwrap_or_else(default)
    }

    /// What the words mean.
    ///
    /// # Errors
    /// [`End::Usage`] naming the flag; [`End::Failed`] for a file of keys or certificates, or a folder, that cannot be read.
    pub(crate) fn validate(self: Box<Self>) -> Result<ServerCommand, End> {
        self.run.kv_window()?;
        self.run.kv_quant.quantization()?;
        if self.template.system_prompt.is_some() {
            return Err(End::Usage(
                "--system-prompt: lmx server takes it as a request's first message".to_owned(),
            ));
        }
        let speculation = self.speculation.speculation()?;
        self.check_models()?;
        let address = address(&self.host)?;
        let api_keys = self.access.keys()?;
        if !address.is_loopback() && api_keys.is_empty() && !self.access.insecure {
            return Err(End::Usage(format!(
                "--host {address} lets others ask without a key: give --api-key, or --insecure if that is meant"
            )));
        }
        let (sampling, processors) = self.sampling.params()?;
        if processors != lmx::sample::ProcessorParams::default() {
            let why = "penalties and biases are fields of a request";
            return Err(End::Usage(format!("lmx server takes no penalties or biases: {why}")));
        }
        let models = folder("--models-dir", self.models_dir.as_deref(), Entries::Models)?;
        let adapters = folder("--adapters-dir", self.adapters_dir.as_deref(), Entries::Adapters)?;
        let options = ServerOptions {
            models,
            adapters,
            api_keys,
            allowed_origins: self.access.allowed_origins.clone(),
            allowed_hosts: self.access.hosts(address),
            defaults: Defaults {
                sampling,
                max_tokens: self.max_tokens.get(),
                template: self.template.chat_template_config.clone().unwrap_or_default(),
            },
            limits: self.limits.limits(self.models_bytes()),
            ..ServerOptions::default()
        };
        let tls = self.access.tls_cert.clone().zip(self.access.tls_key.clone());
        let tls = tls.map(|(cert, key)| Tls::open(&cert, &key)).transpose();
        let tls = tls.map_err(|error| End::Failed(error.into()))?;
        Ok(ServerCommand { address, options, tls, speculation, args: self })
    }
}

/// The folder that a flag names.
fn folder(flag: &str, dir: Option<&Path>, entries: Entries) -> Result<Option<Folder>, End> {
    let Some(dir) = dir else { return Ok(None) };
    let opened = Folder::open(dir, entries);
    opened.map(Some).map_err(|error| End::Failed(anyhow::anyhow!("{flag} {}: {error}", dir.display())))
}

fn address(host: &str) -> Result<IpAddr, End> {
    if host == "localhost" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    host.parse()
        .map_err(|_| End::Usage(format!("--host {host}: expected an IP address, like 127.0.0.1 or ::1")))
}

impl AccessArgs {
    fn keys(&self) -> Result<Vec<String>, End> {
        let mut keys = self.api_key.clone();
        if let Some(file) = &self.api_key_file {
            let text = std::fs::read_to_string(file);
            let text = text.map_err(|error| {
                End::Failed(anyhow::anyhow!("--api-key-file {}: {error}", file.display()))
            })?;
            keys.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned));
            if keys.is_empty() {
                return Err(End::Usage(format!("--api-key-file {} has no key", file.display())));
            }
        }
        if keys.is_empty() {
            keys.extend(crate::env::api_key());
        }
        if keys.iter().any(String::is_empty) {
            return Err(End::Usage("--api-key is empty".to_owned()));
        }
        Ok(keys)
    }

    /// Hosts that are answered besides loopback ones: on a loopback address none, unless they are named.
    fn hosts(&self, address: IpAddr) -> Option<Vec<String>> {
        let any = self.allowed_hosts.iter().any(|host| host == "*");
        let open = self.allowed_hosts.is_empty() && !address.is_loopback();
        (!any && !open).then(|| self.allowed_hosts.clone())
    }
}

impl LimitArgs {
    fn limits(&self, models_bytes: usize) -> Limits {
        Limits {
            body_bytes: self.max_body,
            messages: self.max_messages.get(),
            choices: self.max_choices.get(),
            stored_responses: self.stored_responses,
            stored_bytes: self.stored_responses_bytes,
            queue: self.max_queue.get(),
            requests_per_minute: u32::try_from(self.rate_limit).unwrap_or(u32::MAX),
            read_timeout: self.read_timeout,
            models_bytes,
            connections: self.max_connections.get(),
            keep_alive: self.keep_alive,
            stall: self.generation_stall_timeout,
            grace: self.grace_period,
        }
    }
}
