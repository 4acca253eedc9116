//! Reading of fixed big-endian layouts: what [`Buf`](bytes::Buf) of a slice lacks.

use bytes::{Buf as _, TryGetError};

use crate::code::{CloseCode, Violation};

impl From<TryGetError> for Violation {
    fn from(_: TryGetError) -> Violation {
        CloseCode::BodyMalformed.violation("the body ends before its fields do")
    }
}

/// Reads `N` bytes that must be zero.
pub(crate) fn reserved<const N: usize>(body: &mut &[u8]) -> Result<(), Violation> {
    let mut bytes = [0; N];
    body.try_copy_to_slice(&mut bytes)?;
    match bytes == [0; N] {
        true => Ok(()),
        false => Err(CloseCode::FrameUnknown.violation("a reserved field is not zero")),
    }
}

/// Refuses bytes after the last field.
pub(crate) fn end(body: &[u8]) -> Result<(), Violation> {
    match body.is_empty() {
        true => Ok(()),
        false => Err(CloseCode::BodyMalformed.violation("bytes follow the last field")),
    }
}
