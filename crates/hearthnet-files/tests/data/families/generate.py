"""Makes the tiny models of this directory and their expected results. See README.md.

Usage: generate.py LLAMA_CPP_DIRECTORY [family ...]
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AttentionInterface

HERE = Path(__file__).parent
PROMPT = 24
GENERATED = 64
# Further tokens of the text on which quantised forms are compared.
COMPARED = 64
VOCAB = 64
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
HEADS = dict(SIZES, head_dim=16)
# Blocks 1, 2, 3 and 5 have a gated delta rule, block 4 has attention.
DELTA = dict(
    HEADS,
    num_hidden_layers=5,
    linear_conv_kernel_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
GEMMA4 = dict(
    HEADS,
    num_hidden_layers=4,
    global_head_dim=32,
    sliding_window=7,
    layer_types=["sliding_attention", "full_attention"] * 2,
    final_logit_softcapping=9.0,
    rope_parameters={
        "full_attention": dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
        "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    },
)
EXPERTS = dict(HEADS, intermediate_size=32, num_experts_per_tok=2)
DELTA_EXPERTS = dict(
    DELTA,
    num_experts=5,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
)


# Block 1 is dense, the others have experts in groups, and one that all rows go through.
GROUPED_EXPERTS = dict(
    SIZES,
    num_hidden_layers=3,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
LATENT = dict(GROUPED_EXPERTS, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=32)


# Blocks 1, 2 and 4 have Mamba-2, block 3 has attention.
GRANITE_HYBRID = dict(
    SIZES,
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=16,
    mamba_expand=2,
    embedding_multiplier=3.0,
    residual_multiplier=0.4,
    attention_multiplier=0.2,
    logits_scaling=1.5,
    shared_intermediate_size=64,
)
# Each block has one part. Steps are hardly limited, as in the published code.
NEMOTRON_H = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    mamba_num_heads=8,
    mamba_head_dim=16,
    ssm_state_size=16,
    n_groups=2,
    time_step_min=1e-9,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
MAMBA, ATTENTION = "linear_attention", "full_attention"


# Added to the seed if another draw keeps greedy choices further apart.
SEEDS = {
    "gemma4": 1,
    "gemma4moe": 3,
    "gemma4ple": 6,
    "mistralyarn": 3,
    "qwen3yarn": 3,
    "phi3long": 3,
    "qwen3": 3,
    "qwen3moe": 2,
    "deepseek3": 3,
    "museglimmer": 2,
}


def rope(theta=10000.0, **more):
    return {"rope_type": "default", "rope_theta": theta, **more}


def yarn(theta=10000.0, **more):
    return rope(theta, rope_type="yarn", factor=4.0, original_max_position_embeddings=64, **more)


# Factors of the weights of some models.
SIZES_OF = {
    # Gates and ups of the experts reach the values where they are clamped.
    "gptoss": {"experts.gate_up_proj": 4, "experts.down_proj": 0.25},
    # The embedding of a token is multiplied by 12, and would dominate everything else.
    "minicpm3": {"embed_tokens.weight": 0.125},
    # Scores are not scaled; with larger ones, one value that is rounded the other way moves a logit.
    "gemma4ple": {"k_norm.weight": 0.4},
}


DELTA_FAMILIES = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")

# Name, class before "Config" and "ForCausalLM", hyperparameters.
FAMILIES = {
    "llama31": (
        "Llama",
        dict(
            HEADS,
            rope_parameters=rope(
                500000.0,
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            tie_word_embeddings=True,
        ),
    ),
    "qwen2": ("Qwen2", dict(SIZES, rope_parameters=rope(1e6))),
    "qwen3": ("Qwen3", dict(HEADS, rope_parameters=rope(1e6), tie_word_embeddings=True)),
    "mixtral": (
        "Mixtral",
        dict(EXPERTS, num_local_experts=5, sliding_window=None, rope_parameters=rope(1e6)),
    ),
    "qwen3moe": (
        "Qwen3Moe",
        dict(
            EXPERTS,
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            rope_parameters=rope(1e6),
        ),
    ),
    "olmoe": (
        "Olmoe",
        dict(
            SIZES,
            intermediate_size=32,
            num_experts=5,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            rope_parameters=rope(),
        ),
    ),
    "smollm3": (
        "SmolLM3",
        dict(SIZES, num_hidden_layers=4, rope_parameters=rope(5e6), tie_word_embeddings=True),
    ),
    "mistral": ("Mistral", dict(HEADS, sliding_window=7, rope_parameters=rope())),
    "mistralyarn": (
        "Mistral",
        dict(
            HEADS,
            sliding_window=None,
            rope_parameters=yarn(beta_fast=4.0, beta_slow=0.5, attention_factor=1.25),
        ),
    ),
    "qwen3yarn": (
        "Qwen3",
        dict(HEADS, rope_parameters=yarn(1e6), tie_word_embeddings=True),
    ),
    "gptoss": (
        "GptOss",
        dict(
            EXPERTS,
            num_local_experts=5,
            num_experts_per_tok=3,
            sliding_window=7,
            rope_parameters=yarn(150000.0, beta_fast=8.0, beta_slow=1.0, truncate=False),
        ),
    ),
    # The scales are those of the published model, because files omit them.
    "minicpm3": (
        "MiniCPM3",
        dict(
            SIZES,
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            tie_word_embeddings=True,
            rope_parameters=rope(
                rope_type="longrope",
                original_max_position_embeddings=256,
                short_factor=[1.5, 2.0, 4.0, 8.0],
                long_factor=[1.0, 1.1, 1.2, 1.3],
            ),
        ),
    ),
    "mistral3": (
        "Ministral3",
        dict(
            HEADS,
            rope_parameters=dict(
                yarn(1e6, beta_fast=8.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
                original_max_position_embeddings=8,
                factor=32.0,
                llama_4_scaling_beta=0.3,
            ),
        ),
    ),
    "phi3": (
        "Phi3",
        dict(
            SIZES,
            original_max_position_embeddings=256,
            rope_parameters=rope(original_max_position_embeddings=256, partial_rotary_factor=1.0),
            sliding_window=None,
        ),
    ),
    "phi3long": (
        "Phi3",
        dict(
            SIZES,
            max_position_embeddings=256,
            original_max_position_embeddings=16,
            sliding_window=9,
            rope_parameters=rope(
                rope_type="longrope",
                partial_rotary_factor=1.0,
                original_max_position_embeddings=16,
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.5, 2.0, 4.0, 8.0],
            ),
        ),
    ),
    "gemma2": (
        "Gemma2",
        dict(
            HEADS,
            sliding_window=7,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=9.0,
            rope_parameters=rope(),
        ),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            HEADS,
            intermediate_size=32,
            num_hidden_layers=7,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=7,
            query_pre_attn_scalar=16,
            rope_parameters={
                "full_attention": rope(1e6, rope_type="linear", factor=8.0),
                "sliding_attention": rope(),
            },
        ),
    ),
    # As Gemma 4 31B: heads and key heads differ between blocks; global blocks have no values.
    "gemma4": (
        "Gemma4",
        dict(GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0),
    ),
    # As Gemma 4 26B-A4B.
    "gemma4moe": (
        "Gemma4",
        dict(
            GEMMA4,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=3,
            moe_intermediate_size=32,
        ),
    ),
    # As Gemma 4 E2B: the last two of six blocks use the keys and values of the two before them.
    "gemma4ple": (
        "Gemma4",
        dict(
            GEMMA4,
            num_hidden_layers=6,
            layer_types=["sliding_attention", "full_attention"] * 3,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
        ),
    ),
    "granite": (
        "Granite",
        dict(
            SIZES,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
            logits_scaling=1.5,
            rope_parameters=rope(),
            tie_word_embeddings=True,
        ),
    ),
    "qwen35": ("Qwen3_5", dict(DELTA, rope_parameters=rope(1e6, partial_rotary_factor=0.25))),
    "qwen35moe": (
        "Qwen3_5Moe",
        dict(
            DELTA_EXPERTS,
            linear_num_value_heads=6,
            tie_word_embeddings=True,
            rope_parameters=rope(1e6, partial_rotary_factor=0.25),
        ),
    ),
    "qwen3next": (
        "Qwen3Next",
        dict(
            DELTA_EXPERTS,
            norm_topk_prob=True,
            rope_parameters=rope(partial_rotary_factor=0.5),
        ),
    ),
    "granitehybrid": (
        "GraniteMoeHybrid",
        dict(GRANITE_HYBRID, num_local_experts=0, num_experts_per_tok=0, tie_word_embeddings=True),
    ),
    "granitehybridmoe": (
        "GraniteMoeHybrid",
        dict(
            GRANITE_HYBRID,
            mamba_n_groups=2,
            intermediate_size=32,
            num_local_experts=5,
            num_experts_per_tok=3,
        ),
    ),
    "nemotronh": (
        "NemotronH",
        dict(NEMOTRON_H, layers_block_type=[MAMBA, "mlp", ATTENTION, "mlp", MAMBA, MAMBA]),
    ),
    "nemotronhmoe": (
        "NemotronH",
        dict(
            NEMOTRON_H,
            layers_block_type=[MAMBA, "moe", MAMBA, ATTENTION, "moe"],
            n_routed_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=64,
            routed_scaling_factor=1.5,
        ),
    ),
    "glm4": (
        "Glm4",
        dict(
            HEADS,
            attention_bias=True,
            rope_parameters=rope(partial_rotary_factor=0.5),
        ),
    ),
    "seedoss": ("SeedOss", dict(HEADS, rope_parameters=rope(1e7))),
    "glm4moe": (
        "Glm4Moe",
        dict(
            GROUPED_EXPERTS,
            head_dim=16,
            num_key_value_heads=2,
            attention_bias=True,
            use_qk_norm=True,
            routed_scaling_factor=1.5,
            rope_parameters=rope(1e6, partial_rotary_factor=0.5),
        ),
    ),
    "deepseek2": (
        "DeepseekV2",
        dict(
            LATENT,
            q_lora_rank=None,
            n_shared_experts=2,
            topk_method="group_limited_greedy",
            routed_scaling_factor=1.25,
            rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
    "deepseek3": (
        "DeepseekV3",
        dict(
            LATENT,
            q_lora_rank=32,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=2,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    "museglimmer": (
        "MuseGlimmer",
        dict(
            HEADS,
            num_hidden_layers=4,
            sliding_window=7,
            qk_scale_factor=0.75,
            output_multiplier=0.75,
            final_logit_softcapping=9.0,
            rope_parameters=rope(5e5),
        ),
    ),
    "glm47flash": (
        "Glm4MoeLite",
        dict(LATENT, q_lora_rank=32, n_group=1, topk_group=1, rope_parameters=rope(1e6)),
    ),
    # Feed-forward layers are 64 wide: two thirds of 90, rounded up to a multiple of 32.
    "lfm2": (
        "Lfm2",
        dict(
            SIZES,
            num_hidden_layers=5,
            layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
            intermediate_size=90,
            block_multiple_of=32,
            rope_parameters=rope(1e6),
        ),
    ),
    "lfm2moe": (
        "Lfm2Moe",
        dict(
            SIZES,
            num_hidden_layers=4,
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_L_cache=4,
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            num_dense_layers=1,
            rope_parameters=rope(1e6),
        ),
    ),
}
# Their cache holds the low-rank rows.
LATENT_CACHES = ("deepseek2", "deepseek3", "glm47flash")


def f16_cache(module, query, key, value, attention_mask, **kwargs):
    """The model's own eager attention over keys and values that are rounded to half precision."""
    import importlib

    eager = importlib.import_module(module.__class__.__module__).eager_attention_forward
    if not hasattr(module, "expanded"):
        key, value = (x.half().to(x.dtype) for x in (key, value))
    return eager(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("f16_cache", f16_cache)
transformers.AttentionMaskInterface.register(
    "f16_cache", transformers.masking_utils.eager_mask
)


def build(name):
    family, sizes = FAMILIES[name]
    config_class = getattr(transformers, f"{family}TextConfig", None)
    config_class = config_class or getattr(transformers, f"{family}Config")
    config = config_class(**sizes, attn_implementation="eager")
    kind = f"{family}ForCausalLM"
    if family == "MuseGlimmer":
        # There is no class without a vision tower.
        vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                      pos_emb_height=2, pos_emb_width=2, max_position_embeddings=4, patch_size=2)
        config = transformers.MuseGlimmerConfig(
            text_config=config.to_dict(), vision_config=vision, out_hidden_size=32, projector_hidden_size=8,
            tie_word_embeddings=False, attn_implementation="eager")
        kind = "MuseGlimmerForConditionalGeneration"
    torch.manual_seed(sum(map(ord, name)) + SEEDS.get(name, 0))
    model = getattr(transformers, kind)(config).float().eval()
    # Weights large enough for every feature to matter, and exact in half precision.
    def is_around_zero(key):
        # The norm of a gated delta rule is not.
        if family == "MuseGlimmer":
            return key.endswith("layernorm.weight")
        return family in ("Gemma2", "Gemma3") or family in DELTA_FAMILIES and "linear_attn" not in key

    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape)
            if "norm" in key:
                p.copy_(0.3 * noise + (0 if is_around_zero(key) else 1))
            elif key.endswith("bias") or p.dim() == 1:
                p.copy_(0.5 * noise)
            elif "embed" in key:
                p.copy_(noise * (0.4 if config.tie_word_embeddings else 1))
            else:
                p.copy_(1.5 * noise / p.shape[-1] ** 0.5)
            sizes = SIZES_OF.get(name, {})
            p.mul_(next((size for end, size in sizes.items() if key.endswith(end)), 1))
            p.copy_(p.half().float())
        for key, p in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                p.copy_((0.3 * torch.randn(p.shape)).half())
            elif key.endswith("layer_scalar"):
                p.copy_((0.7 + 0.3 * torch.randn(p.shape).abs()).half().float())
    if name in LATENT_CACHES:
        for module in model.modules():
            if hasattr(module, "expand_kv"):
                round_latents(module)
    return model


def round_latents(module):
    """Rounds low-rank rows to half precision if the attention is `f16_cache`."""
    module.expanded = module.expand_kv

    def expand(*rows):
        if module.config._attn_implementation == "f16_cache":
            rows = [row.half().float() for row in rows]
        return module.expanded(*rows)

    module.expand_kv = expand


@torch.no_grad()
def logits(model, ids, implementation):
    model.set_attn_implementation(implementation)
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy().astype("<f4")


def reference(name, model):
    rng = np.random.default_rng(7)
    ids = [int(i) for i in rng.integers(0, VOCAB, PROMPT)]
    plain, cache = (logits(model, ids, how) for how in ("eager", "f16_cache"))
    again = logits(model, ids, "eager")
    assert (plain == again).all() and (plain != cache).any()
    (HERE / f"{name}.logits").write_bytes(plain.tobytes() + cache.tobytes())
    more = [int(i) for i in rng.integers(0, VOCAB, COMPARED)]
    rows = torch.from_numpy(logits(model, ids + more, "eager"))
    # Logarithms of relevant probabilities are small, and half precision holds them well.
    (HERE / f"{name}.logprobs").write_bytes(rows.double().log_softmax(-1).numpy().astype("<f2").tobytes())
    tokens, margins, all_ids = [], [], list(ids)
    for _ in range(GENERATED):
        last = logits(model, all_ids, "eager")[-1]
        best = int(last.argmax())
        top = np.sort(last)
        margins.append(float(top[-1] - top[-2]))
        tokens.append(best)
        all_ids.append(best)
    return {
        "prompt": ids,
        "more": more,
        "greedy": tokens,
        "margins": [round(m, 4) for m in margins],
        "largest_logit": round(float(np.abs(plain).max()), 3),
        "cache_rounding": float(np.abs(plain - cache).max()),
    }


# Models of which the vectors of the prompt are stored, too.
EMBEDDING = ("qwen3", "gemma3")


@torch.no_grad()
def vectors(name, model, ids):
    """Vectors of a text as `sentence-transformers` makes them: mean, first and last hidden state."""
    found = []
    for implementation in ("eager", "f16_cache"):
        model.set_attn_implementation(implementation)
        base = model.base_model
        states = base(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        pooled = torch.stack([states.mean(0), states[0], states[-1]])
        found.append(torch.nn.functional.normalize(pooled, dim=-1).numpy().astype("<f4"))
    (HERE / f"{name}.vectors").write_bytes(b"".join(part.tobytes() for part in found))


# Name, class, hyperparameters and pooling of models that make vectors of whole texts.
ENCODERS = {
    "gemmaembedding": (
        "Gemma3TextModel",
        dict(
            HEADS,
            intermediate_size=32,
            num_hidden_layers=7,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
            sliding_window=7,
            query_pre_attn_scalar=16,
            use_bidirectional_attention=True,
            rope_parameters={"full_attention": rope(1e6), "sliding_attention": rope()},
        ),
        "mean",
    ),
    "bert": (
        "BertModel",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
        ),
        "cls",
    ),
    "nomicbert": (
        "NomicBertModel",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=2048,
            rope_parameters=rope(1000.0),
        ),
        "mean",
    ),
}
# Values between the two matrices behind the pooled state of gemmaembedding.
BETWEEN = 64
# Tokens of the second text, if the context has room for them: more than one pass of a thread.
LONG = 600


def build_encoder(name):
    family, sizes, _ = ENCODERS[name]
    config = getattr(transformers, family.replace("Model", "Config"))(**sizes, attn_implementation="eager")
    torch.manual_seed(sum(map(ord, name)))
    more = {} if name == "gemmaembedding" else dict(add_pooling_layer=False)
    model = getattr(transformers, family)(config, **more).float().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape)
            if key.endswith("bias"):
                p.copy_(0.3 * noise)
            elif p.dim() == 1:
                p.copy_(0.3 * noise + (0 if name == "gemmaembedding" else 1))
            elif "embed" in key:
                p.copy_(noise * 0.4)
            else:
                p.copy_(1.5 * noise / p.shape[-1] ** 0.5)
            p.copy_(p.half().float())
    return model


def dense(name):
    """Matrices behind the pooled state."""
    if name != "gemmaembedding":
        return []
    torch.manual_seed(3)
    sizes = [(BETWEEN, 32), (32, BETWEEN)]
    return [(torch.randn(out, into) / into**0.5).half().float() for out, into in sizes]


@torch.no_grad()
def encoder_reference(name, model):
    """Texts, and their vectors as `sentence-transformers` makes them of mean, first and last state."""
    rng = np.random.default_rng(7)
    context = model.config.max_position_embeddings
    texts = [[int(i) for i in rng.integers(0, VOCAB, n)] for n in (PROMPT, min(LONG, context))]
    found = []
    for ids in texts:
        for implementation in ("eager", "f16_cache"):
            model.set_attn_implementation(implementation)
            states = model(torch.tensor([ids])).last_hidden_state[0]
            pooled = torch.stack([states.mean(0), states[0], states[-1]])
            for matrix in dense(name):
                pooled = pooled @ matrix.T
            found.append(torch.nn.functional.normalize(pooled, dim=-1).numpy().astype("<f4"))
    plain, cache = found[0], found[1]
    assert (plain != cache).any()
    (HERE / f"{name}.vectors").write_bytes(b"".join(part.tobytes() for part in found))
    return {"texts": texts, "cache_rounding": float(np.abs(plain - cache).max())}


def finish_encoder(name, directory, dtype):
    """Files of a directory of `sentence-transformers` beside those of `transformers`."""
    from safetensors.torch import save_file

    kinds = ["models.Transformer", "models.Pooling", "models.Dense", "models.Dense", "models.Normalize"]
    matrices = dense(name)
    kinds = [kind for kind in kinds if matrices or not kind.endswith("Dense")]
    modules = []
    for index, kind in enumerate(kinds):
        path = "" if index == 0 else f"{index}_{kind.split('.')[1]}"
        modules.append(dict(idx=index, name=str(index), path=path, type=f"sentence_transformers.{kind}"))
    (directory / "modules.json").write_text(json.dumps(modules, indent=1))
    pooling = directory / "1_Pooling"
    pooling.mkdir(exist_ok=True)
    way = ENCODERS[name][2]
    flags = {"mean": "mean_tokens", "cls": "cls_token"}
    modes = {f"pooling_mode_{flag}": way == kind for kind, flag in flags.items()}
    (pooling / "config.json").write_text(json.dumps(dict(word_embedding_dimension=32, **modes)))
    for number, matrix in zip((2, 3), matrices):
        folder = directory / f"{number}_Dense"
        folder.mkdir(exist_ok=True)
        out, into = matrix.shape
        config = dict(in_features=into, out_features=out, bias=False,
                      activation_function="torch.nn.modules.linear.Identity")
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": matrix.to(dtype)}, folder / "model.safetensors", metadata={"format": "pt"})
    if name == "nomicbert":
        # With the keys of the published model, which the converter reads, too.
        path = directory / "config.json"
        config = json.loads(path.read_text())
        theta = config["rope_parameters"]["rope_theta"]
        published = dict(
            activation_function="swiglu", attn_pdrop=0.0, causal=False,
            layer_norm_epsilon=config["layer_norm_eps"], max_trained_positions=2048, mlp_fc1_bias=False,
            mlp_fc2_bias=False, n_embd=config["hidden_size"], n_head=config["num_attention_heads"],
            n_inner=config["intermediate_size"], n_layer=config["num_hidden_layers"], n_positions=8192,
            parallel_block=False, prenorm=False, qkv_proj_bias=False, rotary_emb_base=theta,
            rotary_emb_fraction=1.0, rotary_emb_interleaved=False, rotary_emb_scale_base=None,
            rotary_scaling_factor=None, scale_attn_weights=True, use_rms_norm=False,
        )
        path.write_text(json.dumps({**config, **published}, indent=1, sort_keys=True))


def convert_encoder(directory, name, llama_cpp, out):
    """llama.cpp's converter without the vocabulary, but with its number of token types."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(directory, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    vocab = {"model": {"type": "WordPiece", "vocab": {str(i): i for i in range(VOCAB)}}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(vocab))

    class Converter(kind):
        model_arch = kind.model_arch

        def set_vocab(self):
            if "type_vocab_size" in self.hparams:
                self.gguf_writer.add_token_type_count(self.hparams["type_vocab_size"])

    with torch.inference_mode():
        converter = Converter(directory, gguf.LlamaFileType.MOSTLY_F16, out, eager=True, model_name=name,
                              sentence_transformers_dense_modules=True)
        converter.write()
    (directory / "tokenizer.json").unlink()


def encoders(names, llama_cpp):
    path = HERE / "encoders.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        model = build_encoder(name)
        known[name] = encoder_reference(name, model)
        with tempfile.TemporaryDirectory() as directory:
            directory = Path(directory)
            model.save_pretrained(directory)
            finish_encoder(name, directory, torch.float32)
            convert_encoder(directory, name, llama_cpp, HERE / f"{name}.gguf")
        print(name, known[name]["cache_rounding"])
    path.write_text(json.dumps(known, indent=None, sort_keys=True).replace('}, "', '},\n"') + "\n")


def as_published(directory):
    """Names of the blocks in `config.json` as such models are published; the converter reads no others.

    Returns the converter's options: `AutoConfig` would add experts to models that have none.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "granitemoehybrid":
        kinds = {MAMBA: "mamba", ATTENTION: "attention"}
        config["layer_types"] = [kinds[kind] for kind in config["layer_types"]]
        config["position_embedding_type"] = "nope"
    elif config["model_type"] == "nemotron_h":
        kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
        letters = {MAMBA: "M", ATTENTION: "*", "mlp": "-", "moe": "E"}
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
        config["num_hidden_layers"] = len(kinds)
        if "moe" not in kinds:
            experts = ("moe_", "n_group", "n_routed", "n_shared", "norm_topk", "num_experts", "routed_", "topk_")
            keep = ("n_groups",)
            config = {k: v for k, v in config.items() if k in keep or not k.startswith(experts)}
    else:
        return {}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return {"hparams": config}


def convert(model, name, llama_cpp):
    """llama.cpp's converter without the vocabulary, which these models do not have."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        directory = Path(directory)
        model.save_pretrained(directory)
        more = as_published(directory)
        hparams = ModelBase.load_hparams(directory, False)
        kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        # Gemma's converter only counts the tokens in this file.
        vocab = {"model": {"vocab": {str(i): i for i in range(VOCAB)}}, "added_tokens": []}
        (directory / "tokenizer.json").write_text(json.dumps(vocab))

        class Converter(kind):
            model_arch = kind.model_arch
            # `transformers` saves no blocks for multi-token prediction.
            no_mtp = True

            def set_vocab(self):
                pass

            def set_gguf_parameters(self):
                super().set_gguf_parameters()
                if name == "mistral":
                    # The converter omits the window, because llama.cpp ignores it for this class.
                    self.gguf_writer.add_sliding_window(self.hparams["sliding_window"])

        out = HERE / f"{name}.gguf"
        file_type = gguf.LlamaFileType.MOSTLY_F16
        converter = Converter(directory, file_type, out, eager=True, model_name=name, **more)
        if name == "mistral3":
            # It delegates to another converter.
            converter.impl.set_vocab = lambda: None
        converter.write()


def main():
    llama_cpp = Path(sys.argv[1])
    names = sys.argv[2:] or [*FAMILIES, *ENCODERS]
    encoders([name for name in names if name in ENCODERS], llama_cpp)
    names = [name for name in names if name in FAMILIES]
    path = HERE / "reference.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        model = build(name)
        known[name] = reference(name, model)
        if name in EMBEDDING:
            vectors(name, model, known[name]["prompt"])
        convert(model, name, llama_cpp)
        print(name, {k: v for k, v in known[name].items() if k not in ("prompt", "more", "greedy", "margins")},
              "least margin", min(known[name]["margins"]))
    path.write_text(json.dumps(known, indent=None, sort_keys=True).replace('}, "', '},\n"') + "\n")


if __name__ == "__main__":
    main()
