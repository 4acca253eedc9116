//! Gemma 3, its text: as Gemma 2, with queries and keys normalised instead of capped, and five
//! blocks with a sliding window and a RoPE base of their own for each without. Source: "Gemma 3
//! Technical Report" (arXiv 2503.19786).

use super::{Family, rules};
use crate::boundary::BoundaryDtype;
use crate::spec::{Activation, QkNorm, RopeKind};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "gemma3",
    rope: RopeKind::Halves,
    boundary: BoundaryDtype::Bf16,
    layer: &[
        rules::ATTENTION,
        rules::QK_NORM,
        rules::FEED_FORWARD,
        rules::POST_NORMS,
    ],
    reads: &[
        "attention.sliding_window",
        "final_logit_softcapping",
        "rope.freq_base_swa",
    ],
    qk_norm: Some(QkNorm::Head),
    activation: Activation::Gelu,
    post_norms: true,
    scaled_embedding: true,
    rope_local_theta: Some(10_000.0),
    global_every: Some(6),
    // The one with 27 billion parameters.
    scaled_by_width: &[62],
    ..Family::BASE
};
