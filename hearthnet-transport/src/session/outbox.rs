//! Send queue, and the tensors that the peer still holds.
//!
//! Messages of one stream leave in the order of their arrival. Between streams, small messages go
//! first and chunks alternate, so that a decode row never waits for more than one chunk.
//!
//! States of a tensor:
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
//! An id is reused only after its tensor is gone, so a late ACK cannot match another tensor.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use super::terms::Terms;
use crate::code::{CloseCode, Violation};
use crate::compress::ChunkCompressor;
use crate::credit::Window;
use crate::message::Message;
use crate::tensor::{DType, Dims};
use crate::wire::cbor::Body as _;
use crate::wire::chunk::ChunkHead;
use crate::wire::control::{Ack, TensorEnd};
use crate::wire::pipeline::{self, Place, TENSOR_ID_AT};
use crate::wire::{Flags, FrameBuf, FrameType};

/// Limit of tensors held by the peer.
const MAX_LIVE_TENSORS: usize = 1024;

/// A message, encoded and compressed, without ids and sequence number.
///
/// Encoding costs time in proportion to the size and needs no session, so that it can be done
/// outside of any lock.
pub(crate) struct Outgoing {
    pub(super) kind: FrameType,
    /// Stream and epoch. (0, 0) for messages outside of streams; callers close streams only, so it
    /// is never closed.
    pub(super) stream_key: (u32, u32),
    body: Body,
}

enum Body {
    Small(FrameBuf),
    Bulk(Box<Bulk>),
}

/// A tensor to send.
struct Bulk {
    /// Order of arrival: tensors start in this order.
    ticket: u64,
    /// Frame that announces the tensor, if it belongs to a step.
    announce: Option<FrameBuf>,
    /// Tensor id, assigned at the start.
    id: Option<u16>,
    dtype: DType,
    dims: Dims,
    data: Bytes,
    /// Chunks that zstd made smaller; the others are cut from `data`.
    compressed: Vec<Option<Vec<u8>>>,
    chunk_bytes: usize,
    next_chunk: usize,
}

impl Outgoing {
    /// Encodes a message under the negotiated values of a session.
    ///
    /// # Errors
    /// `tensor_shape` if the data does not match the shape; `frame_too_big` beyond the peer's
    /// limits; `protocol_state` if only the other side may send it.
    pub(crate) fn new(message: &Message, terms: &Terms) -> Result<Outgoing, Violation> {
        Outgoing::check(message, terms)?;
        let body = match message.data() {
            Some(data) => Body::with_data(message, data, terms)?,
            None => Body::Small(pipeline::frame(message)?),
        };
        Ok(Outgoing {
            kind: message.kind(),
            stream_key: message.stream_key().unwrap_or_default(),
            body,
        })
    }

    /// Checks who sends the message, and the size of its data.
    ///
    /// # Errors
    /// As [`Outgoing::new`].
    pub(crate) fn check(message: &Message, terms: &Terms) -> Result<(), Violation> {
        let callers = message.kind().is_callers();
        if callers.is_some_and(|callers| callers != terms.caller) {
            let detail = "only the other side may send this message";
            return Err(CloseCode::ProtocolState.violation(detail));
        }
        let Some(data) = message.data() else {
            return Ok(());
        };
        let bytes = message.data_bytes()?;
        if data.len() as u64 != bytes {
            return Err(CloseCode::TensorShape.violation(format!(
                "the shape says {bytes} bytes, the data has {}",
                data.len()
            )));
        }
        if !is_inline(message, bytes, terms) && bytes > u64::from(terms.peer_buffer) {
            return Err(CloseCode::FrameTooBig.violation(format!(
                "{bytes} bytes do not fit the peer's buffer of {}",
                terms.peer_buffer
            )));
        }
        Ok(())
    }

    /// Bytes that wait for credit; 0 unless the message is a tensor.
    pub(super) fn bulk_bytes(&self) -> u64 {
        match &self.body {
            Body::Small(_) => 0,
            Body::Bulk(bulk) => bulk.data.len() as u64,
        }
    }
}

/// Returns whether `bytes` bytes of rows travel inside their step or result.
fn is_inline(message: &Message, bytes: u64, terms: &Terms) -> bool {
    !matches!(message, Message::Tensor(_)) && bytes <= u64::from(terms.inline_max)
}

impl Body {
    fn with_data(message: &Message, data: &Bytes, terms: &Terms) -> Result<Body, Violation> {
        let bytes = data.len() as u64;
        if is_inline(message, bytes, terms) {
            return Ok(Body::Small(pipeline::frame(message)?));
        }
        let announce = match message {
            Message::Tensor(_) => None,
            rows => Some(pipeline::rows_frame(rows, Place::Tensor(0))?),
        };
        let (dtype, dims) = message.shape()?;
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
        Ok(Body::Bulk(Box::new(Bulk {
            ticket: 0,
            announce,
            id: None,
            dtype,
            dims,
            data: data.clone(),
            compressed,
            chunk_bytes,
            next_chunk: 0,
        })))
    }
}

impl Bulk {
    /// Frame of the next chunk, and whether it is the last.
    fn chunk(&mut self, id: u16) -> (FrameBuf, bool) {
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
        let out = (head.frame(data, flags), last);
        self.next_chunk += 1;
        out
    }
}

/// Queue of a message. Standalone tensors have no order among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    Stream(u32),
    Tensor(u64),
}

struct Item {
    epoch: u32,
    body: Body,
}

impl Item {
    fn bulk(&self) -> Option<&Bulk> {
        match &self.body {
            Body::Small(_) => None,
            Body::Bulk(bulk) => Some(bulk),
        }
    }
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

pub(super) struct Outbox {
    pub(super) window: Window,
    peer_buffer: u64,
    /// Non-empty lanes, each once; the first has the next turn.
    lanes: VecDeque<(Lane, VecDeque<Item>)>,
    live: BTreeMap<u16, Live>,
    live_bytes: u64,
    /// Ends of tensors and streams, LEAVING, and receipts. They go first: the peer must free the
    /// ended tensors and streams before it sees their successors. A receipt is not dropped with its
    /// stream.
    ends: VecDeque<FrameBuf>,
    next_id: u16,
    next_ticket: u64,
    pub(super) queued_bytes: u64,
    /// Bytes of tensors that are not completely sent.
    pub(super) queued_bulk: u64,
    /// Number of queued small messages.
    pub(super) queued_small: usize,
}

impl Outbox {
    pub(super) fn new(window: u32, peer_buffer: u32) -> Outbox {
        Outbox {
            window: Window::new(window),
            peer_buffer: u64::from(peer_buffer),
            lanes: VecDeque::new(),
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

    pub(super) fn push(&mut self, out: Outgoing) {
        let Outgoing {
            kind,
            stream_key,
            body,
        } = out;
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let body = match (kind, body) {
            (
                FrameType::StreamClose | FrameType::Leaving | FrameType::Receipt,
                Body::Small(frame),
            ) => {
                return self.end(frame);
            }
            (_, Body::Small(frame)) => {
                self.queued_bytes += frame.len() as u64;
                self.queued_small += 1;
                Body::Small(frame)
            }
            (_, Body::Bulk(mut bulk)) => {
                bulk.ticket = ticket;
                self.queued_bytes += bulk.data.len() as u64;
                self.queued_bulk += bulk.data.len() as u64;
                Body::Bulk(bulk)
            }
        };
        let lane = match kind {
            FrameType::TensorData => Lane::Tensor(ticket),
            _ => Lane::Stream(stream_key.0),
        };
        let item = Item {
            epoch: stream_key.1,
            body,
        };
        match self.lanes.iter_mut().find(|(have, _)| *have == lane) {
            Some((_, queue)) => queue.push_back(item),
            None => self.lanes.push_back((lane, VecDeque::from([item]))),
        }
    }

    /// Updates the counters for an item that leaves the queues.
    fn forget(&mut self, item: &Item) {
        match &item.body {
            Body::Small(frame) => {
                self.queued_bytes -= frame.len() as u64;
                self.queued_small -= 1;
            }
            Body::Bulk(bulk) => {
                self.queued_bytes -= bulk.data.len() as u64;
                self.queued_bulk -= bulk.data.len() as u64;
            }
        }
    }

    /// Queues the end of a tensor or a stream, LEAVING, or a receipt.
    pub(super) fn end(&mut self, frame: FrameBuf) {
        self.queued_bytes += frame.len() as u64;
        self.ends.push_back(frame);
    }

    /// Drops all queued messages of an ended stream; cancels tensors that have begun.
    pub(super) fn purge(&mut self, (stream, epoch): (u32, u32)) {
        let lane = Lane::Stream(stream);
        let Some(at) = self.lanes.iter().position(|(have, _)| *have == lane) else {
            return;
        };
        let mut gone = Vec::new();
        if let Some((_, queue)) = self.lanes.get_mut(at) {
            let queued = std::mem::take(queue).into_iter();
            let (of_stream, others): (Vec<_>, _) = queued.partition(|item| item.epoch == epoch);
            (gone, *queue) = (of_stream, others.into());
            if queue.is_empty() {
                self.lanes.remove(at);
            }
        }
        for item in gone {
            self.forget(&item);
            if let Some(tensor) = item.bulk().and_then(|bulk| bulk.id)
                && let Some(live) = self.live.get_mut(&tensor)
            {
                live.stage = Stage::Cancelled;
                self.end(TensorEnd { tensor }.frame());
            }
        }
    }

    /// Next frame, if one may be sent.
    pub(super) fn poll(&mut self) -> Option<FrameBuf> {
        if let Some(frame) = self.ends.pop_front() {
            self.queued_bytes -= frame.len() as u64;
            return Some(frame);
        }
        self.poll_small().or_else(|| self.poll_bulk())
    }

    /// First item of each lane, in the order of their turns.
    fn heads(&self) -> impl Iterator<Item = &Item> {
        self.lanes.iter().filter_map(|(_, queue)| queue.front())
    }

    /// Ends the turn of the lane at `at`: takes its first item if `pop`, and moves the lane to the
    /// back.
    fn turn_taken(&mut self, at: usize, pop: bool) -> Option<Item> {
        let (lane, mut queue) = self.lanes.remove(at)?;
        let item = if pop { queue.pop_front() } else { None };
        if let Some(item) = &item {
            self.forget(item);
        }
        if !queue.is_empty() {
            self.lanes.push_back((lane, queue));
        }
        item
    }

    fn poll_small(&mut self) -> Option<FrameBuf> {
        if self.queued_small == 0 {
            return None;
        }
        let at = self.heads().position(|head| head.bulk().is_none())?;
        match self.turn_taken(at, true)?.body {
            Body::Small(frame) => Some(frame),
            Body::Bulk(_) => None,
        }
    }

    fn poll_bulk(&mut self) -> Option<FrameBuf> {
        if self.queued_bulk == 0 || self.window.available() == 0 {
            return None;
        }
        // Tensors start in order of arrival, so that small ones cannot starve a large one of the
        // peer's buffer.
        let waiting = self.heads().filter_map(Item::bulk);
        let waiting = waiting.filter(|bulk| bulk.id.is_none());
        let first_waiting = waiting.map(|bulk| bulk.ticket).min();
        let room = self.peer_buffer.saturating_sub(self.live_bytes);
        let can_start = self.live.len() < MAX_LIVE_TENSORS;
        let may_go = |bulk: &Bulk| {
            let starts = Some(bulk.ticket) == first_waiting && bulk.data.len() as u64 <= room;
            bulk.id.is_some() || (can_start && starts)
        };
        let at = self
            .heads()
            .position(|head| head.bulk().is_some_and(may_go))?;
        let fresh = self.free_id();
        let (_, queue) = self.lanes.get_mut(at)?;
        let Body::Bulk(bulk) = &mut queue.front_mut()?.body else {
            return None;
        };
        let id = match bulk.id {
            Some(id) => id,
            None => {
                let id = fresh?;
                bulk.id = Some(id);
                let live = Live {
                    stage: Stage::Sending,
                    bytes: bulk.data.len() as u64,
                    in_flight: 0,
                };
                self.next_id = id.wrapping_add(1);
                self.live_bytes += live.bytes;
                self.live.insert(id, live);
                if let Some(mut frame) = bulk.announce.take() {
                    frame.patch_u16(TENSOR_ID_AT, id);
                    // The lane keeps its position: the first chunk follows at once.
                    return Some(frame);
                }
                id
            }
        };
        let (frame, last) = bulk.chunk(id);
        // Checked above: a unit is available.
        self.window.take().ok()?;
        if let Some(live) = self.live.get_mut(&id) {
            live.in_flight += 1;
            if last {
                live.stage = Stage::Sent;
            }
        }
        self.turn_taken(at, last);
        Some(frame)
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

    /// Handles credit returned by the peer.
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

    /// Handles the refusal of a tensor by the peer.
    pub(super) fn nack(&mut self, id: u16) -> Result<(), Violation> {
        let Some(live) = self.live.get(&id) else {
            return Err(CloseCode::CreditAck.violation("a NACK of a tensor that is not being sent"));
        };
        self.window.give_back(live.in_flight)?;
        if live.stage == Stage::Sending {
            let is_it = |head: &Item| head.bulk().is_some_and(|bulk| bulk.id == Some(id));
            let at = self.heads().position(is_it);
            at.and_then(|at| self.turn_taken(at, true));
            // The peer waits for TENSOR_END before the id can be reused.
            self.end(TensorEnd { tensor: id }.frame());
        }
        self.remove_live(id);
        Ok(())
    }
}
