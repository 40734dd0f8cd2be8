//! What is wrong with a request, and how each protocol says so.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use lmx::engine::RequestError;
use serde_json::{Value, json};

/// A request that is refused, or that failed.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// The field that it is about.
    pub(crate) param: Option<String>,
    /// A word for programs.
    pub(crate) code: Option<&'static str>,
    pub(crate) message: String,
    /// After how many seconds it may be tried again.
    pub(crate) retry_after: Option<u64>,
}

/// The result of whatever may refuse a request.
pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, param: None, code: None, message: message.into(), retry_after: None }
    }

    /// 400: `field` is not what it should be.
    pub(crate) fn field(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(field.into()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 400 without a field.
    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 404: there is no such model.
    pub(crate) fn no_model(name: &str) -> Self {
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                format!("the model {name:?} is not served here; see /v1/models"),
            )
        }
    }

    /// 503: the server is stopping, or the model cannot be had now.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// 500: nobody's fault but the server's.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 500: a task of the server's panicked.
    pub(crate) fn of_task(error: tokio::task::JoinError) -> Self {
        Self::internal(error.to_string())
    }

    /// 503: the model has gone since it was looked up.
    pub(crate) fn unloaded() -> Self {
        Self::unavailable("the model is not loaded any more")
    }

    /// 429: there is no room for another request.
    pub(crate) fn too_many(message: impl Into<String>, retry_after: u64) -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
        }
    }

    /// The same error about another field: that of this endpoint by which the engine's `field` was given.
    pub(crate) fn renamed(mut self, field: &str, to: &str) -> Self {
        if self.param.as_deref() == Some(field) {
            self.param = Some(to.to_owned());
        }
        self
    }

    /// OpenAI's word for the kind of error.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// Anthropic's word for the kind of error.
    fn anthropic_kind(&self) -> &'static str {
        match self.status {
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => self.kind(),
        }
    }

    /// The body in OpenAI's shape.
    pub(crate) fn openai(&self) -> Value {
        let Self { message, param, code, .. } = self;
        json!({"error": {"message": message, "type": self.kind(), "param": param, "code": code}})
    }

    /// The body in Anthropic's shape.
    pub(crate) fn anthropic(&self) -> Value {
        let message = match &self.param {
            Some(param) if !self.message.contains(param.as_str()) => format!("{param}: {}", self.message),
            _ => self.message.clone(),
        };
        json!({"type": "error", "error": {"type": self.anthropic_kind(), "message": message}})
    }

    fn respond(&self, body: Value) -> Response {
        let mut response = (self.status, Json(body)).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// The response at a path: Anthropic's are known by their beginning.
    pub(crate) fn at(self, uri: &Uri) -> Response {
        if uri.path().starts_with("/v1/messages") { self.into_anthropic() } else { self.into_response() }
    }

    /// The response of Anthropic's endpoints.
    pub(crate) fn into_anthropic(self) -> Response {
        self.respond(self.anthropic())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond(self.openai())
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::EmptyPrompt | RequestError::Token { .. } => Self::field("prompt", message),
            RequestError::ContextExceeded { .. } => {
                Self { code: Some("context_length_exceeded"), ..Self::field("messages", message) }
            }
            RequestError::Stop(_) => Self::field("stop", message),
            RequestError::Parameter(error) => Self::field(error.field, message),
            RequestError::Grammar(_) | RequestError::GrammarVocabulary { .. } => {
                Self::field("response_format", message)
            }
            RequestError::OutOfMemory(_)
            | RequestError::Shutdown
            | RequestError::QueueDeadline { .. }
            | RequestError::StallDeadline { .. } => Self::unavailable(message),
            _ => Self::internal(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_protocol_has_its_own_words() {
        let error = ApiError::field("top_p", "must be from 0 to 1");
        assert_eq!(error.openai()["error"]["type"], "invalid_request_error");
        assert_eq!(error.openai()["error"]["param"], "top_p");
        assert_eq!(error.anthropic()["error"]["message"], "top_p: must be from 0 to 1");
        let busy = ApiError::too_many("the queue is full", 2);
        assert_eq!(busy.openai()["error"]["type"], "rate_limit_error");
        assert_eq!(busy.into_response().headers()[header::RETRY_AFTER], "2");
        assert_eq!(ApiError::unavailable("stopping").anthropic()["error"]["type"], "overloaded_error");
    }
}
