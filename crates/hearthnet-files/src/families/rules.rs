//! Groups of tensors that form the blocks of families, with the names that converters write.

use super::{ROUTER, Rule};
use crate::spec::Dim::{self, *};
use crate::spec::LayerTensor as T;

const fn rule(tensor: T, name: &'static str, dims: &'static [Dim]) -> Rule {
    Rule { tensor, name, dims }
}

pub(super) const ATTENTION: &[Rule] = &[
    rule(T::AttnNorm, "attn_norm.weight", &[Width]),
    rule(T::AttnQ, "attn_q.weight", &[Width, Queries]),
    rule(T::AttnK, "attn_k.weight", &[Width, Keys]),
    rule(T::AttnV, "attn_v.weight", &[Width, Keys]),
    rule(T::AttnOutput, "attn_output.weight", &[Queries, Width]),
];

pub(super) const LATENT_ATTENTION: &[Rule] = &[
    rule(T::AttnNorm, "attn_norm.weight", &[Width]),
    rule(T::LatentQ, "attn_q_a.weight", &[Width, LatentQueries]),
    rule(T::LatentQNorm, "attn_q_a_norm.weight", &[LatentQueries]),
    rule(T::LatentQUp, "attn_q_b.weight", &[LatentQueries, Queries]),
    rule(
        T::LatentKv,
        "attn_kv_a_mqa.weight",
        &[Width, LatentKeysAndRotary],
    ),
    rule(T::LatentKvNorm, "attn_kv_a_norm.weight", &[LatentKeys]),
    rule(
        T::LatentKvUp,
        "attn_kv_b.weight",
        &[LatentKeys, KeysAndValues],
    ),
    rule(T::AttnOutput, "attn_output.weight", &[Attended, Width]),
];

/// [`ATTENTION`] with queries, keys and values in one matrix.
pub(super) const FUSED_ATTENTION: &[Rule] = &[
    rule(T::AttnNorm, "attn_norm.weight", &[Width]),
    rule(T::AttnQkv, "attn_qkv.weight", &[Width, Qkv]),
    rule(T::AttnOutput, "attn_output.weight", &[Queries, Width]),
];

pub(super) const QKV_BIAS: &[Rule] = &[
    rule(T::AttnQBias, "attn_q.bias", &[Queries]),
    rule(T::AttnKBias, "attn_k.bias", &[Keys]),
    rule(T::AttnVBias, "attn_v.bias", &[Keys]),
];

/// Bias of the attention output, and the sinks of the heads.
pub(super) const OUTPUT_BIAS_AND_SINKS: &[Rule] = &[
    rule(T::AttnOutputBias, "attn_output.bias", &[Width]),
    rule(T::AttnSinks, "attn_sinks.weight", &[Heads]),
];

pub(super) const QK_NORM: &[Rule] = &[
    rule(T::AttnQNorm, "attn_q_norm.weight", &[QueryNorm]),
    rule(T::AttnKNorm, "attn_k_norm.weight", &[KeyNorm]),
];

pub(super) const FEED_FORWARD: &[Rule] = &[
    rule(T::FfnNorm, "ffn_norm.weight", &[Width]),
    rule(T::FfnGate, "ffn_gate.weight", &[Width, Ffn]),
    rule(T::FfnUp, "ffn_up.weight", &[Width, Ffn]),
    rule(T::FfnDown, "ffn_down.weight", &[Ffn, Width]),
];

/// [`FEED_FORWARD`] with gate and up in one matrix.
pub(super) const FUSED_FEED_FORWARD: &[Rule] = &[
    rule(T::FfnNorm, "ffn_norm.weight", &[Width]),
    rule(T::FfnGateUp, "ffn_up.weight", &[Width, TwoFfn]),
    rule(T::FfnDown, "ffn_down.weight", &[Ffn, Width]),
];

/// Router and experts, without the norm before them ([`FEED_FORWARD`] or [`MIDDLE_NORM`]).
pub(super) const EXPERTS: &[Rule] = &[
    rule(T::Router, ROUTER, &[Width, Experts]),
    rule(
        T::ExpertGate,
        "ffn_gate_exps.weight",
        &[Width, Ffn, Experts],
    ),
    rule(T::ExpertUp, "ffn_up_exps.weight", &[Width, Ffn, Experts]),
    rule(
        T::ExpertDown,
        "ffn_down_exps.weight",
        &[Ffn, Width, Experts],
    ),
];

pub(super) const EXPERT_BIAS: &[Rule] = &[
    rule(T::RouterBias, "ffn_gate_inp.bias", &[Experts]),
    rule(T::ExpertGateBias, "ffn_gate_exps.bias", &[Ffn, Experts]),
    rule(T::ExpertUpBias, "ffn_up_exps.bias", &[Ffn, Experts]),
    rule(T::ExpertDownBias, "ffn_down_exps.bias", &[Width, Experts]),
];

/// Norm before the feed-forward layer, if converters name it for its position after attention.
pub(super) const MIDDLE_NORM: &[Rule] = &[rule(T::FfnNorm, "post_attention_norm.weight", &[Width])];

/// Norms of the outputs that a block adds to the residual stream.
pub(super) const POST_NORMS: &[Rule] = &[
    rule(T::AttnPostNorm, "post_attention_norm.weight", &[Width]),
    rule(T::FfnPostNorm, "post_ffw_norm.weight", &[Width]),
];
