//! Errors in the format of OpenAI's API: `{"error": {message, type, param, code}}` and a status.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use hearthnet_text::sanitize;
use hearthnet_transport::Code;
use serde_json::{Value, json};

/// Error response of the HTTP API.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    status: StatusCode,
    code: Code,
    param: Option<String>,
    message: String,
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
            retry_after: None,
        }
    }

    /// Names the field of the request at fault.
    #[must_use]
    pub fn about(mut self, param: impl Into<String>) -> Self {
        self.param = Some(sanitize(&param.into()).into_owned());
        self
    }

    /// Sets `Retry-After`, in whole seconds.
    #[must_use]
    pub fn retry_after(mut self, after: Option<Duration>) -> Self {
        self.retry_after = after;
        self
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
