//! Ctrl-C stops the current answer; without an answer it ends the program.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_orchestrator::{Cancel, ChatError};
use hearthnet_platform::signals::{interrupt, terminate};
use hearthnet_platform::terminal::{HiddenInput, Mode, is_in_foreground};
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use super::screen::clear_line;
use crate::cli::{Failure, TerminalStyle, report};

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
        let terminal = Mode::now();
        let heard = Arc::clone(&state);
        runtime.spawn(async move {
            let (Ok(mut int), Ok(mut term)) = (interrupt(), terminate()) else {
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
    pub(super) fn answering(&self) -> Answering {
        let cancel = Cancel::default();
        self.0.lock().answer = Some(cancel.clone());
        Answering {
            state: Arc::clone(&self.0),
            cancel,
            _quiet: quiet(),
        }
    }

    pub(super) fn ending(&self) -> bool {
        self.0.lock().ending
    }
}

/// Guard of an answer in progress.
pub(super) struct Answering {
    state: Arc<Mutex<State>>,
    pub(super) cancel: Cancel,
    _quiet: Option<HiddenInput>,
}

/// Turns the terminal's echo off during an answer. Otherwise typed text would appear inside the
/// answer, and erasing it would erase the answer's words. The input is read after the answer.
fn quiet() -> Option<HiddenInput> {
    let may = std::io::stdout().is_terminal() && is_in_foreground();
    may.then(HiddenInput::begin)?.ok()
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.state.lock().answer = None;
    }
}

fn end(terminal: Option<&Mode>, style: &TerminalStyle, json: bool) -> ! {
    if let Some(mode) = terminal {
        mode.restore();
    }
    clear_line(style);
    let failure = Failure::from(ChatError::Cancelled);
    report(&failure, json);
    std::process::exit(i32::from(failure.kind.exit_code()))
}
