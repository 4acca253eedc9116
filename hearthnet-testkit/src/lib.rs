//! Test support: the real model, its variants, and small synthetic models.
//!
//! Everything here panics when it cannot deliver: a test that needs it cannot go on.
#![allow(clippy::expect_used, clippy::panic)]

mod tiny;

use std::path::PathBuf;

pub use tiny::TinyLlama;

/// Path of SmolLM2-135M-Instruct, Q4_1, in the user's cache.
///
/// # Panics
/// When the model is missing: `hearthnet model pull smollm2-135m-instruct` brings it.
pub fn smollm2() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .unwrap_or_else(|| {
            PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache")
        });
    let path = cache.join("hearthnet/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.exists(),
        "{} is missing: pull smollm2-135m-instruct first",
        path.display()
    );
    path
}
