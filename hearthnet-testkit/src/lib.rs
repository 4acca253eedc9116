//! Test support: the real model, its variants, and throw-away directories.
#![allow(clippy::expect_used, clippy::panic)]

use std::path::PathBuf;

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
