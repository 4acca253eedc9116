//! Test support: the real model, its variants, and small synthetic models.
//!
//! Everything here panics when it cannot deliver: a test that needs it cannot go on.
#![allow(clippy::expect_used, clippy::panic)]

mod tiny;

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use hearthnet_model::convert::{ConvertError, convert};
use hearthnet_model::gguf::TensorType;
use hearthnet_model::{ModelFile, cache};

pub use tiny::TinyLlama;

/// Path of SmolLM2-135M-Instruct, Q4_1, in the user's cache.
///
/// # Panics
/// When the model is missing: `hearthnet model pull smollm2-135m-instruct` brings it.
pub fn smollm2() -> PathBuf {
    let models = cache::models().expect("a place for models");
    let path = models.join("smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.exists(),
        "{} is missing: pull smollm2-135m-instruct first",
        path.display()
    );
    path
}

/// Path of the real model with its matrices stored as `dtype` (`f32`, `f16`, `q8_0`, `q4_0`, and
/// `q4_1`, which is the model itself): made once from [`smollm2`] and kept in the user's cache.
///
/// The Q4_1 weights are the origin of all of them, so `f32` computes with exactly the same
/// weights, and `f16` with the same but for their rounding.
///
/// # Panics
/// When the type is no such type, or there is no room for the file.
pub fn variant(dtype: &str) -> PathBuf {
    let dtype: TensorType = dtype.parse().expect("a tensor type");
    let source = smollm2();
    if dtype == TensorType::Q4_1 {
        return source;
    }
    let directory = cache::directory()
        .expect("a place for models")
        .join("test-models");
    fs::create_dir_all(&directory).expect("a writable cache directory");
    // The number counts changes of the conversion, after which older files would be wrong.
    let path = directory.join(format!("SmolLM2-135M-Instruct.{dtype}.1.gguf"));
    if !path.exists() {
        let model = ModelFile::open(&source).expect("the real model is sound");
        match convert(
            &model,
            dtype,
            &path,
            &AtomicBool::new(false),
            &mut |_, _| {},
        ) {
            // Another test was faster, and made the same file.
            Ok(()) | Err(ConvertError::Exists(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    path
}
