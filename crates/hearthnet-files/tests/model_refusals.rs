//! Valid GGUF files that are no runnable models: each is refused with a reason.
#![allow(clippy::unwrap_used, clippy::panic)] // in helpers, where a failure fails the test

use hearthnet_files::gguf::{Gguf, MetadataError, TensorType, Value};
use hearthnet_files::{BoundaryDtype, ModelError, ModelFile, ModelSpec, Pooling};
use hearthnet_testkit::{NewFile, TinyLlama, assert_matches, rows};

/// Tensor as a file describes it.
type Tensor = (String, Vec<u64>, TensorType);

/// The tiny model with other metadata (`None` omits a key) and other tensors.
fn open(
    metadata: &[(&str, Option<Value<'_>>)],
    tensors: &dyn Fn(Tensor) -> Vec<Tensor>,
) -> Result<ModelFile, ModelError> {
    let tiny = Gguf::from_bytes(TinyLlama::default().bytes()).unwrap();
    let is_changed = |key: &str| metadata.iter().any(|(changed, _)| *changed == key);
    let mut file = NewFile::of(&tiny, |key| !is_changed(key));
    for (key, value) in metadata {
        if let Some(value) = value {
            file.writer.set(key, *value).unwrap();
        }
    }
    for info in tiny.tensors() {
        for (name, dims, dtype) in tensors((info.name.clone(), info.dims.clone(), info.dtype)) {
            file.zeros(&name, &dims, dtype);
        }
    }
    ModelFile::from_gguf(file.gguf())
}

fn with(key: &str, value: Value<'_>) -> Result<ModelFile, ModelError> {
    open(&[(key, Some(value))], &|tensor| vec![tensor])
}

fn without(key: &str) -> Result<ModelFile, ModelError> {
    open(&[(key, None)], &|tensor| vec![tensor])
}

fn spec(result: Result<ModelFile, ModelError>) -> ModelSpec {
    result.unwrap().spec().clone()
}

#[test]
fn an_unknown_architecture_is_named_with_those_that_are_known() {
    for name in ["gpt2", "Llama", "", "llama2", "\x1b[31mllama"] {
        let error = with("general.architecture", Value::String(name)).unwrap_err();
        assert_matches!(error, ModelError::UnknownArchitecture { .. });
        let text = error.to_string();
        assert!(
            text.contains("supported are: llama") && !text.contains('\x1b'),
            "{text}"
        );
    }
    for result in [
        without("general.architecture"),
        with("general.architecture", Value::U32(1)),
    ] {
        assert!(matches!(result, Err(ModelError::Metadata(_))));
    }
}

#[test]
fn a_file_of_a_split_model_names_the_first() {
    for count in [Value::U16(2), Value::U32(3)] {
        // Parts after the first have no other metadata.
        for architecture in [Some(Value::String("llama")), None] {
            let keys = [
                ("split.count", Some(count)),
                ("general.architecture", architecture),
            ];
            let error = open(&keys, &|tensor| vec![tensor]).unwrap_err();
            assert!(matches!(error, ModelError::Split { .. }), "{error}");
            assert!(error.to_string().contains("NAME-00001-of-0000"), "{error}");
        }
    }
    spec(with("split.count", Value::U16(1)));
}

#[test]
fn web_pages_and_git_lfs_pointers_are_recognised() {
    for (bytes, said) in rows! {
        "version https://git-lfs.github.com/spec/v1\n" => "git lfs pull";
        "<!DOCTYPE html>" => "web page";
        "" => "empty";
        "PK\x03\x04" => "50, 4b, 03, 04";
    } {
        let error = Gguf::from_bytes(bytes.into()).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn hyperparameters_that_must_be_there_must_be_there() {
    for key in [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        let missing = MetadataError::Missing(key.to_owned());
        assert_matches!(without(key), Err(ModelError::Metadata(error)) if error == missing);
        let error = with(key, Value::String("64")).unwrap_err();
        assert_matches!(error, ModelError::Metadata(MetadataError::Mismatch { .. }));
    }
}

#[test]
fn hyperparameters_that_may_be_missing_have_their_defaults() {
    let whole = spec(with("llama.vocab_size", Value::U64(320)));
    for key in [
        "llama.vocab_size",
        "llama.attention.key_length",
        "llama.attention.value_length",
    ] {
        assert_eq!(spec(without(key)), whole, "{key}");
    }
    assert_eq!(spec(without("llama.rope.dimension_count")), whole);
    assert_eq!(spec(without("llama.rope.freq_base")).rope.theta, 10_000.0);
    // Without its own count, each query head has its own keys, which contradicts the tensors here.
    let error = without("llama.attention.head_count_kv").unwrap_err();
    assert!(matches!(error, ModelError::TensorShape { .. }), "{error}");
}

#[test]
fn hyperparameters_out_of_range_are_refused_by_name() {
    for (key, value) in [
        ("llama.block_count", Value::U32(0)),
        ("llama.block_count", Value::U32(u32::MAX)),
        ("llama.embedding_length", Value::U32(0)),
        ("llama.embedding_length", Value::U32(u32::MAX)),
        ("llama.feed_forward_length", Value::U32(0)),
        ("llama.vocab_size", Value::U32(0)),
        ("llama.context_length", Value::U32(0)),
        ("llama.context_length", Value::U32(1 << 25)),
        ("llama.attention.head_count", Value::U32(0)),
        ("llama.attention.head_count", Value::U32(u32::MAX)),
        ("llama.attention.head_count_kv", Value::U32(0)),
        ("llama.attention.head_count_kv", Value::U32(3)),
        ("llama.attention.value_length", Value::U32(8)),
        ("llama.rope.dimension_count", Value::U32(0)),
        ("llama.rope.dimension_count", Value::U32(15)),
        ("llama.rope.dimension_count", Value::U32(18)),
        ("llama.rope.freq_base", Value::F32(0.5)),
        ("llama.rope.freq_base", Value::F32(-1.0)),
        ("llama.rope.freq_base", Value::F64(1e300)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(0.0)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1.0)),
        ("hearthnet.boundary_dtype", Value::String("f8")),
    ] {
        match with(key, value) {
            Err(ModelError::Hyperparameter { key: named, .. }) => {
                let implied = key == "llama.embedding_length" || named == key;
                assert!(implied, "{key} = {value}: {named}");
            }
            other => panic!("{key} = {value}: {other:?}"),
        }
    }
    for (key, value) in [
        ("llama.rope.freq_base", Value::F32(f32::NAN)),
        (
            "llama.attention.layer_norm_rms_epsilon",
            Value::F32(f32::INFINITY),
        ),
        ("llama.block_count", Value::I32(-1)),
        ("llama.block_count", Value::U64(1 << 32)),
        ("llama.attention.head_count", Value::F32(4.0)),
        ("hearthnet.boundary_dtype", Value::U32(16)),
    ] {
        let error = with(key, value).unwrap_err();
        assert_matches!(error, ModelError::Metadata(MetadataError::Mismatch { .. }));
    }
}

#[test]
fn more_layers_than_the_file_has_are_missed() {
    let error = with("llama.block_count", Value::U32(3)).unwrap_err();
    let expected = "blk.2.attn_norm.weight";
    assert_matches!(&error, ModelError::MissingTensor { name, .. } if name == expected);
    // Fewer layers would leave out weights that the model was trained with.
    let error = with("llama.block_count", Value::U32(1)).unwrap_err();
    assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
}

#[test]
fn features_that_the_engine_does_not_have_are_refused() {
    for (key, value) in [
        ("llama.rope.scaling.type", Value::String("longrope")),
        ("llama.rope.scaling.type", Value::String("dynamic")),
        ("llama.rope.scaling.factor", Value::F32(8.0)),
        ("llama.expert_shared_count", Value::U32(8)),
        ("llama.attention.scale", Value::F32(0.5)),
        ("llama.attention.causal", Value::Bool(false)),
        ("llama.logit_scale", Value::F32(0.5)),
        ("llama.final_logit_softcapping", Value::F32(30.0)),
        ("llama.something.new", Value::U32(1)),
        ("llama.", Value::U32(1)),
    ] {
        let error = with(key, value).unwrap_err();
        assert_matches!(error, ModelError::Unsupported { .. }, "{key}");
        assert!(error.to_string().contains(key), "{error}");
    }
}

#[test]
fn disabled_features_are_accepted() {
    let plain = spec(with("llama.rope.scaling.type", Value::String("none")));
    for (key, value) in [
        ("llama.rope.scaling.factor", Value::F32(1.0)),
        ("llama.expert_count", Value::U32(0)),
        ("llama.attention.causal", Value::Bool(true)),
        ("llama.attention.clamp_kqv", Value::F32(0.0)),
        (
            "llama.tensor_data_layout",
            Value::String("Meta AI original pth"),
        ),
        // Keys outside the architecture's prefix are ignored.
        ("llama2.something", Value::U32(1)),
        ("general.something", Value::U32(1)),
    ] {
        assert_eq!(spec(with(key, value)), plain, "{key}");
    }
}

#[test]
fn a_file_chooses_its_boundary_dtype() {
    for dtype in BoundaryDtype::ALL {
        let key = "hearthnet.boundary_dtype";
        assert_eq!(spec(with(key, Value::String(dtype.name()))).boundary, dtype);
    }
    assert_eq!(
        spec(without("hearthnet.boundary_dtype")).boundary,
        BoundaryDtype::F16
    );
}

#[test]
fn every_tensor_must_be_there_with_its_shape_and_a_type_that_is_computed_with() {
    let names: Vec<String> = open(&[], &|tensor| vec![tensor])
        .unwrap()
        .gguf()
        .tensors()
        .iter()
        .map(|info| info.name.clone())
        .collect();
    assert_eq!(names.len(), 2 * 9 + 2);
    for victim in &names {
        let change = |change: &dyn Fn(Tensor) -> Vec<Tensor>| {
            open(&[], &|tensor| match tensor.0 == *victim {
                true => change(tensor),
                false => vec![tensor],
            })
        };
        let missing = change(&|_| vec![]).unwrap_err();
        assert_matches!(&missing, ModelError::MissingTensor { name, .. } if name == victim);
        let shapes: [fn(&mut Vec<u64>); 2] =
            [|dims| *dims.last_mut().unwrap() *= 2, |dims| dims.push(1)];
        for reshape in shapes {
            let shape = change(&|(name, mut dims, dtype)| {
                reshape(&mut dims);
                vec![(name, dims, dtype)]
            });
            let shape = shape.unwrap_err();
            assert_matches!(
                &shape,
                ModelError::TensorShape { name, .. } | ModelError::Vocabulary { name, .. }
                    if name == victim
            );
        }
        for dtype in [TensorType::F64, TensorType::Q8_1, TensorType::I8] {
            let error = change(&|(name, dims, _)| vec![(name, dims, dtype)]).unwrap_err();
            let says = format!("tensor {victim:?} is stored as {dtype}, which is not supported");
            assert!(error.to_string().starts_with(&says), "{error}");
        }
    }
    // Norms are used in full precision, whatever else is supported.
    let error = open(&[], &|(name, dims, dtype)| {
        let is_norm = name.ends_with("norm.weight");
        vec![(name, dims, if is_norm { TensorType::F16 } else { dtype })]
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("is stored as F16"), "{error}");
}

#[test]
fn unused_tensors_are_refused() {
    for extra in [
        "rope_factors_long.weight",
        "blk.0.attn_q.bias",
        "blk.0.ffn_gate_inp.weight",
        "blk.2.attn_norm.weight",
        "other",
    ] {
        let error = open(&[], &|tensor| match tensor.0 == "output_norm.weight" {
            true => vec![tensor, (extra.to_owned(), vec![8], TensorType::F32)],
            false => vec![tensor],
        })
        .unwrap_err();
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(extra), "{error}");
    }
}

#[test]
fn an_output_matrix_of_its_own_is_used() {
    let model = open(&[], &|tensor| match tensor.0 == "output_norm.weight" {
        true => vec![
            tensor,
            ("output.weight".to_owned(), vec![64, 320], TensorType::F16),
        ],
        false => vec![tensor],
    })
    .unwrap();
    assert!(!model.spec().tied_embedding);
    assert_eq!(
        model.tensor("output.weight").unwrap().dtype,
        TensorType::F16
    );
    assert_eq!(
        model.tensor("token_embd.weight").unwrap().dtype,
        TensorType::Q8_0
    );
}

#[test]
fn a_matrix_that_disagrees_with_the_vocabulary_is_refused_with_both_sizes() {
    const KEY: &str = "tokenizer.ggml.tokens";
    let file = TinyLlama::default().bytes();
    let more = |count: usize| {
        let gguf = Gguf::from_bytes(file.clone()).unwrap();
        let own = gguf.array(KEY).unwrap().unwrap();
        let new: Vec<String> = (0..count).map(|n| format!("<{n}>")).collect();
        let tokens: Vec<&str> = own
            .strings()
            .unwrap()
            .chain(new.iter().map(String::as_str))
            .collect();
        let changed = hearthnet_testkit::with_metadata(&file, &[KEY], |writer| {
            writer.set_strings(KEY, tokens).unwrap();
        });
        ModelFile::from_gguf(Gguf::from_bytes(changed).unwrap())
    };
    more(0).unwrap();
    let error = more(2).unwrap_err();
    assert_matches!(
        error,
        ModelError::Vocabulary {
            rows: 320,
            wanted: 322,
            ..
        }
    );
    let text = error.to_string();
    assert!(
        text.contains("320 rows") && text.contains("322 tokens"),
        "{text}"
    );

    let output = |(name, dims, dtype): Tensor| match name.as_str() {
        "token_embd.weight" => {
            let short = vec![dims[0], dims[1] - 8];
            vec![
                (name, dims, dtype),
                ("output.weight".to_owned(), short, dtype),
            ]
        }
        "output.weight" => Vec::new(),
        _ => vec![(name, dims, dtype)],
    };
    let error = open(&[], &output).unwrap_err();
    assert_matches!(
        error,
        ModelError::Vocabulary {
            rows: 312,
            wanted: 320,
            ..
        }
    );
    let text = error.to_string();
    assert!(
        text.contains("output.weight") && text.contains("312"),
        "{text}"
    );
}

#[test]
fn an_unknown_way_of_making_vectors_is_refused() {
    let pooling = |value| with("llama.pooling_type", Value::U32(value)).map(|file| file.pooling());
    for (value, expected) in [
        (0, Pooling::Mean),
        (1, Pooling::Mean),
        (2, Pooling::First),
        (3, Pooling::Last),
    ] {
        assert_eq!(pooling(value).unwrap(), expected);
    }
    assert_eq!(
        without("llama.pooling_type").unwrap().pooling(),
        Pooling::Mean
    );
    for value in [4, 5, u32::MAX] {
        let text = pooling(value).unwrap_err().to_string();
        assert!(
            text.contains("llama.pooling_type") && text.contains("last token"),
            "{text}"
        );
    }
    let wrong = with("llama.pooling_type", Value::String("mean")).unwrap_err();
    assert_matches!(wrong, ModelError::Metadata(MetadataError::Mismatch { .. }));
}
