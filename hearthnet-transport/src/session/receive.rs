//! Received frames: their limits, the state table, and what each of them changes.

use bytes::Bytes;

use super::protocol::Protocol as _;
use super::{Event, Session, State};
use crate::code::{CloseCode, SessionClosed, Violation};
use crate::config::CONTROL_MESSAGE_BYTES;
use crate::message::{Message, StreamClose, StreamError};
use crate::time::Time;
use crate::wire::cbor::Body as _;
use crate::wire::chunk::{ChunkHead, MAX_CHUNK_HEADER_BYTES};
use crate::wire::control::{self, Ack, Bye, FlowCtl, Nack, TensorEnd};
use crate::wire::pipeline::{self, Place, RESULT_HEAD_BYTES};
use crate::wire::{FrameType, HEADER_BYTES, Header};

impl Session {
    /// Handles one WebSocket binary message. Any violation closes the session.
    pub fn handle_message(&mut self, now: Time, message: &Bytes) {
        if self.state == State::Closed {
            return;
        }
        self.last_received = now;
        self.partial_message = 0;
        self.stats.frames_received += 1;
        self.stats.bytes_received += message.len() as u64;
        if let Err(violation) = self.frame(now, message) {
            self.fail(violation);
        }
        self.track_progress(now);
    }

    fn frame(&mut self, now: Time, message: &Bytes) -> Result<(), Violation> {
        let limit = self.max_message_bytes();
        let too_big = || {
            CloseCode::FrameTooBig.violation(format!(
                "a message of {} bytes, more than the limit",
                message.len()
            ))
        };
        if message.len() > limit {
            return Err(too_big());
        }
        let (header, body) = Header::decode(message)?;
        // (0 never matches: the first frame is number 1.)
        if self.sequence_in.checked_add(1) != Some(header.sequence) {
            return Err(CloseCode::FrameSequence.violation(format!(
                "frame {} after frame {}",
                header.sequence, self.sequence_in
            )));
        }
        self.sequence_in = header.sequence;
        self.check_state(header.kind)?;
        let limit = match (header.kind, self.terms) {
            (FrameType::TensorData, Some(terms)) => {
                MAX_CHUNK_HEADER_BYTES + terms.chunk_bytes as usize
            }
            (FrameType::Step | FrameType::StepResult, Some(terms)) => {
                RESULT_HEAD_BYTES + terms.inline_max as usize
            }
            _ => CONTROL_MESSAGE_BYTES - HEADER_BYTES,
        };
        if body.len() > limit {
            return Err(too_big());
        }
        match header.kind {
            FrameType::Hello => self.hello(body, now)?,
            FrameType::Bye => {
                let bye = Bye::read(body)?;
                self.finish(SessionClosed::by_peer(bye.code, bye.detail));
            }
            FrameType::Ping => {
                let token = control::read_ping(body)?;
                if !self.pings.take(now) {
                    return Err(CloseCode::FrameRate.violation("too many PINGs"));
                }
                self.urgent.push_back(control::ping(FrameType::Pong, token));
            }
            FrameType::Pong => {
                let token = control::read_ping(body)?;
                if self.ping.take().is_none_or(|(sent, _)| sent != token) {
                    return Err(CloseCode::ProtocolState.violation("a PONG without its PING"));
                }
            }
            FrameType::Ack => {
                self.outbox.ack(Ack::read(body)?)?;
                self.credit_blocked = None;
            }
            FrameType::Nack => {
                self.outbox.nack(Nack::read(body)?.tensor)?;
                self.credit_blocked = None;
            }
            FrameType::FlowCtl => {
                self.control_rate(now)?;
                let FlowCtl { grant } = FlowCtl::read(body)?;
                self.outbox.window.widen(grant)?;
                self.credit_blocked = None;
            }
            FrameType::TensorEnd => {
                let given_up = self.inbox.end(TensorEnd::read(body)?.tensor)?;
                if let Some(Message::Step(step)) = given_up {
                    // It will never be delivered or answered.
                    self.steps.finish((step.stream, step.epoch));
                }
            }
            FrameType::TensorData => {
                let (head, data) = ChunkHead::read(body)?;
                if let Some((message, id)) = self.inbox.chunk(head, header.flags, data)? {
                    self.deliver_tensor(message, id)?;
                }
            }
            FrameType::Step | FrameType::StepResult => {
                let (rows, place) = pipeline::read_rows(header.kind, body)?;
                self.rows(rows, place, message)?;
            }
            kind => {
                self.control_rate(now)?;
                if kind == FrameType::StreamOpen && !self.opens.take(now) {
                    return Err(CloseCode::StreamChurn.violation("streams opened too fast"));
                }
                let wants_receipts = self.terms.is_some_and(|terms| terms.receipts > 0);
                if kind == FrameType::Receipt && !wants_receipts {
                    let detail = "a receipt that was not negotiated";
                    return Err(CloseCode::ProtocolState.violation(detail));
                }
                let message = pipeline::read(kind, body)?;
                match message {
                    Message::StreamClose(StreamClose { stream, epoch }) => {
                        self.end_stream((stream, epoch));
                    }
                    Message::StreamError(StreamError { stream, epoch, .. }) => {
                        self.end_stream((stream, epoch));
                        // Later steps may have crossed the error. The host counts them until this
                        // STREAM_CLOSE arrives, which must happen before their slots are used
                        // again.
                        self.outbox.end(StreamClose { stream, epoch }.frame());
                    }
                    _ => {}
                }
                self.deliver(message, None);
            }
        }
        Ok(())
    }

    /// State table: the frames allowed in each state and direction.
    fn check_state(&self, kind: FrameType) -> Result<(), Violation> {
        let allowed = match (self.state, kind) {
            (State::Open, FrameType::Hello) => false,
            (State::Open, kind) => kind.is_callers() != Some(self.caller),
            (State::HelloSent | State::AwaitHello, FrameType::Hello) => true,
            // A caller must wait for the host's HELLO.
            (_, kind) => kind == FrameType::Bye,
        };
        if allowed {
            Ok(())
        } else {
            Err(CloseCode::ProtocolState.violation(format!("{kind:?} in state {:?}", self.state)))
        }
    }

    fn hello(&mut self, body: &[u8], now: Time) -> Result<(), Violation> {
        if self.caller {
            let (_agent, limits) = control::read_server_hello(body)?;
            self.open(limits, now);
        } else {
            let (hello, limits) = control::read_client_hello(body)?;
            self.peer_limits = Some(limits);
            self.state = State::AwaitAdmission;
            self.events.push_back((Event::Hello(hello), None));
        }
        Ok(())
    }

    fn control_rate(&mut self, now: Time) -> Result<(), Violation> {
        if self.controls.take(now) {
            Ok(())
        } else {
            Err(CloseCode::FrameRate.violation("too many control frames"))
        }
    }

    /// Handles a step or result, whose rows are in `place`: inline, in the bytes of `frame`.
    fn rows(&mut self, rows: Message, place: Place<'_>, frame: &Bytes) -> Result<(), Violation> {
        let stream_key = rows.stream_key().unwrap_or_default();
        let wanted = match rows {
            Message::Step(_) => {
                if self.steps.total >= self.config.max_steps_in_flight {
                    return Err(CloseCode::CreditOverrun.violation(format!(
                        "a step beyond the {} that may wait",
                        self.steps.total
                    )));
                }
                self.steps.begin(stream_key);
                true
            }
            // A large result counts as the answer once its rows are complete: see `deliver_tensor`.
            _ => match place {
                Place::Inline(_) => self.steps.finish(stream_key),
                Place::Tensor(_) => self.steps.by_stream.contains_key(&stream_key),
            },
        };
        if !wanted {
            self.expect_late(stream_key)?;
        }
        match place {
            Place::Inline(data) if wanted => {
                self.deliver(rows.with_data(frame.slice_ref(data)), None);
                Ok(())
            }
            Place::Inline(_) => Ok(()),
            Place::Tensor(id) if wanted => self.inbox.announce(id, rows),
            Place::Tensor(id) => self.inbox.announce_unwanted(id),
        }
    }

    fn deliver(&mut self, message: Message, tensor: Option<u16>) {
        self.events.push_back((Event::Message(message), tensor));
    }

    fn deliver_tensor(&mut self, message: Message, id: u16) -> Result<(), Violation> {
        if let Message::StepResult(result) = &message {
            let stream_key = (result.stream, result.epoch);
            if !self.steps.finish(stream_key) {
                self.inbox.release(id);
                return self.expect_late(stream_key);
            }
        }
        self.deliver(message, Some(id));
        Ok(())
    }

    /// Counts a result without an unanswered step. It is allowed if it may have crossed the end of
    /// its stream. Any other is wrong: it names a stream or epoch that the caller did not ask for.
    fn expect_late(&mut self, stream_key: (u32, u32)) -> Result<(), Violation> {
        self.stats.stale_results += 1;
        let may_come = |(ended, left): &&mut ((u32, u32), u32)| *ended == stream_key && *left > 0;
        match self.ended.iter_mut().find(may_come) {
            Some((_, left)) => {
                *left -= 1;
                Ok(())
            }
            None => Err(CloseCode::ProtocolState.violation("a result that no step asked for")),
        }
    }
}
