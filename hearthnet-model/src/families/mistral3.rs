//! Mistral Small 3.1 and Ministral 3, their text: Llama with YaRN, whose amplitude is undone, and
//! queries that grow with the position. Source: the model cards of Mistral-Small-3.1 and
//! Ministral-3; keys as in llama.cpp's `llama-arch.cpp`.

use super::{Family, Yarn, rules};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "mistral3",
    layer: &[rules::ATTENTION, rules::FEED_FORWARD],
    reads: &[
        "attention.temperature_scale",
        "rope.scaling.yarn_log_multiplier",
    ],
    yarn: Yarn::Whole,
    ..Family::BASE
};
