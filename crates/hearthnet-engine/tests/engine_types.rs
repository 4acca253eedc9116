//! The engine with every weight type, alone and mixed as in published files.
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_engine::Head;
use hearthnet_engine::kernels::Isa;
use hearthnet_files::gguf::TensorType;
use hearthnet_files::{Gguf, Manifest, ModelFile};
use hearthnet_testkit::{TinyLlama, every_weight_as};
use hearthnet_tokens::inspect::inspect;

use crate::engine_common::{
    assert_same_bits, embed, engine, forward, hop, ids, in_chunks, logits, options, run, whole,
};

/// Rows fill whole blocks of 256; panels are full except for one of the vocabulary.
fn shape() -> TinyLlama {
    TinyLlama {
        width: 256,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        ffn: 512,
        vocab: 325,
        weights: "f32",
        embedding: "f32",
        ..TinyLlama::default()
    }
}

/// As in Q4_K_M files: six bits where errors cost most.
fn mixed(name: &str) -> TensorType {
    match name {
        "token_embd.weight" => TensorType::Q6_K,
        _ if name.starts_with("blk.0") && name.contains("attn_v") => TensorType::Q6_K,
        _ if name.starts_with("blk.0") && name.contains("ffn_down") => TensorType::Q6_K,
        _ => TensorType::Q4_K,
    }
}

/// Rows and logits are bit-identical on all paths. They are close to those of the same weights in
/// F32, which differ only by the rounding of activations.
fn check(what: &str, [file, plain]: &[ModelFile; 2]) {
    let (width, vocab) = (file.spec().width as usize, file.spec().vocab as usize);
    let prompt = ids(file, 30, 3);
    let mut reference = whole(file, &options(1, Isa::Portable));
    let expected = in_chunks(&mut reference, &prompt, 1);
    let expected_logits = logits(reference.head(), &expected);
    for isa in Isa::available() {
        for (threads, chunk) in [(1, 30), (2, 3), (3, 7)] {
            let what = format!("{what}, {isa}, {threads} threads, chunks of {chunk}");
            let mut whole = whole(file, &options(threads, isa));
            let rows = in_chunks(&mut whole, &prompt, chunk);
            assert_same_bits(&rows, &expected, width, &what);
            let found = logits(whole.head(), &expected);
            assert_same_bits(&found, &expected_logits, vocab, &what);
        }
    }
    let mut plain = whole(plain, &options(2, Isa::detect()));
    assert_eq!(
        embed(plain.head(), &prompt),
        embed(reference.head(), &prompt),
        "{what}: a row of the embedding is its values"
    );
    let (_, rows) = run(&mut plain, &prompt);
    let (found, wanted) = (expected_logits, logits(plain.head(), &rows));
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
    let error = square(&mut found.iter().zip(&wanted).map(|(a, b)| a - b));
    let relative = (error / square(&mut wanted.into_iter())).sqrt();
    assert!(relative < 0.05, "{what}: relative error {relative}");
}

#[test]
fn every_type_is_exact_on_every_path_and_means_its_values() {
    for dtype in TensorType::supported() {
        let shape = TinyLlama {
            tied: false,
            ..shape()
        };
        check(dtype.name(), &every_weight_as(&shape, |_| dtype));
    }
}

#[test]
fn types_mixed_within_a_layer_are_exact_however_the_layers_are_split() {
    let files = every_weight_as(&shape(), mixed);
    check("mixed", &files);

    let [file, _] = files;
    let (width, prompt) = (file.spec().width as usize, ids(&file, 30, 5));
    let options = options(2, Isa::detect());
    let (_, expected) = run(&mut whole(&file, &options), &prompt);
    let mut rows = embed(&Head::load(&file, &options).unwrap(), &prompt);
    for layer in 0..file.spec().layers {
        // As in a hop: rows travel as bytes of the boundary dtype.
        rows = hop(file.spec(), &rows);
        let mut engine = engine(&file, layer..layer + 1, &options);
        let seq = engine.open().unwrap();
        for batch in rows.chunks_mut(11 * width) {
            forward(&mut engine, seq, batch).unwrap();
        }
    }
    assert_same_bits(&rows, &expected, width, "an engine for each layer");
}

#[test]
fn an_inspection_names_the_types_of_a_mixed_file_and_their_bytes() {
    let [file, _] = every_weight_as(&shape(), mixed);
    let id = Manifest::of(&file, &mut |_, _| {}).weights_id();
    let inspection = inspect(&file, id);
    let uses: Vec<(&str, u64, u64)> = inspection
        .container
        .tensor_types
        .iter()
        .map(|used| (used.dtype.name(), used.tensors, used.bytes))
        .collect();
    // Values of attention (query, key, value, output) and feed-forward matrices of two layers.
    let q6_k = 256 * (325 + 128 + 512) / 256 * 210;
    let q4_k = 256 * (256 + 128 + 256 + 2 * 512 + 256 + 2 * 128 + 256 + 3 * 512) / 256 * 144;
    let f32 = 5 * 256 * 4;
    assert_eq!(
        uses,
        [("Q4_K", 12, q4_k), ("Q6_K", 3, q6_k), ("F32", 5, f32)]
    );
    let layers: u64 = inspection.layer_bytes.iter().sum();
    assert_eq!(layers + inspection.head_bytes, q4_k + q6_k + f32);
    assert!(inspection.layer_bytes[0] > inspection.layer_bytes[1]);

    // Names of any length are aligned in one column.
    let [file, _] = every_weight_as(&shape(), |name| match name.contains("attn") {
        true => TensorType::IQ4_XS,
        false => TensorType::Q8_0,
    });
    let text = inspect(&file, id).to_string();
    let column = |name: &str| {
        text.lines()
            .find(|line| line.contains(name))
            .unwrap()
            .find(" x,")
    };
    assert!(column("IQ4_XS").is_some());
    assert_eq!(column("IQ4_XS"), column("Q8_0 "), "{text}");
}

#[test]
fn a_row_that_does_not_fill_whole_blocks_is_refused_for_every_type() {
    let sound = TinyLlama::default().bytes();
    let name = b"blk.0.attn_q.weight";
    let at = sound.windows(name.len()).position(|w| w == name).unwrap();
    // Name, number of dimensions, two dimensions of 64, type.
    let at = at + name.len() + 4 + 2 * 8;
    for id in 0..64u32 {
        let mut bytes = sound.clone();
        bytes[at..at + 4].copy_from_slice(&id.to_le_bytes());
        let opened = Gguf::from_bytes(bytes).map(ModelFile::from_gguf);
        match TensorType::from_ggml(id) {
            Some(TensorType::Q4_1) => assert!(matches!(opened, Ok(Ok(_)))),
            Some(dtype) if dtype.row_bytes(64).is_none() => {
                let error = opened.unwrap_err().to_string();
                assert!(error.contains("dimensions"), "{dtype}: {error}");
            }
            // Smaller types leave a gap in the file, larger ones overlap the next tensor.
            Some(dtype) if dtype.is_supported() => {}
            _ => assert!(!matches!(opened, Ok(Ok(_))), "{id}"),
        }
    }
}
