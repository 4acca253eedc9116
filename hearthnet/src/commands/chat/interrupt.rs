//! Ctrl-C stops the current answer; without an answer it ends the program.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_orchestrator::{Cancel, ChatError};
use parking_lot::Mutex;
use rustix::process::getpgrp;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use super::screen::clear_line;
use crate::cli::failure::Failure;
use crate::cli::output::{TerminalStyle, report};

/// Handler of SIGINT and SIGTERM.
pub(super) struct Interrupts(Arc<Mutex<State>>);

/// Time after a Ctrl-C that stopped an answer in which a second one is ignored.
const SAME_WISH: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    /// Answer in progress.
    answer: Option<Cancel>,
    /// Time at which Ctrl-C last stopped an answer.
    stopped: Option<Instant>,
    /// SIGTERM arrived: the program ends when the answer has stopped.
    ending: bool,
}

impl Interrupts {
    /// Starts to listen. Without an answer in progress both signals end the program at once, with
    /// the status of an interrupt. Connecting to hosts, reading a model and waiting for input need
    /// no cleanup: the other side notices the disconnect.
    pub(super) fn watch(runtime: &Runtime, style: TerminalStyle, json: bool) -> Self {
        let state: Arc<Mutex<State>> = Arc::default();
        // Terminal mode before the line editor changes it.
        let terminal = tcgetattr(std::io::stdin()).ok();
        let heard = Arc::clone(&state);
        runtime.spawn(async move {
            let (Ok(mut int), Ok(mut term)) = (
                signal(SignalKind::interrupt()),
                signal(SignalKind::terminate()),
            ) else {
                return;
            };
            loop {
                let ending = tokio::select! {
                    _ = int.recv() => false,
                    _ = term.recv() => true,
                };
                let mut state = heard.lock();
                state.ending |= ending;
                let again = state.stopped.is_some_and(|at| at.elapsed() < SAME_WISH);
                match &state.answer {
                    Some(answer) if !answer.is_cancelled() => {
                        answer.cancel();
                        state.stopped = Some(Instant::now());
                    }
                    _ if again && !ending => {}
                    _ => end(terminal.as_ref(), &style, json),
                }
            }
        });
        Self(state)
    }

    /// From now on Ctrl-C stops this answer only. If the answer does not stop, a second Ctrl-C ends
    /// the program.
    pub(super) fn answering(&self) -> Answering<'_> {
        let cancel = Cancel::default();
        self.lock().answer = Some(cancel.clone());
        Answering {
            all: self,
            cancel,
            _quiet: Quiet::begin(),
        }
    }

    pub(super) fn ending(&self) -> bool {
        self.lock().ending
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, State> {
        self.0.lock()
    }
}

/// Guard of an answer in progress.
pub(super) struct Answering<'a> {
    all: &'a Interrupts,
    pub(super) cancel: Cancel,
    _quiet: Option<Quiet>,
}

/// Guard that turns the terminal's echo off. Otherwise typed text would appear inside the answer,
/// and erasing it would erase the answer's words. The input is read after the answer.
struct Quiet(Termios);

impl Quiet {
    fn begin() -> Option<Self> {
        let (terminal, shown) = (std::io::stdin(), std::io::stdout());
        let before = tcgetattr(&terminal).ok().filter(|_| shown.is_terminal())?;
        // A background process that changes the terminal would be stopped (SIGTTOU).
        if tcgetpgrp(&terminal).ok() != Some(getpgrp()) {
            return None;
        }
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&terminal, OptionalActions::Now, &quiet).ok()?;
        Some(Self(before))
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.all.lock().answer = None;
    }
}

fn end(terminal: Option<&Termios>, style: &TerminalStyle, json: bool) -> ! {
    if let Some(mode) = terminal {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, mode);
    }
    clear_line(style);
    let failure = Failure::from(ChatError::Cancelled);
    report(&failure, json);
    std::process::exit(i32::from(failure.kind.exit_code()))
}
