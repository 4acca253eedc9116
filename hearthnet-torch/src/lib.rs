//! A layer range on libtorch, by way of the crate `tch`: for machines with a GPU.
//!
//! A `TorchEngine` computes the same models from the same files as the exact engine, within a
//! tolerance instead of to the bit; `specs/torch-arithmetic.md` says which, and what is not
//! promised. It serves layers behind the same interface as the exact engine (`hearthnet-shard`).
//!
//! Everything here needs the feature `libtorch`. Without it the crate is empty.
//!
//! | concept | file |
//! |---|---|
//! | device, number format, limits | `options.rs` |
//! | what can go wrong | `error.rs` |
//! | the engine: sequences and batches | `engine.rs` |
//! | weights of a file as tensors | `weights.rs` |
//! | a batch through a block, attention, experts | `forward/` |
//! | keys and values, snapshots | `kv.rs`, `snapshot.rs` |
//! | as a shard host's engine | `shard.rs` |
//! | how fast it is | `bench.rs` |
//!
//! libtorch throws exceptions, and `tch` has two forms of each operation: one that panics, one that
//! returns the error. Only the latter is used here.
#![cfg(feature = "libtorch")]

mod bench;
mod engine;
mod error;
mod forward;
mod kv;
mod options;
mod shard;
mod snapshot;
mod weights;

pub use bench::bench;
pub use engine::TorchEngine;
pub use error::{OptionError, TorchError, TorchLoadError};
pub use kv::Seq;
pub use options::{DeviceChoice, Dtype, Target, TorchOptions};
pub use shard::{TorchSource, start};
pub use snapshot::{SnapshotError, TorchSnapshot};
