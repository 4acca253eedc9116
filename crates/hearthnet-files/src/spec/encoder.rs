//! Models that read a text as a whole and make its vector.

use serde::{Deserialize, Serialize};

use super::check::{SpecError, is_default, size};

/// Encoder: each row attends to all rows of its text, also to later ones. With a window, it attends
/// to as many positions after its own as before it. The final hidden states make the vector of the
/// text; there are no logits.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EncoderSpec {
    /// Whether the embedding, and the residual stream after each addition, are normalised by a
    /// LayerNorm with bias ("post-norm", as in BERT). There are no norms before attention and
    /// feed-forward layer, and none behind the last block.
    #[serde(skip_serializing_if = "is_default")]
    pub layer_norm: bool,
    /// Whether the embedding of a row includes that of its position.
    #[serde(skip_serializing_if = "is_default")]
    pub positions: bool,
    /// Token types with embeddings, 0 for none. All tokens of a text have the first type.
    #[serde(skip_serializing_if = "is_default")]
    pub token_types: u32,
    /// Whether feed-forward layers have no gate, and biases: `down(gelu(up(x) + b)) + c`.
    #[serde(skip_serializing_if = "is_default")]
    pub plain_ffn: bool,
    /// Two matrices make the vector of the pooled state, with so many values between them.
    #[serde(skip_serializing_if = "is_default")]
    pub projection: Option<u32>,
}

impl EncoderSpec {
    pub(super) fn check(&self) -> Result<(), SpecError> {
        if self.token_types > 0 {
            size("encoder.token_types", self.token_types)?;
        }
        size("encoder.projection", self.projection.unwrap_or(1))
    }
}
