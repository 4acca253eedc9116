//! The protocol of `/bus/v1` as two state machines without I/O, clock or randomness.
//!
//! ```text
//!   caller                                    node that answers
//!     call     ──────────────────────────>    open
//!              <──────────────────────────    event, event, ...   at most one window
//!     ack      ──────────────────────────>    window moves on
//!     cancel   ──────────────────────────>    closed: queued events are dropped
//!              <──────────────────────────    end | error         exactly one, the last frame
//! ```
//!
//! Call order: pass each received message to [`ServingSession::receive`] and act on its result;
//! call [`ServingSession::event`] and [`ServingSession::finish`] as the work goes on; after each of
//! these send messages from [`ServingSession::poll_transmit`] until it returns `None`.
//! [`CallingSession`] is used in the same way.
//!
//! Every call ends in exactly one `end` or `error`, even if cancelled. Until the caller has
//! received it, the caller counts the call as open, so that it never opens more calls than the
//! server allows.

use std::collections::{BTreeMap, VecDeque};

use hearthnet_transport::{CloseCode, Code, Violation, is_name};
use serde_json::Value;

use super::error::CallError;
use super::frame::{
    ACK_BYTES, ACK_FRAMES, AckData, FRAME_OVERHEAD, Frame, MAX_EVENT_BYTES, MAX_MESSAGE_BYTES,
    MAX_OPEN_CALLS, Request, WINDOW_BYTES, WINDOW_FRAMES, error_data, is_reserved, malformed,
    read_error,
};

/// Frames of a call that may still arrive after its end: an acknowledgement for each event of the
/// window, and a cancel.
const LATE_PER_CALL: u64 = WINDOW_FRAMES + 1;

/// Result of a message received by the serving side.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ServerEvent {
    /// A call was opened. The server must finish it.
    Open {
        call: u32,
        /// The request, or why it cannot be decoded.
        request: Result<Request, CallError>,
    },
    /// Events were acknowledged: the window may have room.
    Room {
        call: u32,
    },
    /// The caller cancelled the call, which is closed already.
    Cancelled {
        call: u32,
    },
    Nothing,
}

/// Why an event was not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotTaken {
    /// The window is full: retry after [`ServerEvent::Room`].
    #[error("the caller has to acknowledge events first")]
    Full,
    #[error("the call has ended")]
    Ended,
    #[error("an event has more bytes than a message may have")]
    TooBig,
    /// The event's name is reserved or not a valid name.
    #[error("this cannot be the name of an event")]
    Name,
}

/// A call on the serving side.
#[derive(Default)]
struct Serving {
    /// Received frames of the call.
    received: u64,
    /// Queued events; their order gives their numbers.
    queued: u64,
    /// Queued events that are still in `outbox`.
    waiting: u64,
    acked: u64,
    /// Bytes of each event that is queued or unacknowledged, oldest first.
    sizes: VecDeque<usize>,
}

/// Returns whether an event of `bytes` fits into the window beside unacknowledged ones.
fn has_room(unacknowledged: &VecDeque<usize>, bytes: usize) -> bool {
    let (frames, held) = (
        unacknowledged.len() as u64,
        unacknowledged.iter().sum::<usize>(),
    );
    frames < WINDOW_FRAMES && held.saturating_add(bytes) <= WINDOW_BYTES
}

/// The serving side of a connection.
#[derive(Default)]
pub struct ServingSession {
    highest: u32,
    late: u64,
    calls: BTreeMap<u32, Serving>,
    /// Events of open calls, with the call's number.
    outbox: VecDeque<(u32, String)>,
    /// Messages of closed calls; the last one of each call is its `end` or `error`.
    final_frames: VecDeque<String>,
}

impl ServingSession {
    /// Processes one message.
    ///
    /// # Errors
    /// [`Violation`]: close the connection.
    pub fn receive(&mut self, text: &str) -> Result<ServerEvent, Violation> {
        let frame = Frame::decode(text)?;
        let call = frame.call;
        if frame.event == "call" {
            if call <= self.highest {
                return Err(call_number(call));
            }
            expect_sequence(1, frame.seq)?;
            if self.calls.len() >= MAX_OPEN_CALLS {
                return Err(CloseCode::SessionLimit.violation("too many calls are open"));
            }
            self.highest = call;
            let serving = Serving {
                received: 1,
                ..Serving::default()
            };
            self.calls.insert(call, serving);
            return Ok(ServerEvent::Open {
                call,
                request: Request::from_data(frame.data),
            });
        }
        let Some(serving) = self.calls.get_mut(&call) else {
            // The call may have ended while the frame was on its way.
            if call == 0 || call > self.highest {
                return Err(call_number(call));
            }
            self.late = self.late.checked_sub(1).ok_or_else(|| {
                CloseCode::FrameRate.violation("too many frames about calls that have ended")
            })?;
            return Ok(ServerEvent::Nothing);
        };
        expect_sequence(serving.received + 1, frame.seq)?;
        serving.received = frame.seq;
        match frame.event.as_str() {
            "ack" => {
                let ack: AckData = serde_json::from_value(frame.data)
                    .map_err(|_| malformed("its data are not {seq}"))?;
                if ack.seq <= serving.acked || ack.seq > serving.queued - serving.waiting {
                    let detail = format!("an acknowledgement of {} is out of range", ack.seq);
                    return Err(CloseCode::CreditAck.violation(detail));
                }
                for _ in serving.acked..ack.seq {
                    serving.sizes.pop_front();
                }
                serving.acked = ack.seq;
                Ok(ServerEvent::Room { call })
            }
            "cancel" => {
                self.finish(call, Err(&CallError::cancelled()));
                Ok(ServerEvent::Cancelled { call })
            }
            _ => Err(malformed("its event is not one that a caller sends")),
        }
    }

    /// Queues an event of a call.
    ///
    /// # Errors
    /// [`NotTaken`].
    pub fn event(&mut self, call: u32, event: &str, data: &Value) -> Result<(), NotTaken> {
        let serving = self.calls.get_mut(&call).ok_or(NotTaken::Ended)?;
        if !is_name(event) || is_reserved(event) {
            return Err(NotTaken::Name);
        }
        let data = data.to_string();
        let size = data.len() + event.len() + FRAME_OVERHEAD;
        if size > MAX_EVENT_BYTES {
            return Err(NotTaken::TooBig);
        }
        if !has_room(&serving.sizes, size) {
            return Err(NotTaken::Full);
        }
        serving.queued += 1;
        serving.waiting += 1;
        serving.sizes.push_back(size);
        let text = Frame::encode(call, serving.queued, event, &data);
        self.outbox.push_back((call, text));
        Ok(())
    }

    /// Ends a call; no effect if it has ended already. Queued events are sent before a result and
    /// dropped before an error.
    pub fn finish(&mut self, call: u32, result: Result<&Value, &CallError>) {
        let Some(serving) = self.calls.remove(&call) else {
            return;
        };
        let (mut event, mut data) = match result {
            Ok(value) => ("end", value.to_string()),
            Err(error) => ("error", error_data(error)),
        };
        if data.len() + FRAME_OVERHEAD > MAX_MESSAGE_BYTES {
            let too_long = "the result has more bytes than a message may have";
            (event, data) = ("error", error_data(&CallError::internal(too_long)));
        }
        let queued = std::mem::take(&mut self.outbox).into_iter();
        let (of_call, others): (Vec<_>, Vec<_>) = queued.partition(|(of, _)| *of == call);
        self.outbox = others.into();
        let sent = if event == "end" {
            self.final_frames
                .extend(of_call.into_iter().map(|(_, text)| text));
            serving.queued
        } else {
            serving.queued - serving.waiting
        };
        self.final_frames
            .push_back(Frame::encode(call, sent + 1, event, &data));
        self.late = self.late.saturating_add(LATE_PER_CALL);
    }

    pub fn poll_transmit(&mut self) -> Option<String> {
        if let Some(text) = self.final_frames.pop_front() {
            return Some(text);
        }
        let (call, text) = self.outbox.pop_front()?;
        if let Some(serving) = self.calls.get_mut(&call) {
            serving.waiting -= 1;
        }
        Some(text)
    }

    /// Bytes of ended calls that wait to be sent. A caller that opens calls and does not read lets
    /// them grow, so the server stops receiving while there are many.
    pub(crate) fn backlog_bytes(&self) -> usize {
        self.final_frames.iter().map(String::len).sum()
    }

    #[cfg(feature = "fuzzing")]
    pub fn open_calls(&self) -> usize {
        self.calls.len()
    }

    pub fn is_open(&self, call: u32) -> bool {
        self.calls.contains_key(&call)
    }
}

/// A message of a call, on the caller's side.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ClientEvent {
    Event {
        /// Name, defined by the capability.
        event: String,
        data: Value,
    },
    /// Result of the call, the last message.
    End(Value),
    /// Error of the call, the last message.
    Failed(CallError),
}

/// A call on the caller's side.
#[derive(Default)]
struct Calling {
    /// Sent frames of the call.
    sent: u64,
    received: u64,
    /// Number of the last acknowledged event.
    acked: u64,
    /// Bytes of each unacknowledged event, oldest first.
    sizes: VecDeque<usize>,
    /// Events taken since the last acknowledgement.
    taken: u64,
    inbox: VecDeque<ClientEvent>,
    is_cancelled: bool,
    has_ended: bool,
}

impl Calling {
    /// The next frame to the server.
    fn frame(&mut self, call: u32, event: &str, data: &str) -> String {
        self.sent += 1;
        Frame::encode(call, self.sent, event, data)
    }
}

/// The calling side of a connection.
#[derive(Default)]
pub struct CallingSession {
    highest: u32,
    calls: BTreeMap<u32, Calling>,
    outbox: VecDeque<String>,
}

impl CallingSession {
    /// Opens a call and returns its number.
    ///
    /// # Errors
    /// `busy` if [`MAX_OPEN_CALLS`] are open, `bad_request` if the request does not fit into a
    /// message.
    pub fn call(&mut self, request: &Request) -> Result<u32, CallError> {
        let open = self.calls.values().filter(|c| !c.has_ended).count();
        let (Some(call), true) = (self.highest.checked_add(1), open < MAX_OPEN_CALLS) else {
            let message = format!("{MAX_OPEN_CALLS} calls are open on this connection");
            let busy = CallError::new(Code::BUSY, message);
            return Err(busy.with_hint("wait until one has ended, or open another connection"));
        };
        let data = serde_json::to_string(request)
            .map_err(|_| CallError::bad_request("params", "cannot be written as JSON"))?;
        let mut calling = Calling::default();
        let text = calling.frame(call, "call", &data);
        let length = text.len();
        if length > MAX_MESSAGE_BYTES {
            let problem =
                format!("the call has {length} bytes, at most {MAX_MESSAGE_BYTES} may be");
            return Err(CallError::bad_request("params", problem));
        }
        self.highest = call;
        self.outbox.push_back(text);
        self.calls.insert(call, calling);
        Ok(call)
    }

    /// Processes one message and returns the number of its call.
    ///
    /// # Errors
    /// [`Violation`]: close the connection.
    pub fn receive(&mut self, text: &str) -> Result<u32, Violation> {
        let frame = Frame::decode(text)?;
        let call = frame.call;
        let Some(calling) = self.calls.get_mut(&call).filter(|c| !c.has_ended) else {
            return Err(call_number(call));
        };
        expect_sequence(calling.received + 1, frame.seq)?;
        calling.received = frame.seq;
        let heard = match frame.event.as_str() {
            "end" => ClientEvent::End(frame.data),
            "error" => ClientEvent::Failed(read_error(frame.data)?),
            name if is_reserved(name) => {
                return Err(malformed("its event is not one that a node answers with"));
            }
            _ => {
                if !has_room(&calling.sizes, text.len()) {
                    let detail = "more events came than were acknowledged";
                    return Err(CloseCode::CreditOverrun.violation(detail));
                }
                calling.sizes.push_back(text.len());
                ClientEvent::Event {
                    event: frame.event,
                    data: frame.data,
                }
            }
        };
        calling.has_ended = !matches!(heard, ClientEvent::Event { .. });
        if calling.is_cancelled {
            // The call was cancelled. Events that are still on their way are not acknowledged: the
            // server drops the rest when it receives the cancel.
            if calling.has_ended {
                self.calls.remove(&call);
            }
        } else {
            calling.inbox.push_back(heard);
        }
        Ok(call)
    }

    /// Takes the oldest received message of a call. Taking events acknowledges them.
    pub fn take(&mut self, call: u32) -> Option<ClientEvent> {
        let calling = self.calls.get_mut(&call)?;
        let heard = calling.inbox.pop_front()?;
        if !matches!(heard, ClientEvent::Event { .. }) {
            self.calls.remove(&call);
            return Some(heard);
        }
        calling.taken += 1;
        let taken = usize::try_from(calling.taken).unwrap_or(usize::MAX);
        let bytes: usize = calling.sizes.iter().take(taken).sum();
        if !calling.has_ended && (calling.taken >= ACK_FRAMES || bytes >= ACK_BYTES) {
            calling.acked += calling.taken;
            calling.sizes.drain(..taken.min(calling.sizes.len()));
            calling.taken = 0;
            let data = format!(r#"{{"seq":{}}}"#, calling.acked);
            self.outbox.push_back(calling.frame(call, "ack", &data));
        }
        Some(heard)
    }

    /// Cancels a call. No further message of it is returned.
    pub fn cancel(&mut self, call: u32) {
        let Some(calling) = self.calls.get_mut(&call) else {
            return;
        };
        if calling.has_ended {
            self.calls.remove(&call);
        } else if !calling.is_cancelled {
            calling.is_cancelled = true;
            calling.inbox.clear();
            self.outbox.push_back(calling.frame(call, "cancel", "{}"));
        }
    }

    pub fn poll_transmit(&mut self) -> Option<String> {
        self.outbox.pop_front()
    }
}

/// Violation for a number that does not follow the earlier ones, or belongs to no call.
fn call_number(call: u32) -> Violation {
    CloseCode::ProtocolState.violation(format!("{call} is not a valid call number here"))
}

fn expect_sequence(expected: u64, found: u64) -> Result<(), Violation> {
    if expected == found {
        Ok(())
    } else {
        let detail = format!("frame {found} of a call came where {expected} was due");
        Err(CloseCode::FrameSequence.violation(detail))
    }
}

#[cfg(test)]
mod tests;
