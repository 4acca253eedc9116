//! Engine on libtorch, through the crate `tch`, for machines with a GPU.
//!
//! `TorchEngine` runs the same models from the same files as the exact engine, but within a
//! tolerance instead of bit-identically. `specs/torch-arithmetic.md` gives the tolerance and its
//! limits. It serves layers behind the same interface as the exact engine (`hearthnet-shard`).
//!
//! Everything requires the feature `libtorch`. Without it the crate is empty.
//!
//! | concept | file |
//! |---|---|
//! | device, number format, limits | `options.rs` |
//! | devices and number formats; errors | `choice.rs`; `error.rs` |
//! | loading, and running a batch | `engine.rs` |
//! | weights of a file as tensors | `weights.rs` |
//! | a batch through a block, attention, experts | `forward/` |
//! | keys and values | `kv.rs` |
//! | engine of a shard host | `shard.rs` |
//! | benchmark | `bench.rs` |
//!
//! libtorch throws exceptions. `tch` has two forms of each operation: one panics, one returns the
//! error. Only the latter is used here.
#![cfg(feature = "libtorch")]

mod bench;
mod choice;
mod engine;
mod error;
mod forward;
mod kv;
mod options;
mod shard;
mod weights;

pub use bench::bench;
pub use choice::{DeviceChoice, Dtype, OptionError};
pub use engine::{Torch, TorchEngine, load};
pub use error::TorchLoadError;
pub use options::{Target, TorchOptions};
pub use shard::start;
