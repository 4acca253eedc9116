//! GLM-4 of 2025: norms behind attention and feed-forward layer as well, gate and up in one
//! matrix, half of each head turned. Source: "ChatGLM: A Family of Large Language Models from
//! GLM-130B to GLM-4" (arXiv 2406.12793) and the model cards of GLM-4-0414.
//!
//! Made in bf16, whose range its residual stream needs.

use super::{Family, Presence, rules};
use crate::boundary::BoundaryDtype;

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "glm4",
    boundary: BoundaryDtype::Bf16,
    layer: &[
        rules::ATTENTION,
        rules::QKV_BIAS,
        rules::FUSED_FEED_FORWARD,
        rules::POST_NORMS,
    ],
    qkv_bias: Presence::IfStored,
    post_norms: true,
    ..Family::BASE
};
