//! Model files, text and the exact engine: everything that turns files into numbers.
//!
//! Knows nothing of networks between peers, of shards or of pipelines: those are built on it.
//!
//! | concept | where |
//! |---|---|
//! | **Files** | |
//! | a container of metadata and tensors, checked as hostile | [`gguf`], [`gguf::writer`] |
//! | which metadata and tensors make a model, as data | [`families`] |
//! | what a model computes | [`spec`], [`boundary`] |
//! | a file that is a model | [`model_file`] |
//! | what exactly it is, and the proof of a part of it | [`manifest`] |
//! | what it is, for people | [`inspect`] |
//! | weights in other types | [`convert`], [`quantize`] |
//! | directories of Hugging Face as model files | [`hugging_face`] |
//! | which models there are, how they are named, fetching them | [`catalogue`], [`reference`](mod@reference), [`pull`], [`pins`], [`cache`] |
//! | **Text** | |
//! | text to tokens and back | [`tokenizer`], [`detokenize`] |
//! | messages to a prompt | [`template`] |
//! | both of a file, checked against its weights | [`text`] |
//! | logits to a token, and when to stop | [`sampler`], [`stop`] |
//! | **Numbers** | |
//! | blocks of a model over rows of any sequences | [`engine`] |
//! | the arithmetic, to the bit, for each instruction set | [`kernels`] |
//!
//! A file becomes numbers like this:
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

/// The exact engine's arithmetic, as descriptors name it (`specs/canonical-arithmetic.md`).
pub const ARITHMETIC: &str = "canonical-1";
