//! Errors as OpenAI's API shapes them: `{"error": {message, type, param, code}}` and a status.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use hearthnet_transport::Code;
use serde_json::{Value, json};

use crate::error::ChatError;

/// How long a service that stops may take to be back, at a guess: it ends what runs (20 s at most),
/// and loads a model.
const BACK_AFTER: Duration = Duration::from_secs(30);

/// When to ask again where the door itself is crowded.
const CROWDED: Duration = Duration::from_secs(2);

/// What a client is told when it does not get what it asked for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Code,
    param: Option<String>,
    message: String,
    retry_after: Option<Duration>,
}

impl ApiError {
    fn new(
        status: StatusCode,
        kind: &'static str,
        code: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self {
            status,
            kind,
            code: Code::new(code),
            param: None,
            message: message.into(),
            retry_after: None,
        }
    }

    /// 400: a field of the request cannot be what it is.
    pub(super) fn field(param: &str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..Self::request("invalid_value", message)
        }
    }

    /// 400: this field would change the answer, and is not supported.
    pub(super) fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..Self::request("unsupported_parameter", message)
        }
    }

    /// 400.
    pub(super) fn request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            "invalid_request_error",
            code,
            message,
        )
    }

    /// 401.
    pub(super) fn key() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            "authentication_error",
            "invalid_api_key",
            "this server asks for its key: send it as `Authorization: Bearer KEY`",
        )
    }

    /// 403: the request's Host is another name than this machine's.
    pub(super) fn host() -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            "permission_error",
            "forbidden_host",
            "without a key this server answers as localhost only; ask http://127.0.0.1 or http://localhost",
        )
    }

    /// 404 for a model.
    pub(super) fn model(id: &str) -> Self {
        // A name is quoted as far as anybody would read it.
        let id: String = id.chars().take(100).collect();
        Self {
            param: Some("model".to_owned()),
            ..Self::new(
                StatusCode::NOT_FOUND,
                "invalid_request_error",
                "model_not_found",
                format!("there is no model {id:?} here; GET /v1/models lists those that are"),
            )
        }
    }

    /// 404 for a path.
    pub(super) fn path() -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "invalid_request_error",
            "unknown_url",
            "there is nothing at this path; see /v1/models, /v1/chat/completions, /v1/completions",
        )
    }

    /// 405.
    pub(super) fn method() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            "method_not_allowed",
            "this path does not take that method",
        )
    }

    /// 408: the body did not come in time.
    pub(super) fn late() -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            "request_timeout",
            "the request did not arrive in time",
        )
    }

    /// 413.
    pub(super) fn large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            "request_too_large",
            format!("the request is larger than {limit} bytes, which is the limit here"),
        )
    }

    /// 415.
    pub(super) fn media_type() -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            "unsupported_media_type",
            "send the request as JSON, with the header `Content-Type: application/json`",
        )
    }

    /// What the service says.
    pub(super) fn chat(error: &ChatError) -> Self {
        let (status, kind) = match error {
            ChatError::BadRequest(_) | ChatError::TooLong { .. } => {
                (StatusCode::BAD_REQUEST, "invalid_request_error")
            }
            ChatError::ExperimentalDisabled => (StatusCode::FORBIDDEN, "permission_error"),
            ChatError::Busy(_) | ChatError::HostsFull(_) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error"),
            ChatError::ShardUnavailable(_)
            | ChatError::PipelineStalled(_)
            | ChatError::WeightsMismatch(_)
            | ChatError::ShuttingDown
            // Whoever gave the chat up was not the client, which is still listening.
            | ChatError::Cancelled => (StatusCode::SERVICE_UNAVAILABLE, "server_error"),
            ChatError::Engine(_) => (StatusCode::INTERNAL_SERVER_ERROR, "server_error"),
        };
        let message = format!("{error}; {}", error.hint());
        let code = match error {
            // What OpenAI calls it: programs that shorten their conversations wait for it.
            ChatError::TooLong { .. } => Code::new("context_length_exceeded"),
            _ => error.code(),
        };
        Self {
            code,
            ..Self::new(status, kind, "", message)
        }
    }

    /// 429: as many requests are being answered as may be.
    pub(super) fn crowded(most: usize) -> Self {
        let message = format!("{most} requests are being answered, which is as many as may");
        Self::chat(&ChatError::Busy(message)).retry_after(CROWDED)
    }

    /// Adds when to ask again, where that could help.
    pub(super) fn retry_after(mut self, after: Duration) -> Self {
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            self.retry_after = Some(after);
        } else if self.code == Code::SHUTTING_DOWN {
            self.retry_after = Some(BACK_AFTER);
        }
        self
    }

    /// The body.
    pub(super) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }

    /// The response.
    pub(super) fn response(&self) -> Response<Body> {
        let mut response = super::json_response(self.status, &self.body());
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs()));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}
