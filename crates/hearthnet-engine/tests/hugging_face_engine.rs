//! A Hugging Face directory is the same model as the GGUF file of llama.cpp's converter: it has the
//! same identity and bit-identical logits. (`hugging_face.rs` compares the tensors.)
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;
use std::sync::atomic::AtomicBool;

use hearthnet_engine::kernels::Isa;
use hearthnet_files::hugging_face::import;
use hearthnet_files::{Manifest, ModelFile, TensorType, fuzzing};
use hearthnet_tokens::{Special, Tokenizer};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::engine_common::{all_logits, embedder, options, whole};

static GO_ON: AtomicBool = AtomicBool::new(false);

fn data() -> &'static Path {
    Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../hearthnet-files/tests/data"
    ))
}

/// Model of a directory in `data/hugging_face`. `cache` gets its file.
fn imported(directory: &str, dtype: Option<TensorType>, cache: &TempDir) -> ModelFile {
    let directory = data().join("hugging_face").join(directory);
    let path = import(&directory, dtype, cache.path(), &GO_ON, &mut |_, _| {}).unwrap();
    ModelFile::open(&path).unwrap()
}

fn logits(model: &ModelFile) -> Vec<u32> {
    let mut whole = whole(model, &options(1, Isa::detect()));
    let prompt: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % model.spec().vocab).collect();
    let logits = all_logits(&mut whole, &prompt);
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn vector(model: &ModelFile) -> Vec<u32> {
    let mut embedder = embedder(model, 1, Isa::detect());
    let vector = embedder.embed(&[3, 14, 15, 9, 2, 6]).unwrap();
    vector.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_directory_has_the_identity_and_the_logits_of_the_converted_file() {
    let cache = tempfile::tempdir().unwrap();
    let mut models = 0;
    for entry in std::fs::read_dir(data().join("families")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "gguf") {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap();
        if !data().join("hugging_face").join(name).is_dir() {
            continue;
        }
        let ours = imported(name, None, &cache);
        let theirs = ModelFile::open(&path).unwrap();
        let id = |model| Manifest::of(model, &mut |_, _| {}).weights_id();
        assert_eq!(id(&ours), id(&theirs), "{name}");
        assert_eq!(logits(&ours), logits(&theirs), "{name}");
        assert_eq!(vector(&ours), vector(&theirs), "{name}");
        models += 1;
    }
    assert!(models >= 30);
}

#[test]
fn each_weight_type_is_another_model() {
    let cache = tempfile::tempdir().unwrap();
    let mut ids = Vec::new();
    for dtype in [None, Some(TensorType::Q8_0), Some(TensorType::Q4_0)] {
        let model = imported("llama31", dtype, &cache);
        assert!(!logits(&model).is_empty());
        ids.push(Manifest::of(&model, &mut |_, _| {}).weights_id());
    }
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
}

#[test]
fn tokenizers_of_directories_give_back_every_text() {
    let cache = tempfile::tempdir().unwrap();
    for name in ["text-qwen2", "text-llama3", "text-olmoe"] {
        let model = imported(name, None, &cache);
        let tokenizer = Tokenizer::from_gguf(model.gguf()).unwrap();
        let text = "The miller's cat, 1812 <think>naïve</think> 中文 🙂\n";
        let ids = tokenizer.encode(text, Special::Plain).unwrap();
        assert_eq!(tokenizer.decode(&ids), text, "{name}");
        assert!(ids.len() < text.len(), "{name}: {ids:?}");
        assert_eq!(tokenizer.adds_bos(), name == "text-llama3");
        assert!(tokenizer.eos().is_some(), "{name}");
    }
}

#[test]
fn a_word_piece_vocabulary_gives_the_ids_of_the_crate_tokenizers() {
    let cache = tempfile::tempdir().unwrap();
    let model = imported("text-bert", None, &cache);
    let tokenizer = Tokenizer::from_gguf(model.gguf()).unwrap();
    let known = std::fs::read(data().join("hugging_face/text-bert.ids.json")).unwrap();
    let known: Vec<(String, Vec<u32>)> = serde_json::from_slice(&known).unwrap();
    assert!(known.len() >= 8);
    for (text, expected) in known {
        let ids = tokenizer.encode_document(&text, Special::Plain).unwrap();
        assert_eq!(ids, expected, "{text:?}");
    }
    // Typed control tokens stay text.
    let [typed, parsed] = [Special::Plain, Special::Parse]
        .map(|special| tokenizer.encode("the [SEP] cat", special).unwrap());
    let sep = tokenizer.eos().unwrap();
    assert!(!typed.contains(&sep) && parsed.contains(&sep));
    let ids = tokenizer
        .encode("The Cat, the mill!", Special::Plain)
        .unwrap();
    assert_eq!(tokenizer.decode(&ids), "the cat , the mill !");
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_sound(
        length in prop_oneof![0u64..200, any::<u64>()],
        rest in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        fuzzing::hugging_face(&rest);
        fuzzing::hugging_face(&[&length.to_le_bytes()[..], &rest].concat());
    }

    #[test]
    fn any_configuration_is_refused_or_sound(
        pieces in prop::collection::vec(prop::sample::select(vec![
            r#""architectures":["LlamaForCausalLM"]"#, r#""hidden_size":32"#, r#""head_dim":16"#,
            r#""num_hidden_layers":2"#, r#""num_attention_heads":0"#, r#""num_attention_heads":4"#,
            r#""architectures":["Phi3ForCausalLM"]"#, r#""rope_scaling":{"type":"su"}"#,
            r#""max_position_embeddings":1e9"#, r#""max_position_embeddings":256"#,
            r#""intermediate_size":64"#, r#""rms_norm_eps":1e-6"#, r#""vocab_size":4294967295"#,
            r#""vocab_size":64"#, r#""text_config":{}"#, r#""hidden_act":"silu""#, "\"a\u{1b}\":1",
            r#""rope_scaling":{"rope_type":"llama3","factor":0,"low_freq_factor":0,"high_freq_factor":0,"original_max_position_embeddings":1}"#,
        ]), 0..14),
    ) {
        fuzzing::hugging_face(format!("{{{}}}", pieces.join(",")).as_bytes());
    }
}
