//! Tests of the program with libtorch. In a binary of their own: `tests/run torch` builds the program
//! with the second engine, and would build all its other tests once more. To run them:
//!
//! ```text
//! LIBTORCH=... cargo test --features hearthnet/torch --test with_torch -- --test-threads=1
//! ```
#![cfg(feature = "torch")]
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests print measurements"
)]
#![allow(dead_code, unused_imports, reason = "other tests use all of `support`")]

mod isolation;
mod support;
mod torch;
