//! Model files, text processing and the exact engine.
//!
//! This crate knows no networks, shards or pipelines; other crates build them on it.
//!
//! | concept | where |
//! |---|---|
//! | **Files** | |
//! | GGUF container of metadata and tensors, treated as hostile | [`gguf`], [`gguf::writer`] |
//! | required metadata and tensors of each model family, as data | [`families`] |
//! | hyperparameters, activation format | [`spec`], [`boundary`] |
//! | a checked model file | [`model_file`] |
//! | identity of weights, and proof of a part of them | [`manifest`] |
//! | description for users | [`inspect`] |
//! | conversion to other weight types | [`convert`], [`quantize`] |
//! | import of Hugging Face directories | [`hugging_face`] |
//! | catalogue, naming and fetching of models | [`catalogue`], [`reference`](mod@reference), [`pull`], [`pins`], [`cache`] |
//! | **Text** | |
//! | text to tokens and back | [`tokenizer`], [`detokenize`] |
//! | messages to a prompt | [`template`] |
//! | tokenizer and template of a file, checked against its weights | [`text`] |
//! | sampling, and when to stop | [`sampler`], [`stop`] |
//! | **Numbers** | |
//! | blocks of a model over rows of any sequences | [`engine`] |
//! | bit-exact arithmetic for each instruction set | [`kernels`] |
//!
//! Example: a file becomes numbers.
//!
//! ```
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = hearthnet_testkit::TinyLlama::default().write(directory.path());
//! use hearthnet_model::{LayerTensor, ModelFile};
//!
//! let model = ModelFile::open(&path)?; // refused here, or sound from here on
//! let spec = model.spec();
//! let down = model.layer_tensor(spec.layers - 1, LayerTensor::FfnDown)?;
//! assert_eq!((down.cols(), down.rows()), (spec.ffn as usize, spec.width as usize));
//! let id = model.manifest(&mut |_done, _total| {}).weights_id();
//! println!("{id} has {} layers of {} bytes", spec.layers, model.layer_bytes(0));
//! # Ok::<(), hearthnet_model::ModelError>(())
//! ```

mod atomic_file;
pub mod bench;
pub mod boundary;
pub mod cache;
pub mod catalogue;
pub mod convert;
pub mod detokenize;
pub mod engine;
mod error;
pub mod families;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod gguf;
pub mod hugging_face;
pub mod inspect;
pub mod kernels;
pub mod manifest;
pub mod model_file;
pub mod pins;
pub mod pull;
pub mod quantize;
pub mod reference;
mod regular_file;
pub mod sampler;
mod source;
pub mod spec;
pub mod stop;
pub mod template;
pub mod text;
pub mod tokenizer;

pub use boundary::BoundaryDtype;
pub use detokenize::Detokenizer;
pub use error::{FileError, ModelError};
pub use gguf::{Gguf, TensorType};
pub use manifest::{Digest, Manifest, TextId, WeightsId};
pub use model_file::{ModelFile, TensorView};
pub use reference::ModelRef;
pub use sampler::{Sampled, Sampler, SamplerConfig};
pub use spec::{LayerTensor, ModelSpec, RopeKind, RopeSpec};
pub use stop::StopMatcher;
pub use template::{ChatMessage, ChatTemplate, Role};
pub use tokenizer::{Special, Tokenizer};

/// Name of the exact engine's arithmetic in descriptors (`specs/canonical-arithmetic.md`).
pub const ARITHMETIC: &str = "canonical-1";
