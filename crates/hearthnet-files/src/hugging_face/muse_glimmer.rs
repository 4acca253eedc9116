//! Class of Muse Glimmer.

use super::class::{Class, RopeBase, float, integer};
use super::class_base::{BASE, HEADS, SIZES};
use super::names::{ATTENTION, FEED_FORWARD, GEMMA_NORMS, Names, VISION_PREFIXES};
use crate::schema::Scalar::{Number, Text};
use crate::schema::{off, optional_value};

const GATE: Names = &[("attn_gate", "self_attn.gate_proj")];

/// The vision tower is left out.
pub(super) const MUSE_GLIMMER: Class = Class {
    name: "MuseGlimmerForConditionalGeneration",
    model_types: &["muse_glimmer", "muse_glimmer_text"],
    architecture: "muse-glimmer",
    keys: &[
        SIZES,
        HEADS,
        &[
            integer("sliding_window", "attention.sliding_window"),
            float("final_logit_softcapping", "final_logit_softcapping"),
            float("output_multiplier", "logit_scale"),
        ],
    ],
    requirements: &[&[
        optional_value("hidden_activation", &[Text("silu")]),
        off("attention_bias"),
        optional_value("post_norm_eps", &[Number(1e-8)]),
    ]],
    ignored: "image_token_id out_hidden_size projector_hidden_act projector_hidden_size \
        video_token_id vision_config",
    names: &[GATE, ATTENTION, GEMMA_NORMS, FEED_FORWARD],
    prefixes: VISION_PREFIXES,
    others: &[
        "model.vision_tower.",
        "model.vision_adapter.",
        "model.vision_projection.",
    ],
    permuted: true,
    norms_around_zero: true,
    plain_last_norm: true,
    computed_qk_norm: true,
    window_pattern: true,
    rope_base: RopeBase::Required,
    special: &[("eot", "<|eot|>")],
    ..BASE
};
