//! Input of a chat, or why it is refused.

use std::time::Duration;

use crate::cli::{Failure, failure};

pub(in super::super) enum Input {
    Line(String),
    /// The input is not a message, with the reason.
    Refused(&'static str),
    /// Ctrl-C.
    #[cfg_attr(
        not(feature = "line-editor"),
        allow(dead_code, reason = "without the line editor Ctrl-C is a signal")
    )]
    Interrupted,
    /// Ctrl-D.
    End,
}

/// Longest gap between the lines of a paste.
pub(super) const PASTED: Duration = Duration::from_millis(30);

pub(super) const NO_TEXT: &str = "this is not UTF-8 text";

pub(in super::super) fn unreadable(error: impl std::fmt::Display) -> Failure {
    failure!(BadRequest, "cannot read the message: {error}").hint("messages must be UTF-8 text")
}
