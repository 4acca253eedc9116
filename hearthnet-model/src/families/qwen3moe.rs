//! Qwen3-MoE: Qwen3 with experts whose weights are normalised. Source: "Qwen3 Technical Report"
//! (arXiv 2505.09388).

use super::{Family, Yarn, rules};
use crate::spec::{QkNorm, RopeKind};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "qwen3moe",
    rope: RopeKind::Halves,
    layer: &[
        rules::ATTENTION,
        rules::QK_NORM,
        rules::FEED_FORWARD,
        rules::EXPERTS,
    ],
    reads: &[
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
    ],
    qk_norm: Some(QkNorm::Head),
    experts_normalised: true,
    yarn: Yarn::Whole,
    ..Family::BASE
};
