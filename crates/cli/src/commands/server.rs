//! `lmx server`: OpenAI's and Anthropic's protocols.

use crate::args::model::ModelArgs;
use crate::args::server::{LogFormat, LogLevel, ServerArgs, ServerCommand};
use crate::end::End;
use crate::interrupt::{self, Hold};
use crate::report::Notices;
use crate::session::{Concurrency, Models, Reuse, Session};
use crate::terminal;
use anyhow::Context;
use lmx::engine::{RequestError, Speculation};
use lmx::text::reply::ToolFormat;
use lmx_server::{LoadedModel, Loader, Server};
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::Arc;
use tracing::level_filters::LevelFilter;

/// Runs the command until it is interrupted.
pub(crate) fn run(command: ServerCommand) -> Result<(), End> {
    log(command.args.log_level, command.args.log_format);
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

async fn serve(command: ServerCommand) -> Result<(), End> {
    let ServerCommand { address, options, tls, speculation, args } = command;
    let address = SocketAddr::new(address, args.port);
    let listener = tokio::net::TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address} (--host, --port)"))?;
    let bound = listener.local_addr().context("the address cannot be told")?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let own = args.served_name.clone().unwrap_or_else(|| args.model.name().to_owned());
    let names: Vec<String> = std::iter::once(own.clone()).chain(args.also.iter().cloned()).collect();
    let loader: Loader = Arc::new(move |name| {
        let model = if name == own {
            args.model.clone()
        } else {
            ModelArgs { model: Some(name.to_owned()), ..args.model.clone() }
        };
        load(&model, speculation, &args).map_err(|end| match end {
            End::Failed(error) => format!("{error:#}"),
            end => end.message().unwrap_or_else(|| "it was interrupted".to_owned()),
        })
    });
    let served = names.join(", ");
    let server = Server::load(options, names, loader).await.map_err(|error| End::Failed(error.into()))?;
    terminal::say(&format!("lmx serves {served} on {scheme}://{bound}"));
    let stop = async {
        // If signals cannot be listened to, the program ends as programs do.
        let _ = interrupt::stop_signal().await;
        terminal::say("stopping: running replies may end first");
    };
    server.serve(listener, tls, stop).await.map_err(|error| End::Failed(error.into()))
}

fn load(model: &ModelArgs, speculation: Option<Speculation>, args: &ServerArgs) -> Result<LoadedModel, End> {
    let mut notices = Notices::new(false);
    let session = Session::open(
        Models { model, draft: args.speculation.draft_model() },
        &args.adapter,
        &args.run,
        &args.template,
        Reuse::Prefixes(&args.prefix),
        Concurrency { replies: args.decode_concurrency.get(), prompts: args.prompt_concurrency.get() },
        &mut notices,
    )?;
    if speculation.is_some() && !session.engine.model().states().is_empty() {
        return Err(End::Failed(RequestError::Speculation.into()));
    }
    let template = match &args.chat_template {
        Some(given) => session.tokenizer.chat_template_given(given),
        None => session.template,
    };
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
