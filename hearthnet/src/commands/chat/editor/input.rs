//! Input of a chat, or why it is refused.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::cli::failure::{Failure, Kind};

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
    Failure::new(
        Kind::BadRequest,
        format!("cannot read the message: {error}"),
    )
    .hint("messages must be UTF-8 text")
}

/// Whether input of the terminal arrives within `time`, which is less than a second: in canonical
/// mode, a line. The end of input does not count.
pub(super) fn comes_within(time: Duration) -> bool {
    let stdin = std::io::stdin();
    let mut asked = [PollFd::new(&stdin, PollFlags::IN)];
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: time.subsec_nanos().into(),
    };
    // A terminal delivers one line per read, so no line waits in this process's buffer.
    matches!(rustix::event::poll(&mut asked, Some(&time)), Ok(1..))
        && asked
            .iter()
            .all(|fd| !fd.revents().contains(PollFlags::HUP))
}
