//! Errors of the HTTP APIs: a status, and an object in the format of the API that the path belongs
//! to.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::middleware::Next;
use axum::response::IntoResponse;
use hearthnet_text::sanitize;
use hearthnet_transport::Code;
use serde_json::{Value, json};

/// Format of error objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorFormat {
    /// `{"error": {message, type, param, code}}`.
    OpenAi,
    /// `{"type": "error", "error": {type, message}}`, with statuses of Anthropic's.
    Anthropic,
    /// `{"error": message}`.
    Ollama,
}

impl ErrorFormat {
    /// Format of the errors of a path.
    pub fn of(path: &str) -> Self {
        let is_below = |folder: &str| {
            let rest = path.strip_prefix(folder);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if is_below("/v1/messages") {
            Self::Anthropic
        } else if is_below("/api") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

/// Gives the errors of every handler below the format of their path.
pub(crate) async fn format_errors(request: Request, next: Next) -> Response<Body> {
    let format = ErrorFormat::of(request.uri().path());
    let mut response = next.run(request).await;
    if format == ErrorFormat::OpenAi {
        return response;
    }
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        *response.status_mut() = error.status_in(format);
        *response.body_mut() = Body::from(error.body_in(format).to_string());
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    response
}

/// Code of a refusal after which Anthropic's clients send whole conversations instead of threads.
pub const THREAD_UNSUPPORTED: &str = "thread_unsupported_request";

/// Error response of the HTTP API.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    status: StatusCode,
    code: Code,
    param: Option<String>,
    message: String,
    /// Message in Anthropic's format, if it has other words there.
    anthropics_message: Option<String>,
    retry_after: Option<Duration>,
}

impl ApiError {
    /// An error with its stable code and a message for people. The message is sanitised, since it
    /// may be shown on a terminal.
    pub fn new(status: StatusCode, code: impl Into<Code>, message: impl Into<String>) -> Self {
        Self {
            status,
            code: code.into(),
            param: None,
            message: sanitize(&message.into()).into_owned(),
            anthropics_message: None,
            retry_after: None,
        }
    }

    /// Names the field of the request at fault.
    #[must_use]
    pub fn about(mut self, param: impl Into<String>) -> Self {
        self.param = Some(sanitize(&param.into()).into_owned());
        self
    }

    /// Sets the message for clients of Anthropic's API.
    #[must_use]
    pub fn in_anthropics_words(mut self, message: impl Into<String>) -> Self {
        self.anthropics_message = Some(sanitize(&message.into()).into_owned());
        self
    }

    /// Sets `Retry-After`, in whole seconds.
    #[must_use]
    pub fn retry_after(mut self, after: Option<Duration>) -> Self {
        self.retry_after = after;
        self
    }

    /// Names a field of the request as its client does: `theirs` instead of `ours`.
    #[must_use]
    pub fn renamed(mut self, ours: &str, theirs: &str) -> Self {
        if self.param.as_deref() == Some(ours) {
            self.param = Some(theirs.to_owned());
            self.message = self
                .message
                .replace(&format!("`{ours}`"), &format!("`{theirs}`"));
        }
        self
    }

    /// Status of the error in a format.
    fn status_in(&self, format: ErrorFormat) -> StatusCode {
        match (format, self.status) {
            // Anthropic's API has no 503; 529 is its status for "ask again later".
            (ErrorFormat::Anthropic, StatusCode::SERVICE_UNAVAILABLE) => {
                StatusCode::from_u16(529).unwrap_or(self.status)
            }
            (_, status) => status,
        }
    }

    /// Error object in a format.
    pub fn body_in(&self, format: ErrorFormat) -> Value {
        match format {
            ErrorFormat::OpenAi => self.body(),
            ErrorFormat::Ollama => json!({"error": self.message}),
            ErrorFormat::Anthropic => {
                let kind = match self.status {
                    StatusCode::UNAUTHORIZED => "authentication_error",
                    StatusCode::FORBIDDEN => "permission_error",
                    StatusCode::NOT_FOUND => "not_found_error",
                    StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
                    StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
                    StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
                    status if status.is_server_error() => "api_error",
                    _ => "invalid_request_error",
                };
                let message = self.anthropics_message.as_ref().unwrap_or(&self.message);
                let mut error = json!({"type": kind, "message": message});
                if self.code.as_str() == THREAD_UNSUPPORTED {
                    error["details"] = json!({
                        "error_code": self.code, "unsupported": self.param.as_slice(),
                    });
                }
                json!({"type": "error", "error": error})
            }
        }
    }

    /// OpenAI's error type for the status.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }

    pub fn response(&self) -> Response<Body> {
        let mut response = json_response(self.status, &self.body());
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs()));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, bearer);
        }
        response.extensions_mut().insert(self.clone());
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        self.response()
    }
}

pub fn json_response(status: StatusCode, value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_format_of_its_path() {
        let error = ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "shard_unavailable",
            "later",
        );
        for (path, format, status) in [
            ("/v1/messages", ErrorFormat::Anthropic, 529),
            ("/v1/messages/count_tokens", ErrorFormat::Anthropic, 529),
            ("/v1/messages2", ErrorFormat::OpenAi, 503),
            ("/api/chat", ErrorFormat::Ollama, 503),
            ("/apis", ErrorFormat::OpenAi, 503),
            ("/v1/responses", ErrorFormat::OpenAi, 503),
        ] {
            assert_eq!(ErrorFormat::of(path), format, "{path}");
            assert_eq!(error.status_in(format).as_u16(), status, "{path}");
        }
        let anthropics = json!({"type": "error",
            "error": {"type": "overloaded_error", "message": "later"}});
        assert_eq!(error.body_in(ErrorFormat::Anthropic), anthropics);
        let ollamas = json!({"error": "later"});
        assert_eq!(error.body_in(ErrorFormat::Ollama), ollamas);
        let thread = ApiError::new(StatusCode::BAD_REQUEST, THREAD_UNSUPPORTED, "no");
        let thread = thread.about("thread").body_in(ErrorFormat::Anthropic);
        let details = json!({"error_code": THREAD_UNSUPPORTED, "unsupported": ["thread"]});
        assert_eq!(thread["error"]["details"], details);
    }

    #[test]
    fn a_field_has_the_name_that_its_client_uses() {
        let error = |param: &str| {
            let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", "`stop` is wrong");
            error.about(param).renamed("stop", "stop_sequences").body()
        };
        assert_eq!(error("stop")["error"]["param"], "stop_sequences");
        assert_eq!(
            error("stop")["error"]["message"],
            "`stop_sequences` is wrong"
        );
        assert_eq!(error("top_k")["error"]["param"], "top_k");
    }
}
