//! Granite 3: Llama with constant factors of embedding, residual stream, scores and logits.
//! Source: "Granite 3.0 Language Models" (IBM, 2024).

use super::{Family, rules};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "granite",
    layer: &[rules::ATTENTION, rules::FEED_FORWARD],
    reads: &[
        "attention.scale",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
    ],
    ..Family::BASE
};
