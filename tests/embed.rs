//! `hearthnet embed`: vectors of texts on one machine, also of a split model.

use std::fs;

use hearthnet_files::gguf::Value as Metadata;
use hearthnet_testkit::{TinyLlama, split, with_metadata, write_split};
use serde_json::{Value, json};

use crate::support::*;

/// Tiny model that makes vectors of the last token.
fn last_token() -> Vec<u8> {
    with_metadata(&TinyLlama::default().bytes(), &[], |writer| {
        let key = "llama.pooling_type";
        writer.set(key, Metadata::U32(3)).expect("a new key");
    })
}

fn vectors(found: &Value) -> Vec<Vec<f64>> {
    serde_json::from_value(found["vectors"].clone()).expect("vectors")
}

#[test]
fn each_text_has_a_vector_and_a_split_model_gives_the_same() {
    let home = Home::new();
    let path = home.path().join("last.gguf");
    fs::write(&path, last_token()).expect("a file");
    let name = path.to_str().expect("a path");
    let found = home.json(&["embed", "--model", name, "--json", "Vienna", "a capital"]);
    assert_eq!(found["pooling"], "last-hidden-1");
    let both = vectors(&found);
    assert_eq!(both.len(), 2);
    for vector in &both {
        assert_eq!(Some(vector.len() as u64), found["dimensions"].as_u64());
        let square: f64 = vector.iter().map(|value| value * value).sum();
        assert!((square - 1.0).abs() < 1e-5, "{square}");
    }
    assert_ne!(both[0], both[1]);

    let parts = write_split(home.path(), &split(&last_token(), 3));
    let parts = parts.to_str().expect("a path");
    let again = home.json(&["embed", "--model", parts, "--json", "Vienna", "a capital"]);
    assert_eq!(again["weights"], found["weights"]);
    assert_eq!(vectors(&again), both);
    let inspected = home.json(&["model", "inspect", "--json", parts]);
    assert_eq!(inspected["weights"], found["weights"]);

    // Lines of standard input; numbers as text.
    let lines = home.run_with(&["embed", "--model", name], "Vienna\na capital\n");
    let lines = succeeded(&lines);
    let read = |line: &str| -> Vec<f32> {
        let numbers = line.split(' ').map(str::parse);
        numbers.collect::<Result<_, _>>().expect("numbers")
    };
    let read: Vec<Vec<f32>> = lines.lines().map(read).collect();
    let exact = |vectors: &[Vec<f64>]| -> Vec<Vec<f32>> {
        let row = |vector: &Vec<f64>| vector.iter().map(|value| *value as f32).collect();
        vectors.iter().map(row).collect()
    };
    assert_eq!(read, exact(&both));
}

#[test]
fn a_text_without_a_vector_is_named() {
    let home = Home::new();
    let path = home.path().join("last.gguf");
    fs::write(&path, last_token()).expect("a file");
    let name = path.to_str().expect("a path");
    let empty = home.run(&["embed", "--model", name, "one", ""]);
    assert_complains(&empty, "text 2 is empty");
    let long = "word ".repeat(5000);
    let long = home.run(&["embed", "--model", name, &long]);
    assert_complains(&long, "text 1 has");
    let bad = home.path().join("rank.gguf");
    let rank = with_metadata(&TinyLlama::default().bytes(), &[], |writer| {
        let key = "llama.pooling_type";
        writer.set(key, Metadata::U32(4)).expect("a new key");
    });
    fs::write(&bad, rank).expect("a file");
    let refused = home.run(&["embed", "--model", bad.to_str().expect("a path"), "one"]);
    assert_complains(&refused, "llama.pooling_type");
}

/// Directory of a tiny BERT with a WordPiece vocabulary.
const BERT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../crates/hearthnet-files/tests/data/hugging_face/text-bert"
);

#[test]
fn an_encoder_makes_vectors_and_is_refused_elsewhere_with_what_it_is_for() {
    let home = Home::new();
    let found = home.json(&["embed", "--model", BERT, "--json", "the cat", "the donkey"]);
    let both = vectors(&found);
    assert!(both.len() == 2 && both[0] != both[1]);
    // Case and accents do not matter to this vocabulary, the order of words does.
    let again = home.json(&["embed", "--model", BERT, "--json", "THE CÁT", "donkey the"]);
    let again = vectors(&again);
    assert_eq!(again[0], both[0]);
    assert_ne!(again[1], both[1]);
    let long = "the cat ".repeat(40);
    let long = home.run(&["embed", "--model", BERT, &long]);
    assert_complains(&long, "and the context of the model 64");
    for command in [
        &["chat", "--local", "--model", BERT, "hello"][..],
        &["shard", "serve", "--model", BERT, "--layers", "0-0"],
        &["bench", "engine", "--model", BERT],
    ] {
        let refused = home.run(&[&ENABLE[..], command].concat());
        assert_complains(&refused, "makes vectors of texts");
        assert_complains(&refused, "hearthnet embed");
    }
    // The HTTP interface gives the same vectors, and says what the model is for.
    let service = Server::api(&home, &[], BERT, &["--local"]);
    let (address, id) = (http::address(&service), service.ready["models"][0].clone());
    let body = json!({"model": id, "input": ["the cat", "the donkey"]});
    let (status, answer) = http::post_json(&address, "/v1/embeddings", &body);
    assert_eq!(status, 200, "{answer}");
    let served = answer["data"].as_array().expect("vectors").iter();
    let served: Vec<Value> = served.map(|one| one["embedding"].clone()).collect();
    let served: Vec<Vec<f64>> = serde_json::from_value(json!(served)).expect("vectors");
    let bits = |all: &[Vec<f64>]| -> Vec<u32> {
        let all = all.concat().into_iter();
        all.map(|value| (value as f32).to_bits()).collect()
    };
    assert_eq!(bits(&served), bits(&both));
    assert_eq!(answer["hearthnet_pooling"], "mean-hidden-1");
    let body = json!({"model": id, "input": "the cat ".repeat(40)});
    let (status, answer) = http::post_json(&address, "/v1/embeddings", &body);
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("context_length_exceeded"))
    );
    let body = json!({"model": id, "messages": [{"role": "user", "content": "hello"}]});
    let (status, answer) = http::post_json(&address, "/v1/chat/completions", &body);
    assert_eq!(status, 400);
    assert!(
        answer.to_string().contains("makes vectors of texts"),
        "{answer}"
    );
    let (_, shown) = http::post_json(&address, "/api/show", &json!({"model": id}));
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    let inspected = home.run(&["model", "inspect", BERT]);
    let shown = succeeded(&inspected);
    assert_contains(&shown, &["vectors of whole texts, mean-hidden-1"]);
    assert!(shown.contains("hearthnet embed"), "{shown}");
}
