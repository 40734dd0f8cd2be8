//! Connections: accepting them, bounding them, and ending them when the server is stopped.

use crate::app::App;
use crate::model::Loader;
use crate::options::ServerOptions;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate and its key.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// Why a server cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A file of the certificate cannot be used.
    #[error("{} cannot be used: {why}", file.display())]
    Tls {
        /// The file.
        file: PathBuf,
        /// Why.
        why: String,
    },
    /// The default model.
    #[error("{0}")]
    Model(String),
    /// The system refuses a thread.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Tls {
    /// Reads the certificate chain `cert` and the private key `key`, both PEM files.
    ///
    /// # Errors
    /// [`ServeError::Tls`] naming the file.
    pub fn open(cert: &Path, key: &Path) -> Result<Self, ServeError> {
        let refused = |file: &Path, why: String| ServeError::Tls { file: file.to_owned(), why };
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_file_iter(cert).and_then(|certificates| certificates.collect());
        let chain = chain.map_err(|error| refused(cert, error.to_string()))?;
        let private = PrivateKeyDer::from_pem_file(key);
        let private = private.map_err(|error| refused(key, error.to_string()))?;
        let config = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(chain, private);
        let mut config = config.map_err(|error| refused(cert, error.to_string()))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}

/// A server whose first model is loaded.
pub struct Server {
    app: Arc<App>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

impl Server {
    /// A server of the models `names`, each with what the loader knows it by, and of those in the folder of `options`. The
    /// first one of `names` is the default and is loaded now, each other one when it is first asked for.
    ///
    /// # Errors
    /// [`ServeError`] if the model cannot be loaded.
    pub async fn load(
        options: ServerOptions,
        names: Vec<(String, String)>,
        loader: Arc<dyn Loader>,
    ) -> Result<Self, ServeError> {
        let with_default = !names.is_empty();
        let app = App::new(options, names, loader)?;
        if with_default {
            app.models.get(None).await.map_err(|error| ServeError::Model(error.message))?;
        }
        Ok(Self { app })
    }

    /// Answers until `stop` is ready. What runs then may go on for the grace period.
    pub async fn serve(self, listener: TcpListener, tls: Option<Tls>, stop: impl Future<Output = ()>) {
        accept(self.app, listener, tls.map(|tls| tls.0), stop).await;
    }
}

async fn accept(
    app: Arc<App>,
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
    stop: impl Future<Output = ()>,
) {
    let limits = app.options.limits.clone();
    let router = Arc::clone(&app).router();
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.read_timeout).keep_alive(true);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(256);
    let (builder, graceful) = (Arc::new(builder), GracefulShutdown::new());
    let places = Arc::new(Semaphore::new(limits.connections));
    tokio::pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Mostly too many open files: some will be closed.
                tracing::warn!("a connection could not be accepted: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Too many: closed at once.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        // Tokens are small and should not wait for each other.
        let _ = stream.set_nodelay(true);
        let (router, acceptor, builder, watcher) =
            (router.clone(), acceptor.clone(), Arc::clone(&builder), graceful.watcher());
        let patience = limits.read_timeout;
        tokio::spawn(async move {
            let _place = place;
            let result = match acceptor {
                None => connection(&builder, watcher, stream, router, patience).await,
                Some(acceptor) => match tokio::time::timeout(patience, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => connection(&builder, watcher, stream, router, patience).await,
                    Ok(Err(error)) => Err(error.into()),
                    Err(_) => Ok(()),
                },
            };
            if let Err(error) = result {
                tracing::debug!("a connection ended: {error}");
            }
        });
    }
    drop(listener);
    app.models.worker().stop(limits.grace);
    // A little longer than what runs may take, so that it can say how it ended.
    let _ = tokio::time::timeout(limits.grace + Duration::from_secs(2), graceful.shutdown()).await;
}

/// Serves a connection; one on which nothing is asked within `patience` is closed, so that it takes nobody's place.
async fn connection(
    builder: &Builder<TokioExecutor>,
    watcher: hyper_util::server::graceful::Watcher,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: axum::Router,
    patience: Duration,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let asked = Arc::new(AtomicBool::new(false));
    let (router, told) = (TowerToHyperService::new(router), Arc::clone(&asked));
    let service = service_fn(move |request: Request<Incoming>| {
        told.store(true, Ordering::Relaxed);
        router.call(request)
    });
    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
    let mut connection = pin!(watcher.watch(connection));
    tokio::select! {
        ended = &mut connection => return ended,
        () = tokio::time::sleep(patience) => {}
    }
    if asked.load(Ordering::Relaxed) { connection.await } else { Ok(()) }
}
