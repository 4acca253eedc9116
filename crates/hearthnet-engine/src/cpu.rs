//! The exact engine: blocks on this machine's cores.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use hearthnet_files::ModelFile;
use hearthnet_files::spec::ModelSpec;

use crate::engine::{Backend, Batch, EngineOn, WeightBytes};
use crate::error::{EngineError, LoadError};
use crate::forward::{self, EngineContext, Overflow, Scratch};
use crate::kernels::Kernels;
use crate::layer::Layer;
use crate::memory::HostMemory;
use crate::options::EngineOptions;
use crate::sequences::Table;
use crate::thread_pool::ThreadPool;
use crate::weights::{Loader, check_layers};

/// Exact engine: contiguous range of a model's layers, and the sequences that run through them.
///
/// ```no_run
/// # use hearthnet_engine::{Engine, EngineOptions, Head, Span};
/// # use hearthnet_files::ModelFile;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let file = ModelFile::open("model.gguf".as_ref())?;
/// let options = EngineOptions::default();
/// let mut engine = Engine::load(&file, 0..file.spec().layers, &options, &mut |_, _| ())?;
/// let mut head = Head::beside(&file, &engine)?;
///
/// let (mut rows, mut logits) = (Vec::new(), Vec::new());
/// head.embed(&[1, 4093, 198], &mut rows)?;
/// let seq = engine.open()?;
/// engine.forward(&[Span { seq, position: 0, rows: 3 }], &mut rows)?;
/// head.logits(&rows[2 * file.spec().width as usize..], &mut logits)?;
/// # Ok(())
/// # }
/// ```
pub type Engine = EngineOn<Cpu>;

/// Layers on this machine's cores, with bit-exact arithmetic.
pub struct Cpu {
    layers: Vec<Layer>,
    pub(crate) kernels: Kernels,
    pub(crate) thread_pool: Arc<ThreadPool>,
    scratch: Scratch,
}

impl EngineOn<Cpu> {
    /// Reads and repacks only the layers of a half-open range. `progress` receives the bytes of the
    /// file read so far, and the total.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(
        file: &ModelFile,
        layers: Range<u32>,
        options: &EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let spec = file.spec();
        check_layers(spec, &layers)?;
        check(spec)?;
        let kernels = options.kernels()?;
        let thread_pool = options.thread_pool()?;
        let packed = Loader::layers(file, thread_pool.threads(), layers.clone(), progress)?;
        let used = spec.experts.map_or(0, |experts| experts.used as usize);
        let weight_bytes = WeightBytes {
            all: packed.iter().map(|layer| layer.bytes as u64).sum(),
            per_row: packed.iter().map(|l| l.token_bytes(used) as u64).sum(),
        };
        let backend = Cpu {
            layers: packed,
            kernels,
            thread_pool,
            scratch: Scratch::default(),
        };
        let memory = HostMemory::of(spec, layers.clone(), options.max_kv_bytes);
        Self::new(file, layers, options, backend, weight_bytes, memory)
    }
}

impl Backend for Cpu {
    type Storage = HostMemory;

    fn all_finite(&self, row: &[f32]) -> bool {
        self.kernels.all_finite(row)
    }

    fn run(
        &mut self,
        batch: &Batch<'_>,
        table: &mut Table<HostMemory>,
        x: &mut [f32],
    ) -> Result<(), EngineError> {
        let (memory, sequences) = table.batch(batch.spans);
        let context = EngineContext {
            spec: batch.spec,
            kernels: self.kernels,
            thread_pool: &self.thread_pool,
            ropes: batch.ropes,
            layers: &self.layers[batch.first..batch.first + batch.layers.len()],
            inputs: batch.inputs,
        };
        let views = memory.views(&sequences, batch.spans);
        let ran = forward::run(&context, &mut self.scratch, batch.spans, &views, x);
        ran.map_err(|Overflow { layer, row }| EngineError::BoundaryOverflow {
            layer: batch.layers.start + layer as u32,
            row,
        })
    }
}

impl fmt::Debug for Cpu {
    /// Omits the weights.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cpu")
            .field("isa", &self.kernels.isa())
            .field("threads", &self.thread_pool.threads())
            .finish_non_exhaustive()
    }
}

/// Checks a requirement of the kernels that [`ModelSpec::check`] does not cover.
pub(crate) fn check(spec: &ModelSpec) -> Result<(), LoadError> {
    let mut dims = (0..spec.layers).map(|layer| spec.block(layer).key_width());
    match dims.find(|dim| !dim.is_multiple_of(8)) {
        Some(dim) => Err(LoadError::Unsupported(format!(
            "heads of {dim} values; a multiple of 8 is needed"
        ))),
        None => Ok(()),
    }
}
