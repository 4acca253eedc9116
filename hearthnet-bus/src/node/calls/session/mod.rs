//! The protocol of `/bus/v1` as two state machines without I/O, clock or randomness.
//!
//! ```text
//!   caller                                    node that answers
//!     call     ──────────────────────────>    open
//!              <──────────────────────────    event, event, ...   at most a window ahead
//!     ack      ──────────────────────────>    window moves on
//!     cancel   ──────────────────────────>    closed: what waits to be sent is dropped
//!              <──────────────────────────    end | error         exactly one, the last frame
//! ```
//!
//! Call order: [`ServingSession::receive`] what arrives, act on what it returns,
//! [`ServingSession::event`] and [`ServingSession::finish`] as the work goes on, and after
//! each of these send what [`ServingSession::poll_transmit`] gives until it gives no more.
//! The caller's side likewise with [`CallingSession`].
//!
//! Every call ends in exactly one `end` or `error`, also a cancelled one. Until the
//! caller has seen it the call counts as open on its side, so that it never opens more
//! than the other side can have open.

use std::collections::{BTreeMap, VecDeque};

use hearthnet_transport::{CloseCode, Code, Violation, is_name};
use serde_json::Value;

use super::error::CallError;
use super::frame::{
    ACK_BYTES, ACK_FRAMES, AckData, FRAME_OVERHEAD, Frame, MAX_EVENT_BYTES, MAX_MESSAGE_BYTES,
    MAX_OPEN_CALLS, Request, WINDOW_BYTES, WINDOW_FRAMES, error_data, is_reserved, malformed,
    read_error,
};

/// Frames about a call that can be on their way when it ends: an acknowledgement for each
/// event of the window, and a cancel.
const LATE_PER_CALL: u64 = WINDOW_FRAMES + 1;

/// What the other side asks the serving side to do.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Asked {
    /// A call was opened; it must be finished.
    Open {
        /// Its number.
        call: u32,
        /// What is asked, or why it cannot be read.
        request: Result<Request, CallError>,
    },
    /// Events were acknowledged: there may be room for more.
    Room {
        /// The call.
        call: u32,
    },
    /// The caller gave up. The call is closed already.
    Cancelled {
        /// The call.
        call: u32,
    },
    /// Nothing to do.
    Nothing,
}

/// Why an event was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotTaken {
    /// The window is full: try again after [`Asked::Room`].
    #[error("the caller has to acknowledge events first")]
    Full,
    /// The call has ended.
    #[error("the call has ended")]
    Ended,
    /// The event does not fit into a message.
    #[error("an event has more bytes than a message may have")]
    TooBig,
    /// The event's name is reserved or not spelled like one.
    #[error("this cannot be the name of an event")]
    Name,
}

/// A call on the serving side.
#[derive(Default)]
struct Serving {
    /// Frames received of the call.
    received: u64,
    /// Events that were queued; they are numbered in this order.
    queued: u64,
    /// Those of them that wait in `outbox`.
    waiting: u64,
    acked: u64,
    /// Bytes of every event that waits or is not acknowledged, the oldest first.
    sizes: VecDeque<usize>,
}

impl Serving {
    fn has_room(&self, bytes: usize) -> bool {
        let frames = self.queued - self.acked;
        let held: usize = self.sizes.iter().sum();
        frames < WINDOW_FRAMES && held.saturating_add(bytes) <= WINDOW_BYTES
    }
}

/// The side that answers calls. By default nothing was called yet.
#[derive(Default)]
pub struct ServingSession {
    highest: u32,
    late: u64,
    calls: BTreeMap<u32, Serving>,
    /// Events of open calls, each with its call.
    outbox: VecDeque<(u32, String)>,
    /// Messages of calls that are closed, the last of each its `end` or `error`.
    last_words: VecDeque<String>,
}

impl ServingSession {
    /// Takes in one message.
    ///
    /// # Errors
    /// [`Violation`]: the connection is to be closed.
    pub fn receive(&mut self, text: &str) -> Result<Asked, Violation> {
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
            self.calls.insert(
                call,
                Serving {
                    received: 1,
                    ..Serving::default()
                },
            );
            return Ok(Asked::Open {
                call,
                request: Request::from_data(frame.data),
            });
        }
        let Some(serving) = self.calls.get_mut(&call) else {
            // It may have ended while this was on its way.
            if call == 0 || call > self.highest {
                return Err(call_number(call));
            }
            self.late = self.late.checked_sub(1).ok_or_else(|| {
                CloseCode::FrameRate.violation("too many frames about calls that have ended")
            })?;
            return Ok(Asked::Nothing);
        };
        expect_sequence(serving.received + 1, frame.seq)?;
        serving.received = frame.seq;
        match frame.event.as_str() {
            "ack" => {
                let ack: AckData = serde_json::from_value(frame.data)
                    .map_err(|_| malformed("its data are no {seq}"))?;
                if ack.seq <= serving.acked || ack.seq > serving.queued - serving.waiting {
                    let detail = format!("an acknowledgement of {} is out of range", ack.seq);
                    return Err(CloseCode::CreditAck.violation(detail));
                }
                for _ in serving.acked..ack.seq {
                    serving.sizes.pop_front();
                }
                serving.acked = ack.seq;
                Ok(Asked::Room { call })
            }
            "cancel" => {
                self.finish(call, Err(&CallError::cancelled()));
                Ok(Asked::Cancelled { call })
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
        if !serving.has_room(size) {
            return Err(NotTaken::Full);
        }
        serving.queued += 1;
        serving.waiting += 1;
        serving.sizes.push_back(size);
        let text = Frame::encode(call, serving.queued, event, &data);
        self.outbox.push_back((call, text));
        Ok(())
    }

    /// Ends a call with its result; does nothing if it has ended. Events that wait are
    /// sent before a result, and dropped before an error.
    pub fn finish(&mut self, call: u32, result: Result<&Value, &CallError>) {
        let Some(serving) = self.calls.remove(&call) else {
            return;
        };
        let (mut event, mut data) = match result {
            Ok(value) => ("end", value.to_string()),
            Err(error) => ("error", error_data(error)),
        };
        if data.len() + FRAME_OVERHEAD > MAX_MESSAGE_BYTES {
            event = "error";
            data = error_data(&CallError::internal(
                "the result has more bytes than a message may have",
            ));
        }
        let queued = std::mem::take(&mut self.outbox).into_iter();
        let (of_call, others): (Vec<_>, Vec<_>) = queued.partition(|(of, _)| *of == call);
        self.outbox = others.into();
        let sent = if event == "end" {
            self.last_words
                .extend(of_call.into_iter().map(|(_, text)| text));
            serving.queued
        } else {
            serving.queued - serving.waiting
        };
        self.last_words
            .push_back(Frame::encode(call, sent + 1, event, &data));
        self.late = self.late.saturating_add(LATE_PER_CALL);
    }

    /// The next message to send.
    pub fn poll_transmit(&mut self) -> Option<String> {
        if let Some(text) = self.last_words.pop_front() {
            return Some(text);
        }
        let (call, text) = self.outbox.pop_front()?;
        if let Some(serving) = self.calls.get_mut(&call) {
            serving.waiting -= 1;
        }
        Some(text)
    }

    /// Bytes of ended calls that wait to be sent. A caller that opens calls and reads
    /// nothing lets them pile up; while there are many, nothing more should be received.
    pub(crate) fn backlog_bytes(&self) -> usize {
        self.last_words.iter().map(String::len).sum()
    }

    /// Calls that are open.
    pub fn open_calls(&self) -> usize {
        self.calls.len()
    }

    /// Whether this call is open.
    pub fn is_open(&self, call: u32) -> bool {
        self.calls.contains_key(&call)
    }
}

/// What a caller is told.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Heard {
    /// An event, with its name.
    Event {
        /// Its name, which depends on the capability.
        event: String,
        /// Its data.
        data: Value,
    },
    /// The call succeeded; nothing follows.
    End(Value),
    /// The call failed; nothing follows.
    Failed(CallError),
}

/// A call on the caller's side.
#[derive(Default)]
struct Calling {
    /// Frames sent of the call.
    sent: u64,
    received: u64,
    /// Number of the last event that was acknowledged.
    acked: u64,
    /// Bytes of each event that is not acknowledged, the oldest first.
    sizes: VecDeque<usize>,
    /// Events that were taken since the last acknowledgement.
    taken: u64,
    inbox: VecDeque<Heard>,
    is_cancelled: bool,
    has_ended: bool,
}

/// The side that makes calls. By default nothing was called yet.
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
    /// `busy` if [`MAX_OPEN_CALLS`] are open, `bad_request` if it does not fit into a
    /// message.
    pub fn call(&mut self, request: &Request) -> Result<u32, CallError> {
        let open = self.calls.values().filter(|c| !c.has_ended).count();
        let (Some(call), true) = (self.highest.checked_add(1), open < MAX_OPEN_CALLS) else {
            return Err(CallError::new(
                Code::BUSY,
                format!("{MAX_OPEN_CALLS} calls are open on this connection"),
            )
            .with_hint("wait until one has ended, or open another connection"));
        };
        let data = serde_json::to_string(request)
            .map_err(|_| CallError::bad_request("params", "cannot be written as JSON"))?;
        let text = Frame::encode(call, 1, "call", &data);
        if text.len() > MAX_MESSAGE_BYTES {
            return Err(CallError::bad_request(
                "params",
                format!(
                    "the call has {} bytes, at most {MAX_MESSAGE_BYTES} may be",
                    text.len()
                ),
            ));
        }
        self.highest = call;
        self.outbox.push_back(text);
        self.calls.insert(
            call,
            Calling {
                sent: 1,
                ..Calling::default()
            },
        );
        Ok(call)
    }

    /// Takes in one message, and returns the call that it was about.
    ///
    /// # Errors
    /// [`Violation`]: the connection is to be closed.
    pub fn receive(&mut self, text: &str) -> Result<u32, Violation> {
        let frame = Frame::decode(text)?;
        let call = frame.call;
        let Some(calling) = self.calls.get_mut(&call).filter(|c| !c.has_ended) else {
            return Err(call_number(call));
        };
        expect_sequence(calling.received + 1, frame.seq)?;
        calling.received = frame.seq;
        let heard = match frame.event.as_str() {
            "end" => Heard::End(frame.data),
            "error" => Heard::Failed(read_error(frame.data)?),
            name if is_reserved(name) => {
                return Err(malformed("its event is not one that a node answers with"));
            }
            _ => {
                let held: usize = calling.sizes.iter().sum();
                let frames = calling.sizes.len() as u64;
                if frames >= WINDOW_FRAMES || held.saturating_add(text.len()) > WINDOW_BYTES {
                    let detail = "more events came than were acknowledged";
                    return Err(CloseCode::CreditOverrun.violation(detail));
                }
                calling.sizes.push_back(text.len());
                Heard::Event {
                    event: frame.event,
                    data: frame.data,
                }
            }
        };
        calling.has_ended = !matches!(heard, Heard::Event { .. });
        if calling.is_cancelled {
            // Nobody listens any more. What is still on its way is not acknowledged:
            // the other side drops the rest as soon as it hears of the cancel.
            if calling.has_ended {
                self.calls.remove(&call);
            }
        } else {
            calling.inbox.push_back(heard);
        }
        Ok(call)
    }

    /// Takes what a call has heard, the oldest first. Taking events acknowledges them.
    pub fn take(&mut self, call: u32) -> Option<Heard> {
        let calling = self.calls.get_mut(&call)?;
        let heard = calling.inbox.pop_front()?;
        if !matches!(heard, Heard::Event { .. }) {
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
            calling.sent += 1;
            let data = format!(r#"{{"seq":{}}}"#, calling.acked);
            self.outbox
                .push_back(Frame::encode(call, calling.sent, "ack", &data));
        }
        Some(heard)
    }

    /// Gives a call up: nothing more is heard of it.
    pub fn cancel(&mut self, call: u32) {
        let Some(calling) = self.calls.get_mut(&call) else {
            return;
        };
        if calling.has_ended {
            self.calls.remove(&call);
        } else if !calling.is_cancelled {
            calling.is_cancelled = true;
            calling.inbox.clear();
            calling.sent += 1;
            self.outbox
                .push_back(Frame::encode(call, calling.sent, "cancel", "{}"));
        }
    }

    /// The next message to send.
    pub fn poll_transmit(&mut self) -> Option<String> {
        self.outbox.pop_front()
    }
}

/// A call's number is not higher than all before it, or belongs to no call.
fn call_number(call: u32) -> Violation {
    CloseCode::ProtocolState.violation(format!("call {call} cannot be meant here"))
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
