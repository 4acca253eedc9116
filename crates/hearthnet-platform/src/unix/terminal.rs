//! The terminal, and groups of processes that it sends signals to.

use std::io::{self, IsTerminal as _};
/// An output or input with a file descriptor.
pub use std::os::fd::AsFd as Handle;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::process::{Signal, getpgrp, kill_current_process_group};
use rustix::stdio::dup2_stdout;
use rustix::termios::{
    LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr,
};

/// Width in columns, if the terminal reports it.
pub fn columns(terminal: impl Handle) -> Option<usize> {
    let size = tcgetwinsize(terminal).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

/// Mode of the terminal on standard input.
pub struct Mode(Termios);

impl Mode {
    /// Current mode; `None` without a terminal.
    pub fn now() -> Option<Self> {
        tcgetattr(io::stdin()).ok().map(Self)
    }

    pub fn restore(&self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Mode of the terminal on standard input in which typed characters are not shown. The earlier mode
/// is restored when dropped.
pub struct HiddenInput {
    before: Termios,
    when: OptionalActions,
}

impl HiddenInput {
    /// Hides typed characters. They can be read afterwards.
    pub fn begin() -> io::Result<Self> {
        Self::without(LocalModes::ECHO, OptionalActions::Now)
    }

    /// Hides typed characters, discards those before and after, and passes each key on, Ctrl-C
    /// included, so that the program always restores the mode.
    pub fn by_key() -> io::Result<Self> {
        let modes = LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
        Self::without(modes, OptionalActions::Flush)
    }

    fn without(modes: LocalModes, when: OptionalActions) -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut hidden = before.clone();
        hidden.local_modes.remove(modes);
        tcsetattr(io::stdin(), when, &hidden)?;
        Ok(Self { before, when })
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), self.when, &self.before);
    }
}

/// Whether this process is in the foreground of the terminal on standard input. The system stops a
/// background process that changes the terminal (SIGTTOU).
pub fn is_in_foreground() -> bool {
    tcgetpgrp(io::stdin()).ok() == Some(getpgrp())
}

/// Whether an input delivers nothing within `time`, not even its end.
pub fn is_silent(input: impl Handle, time: Duration) -> bool {
    wait(input, time).is_ok_and(|events| events.is_empty())
}

/// Whether input of the terminal on standard input arrives within `time`: in canonical mode, a
/// line. The end of input does not count.
pub fn has_input_within(time: Duration) -> bool {
    // A terminal delivers one line per read, so no line waits in this process's buffer.
    wait(io::stdin(), time)
        .is_ok_and(|events| !events.is_empty() && !events.contains(PollFlags::HUP))
}

/// Waits until an input delivers something. Returns the events, or none after `time`.
fn wait(input: impl Handle, time: Duration) -> rustix::io::Result<PollFlags> {
    let mut asked = [PollFd::new(&input, PollFlags::IN)];
    let time = Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    poll(&mut asked, Some(&time))?;
    let [asked] = asked;
    Ok(asked.revents())
}

/// Whether two outputs are the same file. True if unknown.
pub fn is_same_file(one: impl Handle, other: impl Handle) -> bool {
    match (fstat(one), fstat(other)) {
        (Ok(one), Ok(other)) => (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino),
        _ => true,
    }
}

/// Standard output that is no terminal, while it leads to standard error instead. Restored when
/// dropped.
pub struct RedirectedOutput(OwnedFd);

impl RedirectedOutput {
    /// Redirects it; `None` if it is a terminal or cannot be redirected.
    pub fn begin() -> Option<Self> {
        let stdout = io::stdout();
        if stdout.is_terminal() {
            return None;
        }
        let kept = stdout.as_fd().try_clone_to_owned().ok()?;
        dup2_stdout(io::stderr()).ok()?;
        Some(Self(kept))
    }
}

impl Drop for RedirectedOutput {
    fn drop(&mut self) {
        let _ = dup2_stdout(&self.0);
    }
}

/// Stops this process and those beside it, as Ctrl-Z does, until the user continues them.
///
/// # Errors
/// The system's error.
pub fn suspend() -> io::Result<()> {
    Ok(kill_current_process_group(Signal::TSTP)?)
}

/// Starts a command in a process group of its own: a signal of the terminal does not reach it.
pub fn in_own_group(command: &mut Command) {
    command.process_group(0);
}
