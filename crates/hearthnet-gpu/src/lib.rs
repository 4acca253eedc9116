//! The exact engine on graphics cards, through wgpu: Vulkan, Metal and DirectX 12.
//!
//! It computes the same bytes as `hearthnet-engine` (`specs/canonical-arithmetic.md`;
//! `specs/gpu-arithmetic.md` says how a card does). Everything requires the feature `wgpu`. Without
//! it the crate is empty.
//!
//! | concept | file |
//! |---|---|
//! | cards, and what this machine has | `device.rs` |
//! | memory on the card, matrices, pages of keys and values | `buffers.rs`, `memory.rs` |
//! | operations of a batch, recorded and submitted together | `step.rs`, `operations.rs`, `products.rs`, `recurrences.rs` |
//! | texts of the kernels, their pipelines and bind groups | `kernels.rs`, `pipelines.rs`, `bind_groups.rs`, `wgsl/` |
//! | SPIR-V for Vulkan drivers, and what they offer to it | `vulkan/` |
//! | choice of the arithmetic; refusal of a card that computes other bytes | `open.rs`, `self_test.rs` |
//! | errors | `error.rs` |
//! | the engine: layers, sequences, batches | `engine/` |
//!
//! A kernel has float operations only as the conversion of a small integer, the product of two
//! scales and a fused multiply-add, and these only where the self-test has shown that the card
//! rounds them as the specification says. Everything else is done on the bits in u32.
#![cfg(feature = "wgpu")]

mod bind_groups;
mod buffers;
mod device;
mod engine;
mod error;
mod kernels;
mod memory;
mod open;
mod operations;
mod panels;
mod pipelines;
mod products;
mod recurrences;
mod self_test;
mod step;
#[cfg_attr(target_vendor = "apple", path = "vulkan/none.rs")]
mod vulkan;

pub use buffers::{Buffer, Input, Matrix, View, attention_words, kv_layout};
pub use device::{AdapterFacts, Choice, Gpu};
pub use engine::{Card, Comparison, GpuEngine, check, compare, load, load_most};
pub use error::{GpuError, GpuLoadError};
pub use kernels::{Arithmetic, Unary};
pub use open::adapters;
pub use operations::AttentionShape;
pub use recurrences::{Heads, PIECE, Pieces, Sharing, StateView, piece};
pub use step::Step;

/// For tests: texts of kernels, and operands and digests of the self-test.
#[doc(hidden)]
pub mod testing {
    pub use crate::kernels::{Formula, Kernel, Route, Tile, Way, all, text};
    pub use crate::self_test::*;
    #[cfg(not(target_vendor = "apple"))]
    pub use crate::vulkan::{Offer, spirv};
}
