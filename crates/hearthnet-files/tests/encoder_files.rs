//! Import of directories of models that make vectors of whole texts.
//! (`hugging_face.rs` compares them with llama.cpp's converter.)
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::fs;
use std::path::Path;

use hearthnet_files::Pooling;
use hearthnet_testkit::rows;
use serde_json::{Value as Json, json};

use crate::hugging_face::{assert_same_model, copy, data, edit, write};

fn refusal(directory: &Path) -> String {
    write(directory, None).unwrap_err().to_string()
}

/// Error for a copy in which a value of a file is another one.
fn refused(name: &str, file: &str, key: &str, value: Json) -> String {
    let directory = copy(name);
    edit(directory.path(), file, |json| json[key] = value);
    refusal(directory.path())
}

#[test]
fn modules_give_pooling_and_matrices_behind_it() {
    let of = |name| write(&data(name), None).unwrap();
    assert_eq!(of("bert").pooling(), Pooling::First);
    assert_eq!(of("nomicbert").pooling(), Pooling::Mean);
    let gemma = of("gemmaembedding");
    assert_eq!(gemma.spec().encoder.unwrap().projection, Some(64));
    // Without the matrices it is another model.
    let directory = copy("gemmaembedding");
    edit(directory.path(), "modules.json", |modules| {
        let all = modules.as_array_mut().unwrap();
        all.retain(|module| !module["type"].as_str().unwrap().ends_with("Dense"));
    });
    let plain = write(directory.path(), None).unwrap();
    assert_eq!(plain.spec().encoder.unwrap().projection, None);
}

#[test]
fn matrices_that_are_missing_or_have_another_form_are_refused() {
    let config = "2_Dense/config.json";
    for (file, key, value, said) in rows! {
        config, "bias", json!(true) => "no bias";
        config, "activation_function", json!("torch.nn.Tanh") => "identity";
        config, "out_features", json!(40) => "dense_2_feat_out";
        config, "in_features", json!(16) => "embedding_length";
        "3_Dense/config.json", "out_features", json!(16) => "embedding_length";
        "config.json", "use_bidirectional_attention", json!(false) => "use_bidirectional_attention";
    } {
        let error = refused("gemmaembedding", file, key, value);
        assert!(error.contains(said), "{key}: {error}");
    }
    for (file, said) in [
        ("2_Dense/model.safetensors", "modules.json names"),
        ("3_Dense/config.json", "modules.json names"),
    ] {
        let directory = copy("gemmaembedding");
        fs::remove_file(directory.path().join(file)).unwrap();
        let error = refusal(directory.path());
        assert!(error.contains(said), "{error}");
    }
    let directory = copy("gemmaembedding");
    edit(directory.path(), "modules.json", |modules| {
        modules.as_array_mut().unwrap().remove(3);
    });
    let error = refusal(directory.path());
    assert!(error.contains("one matrix"), "{error}");
}

#[test]
fn other_forms_of_bert_are_refused_by_name() {
    for (name, key, value) in [
        ("bert", "hidden_act", json!("gelu_new")),
        ("bert", "position_embedding_type", json!("relative_key")),
        ("bert", "is_decoder", json!(true)),
        ("nomicbert", "activation_function", json!("gelu")),
        ("nomicbert", "qkv_proj_bias", json!(true)),
        ("nomicbert", "prenorm", json!(true)),
        ("nomicbert", "causal", json!(true)),
        ("nomicbert", "rotary_emb_fraction", json!(0.5)),
        ("nomicbert", "moe_every_n_layers", json!(2)),
        ("nomicbert", "rotary_emb_interleaved", json!(true)),
    ] {
        let error = refused(name, "config.json", key, value);
        assert!(error.contains(key), "{key}: {error}");
    }
}

#[test]
fn nomic_bert_is_the_same_model_with_the_keys_of_transformers_or_its_own() {
    let published = json!({
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0,
        "causal": false, "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048,
        "model_type": "nomic_bert", "n_embd": 32, "n_head": 2, "n_inner": 64, "n_layer": 3,
        "n_positions": 8192, "prenorm": false, "qkv_proj_bias": false, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_scaling_factor": null, "type_vocab_size": 2,
        "vocab_size": 64,
    });
    let native = json!({
        "architectures": ["NomicBertModel"], "head_dim": 16, "hidden_act": "silu",
        "hidden_dropout_prob": 0.0, "hidden_size": 32, "intermediate_size": 64,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 2048, "model_type": "nomic_bert",
        "num_attention_heads": 2, "num_hidden_layers": 3,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}, "type_vocab_size": 2,
        "vocab_size": 64,
    });
    for config in [published, native] {
        let directory = copy("nomicbert");
        fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        assert_same_model(directory.path(), "nomicbert");
    }
}

#[test]
fn word_piece_vocabularies_of_another_form_are_refused() {
    for (key, inner, value, said) in rows! {
        "model", "continuing_subword_prefix", json!("@@") => "continuing_subword_prefix";
        "model", "max_input_chars_per_word", json!(10) => "max_input_chars_per_word";
        "normalizer", "clean_text", json!(false) => "clean_text";
        "normalizer", "type", json!("NFKC") => "normalizer";
        "pre_tokenizer", "type", json!("Whitespace") => "pre_tokenizer";
    } {
        let directory = copy("text-bert");
        edit(directory.path(), "tokenizer.json", |json| {
            json[key][inner] = value;
        });
        let error = refusal(directory.path());
        assert!(error.contains(said), "{error}");
    }
    let directory = copy("text-bert");
    edit(directory.path(), "tokenizer.json", |json| {
        json["model"]["vocab"]["zz"] = json!(5000);
    });
    let error = refusal(directory.path());
    assert!(error.contains("beyond the vocabulary"), "{error}");
}
