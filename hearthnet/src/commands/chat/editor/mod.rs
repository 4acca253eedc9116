//! Input lines of a chat: editing and history; a paste or a quoted text has several lines.

#[cfg(feature = "line-editor")]
mod edited;
mod input;

use std::io::{BufRead as _, Cursor, IsTerminal as _, Read as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use hearthnet_platform::terminal::has_input_within;

pub(super) use self::input::{Input, unreadable};
use self::input::{NO_TEXT, PASTED};
use super::command::{goes_on, may_go_on};
#[cfg(feature = "line-editor")]
use crate::cli::note;
use crate::cli::{Failure, TerminalStyle};

pub(super) enum Lines {
    /// Line editor, on a terminal with cursor control.
    #[cfg(feature = "line-editor")]
    Edited(Box<edited::Editor>),
    /// Plain lines of the terminal, until Ctrl-D.
    Plain(Plain),
}

impl Lines {
    /// `file` keeps the history, unencrypted. Without a file the history ends with this chat.
    pub(super) fn new(style: &TerminalStyle, file: Option<PathBuf>) -> Self {
        #[cfg(feature = "line-editor")]
        if style.moves {
            return Self::Edited(Box::new(edited::Editor::new(style, file)));
        }
        #[cfg(not(feature = "line-editor"))]
        drop(file);
        Self::Plain(Plain::new(style.bold("> "), String::new()))
    }

    pub(super) fn next(&mut self) -> Result<Input, Failure> {
        match self {
            #[cfg(feature = "line-editor")]
            Self::Edited(editor) => match editor.next() {
                Ok(input) => Ok(input),
                Err(error) => {
                    note(format!(
                        "warning: lines cannot be edited on this terminal: {error}"
                    ));
                    let mut plain = Plain::new(editor.prompt().to_owned(), editor.take_typed());
                    let input = plain.next();
                    *self = Self::Plain(plain);
                    input
                }
            },
            Self::Plain(plain) => plain.next(),
        }
    }
}

/// Most bytes of a line that a terminal in canonical mode delivers. Linux silently drops the bytes
/// beyond (`N_TTY_BUF_SIZE`, less the end of the line).
const MOST_BYTES: usize = 4095;

/// Message for a line that the terminal has cut.
pub(super) const CUT: &str = "this line was not sent: the terminal passes on 4095 bytes of a line and \
    drops the rest; put a long text into a file, which `hearthnet chat FILE` reads";

/// Whether the terminal may have dropped the end of this line of standard input.
pub(super) fn was_cut(line: &[u8]) -> bool {
    line.len() > MOST_BYTES && std::io::stdin().is_terminal()
}

/// Reader for a terminal without cursor control.
pub(super) struct Plain {
    prompt: String,
    /// Text that was typed before this reader began.
    early: Cursor<String>,
    has_ended: bool,
}

impl Plain {
    fn new(prompt: String, early: String) -> Self {
        Self {
            prompt,
            early: Cursor::new(early),
            has_ended: false,
        }
    }

    /// Reads a message. Lines that arrive together are a paste, and form one message.
    fn next(&mut self) -> Result<Input, Failure> {
        // A terminal reports the end of input only once, possibly right after a message.
        if self.has_ended {
            return Ok(Input::End);
        }
        let (mut text, mut cut) = (Vec::new(), false);
        let typed_ahead = !self.early().is_empty() || has_input_within(Duration::ZERO);
        loop {
            let more = match text.is_empty() {
                true => self.prompt.as_str(),
                false => "  ",
            };
            let shown = self
                .early()
                .split_inclusive('\n')
                .next()
                .unwrap_or_default();
            let _ = write!(std::io::stderr(), "{more}{shown}");
            let begin = text.len();
            let read = (&mut self.early)
                .chain(std::io::stdin().lock())
                .read_until(b'\n', &mut text)
                .map_err(unreadable)?;
            cut |= was_cut(text.get(begin..).unwrap_or_default());
            let so_far = String::from_utf8_lossy(&text);
            let goes_on = goes_on(&so_far)
                || (!typed_ahead && may_go_on(&so_far) && has_input_within(PASTED));
            self.has_ended = read == 0;
            match read {
                0 if text.is_empty() => return Ok(Input::End),
                1.. if goes_on => {}
                _ if cut => return Ok(Input::Refused(CUT)),
                _ => break,
            }
        }
        Ok(match String::from_utf8(text) {
            Ok(text) => Input::Line(text),
            Err(_) => Input::Refused(NO_TEXT),
        })
    }

    /// The rest of the text that was typed before.
    fn early(&self) -> &str {
        let at = usize::try_from(self.early.position()).unwrap_or(usize::MAX);
        self.early.get_ref().get(at..).unwrap_or_default()
    }
}
