//! Classes of BERT and its kin, which make vectors of texts.

use super::class::{Class, Key, RopeBase, float_or, integer, integer_or};
use super::class_base::{BASE, HEADS};
use super::names::Names;
use crate::families::{
    EMBEDDING, EMBEDDING_NORM, EMBEDDING_NORM_BIAS, OUTPUT, POSITION_EMBEDDING, TYPE_EMBEDDING,
};
use crate::schema::Scalar::{Number, Text};
use crate::schema::{off, on, optional_value, require, zero};

const BERT_NAMES: Names = &[
    ("attn_q", "attention.self.query"),
    ("attn_k", "attention.self.key"),
    ("attn_v", "attention.self.value"),
    ("attn_output", "attention.output.dense"),
    ("attn_output_norm", "attention.output.LayerNorm"),
    ("ffn_up", "intermediate.dense"),
    ("ffn_down", "output.dense"),
    ("layer_output_norm", "output.LayerNorm"),
];
/// The published files have none; with it, the head of another task.
const BERT_OUTPUT: (&str, &str) = (OUTPUT, "cls.predictions.decoder.weight");

/// Heads of other tasks are left out, as by the converter.
pub(super) const BERT: Class = Class {
    name: "BertModel",
    model_types: &["bert"],
    architecture: "bert",
    keys: &[&[
        integer("num_hidden_layers", "block_count"),
        integer("max_position_embeddings", "context_length"),
        integer("hidden_size", "embedding_length"),
        integer("intermediate_size", "feed_forward_length"),
        integer("num_attention_heads", "attention.head_count"),
        float_or("layer_norm_eps", "attention.layer_norm_epsilon", 1e-12),
    ]],
    requirements: &[&[
        require("hidden_act", &[Text("gelu")]),
        optional_value("position_embedding_type", &[Text("absolute")]),
        off("is_decoder"),
    ]],
    ignored: "attention_probs_dropout_prob classifier_dropout hidden_dropout_prob",
    names: &[BERT_NAMES],
    outer: &[
        (EMBEDDING, "embeddings.word_embeddings.weight"),
        (POSITION_EMBEDDING, "embeddings.position_embeddings.weight"),
        (TYPE_EMBEDDING, "embeddings.token_type_embeddings.weight"),
        (EMBEDDING_NORM, "embeddings.LayerNorm.weight"),
        (EMBEDDING_NORM_BIAS, "embeddings.LayerNorm.bias"),
        BERT_OUTPUT,
    ],
    blocks: "encoder.layer",
    prefixes: &[("", ""), ("bert.", "")],
    others: &[
        "embeddings.position_ids",
        "bert.embeddings.position_ids",
        "pooler.",
        "bert.pooler.",
        "cls.",
    ],
    token_types: true,
    tied: true,
    always_tied: true,
    rope_base: RopeBase::Usual,
    ..BASE
};

const NOMIC_NAMES: Names = &[
    ("attn_qkv", "attn.Wqkv"),
    ("attn_output", "attn.out_proj"),
    ("attn_output_norm", "norm1"),
    ("ffn_up", "mlp.fc11"),
    ("ffn_gate", "mlp.fc12"),
    ("ffn_down", "mlp.fc2"),
    ("layer_output_norm", "norm2"),
];

const fn or(other: &'static str, key: Key) -> Key {
    Key {
        other: Some(other),
        ..key
    }
}

/// nomic-embed-text v1 and v1.5, with the keys of their own configuration and those of
/// `transformers`. Texts longer than those of the training would need another rotation.
pub(super) const NOMIC_BERT: Class = Class {
    name: "NomicBertModel",
    model_types: &["nomic_bert"],
    architecture: "nomic-bert",
    keys: &[
        HEADS,
        &[
            or("n_layer", integer("num_hidden_layers", "block_count")),
            or(
                "max_trained_positions",
                integer_or("max_position_embeddings", "context_length", 2048),
            ),
            or("n_embd", integer("hidden_size", "embedding_length")),
            or(
                "n_inner",
                integer("intermediate_size", "feed_forward_length"),
            ),
            or(
                "n_head",
                integer("num_attention_heads", "attention.head_count"),
            ),
            or(
                "layer_norm_epsilon",
                float_or("layer_norm_eps", "attention.layer_norm_epsilon", 1e-12),
            ),
        ],
    ],
    requirements: &[&[
        optional_value("hidden_act", &[Text("silu")]),
        optional_value("activation_function", &[Text("swiglu")]),
        off("causal"),
        off("qkv_proj_bias"),
        off("mlp_fc1_bias"),
        off("mlp_fc2_bias"),
        off("prenorm"),
        off("parallel_block"),
        off("use_rms_norm"),
        on("scale_attn_weights"),
        off("scale_attn_by_inverse_layer_idx"),
        optional_value("rotary_emb_fraction", &[Number(1.0)]),
        off("rotary_emb_interleaved"),
        optional_value("rotary_emb_scale_base", &[]),
        zero("moe_every_n_layers"),
    ]],
    ignored: "attention_probs_dropout_prob attn_pdrop classifier_dropout dense_seq_output \
        fused_bias_fc fused_dropout_add_ln hidden_dropout_prob n_positions \
        pad_vocab_size_multiple parallel_block_tied_norm reorder_and_upcast_attn rotary_scaling_factor \
        summary_activation summary_first_dropout summary_proj_to_labels \
        summary_type summary_use_proj use_flash_attn use_xentropy",
    names: &[NOMIC_NAMES],
    outer: &[
        (EMBEDDING, "embeddings.word_embeddings.weight"),
        (TYPE_EMBEDDING, "embeddings.token_type_embeddings.weight"),
        (EMBEDDING_NORM, "emb_ln.weight"),
        (EMBEDDING_NORM_BIAS, "emb_ln.bias"),
        BERT_OUTPUT,
    ],
    blocks: "encoder.layers",
    rope_base: RopeBase::Or(1000.0),
    ..BERT
};
