//! Model files: reading, checking, identity, conversion and import.
//!
//! This crate knows no engine, tokenizer or network; other crates build them on it.
//!
//! | concept | where |
//! |---|---|
//! | GGUF container of metadata and tensors, treated as hostile | [`gguf`], [`gguf::writer`] |
//! | required metadata and tensors of each model family, as data | [`families`] |
//! | hyperparameters, activation format | [`spec`], [`boundary`] |
//! | a checked model file; split models | [`model_file`], [`gguf`], [`joined`] |
//! | identity of weights and of text, proof of a part of the weights | [`manifest`] |
//! | a part of a model on the disk, and the pieces that nodes exchange | [`part`] |
//! | expected magnitude of residual stream rows | [`magnitude`] |
//! | layouts of weight blocks, and 16-bit floats | [`blocks`], [`floats`] |
//! | conversion to other weight types | [`convert`], [`quantize`] |
//! | import of Hugging Face directories | [`hugging_face`] |
//! | hidden states of which the vector of a text is made | [`pooling`] |
//! | metadata of the tokenizer, recommended sampling settings | [`tokenizer_parts`], [`sampling`] |
//! | folder of models and records | [`cache`] |
//! | lock per folder of models | [`folder_lock`] |
//!
//! Example: a checked file.
//!
//! ```
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = hearthnet_testkit::TinyLlama::default().write(directory.path());
//! use hearthnet_files::{LayerTensor, ModelFile};
//!
//! let model = ModelFile::open(&path)?; // refused here, or sound from here on
//! let spec = model.spec();
//! let down = model.layer_tensor(spec.layers - 1, LayerTensor::FfnDown)?;
//! assert_eq!((down.cols(), down.rows()), (spec.ffn as usize, spec.width as usize));
//! let id = model.manifest(&mut |_done, _total| {}).weights_id();
//! println!("{id} has {} layers of {} bytes", spec.layers, model.layer_bytes(0));
//! # Ok::<(), hearthnet_files::ModelError>(())
//! ```

pub mod blocks;
pub mod boundary;
pub mod byte_alphabet;
pub mod cache;
pub mod convert;
mod error;
pub mod families;
pub mod floats;
pub mod folder_lock;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod gguf;
pub mod hugging_face;
pub mod joined;
pub mod magnitude;
pub mod manifest;
pub mod model_file;
pub mod part;
pub mod pooling;
pub mod quantize;
pub mod sampling;
mod schema;
pub mod spec;
mod stamp;
pub mod tokenizer_parts;

pub use boundary::BoundaryDtype;
pub use error::{FileError, ModelError};
pub use gguf::{Gguf, TensorType};
pub use manifest::{Digest, Manifest, TextId, WeightsId};
pub use model_file::{ModelFile, TensorView};
pub use pooling::Pooling;
pub use spec::{LayerTensor, ModelSpec, RopeKind, RopeSpec};
