//! Files of models with recurrent layers: what is refused, and blocks that nothing uses.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use hearthnet_files::gguf::{TensorType, Value};
use hearthnet_files::spec::DeltaSpec;
use hearthnet_files::{Manifest, ModelError, ModelFile, ModelSpec};
use hearthnet_testkit::NewFile;

/// Changes to a file: metadata, and the lengths of tensors (no lengths remove one).
#[derive(Default)]
pub(crate) struct Changes<'a> {
    pub(crate) metadata: BTreeMap<&'a str, Value<'a>>,
    /// Keys that are left out.
    pub(crate) without: &'a [&'a str],
    pub(crate) kinds: Option<&'a [bool]>,
    /// Key heads of each block of `lfm2`.
    pub(crate) key_heads: Option<&'a [i32]>,
    pub(crate) tensors: BTreeMap<&'a str, &'a [u64]>,
}

const KINDS: &str = "qwen35.attention.recurrent_layers";
const KEY_HEADS: &str = "lfm2.attention.head_count_kv";

fn changed(changes: &Changes<'_>) -> Result<ModelFile, ModelError> {
    changed_model("qwen35", changes)
}

/// A tiny model with changes. Changed tensors are zeros in F32.
pub(crate) fn changed_model(name: &str, changes: &Changes<'_>) -> Result<ModelFile, ModelError> {
    let model = hearthnet_testkit::family(name);
    let from = model.gguf();
    let is_changed = |key: &str| match key {
        KINDS if changes.kinds.is_some() => true,
        KEY_HEADS if changes.key_heads.is_some() => true,
        _ => changes.without.contains(&key) || changes.metadata.contains_key(key),
    };
    let mut file = NewFile::of(from, |key| !is_changed(key));
    for (key, value) in &changes.metadata {
        file.writer.set(key, *value).unwrap();
    }
    if let Some(kinds) = changes.kinds {
        let kinds = kinds.iter().copied();
        file.writer.set_bools(KINDS, kinds).unwrap();
    }
    if let Some(heads) = changes.key_heads {
        file.writer.set_i32s(KEY_HEADS, heads).unwrap();
    }
    for info in from.tensors() {
        if !changes.tensors.contains_key(info.name.as_str()) {
            file.copy(from, info);
        }
    }
    for (name, dims) in &changes.tensors {
        if !dims.is_empty() {
            file.zeros(name, dims, TensorType::F32);
        }
    }
    ModelFile::from_gguf(file.gguf())
}

pub(crate) fn set<'a>(key: &'a str, value: Value<'a>) -> Changes<'a> {
    Changes {
        metadata: [(key, value)].into(),
        ..Changes::default()
    }
}

/// Other lengths of a tensor; none remove it.
pub(crate) fn reshaped<'a>(name: &'a str, dims: &'a [u64]) -> Changes<'a> {
    Changes {
        tensors: [(name, dims)].into(),
        ..Changes::default()
    }
}

#[test]
fn hyperparameters_of_a_recurrence_that_cannot_be_are_refused_by_name() {
    assert!(changed(&Changes::default()).is_ok());
    for (key, value, told) in [
        ("qwen35.ssm.conv_kernel", 300, "at most the context"),
        ("qwen35.ssm.conv_kernel", 0, "between 1"),
        ("qwen35.ssm.group_count", 3, "multiple"),
        ("qwen35.ssm.group_count", 0, "between 1"),
        ("qwen35.ssm.time_step_rank", 0, "multiple"),
        ("qwen35.ssm.inner_size", 65, "multiple"),
        ("qwen35.ssm.state_size", 1 << 24, "16777216"),
        ("qwen35.full_attention_interval", 0, "between 1"),
        ("qwen35.nextn_predict_layers", 6, "below"),
        // The file lists the kinds of blocks as well.
        (
            "qwen35.full_attention_interval",
            3,
            "full_attention_interval",
        ),
    ] {
        let error = changed(&set(key, Value::U32(value)))
            .unwrap_err()
            .to_string();
        assert!(error.contains(told), "{key} = {value}: {error}");
    }
    let kinds = Changes {
        kinds: Some(&[true, true, true, true, true]),
        ..Changes::default()
    };
    let error = changed(&kinds).unwrap_err().to_string();
    assert!(error.contains("recurrent_layers"), "{error}");
}

#[test]
fn hyperparameters_of_mamba_2_that_cannot_be_are_refused_by_name() {
    for (key, value, told) in [
        ("granitehybrid.ssm.conv_kernel", 65, "at most 64"),
        ("granitehybrid.ssm.group_count", 0, "between 1"),
        ("granitehybrid.ssm.group_count", 3, "divide"),
        ("granitehybrid.ssm.time_step_rank", 0, "multiple"),
        ("granitehybrid.ssm.inner_size", 65, "multiple"),
        ("granitehybrid.ssm.state_size", 1 << 24, "16777216"),
        ("granitehybrid.attention.head_count_kv", 2, "each block"),
        ("granitehybrid.block_count", 1 << 31, "each block"),
        ("nemotron_h.feed_forward_length", 64, "each block"),
        ("nemotron_h.nextn_predict_layers", 1, "nextn"),
    ] {
        let name = match key.starts_with("granite") {
            true => "granitehybrid",
            false => "nemotronh",
        };
        assert!(changed_model(name, &Changes::default()).is_ok());
        let error = changed_model(name, &set(key, Value::U32(value)));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(told), "{key} = {value}: {error}");
    }
    let rope = set("granitehybrid.rope.scaling.finetuned", Value::Bool(true));
    let error = changed_model("granitehybrid", &rope).unwrap_err();
    assert!(error.to_string().contains("RoPE"), "{error}");
    for name in ["blk.0.ssm_a", "blk.1.ssm_in.weight", "blk.2.attn_q.weight"] {
        let error = changed_model("granitehybrid", &reshaped(name, &[4, 96])).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn lengths_of_1_at_the_end_of_a_shape_may_be_missing() {
    // As in files that llama.cpp has quantised.
    let changes = reshaped("blk.0.ssm_norm.weight", &[64]);
    assert!(changed_model("granitehybrid", &changes).is_ok());
}

#[test]
fn mixers_of_a_model_are_checked() {
    let spec = changed_model("nemotronh", &Changes::default()).unwrap();
    let with = |change: fn(&mut hearthnet_files::ModelSpec)| {
        let mut spec = spec.spec().clone();
        change(&mut spec);
        spec.check().map_err(|error| error.field)
    };
    assert_eq!(with(|_| ()), Ok(()));
    assert_eq!(with(|spec| spec.single = false), Err("mixers"));
    assert_eq!(with(|spec| spec.mixers.push('M')), Err("mixers"));
    assert_eq!(
        with(|spec| spec.mixers = "M-*-MX".to_owned()),
        Err("mixers")
    );
    assert_eq!(with(|spec| spec.mamba = None), Err("mixers"));
    assert_eq!(with(|spec| spec.prediction = 1), Err("mixers"));
}

#[test]
fn tensors_that_disagree_with_the_state_are_refused_by_name() {
    let name = "blk.0.ssm_conv1d.weight";
    for dims in [&[][..], &[4, 96], &[3, 128], &[128, 4]] {
        let error = changed(&reshaped(name, dims)).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    // Four value heads of 16 become eight of 16.
    let error = changed(&Changes {
        metadata: [
            ("qwen35.ssm.time_step_rank", Value::U32(8)),
            ("qwen35.ssm.inner_size", Value::U32(128)),
        ]
        .into(),
        ..Changes::default()
    });
    assert!(
        matches!(error, Err(ModelError::TensorShape { .. })),
        "{error:?}"
    );
}

#[test]
fn blocks_for_multi_token_prediction_belong_to_the_model_and_are_not_layers() {
    let names: [(&str, &[u64]); 16] = [
        ("blk.5.attn_norm.weight", &[32]),
        ("blk.5.attn_q.weight", &[32, 128]),
        ("blk.5.attn_k.weight", &[32, 32]),
        ("blk.5.attn_v.weight", &[32, 32]),
        ("blk.5.attn_output.weight", &[64, 32]),
        ("blk.5.attn_q_norm.weight", &[16]),
        ("blk.5.attn_k_norm.weight", &[16]),
        ("blk.5.post_attention_norm.weight", &[32]),
        ("blk.5.ffn_gate.weight", &[32, 64]),
        ("blk.5.ffn_up.weight", &[32, 64]),
        ("blk.5.ffn_down.weight", &[64, 32]),
        ("blk.5.nextn.eh_proj.weight", &[64, 32]),
        ("blk.5.nextn.enorm.weight", &[32]),
        ("blk.5.nextn.hnorm.weight", &[32]),
        ("blk.5.nextn.shared_head_norm.weight", &[32]),
        // No change.
        ("blk.0.ssm_dt.bias", &[4]),
    ];
    let changes = Changes {
        metadata: [
            ("qwen35.block_count", Value::U32(6)),
            ("qwen35.nextn_predict_layers", Value::U32(1)),
        ]
        .into(),
        kinds: Some(&[true, true, true, false, true, false]),
        tensors: names.into(),
        ..Changes::default()
    };
    let file = changed(&changes).unwrap();
    assert_eq!((file.spec().layers, file.spec().prediction), (5, 1));
    let manifest = Manifest::of(&file, &mut |_, _| {});
    let decoded = Manifest::decode(&manifest.encode()).unwrap();
    assert_eq!(decoded, manifest);
    assert!(manifest.tensor("blk.5.nextn.enorm.weight").is_some());
    // Without one of the tensors of the head, the file is refused.
    let mut tensors = changes.tensors;
    tensors.remove("blk.5.nextn.hnorm.weight");
    let error = changed(&Changes { tensors, ..changes })
        .unwrap_err()
        .to_string();
    assert!(error.contains("blk.5.nextn.hnorm.weight"), "{error}");
}

#[test]
fn convolutions_that_cannot_be_are_refused_by_name() {
    let error = |changes: &Changes<'_>| changed_model("lfm2", changes).unwrap_err().to_string();
    for (key, value, told) in [
        ("lfm2.shortconv.l_cache", 1, "between 2 and 64"),
        ("lfm2.shortconv.l_cache", 65, "at most the context"),
        ("lfm2.shortconv.l_cache", 4, "shortconv.conv"),
        ("lfm2.context_length", 2, "lfm2.shortconv.l_cache"),
        // All blocks with attention, and none.
        ("lfm2.attention.head_count_kv", 2, "blk.0.attn_q"),
        ("lfm2.attention.head_count_kv", 0, "some blocks attention"),
        ("lfm2.attention.sliding_window", 5, "sliding_window"),
    ] {
        let error = error(&set(key, Value::U32(value)));
        assert!(error.contains(told), "{key} = {value}: {error}");
    }
    for (heads, told) in [
        (
            &[0, 2, 0, 0, 4][..],
            "equal in all blocks where it is not 0",
        ),
        (&[0, 2, 0, 0], "for each block"),
        (&[0, 0, 0, 0, 0], "some blocks attention"),
        (&[0, -2, 0, 0, 2], "for each block"),
        (&[2, 0, 0, 0, 2], "blk.0.attn_q"),
    ] {
        let changes = Changes {
            key_heads: Some(heads),
            ..Changes::default()
        };
        let error = error(&changes);
        assert!(error.contains(told), "{heads:?}: {error}");
    }
    for (name, dims) in [
        ("blk.0.shortconv.conv.weight", &[3, 31][..]),
        ("blk.0.shortconv.in_proj.weight", &[32, 64]),
        ("blk.2.shortconv.out_proj.weight", &[]),
        ("token_embd_norm.weight", &[]),
        // A block has a convolution or attention.
        ("blk.1.shortconv.conv.weight", &[3, 32]),
    ] {
        let error = error(&reshaped(name, dims));
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn a_convolution_is_in_the_manifest_and_its_blocks_are_checked() {
    let file = changed_model("lfm2", &Changes::default()).unwrap();
    let manifest = Manifest::of(&file, &mut |_, _| {});
    let with = |change: fn(&mut ModelSpec)| {
        let mut spec = file.spec().clone();
        change(&mut spec);
        spec.check().map_err(|error| error.field)
    };
    assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
    assert_eq!(with(|_| ()), Ok(()));
    for attention in [vec![], vec![4, 1], vec![1, 1], vec![1, 5], (0..5).collect()] {
        let mut spec = file.spec().clone();
        spec.convolution.as_mut().unwrap().attention = attention;
        assert_eq!(spec.check().unwrap_err().field, "convolution.attention");
    }
    let both = with(|spec| {
        spec.delta = Some(DeltaSpec {
            attention_every: 4,
            convolution: 4,
            key_heads: 2,
            value_heads: 2,
            key_width: 8,
            value_width: 8,
            tiled: true,
            norm_eps: 1e-6,
        });
    });
    assert_eq!(both, Err("convolution.positions"));
}
