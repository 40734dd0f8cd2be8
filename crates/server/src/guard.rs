//! What every request passes first: who may ask, from which page, and how often.

use crate::answering::Answering;
use crate::app::App;
use crate::error::ApiError;
use crate::options::{Limits, ServerOptions};
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::LengthLimitError;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;

/// The state of the checks.
pub(crate) struct Guard {
    keys: Vec<String>,
    origins: Vec<String>,
    hosts: Option<Vec<String>>,
    per_minute: u32,
    /// For each key by its index: when the minute began, and requests since.
    counts: Mutex<HashMap<usize, (Instant, u32)>>,
    requests: AtomicU64,
}

const MINUTE: Duration = Duration::from_secs(60);

impl Guard {
    pub(crate) fn new(options: &ServerOptions) -> Self {
        Self {
            keys: options.api_keys.clone(),
            origins: options.allowed_origins.clone(),
            hosts: options.allowed_hosts.clone(),
            per_minute: options.limits.requests_per_minute,
            counts: Mutex::new(HashMap::new()),
            requests: AtomicU64::new(0),
        }
    }

    /// The index of the request's key; 0 without keys.
    fn key(&self, headers: &HeaderMap) -> Result<usize, ApiError> {
        if self.keys.is_empty() {
            return Ok(0);
        }
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, key)| key.trim());
        let given = bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()));
        let refused = |message: &str| ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(StatusCode::UNAUTHORIZED, message)
        };
        let given = given.ok_or_else(|| {
            refused("an API key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        })?;
        // Every key is compared, however the first ones turn out.
        let found = self.keys.iter().enumerate().fold(None, |found, (index, key)| {
            let same: bool = key.as_bytes().ct_eq(given.as_bytes()).into();
            if same { Some(index) } else { found }
        });
        found.ok_or_else(|| refused("the API key is not known"))
    }

    /// Counts a request of a key.
    fn count(&self, key: usize) -> Result<(), ApiError> {
        if self.per_minute == 0 {
            return Ok(());
        }
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let (began, count) = counts.entry(key).or_insert((now, 0));
        if now.duration_since(*began) >= MINUTE {
            (*began, *count) = (now, 0);
        }
        if *count >= self.per_minute {
            let wait = (MINUTE - now.duration_since(*began)).as_secs() + 1;
            let message = format!("more than {} requests in a minute", self.per_minute);
            return Err(ApiError::too_many(message, wait));
        }
        *count += 1;
        Ok(())
    }

    /// Refuses a host that is not this server: a page that had its own name point here would speak to it.
    fn host(&self, request: &Request) -> Result<(), ApiError> {
        let Some(allowed) = &self.hosts else { return Ok(()) };
        let Some(given) = host(request) else { return Ok(()) };
        let name = host_name(given);
        if is_loopback(name) || allowed.iter().any(|host| host.eq_ignore_ascii_case(name)) {
            return Ok(());
        }
        let message = format!("the host {name:?} is not this server (--allowed-hosts)");
        Err(ApiError::new(StatusCode::FORBIDDEN, message))
    }

    /// Refuses pages of other origins: browsers send some requests for them without asking first, and only keep the answer
    /// from them.
    fn page(&self, request: &Request) -> Result<(), ApiError> {
        let Some(origin) = request.headers().get(header::ORIGIN) else { return Ok(()) };
        let own = |origin: &HeaderValue| {
            let (_, authority) = origin.to_str().ok()?.split_once("://")?;
            host(request).filter(|host| host.eq_ignore_ascii_case(authority))
        };
        if own(origin).is_some() || self.origin(Some(origin)).is_some() {
            return Ok(());
        }
        let message = format!("pages of {origin:?} may not use this server (--allowed-origins)");
        Err(ApiError::new(StatusCode::FORBIDDEN, message))
    }

    /// Whether a request for `path` is let in; the index of its key.
    fn admit(&self, request: &Request, path: &str) -> Result<usize, ApiError> {
        self.host(request)?;
        self.page(request)?;
        if OPEN.contains(&path) {
            return Ok(0);
        }
        let key = self.key(request.headers())?;
        self.count(key).map(|()| key)
    }

    /// The value of `access-control-allow-origin` for a page of `origin`.
    fn origin(&self, origin: Option<&HeaderValue>) -> Option<HeaderValue> {
        let origin = origin?;
        if self.origins.iter().any(|allowed| allowed == "*") {
            return Some(HeaderValue::from_static("*"));
        }
        let text = origin.to_str().ok()?;
        self.origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(text)).then(|| origin.clone())
    }
}

/// The server's name and port, as the client has them.
fn host(request: &Request) -> Option<&str> {
    let given = request.headers().get(header::HOST).and_then(|value| value.to_str().ok());
    given.or_else(|| request.uri().authority().map(|authority| authority.as_str()))
}

/// The name of `name:port` or `[name]:port`.
fn host_name(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split_once(']').map_or(rest, |(name, _)| name);
    }
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.contains(':') => name,
        _ => host,
    }
}

fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Paths that anyone may ask for: they tell nothing of models or texts.
const OPEN: [&str; 3] = ["/health", "/", "/openapi.json"];

/// Who asks, for handlers: the index of the key, 0 without keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller(pub(crate) usize);

/// Lets a request in or answers it here.
pub(crate) async fn check(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let guard = &app.guard;
    let id = HeaderValue::from(guard.requests.fetch_add(1, Ordering::Relaxed));
    let path = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "other".to_owned(), |p| p.as_str().to_owned());
    let allowed = guard.origin(request.headers().get(header::ORIGIN));
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let answering = Answering::new(&app.metrics, id.clone(), method.clone(), path.clone());
    let mut response = if method == Method::OPTIONS {
        guard.host(&request).map_or_else(|error| error.at(&uri), |()| StatusCode::NO_CONTENT.into_response())
    } else {
        match guard.admit(&request, &path) {
            Ok(key) => {
                request.extensions_mut().insert(Caller(key));
                match with_body(request, &app.options.limits).await {
                    Ok(request) => next.run(request).await,
                    Err(error) => error.at(&uri),
                }
            }
            Err(error) => error.at(&uri),
        }
    };
    let headers = response.headers_mut();
    if let Some(allowed) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("*"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, authorization"));
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    // By the names that clients of OpenAI and of Anthropic look for.
    headers.insert("request-id", id.clone());
    headers.insert("x-request-id", id);
    answering.with(response)
}

/// The same request with all of its body, which must come in time and not be too long.
async fn with_body(request: Request, limits: &Limits) -> Result<Request, ApiError> {
    let (parts, body) = request.into_parts();
    let most = limits.body_bytes;
    let too_long = || {
        ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body has more than {most} bytes (--max-body)"),
        )
    };
    let said =
        parts.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if said.is_some_and(|length: u64| length > most as u64) {
        return Err(too_long());
    }
    match tokio::time::timeout(limits.read_timeout, axum::body::to_bytes(body, most)).await {
        Ok(Ok(bytes)) => Ok(Request::from_parts(parts, Body::from(bytes))),
        Ok(Err(error)) => {
            let long = error.into_inner().is::<LengthLimitError>();
            Err(if long { too_long() } else { ApiError::bad("the body ended early") })
        }
        Err(_) => {
            let seconds = limits.read_timeout.as_secs_f64();
            let message = format!("the body did not come within {seconds} seconds (--read-timeout)");
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_told_from_ports() {
        for (host, name) in [
            ("localhost:8080", "localhost"),
            ("127.0.0.1", "127.0.0.1"),
            ("[::1]:80", "::1"),
            ("::1", "::1"),
            ("evil.example:8080", "evil.example"),
        ] {
            assert_eq!(host_name(host), name);
        }
        assert!(is_loopback("127.0.0.1") && is_loopback("LOCALHOST") && is_loopback("::1"));
        assert!(
            !is_loopback("evil.example")
                && !is_loopback("10.0.0.1")
                && !is_loopback("localhost.evil.example")
        );
    }

    #[test]
    fn keys_are_asked_for_and_counted() {
        let mut options =
            ServerOptions { api_keys: vec!["a".into(), "b".into()], ..ServerOptions::default() };
        options.limits.requests_per_minute = 2;
        let guard = Guard::new(&options);
        let key = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_str(value).unwrap());
            guard.key(&headers).map_err(|error| error.status.as_u16())
        };
        assert_eq!(key("authorization", "Bearer b"), Ok(1));
        assert_eq!(key("authorization", "bearer a"), Ok(0));
        assert_eq!(key("x-api-key", "a"), Ok(0));
        assert_eq!(key("authorization", "Bearer c"), Err(401));
        assert_eq!(key("authorization", "Basic a"), Err(401));
        assert!(guard.count(0).is_ok() && guard.count(0).is_ok() && guard.count(1).is_ok());
        let error = guard.count(0).unwrap_err();
        assert_eq!((error.status.as_u16(), error.retry_after.is_some()), (429, true));
    }

    #[test]
    fn pages_of_others_are_not_answered() {
        let options =
            ServerOptions { allowed_origins: vec!["https://a.example".into()], ..Default::default() };
        let guard = Guard::new(&options);
        let allowed = |origin: &'static str| guard.origin(Some(&HeaderValue::from_static(origin)));
        assert_eq!(allowed("https://a.example").unwrap(), "https://a.example");
        assert!(allowed("https://evil.example").is_none() && allowed("null").is_none());
        assert!(guard.origin(None).is_none());
    }
}
