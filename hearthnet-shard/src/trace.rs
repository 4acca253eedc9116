//! What happens to a session's streams, for the flight record: read off the messages that pass,
//! so that nothing behind them has to know that it is watched.

use std::collections::HashMap;

use hearthnet_bus::NodeId;
use hearthnet_bus::flight::{self, Event, SessionId};
use hearthnet_transport::{CloseCode, Code, Connection, Message};
use parking_lot::Mutex;

/// A session under observation. What it began ends with it.
pub(crate) struct Trace {
    session: SessionId,
    peer: NodeId,
    record: fn(Event),
    /// The lives that the caller asked for and nobody has ended, by stream and epoch: no more than
    /// there are places, and openings on their way.
    handles: Mutex<HashMap<(u32, u32), Seen>>,
}

/// What was seen of one life.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    layers: (u32, u32),
    opened: bool,
    steps: u64,
    rows: u64,
}

impl Trace {
    /// A session has begun.
    pub(crate) fn begin(connection: &Connection) -> Self {
        let session = SessionId::of_token(connection.token());
        let trace = Self::new(session, connection.peer(), flight::record);
        (trace.record)(Event::SessionBegan {
            session,
            peer: trace.peer,
            purpose: connection.purpose().into(),
        });
        trace
    }

    fn new(session: SessionId, peer: NodeId, record: fn(Event)) -> Self {
        Self {
            session,
            peer,
            record,
            handles: Mutex::default(),
        }
    }

    /// The caller said something.
    pub(crate) fn heard(&self, message: &Message) {
        match message {
            Message::StreamOpen(open) => {
                let seen = Seen {
                    layers: (open.lo, open.hi),
                    ..Seen::default()
                };
                let mut handles = self.handles.lock();
                handles.entry((open.stream, open.epoch)).or_insert(seen);
            }
            Message::Step(step) => {
                if let Some(handle) = self.handles.lock().get_mut(&(step.stream, step.epoch)) {
                    handle.rows += u64::from(step.rows);
                }
            }
            Message::StreamClose(close) => {
                let handle = self.handles.lock().remove(&(close.stream, close.epoch));
                if let Some(handle) = handle {
                    self.ended(close.stream, close.epoch, Code::new("closed"), handle);
                }
            }
            _ => {}
        }
    }

    /// This host said something.
    pub(crate) fn said(&self, message: &Message) {
        match message {
            Message::StreamOpened(opened) => {
                let (stream, epoch) = (opened.stream, opened.epoch);
                let mut handles = self.handles.lock();
                let Some(handle) = handles.get_mut(&(stream, epoch)) else {
                    return;
                };
                handle.opened = true;
                let layers = handle.layers;
                drop(handles);
                (self.record)(Event::StreamOpened {
                    session: self.session,
                    peer: self.peer,
                    stream,
                    epoch,
                    layers,
                });
            }
            Message::StepResult(result) => {
                if let Some(handle) = self.handles.lock().get_mut(&(result.stream, result.epoch)) {
                    handle.steps += 1;
                }
            }
            Message::StreamError(error) => {
                let (stream, epoch) = (error.stream, error.epoch);
                let handle = self.handles.lock().remove(&(stream, epoch));
                match handle {
                    Some(handle) if handle.opened => {
                        self.ended(stream, epoch, error.code.clone(), handle);
                    }
                    _ => (self.record)(Event::StreamRefused {
                        session: self.session,
                        peer: self.peer,
                        stream,
                        epoch,
                        code: error.code.clone(),
                    }),
                }
            }
            _ => {}
        }
    }

    /// The session is over.
    pub(crate) fn end(&self, code: CloseCode, by_us: bool) {
        let mut left: Vec<_> = self.handles.lock().drain().collect();
        left.sort_unstable_by_key(|(name, _)| *name);
        for ((stream, epoch), handle) in left {
            self.ended(stream, epoch, Code::new("session_ended"), handle);
        }
        (self.record)(Event::SessionEnded {
            session: self.session,
            peer: self.peer,
            code: code.into(),
            by_us,
        });
    }

    fn ended(&self, stream: u32, epoch: u32, code: Code, handle: Seen) {
        (self.record)(Event::StreamEnded {
            session: self.session,
            peer: self.peer,
            stream,
            epoch,
            code,
            steps: handle.steps,
            rows: handle.rows,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use hearthnet_transport::{NodeId, StreamClose, StreamError, StreamOpen, StreamOpened};

    use super::*;

    thread_local! {
        static RECORDED: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
    }

    fn trace() -> Trace {
        let record = |event| RECORDED.with_borrow_mut(|all| all.push(event));
        Trace::new(
            SessionId::of_token(b"token"),
            NodeId::from_checked([1; 32]),
            record,
        )
    }

    fn open(stream: u32, epoch: u32) -> Message {
        Message::StreamOpen(StreamOpen {
            stream,
            epoch,
            weights: [0; 32],
            lo: 3,
            hi: 7,
            max_positions: 16,
        })
    }

    fn opened(stream: u32, epoch: u32) -> Message {
        Message::StreamOpened(StreamOpened { stream, epoch })
    }

    fn error(stream: u32, epoch: u32, code: &'static str) -> Message {
        Message::StreamError(StreamError {
            stream,
            epoch,
            position: None,
            code: code.into(),
            message: "a sentence that is not recorded".into(),
        })
    }

    /// What was recorded since it was last asked, each in a word.
    fn story() -> Vec<String> {
        let word = |event: &Event| match event {
            Event::StreamOpened { stream, epoch, .. } => format!("opened {stream}.{epoch}"),
            Event::StreamRefused {
                stream,
                epoch,
                code,
                ..
            } => format!("refused {stream}.{epoch} {code}"),
            Event::StreamEnded {
                stream,
                epoch,
                code,
                ..
            } => format!("ended {stream}.{epoch} {code}"),
            Event::SessionEnded { code, .. } => format!("over {code}"),
            other => format!("{other:?}"),
        };
        RECORDED
            .with_borrow_mut(std::mem::take)
            .iter()
            .map(word)
            .collect()
    }

    #[test]
    fn every_life_ends_once_whoever_ends_it() {
        let trace = trace();
        let close = StreamClose {
            stream: 1,
            epoch: 0,
        };
        for stream in 1..=3 {
            trace.heard(&open(stream, 0));
            trace.said(&opened(stream, 0));
        }
        trace.heard(&Message::StreamClose(close));
        trace.heard(&Message::StreamClose(close));
        trace.said(&error(2, 0, "preempted"));
        trace.end(CloseCode::Lost, false);
        assert_eq!(
            story(),
            [
                "opened 1.0",
                "opened 2.0",
                "opened 3.0",
                "ended 1.0 closed",
                "ended 2.0 preempted",
                "ended 3.0 session_ended",
                "over lost",
            ]
        );
    }

    #[test]
    fn a_refusal_is_no_end_and_a_later_life_no_earlier_one() {
        let trace = trace();
        trace.heard(&open(1, 0));
        trace.said(&opened(1, 0));
        trace.heard(&open(1, 1));
        trace.said(&error(1, 0, "stale_epoch"));
        trace.said(&error(1, 1, "kv_full"));
        trace.said(&error(9, 9, "unknown_stream"));
        assert!(trace.handles.lock().is_empty());
        assert_eq!(
            story(),
            [
                "opened 1.0",
                "ended 1.0 stale_epoch",
                "refused 1.1 kv_full",
                "refused 9.9 unknown_stream",
            ]
        );
    }
}
