//! Tensors received from the peer: reassembly, credit and the receive buffer.
//!
//! States of a tensor:
//!
//! ```text
//!  announced by a STEP,            last chunk            application takes it:
//!  or its first chunk              (FINAL)               ACK end
//!      |                              |                     |
//!      v             chunk: ACK       v                     v
//!  receiving <--+ ------------->  complete ------------>  gone
//!      |   |    |                                           ^
//!      |   +----+                                           |
//!      |  TENSOR_END: ACK end  -----------------------------+
//!      | refused: NACK                                      |
//!      +--------------> refused --- FINAL or TENSOR_END ----+
//! ```
//!
//! The last chunk's credit returns only when the application takes the tensor. So the tensors in
//! the queue are bounded by the window and the buffer, both known to the sender.

use std::collections::{BTreeMap, VecDeque};

use crate::code::{CloseCode, Violation};
use crate::compress::ChunkDecompressor;
use crate::credit::Window;
use crate::message::Message;
use crate::secret::Wiped;
use crate::tensor::{DType, Dims, Tensor};
use crate::wire::cbor::Body as _;
use crate::wire::chunk::ChunkHead;
use crate::wire::control::{Ack, Nack};
use crate::wire::{Flags, FrameBuf};

struct Receiving {
    /// Step or result that announced the tensor, without its rows.
    rows: Option<Message>,
    dtype: DType,
    dims: Dims,
    total: usize,
    /// Allocated when the first chunk arrives, not at the announcement.
    data: Wiped,
}

enum Stage {
    Receiving(Receiving),
    Complete { total: usize },
    Refused,
}

/// Credit to return, collected until the next transmission.
#[derive(Default)]
struct Due {
    chunks: u32,
    end: bool,
}

#[derive(Default)]
pub(super) struct Inbox {
    window: Window,
    chunk_bytes: usize,
    buffer: u64,
    /// Reserved bytes of the receive buffer: the full size of all current tensors.
    pub(super) used: u64,
    zstd: bool,
    tensors: BTreeMap<u16, Stage>,
    due: BTreeMap<u16, Due>,
    /// Refused tensors whose NACK is not sent yet.
    nacks: VecDeque<u16>,
    complete: u32,
    receiving: u32,
    decompressor: ChunkDecompressor,
}

impl Inbox {
    pub(super) fn new(window: u32, chunk_bytes: u32, buffer: u32, zstd: bool) -> Inbox {
        Inbox {
            window: Window::new(window),
            chunk_bytes: chunk_bytes as usize,
            buffer: u64::from(buffer),
            zstd,
            ..Inbox::default()
        }
    }

    /// Returns whether a tensor is incomplete.
    pub(super) fn is_receiving(&self) -> bool {
        self.receiving > 0
    }

    /// Returns whether an ACK or NACK waits to be sent.
    pub(super) fn has_due(&self) -> bool {
        !self.due.is_empty() || !self.nacks.is_empty()
    }

    /// Returns whether complete tensors wait for the application and hold credit.
    pub(super) fn withholds(&self) -> bool {
        self.complete > 0
    }

    /// Checks a new tensor and reserves its space, before any memory is allocated.
    fn begin(
        &mut self,
        id: u16,
        rows: Option<Message>,
        dtype: DType,
        dims: Dims,
    ) -> Result<(), Violation> {
        if self.tensors.contains_key(&id) {
            return Err(CloseCode::TensorId.violation("a tensor id that is in use"));
        }
        let bytes = dims.bytes(dtype)?;
        let too_big = || {
            CloseCode::FrameTooBig.violation(format!(
                "a tensor of {bytes} bytes, more than the buffer of {}",
                self.buffer
            ))
        };
        let total = usize::try_from(bytes).map_err(|_| too_big())?;
        if bytes > self.buffer {
            return Err(too_big());
        }
        if self.used + bytes > self.buffer {
            return Err(CloseCode::BufferOverrun.violation(format!(
                "{bytes} bytes more than the {} that are free",
                self.buffer - self.used
            )));
        }
        self.used += bytes;
        self.receiving += 1;
        let receiving = Receiving {
            rows,
            dtype,
            dims,
            total,
            data: Wiped(Vec::new()),
        };
        self.tensors.insert(id, Stage::Receiving(receiving));
        Ok(())
    }

    /// Handles a step or result whose rows follow as a tensor.
    pub(super) fn announce(&mut self, id: u16, rows: Message) -> Result<(), Violation> {
        let (dtype, dims) = rows.shape()?;
        self.begin(id, Some(rows), dtype, dims)
    }

    /// Refuses the tensor of an answer that is no longer needed.
    pub(super) fn announce_unwanted(&mut self, id: u16) -> Result<(), Violation> {
        if self.tensors.contains_key(&id) {
            return Err(CloseCode::TensorId.violation("a tensor id that is in use"));
        }
        self.tensors.insert(id, Stage::Refused);
        self.nacks.push_back(id);
        Ok(())
    }

    /// Handles a chunk. Returns the message that it completes, with its tensor id.
    pub(super) fn chunk(
        &mut self,
        head: ChunkHead,
        flags: Flags,
        data: &[u8],
    ) -> Result<Option<(Message, u16)>, Violation> {
        let shape = |detail| CloseCode::TensorShape.violation(detail);
        let id = head.tensor;
        let last = flags.has(Flags::FINAL);
        if let Some(Stage::Refused) = self.tensors.get(&id) {
            if last {
                self.tensors.remove(&id);
            }
            return Ok(None);
        }
        self.window.take()?;
        if !self.tensors.contains_key(&id) {
            self.begin(id, None, head.dtype, head.dims)?;
        }
        let Some(Stage::Receiving(tensor)) = self.tensors.get_mut(&id) else {
            return Err(CloseCode::TensorId.violation("a chunk after the last one"));
        };
        if (head.dtype, head.dims) != (tensor.dtype, tensor.dims) {
            return Err(shape("a chunk of another shape than its tensor"));
        }
        let have = tensor.data.0.len();
        let expected = self.chunk_bytes.min(tensor.total - have);
        if last != (have + expected == tensor.total) {
            return Err(shape("FINAL is not on the chunk that completes the tensor"));
        }
        let compressed = flags.has(Flags::COMPRESSED);
        if compressed && !self.zstd {
            return Err(CloseCode::FrameUnknown.violation("compression was not agreed"));
        }
        if !compressed && data.len() < expected {
            return Err(CloseCode::ChunkTooSmall.violation(format!(
                "a chunk of {} bytes where {expected} are due",
                data.len()
            )));
        }
        if data.len() > expected {
            return Err(CloseCode::FrameTooBig.violation(format!(
                "a chunk of {} bytes where {expected} are due",
                data.len()
            )));
        }
        let total = tensor.total;
        let buffer = &mut tensor.data.0;
        if have == 0 {
            buffer.reserve_exact(total);
        }
        if compressed {
            self.decompressor.append(data, expected, buffer)?;
        } else {
            buffer.extend_from_slice(data);
        }
        if !last {
            self.due.entry(id).or_default().chunks += 1;
            return Ok(None);
        }
        let complete = self.tensors.insert(id, Stage::Complete { total });
        self.receiving -= 1;
        self.complete += 1;
        let Some(Stage::Receiving(tensor)) = complete else {
            return Err(CloseCode::Internal.violation("a tensor without data"));
        };
        let (dtype, dims, data) = (tensor.dtype, tensor.dims, tensor.data.into_bytes());
        let message = match tensor.rows {
            Some(rows) => rows.with_data(data),
            None => Message::Tensor(Tensor { dtype, dims, data }),
        };
        Ok(Some((message, id)))
    }

    /// The sender abandons a tensor. Returns the step or result that announced it, which will not
    /// complete.
    pub(super) fn end(&mut self, id: u16) -> Result<Option<Message>, Violation> {
        match self.tensors.remove(&id) {
            Some(Stage::Receiving(tensor)) => {
                self.used -= tensor.total as u64;
                self.receiving -= 1;
                self.due.entry(id).or_default().end = true;
                Ok(tensor.rows)
            }
            Some(Stage::Refused) => Ok(None),
            Some(Stage::Complete { .. }) | None => Err(CloseCode::TensorId
                .violation("the end of a tensor that is complete or never began")),
        }
    }

    /// Frees a complete tensor: taken by the application, or dropped.
    pub(super) fn release(&mut self, id: u16) {
        if let Some(Stage::Complete { total }) = self.tensors.get(&id) {
            self.used -= *total as u64;
            self.complete -= 1;
            self.tensors.remove(&id);
            let due = self.due.entry(id).or_default();
            due.chunks += 1;
            due.end = true;
        }
    }

    /// Refuses the incomplete tensors of an ended stream.
    pub(super) fn refuse(&mut self, stream_key: (u32, u32)) {
        let is_it = |rows: &Option<Message>| {
            let rows = rows.as_ref();
            rows.is_some_and(|rows| rows.stream_key() == Some(stream_key))
        };
        for (id, stage) in &mut self.tensors {
            let Stage::Receiving(tensor) = stage else {
                continue;
            };
            if !is_it(&tensor.rows) {
                continue;
            }
            self.used -= tensor.total as u64;
            self.receiving -= 1;
            *stage = Stage::Refused;
            // A NACK returns all of the tensor's credit, including credit not yet acknowledged.
            // (The window has these units in use, so giving them back cannot fail.)
            let due = self.due.remove(id).unwrap_or_default();
            let _ = self.window.give_back(due.chunks);
            self.nacks.push_back(*id);
        }
    }

    /// The next ACK or NACK to send.
    pub(super) fn poll(&mut self) -> Option<FrameBuf> {
        if let Some(tensor) = self.nacks.pop_front() {
            let code = "stream_closed".to_owned();
            return Some(Nack { tensor, code }.frame());
        }
        let (tensor, Due { chunks, end }) = self.due.pop_first()?;
        // These units were taken when the chunks arrived.
        let _ = self.window.give_back(chunks);
        let ack = Ack {
            tensor,
            chunks,
            end,
        };
        Some(ack.frame())
    }
}
