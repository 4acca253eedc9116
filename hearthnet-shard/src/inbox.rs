//! The way from the connections to the compute thread.
//!
//! Bounded by what may be in it: an open holds a stream's place, a step or truncation
//! holds a ticket of its stream, and a close follows an open. So no message is refused
//! here, and a close never waits behind a full queue.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::sched::Command;

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
        let mut state = self.state.lock();
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
        let mut state = self.state.lock();
        state.poked = true;
        self.wake(state);
    }

    /// Tells the compute thread to end after the batch that it is at.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        self.wake(state);
    }

    fn wake(&self, state: parking_lot::MutexGuard<'_, State>) {
        let asleep = state.asleep;
        drop(state);
        if asleep {
            self.ready.notify_one();
        }
    }

    /// Moves all commands to `into`, which must be empty. `false` if the inbox is closed.
    pub(crate) fn take(&self, into: &mut VecDeque<Command>) -> bool {
        let mut state = self.state.lock();
        std::mem::swap(&mut state.commands, into);
        !state.closed
    }

    /// Whether [`Inbox::wait`] would return at once.
    pub(crate) fn has_something(&self) -> bool {
        let state = self.state.lock();
        !state.commands.is_empty() || state.closed || state.poked
    }

    /// Sleeps until there is a command, a poke, the end, or `timeout` has passed.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let mut state = self.state.lock();
        if !state.commands.is_empty() || state.closed || state.poked {
            state.poked = false;
            return;
        }
        state.asleep = true;
        // Waking for nothing is harmless: the caller looks again and comes back.
        match timeout {
            None => self.ready.wait(&mut state),
            Some(timeout) => {
                self.ready.wait_for(&mut state, timeout);
            }
        }
        state.asleep = false;
        state.poked = false;
    }
}
