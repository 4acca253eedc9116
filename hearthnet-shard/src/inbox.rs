//! The way from the connections to the compute thread.
//!
//! Bounded by what may be in it: an open holds a stream's place, a step or truncation
//! holds a ticket of its stream, and a close follows an open. So no message is refused
//! here, and a close never waits behind a full queue.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::sched::Command;
use crate::stream_handle::lock;

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    ready: Condvar,
}

#[derive(Debug, Default)]
struct State {
    commands: VecDeque<Command>,
    /// The compute thread sleeps: only then is a wake-up worth its system call.
    asleep: bool,
    /// Something besides commands changed.
    poked: bool,
    closed: bool,
}

impl Inbox {
    /// Hands a command over. `false` if the compute thread is gone or going.
    pub(crate) fn push(&self, command: Command) -> bool {
        let mut state = lock(&self.state);
        if state.closed {
            return false;
        }
        state.commands.push_back(command);
        self.wake(state);
        true
    }

    /// Makes the compute thread look around, although there is no command: a clock that is set
    /// by hand has moved.
    #[cfg(test)]
    pub(crate) fn poke(&self) {
        let mut state = lock(&self.state);
        state.poked = true;
        self.wake(state);
    }

    /// Tells the compute thread to end after the batch that it is at.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        self.wake(state);
    }

    fn wake(&self, state: std::sync::MutexGuard<'_, State>) {
        let asleep = state.asleep;
        drop(state);
        if asleep {
            self.ready.notify_one();
        }
    }

    /// Moves all commands to `into`, which must be empty. `false` if the inbox is closed.
    pub(crate) fn take(&self, into: &mut VecDeque<Command>) -> bool {
        let mut state = lock(&self.state);
        std::mem::swap(&mut state.commands, into);
        !state.closed
    }

    /// Whether [`Inbox::wait`] would return at once.
    pub(crate) fn has_something(&self) -> bool {
        let state = lock(&self.state);
        !state.commands.is_empty() || state.closed || state.poked
    }

    /// Sleeps until there is a command, a poke, the end, or `timeout` has passed.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let mut state = lock(&self.state);
        if !state.commands.is_empty() || state.closed || state.poked {
            state.poked = false;
            return;
        }
        state.asleep = true;
        // Waking for nothing is harmless: the caller looks again and comes back.
        let mut state = match timeout {
            None => self
                .ready
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                self.ready
                    .wait_timeout(state, timeout)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        state.asleep = false;
        state.poked = false;
    }
}
