//! Models that read a text as a whole and make its vector.

use serde::{Deserialize, Serialize};

use super::check::{SpecError, ensure, is_default, size};
use super::{Activation, ModelSpec};

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

impl ModelSpec {
    /// Encoders have plain blocks.
    pub(super) fn check_encoder(&self) -> Result<(), SpecError> {
        let exact = self.activation == Activation::GeluErf;
        let plain = self.encoder.is_some_and(|encoder| encoder.plain_ffn);
        let reason = "must be the activation of feed-forward layers without gate, and only of them";
        ensure(exact == plain, "activation", reason)?;
        let Some(encoder) = self.encoder else {
            return Ok(());
        };
        if encoder.token_types > 0 {
            size("encoder.token_types", encoder.token_types)?;
        }
        size("encoder.projection", encoder.projection.unwrap_or(1))?;
        let plain = self.experts.is_none()
            && !self.is_recurrent()
            && self.shared_keys.is_none()
            && self.per_layer.is_none()
            && self.prediction == 0
            && self.attention.latent.is_none();
        let reason = "must not be combined with experts, recurrences, latent attention, shared keys or \
                      per-layer inputs";
        ensure(plain, "encoder", reason)?;
        let normed_twice = encoder.layer_norm && (self.post_norms || self.block_scale);
        let reason = "must not be combined with norms of branches";
        ensure(!normed_twice, "encoder.layer_norm", reason)
    }
}
