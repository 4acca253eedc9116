//! Lines that people type: edited, recalled, of several lines where they are pasted or in quotes.

#[cfg(feature = "line-editor")]
mod edited;

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::command::goes_on;
use crate::failure::{Failure, Kind};
use crate::output::Look;

/// What came of asking for a line.
pub(super) enum Input {
    Line(String),
    /// What was typed is no message, and why.
    Refused(&'static str),
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
    /// As the terminal itself has them, behind this prompt, until Ctrl-D.
    Plain { prompt: String, has_ended: bool },
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
        Ok(Self::Plain {
            prompt: look.bold("> "),
            has_ended: false,
        })
    }

    pub(super) fn next(&mut self) -> Result<Input, Failure> {
        match self {
            #[cfg(feature = "line-editor")]
            Self::Edited(editor) => editor.next(),
            // A terminal says once that nothing follows, maybe right behind a message.
            Self::Plain {
                has_ended: true, ..
            } => Ok(Input::End),
            Self::Plain { prompt, has_ended } => plain(prompt, has_ended),
        }
    }
}

/// Most bytes of a line that a terminal in canonical mode passes on: what is typed beyond them Linux drops
/// without a word (`N_TTY_BUF_SIZE`, less the end of the line).
const MOST_BYTES: usize = 4095;

/// Why a line is no message that a terminal has cut.
pub(super) const CUT: &str = "this line was not sent: the terminal passes on 4095 bytes of a line and \
    drops the rest; put a long text into a file, which `hearthnet chat FILE` reads";

/// Why bytes are no message.
const NO_TEXT: &str = "this is no UTF-8 text";

/// How long the lines of a paste may be apart.
const PASTED: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 30_000_000,
};

/// Whether a line of standard input, with its end, may lack what the terminal has dropped.
pub(super) fn was_cut(line: &[u8]) -> bool {
    line.len() > MOST_BYTES && std::io::stdin().is_terminal()
}

/// Asks for a message on a terminal that does nothing by itself. Lines that come together are pasted,
/// and one message.
fn plain(prompt: &str, has_ended: &mut bool) -> Result<Input, Failure> {
    let (mut text, mut cut) = (Vec::new(), false);
    let typed_ahead = comes_within(&Timespec::default());
    loop {
        let more = if text.is_empty() { prompt } else { "  " };
        let _ = write!(std::io::stderr(), "{more}");
        let begin = text.len();
        let read = std::io::stdin()
            .lock()
            .read_until(b'\n', &mut text)
            .map_err(unreadable)?;
        cut |= was_cut(text.get(begin..).unwrap_or_default());
        let so_far = String::from_utf8_lossy(&text);
        let goes_on =
            goes_on(&so_far) || (!typed_ahead && !so_far.starts_with('/') && comes_within(&PASTED));
        *has_ended = read == 0;
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

/// Whether another line comes on standard input within this time. Its end is none.
fn comes_within(time: &Timespec) -> bool {
    let stdin = std::io::stdin();
    let mut asked = [PollFd::new(&stdin, PollFlags::IN)];
    // A terminal passes its lines on one by one: none waits in this process's own buffer.
    matches!(rustix::event::poll(&mut asked, Some(time)), Ok(1..))
        && asked
            .iter()
            .all(|fd| !fd.revents().contains(PollFlags::HUP))
}

pub(super) fn unreadable(error: impl std::fmt::Display) -> Failure {
    Failure::new(
        Kind::BadRequest,
        format!("cannot read the message: {error}"),
    )
    .hint("messages must be UTF-8 text")
}
