//! Gemma 2: norms behind attention and feed-forward layer as well, GELU, soft caps, a scaled
//! embedding, a sliding window in every other block. Source: "Gemma 2: Improving Open Language
//! Models at a Practical Size" (arXiv 2408.00118).
//!
//! Made in bf16, whose range its residual stream needs.

use super::{Family, rules};
use crate::boundary::BoundaryDtype;
use crate::spec::{Activation, RopeKind};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "gemma2",
    rope: RopeKind::Halves,
    boundary: BoundaryDtype::Bf16,
    layer: &[rules::ATTENTION, rules::FEED_FORWARD, rules::POST_NORMS],
    reads: &[
        "attention.sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ],
    activation: Activation::Gelu,
    post_norms: true,
    scaled_embedding: true,
    global_every: Some(2),
    // The one with 27 billion parameters.
    scaled_by_width: &[46],
    ..Family::BASE
};
