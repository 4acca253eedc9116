//! Model families as data: metadata keys and tensors of each supported architecture.
//!
//! | concept | where |
//! |---|---|
//! | the families, one constant each, listed in [`ALL`] | `known.rs` |
//! | description of a family, tensors of a model | [`Family`], `family.rs` |
//! | names and shapes of tensors | [`Rule`], `rules.rs` |
//! | metadata keys that are read, accepted or refused | `keys.rs` |
//! | metadata of a file to a [`ModelSpec`](crate::spec::ModelSpec) | `read.rs`; what differs between blocks: `per_block.rs`; encoders: `encoder.rs` |
//!
//! An unknown architecture, hyperparameter or tensor is an error, because ignoring it would give
//! plausible wrong answers.
//!
//! A family that needs no new feature is one constant. For a new feature, first add the tensor to
//! [`LayerTensor`](crate::spec::LayerTensor) or the field to
//! [`ModelSpec`](crate::spec::ModelSpec), and implement it in the engine.

mod encoder;
mod family;
mod keys;
mod known;
mod per_block;
mod read;
mod rules;

pub(crate) use family::shared_tensors;
pub use family::{DeltaFamily, EncoderFamily, Family, MambaFamily, Presence, Yarn};
pub(crate) use keys::TYPE_COUNT;
pub use rules::{
    CORRECTION, EMBEDDING, EMBEDDING_NORM, EMBEDDING_NORM_BIAS, Group, OUTPUT, OUTPUT_NORM,
    PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION, PER_LAYER_PROJECTION_NORM, POSITION_EMBEDDING,
    PROJECTION_DOWN, PROJECTION_UP, ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROUTER,
    Rule, TYPE_EMBEDDING, is_convolution, is_vector,
};

use crate::error::ModelError;
use crate::gguf::{Gguf, MetadataError};

/// All supported families.
pub const ALL: &[&Family] = &[
    &known::LLAMA,
    &known::QWEN2,
    &known::QWEN3,
    &known::QWEN3_MOE,
    &known::OLMOE,
    &known::SMOLLM3,
    &known::PHI3,
    &known::GEMMA2,
    &known::GEMMA3,
    &known::GEMMA4,
    &known::GRANITE,
    &known::GLM4,
    &known::GPT_OSS,
    &known::MINICPM3,
    &known::MISTRAL3,
    &known::QWEN35,
    &known::QWEN35_MOE,
    &known::QWEN3_NEXT,
    &known::SEED_OSS,
    &known::GLM4_MOE,
    &known::DEEPSEEK2,
    &known::GEMMA_EMBEDDING,
    &known::BERT,
    &known::NOMIC_BERT,
    &known::MUSE_GLIMMER,
    &known::LFM2,
    &known::LFM2_MOE,
    &known::GRANITE_HYBRID,
    &known::NEMOTRON_H,
    &known::NEMOTRON_H_MOE,
];

/// Metadata key with which a file overrides its family's boundary dtype (`f16`, `bf16`, `f32`).
pub const BOUNDARY_KEY: &str = "hearthnet.boundary_dtype";

/// Number of the block, as written, and the name within it, of a tensor of this full name. `None`
/// for a tensor outside of the blocks.
pub(crate) fn in_block(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("blk.")?.split_once('.')
}

impl Family {
    pub fn named(architecture: &str) -> Option<&'static Self> {
        ALL.iter()
            .find(|family| family.architecture == architecture)
            .copied()
    }

    /// The family of a file, by its `general.architecture`.
    ///
    /// # Errors
    /// When the key is missing or not a string, or the architecture is not in [`ALL`].
    pub fn of(gguf: &Gguf) -> Result<&'static Self, ModelError> {
        let key = "general.architecture";
        let missing = || MetadataError::Missing(key.to_owned());
        let architecture = gguf.str(key)?.ok_or_else(missing)?;
        Self::named(architecture).ok_or_else(|| ModelError::UnknownArchitecture {
            architecture: architecture.chars().take(60).collect(),
            known: ALL
                .iter()
                .map(|f| f.architecture)
                .collect::<Vec<_>>()
                .join(", "),
        })
    }
}
