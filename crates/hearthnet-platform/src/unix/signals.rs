//! Signals that ask a program to end. Each call returns a receiver; from then on, the signal no
//! longer ends the process. They must be called in a tokio runtime.

use std::io;

pub use tokio::signal::unix::Signal;
use tokio::signal::unix::{SignalKind, signal};

/// SIGINT: Ctrl-C.
///
/// # Errors
/// The system's error.
pub fn interrupt() -> io::Result<Signal> {
    signal(SignalKind::interrupt())
}

/// SIGTERM.
///
/// # Errors
/// The system's error.
pub fn terminate() -> io::Result<Signal> {
    signal(SignalKind::terminate())
}

/// SIGHUP: the terminal was closed.
///
/// # Errors
/// The system's error.
pub fn hangup() -> io::Result<Signal> {
    signal(SignalKind::hangup())
}
