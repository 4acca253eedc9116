//! Files of models whose experts are chosen in groups, behind dense blocks: what is refused, and
//! blocks that nothing uses.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use hearthnet_files::gguf::Value;
use hearthnet_files::spec::{FeedForwardSpec, GroupSpec, LeadingSpec, SharedExpertSpec};
use hearthnet_files::{Manifest, ModelError};
use hearthnet_testkit::rows;

use crate::recurrent_files::{Changes, changed_model, reshaped, set};

fn error(name: &str, changes: &Changes<'_>) -> String {
    changed_model(name, changes).unwrap_err().to_string()
}

#[test]
fn the_first_blocks_are_dense_and_the_others_have_experts() {
    let file = changed_model("glm4moe", &Changes::default()).unwrap();
    let experts = file.spec().experts.unwrap();
    let leading = LeadingSpec { blocks: 1, ffn: 64 };
    assert_eq!(experts.leading, Some(leading));
    assert_eq!(experts.groups, Some(GroupSpec { count: 4, used: 2 }));
    let shared = SharedExpertSpec {
        ffn: 32,
        plain: true,
    };
    assert_eq!(experts.shared, Some(shared));
    assert!(experts.sigmoid && experts.correction && experts.normalise);
    assert_eq!(experts.scale, Some(1.5));
    let widths: Vec<u32> = (0..3).map(|layer| file.spec().block(layer).ffn).collect();
    assert_eq!(widths, [64, 32, 32]);
    let dense = |layer| file.spec().block(layer).feed == FeedForwardSpec::Dense;
    assert_eq!([0, 1, 2].map(dense), [true, false, false]);
    // Features that are off.
    let off = changed_model(
        "glm4moe",
        &Changes {
            metadata: [
                ("glm4moe.expert_group_count", Value::U32(1)),
                ("glm4moe.expert_weights_scale", Value::F32(1.0)),
                ("glm4moe.expert_weights_norm", Value::Bool(false)),
            ]
            .into(),
            ..Changes::default()
        },
    );
    let off = off.unwrap().spec().experts.unwrap();
    assert_eq!((off.groups, off.scale, off.normalise), (None, None, false));
}

#[test]
fn experts_that_cannot_be_chosen_are_refused_by_name() {
    for (key, value, told) in rows! {
        "expert_used_count", Value::U32(9) => "at most the number of experts";
        "expert_used_count", Value::U32(5) => "as many experts as a row uses";
        "expert_group_count", Value::U32(3) => "must divide";
        "expert_group_count", Value::U32(8) => "at least 2 experts in each";
        "expert_group_used_count", Value::U32(5) => "number of groups";
        "expert_group_used_count", Value::U32(0) => "number of groups";
        "leading_dense_block_count", Value::U32(3) => "below the number of blocks";
        "expert_shared_count", Value::U32(1 << 24) => "must be at most";
        "expert_gating_func", Value::U32(1) => "corrects the choice";
        "expert_gating_func", Value::U32(4) => "must be 1 or 2";
        "expert_weights_scale", Value::F32(-1.0) => "positive";
        "expert_weights_norm", Value::U32(1) => "true or false";
    } {
        let full = format!("glm4moe.{key}");
        let error = error("glm4moe", &set(&full, value));
        let named = error.contains(&full) || error.contains("glm4moe.expert_group");
        assert!(named && error.contains(told), "{key} = {value}: {error}");
    }
}

#[test]
fn tensors_that_disagree_with_the_routing_are_refused_by_name() {
    for (name, dims) in [
        ("blk.1.exp_probs_b.bias", &[][..]),
        ("blk.1.exp_probs_b.bias", &[7]),
        ("blk.2.ffn_up_shexp.weight", &[32, 64]),
        ("blk.0.ffn_up.weight", &[32, 32]),
        ("blk.2.ffn_gate_inp.weight", &[32, 9]),
    ] {
        let error = error("glm4moe", &reshaped(name, dims));
        assert!(error.contains(name), "{error}");
    }
    // Experts in the block that has none.
    let leading = set("glm4moe.leading_dense_block_count", Value::U32(2));
    let found = changed_model("glm4moe", &leading);
    assert!(
        matches!(&found, Err(ModelError::MissingTensor { name, .. }) if name.starts_with("blk.1.ffn")),
        "{found:?}"
    );
}

#[test]
fn blocks_for_multi_token_prediction_may_have_tables_of_their_own() {
    let tensors: [(&str, &[u64]); 24] = [
        ("blk.3.attn_norm.weight", &[32]),
        ("blk.3.attn_q.weight", &[32, 64]),
        ("blk.3.attn_k.weight", &[32, 32]),
        ("blk.3.attn_v.weight", &[32, 32]),
        ("blk.3.attn_q.bias", &[64]),
        ("blk.3.attn_k.bias", &[32]),
        ("blk.3.attn_v.bias", &[32]),
        ("blk.3.attn_output.weight", &[64, 32]),
        ("blk.3.attn_q_norm.weight", &[16]),
        ("blk.3.attn_k_norm.weight", &[16]),
        ("blk.3.post_attention_norm.weight", &[32]),
        ("blk.3.ffn_gate_inp.weight", &[32, 8]),
        ("blk.3.exp_probs_b.bias", &[8]),
        ("blk.3.ffn_gate_exps.weight", &[32, 32, 8]),
        ("blk.3.ffn_up_exps.weight", &[32, 32, 8]),
        ("blk.3.ffn_down_exps.weight", &[32, 32, 8]),
        ("blk.3.ffn_gate_shexp.weight", &[32, 32]),
        ("blk.3.ffn_up_shexp.weight", &[32, 32]),
        ("blk.3.ffn_down_shexp.weight", &[32, 32]),
        ("blk.3.nextn.eh_proj.weight", &[64, 32]),
        ("blk.3.nextn.enorm.weight", &[32]),
        ("blk.3.nextn.hnorm.weight", &[32]),
        ("blk.3.nextn.shared_head_norm.weight", &[32]),
        ("blk.3.nextn.embed_tokens.weight", &[32, 64]),
    ];
    let mut changes = Changes {
        metadata: [
            ("glm4moe.block_count", Value::U32(4)),
            ("glm4moe.nextn_predict_layers", Value::U32(1)),
        ]
        .into(),
        tensors: tensors.into(),
        ..Changes::default()
    };
    let output: (&str, &[u64]) = ("blk.3.nextn.shared_head_head.weight", &[32, 64]);
    for has_output in [false, true] {
        if has_output {
            changes.tensors.insert(output.0, output.1);
        }
        let file = changed_model("glm4moe", &changes).unwrap();
        let spec = file.spec();
        assert_eq!((spec.layers, spec.prediction), (3, 1));
        let tables = spec.prediction_tables;
        assert_eq!((tables.embedding, tables.output), (true, has_output));
        let manifest = Manifest::of(&file, &mut |_, _| {});
        assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
        assert_eq!(manifest.tensor(output.0).is_some(), has_output);
    }
    changes
        .tensors
        .insert("blk.3.nextn.embed_tokens.weight", &[32, 63]);
    let told = error("glm4moe", &changes);
    assert!(told.contains("blk.3.nextn.embed_tokens.weight"), "{told}");
}

#[test]
fn latent_sizes_that_disagree_with_tensors_are_refused_by_name() {
    for (key, value, told) in [
        ("attention.kv_lora_rank", 32, "attention.key_length"),
        ("attention.q_lora_rank", 64, "attn_q_a.weight"),
        ("attention.q_lora_rank", 0, "attn_q.weight"),
        ("attention.key_length_mla", 48, "attn_q_b.weight"),
        ("attention.value_length_mla", 16, "attn_v_b.weight"),
        ("attention.value_length_mla", 1 << 24, "value_length_mla"),
        ("attention.key_length_mla", 8, "rope.dimension_count"),
        ("attention.head_count_kv", 4, "must be 1"),
    ] {
        let full = format!("deepseek2.{key}");
        let told_of = error("deepseek3", &set(&full, Value::U32(value)));
        assert!(told_of.contains(told), "{key} = {value}: {told_of}");
    }
    for (name, dims) in [
        ("blk.0.attn_k_b.weight", &[32, 64, 3][..]),
        ("blk.1.attn_k_b.weight", &[64, 32, 4]),
        ("blk.2.attn_v_b.weight", &[]),
        ("blk.2.attn_kv_b.weight", &[64, 256]),
    ] {
        let error = error("deepseek3", &reshaped(name, dims));
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn older_files_hold_keys_and_values_of_each_head_in_one_matrix() {
    let names = [0, 1, 2]
        .map(|layer| ["k_b", "v_b", "kv_b"].map(|part| format!("blk.{layer}.attn_{part}.weight")));
    let mut tensors: BTreeMap<&str, &[u64]> = BTreeMap::new();
    for [keys, values, both] in &names {
        tensors.extend([(&**keys, &[][..]), (values, &[]), (both, &[64, 256])]);
    }
    let changes = Changes {
        metadata: [
            ("deepseek2.attention.head_count_kv", Value::U32(4)),
            ("deepseek2.attention.key_length", Value::U32(40)),
            ("deepseek2.attention.value_length", Value::U32(32)),
        ]
        .into(),
        tensors,
        without: &[
            "deepseek2.attention.key_length_mla",
            "deepseek2.attention.value_length_mla",
        ],
        ..Changes::default()
    };
    for name in ["deepseek2", "deepseek3"] {
        let file = changed_model(name, &changes).unwrap();
        let latent = file.spec().attention.latent.unwrap();
        assert!(!latent.absorbed && latent.values == 32);
        let block = file.spec().block(0);
        assert_eq!((block.key_width(), block.kv_width()), (40, 160));
    }
}
