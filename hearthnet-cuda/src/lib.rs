//! Experimental: the exact arithmetic (`specs/canonical-arithmetic.md`) as kernels for NVIDIA's cards.
//!
//! How each kernel keeps the order of sums is in `specs/gpu-arithmetic.md`. No card has run them: what is
//! shown is that their text, compiled by a C compiler and run thread by thread on a processor, gives the
//! bytes of the engine (`tests/kernels/`), and that NVIDIA's compiler makes of it the instructions that
//! it asks for (`tests/ptx.rs`). No command and no host uses this crate.
//!
//! | concept | file |
//! |---|---|
//! | the kernels | `kernels/*.cu` |
//! | which kernel, with what shape, for what | [`launch`] |
//! | compiling them, launching them on a card (feature `cuda`) | `card.rs` |
//! | a card for tests, on a processor | `tests/kernels/emulation/` |

#[cfg(feature = "cuda")]
mod card;
pub mod launch;

#[cfg(feature = "cuda")]
pub use card::{Buffer, Card, CardError, compile};

/// The text of all kernels, in what CUDA C++ and C have in common.
pub const SOURCE: &str = concat!(
    include_str!("../kernels/numbers.cu"),
    include_str!("../kernels/rows.cu"),
    include_str!("../kernels/matrices.cu"),
    include_str!("../kernels/attention.cu"),
);
