//! Llama: RMSNorm, grouped-query attention with interleaved RoPE, SwiGLU, no biases.
//!
//! Also Llama 3.1 to 3.3 (RoPE with factors), Mistrals with YaRN, SmolLM, SmolLM2, TinyLlama, Mistral 7B, Mixtral
//! (experts) and others that converters store under this architecture. Sources: "LLaMA: Open and
//! Efficient Foundation Language Models" (arXiv 2302.13971), "Mixtral of Experts" (2401.04088);
//! keys and tensor names as in llama.cpp's `llama-arch.cpp`.

use super::{Family, Yarn, rules};

/// The family's description.
pub const FAMILY: Family = Family {
    layer: &[rules::ATTENTION, rules::FEED_FORWARD, rules::EXPERTS],
    reads: &[
        "expert_count",
        "expert_used_count",
        "attention.sliding_window",
    ],
    rope_factors: true,
    yarn: Yarn::Whole,
    experts_normalised: true,
    ..Family::BASE
};
