//! What a session carries for the pipeline. Chunking, inlining and compression happen below.
//!
//! A *stream* is one sequence on one host. The caller numbers its streams; the *epoch* grows when
//! a stream is rebuilt, so that answers from before are told apart. `(stream, epoch)` names one
//! life of a stream: everything below belongs to one.
//!
//! Every [`Step`] that reaches a host is answered once: by its [`StepResult`], or by a
//! [`StreamError`], which answers all steps of that life at once. The answer gives the caller its
//! step slot back. [`StreamClose`] ends a life without an answer.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::code::{CloseCode, Code, Violation};
use crate::tensor::{DType, Tensor};
use crate::wire::cbor;

/// Longest message of a stream error, in bytes.
pub(crate) const MAX_ERROR_MESSAGE_BYTES: usize = 512;

/// One message of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Caller to host: begin a stream.
    StreamOpen(StreamOpen),
    /// Host to caller: the stream is ready.
    StreamOpened(StreamOpened),
    /// Caller to host: the stream is done or cancelled.
    StreamClose(StreamClose),
    /// Host to caller: the stream is gone.
    StreamError(StreamError),
    /// Caller to host: run rows through the layers.
    Step(Step),
    /// Host to caller: the rows that came out.
    StepResult(StepResult),
    /// Caller to host: forget positions.
    Truncate(Truncate),
    /// Caller to host: say what you serve. Answered by [`Message::Descriptor`].
    Describe,
    /// Host to caller: what it serves, 1 to 4,080 bytes that mean nothing to the transport.
    Descriptor(Bytes),
    /// Host to caller: it will end its sessions. Streams that exist go on for at most as long as
    /// this says, a new one is refused. May come at any time, and again with another time; the
    /// latest holds.
    Leaving {
        /// Milliseconds until the host ends the session, whatever still runs in it.
        within_ms: u32,
    },
    /// Either way: a tensor of its own.
    Tensor(Tensor),
}

impl Message {
    /// The life of a stream that it belongs to, if it does: stream and epoch.
    pub(crate) fn life(&self) -> Option<(u32, u32)> {
        match self {
            Message::StreamOpen(m) => Some((m.stream, m.epoch)),
            Message::StreamOpened(m) => Some((m.stream, m.epoch)),
            Message::StreamClose(m) => Some((m.stream, m.epoch)),
            Message::StreamError(m) => Some((m.stream, m.epoch)),
            Message::Step(m) => Some((m.stream, m.epoch)),
            Message::StepResult(m) => Some((m.stream, m.epoch)),
            Message::Truncate(m) => Some((m.stream, m.epoch)),
            Message::Describe | Message::Descriptor(_) => None,
            Message::Leaving { .. } | Message::Tensor(_) => None,
        }
    }
}

/// Asks the host to open a stream. Answered by [`StreamOpened`] or [`StreamError`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOpen {
    /// The caller's number for the stream.
    pub stream: u32,
    /// Which life of the stream this is.
    pub epoch: u32,
    /// Identity of the model's weights: the SHA-256 of the canonical manifest.
    #[serde(with = "serde_bytes")]
    pub weights: [u8; 32],
    /// First layer.
    pub lo: u32,
    /// Last layer, inclusive.
    pub hi: u32,
    /// Most positions that the stream may come to hold.
    pub max_positions: u32,
}

/// The host holds the stream and waits for steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOpened {
    /// The caller's number for the stream.
    pub stream: u32,
    /// Which life of the stream this is.
    pub epoch: u32,
}

/// The caller is done with a stream, or cancels it. Both sides free everything at once; steps in
/// flight get no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamClose {
    /// The caller's number for the stream.
    pub stream: u32,
    /// Which life of the stream this is.
    pub epoch: u32,
}

/// The host gave a stream up: it exists no more, and its steps in flight get no other answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamError {
    /// The caller's number for the stream.
    pub stream: u32,
    /// Which life of the stream this is.
    pub epoch: u32,
    /// Position of the step that failed, if it was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<u32>,
    /// The cause.
    #[serde(deserialize_with = "cbor::code")]
    pub code: Code,
    /// A sentence for people, at most 512 bytes. Longer ones are cut when sent.
    #[serde(
        default,
        serialize_with = "cbor::write_cut::<MAX_ERROR_MESSAGE_BYTES, _>",
        deserialize_with = "cbor::text::<MAX_ERROR_MESSAGE_BYTES, _>"
    )]
    pub message: String,
}

/// Which rows a step returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Want {
    /// None: the answer only says that the step is done.
    None = 0,
    /// The last row.
    Last = 1,
    /// Every row.
    All = 2,
}

impl Want {
    pub(crate) fn from_wire(byte: u8) -> Result<Want, Violation> {
        match byte {
            0 => Ok(Want::None),
            1 => Ok(Want::Last),
            2 => Ok(Want::All),
            _ => Err(CloseCode::BodyMalformed.violation("unknown choice of rows to return")),
        }
    }
}

/// Rows to run through the host's layers.
///
/// `position` equal to the stream's length appends. A smaller one truncates the stream to it
/// first, so that a step can be repeated. A larger one is the stream error `position_gap`.
#[derive(Clone, PartialEq, Eq)]
pub struct Step {
    /// The caller's number for the stream.
    pub stream: u32,
    /// Which life of the stream this is.
    pub epoch: u32,
    /// Position of the first row.
    pub position: u32,
    /// Number of rows, at least 1.
    pub rows: u32,
    /// Values per row, at least 1.
    pub width: u32,
    /// Element type of the rows, and of those that return.
    pub dtype: DType,
    /// Which rows to return.
    pub want: Want,
    /// `rows * width` values, row-major, little-endian.
    pub data: Bytes,
}

/// What came out of a [`Step`].
#[derive(Clone, PartialEq, Eq)]
pub struct StepResult {
    /// The caller's number for the stream.
    pub stream: u32,
    /// Which life of the stream this is.
    pub epoch: u32,
    /// Position of the step's first row.
    pub position: u32,
    /// Rows returned: 0, 1, or as many as the step had.
    pub rows: u32,
    /// Values per row.
    pub width: u32,
    /// Element type of the rows.
    pub dtype: DType,
    /// Microseconds that the host computed for the batch in which the step ran.
    pub compute_us: u32,
    /// Microseconds that the step waited in the host before that.
    pub queue_us: u32,
    /// `rows * width` values, row-major, little-endian.
    pub data: Bytes,
}

/// Shortens a stream to `position` positions. Has no answer; longer than the stream is the stream
/// error `position_gap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Truncate {
    /// The caller's number for the stream.
    pub stream: u32,
    /// Which life of the stream this is.
    pub epoch: u32,
    /// Positions that remain.
    pub position: u32,
}

// Activations are sensitive: what prints is the shape.
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
