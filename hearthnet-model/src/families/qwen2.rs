//! Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and the halves of a head
//! turned against each other. Source: "Qwen2 Technical Report" (arXiv 2407.10671).

use super::{Family, Presence, Yarn, rules};
use crate::spec::RopeKind;

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "qwen2",
    rope: RopeKind::Halves,
    layer: &[rules::ATTENTION, rules::QKV_BIAS, rules::FEED_FORWARD],
    qkv_bias: Presence::Always,
    yarn: Yarn::Whole,
    ..Family::BASE
};
