//! Exact engine on a graphics card.
//!
//! | what | where |
//! |---|---|
//! | loading, and running a batch | this file |
//! | weights of layers; those of one kind, with its buffers | `weights`, `parts`; `latent`, `recurrence`, `experts` |
//! | keys and values, and states of recurrent layers; their buffers | `memory`; `slots` |
//! | whether a card is faster than the processor | `measure` |
//! | buffers and further inputs of a batch | `scratch`, `row_buffers`; `rows` |
//! | the steps of a layer | `pass/` |

mod experts;
mod latent;
mod measure;
mod memory;
mod parts;
mod pass;
mod recurrence;
mod row_buffers;
mod rows;
mod scratch;
mod slots;
mod weights;

use std::fmt;
use std::ops::Range;
use std::time::Instant;

use hearthnet_engine::{
    Backend, Batch, EngineError, EngineOn, EngineOptions, PagedSequence, Table, WeightBytes,
    each_layer,
};
use hearthnet_files::ModelFile;
use hearthnet_files::spec::{CacheDtype, ModelSpec};

use crate::{Gpu, GpuError, GpuLoadError};
pub use measure::{Comparison, compare};
use memory::CardMemory;
use pass::Pass;
use rows::RowInfo;
use scratch::{Angles, Buffers, Widths};
use weights::CardLayer;

/// Exact engine on a graphics card.
pub type GpuEngine = EngineOn<Card>;

/// Rows of a batch that go through all layers together.
const PASS: usize = 512;
/// Time that a submission may take, so that the card can draw the desktop in between (s).
const SUBMISSION: f64 = 0.008;
/// Bytes of weights per second that are assumed before the first batch.
const FIRST_PACE: f64 = 1e9;

/// Layers on a graphics card.
pub struct Card {
    gpu: Gpu,
    layers: Vec<CardLayer>,
    widths: Widths,
    /// Distinct windows of the layers.
    windows: Vec<Option<u32>>,
    buffers: Option<Buffers>,
    angles: Angles,
    /// Bytes of weights per second, as last measured.
    pace: f64,
}

/// Loads the layers of a half-open range, and no other tensors, onto a card. `progress` receives
/// the bytes of the file read so far, and their total.
///
/// # Errors
/// See [`GpuLoadError`].
pub fn load(
    file: &ModelFile,
    range: Range<u32>,
    gpu: &Gpu,
    options: &EngineOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<GpuEngine, GpuLoadError> {
    check(file.spec())?;
    let mut layers = Vec::with_capacity(range.len());
    upload(file, range.clone(), gpu, options, progress, &mut layers)?;
    with_layers(file, range, gpu, options, layers)
}

/// As [`load`]. If the card has no room for all layers, it gets as many of the first ones as have
/// room beside the rows of a batch and their share of the keys and values: see
/// [`hearthnet_engine::EngineOn::layers`].
///
/// # Errors
/// See [`GpuLoadError`]. [`GpuError::OutOfMemory`] if the card has no room for one layer, or if the
/// layers cannot be cut.
pub fn load_most(
    file: &ModelFile,
    range: Range<u32>,
    gpu: &Gpu,
    options: &EngineOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<GpuEngine, GpuLoadError> {
    let spec = file.spec();
    check(spec)?;
    let mut layers = Vec::with_capacity(range.len());
    let full = match upload(file, range.clone(), gpu, options, progress, &mut layers) {
        Ok(()) => return with_layers(file, range, gpu, options, layers),
        Err(GpuLoadError::Gpu(full @ GpuError::OutOfMemory { .. })) if spec.per_layer.is_none() => {
            full
        }
        Err(error) => return Err(error),
    };
    while !layers.is_empty() {
        gpu.finish_writes()?;
        let end = range.start + layers.len() as u32;
        let parts = [range.start..end, end..range.end];
        if parts.iter().all(|part| spec.check_range(part).is_ok()) {
            let [part, _] = parts;
            let options = options.share(spec, part.clone(), range.clone());
            match reserve(spec, part.clone(), gpu, &options, &layers) {
                Ok(()) => return with_layers(file, part, gpu, &options, layers),
                Err(GpuError::OutOfMemory { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        layers.pop();
    }
    Err(full.into())
}

/// Checks that the card has room beside these layers: for the rows of a batch, and for all keys and
/// values.
fn reserve(
    spec: &ModelSpec,
    range: Range<u32>,
    gpu: &Gpu,
    options: &EngineOptions,
    layers: &[(CardLayer, WeightBytes)],
) -> Result<(), GpuError> {
    let widths = Widths::of(spec, layers.iter().map(|(layer, _)| layer));
    let most = widths.most_rows(spec, gpu.facts().max_binding_words);
    let rows = most.min(PASS as u32);
    let _rows = Buffers::at_least(gpu, (spec, widths), None, (rows, most), 0)?;
    memory::pages(gpu, spec, range, options.max_kv_bytes).reserve()
}

/// Sends layers to the card, each with the bytes of its weights, until one has no room.
fn upload(
    file: &ModelFile,
    range: Range<u32>,
    gpu: &Gpu,
    options: &EngineOptions,
    progress: &mut dyn FnMut(u64, u64),
    layers: &mut Vec<(CardLayer, WeightBytes)>,
) -> Result<(), GpuLoadError> {
    let spec = file.spec();
    let used = spec.experts.map_or(0, |experts| experts.used as usize);
    each_layer(file, options.threads, range.clone(), progress, |layer| {
        let bytes = WeightBytes {
            all: layer.bytes as u64,
            per_row: layer.token_bytes(used) as u64,
        };
        let block = spec.block(range.start + layers.len() as u32);
        layers.push((CardLayer::upload(gpu, &block, range.start, layer)?, bytes));
        Ok(())
    })
}

fn with_layers(
    file: &ModelFile,
    range: Range<u32>,
    gpu: &Gpu,
    options: &EngineOptions,
    layers: Vec<(CardLayer, WeightBytes)>,
) -> Result<GpuEngine, GpuLoadError> {
    let spec = file.spec();
    let (layers, bytes): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
    let bytes = WeightBytes {
        all: bytes.iter().map(|layer| layer.all).sum(),
        per_row: bytes.iter().map(|layer| layer.per_row).sum(),
    };
    let mut windows = Vec::new();
    for attention in layers.iter().filter_map(|layer| layer.attention.as_ref()) {
        if !windows.contains(&attention.window) {
            windows.push(attention.window);
        }
    }
    let storage = memory::memory(gpu, spec, range.clone(), options.max_kv_bytes);
    let backend = Card {
        gpu: gpu.clone(),
        widths: Widths::of(spec, layers.iter()),
        layers,
        windows,
        buffers: None,
        angles: Angles::default(),
        pace: FIRST_PACE,
    };
    Ok(EngineOn::new(
        file, range, options, backend, bytes, storage,
    )?)
}

/// Refuses a model that this engine does not compute. The processor computes all.
///
/// # Errors
/// [`hearthnet_engine::LoadError::Unsupported`] with one sentence.
pub fn check(spec: &ModelSpec) -> Result<(), GpuLoadError> {
    if spec.attention.cache != CacheDtype::F16 {
        let what = "keys and values of 8 bits (attention.cache) are not computed";
        return Err(GpuLoadError::unsupported(what));
    }
    let mut dims = (0..spec.layers).map(|layer| spec.block(layer).key_width());
    match dims.find(|dim| !dim.is_multiple_of(8)) {
        Some(dim) => {
            let what =
                format!("heads of {dim} values, which is no multiple of 8, are not computed");
            Err(GpuLoadError::unsupported(&what))
        }
        None => Ok(()),
    }
}

impl Card {
    /// Card that holds the layers.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn most_rows(&self, spec: &ModelSpec) -> u32 {
        self.widths
            .most_rows(spec, self.gpu.facts().max_binding_words)
    }

    /// Runs some rows of a batch. Returns layer, among those of the batch, and row of the first
    /// output that is not finite.
    fn pass(
        &mut self,
        batch: &Batch<'_>,
        (memory, sequences): (&CardMemory, &[&PagedSequence]),
        rows: Range<usize>,
        x: &mut [f32],
    ) -> Result<Option<(u32, usize)>, EngineError> {
        let begun = Instant::now();
        let (gpu, spec) = (&self.gpu, batch.spec);
        let layers = &self.layers[batch.first..batch.first + batch.layers.len()];
        let (count, depth) = (rows.len() as u32, layers.len() as u32);
        let end = batch.spans.iter().map(|span| span.position + span.rows);
        let end = end.max().unwrap_or(0);
        let attention = || layers.iter().filter_map(|layer| layer.attention.as_ref());
        let rotations = attention().map(|attention| attention.rotation);
        self.angles.cover(gpu, batch.ropes, rotations, end)?;
        let per_row = spec
            .per_layer
            .map_or(0, |own| own.width as usize * layers.len());
        let inputs = &batch.inputs[rows.start * per_row..rows.end * per_row];
        let of = (batch.spans, sequences);
        let info = RowInfo::of(gpu, spec, &self.windows, of, rows, inputs);
        let info = info?;
        let scores = attention().map(|of| info.scores(of.q / of.head_dim.max(1)));
        let scores = scores.max().unwrap_or(0);
        let most = self.most_rows(spec);
        let old = self.buffers.take();
        let buffers = Buffers::at_least(gpu, (spec, self.widths), old, (count, most), scores);
        let buffers = self.buffers.insert(buffers?);
        gpu.write_f32(&buffers.x, 0, x);
        let mut pass = Pass {
            gpu,
            spec,
            memory,
            buffers,
            angles: &self.angles,
            info: &info,
            rows: count,
            step: gpu.step(),
            work: 0,
            limit: (self.pace * SUBMISSION) as u64,
            done: 0,
        };
        let flags = u64::from(count) * u64::from(depth);
        pass.step.clear(&buffers.flags, 0..flags);
        for (index, layer) in layers.iter().enumerate() {
            pass.layer(layer, batch.first + index, (index as u32, depth))?;
        }
        let values = x.len() as u64;
        pass.step.copy_words(&buffers.x, 0, &buffers.out, 0, values);
        pass.step
            .copy_words(&buffers.flags, 0, &buffers.out, values, flags);
        pass.submit()?;
        let done = pass.done;
        let words = gpu.read(&buffers.out, 0..values + flags);
        let words = words?;
        let (outputs, flags) = words.split_at(x.len());
        for (to, from) in x.iter_mut().zip(outputs) {
            *to = f32::from_bits(*from);
        }
        self.pace = done as f64 / begun.elapsed().as_secs_f64().max(1e-6);
        let bad = flags.iter().position(|flag| *flag != 0);
        Ok(bad.map(|bad| (bad as u32 / count, bad % count as usize)))
    }
}

impl Backend for Card {
    type Storage = CardMemory;

    fn run(
        &mut self,
        batch: &Batch<'_>,
        table: &mut Table<CardMemory>,
        x: &mut [f32],
    ) -> Result<(), EngineError> {
        let width = batch.spec.width as usize;
        let total = x.len() / width;
        let (memory, sequences) = table.batch(batch.spans);
        let most = match batch.spec.encoder {
            // Rows of a text attend to all others of it.
            Some(_) => total.max(1),
            None => PASS.min(self.most_rows(batch.spec) as usize).max(1),
        };
        for begin in (0..total).step_by(most) {
            let rows = begin..total.min(begin + most);
            let x = &mut x[rows.start * width..rows.end * width];
            let bad = self.pass(batch, (memory, &sequences), rows, x)?;
            if let Some((layer, row)) = bad {
                return Err(EngineError::BoundaryOverflow {
                    layer: batch.layers.start + layer,
                    row: begin + row,
                });
            }
        }
        Ok(())
    }

    fn card(&self) -> Option<String> {
        Some(self.to_string())
    }

    fn is_lost(&self) -> bool {
        self.gpu.lost()
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        if let Some(buffers) = &self.buffers {
            let mut step = self.gpu.step();
            buffers.wipe(&mut step);
            // On a lost card the contents are gone anyway.
            let _ = step.submit();
        }
    }
}

impl fmt::Display for Card {
    /// Name and arithmetic.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.gpu.facts().name, self.gpu.arithmetic())
    }
}

impl fmt::Debug for Card {
    /// Omits the weights.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Card")
            .field("card", &self.gpu.facts().name)
            .field("arithmetic", &self.gpu.arithmetic())
            .finish_non_exhaustive()
    }
}
