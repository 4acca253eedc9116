//! Model files, text and the exact engine: everything that turns files into numbers.

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
#[doc(hidden)]
pub mod fuzzing;
pub mod gguf;
pub mod inspect;
pub mod kernels;
pub mod manifest;
pub mod model_file;
pub mod pull;
pub mod quantize;
pub mod sampler;
pub mod spec;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use boundary::BoundaryDtype;
pub use detokenize::Detokenizer;
pub use error::{FileError, ModelError};
pub use gguf::{Gguf, TensorType};
pub use manifest::{Digest, Manifest, WeightsId};
pub use model_file::{ModelFile, TensorView};
pub use sampler::{Sampled, Sampler, SamplerConfig};
pub use spec::{LayerTensor, ModelSpec, RopeKind, RopeSpec};
pub use stop::StopMatcher;
pub use template::{ChatMessage, ChatTemplate, Role};
pub use tokenizer::{Special, Tokenizer};
