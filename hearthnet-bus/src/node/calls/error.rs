//! What a call ends with when it does not end well.

use std::fmt;

use hearthnet_text::tame;
use hearthnet_transport::{Code, is_name};
use serde::Serialize;

/// Longest message or hint that is sent or kept, in bytes: a few sentences.
pub const MAX_ERROR_TEXT: usize = 1024;

/// Why a call failed: a code for programs, a sentence and a way out for people.
///
/// It may come from a peer. Its texts hold no control characters and at most
/// [`MAX_ERROR_TEXT`] bytes each, whoever made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{message}")]
pub struct CallError {
    code: Code,
    message: String,
    hint: String,
}

impl CallError {
    /// A failure with its code and what happened, as a sentence.
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

    /// Adds what the caller can do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl AsRef<str>) -> Self {
        self.hint = printable(hint.as_ref());
        self
    }

    /// The stable name of the failure.
    pub fn code(&self) -> &Code {
        &self.code
    }

    /// What happened.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What the caller can do about it; may be empty.
    pub fn hint(&self) -> &str {
        &self.hint
    }

    /// A parameter that cannot be: `field` names it.
    pub fn bad_request(field: &str, problem: impl fmt::Display) -> Self {
        Self::new(Code::BAD_REQUEST, format!("{field}: {problem}"))
    }

    /// What should not happen, and is no fault of the caller.
    pub fn internal(error: impl fmt::Display) -> Self {
        Self::new(Code::INTERNAL, error.to_string())
    }

    pub(crate) fn cancelled() -> Self {
        Self::new(Code::CANCELLED, "the call was cancelled")
    }
}

/// Fit to be shown, and cut to what may be kept.
fn printable(text: &str) -> String {
    let mut out = tame(text).into_owned();
    out.truncate(out.floor_char_boundary(MAX_ERROR_TEXT));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_code_becomes_internal() {
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
