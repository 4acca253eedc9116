//! Tests of the program with graphics cards. In a binary of their own, as those with libtorch:
//! `tests/run gpu` runs them. To run them:
//!
//! ```text
//! cargo test --features hearthnet/gpu --test with_gpu -- --test-threads=1
//! ```
#![cfg(feature = "gpu")]
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests print measurements"
)]
#![allow(dead_code, unused_imports, reason = "other tests use all of `support`")]

mod gpu;
mod support;
