//! Every family against Hugging Face's `transformers`, and against itself.
//!
//! `data/families` has a tiny model of each with random weights, made by `transformers` and
//! converted by llama.cpp's converter, with the logits and greedy tokens that `transformers`
//! computes in f32 (see its README). Weights are F16, so that no activation is quantised, and the
//! residual stream is F32 here. Besides the order of sums, the engine only differs by keys and
//! values in half precision. So there are two references: *cache*, in which they are rounded too,
//! which is close, and *plain*, in which they are not.
//!
//! The bounds are a small multiple of the observed values, and far below the effect of a mistake:
//! an error in a norm, an angle, a bias or a factor changes these logits, of about 5, by 0.1 and
//! more.
//!
//! `families/quantised.rs` compares quantised forms.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod encoders;
mod ggml;
mod latent;
mod quantised;
mod vectors;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hearthnet_engine::kernels::Isa;
use hearthnet_engine::{Engine, EngineError, LoadError, Span};
use hearthnet_files::families::is_vector;
use hearthnet_files::gguf::{TensorInfo, TensorType, Value};
use hearthnet_files::manifest::VerifyError;
use hearthnet_files::spec::{
    Activation, AttentionSpec, CacheDtype, DeltaSpec, FeedForwardSpec, MambaSpec, QkNorm,
    RopeScaling, Rotation, ScaleSpec, YarnSpec,
};
use hearthnet_files::{BoundaryDtype, Gguf, Manifest, ModelFile, ModelSpec};
use hearthnet_testkit::{FullModel, family, rewritten};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::engine_common::{
    all_logits, assert_same_bits, embed, engine, forward, hop, ids, in_chunks, logits, open,
    options, run, streams, whole, with_inputs,
};

/// Largest deviation of a logit from *cache*, relative to the largest logit, in the better half of
/// the rows: observed 7.5e-7, and 3.6e-6 with recurrent layers, which `transformers` computes in
/// another order. (In the other half, an f32 rounding error may have moved a key or a value to the
/// next f16.)
const CACHE_BOUND: f32 = 1e-5;
/// The same in all rows: observed 3.7e-5.
const TIPPED_BOUND: f32 = 2e-4;
/// From *plain*, in all rows: observed 1.4e-3.
const PLAIN_BOUND: f32 = 3e-3;

/// Types of weights that the tests of bits store models in.
const TYPES: [TensorType; 5] = [
    TensorType::F16,
    TensorType::Q8_0,
    TensorType::Q4_1,
    TensorType::Q4_0,
    TensorType::F32,
];

#[derive(Deserialize)]
struct Reference {
    prompt: Vec<u32>,
    /// Tokens after the prompt, on which quantised forms are compared.
    more: Vec<u32>,
    greedy: Vec<u32>,
    /// Difference of the best and second-best logit, for each greedy token.
    margins: Vec<f32>,
    largest_logit: f32,
    /// Largest change of a prompt logit by rounding keys and values.
    cache_rounding: f32,
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../hearthnet-files/tests/data/families")
}

fn references() -> BTreeMap<String, Reference> {
    let text = std::fs::read_to_string(data().join("reference.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn floats(path: &Path) -> Vec<f32> {
    floats_of(&std::fs::read(path).unwrap())
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    let (values, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    values.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// The file with other metadata and tensors: `change` gets each tensor's values, and returns the
/// type to store them in.
pub(crate) fn rewrite(
    name: &str,
    metadata: &[(&str, Value<'_>)],
    mut change: impl FnMut(&str, &mut Vec<f32>) -> TensorType,
) -> Result<ModelFile, hearthnet_files::ModelError> {
    reshape(name, metadata, |info, values| change(&info.name, values))
}

/// As [`rewrite`]; `change` may also change a tensor's dimensions.
fn reshape(
    name: &str,
    metadata: &[(&str, Value<'_>)],
    mut change: impl FnMut(&mut TensorInfo, &mut Vec<f32>) -> TensorType,
) -> Result<ModelFile, hearthnet_files::ModelError> {
    let bytes = rewritten(family(name).gguf(), metadata, |info, mut values| {
        let dtype = match change(info, &mut values) {
            _ if is_vector(&info.name, info.dims.len()) => TensorType::F32,
            dtype => dtype,
        };
        let mut bytes = Vec::new();
        ggml::encode(dtype, &values, &mut bytes);
        (dtype, bytes)
    });
    ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap())
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_are_those_of_transformers() {
    let mut bad = Vec::new();
    for (name, reference) in references() {
        let file = family(&name).with_boundary(BoundaryDtype::F32);
        let mut whole = whole(&file, &options(1, Isa::detect()));
        let found = all_logits(&mut whole, &reference.prompt);
        let expected = floats(&data().join(format!("{name}.logits")));
        let (plain, cache) = expected.split_at(expected.len() / 2);
        let vocab = file.spec().vocab as usize;
        let rows = found.chunks(vocab).zip(cache.chunks(vocab));
        let mut rows: Vec<f32> = rows
            .map(|(a, b)| largest_difference(a, b) / reference.largest_logit)
            .collect();
        rows.sort_by(f32::total_cmp);
        let (half, worst) = (rows[rows.len() / 2], rows[rows.len() - 1]);
        let from_plain = largest_difference(&found, plain) / reference.largest_logit;
        let line = format!("{name:10} cache {half:.1e}, {worst:.1e}; plain {from_plain:.1e}");
        println!("{line}");
        if !(half <= CACHE_BOUND && worst <= TIPPED_BOUND && from_plain <= PLAIN_BOUND) {
            bad.push(line);
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    for (name, reference) in references() {
        let file = family(&name).with_boundary(BoundaryDtype::F32);
        let mut whole = whole(&file, &options(1, Isa::detect()));
        let seq = open(&mut whole);
        let mut logits = Vec::new();
        whole.append(seq, &reference.prompt, &mut logits).unwrap();
        // A choice with a margin below the rounding of keys and values may go either way. The test
        // continues with the choice of `transformers`.
        let bound = 2.0 * reference.cache_rounding;
        let mut ties = 0;
        for (nth, (theirs, margin)) in reference.greedy.iter().zip(&reference.margins).enumerate() {
            let best = (0..logits.len() as u32).max_by(|a, b| {
                let [a, b] = [a, b].map(|id| logits[*id as usize]);
                a.total_cmp(&b)
            });
            let best = best.unwrap();
            if *margin > bound {
                assert_eq!(best, *theirs, "{name}, token {nth}");
            } else {
                ties += 1;
                let behind = logits[best as usize] - logits[*theirs as usize];
                assert!(behind <= bound, "{name}, token {nth}: {behind}");
            }
            whole.append(seq, &[*theirs], &mut logits).unwrap();
        }
        println!("{name:11} margin {bound:.4}, {ties} near ties");
        assert_eq!((reference.greedy.len(), reference.margins.len()), (64, 64));
        assert!(
            ties <= 4,
            "{name}: too many near ties to say anything: {ties}"
        );
    }
}

/// Gemma 4 with heads of 32 instead of 16 values in the layers with a window, which are the even
/// ones.
fn with_wide_windows(name: &str) -> ModelFile {
    let keys = [
        "attention.key_length_swa",
        "attention.value_length_swa",
        "rope.dimension_count_swa",
    ];
    let keys = keys.map(|key| format!("gemma4.{key}"));
    let metadata = keys.each_ref().map(|key| (key.as_str(), Value::U32(32)));
    let file = reshape(name, &metadata, |info, values| {
        let mut parts = info
            .name
            .strip_prefix("blk.")
            .unwrap_or_default()
            .split('.');
        let layer = parts.next().unwrap_or_default().parse::<u32>();
        let dim = match parts.next() {
            _ if !layer.is_ok_and(|layer| layer % 2 == 0) => None,
            Some("attn_q" | "attn_k" | "attn_v") => Some(1),
            Some("attn_output" | "attn_q_norm" | "attn_k_norm") => Some(0),
            _ => None,
        };
        if let Some(dim) = dim {
            info.dims[dim] *= 2;
            *values = values.repeat(2);
        }
        TensorType::F16
    });
    file.unwrap()
}

/// Models of families in `data`, with a cache of 8 bits. Two heads of 16 values become one of 32, or
/// heads have twice as many values. `gemma4` uses keys as values, and `gemma4ple` those of earlier
/// layers.
fn q8_cached<'a>() -> impl Iterator<Item = (&'a str, ModelFile)> {
    let names: [&'a str; 6] = [
        "llama31", "mistral", "gemma2", "glm4", "mixtral", "mistral3",
    ];
    let widened = ["gemma4", "gemma4ple"].map(|name| {
        let file = with_wide_windows(name);
        (name, file.with_cache(CacheDtype::Q8_0).unwrap())
    });
    let merged = names.into_iter().map(|name| {
        let architecture = family(name).spec().architecture.clone();
        let keys = [
            ("head_count", 2),
            ("head_count_kv", 1),
            ("key_length", 32),
            ("value_length", 32),
        ];
        let keys = keys.map(|(key, value)| (format!("{architecture}.attention.{key}"), value));
        let keys = keys.each_ref();
        let metadata = keys.map(|(key, value)| (key.as_str(), Value::U32(*value)));
        let file = rewrite(name, &metadata, |_, _| TensorType::F16).unwrap();
        assert_eq!((file.spec().head_dim, file.spec().kv_heads), (32, 1));
        (name, file.with_cache(CacheDtype::Q8_0).unwrap())
    });
    merged.chain(widened)
}

#[test]
fn heads_that_are_not_whole_blocks_of_the_cache_are_refused_by_name() {
    for (name, field) in [
        ("llama31", "head_dim"),
        ("gemma4", "attention.window.heads.head_dim"),
        ("deepseek2", "attention.latent.keys"),
    ] {
        let refused = family(name).with_cache(CacheDtype::Q8_0).map(drop);
        let error = refused.unwrap_err();
        assert_eq!(error.field, field, "{name}: {error}");
        let said = error.to_string();
        assert!(said.contains("attention.cache q8_0"), "{name}: {said}");
    }
}

#[test]
fn every_cut_gives_the_same_bits() {
    let references = references();
    let plain = references.keys().map(|name| (name.as_str(), family(name)));
    for (name, file) in plain.chain(q8_cached()) {
        let reference = &references[name];
        let options = options(2, Isa::detect());
        let mut uncut = whole(&file, &options);
        let (_, expected) = run(&mut uncut, &reference.prompt);
        let inputs = embed(uncut.head(), &reference.prompt);
        let (spec, all_values) = (file.spec(), inputs.len() / reference.prompt.len());
        let (layers, width) = (spec.layers, spec.width as usize);
        // Bit i of a cut tells whether layer i + 1 begins a part.
        for cut in 0..1u32 << (layers - 1) {
            let starts = (1..layers).filter(|layer| cut & (1 << (layer - 1)) != 0);
            if starts
                .map(|layer| spec.check_cut(layer))
                .any(|c| c.is_err())
            {
                continue;
            }
            let mut rows = streams(spec, &inputs, all_values);
            let mut start = 0;
            for end in 1..=layers {
                if end < layers && cut & (1 << (end - 1)) == 0 {
                    continue;
                }
                let mut part = engine(&file, start..end, &options);
                let seq = part.open().unwrap();
                // A prefill, then decoding, with a hop's bytes before each.
                let mut all = Vec::new();
                let count = rows.len() / width;
                let rows_in = with_inputs(spec, &rows, &inputs, &(start..end));
                let values = rows_in.len() / count;
                for batch in [
                    &rows_in[..20 * values],
                    &rows_in[20 * values..21 * values],
                    &rows_in[21 * values..],
                ] {
                    let mut batch_rows = hop(spec, batch);
                    forward(&mut part, seq, &mut batch_rows).unwrap();
                    all.extend(streams(spec, &batch_rows, values));
                }
                rows = all;
                start = end;
            }
            assert_same_bits(&rows, &expected, width, &format!("{name}, cut {cut:b}"));
        }
    }
}

#[test]
fn a_cut_between_a_layer_and_the_keys_that_it_uses_is_refused_with_the_reason() {
    let file = family("gemma4ple");
    let (spec, options) = (file.spec(), options(1, Isa::detect()));
    assert_eq!(spec.together(), 2..6);
    let legal: Vec<u32> = (0..=6).filter(|cut| spec.check_cut(*cut).is_ok()).collect();
    assert_eq!(legal, [0, 1, 2, 6]);
    for range in [0..3, 3..6, 2..5, 4..6] {
        let error = Engine::load(&file, range, &options, &mut |_, _| ()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, LoadError::Cut(_)), "{text}");
        assert!(text.contains("uses the keys and values of layer"), "{text}");
    }
    // Nor may rows run through a part of the layers.
    let mut whole = whole(&file, &options);
    let seq = open(&mut whole);
    let mut rows = embed(whole.head(), &[3]);
    let spans = [Span::new(seq, 0, 1)];
    let ran = whole.engine_mut().forward_layers(0..4, &spans, &mut rows);
    assert!(matches!(ran, Err(EngineError::Cut(_))), "{ran:?}");
}

/// A host can infer the token from the input of any one layer.
#[test]
fn the_input_of_any_single_layer_names_its_token() {
    let file = family("gemma4ple");
    let spec = file.spec();
    let head = hearthnet_engine::Head::load(&file, &options(1, Isa::detect())).unwrap();
    let ids: Vec<u32> = (0..spec.vocab).collect();
    let rows = embed(&head, &ids);
    let (width, own) = (spec.width as usize, spec.row_shape().per_layer as usize);
    let values = spec.row_values(&(0..spec.layers));
    for layer in 0..spec.layers as usize {
        let seen: std::collections::BTreeSet<Vec<u32>> = rows
            .chunks_exact(values)
            .map(|row| &row[width + layer * own..][..own])
            .map(|input| input.iter().map(|value| value.to_bits()).collect())
            .collect();
        assert_eq!(seen.len(), ids.len(), "layer {layer}");
    }
}

#[test]
fn threads_chunks_batches_and_instruction_sets_change_no_bit() {
    for (nth, (name, _)) in references().into_iter().enumerate() {
        // Each family with a type of its own, and one with all of them mixed.
        let mut next = nth;
        let file = rewrite(&name, &[], |tensor, _| {
            next += usize::from(name == "qwen3moe");
            match tensor {
                _ if tensor.contains("ffn_gate_inp") => TensorType::F32,
                // As in the published models.
                _ if name == "gptoss" && tensor.contains("_exps") => TensorType::MXFP4,
                _ => TYPES[next % TYPES.len()],
            }
        });
        check_paths(&name, &file.unwrap());
    }
    for (name, file) in q8_cached() {
        check_paths(name, &file);
    }
}

/// Checks that threads, chunks, batches and instruction sets change no bit.
fn check_paths(name: &str, file: &ModelFile) {
    let width = file.spec().width as usize;
    let prompts = [ids(file, 90, 5), ids(file, 3, 6), ids(file, 41, 7)];
    let mut reference = whole(file, &options(1, Isa::Portable));
    let expected = prompts
        .each_ref()
        .map(|prompt| in_chunks(&mut reference, prompt, 1));
    let expected_logits = logits(reference.head(), &expected[2]);
    for isa in Isa::available() {
        for threads in [1, 3] {
            let what = format!("{name}, {isa}, {threads} threads");
            let mut whole = whole(file, &options(threads, isa));
            for chunk in [7, 90] {
                let rows = in_chunks(&mut whole, &prompts[0], chunk);
                assert_same_bits(&rows, &expected[0], width, &format!("{what}, {chunk}"));
            }
            let found = logits(whole.head(), &expected[2]);
            assert_same_bits(&found, &expected_logits, found.len(), &what);
            // All three in one batch.
            let mut rows = Vec::new();
            let spans = prompts.each_ref().map(|prompt| {
                rows.extend(embed(whole.head(), prompt));
                Span::new(open(&mut whole), 0, prompt.len() as u32)
            });
            whole.engine_mut().forward(&spans, &mut rows).unwrap();
            let rows = streams(
                file.spec(),
                &rows,
                file.spec().row_values(&(0..file.spec().layers)),
            );
            assert_same_bits(&rows, &expected.concat(), width, &format!("{what}, batch"));
        }
    }
}

fn json<T: DeserializeOwned>(text: &str) -> T {
    serde_json::from_str(text).unwrap()
}

#[test]
fn specs_describe_each_family() {
    let spec = |name: &str| family(name).spec().clone();
    let base = spec("granite");
    let attention = |name| spec(name).attention;
    assert_eq!(spec("llama31").rope.scaling, Some(RopeScaling::Factors));
    assert!(attention("qwen2").qkv_bias && !spec("qwen2").tied_embedding);
    assert_eq!(attention("qwen3"), json(r#"{"qk_norm": "head"}"#));
    let qwen3 = spec("qwen3");
    assert_eq!((qwen3.head_dim, qwen3.tied_embedding), (16, true));
    assert_eq!(attention("olmoe").qk_norm, Some(QkNorm::Row));
    for (name, experts) in [
        ("mixtral", r#"{"count": 5, "used": 2, "normalise": true}"#),
        ("qwen3moe", r#"{"count": 5, "used": 3, "normalise": true}"#),
        ("olmoe", r#"{"count": 5, "used": 3, "normalise": false}"#),
    ] {
        assert_eq!((spec(name).experts, spec(name).ffn), (json(experts), 32));
    }
    let smollm3 = spec("smollm3");
    let turned: Vec<Rotation> = (0..4).map(|layer| smollm3.rotation(layer)).collect();
    assert_eq!(turned[2..], [Rotation::Global, Rotation::None]);
    assert_eq!(attention("mistral").window, json(r#"{"positions": 7}"#));
    assert!(matches!(
        spec("phi3long").rope.scaling,
        Some(RopeScaling::Long { long: true, amplitude }) if (amplitude - 2f64.sqrt()).abs() < 1e-6
    ));
    let mistral3 = spec("mistral3");
    let temperature = r#"{"scale": 0.3, "positions": 8}"#;
    assert_eq!(mistral3.attention.temperature, json(temperature));
    assert!(matches!(
        mistral3.rope.scaling,
        Some(RopeScaling::Yarn(yarn)) if yarn.amplitude == 1.0
    ));
    let minicpm3 = spec("minicpm3");
    let latent = r#"{"queries": 32, "keys": 32, "values": 8, "norm_eps": 1e-6}"#;
    assert_eq!(minicpm3.attention.latent, json(latent));
    assert_eq!((minicpm3.head_dim, minicpm3.rope.dims), (16, 8));
    let scaling = r#"{"long": {"long": false, "amplitude": 1.0}}"#;
    assert_eq!(minicpm3.rope.scaling, json(scaling));
    let scales = ScaleSpec {
        residual: Some(1.4 / 2f32.sqrt()),
        ..json(r#"{"embedding": 12.0, "logits": 0.125}"#)
    };
    assert_eq!(minicpm3.scales, scales);
    for (name, queries, ffn) in [
        ("deepseek2", None, 64),
        ("deepseek3", Some(32), 32),
        ("glm47flash", Some(32), 32),
    ] {
        let found = spec(name);
        let latent = found.attention.latent.unwrap();
        assert_eq!(
            (latent.queries, latent.keys, latent.values),
            (queries, 64, 32)
        );
        assert!(latent.absorbed && found.boundary == BoundaryDtype::Bf16);
        let widths = (
            found.heads,
            found.kv_heads,
            found.head_dim,
            found.block(0).key_width(),
        );
        assert_eq!(widths, (4, 1, 40, 72));
        let experts = found.experts.unwrap();
        assert_eq!(experts.sigmoid, name != "deepseek2", "{name}");
        assert_eq!(experts.shared.unwrap().ffn, ffn, "{name}");
    }
    // YaRN's correction is in the scores.
    for (name, correction) in [("deepseek2", 0.0707), ("deepseek3", 0.1)] {
        let found = spec(name);
        assert!(matches!(
            found.rope.scaling,
            Some(RopeScaling::Yarn(yarn)) if yarn.amplitude == 1.0
        ));
        let factor = 1.0 + correction * 4f32.ln();
        let expected = factor * factor / 40f32.sqrt();
        assert!((found.attention.scale.unwrap() - expected).abs() < 1e-6);
    }
    let gptoss = spec("gptoss");
    assert_eq!((gptoss.window(0), gptoss.window(1)), (Some(7), None));
    assert_eq!(gptoss.activation, Activation::Clamped);
    assert_eq!(gptoss.boundary, BoundaryDtype::Bf16);
    let attention = AttentionSpec {
        window: gptoss.attention.window,
        ..json(r#"{"qkv_bias": true, "output_bias": true, "sinks": true}"#)
    };
    assert_eq!(gptoss.attention, attention);
    assert!(gptoss.experts.unwrap().bias && !gptoss.post_norms);
    let yarn = |name| match spec(name).rope.scaling {
        Some(RopeScaling::Yarn(yarn)) => yarn,
        other => panic!("{name} has {other:?}"),
    };
    let usual = YarnSpec {
        factor: 4.0,
        original: 64,
        fast: 32.0,
        slow: 1.0,
        whole: true,
        amplitude: 0.1 * 4f64.ln() + 1.0,
    };
    let own = yarn("qwen3yarn");
    assert!((own.amplitude - usual.amplitude).abs() < 1e-15);
    let usual = YarnSpec {
        amplitude: own.amplitude,
        ..usual
    };
    assert_eq!(own, usual);
    let mistralyarn = YarnSpec {
        fast: 4.0,
        slow: 0.5,
        amplitude: 1.25,
        ..usual
    };
    assert_eq!(yarn("mistralyarn"), mistralyarn);
    let gptoss = YarnSpec {
        fast: 8.0,
        whole: false,
        ..usual
    };
    assert_eq!(yarn("gptoss"), gptoss);
    let gemma2 = spec("gemma2");
    assert_eq!((gemma2.window(0), gemma2.window(1)), (Some(7), None));
    assert!(gemma2.activation == Activation::Gelu && gemma2.post_norms);
    assert_eq!(gemma2.attention.softcap, Some(5.0));
    assert_eq!(gemma2.scales.logit_softcap, Some(9.0));
    assert_eq!(gemma2.boundary, BoundaryDtype::Bf16);
    let gemma3 = spec("gemma3");
    assert_eq!(
        [4, 5].map(|layer| gemma3.rotation(layer)),
        [Rotation::Local, Rotation::Global]
    );
    let scaling = RopeScaling::Linear { factor: 8.0 };
    assert_eq!(gemma3.rope.scaling, Some(scaling));
    for name in ["gemma4", "gemma4moe", "gemma4ple"] {
        let found = spec(name);
        assert_eq!(found.attention.scale, Some(1.0), "{name}");
        assert_eq!(found.rope.scaling, Some(RopeScaling::Factors), "{name}");
        let shared = name == "gemma4ple";
        let heads = |layer| {
            let block = found.block(layer);
            (
                block.kv_heads,
                block.head_dim,
                block.window,
                block.has_values(),
            )
        };
        assert_eq!(heads(0), (2, 16, Some(7), true), "{name}");
        assert_eq!(
            heads(1),
            (1 + u32::from(shared), 32, None, shared),
            "{name}"
        );
        assert!(found.block_scale && found.attention.value_norm, "{name}");
    }
    let experts = r#"{"count": 5, "used": 3, "normalise": true, "shared": {"ffn": 64, "plain": true}, "norms": true}"#;
    assert_eq!(spec("gemma4moe").experts, json(experts));
    let ple = spec("gemma4ple");
    assert_eq!(ple.per_layer, json(r#"{"width": 32}"#));
    assert_eq!(ple.shared_keys, json(r#"{"blocks": 2, "ffn": 128}"#));
    assert_eq!([3, 4, 5].map(|layer| ple.block(layer).keys_of), [3, 2, 3]);
    assert_eq!(base.attention.scale, Some(0.2));
    let scales = r#"{"embedding": 3.0, "residual": 0.4, "logits": 1.5}"#;
    assert_eq!(base.scales, json(scales));
    assert_eq!((spec("glm4").rope.dims, spec("glm4").head_dim), (8, 16));
    for (name, heads, tiled) in [
        ("qwen35", 4, true),
        ("qwen35moe", 6, true),
        ("qwen3next", 4, false),
    ] {
        let found = spec(name);
        let expected = DeltaSpec {
            attention_every: 4,
            convolution: 4,
            key_heads: 2,
            value_heads: heads,
            key_width: 16,
            value_width: 16,
            tiled,
            norm_eps: 1e-6,
        };
        assert_eq!(found.delta, Some(expected), "{name}");
        let attends: Vec<bool> = (0..5).map(|layer| found.block(layer).has_keys()).collect();
        assert_eq!(attends, [false, false, false, true, false], "{name}");
        assert!(found.attention.output_gate && found.attention.qk_norm == Some(QkNorm::Head));
        let shared = found.experts.map(|experts| experts.shared.unwrap().ffn);
        assert_eq!(shared, (name != "qwen35").then_some(64), "{name}");
    }
    let lfm2 = spec("lfm2");
    let convolution = r#"{"positions": 3, "attention": [1, 4]}"#;
    assert_eq!(lfm2.convolution, json(convolution));
    assert_eq!((lfm2.kv_heads, lfm2.ffn), (2, 64));
    let attends: Vec<bool> = (0..5).map(|layer| lfm2.block(layer).has_keys()).collect();
    assert_eq!(attends, [false, true, false, false, true]);
    let moe = spec("lfm2moe");
    let convolution = r#"{"positions": 4, "attention": [2]}"#;
    assert_eq!(moe.convolution, json(convolution));
    let experts = r#"{"count": 5, "used": 3, "normalise": true, "leading": {"blocks": 1, "ffn": 64}, "sigmoid": true, "correction": true}"#;
    assert_eq!((moe.experts, moe.ffn), (json(experts), 32));
}

#[test]
fn blocks_of_muse_glimmer_have_a_window_and_rotation_or_neither() {
    let file = family("museglimmer");
    let spec = file.spec();
    let windows: Vec<_> = (0..4).map(|layer| spec.window(layer)).collect();
    assert_eq!(windows, [Some(7), Some(7), Some(7), None]);
    let turned: Vec<_> = (0..4).map(|layer| spec.rotation(layer)).collect();
    assert_eq!(turned[2..], [Rotation::Global, Rotation::None]);
    assert!(spec.attention.output_gate && spec.attention.gate_matrix && spec.embedding_norm);
    assert_eq!(spec.post_norm_eps, Some(1e-8));
    assert_eq!(spec.scales.logits, Some(4.0 / 3.0));
    // The factor of the queries, and no weights of the keys.
    let norms = ["q", "k"].map(|part| {
        let name = format!("blk.1.attn_{part}_norm.weight");
        floats_of(file.tensor(&name).unwrap().bytes)[0]
    });
    assert_eq!(norms, [0.75, 1.0]);
}

#[test]
fn specs_describe_families_with_mamba_2() {
    for (name, groups, mixers, experts, shared) in [
        ("granitehybrid", 1, "MM*M", None, None),
        ("granitehybridmoe", 2, "MM*M", Some(32), Some(64)),
        ("nemotronh", 2, "M-*-MM", None, None),
        ("nemotronhmoe", 2, "M-M*-", Some(32), Some(64)),
    ] {
        let spec = family(name).spec().clone();
        let single = name.starts_with("nemotron");
        let expected = MambaSpec {
            convolution: 4,
            heads: if single { 8 } else { 4 },
            groups,
            head_width: 16,
            state_rows: 16,
        };
        assert_eq!(spec.mamba, Some(expected), "{name}");
        assert_eq!((&*spec.mixers, spec.single), (mixers, single), "{name}");
        assert_eq!((spec.heads, spec.kv_heads), (4, 2), "{name}");
        assert_eq!(spec.rope.skip_every, Some(1), "{name}");
        assert_eq!(spec.ffn, experts.unwrap_or(64), "{name}");
        let found = spec.experts.map(|experts| experts.shared.unwrap().ffn);
        assert_eq!(found, shared, "{name}");
        for (layer, letter) in (0..).zip(mixers.chars()) {
            let block = spec.block(layer);
            assert_eq!(block.has_keys(), letter == '*', "{name}, {layer}");
            assert_eq!(block.is_recurrent(), letter == 'M', "{name}, {layer}");
            assert_eq!(block.feed == FeedForwardSpec::None, single && letter != '-');
        }
    }
    let nemotron = family("nemotronhmoe").spec().clone();
    assert_eq!(nemotron.activation, Activation::SquaredRelu);
    let experts = nemotron.experts.unwrap();
    assert!(experts.sigmoid && experts.correction && experts.scale == Some(1.5));
}

#[test]
fn a_manifest_covers_every_tensor_and_field_and_proves_each_part() {
    for (name, _) in references() {
        let file = family(&name);
        let manifest = Manifest::of(&file, &mut |_, _| {});
        assert_eq!(manifest.tensors().len(), file.gguf().tensors().len());
        let decoded = Manifest::decode(&manifest.encode()).unwrap();
        assert_eq!(&decoded, &manifest, "{name}");
        let layers = file.spec().layers;
        for layer in 0..layers {
            manifest
                .verify(&file, layer..layer + 1, layer == 0, &mut |_, _| {})
                .unwrap();
        }
        // Every part that uses a tensor verifies it.
        for info in file.gguf().tensors() {
            let mut dtypes = file.gguf().tensors().iter().map(|info| info.dtype);
            let other = rewrite(&name, &[], |tensor, values| {
                if tensor == info.name {
                    values[0] += 1.0;
                }
                dtypes.next().unwrap()
            });
            let other = other.unwrap();
            let layer = info.name.strip_prefix("blk.").map(|rest| {
                let number = rest.split('.').next().unwrap();
                number.parse::<u32>().unwrap()
            });
            let differs = VerifyError::Tensor(info.name.clone());
            let verify = |layers, head| manifest.verify(&other, layers, head, &mut |_, _| {});
            match layer {
                Some(layer) => {
                    assert_eq!(verify(layer..layer + 1, false), Err(differs), "{name}");
                    assert_eq!(verify(0..layer, true), Ok(()), "{name}");
                    assert_eq!(verify(layer + 1..layers, true), Ok(()), "{name}");
                }
                None if info.name.starts_with("rope") => {
                    for layer in 0..layers {
                        let found = verify(layer..layer + 1, false);
                        assert_eq!(found, Err(differs.clone()), "{name}");
                    }
                }
                None => {
                    assert_eq!(verify(0..layers, true), Err(differs), "{name}");
                    assert_eq!(verify(0..layers, false), Ok(()), "{name}");
                }
            }
        }
    }
}

/// Full name of a family's key, and the error for a file in which the key has this value.
fn refused(name: &str, key: &str, value: Value<'_>) -> (String, String) {
    let key = format!("{}.{key}", family(name).spec().architecture);
    match rewrite(name, &[(key.as_str(), value)], |_, _| TensorType::F32) {
        Ok(_) => panic!("{name} with {key} = {value} was accepted"),
        Err(error) => (key, error.to_string()),
    }
}

#[test]
fn unsupported_keys_of_a_family_are_refused_by_name() {
    use Value::{F32, F64, String as Text, U32};
    for (name, key, value) in [
        ("qwen3moe", "expert_count", U32(1 << 31)),
        ("qwen3moe", "expert_count", U32(4097)),
        ("qwen3moe", "expert_used_count", U32(6)),
        ("qwen3moe", "expert_used_count", U32(0)),
        ("qwen3moe", "expert_gating_func", U32(2)),
        ("mixtral", "expert_shared_count", U32(1)),
        ("qwen2", "attention.sliding_window", U32(5)),
        ("qwen2", "residual_scale", F32(0.5)),
        ("glm4", "rope.scaling.type", Text("yarn")),
        ("qwen2", "rope.scaling.type", Text("dynamic")),
        ("qwen3yarn", "rope.scaling.factor", F32(0.5)),
        ("qwen3yarn", "rope.scaling.yarn_ext_factor", F32(0.5)),
        ("qwen3yarn", "rope.scaling.yarn_log_multiplier", F32(1.0)),
        ("qwen3yarn", "rope.scaling.yarn_beta_slow", F32(32.0)),
        ("qwen3yarn", "rope.scaling.original_context_length", U32(0)),
        ("qwen3yarn", "rope.scaling.attn_factor", F32(2.0)),
        ("qwen3yarn", "rope.freq_base", F32(1.0)),
        ("gptoss", "expert_gating_func", U32(2)),
        ("mistral3", "attention.temperature_scale", F32(-0.1)),
        ("mistral3", "attention.temperature_length", U32(8192)),
        ("minicpm3", "attention.head_count_kv", U32(2)),
        ("deepseek2", "attention.head_count_kv", U32(4)),
        ("deepseek2", "attention.key_length", U32(64)),
        ("deepseek2", "attention.value_length", U32(32)),
        ("deepseek2", "attention.kv_lora_rank", U32(0)),
        ("deepseek2", "attention.value_length_mla", U32(0)),
        ("deepseek2", "rope.dimension_count", U32(40)),
        ("deepseek2", "expert_group_count", U32(3)),
        ("deepseek3", "expert_used_count", U32(9)),
        ("deepseek3", "expert_gating_func", U32(1)),
        ("minicpm3", "attention.kv_lora_rank", U32(0)),
        ("minicpm3", "attention.value_length", U32(17)),
        ("minicpm3", "rope.dimension_count", U32(16)),
        ("gptoss", "rope.freq_base_swa", F32(1e4)),
        ("qwen2", "rope.scaling.factor", F32(4.0)),
        ("qwen2", "something_new", U32(1)),
        ("granite", "residual_scale", F32(-1.0)),
        ("granite", "attention.scale", F64(1e300)),
        ("gemma2", "attention.sliding_window", U32(1 << 25)),
        ("gemma3", "rope.freq_base_swa", F32(0.1)),
        ("gemma3", "rope.scaling.factor", F32(-8.0)),
        ("gemma4", "attention.sliding_window_pattern", U32(1)),
        ("gemma4", "rope.dimension_count_swa", U32(32)),
        ("gemma4moe", "embedding_length_per_layer_input", U32(32)),
        ("museglimmer", "attention.sliding_window_pattern", U32(1)),
        ("museglimmer", "logit_scale", F32(-1.0)),
        ("granitehybrid", "rope.scaling.finetuned", Value::Bool(true)),
        ("granitehybrid", "attention.head_count_kv", U32(2)),
        ("granitehybrid", "ssm.group_count", U32(3)),
        ("nemotronh", "attention.layer_norm_rms_epsilon", F32(1e-3)),
        ("nemotronh", "feed_forward_length", U32(64)),
        ("nemotronhmoe", "moe_latent_size", U32(16)),
    ] {
        let (key, error) = refused(name, key, value);
        assert!(error.contains(&key), "{key}: {error}");
    }
    for (name, key, value, tensor) in [
        (
            "gemma4ple",
            "embedding_length_per_layer_input",
            16,
            "per_layer",
        ),
        (
            "gemma4ple",
            "attention.shared_kv_layers",
            1,
            "feed_forward_length",
        ),
        ("gemma4ple", "attention.head_count_kv", 1, "attn_k"),
        ("gemma4", "attention.key_length_swa", 8, "value_length_swa"),
    ] {
        let (_, error) = refused(name, key, U32(value));
        assert!(error.contains(tensor), "{key}: {error}");
    }
    // Fewer experts than the tensors hold.
    let (_, error) = refused("qwen3moe", "expert_count", U32(4));
    assert!(
        error.contains("ffn_gate_inp") && error.contains("shape"),
        "{error}"
    );
}

#[test]
fn a_layer_cannot_share_the_keys_of_a_layer_that_is_not_there() {
    // All layers share; all but the first, whose window they lack; more than there are.
    for blocks in [6, 5, 7, u32::MAX] {
        let mut spec = family("gemma4ple").spec().clone();
        spec.shared_keys.as_mut().unwrap().blocks = blocks;
        let error = spec.check().unwrap_err();
        assert_eq!(error.field, "shared_keys.blocks");
        let (key, error) = refused(
            "gemma4ple",
            "attention.shared_kv_layers",
            Value::U32(blocks),
        );
        assert!(
            error.contains(&key) || error.contains("shared_keys") || error.contains("share keys"),
            "{error}"
        );
    }
}

#[test]
fn yarn_with_factor_1_is_ignored() {
    let metadata = [("qwen3.rope.scaling.factor", Value::F32(1.0))];
    let file = rewrite("qwen3yarn", &metadata, |_, _| TensorType::F16).unwrap();
    assert_eq!(file.spec().rope.scaling, None);
}

#[test]
fn every_sink_and_bias_of_gpt_oss_changes_the_output() {
    let of = |changed: &str| {
        let file = rewrite("gptoss", &[], |tensor, values| {
            if tensor == changed {
                values.iter_mut().for_each(|value| *value += 1.0);
            }
            TensorType::F16
        });
        let mut whole = whole(&file.unwrap(), &options(1, Isa::detect()));
        let (seq, mut logits) = (open(&mut whole), Vec::new());
        let ids = [3, 14, 15, 9, 2, 6];
        whole.append(seq, &ids, &mut logits).unwrap();
        logits
    };
    let plain = of("none");
    for name in [
        "attn_sinks.weight",
        "attn_output.bias",
        "attn_q.bias",
        "attn_v.bias",
        "ffn_gate_exps.bias",
        "ffn_up_exps.bias",
        "ffn_down_exps.bias",
    ] {
        let changed = of(&format!("blk.0.{name}"));
        assert!(largest_difference(&plain, &changed) > 0.01, "{name}");
    }
}

#[test]
fn factors_that_are_no_numbers_are_refused_at_load() {
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let file = rewrite("llama31", &[], |tensor, values| {
            if tensor == "rope_freqs.weight" {
                values[3] = bad;
            }
            TensorType::F32
        });
        let (file, options) = (file.unwrap(), options(1, Isa::detect()));
        let error = FullModel::load(&file, &options, &mut |_, _| ());
        assert!(error.unwrap_err().to_string().contains("rope_freqs"));
    }
}

#[test]
fn models_without_a_feature_do_not_mention_it() {
    // Their identities are the same as before these features were added.
    let json = serde_json::to_value(ModelSpec::clone(family("qwen2").spec())).unwrap();
    let keys: Vec<&str> = json
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    assert!(keys.contains(&"attention"));
    for key in ["experts", "activation", "post_norms", "scales"] {
        assert!(!keys.contains(&key), "{key}");
    }
    assert_eq!(json["rope"].as_object().unwrap().len(), 3);
}
