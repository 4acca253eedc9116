//! What waits to be sent, and the tensors that the peer still holds.
//!
//! Messages of one stream leave in the order in which they came. Between streams, small messages
//! go first and chunks take turns, so that a decode row never waits for more than one chunk.
//!
//! Life of a tensor here:
//!
//! ```text
//!           credit, room               last chunk           ACK end
//!  queued ---------------> sending ------------------> sent --------> gone
//!    |                      |   |                       |
//!    | purged               |   | NACK: send TENSOR_END | NACK
//!    v                      |   +-----------------------+-----------> gone
//!   gone                    | purged: send TENSOR_END
//!                           v              ACK end, or NACK
//!                       cancelled ----------------------------------> gone
//! ```
//!
//! An id is used again only after its tensor is gone, so a late ACK can never hit another tensor.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use super::Terms;
use crate::code::{CloseCode, Violation};
use crate::compress::ChunkCompressor;
use crate::credit::Window;
use crate::message::{Message, StreamClose};
use crate::tensor::{DType, Dims};
use crate::wire::chunk::ChunkHead;
use crate::wire::control::{Ack, TensorEnd};
use crate::wire::pipeline::{self, Place, RowsHead, TENSOR_ID_AT};
use crate::wire::{Flags, FrameBuf};

/// Most tensors in the peer's hands at a time.
const MAX_LIVE_TENSORS: usize = 1024;

/// A message, encoded and compressed, without ids and sequence number.
///
/// Making one costs what the message weighs and needs no session, so that it can be done outside
/// of any lock.
#[derive(Debug)]
pub struct Outgoing {
    pub(super) part: Part,
    pub(super) life: (u32, u32),
    body: Body,
}

/// What the session has to book when the message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Step,
    Result,
    Close,
    Error,
    Leaving,
    Other,
    Tensor,
}

#[derive(Debug)]
enum Body {
    Small(FrameBuf),
    Bulk(Box<Bulk>),
}

/// A tensor on its way out.
struct Bulk {
    /// Order of arrival: tensors start in this order.
    ticket: u64,
    /// The frame that announces it, when it belongs to a step.
    announce: Option<FrameBuf>,
    /// Its id, once started.
    id: Option<u16>,
    dtype: DType,
    dims: Dims,
    data: Bytes,
    /// The chunks that zstd made smaller; the others are cut from `data`.
    compressed: Vec<Option<Vec<u8>>>,
    chunk_bytes: usize,
    next_chunk: usize,
}

impl std::fmt::Debug for Bulk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bulk")
            .field("id", &self.id)
            .field("dims", &self.dims)
            .finish_non_exhaustive()
    }
}

impl Outgoing {
    /// Encodes a message under the terms of a session.
    ///
    /// # Errors
    /// `tensor_shape` when a message's data is not what its shape says; `frame_too_big` when it
    /// could never be received; `protocol_state` when the other side is the one to send it.
    pub fn new(message: &Message, terms: &Terms) -> Result<Outgoing, Violation> {
        check_sender(message, terms)?;
        let (part, life) = match message {
            Message::Step(m) => {
                return Outgoing::rows(Part::Step, RowsHead::of_step(m), &m.data, terms);
            }
            Message::StepResult(m) => {
                return Outgoing::rows(Part::Result, RowsHead::of_result(m), &m.data, terms);
            }
            Message::Tensor(m) => {
                let bulk = Bulk::new(None, m.dtype, m.dims, &m.data, terms)?;
                return Ok(Outgoing {
                    part: Part::Tensor,
                    life: (0, 0),
                    body: Body::Bulk(Box::new(bulk)),
                });
            }
            Message::StreamOpen(m) => (Part::Other, (m.stream, m.epoch)),
            Message::StreamOpened(m) => (Part::Other, (m.stream, m.epoch)),
            Message::StreamClose(m) => (Part::Close, (m.stream, m.epoch)),
            Message::StreamError(m) => (Part::Error, (m.stream, m.epoch)),
            Message::Truncate(m) => (Part::Other, (m.stream, m.epoch)),
            // These belong to no stream: streams are numbered by callers, who never close (0, 0).
            Message::Describe | Message::Descriptor(_) => (Part::Other, (0, 0)),
            Message::Leaving { .. } => (Part::Leaving, (0, 0)),
        };
        let body = Body::Small(pipeline::frame(message)?);
        Ok(Outgoing { part, life, body })
    }

    /// Whether a message may be sent under these terms, without encoding it.
    ///
    /// # Errors
    /// As [`Outgoing::new`].
    pub(crate) fn check(message: &Message, terms: &Terms) -> Result<(), Violation> {
        check_sender(message, terms)?;
        let (bytes, data) = match message {
            Message::Step(m) => (RowsHead::of_step(m).bytes()?, &m.data),
            Message::StepResult(m) => (RowsHead::of_result(m).bytes()?, &m.data),
            Message::Tensor(m) => (m.dims.bytes(m.dtype)?, &m.data),
            _ => return Ok(()),
        };
        check_length(bytes, data)?;
        match bytes <= u64::from(terms.inline_max.max(terms.peer_buffer)) {
            true => Ok(()),
            false => Err(too_big(bytes, terms)),
        }
    }

    fn rows(
        part: Part,
        head: RowsHead,
        data: &Bytes,
        terms: &Terms,
    ) -> Result<Outgoing, Violation> {
        let bytes = head.bytes()?;
        check_length(bytes, data)?;
        let body = if bytes <= u64::from(terms.inline_max) {
            Body::Small(head.frame(Place::Inline(data)))
        } else {
            let announce = head.frame(Place::Tensor(0));
            Body::Bulk(Box::new(Bulk::new(
                Some(announce),
                head.dtype,
                head.dims()?,
                data,
                terms,
            )?))
        };
        Ok(Outgoing {
            part,
            life: (head.stream, head.epoch),
            body,
        })
    }

    /// Bytes that wait for credit, if it is a tensor.
    pub(super) fn bulk_bytes(&self) -> u64 {
        match &self.body {
            Body::Small(_) => 0,
            Body::Bulk(bulk) => bulk.data.len() as u64,
        }
    }
}

/// Whether it is for this side to send.
fn check_sender(message: &Message, terms: &Terms) -> Result<(), Violation> {
    let from_caller = match message {
        Message::StreamOpen(_) | Message::StreamClose(_) | Message::Step(_) => Some(true),
        Message::Truncate(_) | Message::Describe => Some(true),
        Message::StreamOpened(_) | Message::StreamError(_) => Some(false),
        Message::StepResult(_) | Message::Descriptor(_) => Some(false),
        Message::Leaving { .. } => Some(false),
        Message::Tensor(_) => None,
    };
    match from_caller.is_some_and(|caller| caller != terms.caller) {
        false => Ok(()),
        true => {
            Err(CloseCode::ProtocolState.violation("this message is for the other side to send"))
        }
    }
}

fn too_big(bytes: u64, terms: &Terms) -> Violation {
    CloseCode::FrameTooBig.violation(format!(
        "{bytes} bytes do not fit the peer's buffer of {}",
        terms.peer_buffer
    ))
}

fn check_length(expected: u64, data: &Bytes) -> Result<(), Violation> {
    if data.len() as u64 == expected {
        Ok(())
    } else {
        Err(CloseCode::TensorShape.violation(format!(
            "the shape says {expected} bytes, the data has {}",
            data.len()
        )))
    }
}

impl Bulk {
    fn new(
        announce: Option<FrameBuf>,
        dtype: DType,
        dims: Dims,
        data: &Bytes,
        terms: &Terms,
    ) -> Result<Bulk, Violation> {
        let bytes = dims.bytes(dtype)?;
        check_length(bytes, data)?;
        if bytes > u64::from(terms.peer_buffer) {
            return Err(too_big(bytes, terms));
        }
        let chunk_bytes = terms.chunk_bytes as usize;
        let mut compressed = Vec::new();
        if terms
            .compress_above
            .is_some_and(|above| bytes > u64::from(above))
            && let Some(mut compressor) = ChunkCompressor::for_tensor(data)
        {
            compressed.extend(
                data.chunks(chunk_bytes)
                    .map(|chunk| compressor.chunk(chunk)),
            );
        }
        Ok(Bulk {
            ticket: 0,
            announce,
            id: None,
            dtype,
            dims,
            data: data.clone(),
            compressed,
            chunk_bytes,
            next_chunk: 0,
        })
    }

    /// The next chunk's frame, its raw length and its length on the wire, and whether it is the
    /// last.
    fn chunk(&mut self, id: u16) -> (FrameBuf, usize, usize, bool) {
        let begin = self.next_chunk * self.chunk_bytes;
        let end = (begin + self.chunk_bytes).min(self.data.len());
        let raw = self.data.get(begin..end).unwrap_or_default();
        let last = end == self.data.len();
        let head = ChunkHead {
            tensor: id,
            dtype: self.dtype,
            dims: self.dims,
        };
        let flags = if last { Flags::FINAL } else { Flags::NONE };
        let (data, flags) = match self.compressed.get(self.next_chunk) {
            Some(Some(zstd)) => (zstd.as_slice(), flags.with(Flags::COMPRESSED)),
            _ => (raw, flags),
        };
        let out = (head.frame(data, flags), raw.len(), data.len(), last);
        self.next_chunk += 1;
        out
    }
}

/// Where a message queues. Tensors of their own need no order among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    Stream(u32),
    Tensor(u64),
}

struct Item {
    epoch: u32,
    body: Body,
}

/// State of a tensor that the peer holds; see the diagram above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Sending,
    Sent,
    Cancelled,
}

#[derive(Debug)]
struct Live {
    stage: Stage,
    bytes: u64,
    in_flight: u32,
}

/// A frame to send, and what statistics want to know of it.
pub(super) struct Sent {
    pub(super) frame: FrameBuf,
    /// Raw and wire length of a chunk's data.
    pub(super) chunk: Option<(usize, usize)>,
}

pub(super) struct Outbox {
    window: Window,
    peer_buffer: u64,
    /// Lanes with something in them, each once.
    turn: VecDeque<Lane>,
    lanes: BTreeMap<Lane, VecDeque<Item>>,
    live: BTreeMap<u16, Live>,
    live_bytes: u64,
    /// Ends of tensors and streams, and the coming end of the session. They go before everything
    /// else: the peer must have freed what they end before it sees what takes its place.
    ends: VecDeque<FrameBuf>,
    next_id: u16,
    next_ticket: u64,
    queued_bytes: u64,
    queued_bulk: u64,
    queued_small: usize,
}

impl Outbox {
    pub(super) fn new(window: u32, peer_buffer: u32) -> Outbox {
        Outbox {
            window: Window::new(window),
            peer_buffer: u64::from(peer_buffer),
            turn: VecDeque::new(),
            lanes: BTreeMap::new(),
            live: BTreeMap::new(),
            live_bytes: 0,
            ends: VecDeque::new(),
            next_id: 1,
            next_ticket: 0,
            queued_bytes: 0,
            queued_bulk: 0,
            queued_small: 0,
        }
    }

    pub(super) fn window(&self) -> Window {
        self.window
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        self.queued_bytes
    }

    /// Bytes of tensors that have not been sent whole.
    pub(super) fn queued_bulk(&self) -> u64 {
        self.queued_bulk
    }

    /// Small messages that wait.
    pub(super) fn queued_small(&self) -> usize {
        self.queued_small
    }

    pub(super) fn push(&mut self, out: Outgoing) {
        let out = match out {
            Outgoing {
                part: Part::Close | Part::Leaving,
                body: Body::Small(frame),
                ..
            } => return self.end(frame),
            other => other,
        };
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let lane = match out.part {
            Part::Tensor => Lane::Tensor(ticket),
            _ => Lane::Stream(out.life.0),
        };
        let mut item = Item {
            epoch: out.life.1,
            body: out.body,
        };
        match &mut item.body {
            Body::Small(frame) => {
                self.queued_bytes += frame.len() as u64;
                self.queued_small += 1;
            }
            Body::Bulk(bulk) => {
                bulk.ticket = ticket;
                self.queued_bytes += bulk.data.len() as u64;
                self.queued_bulk += bulk.data.len() as u64;
            }
        }
        let queue = self.lanes.entry(lane).or_default();
        if queue.is_empty() {
            self.turn.push_back(lane);
        }
        queue.push_back(item);
    }

    /// Books an item out of the queues; a tensor that has begun is cancelled.
    fn discard(&mut self, item: Item) {
        match item.body {
            Body::Small(frame) => {
                self.queued_bytes -= frame.len() as u64;
                self.queued_small -= 1;
            }
            Body::Bulk(bulk) => {
                self.forget_bulk(&bulk);
                if let Some(id) = bulk.id
                    && let Some(live) = self.live.get_mut(&id)
                {
                    live.stage = Stage::Cancelled;
                    self.end(TensorEnd { tensor: id }.frame());
                }
            }
        }
    }

    fn end(&mut self, frame: FrameBuf) {
        self.queued_bytes += frame.len() as u64;
        self.ends.push_back(frame);
    }

    fn forget_bulk(&mut self, bulk: &Bulk) {
        self.queued_bytes -= bulk.data.len() as u64;
        self.queued_bulk -= bulk.data.len() as u64;
    }

    /// Drops whatever is queued for one life of a stream.
    pub(super) fn purge(&mut self, (stream, epoch): (u32, u32)) {
        let lane = Lane::Stream(stream);
        let Some(queue) = self.lanes.remove(&lane) else {
            return;
        };
        let (gone, kept): (VecDeque<Item>, VecDeque<Item>) =
            queue.into_iter().partition(|item| item.epoch == epoch);
        for item in gone {
            self.discard(item);
        }
        if kept.is_empty() {
            self.turn.retain(|other| *other != lane);
        } else {
            self.lanes.insert(lane, kept);
        }
    }

    /// The next frame, if one may be sent.
    pub(super) fn poll(&mut self) -> Option<Sent> {
        if let Some(frame) = self.ends.pop_front() {
            self.queued_bytes -= frame.len() as u64;
            return Some(Sent { frame, chunk: None });
        }
        self.poll_small().or_else(|| self.poll_bulk())
    }

    fn head(&mut self, lane: Lane) -> Option<&mut Item> {
        self.lanes.get_mut(&lane).and_then(VecDeque::front_mut)
    }

    /// Gives the lane at `at` its turn: takes its head off when `pop`, and sends it to the back.
    fn turn_taken(&mut self, at: usize, pop: bool) -> Option<Item> {
        let lane = self.turn.remove(at)?;
        let queue = self.lanes.get_mut(&lane)?;
        let item = if pop { queue.pop_front() } else { None };
        if queue.is_empty() {
            self.lanes.remove(&lane);
        } else {
            self.turn.push_back(lane);
        }
        item
    }

    fn poll_small(&mut self) -> Option<Sent> {
        if self.queued_small == 0 {
            return None;
        }
        let at = (0..self.turn.len()).find(|&at| {
            let head = self
                .turn
                .get(at)
                .and_then(|lane| self.lanes.get(lane)?.front());
            matches!(
                head,
                Some(Item {
                    body: Body::Small(_),
                    ..
                })
            )
        })?;
        match self.turn_taken(at, true)?.body {
            Body::Small(frame) => {
                self.queued_bytes -= frame.len() as u64;
                self.queued_small -= 1;
                Some(Sent { frame, chunk: None })
            }
            Body::Bulk(_) => None,
        }
    }

    fn poll_bulk(&mut self) -> Option<Sent> {
        if self.queued_bulk == 0 || self.window.available() == 0 {
            return None;
        }
        // Tensors start in the order in which they came, so that small ones cannot starve a large
        // one of the peer's buffer.
        let mut first_waiting = u64::MAX;
        for queue in self.lanes.values() {
            if let Some(Item {
                body: Body::Bulk(bulk),
                ..
            }) = queue.front()
                && bulk.id.is_none()
            {
                first_waiting = first_waiting.min(bulk.ticket);
            }
        }
        let room = self.peer_buffer.saturating_sub(self.live_bytes);
        let can_start = self.live.len() < MAX_LIVE_TENSORS;
        let at = (0..self.turn.len()).find(|&at| {
            match self
                .turn
                .get(at)
                .and_then(|lane| self.lanes.get(lane)?.front())
            {
                Some(Item {
                    body: Body::Bulk(bulk),
                    ..
                }) => {
                    bulk.id.is_some()
                        || (can_start
                            && bulk.ticket == first_waiting
                            && bulk.data.len() as u64 <= room)
                }
                _ => false,
            }
        })?;
        let lane = *self.turn.get(at)?;
        let fresh = self.free_id();
        let Some(Item {
            body: Body::Bulk(bulk),
            ..
        }) = self.head(lane)
        else {
            return None;
        };
        let id = match bulk.id {
            Some(id) => id,
            None => {
                let id = fresh?;
                bulk.id = Some(id);
                let bytes = bulk.data.len() as u64;
                let announce = bulk.announce.take();
                self.next_id = id.wrapping_add(1);
                self.live_bytes += bytes;
                self.live.insert(
                    id,
                    Live {
                        stage: Stage::Sending,
                        bytes,
                        in_flight: 0,
                    },
                );
                if let Some(mut frame) = announce {
                    frame.patch_u16(TENSOR_ID_AT, id);
                    // The lane keeps its place: the first chunk follows at once.
                    return Some(Sent { frame, chunk: None });
                }
                id
            }
        };
        let Some(Item {
            body: Body::Bulk(bulk),
            ..
        }) = self.head(lane)
        else {
            return None;
        };
        let (frame, raw, wire, last) = bulk.chunk(id);
        // Checked above: a unit is available.
        self.window.take().ok()?;
        if let Some(live) = self.live.get_mut(&id) {
            live.in_flight += 1;
            if last {
                live.stage = Stage::Sent;
            }
        }
        if let Some(Item {
            body: Body::Bulk(bulk),
            ..
        }) = self.turn_taken(at, last)
        {
            self.forget_bulk(&bulk);
        }
        Some(Sent {
            frame,
            chunk: Some((raw, wire)),
        })
    }

    fn free_id(&self) -> Option<u16> {
        // At most 1,024 ids are in use, so this ends soon.
        (0..=u16::MAX)
            .map(|i| self.next_id.wrapping_add(i))
            .find(|id| !self.live.contains_key(id))
    }

    fn remove_live(&mut self, id: u16) {
        if let Some(live) = self.live.remove(&id) {
            self.live_bytes -= live.bytes;
        }
    }

    /// Ends one life of a stream on the wire.
    pub(super) fn close(&mut self, close: StreamClose) -> Result<(), Violation> {
        self.end(pipeline::frame(&Message::StreamClose(close))?);
        Ok(())
    }

    /// The peer returns credit.
    pub(super) fn ack(&mut self, ack: Ack) -> Result<(), Violation> {
        let wrong = |detail| Err(CloseCode::CreditAck.violation(detail));
        let Some(live) = self.live.get_mut(&ack.tensor) else {
            return wrong("an ACK of a tensor that is not being sent");
        };
        let Some(left) = live.in_flight.checked_sub(ack.chunks) else {
            return wrong("an ACK of more chunks than were sent");
        };
        let ends_here = match live.stage {
            Stage::Sending => !ack.end,
            // The last chunk's credit and the end come together.
            Stage::Sent => ack.end == (left == 0),
            Stage::Cancelled => !ack.end || left == 0,
        };
        if !ends_here || (ack.chunks == 0 && !ack.end) {
            return wrong("an ACK that ends a tensor early, late or not at all");
        }
        live.in_flight = left;
        self.window.give_back(ack.chunks)?;
        if ack.end {
            self.remove_live(ack.tensor);
        }
        Ok(())
    }

    /// The peer refuses a tensor.
    pub(super) fn nack(&mut self, id: u16) -> Result<(), Violation> {
        let Some(live) = self.live.get(&id) else {
            return Err(CloseCode::CreditAck.violation("a NACK of a tensor that is not being sent"));
        };
        self.window.give_back(live.in_flight)?;
        if live.stage == Stage::Sending {
            let is_it = |item: &Item| matches!(&item.body, Body::Bulk(b) if b.id == Some(id));
            let at = self.turn.iter().position(|lane| {
                self.lanes
                    .get(lane)
                    .and_then(VecDeque::front)
                    .is_some_and(is_it)
            });
            if let Some(Item {
                body: Body::Bulk(bulk),
                ..
            }) = at.and_then(|at| self.turn_taken(at, true))
            {
                self.forget_bulk(&bulk);
            }
            // The peer waits for the end before the id can be used again.
            self.end(TensorEnd { tensor: id }.frame());
        }
        self.remove_live(id);
        Ok(())
    }

    /// The peer widens the window.
    pub(super) fn widen(&mut self, grant: u32) -> Result<(), Violation> {
        self.window.widen(grant)
    }

    /// Frees everything.
    pub(super) fn clear(&mut self) {
        *self = Outbox::new(0, 0);
    }
}
