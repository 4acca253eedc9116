//! Exact CPU engine: runs rows of any sequences through the blocks of a model.
//!
//! An [`Engine`] holds a contiguous range of layers and the KV cache of the sequences that run
//! through them. A [`Head`] holds the tensors outside the layers: embedding, last norm, output
//! matrix. [`FullModel`] combines both for a complete model.
//!
//! # Exactness
//! The result for a row depends only on the weights, on the row and on the earlier rows of its
//! sequence. It does not depend on the rest of the batch, on how a prompt is split into batches, on
//! the number of threads, on the instruction set, on how the layers are split between engines, or
//! on how the sequence was built (appended, truncated and replayed, forked).
//! `specs/canonical-arithmetic.md` defines it to the bit.
//!
//! | what | where |
//! |---|---|
//! | sequences, pages | `sequence`, `kv` |
//! | running a batch through the layers, split between threads | `forward` |
//! | RoPE tables | `rope_tables` |
//! | threads | `thread_pool` |
//! | loading and repacking | `weights` |
//! | bit-exact arithmetic for each instruction set | [`kernels`] |
//! | speed of an engine | [`bench`](mod@bench) |

pub mod bench;
mod error;
mod forward;
mod full_model;
mod head;
pub mod kernels;
mod kv;
mod rope_tables;
mod sequence;
mod thread_pool;
mod weights;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use hearthnet_files::ModelFile;
use hearthnet_files::spec::ModelSpec;

pub use error::{EngineError, LoadError};
pub use full_model::FullModel;
pub use head::Head;
pub use rope_tables::RopeTables;
pub use sequence::{SeqId, Span};

use crate::kernels::{Isa, Kernels};
use forward::{EngineContext, Overflow, Scratch};
use kv::{Geometry, KvCache, Limits};
use thread_pool::ThreadPool;
use weights::{Layer, Loader};

/// Name of the engine's arithmetic in descriptors (`specs/canonical-arithmetic.md`).
pub const ARITHMETIC: &str = "canonical-1";

/// Sanity limit, above the core count of any supported machine.
const MAX_THREADS: usize = 1024;
/// Options of an engine. They do not change results.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Compute threads, including the calling thread: 1 to 1024. Default: one per core that this
    /// process may use.
    pub threads: usize,
    /// Instruction set of the kernels. Default: the best of this CPU.
    pub isa: Isa,
    /// Limit of the KV cache in bytes, allocated page by page as sequences grow. Default: 1 GiB.
    pub max_kv_bytes: u64,
    /// Limit of open sequences. Default: 4096.
    pub max_sequences: usize,
    /// Limit of positions per sequence, if below that of the model. Default: the model's.
    pub max_context: Option<u32>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(MAX_THREADS),
            isa: Isa::detect(),
            max_kv_bytes: 1 << 30,
            max_sequences: 4096,
            max_context: None,
        }
    }
}

impl EngineOptions {
    fn kernels(&self) -> Result<Kernels, LoadError> {
        Kernels::new(self.isa).ok_or(LoadError::Isa(self.isa))
    }

    fn thread_pool(&self) -> Result<Arc<ThreadPool>, LoadError> {
        if !(1..=MAX_THREADS).contains(&self.threads) {
            let reason = format!("{} is not between 1 and {MAX_THREADS}", self.threads);
            return Err(LoadError::Option {
                option: "threads",
                reason,
            });
        }
        ThreadPool::new(self.threads)
            .map(Arc::new)
            .map_err(LoadError::Threads)
    }
}

/// Contiguous range of a model's layers, and the sequences that run through them.
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
pub struct Engine {
    spec: ModelSpec,
    range: Range<u32>,
    layers: Vec<Layer>,
    weight_bytes: u64,
    kernels: Kernels,
    thread_pool: Arc<ThreadPool>,
    ropes: RopeTables,
    cache: KvCache,
    scratch: Scratch,
}

impl Engine {
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
        if layers.start >= layers.end || layers.end > spec.layers {
            return Err(LoadError::Layers {
                range: layers,
                layers: spec.layers,
            });
        }
        check(spec)?;
        let kernels = options.kernels()?;
        let thread_pool = options.thread_pool()?;
        let packed = Loader::layers(file, thread_pool.threads(), layers.clone(), progress)?;
        let geometry = Geometry {
            first_layer: layers.start,
            layers: packed.len(),
            kv_heads: spec.kv_heads as usize,
            head_dim: spec.head_dim as usize,
        };
        let limits = Limits {
            bytes: options.max_kv_bytes,
            context: options.max_context.unwrap_or(u32::MAX).min(spec.context),
            sequences: options.max_sequences,
        };
        let ropes = RopeTables::of(file)?;
        Ok(Self {
            weight_bytes: packed.iter().map(|layer| layer.bytes as u64).sum(),
            spec: spec.clone(),
            range: layers,
            layers: packed,
            kernels,
            thread_pool,
            ropes,
            cache: KvCache::new(geometry, limits),
            scratch: Scratch::default(),
        })
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Layers of this engine, half-open.
    pub fn layers(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Number of compute threads, including the calling thread.
    pub fn threads(&self) -> usize {
        self.thread_pool.threads()
    }

    pub fn isa(&self) -> Isa {
        self.kernels.isa()
    }

    /// Bytes of memory of the packed weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Bytes of weights that one row reads; of the experts, only those that it is routed to.
    pub(crate) fn token_bytes(&self) -> u64 {
        let used = self.spec.experts.map_or(0, |experts| experts.used as usize);
        self.layers
            .iter()
            .map(|layer| layer.token_bytes(used) as u64)
            .sum()
    }

    /// Bytes of the KV pages that sequences own. A page has 32 positions.
    pub fn kv_bytes_in_use(&self) -> u64 {
        self.cache.bytes_in_use()
    }

    /// Bytes of KV cache per position, over all layers of the engine.
    pub fn kv_bytes_per_position(&self) -> u64 {
        self.cache.geometry().position_bytes() * u64::from(self.range.end - self.range.start)
    }

    pub fn sequences(&self) -> usize {
        self.cache.sequences()
    }

    /// Opens an empty sequence.
    ///
    /// # Errors
    /// [`EngineError::TooManySequences`].
    pub fn open(&mut self) -> Result<SeqId, EngineError> {
        self.cache.open()
    }

    /// Closes a sequence and frees the pages that only it owned. Returns false if it was not open.
    pub fn close(&mut self, seq: SeqId) -> bool {
        self.cache.close(seq)
    }

    /// Number of positions of a sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn len(&self, seq: SeqId) -> Result<u32, EngineError> {
        self.cache.len(seq)
    }

    /// Shortens a sequence to `len` positions.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`]; [`EngineError::PositionGap`] when it is shorter than
    /// `len`.
    pub fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), EngineError> {
        self.cache.truncate(seq, len)
    }

    /// Opens a copy of a sequence. The two share pages; appending to a shared page copies it.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::TooManySequences`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        self.cache.fork(seq)
    }

    /// Runs rows through all layers, and appends them to their sequences.
    ///
    /// `x` has the rows of the spans one after another, `width` values each; outputs replace them.
    /// Values must already be rounded to the boundary dtype, as embeddings and outputs of other
    /// engines are.
    ///
    /// # Errors
    /// See [`EngineError`]. After an error, all sequences are unchanged; after
    /// [`EngineError::BoundaryOverflow`], the content of `x` is undefined.
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
        let width = self.spec.width as usize;
        let rows: usize = spans.iter().map(|span| span.rows as usize).sum();
        if rows.checked_mul(width) != Some(x.len()) {
            let expected = rows.saturating_mul(width);
            return Err(EngineError::RowsMismatch {
                expected,
                found: x.len(),
            });
        }
        if let Some(row) = x
            .chunks_exact(width)
            .position(|row| !self.kernels.all_finite(row))
        {
            return Err(EngineError::InputNotFinite(row));
        }
        self.cache.reserve(&layers, spans)?;
        let end = spans
            .iter()
            .map(|span| span.position + span.rows)
            .max()
            .unwrap_or(0);
        self.ropes.cover(end as usize);
        let first = (layers.start - self.range.start) as usize;
        let context = EngineContext {
            spec: &self.spec,
            kernels: self.kernels,
            thread_pool: &self.thread_pool,
            ropes: &self.ropes,
            geometry: *self.cache.geometry(),
            layers: &self.layers[first..first + layers.len()],
            first,
        };
        let result = {
            let pages = self.cache.views(spans);
            forward::run(&context, &mut self.scratch, spans, &pages, x)
        };
        match result {
            Ok(()) => {
                self.cache.commit(&layers, spans);
                Ok(())
            }
            Err(Overflow { layer, row }) => {
                self.cache.roll_back(spans);
                Err(EngineError::BoundaryOverflow {
                    layer: layers.start + layer as u32,
                    row,
                })
            }
        }
    }
}

impl fmt::Debug for Engine {
    /// Omits weights, keys and values.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("architecture", &self.spec.architecture)
            .field("layers", &self.range)
            .field("isa", &self.isa())
            .field("threads", &self.threads())
            .field("sequences", &self.sequences())
            .finish_non_exhaustive()
    }
}

/// Checks a requirement of the kernels that [`ModelSpec::check`] does not cover.
fn check(spec: &ModelSpec) -> Result<(), LoadError> {
    let dim = spec.head_dim;
    match dim.is_multiple_of(8) {
        true => Ok(()),
        false => Err(LoadError::Unsupported(format!(
            "heads of {dim} values; a multiple of 8 is needed"
        ))),
    }
}
