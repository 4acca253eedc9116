//! Engine on any device: a range of layers, and the sequences that run through them.

use std::fmt;
use std::ops::Range;

use hearthnet_files::ModelFile;
use hearthnet_files::spec::ModelSpec;

use crate::error::{EngineError, LoadError};
use crate::options::EngineOptions;
use crate::rope_tables::RopeTables;
use crate::sequence::{Footprint, SeqId, Span};
use crate::sequences::{Storage, Table};

/// Layers of a model on a device, which runs blocks.
pub trait Backend: fmt::Debug {
    type Storage: Storage;

    /// Whether no value is a NaN or an infinity.
    fn all_finite(&self, row: &[f32]) -> bool {
        row.iter().fold(true, |all, value| all & value.is_finite())
    }

    /// Runs rows, for which the table has made room, through layers, and stores their state. `x`
    /// has the rows of the spans one after another; outputs replace them.
    ///
    /// # Errors
    /// See [`EngineError`]. `x` is then undefined.
    fn run(
        &mut self,
        batch: &Batch<'_>,
        table: &mut Table<Self::Storage>,
        x: &mut [f32],
    ) -> Result<(), EngineError>;

    /// Name of the graphics card that computes; `None` for the processor.
    fn card(&self) -> Option<String> {
        None
    }

    /// Whether the device is gone for this process, for instance after a driver reset.
    fn is_lost(&self) -> bool {
        false
    }
}

/// Rows of some sequences, and the layers that they run through.
#[derive(Debug)]
pub struct Batch<'a> {
    pub spec: &'a ModelSpec,
    /// Covers the positions of all spans.
    pub ropes: &'a RopeTables,
    /// Layers, numbered as in the model; half-open, not empty.
    pub layers: Range<u32>,
    /// Index of the first of them among the engine's layers.
    pub first: usize,
    pub spans: &'a [Span],
    /// Per-layer inputs: for each row those of `layers`, one after another. Empty if the model has
    /// none.
    pub inputs: &'a [f32],
}

/// Bytes of the weights of an engine.
#[derive(Clone, Copy, Debug)]
pub struct WeightBytes {
    /// Memory of all weights.
    pub all: u64,
    /// Weights that one row reads; of the experts, only those that it is routed to.
    pub per_row: u64,
}

/// Contiguous range of a model's layers, and the sequences that run through them.
pub struct EngineOn<B: Backend> {
    pub(crate) backend: B,
    spec: ModelSpec,
    range: Range<u32>,
    weight_bytes: WeightBytes,
    ropes: RopeTables,
    table: Table<B::Storage>,
    /// An operation of the device has failed since the last [`Self::is_lost`].
    suspect: bool,
}

impl<B: Backend> EngineOn<B> {
    /// An engine without sequences. `backend` has the layers of `range`, half-open, in
    /// `weight_bytes`, and `storage` is empty. Of the options, only limits apply.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] when a frequency factor of the model is not a positive number.
    pub fn new(
        file: &ModelFile,
        range: Range<u32>,
        options: &EngineOptions,
        backend: B,
        weight_bytes: WeightBytes,
        storage: B::Storage,
    ) -> Result<Self, LoadError> {
        let spec = file.spec().clone();
        Ok(Self {
            backend,
            ropes: RopeTables::of(file)?,
            table: Table::new(storage, options.limits(&spec)),
            spec,
            range,
            weight_bytes,
            suspect: false,
        })
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Layers of this engine, half-open.
    pub fn layers(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Memory of the weights, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes.all
    }

    /// Bytes of weights that one row reads; of the experts, only those that it is routed to.
    pub fn token_bytes(&self) -> u64 {
        self.weight_bytes.per_row
    }

    /// Memory that a sequence takes.
    pub fn footprint(&self) -> Footprint {
        self.table.footprint()
    }

    /// Memory of all sequences, in bytes; whole pages.
    pub fn kv_bytes_in_use(&self) -> u64 {
        self.table.bytes_in_use()
    }

    /// Number of open sequences.
    pub fn sequences(&self) -> usize {
        self.table.sequences()
    }

    /// Opens an empty sequence.
    ///
    /// # Errors
    /// [`EngineError::TooManySequences`]; errors of the device.
    pub fn open(&mut self) -> Result<SeqId, EngineError> {
        self.table.open()
    }

    /// Closes a sequence and frees the pages that only it owned. Returns false if it was not open.
    pub fn close(&mut self, seq: SeqId) -> bool {
        self.table.close(seq)
    }

    /// Number of positions of a sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn len(&self, seq: SeqId) -> Result<u32, EngineError> {
        self.table.len(seq)
    }

    /// Shortens a sequence to `len` positions, and returns the length that is left: less than `len`
    /// if its state can only return to an earlier position. The caller then appends the rows in
    /// between again.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`]; [`EngineError::PositionGap`] when it is shorter than
    /// `len`; errors of the device, after which the positions are dropped but their memory may not
    /// be free.
    pub fn truncate(&mut self, seq: SeqId, len: u32) -> Result<u32, EngineError> {
        self.table.truncate(seq, len)
    }

    /// Opens a copy of a sequence. The two share pages until one of them appends.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::TooManySequences`],
    /// [`EngineError::KvFull`] when there is no room for [`Footprint::per_sequence`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        self.table.fork(seq)
    }

    /// Runs rows through all layers, and appends them to their sequences.
    ///
    /// `x` has the rows of the spans one after another, each with
    /// [`ModelSpec::row_values`] values. Outputs replace the first `width` values of each row.
    /// Values must already be rounded to the boundary dtype, as embeddings and outputs of other
    /// engines are. In an encoder, a span is a whole text.
    ///
    /// # Errors
    /// See [`EngineError`]. After an error, all sequences have the length of before; after one of a
    /// block or of the device, the content of `x` is undefined.
    pub fn forward(&mut self, spans: &[Span], x: &mut [f32]) -> Result<(), EngineError> {
        self.forward_layers(self.range.clone(), spans, x)
    }

    /// As [`Self::forward`], through a half-open subrange of the engine's layers, numbered as in
    /// the model. All rows of a sequence must run through the same layers.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`EngineError::Layers`] and [`EngineError::OtherLayers`].
    pub fn forward_layers(
        &mut self,
        layers: Range<u32>,
        spans: &[Span],
        x: &mut [f32],
    ) -> Result<(), EngineError> {
        let own = &self.range;
        if layers.start >= layers.end || layers.start < own.start || layers.end > own.end {
            return Err(EngineError::Layers {
                asked: layers,
                engine: own.clone(),
            });
        }
        self.spec.check_range(&layers)?;
        if let Some(span) = spans.iter().find(|span| span.position > 0)
            && self.spec.encoder.is_some()
        {
            return Err(EngineError::WholeText(span.seq));
        }
        let values = self.spec.row_values(&layers);
        let rows: usize = spans.iter().map(|span| span.rows as usize).sum();
        if rows.checked_mul(values) != Some(x.len()) {
            return Err(EngineError::RowsMismatch {
                expected: rows.saturating_mul(values),
                found: x.len(),
            });
        }
        let mut each = x.chunks_exact(values);
        if let Some(row) = each.position(|row| !self.backend.all_finite(row)) {
            return Err(EngineError::InputNotFinite(row));
        }
        let width = self.spec.width as usize;
        if values == width {
            return self.run(&layers, spans, &[], x);
        }
        let (mut streams, mut inputs) = (Vec::new(), Vec::new());
        for row in x.chunks_exact(values) {
            let (stream, own) = row.split_at(width);
            streams.extend_from_slice(stream);
            inputs.extend_from_slice(own);
        }
        self.run(&layers, spans, &inputs, &mut streams)?;
        let outputs = streams.chunks_exact(width);
        for (row, output) in x.chunks_exact_mut(values).zip(outputs) {
            row[..width].copy_from_slice(output);
        }
        Ok(())
    }

    fn run(
        &mut self,
        layers: &Range<u32>,
        spans: &[Span],
        inputs: &[f32],
        x: &mut [f32],
    ) -> Result<(), EngineError> {
        let begun = self.table.begin(layers, spans);
        let result = begun.and_then(|()| {
            let end = spans.iter().map(|span| span.position + span.rows).max();
            self.ropes.cover(end.unwrap_or(0) as usize);
            let batch = Batch {
                spec: &self.spec,
                ropes: &self.ropes,
                first: (layers.start - self.range.start) as usize,
                layers: layers.clone(),
                spans,
                inputs,
            };
            self.backend.run(&batch, &mut self.table, x)
        });
        self.suspect |= matches!(result, Err(EngineError::Device(_)));
        self.table.finish(layers, spans, result)
    }

    /// Whether the device is lost. Asks it only if an operation has failed since the last call.
    pub fn is_lost(&mut self) -> bool {
        std::mem::take(&mut self.suspect) && self.backend.is_lost()
    }
}

impl<B: Backend> fmt::Debug for EngineOn<B> {
    /// Omits weights, keys and values.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("architecture", &self.spec.architecture)
            .field("layers", &self.range)
            .field("backend", &self.backend)
            .field("sequences", &self.sequences())
            .finish_non_exhaustive()
    }
}
