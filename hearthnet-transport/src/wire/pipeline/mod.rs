//! The pipeline's frames, 0x10 to 0x19.
//!
//! STEP and STEP_RESULT have fixed headers, so that a decode row needs no parser and its size
//! depends on the width alone. DESCRIBE has no body, DESCRIPTOR carries the host's bytes unchanged.
//! The others are CBOR maps.
//!
//! STEP, then the rows when `place` is 0:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | stream |
//! | 4 | 4 | epoch |
//! | 8 | 4 | position of the first row |
//! | 12 | 4 | rows, at least 1 |
//! | 16 | 4 | width, at least 1 |
//! | 20 | 1 | element type |
//! | 21 | 1 | rows to return: 0 none, 1 last, 2 all |
//! | 22 | 1 | place: 0 the rows follow inline, 1 they follow as the tensor named next |
//! | 23 | 1 | reserved, zero |
//! | 24 | 2 | tensor id, zero when inline |
//! | 26 | 6 | reserved, zero |
//!
//! STEP_RESULT, then the rows when `place` is 0:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | stream |
//! | 4 | 4 | epoch |
//! | 8 | 4 | position of the step's first row |
//! | 12 | 4 | rows returned |
//! | 16 | 4 | width |
//! | 20 | 1 | element type |
//! | 21 | 1 | reserved, zero |
//! | 22 | 1 | place, as above |
//! | 23 | 1 | reserved, zero |
//! | 24 | 2 | tensor id, zero when inline |
//! | 26 | 2 | reserved, zero |
//! | 28 | 4 | microseconds of compute |
//! | 32 | 4 | microseconds in the host's queue |
//! | 36 | 4 | reserved, zero |

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::cbor::{Body as _, bodies, malformed};
use super::reader::Reader;
use super::{Flags, FrameBuf, FrameType, HEADER_BYTES};
use crate::code::{CloseCode, Violation};
use crate::config::CONTROL_MESSAGE_BYTES;
use crate::message::{
    Message, Step, StepResult, StreamClose, StreamError, StreamOpen, StreamOpened, Truncate, Want,
};
use crate::tensor::{DType, Dims};

bodies!(
    StreamOpen,
    StreamOpened,
    StreamClose,
    StreamError,
    Truncate,
    Leaving
);

/// Length of STEP_RESULT's fixed header; STEP's is 32.
pub(crate) const RESULT_HEAD_BYTES: usize = 40;
/// Offset of the tensor id in both.
pub(crate) const TENSOR_ID_AT: usize = 24;

/// Body of LEAVING.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Leaving {
    within_ms: u32,
}

/// Frame of a message. Rows are inline; a standalone tensor has no frame of its own.
///
/// # Errors
/// `frame_too_big` or `body_malformed` for a descriptor of invalid size, `protocol_state` for a
/// tensor.
pub(crate) fn frame(message: &Message) -> Result<FrameBuf, Violation> {
    Ok(match message {
        Message::StreamOpen(m) => m.frame(),
        Message::StreamOpened(m) => m.frame(),
        Message::StreamClose(m) => m.frame(),
        Message::StreamError(m) => m.frame(),
        Message::Truncate(m) => m.frame(),
        &Message::Leaving { within_ms } => Leaving { within_ms }.frame(),
        Message::Describe => FrameBuf::with_capacity(0).finish(FrameType::Describe, Flags::NONE),
        Message::Descriptor(bytes) => {
            check_descriptor(bytes)?;
            let mut frame = FrameBuf::with_capacity(bytes.len());
            frame.body().extend_from_slice(bytes);
            frame.finish(FrameType::Descriptor, Flags::NONE)
        }
        Message::Step(m) => RowsHead::of_step(m).frame(Place::Inline(&m.data)),
        Message::StepResult(m) => RowsHead::of_result(m).frame(Place::Inline(&m.data)),
        Message::Tensor(_) => {
            return Err(CloseCode::ProtocolState.violation("a tensor travels in chunks"));
        }
    })
}

/// Reads the body of a message without rows.
///
/// # Errors
/// `body_malformed`; `frame_too_big` for a descriptor beyond its limit; `protocol_state` for
/// another kind of frame.
pub(crate) fn read(kind: FrameType, body: &[u8]) -> Result<Message, Violation> {
    Ok(match kind {
        FrameType::StreamOpen => {
            let open = StreamOpen::read(body)?;
            if open.lo > open.hi {
                return Err(malformed("`lo` is greater than `hi`"));
            }
            Message::StreamOpen(open)
        }
        FrameType::StreamOpened => Message::StreamOpened(StreamOpened::read(body)?),
        FrameType::StreamClose => Message::StreamClose(StreamClose::read(body)?),
        FrameType::StreamError => Message::StreamError(StreamError::read(body)?),
        FrameType::Truncate => Message::Truncate(Truncate::read(body)?),
        FrameType::Leaving => {
            let Leaving { within_ms } = Leaving::read(body)?;
            Message::Leaving { within_ms }
        }
        FrameType::Describe if body.is_empty() => Message::Describe,
        FrameType::Describe => return Err(malformed("DESCRIBE has no body")),
        FrameType::Descriptor => {
            check_descriptor(body)?;
            Message::Descriptor(Bytes::copy_from_slice(body))
        }
        other => {
            let detail = format!("{other:?} is no message without rows");
            return Err(CloseCode::ProtocolState.violation(detail));
        }
    })
}

fn check_descriptor(bytes: &[u8]) -> Result<(), Violation> {
    match bytes.len() {
        0 => Err(malformed("an empty descriptor")),
        n if n > CONTROL_MESSAGE_BYTES - HEADER_BYTES => {
            Err(CloseCode::FrameTooBig.violation("a descriptor of more than 4,080 bytes"))
        }
        _ => Ok(()),
    }
}

/// Header of a step or a result. They share their layout up to offset 28.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowsHead {
    pub(crate) stream: u32,
    pub(crate) epoch: u32,
    pub(crate) position: u32,
    pub(crate) rows: u32,
    pub(crate) width: u32,
    pub(crate) dtype: DType,
    pub(crate) kind: RowsKind,
}

/// Fields in which a step and a result differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowsKind {
    Step { want: Want },
    Result { compute_us: u32, queue_us: u32 },
}

/// Place of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place<'a> {
    Inline(&'a [u8]),
    Tensor(u16),
}

impl RowsHead {
    pub(crate) fn of_step(step: &Step) -> RowsHead {
        RowsHead {
            stream: step.stream,
            epoch: step.epoch,
            position: step.position,
            rows: step.rows,
            width: step.width,
            dtype: step.dtype,
            kind: RowsKind::Step { want: step.want },
        }
    }

    pub(crate) fn of_result(result: &StepResult) -> RowsHead {
        RowsHead {
            stream: result.stream,
            epoch: result.epoch,
            position: result.position,
            rows: result.rows,
            width: result.width,
            dtype: result.dtype,
            kind: RowsKind::Result {
                compute_us: result.compute_us,
                queue_us: result.queue_us,
            },
        }
    }

    /// Size of the rows in bytes.
    ///
    /// # Errors
    /// `tensor_shape` if a step has no rows, a width is zero, or the product overflows.
    pub(crate) fn bytes(&self) -> Result<u64, Violation> {
        if self.rows == 0 && matches!(self.kind, RowsKind::Result { .. }) && self.width != 0 {
            return Ok(0);
        }
        self.dims()?.bytes(self.dtype)
    }

    pub(crate) fn dims(&self) -> Result<Dims, Violation> {
        Dims::new(&[self.rows, self.width])
    }

    /// Frame with the rows. For [`Place::Tensor`] the id is filled in when it is assigned.
    pub(crate) fn frame(&self, place: Place<'_>) -> FrameBuf {
        let (at, tensor, data) = match place {
            Place::Inline(data) => (0u8, 0u16, data),
            Place::Tensor(id) => (1, id, &[][..]),
        };
        let mut frame = FrameBuf::with_capacity(RESULT_HEAD_BYTES + data.len());
        let body = frame.body();
        for field in [
            self.stream,
            self.epoch,
            self.position,
            self.rows,
            self.width,
        ] {
            body.extend_from_slice(&field.to_be_bytes());
        }
        let want = match self.kind {
            RowsKind::Step { want } => want as u8,
            RowsKind::Result { .. } => 0,
        };
        body.extend_from_slice(&[self.dtype as u8, want, at, 0]);
        body.extend_from_slice(&tensor.to_be_bytes());
        let kind = match self.kind {
            RowsKind::Step { .. } => {
                body.extend_from_slice(&[0; 6]);
                FrameType::Step
            }
            RowsKind::Result {
                compute_us,
                queue_us,
            } => {
                body.extend_from_slice(&[0; 2]);
                body.extend_from_slice(&compute_us.to_be_bytes());
                body.extend_from_slice(&queue_us.to_be_bytes());
                body.extend_from_slice(&[0; 4]);
                FrameType::StepResult
            }
        };
        body.extend_from_slice(data);
        frame.finish(kind, Flags::NONE)
    }

    /// Splits a STEP or STEP_RESULT body.
    ///
    /// # Errors
    /// `body_malformed`, `frame_unknown` (reserved fields), or `tensor_shape` when the inline rows
    /// are not exactly `rows * width` values.
    pub(crate) fn read(kind: FrameType, body: &[u8]) -> Result<(RowsHead, Place<'_>), Violation> {
        let mut reader = Reader::new(body);
        let [stream, epoch, position, rows, width] = [
            reader.u32()?,
            reader.u32()?,
            reader.u32()?,
            reader.u32()?,
            reader.u32()?,
        ];
        let dtype = DType::from_wire(reader.u8()?)?;
        let choice = reader.u8()?;
        let place = reader.u8()?;
        reader.reserved::<1>()?;
        let tensor = reader.u16()?;
        let kind = if kind == FrameType::Step {
            reader.reserved::<6>()?;
            RowsKind::Step {
                want: Want::from_wire(choice)?,
            }
        } else {
            if choice != 0 {
                return Err(CloseCode::FrameUnknown.violation("a reserved field is not zero"));
            }
            reader.reserved::<2>()?;
            let (compute_us, queue_us) = (reader.u32()?, reader.u32()?);
            reader.reserved::<4>()?;
            RowsKind::Result {
                compute_us,
                queue_us,
            }
        };
        let head = RowsHead {
            stream,
            epoch,
            position,
            rows,
            width,
            dtype,
            kind,
        };
        let bytes = head.bytes()?;
        match place {
            0 if tensor == 0 => {
                let data = reader.rest();
                if data.len() as u64 != bytes {
                    return Err(CloseCode::TensorShape.violation(format!(
                        "{rows} x {width} rows are {bytes} bytes, not {}",
                        data.len()
                    )));
                }
                Ok((head, Place::Inline(data)))
            }
            1 if bytes > 0 => {
                reader.end()?;
                Ok((head, Place::Tensor(tensor)))
            }
            _ => Err(CloseCode::BodyMalformed.violation("the place of the rows is invalid")),
        }
    }

    /// Message with its rows.
    pub(crate) fn into_message(self, data: Bytes) -> Message {
        let RowsHead {
            stream,
            epoch,
            position,
            rows,
            width,
            dtype,
            kind,
        } = self;
        match kind {
            RowsKind::Step { want } => Message::Step(Step {
                stream,
                epoch,
                position,
                rows,
                width,
                dtype,
                want,
                data,
            }),
            RowsKind::Result {
                compute_us,
                queue_us,
            } => Message::StepResult(StepResult {
                stream,
                epoch,
                position,
                rows,
                width,
                dtype,
                compute_us,
                queue_us,
                data,
            }),
        }
    }
}

impl Message {
    /// Type of the message's frame; for a tensor, of its chunks.
    pub(crate) fn kind(&self) -> FrameType {
        match self {
            Message::StreamOpen(_) => FrameType::StreamOpen,
            Message::StreamOpened(_) => FrameType::StreamOpened,
            Message::StreamClose(_) => FrameType::StreamClose,
            Message::StreamError(_) => FrameType::StreamError,
            Message::Step(_) => FrameType::Step,
            Message::StepResult(_) => FrameType::StepResult,
            Message::Truncate(_) => FrameType::Truncate,
            Message::Describe => FrameType::Describe,
            Message::Descriptor(_) => FrameType::Descriptor,
            Message::Leaving { .. } => FrameType::Leaving,
            Message::Tensor(_) => FrameType::TensorData,
        }
    }

    /// Returns whether the message is work of this stream epoch, and useless after its end.
    pub(crate) fn is_work_of(&self, stream_key: (u32, u32)) -> bool {
        use FrameType::{Step, StepResult, Truncate};
        matches!(self.kind(), Step | StepResult | Truncate) && self.stream_key() == Some(stream_key)
    }
}

#[cfg(test)]
mod tests;
