//! MiniCPM3: latent attention, and constant factors of embedding, residual stream and logits, as
//! the first MiniCPM has them. Sources: "MiniCPM: Unveiling the Potential of Small Language Models"
//! (arXiv 2404.06395), "DeepSeek-V2" (2405.04434) for the attention, and the model card of
//! MiniCPM3-4B.
//!
//! Files say neither the factors nor the norms' epsilon in the attention. The factors are those of
//! the published model (llama.cpp has the same), the epsilon is that of the published code and of
//! `transformers`; llama.cpp takes that of the other norms.

use super::{Family, rules};
use crate::spec::RopeKind;

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "minicpm3",
    rope: RopeKind::Halves,
    layer: &[rules::LATENT_ATTENTION, rules::FEED_FORWARD],
    reads: &["attention.q_lora_rank", "attention.kv_lora_rank"],
    latent_norm_eps: Some(1e-6),
    embedding_scale: Some(12.0),
    depth_scale: Some(1.4),
    logits_by_width: Some(256.0),
    long_rope: true,
    ..Family::BASE
};
