//! Lines that people type: edited, recalled, of several lines where they are pasted or in quotes.

#[cfg(feature = "line-editor")]
mod edited;

use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;

use super::command::goes_on;
use crate::failure::{Failure, Kind};
use crate::output::Look;

/// What came of asking for a line.
pub(super) enum Input {
    Line(String),
    /// Ctrl-C.
    #[cfg_attr(
        not(feature = "line-editor"),
        allow(dead_code, reason = "where nothing is edited Ctrl-C is a signal")
    )]
    Interrupted,
    /// Ctrl-D.
    End,
}

/// Asks for lines.
pub(super) enum Lines {
    /// On a terminal that can move its cursor.
    #[cfg(feature = "line-editor")]
    Edited(Box<edited::Editor>),
    /// As the terminal itself has them, behind this prompt.
    Plain(String),
}

impl Lines {
    /// `file` remembers what was typed, in the clear; without one it is forgotten with this chat.
    pub(super) fn new(look: &Look, file: Option<PathBuf>) -> Result<Self, Failure> {
        #[cfg(feature = "line-editor")]
        if look.moves() {
            let editor = edited::Editor::new(look, file)?;
            return Ok(Self::Edited(Box::new(editor)));
        }
        #[cfg(not(feature = "line-editor"))]
        drop(file);
        Ok(Self::Plain(look.bold("> ")))
    }

    pub(super) fn next(&mut self) -> Result<Input, Failure> {
        match self {
            #[cfg(feature = "line-editor")]
            Self::Edited(editor) => editor.next(),
            Self::Plain(prompt) => plain(prompt),
        }
    }
}

fn plain(prompt: &str) -> Result<Input, Failure> {
    let mut text = String::new();
    loop {
        let more = if text.is_empty() { prompt } else { "  " };
        let _ = write!(std::io::stderr(), "{more}");
        let read = std::io::stdin()
            .lock()
            .read_line(&mut text)
            .map_err(unreadable)?;
        match (read, goes_on(&text)) {
            (0, _) if text.is_empty() => return Ok(Input::End),
            (0, _) | (_, false) => return Ok(Input::Line(text)),
            (_, true) => {}
        }
    }
}

pub(super) fn unreadable(error: impl std::fmt::Display) -> Failure {
    Failure::new(
        Kind::BadRequest,
        format!("cannot read the message: {error}"),
    )
    .hint("messages must be UTF-8 text")
}
