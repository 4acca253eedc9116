//! The exact CPU engine: blocks of a model over rows of any sequences.
//!
//! An [`Engine`] holds a contiguous range of layers and the keys and values of the sequences that
//! run through them. A [`Head`] holds what lies before the first layer and behind the last:
//! embedding, last norm, output matrix. [`FullModel`] is both for a complete model.
//!
//! # Exactness
//! A row's result is a function of the weights, of the row and of the rows before it in its
//! sequence, and of nothing else: not of what shares its batch, of how a prompt is cut into
//! batches, of the number of threads, of the processor's instruction set, of where the model is
//! cut, or of how the sequence came about (appended, truncated and replayed, forked, imported).
//! `specs/canonical-arithmetic.md` defines it to the bit.
//!
//! | what | where |
//! |---|---|
//! | sequences, pages, snapshots | `sequence`, `kv` |
//! | a batch through the layers, the split between threads | `forward` |
//! | tables of rotations | `rope_tables` |
//! | threads | `thread_pool` |
//! | loading and repacking | `weights` |
//! | arithmetic | [`crate::kernels`] |

mod error;
mod forward;
mod full_model;
mod head;
mod kv;
mod rope_tables;
mod sequence;
mod thread_pool;
mod weights;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

pub use error::{EngineError, ImportError, LoadError};
pub use full_model::FullModel;
pub use head::Head;
pub use kv::KvSnapshot;
pub use rope_tables::RopeTables;
pub use sequence::{SeqId, Span};

use crate::kernels::{Isa, Kernels};
use crate::manifest::WeightsId;
use crate::model_file::ModelFile;
use crate::spec::ModelSpec;
use forward::{Overflow, Parts, Scratch};
use kv::{Geometry, KvCache, Limits};
use thread_pool::ThreadPool;
use weights::{Layer, Loader};

/// More threads than any machine that this engine is for.
const MAX_THREADS: usize = 1024;
/// How an engine is to run. None of it changes a result.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Threads that compute, the calling one included: 1 to 1024. Default: one per core that this
    /// process may use.
    pub threads: usize,
    /// Instruction set of the kernels. Default: the best there is.
    pub isa: Isa,
    /// Memory for keys and values, in bytes; taken page by page as sequences grow. Default: 1 GiB.
    pub max_kv_bytes: u64,
    /// Open sequences. Default: 4096.
    pub max_sequences: usize,
    /// Positions of a sequence, if fewer than the model allows. Default: what the model allows.
    pub max_context: Option<u32>,
    /// Identity of the weights, to which KV snapshots are bound. Default: computed at load over
    /// the tensors of the layer range; then only engines of exactly the same range exchange
    /// snapshots.
    pub weights: Option<WeightsId>,
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
            weights: None,
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

/// A contiguous range of a model's layers, and the sequences that run through them.
///
/// ```no_run
/// # use hearthnet_model::{ModelFile, engine::*};
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
    weights: WeightsId,
    layers: Vec<Layer>,
    weight_bytes: u64,
    kernels: Kernels,
    thread_pool: Arc<ThreadPool>,
    ropes: RopeTables,
    cache: KvCache,
    scratch: Scratch,
}

impl Engine {
    /// Reads the layers of a half-open range, and nothing else, from the file, and repacks them.
    /// `progress` is called with the bytes of the file done so far and in all.
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
        let weights = options
            .weights
            .unwrap_or_else(|| identity(file, layers.clone()));
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
            weights,
            layers: packed,
            kernels,
            thread_pool,
            ropes,
            cache: KvCache::new(geometry, limits),
            scratch: Scratch::default(),
        })
    }

    /// Hyperparameters of the model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The layers that are here, half-open.
    pub fn layers(&self) -> Range<u32> {
        self.range.clone()
    }

    /// What KV snapshots are bound to: see [`EngineOptions::weights`].
    pub fn weights(&self) -> WeightsId {
        self.weights
    }

    /// Number of threads that compute.
    pub fn threads(&self) -> usize {
        self.thread_pool.threads()
    }

    /// Instruction set of the kernels.
    pub fn isa(&self) -> Isa {
        self.kernels.isa()
    }

    /// Memory that the weights take.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Bytes of weights that one row reads.
    pub(crate) fn token_bytes(&self) -> u64 {
        let used = self.spec.experts.map_or(0, |experts| experts.used as usize);
        self.layers
            .iter()
            .map(|layer| layer.token_bytes(used) as u64)
            .sum()
    }

    /// Memory of the pages that sequences own. It grows and shrinks by pages of 32 positions.
    pub fn kv_bytes_in_use(&self) -> u64 {
        self.cache.bytes_in_use()
    }

    /// Memory that a position takes in all layers.
    pub fn kv_bytes_per_position(&self) -> u64 {
        self.cache.geometry().position_bytes() * u64::from(self.range.end - self.range.start)
    }

    /// Number of open sequences.
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

    /// Closes a sequence and frees what only it owned. Returns whether it was open.
    pub fn close(&mut self, seq: SeqId) -> bool {
        self.cache.close(seq)
    }

    /// Positions of a sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn len(&self, seq: SeqId) -> Result<u32, EngineError> {
        self.cache.len(seq)
    }

    /// Forgets the positions of a sequence from `len` on.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`]; [`EngineError::PositionGap`] when it is shorter.
    pub fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), EngineError> {
        self.cache.truncate(seq, len)
    }

    /// Opens a copy of a sequence. Memory is shared until one of the two appends.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::TooManySequences`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        self.cache.fork(seq)
    }

    /// Keys and values of the first `len` positions of a sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`]; [`EngineError::PositionGap`] when it is shorter;
    /// [`EngineError::OutOfMemory`].
    pub fn export(&self, seq: SeqId, len: u32) -> Result<KvSnapshot, EngineError> {
        self.cache.export(&self.weights.0, seq, len)
    }

    /// Opens a sequence with the positions of a snapshot, which may come from anywhere: its
    /// format, sizes and numbers are checked. That its numbers are the right ones cannot be.
    ///
    /// # Errors
    /// See [`ImportError`].
    pub fn import(&mut self, snapshot: &KvSnapshot) -> Result<SeqId, ImportError> {
        self.cache.import(&self.weights.0, snapshot)
    }

    /// Runs rows through all layers, and appends them to their sequences.
    ///
    /// `x` has `width` values per row, the rows of the spans one after another; each row is
    /// replaced by its output. Rows must be values of the boundary dtype (rounding them again
    /// would change nothing), which embeddings and the outputs of other engines are.
    ///
    /// # Errors
    /// See [`EngineError`]. After an error no sequence has changed; after
    /// [`EngineError::BoundaryOverflow`] the content of `x` is lost.
    pub fn forward(&mut self, spans: &[Span], x: &mut [f32]) -> Result<(), EngineError> {
        self.forward_layers(self.range.clone(), spans, x)
    }

    /// As [`Self::forward`], through some of the engine's layers only, counted over the model and
    /// half-open. A sequence must stay with the layers that its first rows ran through.
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
        let parts = Parts {
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
            forward::run(&parts, &mut self.scratch, spans, &pages, x)
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
    /// Without weights, keys and values.
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

/// What the kernels ask of a model, beyond what a model file is checked for.
fn check(spec: &ModelSpec) -> Result<(), LoadError> {
    let dim = spec.head_dim;
    match dim.is_multiple_of(8) {
        true => Ok(()),
        false => Err(LoadError::Unsupported(format!(
            "heads of {dim} values; a multiple of 8 is needed"
        ))),
    }
}

/// A digest of everything that decides the keys and values of a layer range.
fn identity(file: &ModelFile, layers: Range<u32>) -> WeightsId {
    let mut hash = Sha256::new();
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(b"hearthnet layer range 1");
    // All fields of the spec, floating point in shortest exact form.
    field(format!("{:?}", file.spec()).as_bytes());
    let own = layers.flat_map(|layer| file.layer_tensors(layer));
    for info in file.shared_tensors().chain(own) {
        field(info.name.as_bytes());
        field(info.dtype.name().as_bytes());
        field(format!("{:?}", info.dims).as_bytes());
        field(file.gguf().data(info));
    }
    WeightsId(hash.finalize().into())
}
