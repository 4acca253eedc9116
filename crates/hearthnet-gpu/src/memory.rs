//! Memory on the card: allocation, matrices, reading and writing.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use bytemuck::cast_slice;
use hearthnet_engine::kernels::{LANES, Packed};
use hearthnet_files::blocks::WeightType;

use crate::buffers::{Buffer, Inner, Matrix};
use crate::device::{Gpu, TIMEOUT};
use crate::error::GpuError;
use crate::panels::Order;
use crate::pipelines::{none, now};

/// Bytes that go to the card at a time: twice as many are needed in the machine's memory.
const UPLOAD: usize = 16 << 20;

impl Gpu {
    /// Memory of `words` words, all 0.
    ///
    /// # Errors
    /// [`GpuError::TooLarge`], [`GpuError::OutOfMemory`] and [`GpuError::Lost`].
    pub fn buffer(&self, words: u64) -> Result<Buffer, GpuError> {
        self.alive()?;
        let (bytes, most) = (
            words.max(4).saturating_mul(4),
            self.facts().max_binding_words * 4,
        );
        if bytes > most {
            return Err(GpuError::TooLarge { bytes, most });
        }
        let device = &self.shared.device;
        let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes,
            usage: wgpu::BufferUsages::STORAGE
                | wgpu::BufferUsages::COPY_SRC
                | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        none(now(memory.pop()).flatten(), bytes)?;
        none(now(scope.pop()).flatten(), bytes)?;
        Ok(Buffer {
            inner: Arc::new(Inner {
                id: self.shared.next.fetch_add(1, Ordering::Relaxed),
                words,
                buffer,
                groups: Arc::downgrade(&self.shared.compiler.groups),
            }),
        })
    }

    /// Memory with these words.
    ///
    /// # Errors
    /// As [`Self::buffer`].
    pub fn upload(&self, words: &[u32]) -> Result<Buffer, GpuError> {
        let buffer = self.buffer(words.len() as u64)?;
        let parts = cast_slice(words).chunks(UPLOAD);
        self.fill(&buffer, 0, parts.map(Cow::Borrowed))?;
        Ok(buffer)
    }

    /// Memory with these values.
    ///
    /// # Errors
    /// As [`Self::buffer`].
    pub fn upload_f32(&self, values: &[f32]) -> Result<Buffer, GpuError> {
        self.upload(cast_slice(values))
    }

    /// A matrix, without a copy of the whole in the machine's memory. It may be larger than the
    /// driver can bind.
    ///
    /// # Errors
    /// As [`Self::buffer`]; [`GpuError::TooLarge`] for one panel.
    ///
    /// # Panics
    /// When it is a gated pair.
    pub fn matrix(&self, packed: &Packed) -> Result<Matrix, GpuError> {
        let mut matrix = self.panels(&[packed], 1)?;
        matrix.rows = packed.rows() as u32;
        Ok(matrix)
    }

    /// Matrices of one type and shape as one, for [`crate::Step::matmul_pairs`]: matrix i begins at panel
    /// `i * panels` of them.
    ///
    /// # Errors
    /// As [`Self::buffer`]; [`GpuError::TooLarge`] for one of them.
    ///
    /// # Panics
    /// When they differ, or are gated pairs.
    pub fn stack(&self, all: &[&Packed]) -> Result<Matrix, GpuError> {
        self.panels(all, all.first().map_or(1, |packed| packed.panels()))
    }

    /// Panels of matrices, `whole` of them in one buffer.
    fn panels(&self, all: &[&Packed], whole: usize) -> Result<Matrix, GpuError> {
        let shape = |p: &Packed| (p.weight_type(), p.rows(), p.cols(), p.gated());
        let Some(first) = all.first() else {
            return Err(GpuError::Lost("no matrix".to_owned()));
        };
        assert!(
            all.iter().all(|p| shape(p) == shape(first)) && !first.gated(),
            "matrices of several shapes, or a gated pair"
        );
        let (weight_type, own) = (first.weight_type(), first.panels());
        let order = Order::of(first);
        let bytes = order.panel_bytes();
        let most = self.facts().max_binding_words * 4;
        let together = usize::try_from(most).unwrap_or(usize::MAX) / bytes / whole * whole;
        if together == 0 {
            let bytes = (bytes * whole) as u64;
            return Err(GpuError::TooLarge { bytes, most });
        }
        let total = own * all.len();
        let mut parts = Vec::new();
        for start in (0..total).step_by(together) {
            let end = total.min(start + together);
            let buffer = self.buffer((end - start) as u64 * bytes as u64 / 4)?;
            // Panels of each matrix that lie in this part.
            for (i, packed) in all.iter().enumerate() {
                let (from, to) = (start.max(i * own), end.min((i + 1) * own));
                if from < to {
                    // If the queue finds no room for its copy, the card is lost. A buffer is refused.
                    let copy = UPLOAD.min((to - from) * bytes);
                    drop(self.buffer(copy as u64 / 4)?);
                    let panels = from - i * own..to - i * own;
                    let parts = order.parts(packed, panels, UPLOAD);
                    self.fill(&buffer, ((from - start) * bytes) as u64, parts)?;
                }
            }
            parts.push((start as u32..end as u32, buffer));
        }
        Ok(Matrix {
            weight_type,
            rows: (total * LANES) as u32,
            cols: first.cols() as u32,
            bytes: (total * bytes) as u64,
            careful: all
                .iter()
                .any(|packed| packed.not_finite().is_some() || has_small_scales(packed)),
            parts,
        })
    }

    /// Memory for [`crate::Step::quantise`].
    ///
    /// # Errors
    /// As [`Self::buffer`].
    pub fn act(&self, rows: u32, cols: u32) -> Result<Buffer, GpuError> {
        self.buffer(u64::from(rows) * u64::from(cols / 32) * 12)
    }

    /// Pages of one layer, `[page][key/value head]` of [`crate::kv_layout::page_words`].
    ///
    /// # Errors
    /// As [`Self::buffer`].
    pub fn kv(&self, pages: u32, kv_heads: u32, head_dim: u32) -> Result<Buffer, GpuError> {
        let page = u64::from(kv_heads) * u64::from(crate::kv_layout::page_words(head_dim));
        self.buffer(u64::from(pages) * page)
    }

    /// Writes words before the next submission.
    ///
    /// # Panics
    /// When the buffer is shorter.
    pub fn write(&self, buffer: &Buffer, offset: u64, words: &[u32]) {
        assert!(
            offset + words.len() as u64 <= buffer.words(),
            "beyond the buffer"
        );
        let queue = &self.shared.queue;
        queue.write_buffer(&buffer.inner.buffer, 4 * offset, cast_slice(words));
    }

    /// Writes numbers as [`Self::write`] does words.
    ///
    /// # Panics
    /// When the buffer is shorter.
    pub fn write_f32(&self, buffer: &Buffer, offset: u64, values: &[f32]) {
        self.write(buffer, offset, cast_slice(values));
    }

    /// Waits for everything that was submitted, and returns words of a buffer.
    ///
    /// # Errors
    /// [`GpuError::Lost`], [`GpuError::Hangs`] and [`GpuError::OutOfMemory`].
    ///
    /// # Panics
    /// When the buffer is shorter.
    pub fn read(&self, buffer: &Buffer, words: Range<u64>) -> Result<Vec<u32>, GpuError> {
        assert!(words.end <= buffer.words(), "beyond the buffer");
        self.alive()?;
        let bytes = 4 * (words.end - words.start);
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let device = &self.shared.device;
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let back = device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        none(now(memory.pop()).flatten(), bytes)?;
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(&buffer.inner.buffer, 4 * words.start, &back, 0, bytes);
        let index = self.shared.queue.submit([encoder.finish()]);
        let (done, mapped) = mpsc::channel();
        back.map_async(wgpu::MapMode::Read, .., move |result| {
            // The receiver is gone if the wait ended before.
            let _ = done.send(result);
        });
        self.wait(Some(index))?;
        // If several threads wait, another one may be about to run the callback of this copy.
        match mapped.recv_timeout(TIMEOUT) {
            Ok(Ok(())) => {}
            _ => return Err(self.fail(GpuError::Lost("memory could not be read".to_owned()))),
        }
        let view = back.get_mapped_range(..);
        let view = view.map_err(|error| self.fail(GpuError::Lost(error.to_string())))?;
        Ok(bytemuck::pod_collect_to_vec(&view))
    }

    /// Waits for all writes. Their copies in the machine's memory are free then, and the buffers that
    /// were dropped since.
    ///
    /// # Errors
    /// [`GpuError::Hangs`] and [`GpuError::Lost`].
    pub(crate) fn finish_writes(&self) -> Result<(), GpuError> {
        let index = self.shared.queue.submit([]);
        self.wait(Some(index))
    }

    /// Copies bytes to a buffer, a part at a time.
    fn fill<'a>(
        &self,
        buffer: &Buffer,
        start: u64,
        parts: impl Iterator<Item = Cow<'a, [u8]>>,
    ) -> Result<(), GpuError> {
        let (queue, mut offset) = (&self.shared.queue, start);
        for part in parts {
            if offset > start {
                self.finish_writes()?;
            }
            queue.write_buffer(&buffer.inner.buffer, offset, &part);
            offset += part.len() as u64;
        }
        Ok(())
    }
}

/// Whether an MXFP4 scale is below 2^-24: its biased exponent is below 103. With such a scale a
/// chain may have subnormal numbers (specs/gpu-arithmetic.md).
fn has_small_scales(packed: &Packed) -> bool {
    let ty = WeightType::MXFP4;
    let record = packed.panel_bytes() / (packed.cols() / ty.inputs()).max(1);
    let scales = |record: &[u8]| {
        let (scales, _) = record.split_at(record.len().min(2 * LANES));
        let mut scales = scales.as_chunks::<2>().0.iter();
        scales.any(|scale| u16::from_le_bytes(*scale) >> 7 < 103)
    };
    packed.weight_type() == ty && packed.data().chunks(record.max(1)).any(scales)
}
