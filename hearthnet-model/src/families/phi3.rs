//! Phi-3, Phi-3.5 and Phi-4: fused matrices, LongRoPE, a sliding window in some. Source: "Phi-3
//! Technical Report" (arXiv 2404.14219), "LongRoPE" (2402.13753).
//!
//! Which of LongRoPE's factors apply is decided by the model's context, not by the length of a
//! text: keys that were turned one way cannot be turned another later.

use super::{Family, rules};
use crate::spec::RopeKind;

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "phi3",
    rope: RopeKind::Halves,
    layer: &[rules::FUSED_ATTENTION, rules::FUSED_FEED_FORWARD],
    reads: &["attention.sliding_window", "rope.scaling.attn_factor"],
    long_rope: true,
    ..Family::BASE
};
