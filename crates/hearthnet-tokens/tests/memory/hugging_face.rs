//! Memory for reading a Hugging Face directory: far less than its weights.
#![allow(clippy::unwrap_used, clippy::panic)] // in helpers, where a failure fails the test

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use hearthnet_files::TensorType;
use hearthnet_files::hugging_face::Directory;
use serde_json::{Map, json};

use crate::{ALONE, MEMORY};

const WIDTH: usize = 1024;
const VOCAB: usize = 40_960;
/// Parts of a megabyte as read, as numbers and as written, and the buffer of the file.
const FEW: usize = 10 << 20;

/// Directory with weights of 99 MB, nearly all of them in one matrix of zeros, which the file
/// system stores as a hole.
fn large(directory: &Path) -> u64 {
    let mut header = Map::new();
    let mut end = 0;
    let mut add = |name: &str, shape: &[usize]| {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let info = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name.to_owned(), info);
    };
    add("model.embed_tokens.weight", &[VOCAB, WIDTH]);
    add("model.norm.weight", &[WIDTH]);
    for norm in ["input_layernorm", "post_attention_layernorm"] {
        add(&format!("model.layers.0.{norm}.weight"), &[WIDTH]);
    }
    for matrix in ["q", "k", "v", "o"] {
        let name = format!("model.layers.0.self_attn.{matrix}_proj.weight");
        add(&name, &[WIDTH, WIDTH]);
    }
    for matrix in ["gate", "up", "down"] {
        let name = format!("model.layers.0.mlp.{matrix}_proj.weight");
        add(&name, &[WIDTH, WIDTH]);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let bytes = (8 + header.len() + end) as u64;
    let mut file = File::create(directory.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(&header).unwrap();
    file.set_len(bytes).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": 16, "vocab_size": VOCAB, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
    bytes
}

#[test]
fn weights_of_any_size_are_read_a_little_at_a_time_and_refused_without_reading_them() {
    let _alone = ALONE.lock();
    let made = tempfile::tempdir().unwrap();
    let bytes = large(made.path());
    let go_on = AtomicBool::new(false);
    let base = MEMORY.current_usage();
    let peak = || MEMORY.peak_usage().saturating_sub(base);
    for dtype in [None, Some(TensorType::Q4_K), Some(TensorType::F32)] {
        MEMORY.reset_peak_usage();
        let target = made.path().join("model.gguf");
        let mut told = 0;
        let mut progress = |done, total| {
            assert!(done <= total);
            told = done;
        };
        let directory = Directory::open(made.path()).unwrap();
        directory
            .write(dtype, &target, &go_on, &mut progress)
            .unwrap();
        assert!(told > 90_000_000 && told < bytes);
        assert!(peak() < FEW, "{dtype:?}: {}", peak());
        fs::remove_file(target).unwrap();
    }
    // A truncation is detected before any reading or allocation.
    MEMORY.reset_peak_usage();
    let weights = File::options()
        .write(true)
        .open(made.path().join("model.safetensors"));
    weights.unwrap().set_len(bytes - 1).unwrap();
    let refused = Directory::open(made.path());
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("is cut off"), "{refused}");
    assert!(peak() < 1 << 20, "{}", peak());
}
