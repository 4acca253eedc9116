//! Where a handler puts its events: one call of a connection, whose tasks share its state.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::Code;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::Cancel;
use super::error::CallError;
use super::frame::WINDOW_BYTES;
use super::session::{Asked, NotTaken, ServingSession};
use hearthnet_transport::Violation;

/// How long a caller may leave a full window, or a message half taken.
pub(super) const STALL: Duration = Duration::from_secs(30);
/// While more than this waits to be sent, nothing more is received.
const MAX_BACKLOG: usize = WINDOW_BYTES;

/// What the tasks of one connection share.
#[derive(Default)]
pub(super) struct Connection {
    state: Mutex<State>,
    /// There is something to send.
    pub(super) written: Notify,
    /// There may be room for events, or a call has ended.
    room: Notify,
    /// Something was sent.
    drained: Notify,
}

#[derive(Default)]
struct State {
    session: ServingSession,
    running: HashMap<u32, Cancel>,
    is_closed: bool,
}

impl Connection {
    pub(super) fn receive(&self, text: &str) -> Result<Asked, Violation> {
        let mut state = self.state.lock();
        let asked = state.session.receive(text)?;
        if let Asked::Cancelled { call } = asked
            && let Some(cancel) = state.running.remove(&call)
        {
            cancel.cancel();
        }
        drop(state);
        self.room.notify_waiters();
        self.written.notify_one();
        Ok(asked)
    }

    /// Notes how a call that now runs is cancelled. False if it has ended already.
    pub(super) fn watch(&self, call: u32, cancel: Cancel) -> bool {
        let mut state = self.state.lock();
        let is_open = !state.is_closed && state.session.is_open(call);
        if is_open {
            state.running.insert(call, cancel);
        }
        is_open
    }

    pub(super) fn finish(&self, call: u32, result: Result<Value, CallError>) {
        let mut state = self.state.lock();
        state.session.finish(call, result.as_ref());
        state.running.remove(&call);
        drop(state);
        self.room.notify_waiters();
        self.written.notify_one();
    }

    pub(super) fn next_message(&self) -> Option<String> {
        let text = self.state.lock().session.poll_transmit();
        self.drained.notify_one();
        text
    }

    pub(super) async fn until_drained(&self) {
        while self.state.lock().session.backlog_bytes() > MAX_BACKLOG {
            self.drained.notified().await;
        }
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let running: Vec<(u32, Cancel)> = state.running.drain().collect();
        for (call, cancel) in running {
            state.session.finish(call, Err(&CallError::cancelled()));
            cancel.cancel();
        }
        drop(state);
        self.room.notify_waiters();
    }
}

/// Where a handler puts its events.
#[derive(Clone)]
pub struct FrameSink {
    connection: Arc<Connection>,
    call: u32,
}

impl FrameSink {
    /// For one call of a connection.
    pub(super) fn new(connection: Arc<Connection>, call: u32) -> Self {
        Self { connection, call }
    }

    /// Sends an event; waits while the caller has not acknowledged earlier ones.
    ///
    /// # Errors
    /// `cancelled` when the call has ended, `timeout` when the caller takes nothing for
    /// 30 s, `internal` for an event that has no proper name or does not fit.
    pub async fn send(&self, event: &str, data: &Value) -> Result<(), CallError> {
        let deadline = Instant::now() + STALL;
        loop {
            let mut room = pin!(self.connection.room.notified());
            // Before trying, so that room that comes in between is not missed.
            room.as_mut().enable();
            let taken = self
                .connection
                .state
                .lock()
                .session
                .event(self.call, event, data);
            match taken {
                Ok(()) => {
                    self.connection.written.notify_one();
                    return Ok(());
                }
                Err(NotTaken::Ended) => return Err(CallError::cancelled()),
                Err(error @ (NotTaken::TooBig | NotTaken::Name)) => {
                    return Err(CallError::internal(error));
                }
                Err(NotTaken::Full) => {}
            }
            if timeout_at(deadline, room).await.is_err() {
                let took = format!("the caller took no event for {} s", STALL.as_secs());
                return Err(CallError::new(Code::TIMEOUT, took));
            }
        }
    }
}
