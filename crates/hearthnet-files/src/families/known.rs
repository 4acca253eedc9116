//! Supported families, one constant each. Keys and tensor names are those of llama.cpp's
//! `llama-arch.cpp`.

use super::family::{DeltaFamily, EncoderFamily, Family, MambaFamily, Presence, Yarn};
use super::rules::*;
use crate::boundary::BoundaryDtype;
use crate::spec::{Activation, QkNorm, RopeKind};

/// Llama: RMSNorm, grouped-query attention with interleaved RoPE, SwiGLU, no biases.
///
/// Also Llama 3.1 to 3.3 (RoPE with factors), Mistral models with YaRN, SmolLM, SmolLM2,
/// TinyLlama, Mistral 7B, Mixtral (experts) and others that converters store under this
/// architecture. Sources: "LLaMA: Open and Efficient Foundation Language Models" (arXiv
/// 2302.13971), "Mixtral of Experts" (2401.04088).
pub(super) const LLAMA: Family = Family {
    layer: &[ATTENTION, FEED_NORM, DENSE, EXPERTS],
    reads: "expert_count expert_used_count attention.sliding_window",
    rope_factors: Presence::IfStored,
    yarn: Yarn::Whole,
    experts_normalised: true,
    ..Family::BASE
};

/// Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and NeoX RoPE. Source: "Qwen2
/// Technical Report" (arXiv 2407.10671).
pub(super) const QWEN2: Family = Family {
    architecture: "qwen2",
    rope: RopeKind::NeoX,
    layer: &[ATTENTION, QKV_BIAS, FEED_NORM, DENSE],
    qkv_bias: Presence::Always,
    yarn: Yarn::Whole,
    ..Family::BASE
};

/// Seed-OSS: Qwen2 with another name of the norm before the feed-forward layer. Source: the model
/// card of Seed-OSS-36B (ByteDance, 2025). Trained in bf16.
pub(super) const SEED_OSS: Family = Family {
    architecture: "seed_oss",
    boundary: BoundaryDtype::Bf16,
    layer: &[ATTENTION, QKV_BIAS, MIDDLE_NORM, DENSE],
    qkv_bias: Presence::IfStored,
    ..QWEN2
};

/// Qwen3: every head of queries and keys is normalised before RoPE; no biases. Source: "Qwen3
/// Technical Report" (arXiv 2505.09388).
pub(super) const QWEN3: Family = Family {
    architecture: "qwen3",
    rope: RopeKind::NeoX,
    layer: &[ATTENTION, QK_NORM, FEED_NORM, DENSE],
    qk_norm: Some(QkNorm::Head),
    yarn: Yarn::Whole,
    ..Family::BASE
};

/// Qwen3-MoE: Qwen3 with experts whose weights are normalised. Source: as for Qwen3.
pub(super) const QWEN3_MOE: Family = Family {
    architecture: "qwen3moe",
    layer: &[ATTENTION, QK_NORM, FEED_NORM, DENSE, EXPERTS],
    reads: "expert_count expert_used_count expert_feed_forward_length",
    experts_normalised: true,
    ..QWEN3
};

/// OLMoE: queries and keys normalised over all heads together; expert weights are those of the
/// softmax over all experts. Source: "OLMoE: Open Mixture-of-Experts Language Models" (arXiv
/// 2409.02060).
pub(super) const OLMOE: Family = Family {
    architecture: "olmoe",
    rope: RopeKind::NeoX,
    layer: &[ATTENTION, QK_NORM, FEED_NORM, DENSE, EXPERTS],
    reads: "expert_count expert_used_count",
    qk_norm: Some(QkNorm::Row),
    ..Family::BASE
};

/// SmolLM3: Llama without RoPE in every fourth block ("NoPE"). Source: "SmolLM3: smol,
/// multilingual, long-context reasoner" (Hugging Face, 2025). Files do not state which blocks;
/// llama.cpp has the same number.
pub(super) const SMOLLM3: Family = Family {
    architecture: "smollm3",
    layer: &[ATTENTION, FEED_NORM, DENSE],
    rope_skip_every: Some(4),
    ..Family::BASE
};

/// Phi-3, Phi-3.5 and Phi-4: fused matrices, LongRoPE, a sliding window in some. Source: "Phi-3
/// Technical Report" (arXiv 2404.14219), "LongRoPE" (2402.13753).
///
/// The model's context selects LongRoPE's factors, not the length of a text: cached keys cannot be
/// rotated again with other factors.
pub(super) const PHI3: Family = Family {
    architecture: "phi3",
    rope: RopeKind::NeoX,
    layer: &[FUSED_ATTENTION, FEED_NORM, FUSED_DENSE],
    reads: "attention.sliding_window rope.scaling.attn_factor",
    long_rope: true,
    ..Family::BASE
};

/// Gemma 2: norms also after attention and feed-forward layer, GELU, soft caps, a scaled
/// embedding, a sliding window in every other block. Source: "Gemma 2: Improving Open Language
/// Models at a Practical Size" (arXiv 2408.00118).
///
/// Trained in bf16; its residual stream exceeds the range of f16.
pub(super) const GEMMA2: Family = Family {
    architecture: "gemma2",
    rope: RopeKind::NeoX,
    boundary: BoundaryDtype::Bf16,
    layer: &[ATTENTION, FEED_NORM, DENSE, POST_NORMS],
    reads: "attention.sliding_window attn_logit_softcapping final_logit_softcapping",
    activation: Activation::Gelu,
    scaled_embedding: true,
    global_every: Some(2),
    // The 27B model.
    scaled_by_width: &[46],
    ..Family::BASE
};

/// Gemma 3 (text part): Gemma 2 with normalised queries and keys instead of capped scores. Five of
/// six blocks have a sliding window, with their own RoPE base. Source: "Gemma 3 Technical Report"
/// (arXiv 2503.19786).
pub(super) const GEMMA3: Family = Family {
    architecture: "gemma3",
    layer: &[ATTENTION, QK_NORM, FEED_NORM, DENSE, POST_NORMS],
    reads: "attention.sliding_window final_logit_softcapping rope.freq_base_swa",
    qk_norm: Some(QkNorm::Head),
    rope_local_theta: Some(10_000.0),
    global_every: Some(6),
    // The 27B model.
    scaled_by_width: &[62],
    ..GEMMA2
};

/// Gemma 4 (text part): blocks with a window have narrower heads, and other numbers of them, than
/// global blocks, which rotate a quarter of each head. In the larger models, the values of global
/// blocks are their keys. In 26B-A4B, experts are a branch beside a dense feed-forward layer. In
/// E2B and E4B, the last blocks use keys and values of earlier ones, and each block has an input of
/// its own for each token. Source: the model cards of Gemma 4 (Google, 2026), and `transformers`.
///
/// Files do not state that scores are not scaled. A file has RoPE's factors, which are 1 for
/// rotated pairs and 1e30 for the others.
pub(super) const GEMMA4: Family = Family {
    architecture: "gemma4",
    layer: &[
        QUERIES,
        KEYS,
        VALUES,
        FEED_NORM,
        DENSE,
        PARALLEL_EXPERTS,
        POST_NORMS,
        PER_LAYER_INPUT,
        BLOCK_SCALE,
    ],
    reads: "attention.sliding_window final_logit_softcapping rope.freq_base_swa \
        attention.key_length_swa attention.value_length_swa rope.dimension_count_swa \
        attention.sliding_window_pattern attention.shared_kv_layers \
        embedding_length_per_layer_input expert_count expert_used_count \
        expert_feed_forward_length",
    qk_norm: Some(QkNorm::Head),
    attention_scale: Some(1.0),
    value_norm: true,
    rope_factors: Presence::Always,
    experts_normalised: true,
    // The file states it.
    global_every: None,
    scaled_by_width: &[],
    ..GEMMA3
};

/// Granite 3: Llama with constant factors of embedding, residual stream, scores and logits.
/// Source: "Granite 3.0 Language Models" (IBM, 2024).
pub(super) const GRANITE: Family = Family {
    architecture: "granite",
    layer: &[ATTENTION, FEED_NORM, DENSE],
    reads: "attention.scale embedding_scale residual_scale logit_scale",
    ..Family::BASE
};

/// GLM-4-0414 (2025): norms also after attention and feed-forward layer, gate and up in one
/// matrix, RoPE on half of each head. Source: "ChatGLM: A Family of Large Language Models from
/// GLM-130B to GLM-4" (arXiv 2406.12793) and the model cards of GLM-4-0414.
///
/// Trained in bf16; its residual stream exceeds the range of f16.
pub(super) const GLM4: Family = Family {
    architecture: "glm4",
    boundary: BoundaryDtype::Bf16,
    layer: &[ATTENTION, QKV_BIAS, FEED_NORM, FUSED_DENSE, POST_NORMS],
    qkv_bias: Presence::IfStored,
    ..Family::BASE
};

/// gpt-oss: experts with biases and a clamped SwiGLU, a sink for each head, biases in all
/// projections, a sliding window in every other block, YaRN. Source: "gpt-oss-120b & gpt-oss-20b
/// Model Card" (OpenAI, 2025; arXiv 2508.10925) and the code published with it.
///
/// YaRN's ramp begins and ends between two pairs in that code and in `transformers`; llama.cpp
/// uses whole pairs, as for all families. Files do not state it.
///
/// Trained in bf16; its residual stream exceeds the range of f16.
pub(super) const GPT_OSS: Family = Family {
    architecture: "gpt-oss",
    rope: RopeKind::NeoX,
    boundary: BoundaryDtype::Bf16,
    layer: &[
        ATTENTION,
        QKV_BIAS,
        OUTPUT_BIAS,
        SINKS,
        MIDDLE_NORM,
        EXPERTS,
        EXPERT_BIAS,
    ],
    reads: "attention.sliding_window expert_count expert_used_count expert_feed_forward_length",
    qkv_bias: Presence::Always,
    activation: Activation::Clamped,
    // A softmax over the chosen experts equals the softmax over all experts, normalised to 1.
    experts_normalised: true,
    yarn: Yarn::Exact,
    global_every: Some(2),
    ..Family::BASE
};

/// MiniCPM3: latent attention, and constant factors of embedding, residual stream and logits as in
/// the first MiniCPM. Sources: "MiniCPM: Unveiling the Potential of Small Language Models" (arXiv
/// 2404.06395), "DeepSeek-V2" (2405.04434) for the attention, and the model card of MiniCPM3-4B.
///
/// Files state neither the factors nor the epsilon of the norms in attention. The factors are those
/// of the published model and of llama.cpp. The epsilon is that of the published code and of
/// `transformers`; llama.cpp uses the epsilon of the other norms.
pub(super) const MINICPM3: Family = Family {
    architecture: "minicpm3",
    rope: RopeKind::NeoX,
    layer: &[
        LATENT_NORM,
        LATENT_QUERIES,
        LATENT_KEYS,
        LATENT_UP,
        LATENT_OUTPUT,
        FEED_NORM,
        DENSE,
    ],
    reads: "attention.q_lora_rank attention.kv_lora_rank",
    latent_norm_eps: Some(1e-6),
    embedding_scale: Some(12.0),
    depth_scale: Some(1.4),
    logits_by_width: Some(256.0),
    long_rope: true,
    ..Family::BASE
};

/// Mistral Small 3.1 and Ministral 3 (text part): Llama with YaRN, whose amplitude is cancelled,
/// and a query factor that grows with the position. Source: the model cards of Mistral-Small-3.1
/// and Ministral-3.
pub(super) const MISTRAL3: Family = Family {
    architecture: "mistral3",
    layer: &[ATTENTION, FEED_NORM, DENSE],
    reads: "attention.temperature_scale rope.scaling.yarn_log_multiplier",
    yarn: Yarn::Whole,
    ..Family::BASE
};

/// Qwen3.5 and Qwen3.6, dense (text part): three of four blocks have a gated delta rule; the others
/// have attention with an output gate and RoPE on a quarter of each head. Sources: "Gated Delta
/// Networks" (arXiv 2412.06464), and the model cards of Qwen3-Next and Qwen3.5.
///
/// The epsilon of the norms of queries and keys in the delta rule is that of the published code and
/// of `transformers`; llama.cpp uses the epsilon of the other norms. Trained in bf16.
pub(super) const QWEN35: Family = Family {
    architecture: "qwen35",
    rope: RopeKind::NeoX,
    boundary: BoundaryDtype::Bf16,
    layer: &[
        GATED_ATTENTION,
        QK_NORM,
        DELTA,
        DELTA_SCORES,
        MIDDLE_NORM,
        DENSE,
    ],
    reads: "full_attention_interval ssm.conv_kernel ssm.state_size ssm.group_count \
        ssm.time_step_rank ssm.inner_size nextn_predict_layers",
    qk_norm: Some(QkNorm::Head),
    output_gate: true,
    delta: Some(DeltaFamily {
        tiled: true,
        norm_eps: 1e-6,
    }),
    yarn: Yarn::Whole,
    ..Family::BASE
};

/// Qwen3.5 and Qwen3.6 with experts, one of which all rows go through. Sources: as for Qwen3.5.
pub(super) const QWEN35_MOE: Family = Family {
    architecture: "qwen35moe",
    layer: &[
        GATED_ATTENTION,
        QK_NORM,
        DELTA,
        DELTA_SCORES,
        MIDDLE_NORM,
        DENSE,
        EXPERTS,
        SHARED_SCORE,
        SHARED_EXPERT,
    ],
    reads: "full_attention_interval ssm.conv_kernel ssm.state_size ssm.group_count \
        ssm.time_step_rank ssm.inner_size nextn_predict_layers expert_count expert_used_count \
        expert_feed_forward_length expert_shared_feed_forward_length",
    experts_normalised: true,
    ..QWEN35
};

/// Qwen3-Next: as Qwen3.5 with experts, but value heads are in the order of their key heads, and
/// the two scores of the delta rule have one matrix. Source: the model card of Qwen3-Next.
pub(super) const QWEN3_NEXT: Family = Family {
    architecture: "qwen3next",
    layer: &[
        GATED_ATTENTION,
        QK_NORM,
        DELTA,
        FUSED_DELTA_SCORES,
        MIDDLE_NORM,
        DENSE,
        EXPERTS,
        SHARED_SCORE,
        SHARED_EXPERT,
    ],
    delta: Some(DeltaFamily {
        tiled: false,
        norm_eps: 1e-6,
    }),
    ..QWEN35_MOE
};

/// LFM2 and LFM2.5: most blocks have a gated short convolution, the others attention with
/// normalised queries and keys. Source: "LFM2 Technical Report" (arXiv 2511.23404). Trained in
/// bf16.
pub(super) const LFM2: Family = Family {
    architecture: "lfm2",
    rope: RopeKind::NeoX,
    boundary: BoundaryDtype::Bf16,
    layer: &[ATTENTION, QK_NORM, GATED_CONVOLUTION, FEED_NORM, DENSE],
    output_norm: EMBEDDING_NORM,
    reads: "shortconv.l_cache",
    qk_norm: Some(QkNorm::Head),
    convolution: true,
    ..Family::BASE
};

/// LFM2 and LFM2.5 with experts behind dense first blocks, chosen by sigmoids with a correction.
/// Source: as for LFM2.
///
/// `transformers` adds 1e-6 to the sum by which weights are divided; llama.cpp does not.
pub(super) const LFM2_MOE: Family = Family {
    architecture: "lfm2moe",
    layer: &[
        ATTENTION,
        QK_NORM,
        GATED_CONVOLUTION,
        FEED_NORM,
        DENSE,
        EXPERTS,
        ROUTER_CORRECTION,
    ],
    reads: "shortconv.l_cache expert_count expert_used_count expert_feed_forward_length \
        leading_dense_block_count expert_gating_func",
    experts_normalised: true,
    correction: Presence::Always,
    ..LFM2
};

/// GLM-4.5 and 4.6 (GLM-4-MoE): dense first blocks, then experts that are chosen by sigmoids with
/// a correction, beside one that all rows go through; RoPE on half of each head. The largest model
/// normalises queries and keys. Source: "GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation
/// Models" (arXiv 2508.06471). Trained in bf16.
pub(super) const GLM4_MOE: Family = Family {
    architecture: "glm4moe",
    rope: RopeKind::NeoX,
    boundary: BoundaryDtype::Bf16,
    layer: &[
        ATTENTION,
        QKV_BIAS,
        QK_NORM,
        MIDDLE_NORM,
        DENSE,
        EXPERTS,
        ROUTER_CORRECTION,
        SHARED_EXPERT,
    ],
    reads: "expert_count expert_used_count expert_feed_forward_length expert_shared_count \
        leading_dense_block_count expert_gating_func expert_weights_norm expert_weights_scale \
        expert_group_count expert_group_used_count nextn_predict_layers",
    qkv_bias: Presence::IfStored,
    qk_norm: Some(QkNorm::Head),
    qk_norm_if_stored: true,
    correction: Presence::Always,
    yarn: Yarn::Whole,
    ..Family::BASE
};

/// DeepSeek-V2 and V3, and models of their shape (V2-Lite, Moonlight, GLM-4.7-Flash): latent
/// attention, dense first blocks, then experts beside one that all rows go through. V2 chooses
/// experts by a softmax, V3 and GLM-4.7 by sigmoids with a correction. Sources: "DeepSeek-V2"
/// (arXiv 2405.04434), "DeepSeek-V3 Technical Report" (2412.19437), and the model card of
/// GLM-4.7-Flash.
///
/// YaRN's correction multiplies the scores. The epsilon of the norms in attention is that of the
/// published code and of `transformers`; llama.cpp uses the epsilon of the other norms. The score
/// of a group of experts of V2 is that of its best expert, as in that code; llama.cpp adds its two
/// best. Trained in bf16.
pub(super) const DEEPSEEK2: Family = Family {
    architecture: "deepseek2",
    boundary: BoundaryDtype::Bf16,
    layer: &[
        LATENT_NORM,
        LATENT_QUERIES,
        LATENT_PLAIN_QUERIES,
        LATENT_KEYS,
        LATENT_UP,
        LATENT_ABSORBED,
        LATENT_OUTPUT,
        FEED_NORM,
        DENSE,
        EXPERTS,
        ROUTER_CORRECTION,
        SHARED_EXPERT,
    ],
    reads: "attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla \
        attention.value_length_mla rope.scaling.yarn_log_multiplier expert_count \
        expert_used_count expert_feed_forward_length expert_shared_count \
        leading_dense_block_count expert_gating_func expert_weights_norm expert_weights_scale \
        expert_group_count expert_group_used_count nextn_predict_layers",
    latent_norm_eps: Some(1e-6),
    correction: Presence::IfStored,
    yarn: Yarn::Whole,
    yarn_scales_scores: true,
    ..Family::BASE
};

/// EmbeddingGemma: Gemma 3 without causal mask, for vectors of texts; two matrices behind the mean
/// of the hidden states. Source: "EmbeddingGemma: Powerful and Lightweight Text Representations"
/// (arXiv 2509.20354).
///
/// Its rows never leave a machine, so they stay in f32 between blocks.
pub(super) const GEMMA_EMBEDDING: Family = Family {
    architecture: "gemma-embedding",
    boundary: BoundaryDtype::F32,
    reads: "attention.sliding_window rope.freq_base_swa attention.causal dense_2_feat_in \
        dense_2_feat_out dense_3_feat_in dense_3_feat_out",
    scaled_by_width: &[],
    encoder: Some(EncoderFamily {
        positions: false,
        token_types: false,
        projection: true,
    }),
    ..GEMMA3
};

/// BERT, and models of its shape for vectors of texts (MiniLM, BGE, E5, mxbai): embeddings of
/// positions and token types, LayerNorm after each addition, biases, GELU without gate. Source:
/// "BERT: Pre-training of Deep Bidirectional Transformers" (arXiv 1810.04805).
///
/// GELU is that of the error function, as in the published models; llama.cpp approximates it by
/// tanh.
pub(super) const BERT: Family = Family {
    architecture: "bert",
    boundary: BoundaryDtype::F32,
    layer: &[
        PLAIN_ATTENTION,
        QKV_BIAS,
        OUTPUT_BIAS,
        UNGATED_DENSE,
        DENSE_BIAS,
        SUM_NORMS,
    ],
    reads: "attention.layer_norm_epsilon attention.causal",
    qkv_bias: Presence::Always,
    activation: Activation::GeluErf,
    // Positions have embeddings.
    rope_skip_every: Some(1),
    encoder: Some(EncoderFamily {
        positions: true,
        token_types: true,
        projection: false,
    }),
    ..Family::BASE
};

/// nomic-embed-text v1 and v1.5: BERT with RoPE, SwiGLU and without biases of matrices. Source:
/// "Nomic Embed: Training a Reproducible Long Context Text Embedder" (arXiv 2402.01613).
pub(super) const NOMIC_BERT: Family = Family {
    architecture: "nomic-bert",
    rope: RopeKind::NeoX,
    layer: &[PLAIN_FUSED_ATTENTION, DENSE, SUM_NORMS],
    qkv_bias: Presence::Never,
    activation: Activation::Silu,
    rope_skip_every: None,
    encoder: Some(EncoderFamily {
        positions: false,
        token_types: true,
        projection: false,
    }),
    ..BERT
};

/// Muse Glimmer (text part): Llama with normalised embeddings, gates of the output of attention, and
/// norms after attention and feed-forward layer. Three of four blocks have a sliding window and
/// RoPE; the others have neither. Source: the model card of Muse-Glimmer-30B (Meta, 2026), and
/// `transformers`.
///
/// The norms of queries and keys have no weights of their own; the converter writes the factor of
/// the queries as weights. Trained in bf16.
pub(super) const MUSE_GLIMMER: Family = Family {
    architecture: "muse-glimmer",
    boundary: BoundaryDtype::Bf16,
    layer: &[
        ATTENTION,
        ATTENTION_GATE,
        QK_NORM,
        FEED_NORM,
        DENSE,
        POST_NORMS,
    ],
    reads: "attention.sliding_window attention.sliding_window_pattern final_logit_softcapping \
        logit_scale",
    qk_norm: Some(QkNorm::Head),
    output_gate: true,
    embedding_norm: true,
    post_norm_eps: Some(1e-8),
    logits_multiplied: true,
    rope_skip_every: Some(4),
    ..Family::BASE
};

/// Granite 4 H, dense and with experts beside one that all rows go through: nine of ten blocks have
/// Mamba-2, the others attention without RoPE; constant factors as in Granite 3. Sources:
/// "Transformers are SSMs" (arXiv 2405.21060) and the model cards of Granite 4 (IBM, 2025). Trained
/// in bf16.
pub(super) const GRANITE_HYBRID: Family = Family {
    architecture: "granitehybrid",
    boundary: BoundaryDtype::Bf16,
    layer: &[ATTENTION, MAMBA, FEED_NORM, DENSE, EXPERTS, SHARED_EXPERT],
    reads: "attention.scale embedding_scale residual_scale logit_scale rope.scaling.finetuned \
        ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size \
        expert_count expert_used_count expert_shared_feed_forward_length",
    experts_normalised: true,
    rope_skip_every: Some(1),
    mamba: Some(MambaFamily { single: false }),
    ..Family::BASE
};

/// Nemotron-H and Nemotron Nano 2: each block has either Mamba-2, or attention without RoPE, or a
/// feed-forward layer without a gate. Source: "Nemotron-H: A Family of Accurate and Efficient Hybrid
/// Mamba-Transformer Models" (arXiv 2504.03624). Trained in bf16.
///
/// `transformers` 5.24 raises the steps of a prompt to at least 0.001, and those of single tokens
/// not; the code published with the models and llama.cpp do neither.
pub(super) const NEMOTRON_H: Family = Family {
    architecture: "nemotron_h",
    boundary: BoundaryDtype::Bf16,
    layer: &[ATTENTION, MAMBA, ONLY_FEED_NORM, UNGATED_DENSE],
    reads: "attention.layer_norm_epsilon \
        ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size",
    activation: Activation::SquaredRelu,
    rope_skip_every: Some(1),
    mamba: Some(MambaFamily { single: true }),
    ..Family::BASE
};

/// Nemotron 3 Nano: Nemotron-H with experts, which are chosen by sigmoids with a correction, beside
/// one that all rows go through. Source: the model card of Nemotron 3 Nano 30B-A3B (NVIDIA, 2025).
pub(super) const NEMOTRON_H_MOE: Family = Family {
    architecture: "nemotron_h_moe",
    layer: &[
        ATTENTION,
        MAMBA,
        ONLY_FEED_NORM,
        UNGATED_EXPERTS,
        ROUTER_CORRECTION,
        UNGATED_SHARED_EXPERT,
    ],
    reads: "attention.layer_norm_epsilon \
        ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size \
        expert_count expert_used_count expert_feed_forward_length expert_shared_count \
        expert_shared_feed_forward_length expert_gating_func expert_weights_norm \
        expert_weights_scale expert_group_count expert_group_used_count",
    correction: Presence::Always,
    ..NEMOTRON_H
};
