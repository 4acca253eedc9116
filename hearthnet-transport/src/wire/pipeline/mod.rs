//! The pipeline's frames, 0x10 to 0x1b.
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

use bytes::{Buf as _, Bytes};
use serde::{Deserialize, Serialize};

use super::cbor::{Body as _, bodies, malformed};
use super::reader::{end, reserved};
use super::{Flags, FrameBuf, FrameType, HEADER_BYTES};
use crate::code::{CloseCode, Violation};
use crate::config::CONTROL_MESSAGE_BYTES;
use crate::message::{
    Message, Receipt, Step, StepResult, StreamClose, StreamError, StreamOpen, StreamOpened,
    Truncate, Truncated, Want,
};
use crate::tensor::DType;

bodies!(
    StreamOpen,
    StreamOpened,
    StreamClose,
    StreamError,
    Truncate,
    Truncated,
    Receipt,
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
        Message::Truncated(m) => m.frame(),
        Message::Receipt(m) => m.frame(),
        &Message::Leaving { within_ms } => Leaving { within_ms }.frame(),
        Message::Describe => FrameBuf::with_capacity(0).finish(FrameType::Describe, Flags::NONE),
        Message::Descriptor(bytes) => {
            check_descriptor(bytes)?;
            let mut frame = FrameBuf::with_capacity(bytes.len());
            frame.body().extend_from_slice(bytes);
            frame.finish(FrameType::Descriptor, Flags::NONE)
        }
        Message::Step(Step { data, .. }) | Message::StepResult(StepResult { data, .. }) => {
            rows_frame(message, Place::Inline(data))?
        }
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
        FrameType::Truncated => Message::Truncated(Truncated::read(body)?),
        FrameType::Receipt => Message::Receipt(Receipt::read(body)?),
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

/// Place of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place<'a> {
    Inline(&'a [u8]),
    Tensor(u16),
}

/// Frame of a step or a result, with its rows in `place`. For [`Place::Tensor`] the id is filled in
/// when it is assigned.
///
/// # Errors
/// `protocol_state` for another message.
pub(crate) fn rows_frame(message: &Message, place: Place<'_>) -> Result<FrameBuf, Violation> {
    // They share their layout up to offset 26.
    let (fields, dtype, want, times) = match message {
        Message::Step(m) => {
            let fields = [m.stream, m.epoch, m.position, m.rows, m.width];
            (fields, m.dtype, m.want as u8, None)
        }
        Message::StepResult(m) => {
            let fields = [m.stream, m.epoch, m.position, m.rows, m.width];
            (fields, m.dtype, 0, Some([m.compute_us, m.queue_us]))
        }
        _ => return Err(CloseCode::ProtocolState.violation("a message without rows")),
    };
    let (at, tensor, data) = match place {
        Place::Inline(data) => (0u8, 0u16, data),
        Place::Tensor(id) => (1, id, &[][..]),
    };
    let mut frame = FrameBuf::with_capacity(RESULT_HEAD_BYTES + data.len());
    let body = frame.body();
    for field in fields {
        body.extend_from_slice(&field.to_be_bytes());
    }
    body.extend_from_slice(&[dtype as u8, want, at, 0]);
    body.extend_from_slice(&tensor.to_be_bytes());
    match times {
        None => body.extend_from_slice(&[0; 6]),
        Some([compute_us, queue_us]) => {
            body.extend_from_slice(&[0; 2]);
            body.extend_from_slice(&compute_us.to_be_bytes());
            body.extend_from_slice(&queue_us.to_be_bytes());
            body.extend_from_slice(&[0; 4]);
        }
    }
    body.extend_from_slice(data);
    Ok(frame.finish(message.kind(), Flags::NONE))
}

/// Reads the body of a STEP or STEP_RESULT. The message has no rows yet; they are in the returned
/// place.
///
/// # Errors
/// `body_malformed`, `frame_unknown` (reserved fields), or `tensor_shape` when the inline rows are
/// not exactly `rows * width` values.
pub(crate) fn read_rows(
    kind: FrameType,
    mut body: &[u8],
) -> Result<(Message, Place<'_>), Violation> {
    let (stream, epoch) = (body.try_get_u32()?, body.try_get_u32()?);
    let position = body.try_get_u32()?;
    let (rows, width) = (body.try_get_u32()?, body.try_get_u32()?);
    let dtype = DType::from_wire(body.try_get_u8()?)?;
    let choice = body.try_get_u8()?;
    let place = body.try_get_u8()?;
    reserved::<1>(&mut body)?;
    let tensor = body.try_get_u16()?;
    let data = Bytes::new();
    let message = if kind == FrameType::Step {
        reserved::<6>(&mut body)?;
        let want = Want::from_wire(choice)?;
        Message::Step(Step {
            stream,
            epoch,
            position,
            rows,
            width,
            dtype,
            want,
            data,
        })
    } else {
        if choice != 0 {
            return Err(CloseCode::FrameUnknown.violation("a reserved field is not zero"));
        }
        reserved::<2>(&mut body)?;
        let (compute_us, queue_us) = (body.try_get_u32()?, body.try_get_u32()?);
        reserved::<4>(&mut body)?;
        Message::StepResult(StepResult {
            stream,
            epoch,
            position,
            rows,
            width,
            dtype,
            compute_us,
            queue_us,
            data,
        })
    };
    let bytes = message.data_bytes()?;
    match place {
        0 if tensor == 0 => {
            if body.len() as u64 != bytes {
                return Err(CloseCode::TensorShape.violation(format!(
                    "{rows} x {width} rows are {bytes} bytes, not {}",
                    body.len()
                )));
            }
            Ok((message, Place::Inline(body)))
        }
        1 if bytes > 0 => {
            end(body)?;
            Ok((message, Place::Tensor(tensor)))
        }
        _ => Err(CloseCode::BodyMalformed.violation("the place of the rows is invalid")),
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
            Message::Truncated(_) => FrameType::Truncated,
            Message::Receipt(_) => FrameType::Receipt,
            Message::Describe => FrameType::Describe,
            Message::Descriptor(_) => FrameType::Descriptor,
            Message::Leaving { .. } => FrameType::Leaving,
            Message::Tensor(_) => FrameType::TensorData,
        }
    }

    /// Returns whether the message is work of this stream epoch, and useless after its end.
    pub(crate) fn is_work_of(&self, stream_key: (u32, u32)) -> bool {
        use FrameType::{Step, StepResult, Truncate, Truncated};
        let is_work = matches!(self.kind(), Step | StepResult | Truncate | Truncated);
        is_work && self.stream_key() == Some(stream_key)
    }
}

#[cfg(test)]
mod tests;
