//! Input lines of a chat: editing and history; a paste or a quoted text has several lines.

#[cfg(feature = "line-editor")]
mod edited;
mod input;

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec};

use self::input::NO_TEXT;
pub(super) use self::input::{Input, unreadable};
use super::command::goes_on;
use crate::cli::failure::Failure;
use crate::cli::output::TerminalStyle;

pub(super) enum Lines {
    /// Line editor, on a terminal with cursor control.
    #[cfg(feature = "line-editor")]
    Edited(Box<edited::Editor>),
    /// Plain lines of the terminal, until Ctrl-D.
    Plain { prompt: String, has_ended: bool },
}

impl Lines {
    /// `file` keeps the history, unencrypted. Without a file the history ends with this chat.
    pub(super) fn new(style: &TerminalStyle, file: Option<PathBuf>) -> Result<Self, Failure> {
        #[cfg(feature = "line-editor")]
        if style.moves() {
            let editor = edited::Editor::new(style, file)?;
            return Ok(Self::Edited(Box::new(editor)));
        }
        #[cfg(not(feature = "line-editor"))]
        drop(file);
        Ok(Self::Plain {
            prompt: style.bold("> "),
            has_ended: false,
        })
    }

    pub(super) fn next(&mut self) -> Result<Input, Failure> {
        match self {
            #[cfg(feature = "line-editor")]
            Self::Edited(editor) => editor.next(),
            // A terminal reports the end of input only once, possibly right after a message.
            Self::Plain {
                has_ended: true, ..
            } => Ok(Input::End),
            Self::Plain { prompt, has_ended } => plain(prompt, has_ended),
        }
    }
}

/// Most bytes of a line that a terminal in canonical mode delivers. Linux silently drops the bytes
/// beyond (`N_TTY_BUF_SIZE`, less the end of the line).
const MOST_BYTES: usize = 4095;

/// Message for a line that the terminal has cut.
pub(super) const CUT: &str = "this line was not sent: the terminal passes on 4095 bytes of a line and \
    drops the rest; put a long text into a file, which `hearthnet chat FILE` reads";

/// Longest gap between the lines of a paste.
const PASTED: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 30_000_000,
};

/// Whether the terminal may have dropped the end of this line of standard input.
pub(super) fn was_cut(line: &[u8]) -> bool {
    line.len() > MOST_BYTES && std::io::stdin().is_terminal()
}

/// Reads a message from a terminal without cursor control. Lines that arrive together are a paste,
/// and form one message.
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

/// Whether another line arrives on standard input within `time`. The end of input does not count.
fn comes_within(time: &Timespec) -> bool {
    let stdin = std::io::stdin();
    let mut asked = [PollFd::new(&stdin, PollFlags::IN)];
    // A terminal delivers one line per read, so no line waits in this process's buffer.
    matches!(rustix::event::poll(&mut asked, Some(time)), Ok(1..))
        && asked
            .iter()
            .all(|fd| !fd.revents().contains(PollFlags::HUP))
}
