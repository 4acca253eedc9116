//! Messages of a session. Chunking, inlining and compression happen below.
//!
//! A *stream* is one sequence on one host. The caller numbers its streams; the *epoch* grows when a
//! stream is rebuilt, to tell apart the answers from before. Every message below belongs to one
//! `(stream, epoch)`.
//!
//! Every [`Step`] that reaches a host is answered once: by its [`StepResult`], or by a
//! [`StreamError`], which answers all steps of its `(stream, epoch)` at once. The answer frees the
//! caller's step slot. [`StreamClose`] ends a stream without an answer.

use std::fmt;
use std::num::NonZeroU32;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::code::{CloseCode, Code, Violation};
use crate::fields;
use crate::tensor::{DType, Dims, Tensor};

/// Longest message of a stream error, in bytes.
pub(crate) const MAX_ERROR_MESSAGE_BYTES: usize = 512;

/// Message of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Caller to host: begin a stream.
    StreamOpen(StreamOpen),
    /// Host to caller: the stream is open.
    StreamOpened(StreamOpened),
    /// Caller to host: the stream is done or cancelled.
    StreamClose(StreamClose),
    /// Host to caller: the host has ended the stream.
    StreamError(StreamError),
    /// Caller to host: run rows through the layers.
    Step(Step),
    /// Host to caller: result rows.
    StepResult(StepResult),
    /// Caller to host: forget positions.
    Truncate(Truncate),
    /// Host to caller: answer to a [`Truncate`] that asks for one.
    Truncated(Truncated),
    /// Caller to host: ask for the descriptor. Answered by [`Message::Descriptor`].
    Describe,
    /// Host to caller: the descriptor, 1 to 4,080 bytes that are opaque to the transport.
    Descriptor(Bytes),
    /// Host to caller: signature over the steps of a stream so far. May come after its end.
    Receipt(Receipt),
    /// Host to caller: it will end its sessions. Open streams go on for at most `within_ms`; new
    /// ones are refused. May arrive at any time, and again with another time; the latest holds.
    Leaving {
        /// Milliseconds until the host ends the session, even if streams are open.
        within_ms: u32,
    },
    /// Either direction: a tensor that belongs to no step.
    Tensor(Tensor),
}

impl Message {
    /// Stream and epoch that the message belongs to, if any.
    pub(crate) fn stream_key(&self) -> Option<(u32, u32)> {
        match self {
            Message::StreamOpen(m) => Some((m.stream, m.epoch)),
            Message::StreamOpened(m) => Some((m.stream, m.epoch)),
            Message::StreamClose(m) => Some((m.stream, m.epoch)),
            Message::StreamError(m) => Some((m.stream, m.epoch)),
            Message::Step(m) => Some((m.stream, m.epoch)),
            Message::StepResult(m) => Some((m.stream, m.epoch)),
            Message::Truncate(m) => Some((m.stream, m.epoch)),
            Message::Truncated(m) => Some((m.stream, m.epoch)),
            Message::Receipt(m) => Some((m.stream, m.epoch)),
            Message::Describe | Message::Descriptor(_) => None,
            Message::Leaving { .. } | Message::Tensor(_) => None,
        }
    }

    /// Rows of a step or result, or elements of a tensor.
    pub(crate) fn data(&self) -> Option<&Bytes> {
        match self {
            Message::Step(Step { data, .. })
            | Message::StepResult(StepResult { data, .. })
            | Message::Tensor(Tensor { data, .. }) => Some(data),
            _ => None,
        }
    }

    /// The message with other data.
    pub(crate) fn with_data(mut self, bytes: Bytes) -> Message {
        match &mut self {
            Message::Step(Step { data, .. })
            | Message::StepResult(StepResult { data, .. })
            | Message::Tensor(Tensor { data, .. }) => *data = bytes,
            _ => {}
        }
        self
    }

    /// Element type and dimensions of the data.
    ///
    /// # Errors
    /// `tensor_shape` if a dimension is zero, or the message has no data.
    pub(crate) fn shape(&self) -> Result<(DType, Dims), Violation> {
        match self {
            Message::Step(m) => Ok((m.dtype, Dims::new(&[m.rows, m.width])?)),
            Message::StepResult(m) => Ok((m.dtype, Dims::new(&[m.rows, m.width])?)),
            Message::Tensor(m) => Ok((m.dtype, m.dims)),
            _ => Err(CloseCode::TensorShape.violation("a message without data")),
        }
    }

    /// Size of the data by its shape, in bytes.
    ///
    /// # Errors
    /// `tensor_shape` if a step has no rows, a dimension is zero, or the product overflows.
    pub(crate) fn data_bytes(&self) -> Result<u64, Violation> {
        match self {
            Message::StepResult(m) if m.rows == 0 && m.width != 0 => Ok(0),
            _ => {
                let (dtype, dims) = self.shape()?;
                dims.bytes(dtype)
            }
        }
    }
}

/// Asks the host to open a stream. Answered by [`StreamOpened`] or [`StreamError`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOpen {
    /// Number of the stream, chosen by the caller.
    pub stream: u32,
    pub epoch: u32,
    /// Identity of the model's weights: the SHA-256 of the canonical manifest.
    #[serde(with = "serde_bytes")]
    pub weights: [u8; 32],
    /// First layer.
    pub lo: u32,
    /// Last layer, inclusive.
    pub hi: u32,
    /// Limit of positions of the stream.
    pub max_positions: u32,
    /// Stream whose first positions the new one begins with. Only for a host that announces it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork: Option<Fork>,
}

/// Beginning of a stream: a copy of the first `position` positions of another one of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    pub stream: u32,
    pub epoch: u32,
    /// Number of positions to begin with.
    pub position: u32,
}

/// Answer to [`StreamOpen`]: the host is ready for steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOpened {
    pub stream: u32,
    pub epoch: u32,
}

/// Ends a stream: finished or cancelled. Both sides free everything at once; steps in flight get no
/// answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamClose {
    pub stream: u32,
    pub epoch: u32,
}

/// The host has ended the stream; its steps in flight get no other answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamError {
    pub stream: u32,
    pub epoch: u32,
    /// Position of the step at fault, if a step was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<u32>,
    #[serde(deserialize_with = "fields::code")]
    pub code: Code,
    /// Sentence for people, at most 512 bytes. A longer one is cut when it is sent.
    #[serde(
        default,
        serialize_with = "fields::write_cut::<MAX_ERROR_MESSAGE_BYTES, _>",
        deserialize_with = "fields::text::<MAX_ERROR_MESSAGE_BYTES, _>"
    )]
    pub message: String,
}

/// Selects the rows that a step returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::FromRepr)]
#[repr(u8)]
pub enum Want {
    /// No rows: the answer only confirms that the step is done.
    None = 0,
    /// The last row.
    Last = 1,
    /// Every row.
    All = 2,
}

impl Want {
    pub(crate) fn from_wire(byte: u8) -> Result<Want, Violation> {
        Want::from_repr(byte)
            .ok_or_else(|| CloseCode::BodyMalformed.violation("unknown choice of rows to return"))
    }
}

/// Rows to run through the host's layers.
///
/// `position` equal to the stream's length appends. A smaller one truncates the stream to it
/// first, so that a step can be repeated. A larger one is the stream error `position_gap`.
#[derive(Clone, PartialEq, Eq)]
pub struct Step {
    pub stream: u32,
    pub epoch: u32,
    /// Position of the first row.
    pub position: u32,
    /// Number of rows, at least 1.
    pub rows: u32,
    /// Values per row, at least 1.
    pub width: u32,
    /// Element type of the step's rows and of the returned rows.
    pub dtype: DType,
    pub want: Want,
    /// `rows * width` values, row-major, little-endian.
    pub data: Bytes,
}

impl Step {
    /// Answer with the rows that the step wants, without times.
    pub fn answer(&self, data: Bytes) -> StepResult {
        StepResult {
            stream: self.stream,
            epoch: self.epoch,
            position: self.position,
            rows: match self.want {
                Want::None => 0,
                Want::Last => 1,
                Want::All => self.rows,
            },
            width: self.width,
            dtype: self.dtype,
            compute_us: 0,
            queue_us: 0,
            data,
        }
    }

    /// The answer of an echo.
    pub fn echo(&self) -> StepResult {
        let row_bytes = self.width as usize * self.dtype.size();
        self.answer(match self.want {
            Want::None => Bytes::new(),
            Want::Last => {
                let last = self.data.len().saturating_sub(row_bytes);
                self.data.slice(last..)
            }
            Want::All => self.data.clone(),
        })
    }
}

/// Answer to a [`Step`].
#[derive(Clone, PartialEq, Eq)]
pub struct StepResult {
    pub stream: u32,
    pub epoch: u32,
    /// Position of the step's first row.
    pub position: u32,
    /// Rows returned: 0, 1, or all rows of the step.
    pub rows: u32,
    /// Values per row.
    pub width: u32,
    /// Element type of the rows.
    pub dtype: DType,
    /// Microseconds of the batches in which the step ran.
    pub compute_us: u32,
    /// Microseconds of the rest of the time between arrival and answer.
    pub queue_us: u32,
    /// `rows * width` values, row-major, little-endian.
    pub data: Bytes,
}

/// Shortens a stream to `position` positions. A position beyond the stream's end is the stream
/// error `position_gap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Truncate {
    pub stream: u32,
    pub epoch: u32,
    /// Positions that remain.
    pub position: u32,
    /// The host keeps fewer positions if it cannot return to `position`, and answers with
    /// [`Truncated`]. Only for a host that announces it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub answer: bool,
}

/// Answer to a [`Truncate`]: the host is ready for steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Truncated {
    pub stream: u32,
    pub epoch: u32,
    /// Positions that the stream holds.
    pub position: u32,
}

/// Signature of a host over the claims of a stream epoch so far. The transport carries the bytes;
/// `specs/receipts.md` defines what they cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    pub stream: u32,
    pub epoch: u32,
    /// Number of claims, at least 1.
    pub claims: NonZeroU32,
    /// Chain of the claims.
    #[serde(with = "serde_bytes")]
    pub chain: [u8; 32],
    #[serde(with = "serde_bytes")]
    pub signature: [u8; 64],
}

// Activations are sensitive: only their shape is printed.
impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step")
            .field("stream", &self.stream)
            .field("epoch", &self.epoch)
            .field("position", &self.position)
            .field("rows", &self.rows)
            .field("width", &self.width)
            .field("dtype", &self.dtype)
            .field("want", &self.want)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for StepResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepResult")
            .field("stream", &self.stream)
            .field("epoch", &self.epoch)
            .field("position", &self.position)
            .field("rows", &self.rows)
            .field("width", &self.width)
            .field("dtype", &self.dtype)
            .field("compute_us", &self.compute_us)
            .field("queue_us", &self.queue_us)
            .finish_non_exhaustive()
    }
}
