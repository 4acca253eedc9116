//! SmolLM3: Llama in which every fourth block turns nothing ("NoPE"). Source: "SmolLM3: smol,
//! multilingual, long-context reasoner" (Hugging Face, 2025); files do not say which blocks,
//! llama.cpp has the same number.

use super::{Family, rules};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "smollm3",
    layer: &[rules::ATTENTION, rules::FEED_FORWARD],
    rope_skip_every: Some(4),
    ..Family::BASE
};
