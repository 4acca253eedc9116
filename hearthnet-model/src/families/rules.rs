//! Groups of tensors that families put their blocks together from, named as converters do.

use super::{ROUTER, Rule};
use crate::spec::{Dim, LayerTensor as T};

const fn rule(tensor: T, name: &'static str, dims: &'static [Dim]) -> Rule {
    Rule { tensor, name, dims }
}

/// Norm, queries, keys, values and output.
pub(super) const ATTENTION: &[Rule] = &[
    rule(T::AttnNorm, "attn_norm.weight", &[Dim::Width]),
    rule(T::AttnQ, "attn_q.weight", &[Dim::Width, Dim::Queries]),
    rule(T::AttnK, "attn_k.weight", &[Dim::Width, Dim::Keys]),
    rule(T::AttnV, "attn_v.weight", &[Dim::Width, Dim::Keys]),
    rule(
        T::AttnOutput,
        "attn_output.weight",
        &[Dim::Queries, Dim::Width],
    ),
];

/// Latent attention.
pub(super) const LATENT_ATTENTION: &[Rule] = &[
    rule(T::AttnNorm, "attn_norm.weight", &[Dim::Width]),
    rule(
        T::LatentQ,
        "attn_q_a.weight",
        &[Dim::Width, Dim::LatentQueries],
    ),
    rule(
        T::LatentQNorm,
        "attn_q_a_norm.weight",
        &[Dim::LatentQueries],
    ),
    rule(
        T::LatentQUp,
        "attn_q_b.weight",
        &[Dim::LatentQueries, Dim::Queries],
    ),
    rule(
        T::LatentKv,
        "attn_kv_a_mqa.weight",
        &[Dim::Width, Dim::LatentKeysAndTurned],
    ),
    rule(T::LatentKvNorm, "attn_kv_a_norm.weight", &[Dim::LatentKeys]),
    rule(
        T::LatentKvUp,
        "attn_kv_b.weight",
        &[Dim::LatentKeys, Dim::KeysAndValues],
    ),
    rule(
        T::AttnOutput,
        "attn_output.weight",
        &[Dim::Attended, Dim::Width],
    ),
];

/// As [`ATTENTION`], with queries, keys and values in one matrix.
pub(super) const FUSED_ATTENTION: &[Rule] = &[
    rule(T::AttnNorm, "attn_norm.weight", &[Dim::Width]),
    rule(T::AttnQkv, "attn_qkv.weight", &[Dim::Width, Dim::Qkv]),
    rule(
        T::AttnOutput,
        "attn_output.weight",
        &[Dim::Queries, Dim::Width],
    ),
];

/// Biases of queries, keys and values.
pub(super) const QKV_BIAS: &[Rule] = &[
    rule(T::AttnQBias, "attn_q.bias", &[Dim::Queries]),
    rule(T::AttnKBias, "attn_k.bias", &[Dim::Keys]),
    rule(T::AttnVBias, "attn_v.bias", &[Dim::Keys]),
];

/// Bias of what attention gives, and the heads' sinks.
pub(super) const OUTPUT_BIAS_AND_SINKS: &[Rule] = &[
    rule(T::AttnOutputBias, "attn_output.bias", &[Dim::Width]),
    rule(T::AttnSinks, "attn_sinks.weight", &[Dim::Heads]),
];

/// Norms of queries and keys.
pub(super) const QK_NORM: &[Rule] = &[
    rule(T::AttnQNorm, "attn_q_norm.weight", &[Dim::QueryNorm]),
    rule(T::AttnKNorm, "attn_k_norm.weight", &[Dim::KeyNorm]),
];

/// Norm, gate, up and down.
pub(super) const FEED_FORWARD: &[Rule] = &[
    rule(T::FfnNorm, "ffn_norm.weight", &[Dim::Width]),
    rule(T::FfnGate, "ffn_gate.weight", &[Dim::Width, Dim::Ffn]),
    rule(T::FfnUp, "ffn_up.weight", &[Dim::Width, Dim::Ffn]),
    rule(T::FfnDown, "ffn_down.weight", &[Dim::Ffn, Dim::Width]),
];

/// As [`FEED_FORWARD`], with gate and up in one matrix.
pub(super) const FUSED_FEED_FORWARD: &[Rule] = &[
    rule(T::FfnNorm, "ffn_norm.weight", &[Dim::Width]),
    rule(T::FfnGateUp, "ffn_up.weight", &[Dim::Width, Dim::TwoFfn]),
    rule(T::FfnDown, "ffn_down.weight", &[Dim::Ffn, Dim::Width]),
];

/// Router and experts; the norm before them is that of [`FEED_FORWARD`].
pub(super) const EXPERTS: &[Rule] = &[
    rule(T::Router, ROUTER, &[Dim::Width, Dim::Experts]),
    rule(
        T::ExpertGate,
        "ffn_gate_exps.weight",
        &[Dim::Width, Dim::Ffn, Dim::Experts],
    ),
    rule(
        T::ExpertUp,
        "ffn_up_exps.weight",
        &[Dim::Width, Dim::Ffn, Dim::Experts],
    ),
    rule(
        T::ExpertDown,
        "ffn_down_exps.weight",
        &[Dim::Ffn, Dim::Width, Dim::Experts],
    ),
];

/// Biases of router and experts.
pub(super) const EXPERT_BIAS: &[Rule] = &[
    rule(T::RouterBias, "ffn_gate_inp.bias", &[Dim::Experts]),
    rule(
        T::ExpertGateBias,
        "ffn_gate_exps.bias",
        &[Dim::Ffn, Dim::Experts],
    ),
    rule(
        T::ExpertUpBias,
        "ffn_up_exps.bias",
        &[Dim::Ffn, Dim::Experts],
    ),
    rule(
        T::ExpertDownBias,
        "ffn_down_exps.bias",
        &[Dim::Width, Dim::Experts],
    ),
];

/// The norm before the feed-forward layer, where converters call it by its place behind attention.
pub(super) const MIDDLE_NORM: &[Rule] = &[rule(
    T::FfnNorm,
    "post_attention_norm.weight",
    &[Dim::Width],
)];

/// Norms of what a block adds to the residual stream.
pub(super) const POST_NORMS: &[Rule] = &[
    rule(T::AttnPostNorm, "post_attention_norm.weight", &[Dim::Width]),
    rule(T::FfnPostNorm, "post_ffw_norm.weight", &[Dim::Width]),
];
