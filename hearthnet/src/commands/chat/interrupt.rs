//! Ctrl-C: it stops the answer, and where none is being made it ends the program.

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
use crate::failure::Failure;
use crate::output::Look;

/// Who hears SIGINT and SIGTERM.
pub(super) struct Interrupts(Arc<Mutex<State>>);

/// So soon after a Ctrl-C that stopped an answer another one is the same wish.
const SAME_WISH: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    /// What is being answered.
    answer: Option<Cancel>,
    /// When Ctrl-C stopped an answer last.
    stopped: Option<Instant>,
    /// The program was asked to end, and does when the answer has stopped.
    ending: bool,
}

impl Interrupts {
    /// Listens from now on. While nothing is answered both signals end the program at once, with
    /// the status of an interrupt: connecting to hosts, reading a model and waiting for input have
    /// nothing to clean up that others would not notice by themselves.
    pub(super) fn watch(runtime: &Runtime, look: Look, json: bool) -> Self {
        let state: Arc<Mutex<State>> = Arc::default();
        // As it was before anybody edited a line on it.
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
                    _ => end(terminal.as_ref(), &look, json),
                }
            }
        });
        Self(state)
    }

    /// From here on Ctrl-C stops this answer only; where it does not stop, a second one ends the
    /// program all the same.
    pub(super) fn answering(&self) -> Answering<'_> {
        let cancel = Cancel::default();
        self.lock().answer = Some(cancel.clone());
        Answering {
            all: self,
            cancel,
            _quiet: Quiet::begin(),
        }
    }

    /// Whether the program was asked to end.
    pub(super) fn ending(&self) -> bool {
        self.lock().ending
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, State> {
        self.0.lock()
    }
}

/// An answer is being made for as long as this lives.
pub(super) struct Answering<'a> {
    all: &'a Interrupts,
    pub(super) cancel: Cancel,
    _quiet: Option<Quiet>,
}

/// While this lives the terminal does not show what is typed: it would stand in the middle of the
/// answer, and erasing it would erase words. It is read when the answer is over.
struct Quiet(Termios);

impl Quiet {
    fn begin() -> Option<Self> {
        let (terminal, shown) = (std::io::stdin(), std::io::stdout());
        let before = tcgetattr(&terminal).ok().filter(|_| shown.is_terminal())?;
        // A program in the background must not touch the terminal: it would be stopped.
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

fn end(terminal: Option<&Termios>, look: &Look, json: bool) -> ! {
    if let Some(mode) = terminal {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, mode);
    }
    clear_line(look);
    let failure = Failure::from(ChatError::Cancelled);
    crate::report(&failure, json);
    std::process::exit(i32::from(failure.kind.exit_code()))
}
