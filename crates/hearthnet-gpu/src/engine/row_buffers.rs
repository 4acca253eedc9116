//! Buffers for the rows of a pass.

use crate::{Buffer, Gpu, GpuError};

/// Allocates buffers for `rows` rows. Lists them in `all`, so that none is missed when they are
/// wiped.
pub(super) struct RowBuffers<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) rows: u32,
    pub(super) all: Vec<Buffer>,
}

impl RowBuffers<'_> {
    /// `width` values for each row.
    pub(super) fn of(&mut self, width: u32) -> Result<Buffer, GpuError> {
        self.times(1, width)
    }

    /// `width` values, `times` for each row.
    pub(super) fn times(&mut self, times: u32, width: u32) -> Result<Buffer, GpuError> {
        self.words(u64::from(self.rows * times) * u64::from(width.max(1)))
    }

    pub(super) fn words(&mut self, words: u64) -> Result<Buffer, GpuError> {
        let buffer = self.gpu.buffer(words)?;
        Ok(self.listed(buffer))
    }

    /// Activations, `times` for each row, for matrices of up to `cols` inputs.
    pub(super) fn act(&mut self, times: u32, cols: u32) -> Result<Buffer, GpuError> {
        let cols = cols.next_multiple_of(32);
        let buffer = self.gpu.act(self.rows * times, cols)?;
        Ok(self.listed(buffer))
    }

    fn listed(&mut self, buffer: Buffer) -> Buffer {
        self.all.push(buffer.clone());
        buffer
    }
}
