//! OLMoE: queries and keys normalised over all heads together, experts with the weights that the
//! softmax over all of them gives. Source: "OLMoE: Open Mixture-of-Experts Language Models" (arXiv
//! 2409.02060).

use super::{Family, rules};
use crate::spec::{QkNorm, RopeKind};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "olmoe",
    rope: RopeKind::Halves,
    layer: &[
        rules::ATTENTION,
        rules::QK_NORM,
        rules::FEED_FORWARD,
        rules::EXPERTS,
    ],
    reads: &["expert_count", "expert_used_count"],
    qk_norm: Some(QkNorm::Row),
    ..Family::BASE
};
