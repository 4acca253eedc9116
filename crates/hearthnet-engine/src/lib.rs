//! Exact CPU engine: runs rows of any sequences through the blocks of a model.
//!
//! An [`Engine`] holds a contiguous range of layers and the KV cache of the sequences that run
//! through them. A [`Head`] holds the tensors outside the layers: embedding, last norm, output
//! matrix.
//!
//! # Exactness
//! The result for a row depends only on the weights, on the row and on the earlier rows of its
//! sequence; in an encoder, on all rows of its text. It does not depend on the rest of the batch, on how a prompt is split into batches, on
//! the number of threads, on the instruction set, on how the layers are split between engines, or
//! on how the sequence was built (appended, truncated and replayed, forked).
//! `specs/canonical-arithmetic.md` defines it to the bit.
//!
//! # Other devices
//! [`EngineOn`] is the part of an engine that does not depend on the device: sequences, and the
//! checks of a batch. A device implements [`Backend`], and [`Storage`] for its memory.
//!
//! | what | where |
//! |---|---|
//! | engine on any device | `engine` |
//! | sequences: table, limits, budget | `sequences`, `sequence` |
//! | the exact engine | `cpu` |
//! | its memory of sequences: keys and values, recurrent states | `memory`, `state`, `pool` |
//! | running a batch through the layers, split between threads | `forward` |
//! | RoPE tables | `rope_tables` |
//! | threads | `thread_pool` |
//! | loading and repacking; weights of a layer | `weights`, `each_layer`, [`layer`] |
//! | bit-exact arithmetic for each instruction set | [`kernels`] |
//! | vectors of texts on one machine; how they are made of hidden states | `embedder`, [`pooling`] |
//! | speed of an engine | [`bench`](mod@bench) |

pub mod bench;
mod cpu;
mod each_layer;
mod embedder;
mod encoder_head;
mod engine;
mod error;
mod forward;
/// Bodies of the fuzz targets. Not a public interface.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::kernels::fuzzing::weight_blocks;
    pub use crate::memory::fuzzing::pages as kv_pages;
}
mod head;
pub mod kernels;
pub mod layer;
mod matrices;
mod memory;
mod options;
mod pool;
pub mod pooling;
mod rope_tables;
mod sequence;
mod sequences;
mod state;
mod thread_pool;
mod weights;

pub use cpu::{Cpu, Engine};
pub use each_layer::each_layer;
pub use embedder::Embedder;
pub use engine::{Backend, Batch, EngineOn, WeightBytes};
pub use error::{EngineError, LoadError};
pub use forward::{Route, choose as choose_experts};
pub use head::Head;
pub use memory::{Memory, PageMemory, PagedSequence, footprint};
pub use options::EngineOptions;
pub use pool::PoolMemory;
pub use rope_tables::RopeTables;
pub use sequence::{Footprint, SeqId, Span};
pub use sequences::{Limits, Storage, Table};
pub use state::{StateBuffers, Track};

/// Name of the engine's arithmetic in descriptors (`specs/canonical-arithmetic.md`).
pub const ARITHMETIC: &str = "canonical-1";
