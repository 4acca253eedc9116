//! Command queue from the connections to the compute thread.
//!
//! Its length is bounded by its content: an open holds a stream's slot, a step or truncation holds
//! a ticket of its stream, and a close follows an open. So no message is refused here, and a close
//! never waits behind a full queue.

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
    /// The compute thread sleeps: only then is a wake-up needed, which costs a system call.
    asleep: bool,
    /// Set by [`Inbox::poke`].
    poked: bool,
    closed: bool,
}

impl Inbox {
    /// Queues a command. Returns `false` if the inbox is closed.
    pub(crate) fn push(&self, command: Command) -> bool {
        let mut state = self.state.lock();
        if state.closed {
            return false;
        }
        state.commands.push_back(command);
        self.wake(state);
        true
    }

    /// Wakes the compute thread without a command: a test has moved its clock.
    #[cfg(test)]
    pub(crate) fn poke(&self) {
        let mut state = self.state.lock();
        state.poked = true;
        self.wake(state);
    }

    /// Ends the compute thread after its current batch.
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

    /// Moves all commands to `into`, which must be empty. Returns `false` if the inbox is closed.
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

    /// Blocks until there is a command, a poke, a close, or `timeout` has passed.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let mut state = self.state.lock();
        if !state.commands.is_empty() || state.closed || state.poked {
            state.poked = false;
            return;
        }
        state.asleep = true;
        // A spurious wake-up is harmless: the compute thread checks and waits again.
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
