//! Qwen3: every head of queries and keys is normalised before it is turned; no biases. Source:
//! "Qwen3 Technical Report" (arXiv 2505.09388).

use super::{Family, Yarn, rules};
use crate::spec::{QkNorm, RopeKind};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "qwen3",
    rope: RopeKind::Halves,
    layer: &[rules::ATTENTION, rules::QK_NORM, rules::FEED_FORWARD],
    qk_norm: Some(QkNorm::Head),
    yarn: Yarn::Whole,
    ..Family::BASE
};
