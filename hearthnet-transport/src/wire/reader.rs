//! Reader of fixed big-endian layouts, without indexing that could be out of bounds.

use crate::code::{CloseCode, Violation};

/// Unread rest of a body.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Reader<'a> {
        Reader(body)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Violation> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or_else(|| {
            CloseCode::BodyMalformed.violation("the body ends before its fields do")
        })?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Violation> {
        self.take::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Violation> {
        self.take().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Violation> {
        self.take().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Violation> {
        self.take().map(u64::from_be_bytes)
    }

    /// Reads `N` bytes that must be zero.
    pub(crate) fn reserved<const N: usize>(&mut self) -> Result<(), Violation> {
        if self.take::<N>()?.iter().any(|&byte| byte != 0) {
            return Err(CloseCode::FrameUnknown.violation("a reserved field is not zero"));
        }
        Ok(())
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Refuses bytes after the last field.
    pub(crate) fn end(self) -> Result<(), Violation> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(CloseCode::BodyMalformed.violation("bytes follow the last field"))
        }
    }
}
