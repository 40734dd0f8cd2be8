//! `lmx server`: OpenAI's and Anthropic's protocols.

use crate::args::adapter::AdapterArgs;
use crate::args::model::{ModelArgs, TemplateArgs};
use crate::args::server::{LogFormat, LogLevel, ServerArgs, ServerCommand};
use crate::end::End;
use crate::interrupt::{self, Hold};
use crate::report::Notices;
use crate::session::{Concurrency, Models, Reuse, Session, notice_idle_variables, open_options};
use crate::terminal;
use anyhow::Context;
use lmx::checkpoint::ModelSource;
use lmx::engine::Speculation;
use lmx::text::reply::ToolFormat;
use lmx_server::{LoadProgress, LoadedModel, Loader, Server, Source, weight_bytes};
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::Arc;
use tracing::level_filters::LevelFilter;

/// Runs the command until it is interrupted.
pub(crate) fn run(command: ServerCommand) -> Result<(), End> {
    log(command.args.log_level, command.args.log_format);
    raise_file_limit();
    let _hold = Hold::new();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("the server's threads cannot be started")?;
    let done = runtime.block_on(serve(command));
    // A model that is being loaded need not be waited for.
    runtime.shutdown_background();
    done
}

/// Connections are files, of which a program may have a thousand where it does not ask for more.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!("the limit of open files cannot be raised: {error}");
    }
}

async fn serve(command: ServerCommand) -> Result<(), End> {
    let ServerCommand { address, options, tls, speculation, args } = command;
    let address = SocketAddr::new(address, args.port);
    let listener = tokio::net::TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address} (--host, --port)"))?;
    let bound = listener.local_addr().context("the address cannot be told")?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let names = names(&args, options.models.is_some());
    let mut served: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
    if options.models.is_some() {
        served.push("the models of --models-dir");
    }
    let served = served.join(", ");
    let loader = Arc::new(Files { args, speculation });
    let server = Server::load(options, names, loader).await.map_err(|error| End::Failed(error.into()))?;
    terminal::say(&format!("lmx serves {served} on {scheme}://{bound}"));
    let stop = async {
        // If signals cannot be listened to, the program ends as programs do.
        let _ = interrupt::stop_signal().await;
        terminal::say("stopping: running replies may end first");
    };
    server.serve(listener, tls, stop).await;
    Ok(())
}

/// The models that are named, each with what it is loaded by: with a folder of models none, unless one is given.
fn names(args: &ServerArgs, with_folder: bool) -> Vec<(String, String)> {
    let default = (args.model.model.is_some() || !with_folder).then(|| {
        let model = args.model.name().to_owned();
        (args.served_name.clone().unwrap_or_else(|| model.clone()), model)
    });
    default.into_iter().chain(args.also.iter().map(|name| (name.clone(), name.clone()))).collect()
}

/// Loads models as the command line says.
struct Files {
    args: Box<ServerArgs>,
    speculation: Option<Speculation>,
}

impl Files {
    /// What the command line would have said, had it named only this model.
    fn model(&self, source: &Source) -> Result<ModelArgs, String> {
        let (model, revision) = match source {
            Source::Named(name) => (name.clone(), self.args.model.revision.clone()),
            Source::Entry(path) => {
                (path.to_str().ok_or("the folder's path is not Unicode")?.to_owned(), None)
            }
        };
        Ok(ModelArgs { model: Some(model), revision, ..self.args.model.clone() })
    }
}

impl Loader for Files {
    fn bytes(&self, source: &Source) -> Result<usize, String> {
        let model = self.model(source)?;
        let found = ModelSource::resolve(model.name(), &open_options(&model));
        let found = found.map_err(|error| error.to_string())?;
        weight_bytes(found.path()).map_err(|error| format!("{}: {error}", found.path().display()))
    }

    fn load(&self, source: &Source, progress: &LoadProgress) -> Result<LoadedModel, String> {
        // What changes a model's weights is made for that model.
        let own = *source == Source::Named(self.args.model.name().to_owned());
        let adapter = if own { self.args.adapter.clone() } else { AdapterArgs::default() };
        load(&self.model(source)?, &adapter, progress, self.speculation, &self.args).map_err(
            |end| match end {
                End::Failed(error) => format!("{error:#}"),
                End::Usage(message) => message,
                _ => "it was interrupted".to_owned(),
            },
        )
    }
}

fn load(
    model: &ModelArgs,
    adapter: &AdapterArgs,
    progress: &LoadProgress,
    speculation: Option<Speculation>,
    args: &ServerArgs,
) -> Result<LoadedModel, End> {
    let mut notices = Notices::new(false);
    let session = Session::open(
        Models { model, draft: args.speculation.draft_model(), progress: Some(progress) },
        adapter,
        &args.run,
        // Variables may be for another template than the model's own.
        &TemplateArgs { chat_template_config: None, ..args.template.clone() },
        Reuse::Prefixes(&args.prefix),
        Concurrency { replies: args.decode_concurrency.get(), prompts: args.prompt_concurrency.get() },
        &mut notices,
    )?;
    session.check_speculation(speculation)?;
    let template = match &args.chat_template {
        Some(given) => session.tokenizer.chat_template_given(given),
        None => session.template,
    };
    notice_idle_variables(&template, &args.template, &mut notices);
    let tool_format = args.tool_parser.or_else(|| session.tokenizer.tool_format());
    let format = tool_format.map_or("none", ToolFormat::name);
    tracing::info!(model = model.name(), tool_parser = format, "loaded");
    Ok(LoadedModel {
        engine: session.engine,
        template,
        xtc_special_tokens: session.xtc_special_tokens,
        tool_format,
        adapter: session.adapter,
        speculation,
    })
}

fn log(level: LogLevel, format: LogFormat) {
    let level = match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warning => LevelFilter::WARN,
        LogLevel::Error | LogLevel::Critical => LevelFilter::ERROR,
    };
    let log = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}
