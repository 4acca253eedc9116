//! What a call ends with when it does not end well.

use std::borrow::Cow;
use std::fmt;

/// Longest message or hint that is sent or kept, in bytes: a few sentences.
pub const MAX_ERROR_TEXT: usize = 1024;

/// Longest code or event name, in bytes.
pub const MAX_NAME: usize = 64;

/// The stable name of a failure: 1 to 64 characters of `a-z 0-9 _`, first a letter.
///
/// The constants are the universal codes, which every capability may end with. A
/// capability may have codes of its own ([`Code::own`]).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Code(Cow<'static, str>);

impl Code {
    /// The caller's level is too low, or it is not who it says.
    pub const UNAUTHORIZED: Self = Self::own("unauthorized");
    /// A signature does not belong to its signer and these bytes.
    pub const INVALID_SIGNATURE: Self = Self::own("invalid_signature");
    /// The envelope was made too long ago, or lies in the future.
    pub const CALL_EXPIRED: Self = Self::own("call_expired");
    /// The envelope was used before.
    pub const CALL_REPLAYED: Self = Self::own("call_replayed");
    /// The node has no capability of this name.
    pub const NOT_FOUND: Self = Self::own("not_found");
    /// The node has the capability in another version.
    pub const VERSION_UNSUPPORTED: Self = Self::own("version_unsupported");
    /// The caller makes more calls than its budget allows.
    pub const RATE_LIMITED: Self = Self::own("rate_limited");
    /// As many calls of this capability as allowed are running.
    pub const BUSY: Self = Self::own("busy");
    /// The capability belongs to an experiment that is switched off.
    pub const EXPERIMENTAL_DISABLED: Self = Self::own("experimental_disabled");
    /// A parameter is missing, unknown, of the wrong type or out of its range.
    pub const BAD_REQUEST: Self = Self::own("bad_request");
    /// The caller gave up.
    pub const CANCELLED: Self = Self::own("cancelled");
    /// The call took longer than it may, or its caller took no frames.
    pub const TIMEOUT: Self = Self::own("timeout");
    /// The node could not be reached, or the connection was lost.
    pub const UNREACHABLE: Self = Self::own("unreachable");
    /// The node failed in a way that is nobody's fault but its own.
    pub const INTERNAL: Self = Self::own("internal");

    /// A code of a capability's own. What is not spelled like a code becomes
    /// `internal` where it is sent.
    pub const fn own(name: &'static str) -> Self {
        Self(Cow::Borrowed(name))
    }

    /// Reads a code that a peer sent; `None` if it is not spelled like one.
    pub fn parse(text: &str) -> Option<Self> {
        is_name(text).then(|| Self(Cow::Owned(text.to_owned())))
    }

    /// The code as it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a text can be a code or the name of an event.
pub(crate) fn is_name(text: &str) -> bool {
    text.len() <= MAX_NAME
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a call failed: a code for programs, a sentence and a way out for people.
///
/// It may come from a peer. Its texts hold no control characters and at most
/// [`MAX_ERROR_TEXT`] bytes each, whoever made it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
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

    pub(crate) fn cancelled() -> Self {
        Self::new(Code::CANCELLED, "the call was cancelled")
    }
}

/// Cut to what may be kept; control characters, which could steer a terminal, replaced.
fn printable(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        let c = if c.is_control() { ' ' } else { c };
        if out.len() + c.len_utf8() > MAX_ERROR_TEXT {
            break;
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_one_spelling() {
        for good in ["a", "rate_limited", "m26_x", &"a".repeat(64)] {
            assert_eq!(Code::parse(good).unwrap().as_str(), good);
        }
        for bad in ["", "A", "_a", "1a", "a b", "a-b", "é", &"a".repeat(65)] {
            assert_eq!(Code::parse(bad), None, "{bad}");
        }
        let odd = CallError::new(Code::own("Not A Code"), "x");
        assert_eq!(odd.code(), &Code::INTERNAL);
    }

    #[test]
    fn texts_of_peers_are_cut_and_cannot_steer_a_terminal() {
        let error =
            CallError::new(Code::INTERNAL, "a\u{1b}[2Jb\nc\u{9b}d").with_hint("é".repeat(5000));
        assert_eq!(error.message(), "a [2Jb c d");
        assert_eq!(error.hint().len(), MAX_ERROR_TEXT);
    }
}
