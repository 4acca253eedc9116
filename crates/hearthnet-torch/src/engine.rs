//! The engine: a range of layers, and the sequences that run through them.

use std::fmt;
use std::ops::Range;

use hearthnet_engine::{RopeTables, Span};
use hearthnet_files::{ModelFile, ModelSpec};
use tch::Tensor;

use crate::error::{TorchError, TorchLoadError};
use crate::forward::{Pass, download, upload};
use crate::kv::{Cache, Geometry, Limits, PAGE, Seq};
use crate::options::{Target, TorchOptions};
use crate::weights::{Bytes, Layer, layers};

/// Contiguous range of a model's layers on a libtorch device, with its sequences. It is not `Send`.
pub struct TorchEngine {
    spec: ModelSpec,
    range: Range<u32>,
    target: Target,
    layers: Vec<Layer>,
    bytes: Bytes,
    ropes: RopeTables,
    cache: Cache,
    /// A device operation has failed since the last `is_lost`.
    suspect: bool,
}

impl TorchEngine {
    /// Loads the layers of a half-open range, and no other tensors, onto the device. `progress`
    /// receives the bytes of the file read so far, and their total.
    ///
    /// # Errors
    /// See [`TorchLoadError`].
    pub fn load(
        file: &ModelFile,
        range: Range<u32>,
        options: &TorchOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, TorchLoadError> {
        let spec = file.spec().clone();
        let target = options.target(&spec)?;
        if let Some(threads) = options.threads {
            tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX).max(1));
        }
        let _no_grad = tch::no_grad_guard();
        let (layers, bytes) = layers(file, range.clone(), target, progress)?;
        let geometry = Geometry {
            first_layer: range.start,
            layers: range.end - range.start,
            heads: spec.kv_heads,
            key: spec.head_dim,
            value: spec.attention.latent.map_or(spec.head_dim, |l| l.values),
            dtype: target.dtype,
            device: target.device,
        };
        let limits = Limits {
            bytes: options.max_kv_bytes,
            context: options.max_context.unwrap_or(u32::MAX).min(spec.context),
            sequences: options.max_sequences,
        };
        Ok(Self {
            ropes: RopeTables::of(file)?,
            cache: Cache::new(geometry, limits),
            suspect: false,
            spec,
            range,
            target,
            layers,
            bytes,
        })
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Layers of this engine, half-open.
    pub fn layers(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Device and number format.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Memory of the weights on the device, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        self.bytes.weights
    }

    /// Bytes of weights multiplied per row; of experts, only those that the row is routed to.
    pub fn token_bytes(&self) -> u64 {
        self.bytes.token
    }

    /// Memory of one position over all layers, in bytes.
    pub fn kv_bytes_per_position(&self) -> u64 {
        self.cache.geometry().position_bytes()
    }

    /// Positions per page of the KV cache.
    pub fn kv_page_positions(&self) -> u32 {
        PAGE
    }

    /// Memory of the KV cache in use, in bytes; whole pages.
    pub fn kv_bytes_in_use(&self) -> u64 {
        self.cache.bytes_in_use()
    }

    /// Opens an empty sequence.
    ///
    /// # Errors
    /// [`TorchError::TooManySequences`].
    pub fn open(&mut self) -> Result<Seq, TorchError> {
        self.cache.open()
    }

    /// Closes a sequence and frees the memory that it does not share. Returns whether it was open.
    pub fn close(&mut self, seq: Seq) -> bool {
        self.cache.close(seq)
    }

    /// Length of a sequence, in positions.
    ///
    /// # Errors
    /// [`TorchError::UnknownSequence`].
    pub fn len(&self, seq: Seq) -> Result<u32, TorchError> {
        self.cache.len(seq)
    }

    /// Drops the positions of a sequence from `len` on.
    ///
    /// # Errors
    /// [`TorchError::UnknownSequence`]; [`TorchError::PositionGap`] if the sequence is shorter;
    /// errors of the device, after which the positions are dropped but their memory may not be
    /// freed.
    pub fn truncate(&mut self, seq: Seq, len: u32) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        self.cache.truncate(seq, len)
    }

    /// Opens a copy of a sequence. The two share memory until one of them appends.
    ///
    /// # Errors
    /// [`TorchError::UnknownSequence`], [`TorchError::TooManySequences`].
    pub fn fork(&mut self, seq: Seq) -> Result<Seq, TorchError> {
        self.cache.fork(seq)
    }

    /// Runs rows through all layers and appends them to their sequences.
    ///
    /// `x` has `width` values per row, the rows of the spans one after another; each row is
    /// replaced by its output.
    ///
    /// # Errors
    /// See [`TorchError`]. After an error no sequence is longer than before.
    pub fn forward(&mut self, spans: &[Span<Seq>], x: &mut [f32]) -> Result<(), TorchError> {
        self.forward_layers(self.range.clone(), spans, x)
    }

    /// Same as [`Self::forward`], through a half-open range of the engine's layers, numbered as in
    /// the model. A sequence must use the same layers for all its rows.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`TorchError::Layers`] and [`TorchError::OtherLayers`].
    pub fn forward_layers(
        &mut self,
        layers: Range<u32>,
        spans: &[Span<Seq>],
        x: &mut [f32],
    ) -> Result<(), TorchError> {
        let own = &self.range;
        if layers.start >= layers.end || layers.start < own.start || layers.end > own.end {
            return Err(TorchError::Layers {
                asked: layers,
                engine: own.clone(),
            });
        }
        let width = self.spec.width as usize;
        let rows: usize = spans.iter().map(|span| span.rows as usize).sum();
        if rows.checked_mul(width) != Some(x.len()) {
            return Err(TorchError::RowsMismatch {
                expected: rows.saturating_mul(width),
                found: x.len(),
            });
        }
        if let Some(row) = first_not_finite(x, width) {
            return Err(TorchError::InputNotFinite(row));
        }
        if spans.is_empty() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let ran = self.cache.reserve(&layers, spans);
        match ran.and_then(|()| self.run(&layers, spans, x)) {
            Ok(()) => {
                self.cache.commit(&layers, spans);
                Ok(())
            }
            Err(error) => {
                self.suspect |= matches!(error, TorchError::Device(_));
                self.cache.roll_back(spans);
                Err(error)
            }
        }
    }

    /// Whether the device is lost: an operation failed, and a trivial probe fails too. After a
    /// driver reset a GPU stays lost for this process.
    pub fn is_lost(&mut self) -> bool {
        std::mem::take(&mut self.suspect) && self.target.probe().is_err()
    }

    /// Runs rows whose room is reserved.
    fn run(
        &mut self,
        layers: &Range<u32>,
        spans: &[Span<Seq>],
        x: &mut [f32],
    ) -> Result<(), TorchError> {
        let end = spans.iter().map(|span| span.position + span.rows).max();
        self.ropes.cover(end.unwrap_or(0) as usize);
        let buffers = spans.iter().map(|span| self.cache.buffers(span.seq));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let device = self.target.device;
        let spans = spans.iter().copied().zip(buffers);
        let kind = self.target.dtype.kind();
        let pass = Pass::new(&self.spec, kind, device, &self.ropes, spans)?;
        let width = i64::from(self.spec.width);
        let mut rows = upload(x, &[x.len() as i64 / width, width], device)?;
        let first = (layers.start - self.range.start) as usize;
        // The processor does not wait for the device between blocks.
        let mut finite = Vec::with_capacity(layers.len());
        for (index, layer) in self
            .layers
            .iter()
            .enumerate()
            .skip(first)
            .take(layers.len())
        {
            rows = pass.block(layer, index, &rows)?;
            finite.push(rows.f_isfinite()?.f_all_dim(1, false)?);
        }
        let here = rows.f_to_device(tch::Device::Cpu)?.f_contiguous()?;
        let values = x.len();
        here.f_copy_data(x, values)?;
        // A value that is not finite stays so to the last block.
        if first_not_finite(x, width as usize).is_none() {
            return Ok(());
        }
        let finite: Vec<bool> = download(&Tensor::f_stack(&finite, 0)?)?;
        let bad = finite.iter().position(|finite| !finite).unwrap_or(0);
        let count = (x.len() / width as usize).max(1);
        Err(TorchError::OutOfRange {
            layer: layers.start + (bad / count) as u32,
            row: bad % count,
            dtype: self.target.dtype,
            boundary: self.spec.boundary,
        })
    }
}

/// Index of the first row that holds an infinity or a NaN.
fn first_not_finite(x: &[f32], width: usize) -> Option<usize> {
    let finite = |row: &[f32]| row.iter().fold(true, |all, value| all & value.is_finite());
    x.chunks_exact(width.max(1)).position(|row| !finite(row))
}

impl fmt::Debug for TorchEngine {
    /// Omits weights, keys and values.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TorchEngine")
            .field("architecture", &self.spec.architecture)
            .field("layers", &self.range)
            .field("arithmetic", &self.target.arithmetic())
            .field("sequences", &self.cache.sequences())
            .finish_non_exhaustive()
    }
}
