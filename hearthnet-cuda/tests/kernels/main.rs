//! The kernels, on a card for tests.
//!
//! | what | file |
//! |---|---|
//! | a card on a processor: the C compiler's view of CUDA, and the process that runs launches | `emulation/` |
//! | every kernel gives the scalar engine's bytes | `exact.rs` |
//! | so do the real model's first blocks | `model.rs` |
//! | the emulation notices wrong kernels | `emulator.rs` |
// The emulation needs ELF and glibc.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "so a test fails"
)]

mod emulation;
mod emulator;
mod exact;
mod model;
mod values;
