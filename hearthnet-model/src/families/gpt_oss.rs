//! gpt-oss: experts with biases and a clamped SwiGLU, a sink for each head, biases all over, a
//! sliding window in every other block, YaRN. Source: "gpt-oss-120b & gpt-oss-20b Model Card"
//! (OpenAI, 2025; arXiv 2508.10925) and the code that came with it; keys and tensor names as in
//! llama.cpp's `llama-arch.cpp`.
//!
//! Where the ramp of YaRN begins and ends falls between two pairs, in that code as in
//! `transformers`; llama.cpp takes whole ones, as for all families. Files do not say it.
//!
//! Made in bf16, whose range its residual stream needs.

use super::{Family, Presence, Yarn, rules};
use crate::boundary::BoundaryDtype;
use crate::spec::{Activation, RopeKind};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "gpt-oss",
    rope: RopeKind::Halves,
    boundary: BoundaryDtype::Bf16,
    layer: &[
        rules::ATTENTION,
        rules::QKV_BIAS,
        rules::OUTPUT_BIAS_AND_SINKS,
        rules::MIDDLE_NORM,
        rules::EXPERTS,
        rules::EXPERT_BIAS,
    ],
    reads: &[
        "attention.sliding_window",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
    ],
    qkv_bias: Presence::Always,
    output_bias: true,
    sinks: true,
    activation: Activation::Clamped,
    // The softmax over the chosen ones is the part of the softmax over all, made to add up to 1.
    experts_normalised: true,
    experts_biased: true,
    yarn: Yarn::Exact,
    global_every: Some(2),
    ..Family::BASE
};
