//! Quantised files over a text, compared with llama.cpp on the same files.
//!
//! Perplexity is computed as in llama.cpp's `llama-perplexity` with defaults: windows of 512 tokens
//! without overlap (the remainder is dropped), each with an empty cache. The first half is context,
//! and rows 256 to 510 of a window predict the next token. SmolLM2 uses no BOS.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::collections::HashMap;
use std::path::Path;

use hearthnet_engine::{Engine, EngineOptions, Head, Span};
use hearthnet_files::spec::CacheDtype;
use hearthnet_files::{Gguf, ModelFile};
use hearthnet_testkit::float64::{Prediction, Predictions, log_softmax};
use hearthnet_tokens::{Special, Tokenizer};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::engine_common::mean_and_error;

#[derive(Deserialize)]
struct Perplexity {
    context: usize,
    ids: Vec<Vec<u32>>,
    /// Keyed by the SHA-256 of the file.
    files: HashMap<String, Measured>,
}

#[derive(Deserialize)]
struct Measured {
    perplexity: f64,
}

fn perplexity_data() -> Perplexity {
    serde_json::from_str(include_str!("data/parity/perplexity.json")).unwrap()
}

fn sha256(path: &Path) -> String {
    let digest = Sha256::digest(std::fs::read(path).unwrap());
    hex::encode(digest)
}

/// Runs the windows, and passes the log-probabilities of every scored row to `each`:
/// `(window, position, log-probabilities of the next token)`.
fn score(file: &ModelFile, windows: &[Vec<u32>], mut each: impl FnMut(usize, usize, &[f64])) {
    let options = EngineOptions::default();
    let head = Head::load(file, &options).unwrap();
    let spec = file.spec();
    let mut engine = Engine::load(file, 0..spec.layers, &options, &mut |_, _| ()).unwrap();
    let (width, vocab) = (spec.width as usize, spec.vocab as usize);
    let (mut x, mut logits, mut log_p) = (Vec::new(), Vec::new(), Vec::new());
    for (window, ids) in windows.iter().enumerate() {
        x.clear();
        head.embed(ids, &mut x).unwrap();
        let seq = engine.open().unwrap();
        let span = Span::new(seq, 0, ids.len() as u32);
        engine.forward(&[span], &mut x).unwrap();
        assert!(engine.close(seq));
        let scored = ids.len() / 2..ids.len() - 1;
        logits.clear();
        head.logits(&x[scored.start * width..scored.end * width], &mut logits)
            .unwrap();
        for (position, row) in scored.zip(logits.chunks_exact(vocab)) {
            log_softmax(row, &mut log_p);
            each(window, position, &log_p);
        }
    }
}

/// Our perplexity of the text, and llama.cpp's on the same file.
fn perplexities(dtype: &str) -> (f64, f64) {
    let data = perplexity_data();
    let path = hearthnet_testkit::variant(dtype);
    let theirs = data
        .files
        .get(&sha256(&path))
        .expect(
            "the stored figure belongs to this very file: measure anew if the converter changed",
        )
        .perplexity;
    let (mut nll, mut count) = (0.0, 0);
    score(
        &ModelFile::open(&path).unwrap(),
        &data.ids,
        |window, position, log_p| {
            nll -= log_p[data.ids[window][position + 1] as usize];
            count += 1;
        },
    );
    (f64::exp(nll / f64::from(count)), theirs)
}

fn within_a_percent(dtype: &str) {
    let (ours, theirs) = perplexities(dtype);
    println!("{dtype}: perplexity {ours:.4}, llama.cpp {theirs:.4}");
    assert!(
        (ours / theirs - 1.0).abs() <= 0.01,
        "{ours} against {theirs}"
    );
}

#[test]
fn the_text_has_the_token_ids_that_llama_cpp_gave_it() {
    let text = include_str!("data/parity/text.txt");
    let gguf = Gguf::open(&hearthnet_testkit::smollm2()).unwrap();
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let ids = tokenizer.encode_document(text, Special::Plain).unwrap();
    let windows: Vec<&[u32]> = ids.chunks_exact(perplexity_data().context).collect();
    assert_eq!(windows, perplexity_data().ids);
}

#[test]
fn perplexity_of_q4_1_is_within_a_percent_of_llama_cpp() {
    within_a_percent("q4_1");
}

#[test]
fn perplexity_of_q8_0_is_within_a_percent_of_llama_cpp() {
    within_a_percent("q8_0");
}

#[test]
fn perplexity_of_q4_0_is_within_a_percent_of_llama_cpp() {
    within_a_percent("q4_0");
}

/// Loss by quantised activations, in addition to that by quantised weights: the KL divergence from
/// a float64 model with the dequantised weights of the same file.
///
/// Both engines quantise activations to eight bits, so their losses have the same size but fall on
/// different tokens. Ours is larger if the mean of the differences by position exceeds twice its
/// standard error. For SmolLM2, twice that error is 12% of llama.cpp's loss; one bit less would
/// quadruple the loss.
fn as_close_as_llama_cpp(path: &Path, data: &Predictions, windows: &[Vec<u32>]) {
    assert_eq!(sha256(path), data.model_sha256);
    let wanted: HashMap<(usize, usize), &Prediction> = data
        .positions
        .iter()
        .map(|p| ((p.window, p.position), p))
        .collect();
    let (mut ours, mut differences) = (Vec::new(), Vec::new());
    score(
        &ModelFile::open(path).unwrap(),
        windows,
        |window, position, log_q| {
            if let Some(expected) = wanted.get(&(window, position)) {
                let divergence = expected.divergence(log_q);
                ours.push(divergence);
                differences.push(divergence - expected.llama_cpp);
            }
        },
    );
    assert_eq!(ours.len(), data.positions.len());
    let (ours, _) = mean_and_error(&ours);
    let (difference, error) = mean_and_error(&differences);
    let theirs = ours - difference;
    println!("KL divergence from float64: {ours:.6}, llama.cpp {theirs:.6} (+- {error:.6})");
    assert!(
        difference <= 2.0 * error,
        "{ours} against {theirs} +- {error}"
    );
    // The comparison is meaningful only if it can distinguish such losses.
    assert!(error <= 0.1 * theirs, "{error} of {theirs}");
}

#[test]
fn the_quantised_engine_is_as_close_to_the_float64_model_as_llama_cpp() {
    let path = hearthnet_testkit::smollm2();
    as_close_as_llama_cpp(&path, &Predictions::smollm2(), &perplexity_data().ids);
}

/// KL divergence from the float64 model, and perplexity, with each format of keys and values.
#[test]
fn a_cache_of_8_bits_loses_little() {
    let (data, predictions) = (perplexity_data(), Predictions::smollm2());
    let wanted: HashMap<(usize, usize), &Prediction> = predictions
        .positions
        .iter()
        .map(|p| ((p.window, p.position), p))
        .collect();
    let losses = CacheDtype::ALL.map(|cache| {
        let file = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
        let (mut divergences, mut nll, mut count) = (Vec::new(), 0.0, 0);
        score(
            &file.with_cache(cache).unwrap(),
            &data.ids,
            |window, position, log_q| {
                nll -= log_q[data.ids[window][position + 1] as usize];
                count += 1;
                let expected = wanted.get(&(window, position));
                divergences.extend(expected.map(|expected| expected.divergence(log_q)));
            },
        );
        let perplexity = f64::exp(nll / f64::from(count));
        let (divergence, _) = mean_and_error(&divergences);
        println!("{cache}: KL divergence {divergence:.6}, perplexity {perplexity:.4}");
        (divergence, perplexity)
    });
    let [(divergence, perplexity), small] = losses;
    assert!(small.0 <= 1.25 * divergence, "{} of {divergence}", small.0);
    assert!((small.1 / perplexity - 1.0).abs() <= 0.005, "{}", small.1);
    // The formats are not the same.
    assert_ne!(small, losses[0]);
}

/// A file that llama.cpp's own program quantised: Q4_K_M, with Q5_0 where rows do not divide by 256.
#[test]
fn the_engine_is_as_close_as_llama_cpp_on_a_real_k_quant_file() {
    let data = Predictions::gemma3();
    let path = hearthnet_testkit::gemma3();
    let text = include_str!("data/parity/text.txt");
    let gguf = Gguf::open(&path).unwrap();
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let ids = tokenizer.encode(text, Special::Plain).unwrap();
    let mut windows: Vec<Vec<u32>> = { ids.chunks_exact(data.ids[0].len()) }
        .map(<[u32]>::to_vec)
        .collect();
    // The reference sets BOS in place of the first token of each window.
    for (window, expected) in windows.iter_mut().zip(&data.ids) {
        window[0] = expected[0];
    }
    assert_eq!(windows, data.ids, "token ids of llama.cpp");
    as_close_as_llama_cpp(&path, &data, &data.ids);
}
