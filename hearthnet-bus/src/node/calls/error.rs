//! Error of a failed call.

use std::fmt;

use hearthnet_text::sanitize;
use hearthnet_transport::{Code, is_name};
use serde::Serialize;

/// Longest message or hint that is sent or stored, in bytes: a few sentences.
pub const MAX_ERROR_TEXT: usize = 1024;

/// Failure of a call: a code for programs, a message and a hint for people.
///
/// It may come from a peer, so its texts are sanitised: no control characters, and at most
/// [`MAX_ERROR_TEXT`] bytes each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{message}")]
pub struct CallError {
    code: Code,
    message: String,
    hint: String,
}

impl CallError {
    /// A failure with its code and a sentence that says what happened.
    pub fn new(code: Code, message: impl AsRef<str>) -> Self {
        Self {
            code: if is_name(code.as_str()) {
                code
            } else {
                Code::INTERNAL
            },
            message: printable(message.as_ref()),
            hint: String::new(),
        }
    }

    /// Adds a hint: what the caller can do about the failure.
    #[must_use]
    pub fn with_hint(mut self, hint: impl AsRef<str>) -> Self {
        self.hint = printable(hint.as_ref());
        self
    }

    pub fn code(&self) -> &Code {
        &self.code
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// The hint; may be empty.
    pub fn hint(&self) -> &str {
        &self.hint
    }

    /// `bad_request` for the parameter `field`.
    pub fn bad_request(field: &str, problem: impl fmt::Display) -> Self {
        Self::new(Code::BAD_REQUEST, format!("{field}: {problem}"))
    }

    /// `internal`: an unexpected failure that the caller did not cause.
    pub fn internal(error: impl fmt::Display) -> Self {
        Self::new(Code::INTERNAL, error.to_string())
    }

    pub(crate) fn cancelled() -> Self {
        Self::new(Code::CANCELLED, "the call was cancelled")
    }
}

/// Sanitises and truncates text for display.
fn printable(text: &str) -> String {
    let mut out = sanitize(text).into_owned();
    out.truncate(out.floor_char_boundary(MAX_ERROR_TEXT));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_code_becomes_internal() {
        let odd = CallError::new(Code::new("Not A Code"), "x");
        assert_eq!(odd.code(), &Code::INTERNAL);
    }

    #[test]
    fn texts_of_peers_are_cut_and_cannot_steer_a_terminal() {
        let error =
            CallError::new(Code::INTERNAL, "a\u{1b}[2Jb\nc\u{9b}d").with_hint("é".repeat(5000));
        assert_eq!(error.message(), "a\\u{1b}[2Jb\\nc\\u{9b}d");
        assert_eq!(error.hint().len(), MAX_ERROR_TEXT);
    }
}
