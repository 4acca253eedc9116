//! The body of a request as fields, and how strictly they are read. Pure.

use axum::http::StatusCode;
use hearthnet_http::ApiError;
use serde_json::Value;

use crate::api::fields::{Fields, Refused};

/// Settings that decide how a request is read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rules {
    /// Seed of a request without one.
    pub(super) seed: u64,
    /// Whether fields without effect are refused.
    pub(super) strict: bool,
}

impl Rules {
    /// The fields of a list that are ignored.
    pub(super) fn ignored(self, names: &'static [&'static str]) -> &'static [&'static str] {
        if self.strict { &[] } else { names }
    }
}

/// Why a strict server refuses a field that others ignore.
pub(super) const NO_EFFECT: &str = "has no effect here, and http.strict refuses such fields";

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let (status, problem) = (StatusCode::BAD_REQUEST, refused.problem);
        let error = match refused.is_unsupported {
            true => ApiError::new(status, "unsupported_parameter", problem),
            false => ApiError::new(status, "invalid_value", problem),
        };
        error.about(refused.field)
    }
}

impl Fields {
    /// Fields of a request's body.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let wrong = |why| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", why);
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self::new(fields)),
            Ok(_) => Err(wrong("the body must be a JSON object".to_owned())),
            Err(why) => Err(wrong(format!("the body is not JSON: {why}"))),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::api::http) const STRICT: Rules = Rules {
        seed: 0,
        strict: true,
    };

    /// Code and param of a refusal.
    pub(in crate::api::http) fn refusal<T>(result: Result<T, ApiError>) -> (String, String) {
        let body = result.err().expect("a refusal").body();
        let text = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
        assert_eq!(body["error"]["type"], "invalid_request_error");
        (text("code"), text("param"))
    }
}
