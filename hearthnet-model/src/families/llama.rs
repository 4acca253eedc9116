//! Llama: RMSNorm, grouped-query attention with interleaved RoPE, SwiGLU, no biases.
//!
//! Also SmolLM, SmolLM2, TinyLlama, Mistral 7B (without its sliding window) and others that
//! converters store under this architecture. Sources: "LLaMA: Open and Efficient Foundation
//! Language Models" (arXiv 2302.13971); keys and tensor names as in llama.cpp's `llama-arch.cpp`.

use super::{Family, Fixed, Only, Rule};
use crate::boundary::BoundaryDtype;
use crate::spec::{Dim, LayerTensor as T, RopeKind};

/// The family's description.
pub const FAMILY: Family = Family {
    architecture: "llama",
    rope: RopeKind::Interleaved,
    boundary: BoundaryDtype::F16,
    layer: &[
        Rule {
            tensor: T::AttnNorm,
            name: "attn_norm.weight",
            dims: &[Dim::Width],
        },
        Rule {
            tensor: T::AttnQ,
            name: "attn_q.weight",
            dims: &[Dim::Width, Dim::Queries],
        },
        Rule {
            tensor: T::AttnK,
            name: "attn_k.weight",
            dims: &[Dim::Width, Dim::Keys],
        },
        Rule {
            tensor: T::AttnV,
            name: "attn_v.weight",
            dims: &[Dim::Width, Dim::Keys],
        },
        Rule {
            tensor: T::AttnOutput,
            name: "attn_output.weight",
            dims: &[Dim::Queries, Dim::Width],
        },
        Rule {
            tensor: T::FfnNorm,
            name: "ffn_norm.weight",
            dims: &[Dim::Width],
        },
        Rule {
            tensor: T::FfnGate,
            name: "ffn_gate.weight",
            dims: &[Dim::Width, Dim::Ffn],
        },
        Rule {
            tensor: T::FfnUp,
            name: "ffn_up.weight",
            dims: &[Dim::Width, Dim::Ffn],
        },
        Rule {
            tensor: T::FfnDown,
            name: "ffn_down.weight",
            dims: &[Dim::Ffn, Dim::Width],
        },
    ],
    // What a file of this architecture may say beside the common keys, as long as it says nothing
    // that would change the arithmetic.
    fixed: &[
        Fixed {
            key: "rope.scaling.type",
            only: Only::Text("none"),
        },
        Fixed {
            key: "rope.scaling.factor",
            only: Only::Number(1.0),
        },
        Fixed {
            key: "rope.scale_linear",
            only: Only::Number(1.0),
        },
        Fixed {
            key: "rope.scaling.original_context_length",
            only: Only::Anything,
        },
        Fixed {
            key: "rope.scaling.finetuned",
            only: Only::Anything,
        },
        Fixed {
            key: "expert_count",
            only: Only::Number(0.0),
        },
        Fixed {
            key: "expert_used_count",
            only: Only::Number(0.0),
        },
        Fixed {
            key: "attention.sliding_window",
            only: Only::Number(0.0),
        },
        Fixed {
            key: "attention.causal",
            only: Only::Bool(true),
        },
        Fixed {
            key: "attention.clamp_kqv",
            only: Only::Number(0.0),
        },
        Fixed {
            key: "attention.max_alibi_bias",
            only: Only::Number(0.0),
        },
        Fixed {
            key: "use_parallel_residual",
            only: Only::Bool(false),
        },
        Fixed {
            key: "logit_scale",
            only: Only::Number(1.0),
        },
        Fixed {
            key: "residual_scale",
            only: Only::Number(1.0),
        },
        Fixed {
            key: "embedding_scale",
            only: Only::Number(1.0),
        },
        Fixed {
            key: "attn_logit_softcapping",
            only: Only::Number(0.0),
        },
        Fixed {
            key: "final_logit_softcapping",
            only: Only::Number(0.0),
        },
        // Written by early converters; says in which order the *source* file had its rows.
        Fixed {
            key: "tensor_data_layout",
            only: Only::Anything,
        },
    ],
};
