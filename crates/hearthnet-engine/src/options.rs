//! Options of an engine.

use std::ops::Range;
use std::sync::Arc;

use hearthnet_files::spec::ModelSpec;

use crate::error::LoadError;
use crate::kernels::{Isa, Kernels};
use crate::memory::footprint;
use crate::sequences::Limits;
use crate::thread_pool::ThreadPool;

/// Sanity limit, above the core count of any supported machine.
const MAX_THREADS: usize = 1024;

/// Options of an engine. They do not change the results of the exact engine.
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
    /// Limits of sequences of a model.
    pub fn limits(&self, spec: &ModelSpec) -> Limits {
        Limits {
            bytes: self.max_kv_bytes,
            context: self.max_context.unwrap_or(u32::MAX).min(spec.context),
            sequences: self.max_sequences,
        }
    }

    /// The options of an engine for a part of some layers: its share of the memory for sequences.
    pub fn share(&self, spec: &ModelSpec, part: Range<u32>, layers: Range<u32>) -> Self {
        let [part, whole] = [part, layers].map(|layers| u128::from(footprint(spec, layers).unit()));
        let share = u128::from(self.max_kv_bytes) * part / whole.max(1);
        Self {
            max_kv_bytes: u64::try_from(share).unwrap_or(u64::MAX),
            ..self.clone()
        }
    }

    pub(crate) fn kernels(&self) -> Result<Kernels, LoadError> {
        Kernels::new(self.isa).ok_or(LoadError::Isa(self.isa))
    }

    pub(crate) fn thread_pool(&self) -> Result<Arc<ThreadPool>, LoadError> {
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
