//! [`FrameSink`], and the state that the tasks of one connection share.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::{Code, Violation, retry};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::Cancel;
use super::error::CallError;
use super::frame::WINDOW_BYTES;
use super::session::{NotTaken, ServerEvent, ServingSession};

/// Longest time with a full window, and time limit for sending one message.
pub(super) const STALL: Duration = Duration::from_secs(30);
/// Bytes of the backlog above which nothing more is received.
const MAX_BACKLOG: usize = WINDOW_BYTES;

/// State shared by the tasks of one connection.
#[derive(Default)]
pub(super) struct Connection {
    state: Mutex<State>,
    /// A message is ready to be sent.
    pub(super) written: Notify,
    /// A window may have room, or a call has ended.
    room: Notify,
    /// A message was taken from the backlog.
    drained: Notify,
}

#[derive(Default)]
struct State {
    session: ServingSession,
    running: HashMap<u32, Cancel>,
    is_closed: bool,
}

impl Connection {
    pub(super) fn receive(&self, text: &str) -> Result<ServerEvent, Violation> {
        let mut state = self.state.lock();
        let asked = state.session.receive(text)?;
        if let ServerEvent::Cancelled { call } = asked
            && let Some(cancel) = state.running.remove(&call)
        {
            cancel.cancel();
        }
        drop(state);
        self.room.notify_waiters();
        self.written.notify_one();
        Ok(asked)
    }

    /// Registers the token of a running call. Returns false if the call has ended already.
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

/// Sink for the events of one call.
#[derive(Clone)]
pub struct FrameSink {
    connection: Arc<Connection>,
    call: u32,
}

impl FrameSink {
    pub(super) fn new(connection: Arc<Connection>, call: u32) -> Self {
        Self { connection, call }
    }

    /// Sends an event. Waits while the window of unacknowledged events is full.
    ///
    /// # Errors
    /// `cancelled` if the call has ended, `timeout` if the caller acknowledges nothing for 30 s,
    /// `internal` for an event with a bad name or too many bytes.
    pub async fn send(&self, event: &str, data: &Value) -> Result<(), CallError> {
        let taken = retry(&self.connection.room, || {
            let mut state = self.connection.state.lock();
            match state.session.event(self.call, event, data) {
                Err(NotTaken::Full) => None,
                taken => Some(taken),
            }
        });
        match timeout(STALL, taken).await {
            Ok(Ok(())) => {
                self.connection.written.notify_one();
                Ok(())
            }
            Ok(Err(NotTaken::Ended)) => Err(CallError::cancelled()),
            Ok(Err(error)) => Err(CallError::internal(error)),
            Err(_) => {
                let took = format!("the caller acknowledged no event for {} s", STALL.as_secs());
                Err(CallError::new(Code::TIMEOUT, took))
            }
        }
    }
}
