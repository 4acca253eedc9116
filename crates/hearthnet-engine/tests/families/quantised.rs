//! Quantised forms of every family: byte-identical to llama.cpp's, and as close to `transformers`
//! in f32 as llama.cpp is with the same bytes.
//!
//! The distance is the divergence (Kullback-Leibler, in nats) of the next token's distribution, on
//! 88 fixed tokens. `NAME.divergences` has llama.cpp's, `quantised.json` the hashes of its bytes.
//! Both engines also quantise activations, each in its own way, so either can be closer at a
//! position; the variation over positions gives the standard error. Since the engine is bit-exact,
//! a failure means that its arithmetic has changed.

use std::collections::BTreeMap;

use half::f16;
use hearthnet_engine::kernels::Isa;
use hearthnet_files::ModelFile;
use hearthnet_files::gguf::TensorType;
use sha2::{Digest, Sha256};

use super::{data, floats, references, rewrite};
use crate::engine_common::{all_logits, mean_and_error, options, whole};

/// Types of blocks of 32, in the order of `NAME.divergences`, with the bounds of the mean
/// divergence of each family and of the median family. Observed values are about 0.8 of the bounds.
/// The bound of a family is larger if llama.cpp's divergence is.
/// They are large because rows of one or two blocks average out little.
const TYPES: [(TensorType, f64, f64); 7] = [
    (TensorType::Q8_0, 5.4e-2, 4.1e-3),
    (TensorType::Q5_1, 0.51, 8.9e-2),
    (TensorType::Q5_0, 0.6, 0.105),
    (TensorType::Q4_1, 1.3, 0.26),
    (TensorType::Q4_0, 1.35, 0.36),
    (TensorType::IQ4_NL, 1.1, 0.3),
    (TensorType::MXFP4, 2.2, 0.43),
];

/// Families whose quantised forms llama.cpp cannot compute at this size; see README.md of the data.
const NOT_COMPARED: [&str; 5] = [
    "qwen35",
    "qwen35moe",
    "deepseek2",
    "deepseek3",
    "glm47flash",
];

/// Tolerance in standard errors: of the mean difference from llama.cpp, and of the number of
/// positions at which the engine is further away, compared with a fair coin.
const ERRORS: f64 = 3.0;

fn log_softmax(row: impl Iterator<Item = f64>) -> Vec<f64> {
    let row: Vec<f64> = row.collect();
    let max = row.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
    row.iter().map(|v| v - max - sum.ln()).collect()
}

/// Divergence of each row.
fn divergences(expected: &[f16], found: &[f32], vocab: usize) -> Vec<f64> {
    assert_eq!(expected.len(), found.len());
    let rows = expected.chunks(vocab).zip(found.chunks(vocab));
    rows.map(|(expected, found)| {
        let expected = log_softmax(expected.iter().map(|v| v.to_f64()));
        let found = log_softmax(found.iter().map(|v| f64::from(*v)));
        let pairs = expected.iter().zip(&found);
        pairs.map(|(p, q)| p.exp() * (p - q)).sum()
    })
    .collect()
}

/// Upper limit of heads in `throws` throws of a fair coin.
fn heads(throws: usize) -> usize {
    let throws = throws as f64;
    (throws / 2.0 + ERRORS * throws.sqrt() / 2.0) as usize
}

/// Hash of the tensors stored as `dtype`, in the order of their names.
fn sha256(file: &ModelFile, dtype: TensorType) -> String {
    let gguf = file.gguf();
    let mut tensors: Vec<_> = gguf.tensors().iter().filter(|i| i.dtype == dtype).collect();
    tensors.sort_by_key(|info| &info.name);
    let mut hash = Sha256::new();
    tensors.iter().for_each(|info| hash.update(gguf.data(info)));
    let hash = hash.finalize();
    hex::encode(hash)
}

#[test]
fn quantised_forms_are_as_close_to_transformers_as_those_of_llama_cpp() {
    let json = std::fs::read_to_string(data().join("quantised.json")).unwrap();
    let hashes: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_str(&json).unwrap();
    let mut bad = Vec::new();
    // Per type: the mean of each family, and the number of positions at which the engine is further
    // away.
    let mut means = [(); TYPES.len()].map(|()| Vec::new());
    let mut further = [0; TYPES.len()];
    let mut positions = 0;
    for (name, reference) in references() {
        if NOT_COMPARED.contains(&name.as_str()) {
            continue;
        }
        let ids = [&reference.prompt[..], &reference.more].concat();
        positions += ids.len();
        let bytes = std::fs::read(data().join(format!("{name}.logprobs"))).unwrap();
        let (expected, _) = bytes.as_chunks();
        let expected: Vec<f16> = expected.iter().map(|b| f16::from_le_bytes(*b)).collect();
        let theirs = floats(&data().join(format!("{name}.divergences")));
        assert_eq!(theirs.len(), TYPES.len() * ids.len());
        print!("{name:11}");
        for (nth, (dtype, bound, _)) in TYPES.into_iter().enumerate() {
            let file = rewrite(&name, &[], |tensor, _| match tensor {
                // As in llama.cpp, expert routers stay F32, and this projection F16.
                _ if tensor.contains("ffn_gate_inp") => TensorType::F32,
                "per_layer_model_proj.weight" => TensorType::F16,
                _ => dtype,
            });
            let file = file.unwrap();
            assert_eq!(
                sha256(&file, dtype),
                hashes[&name][dtype.name()],
                "{name}, {dtype}: other bytes than llama.cpp's"
            );
            let mut whole = whole(&file, &options(1, Isa::detect()));
            let found = all_logits(&mut whole, &ids);
            let ours = divergences(&expected, &found, file.spec().vocab as usize);
            let theirs = &theirs[nth * ids.len()..][..ids.len()];
            let theirs: Vec<f64> = theirs.iter().copied().map(f64::from).collect();
            let pairs = ours.iter().zip(&theirs);
            let apart: Vec<f64> = pairs.map(|(a, b)| a - b).collect();
            let worse = apart.iter().filter(|apart| **apart > 0.0).count();
            let [ours, theirs] = [&ours, &theirs].map(|values| mean_and_error(values).0);
            let slack = ERRORS * mean_and_error(&apart).1 / theirs;
            print!(
                " {dtype} {ours:.1e} {:.2}/{:.2}",
                ours / theirs,
                1.0 + slack
            );
            let bound = bound.max(1.25 * theirs);
            if !(ours <= bound && ours <= theirs * (1.0 + slack) && worse <= heads(ids.len())) {
                bad.push(format!(
                    "{name}, {dtype}: {ours:.2e}, llama.cpp {theirs:.2e}, of which {slack:.2} may \
                     be added; further away at {worse} of {}",
                    ids.len()
                ));
            }
            means[nth].push(ours);
            further[nth] += worse;
        }
        println!();
    }
    for (((dtype, _, bound), mut means), further) in TYPES.into_iter().zip(means).zip(further) {
        means.sort_by(f64::total_cmp);
        let median = means[means.len() / 2];
        let line = format!("{dtype} median {median:.1e}, further at {further} of {positions}");
        println!("{line}");
        if !(median <= bound && further <= heads(positions)) {
            bad.push(line);
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}
