//! Token ids against llama.cpp's, on the corpus of `data/tokenizer/ids.json`, with the real model's
//! vocabulary and with SentencePiece ones (`data/tokenizer/more_ids.json`).
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_files::gguf::Gguf;
use hearthnet_files::tokenizer_parts::TokenizerParts;
use hearthnet_testkit::assert_none_differ;
use hearthnet_tokens::tokenizer::{Special, Tokenizer};
use serde_json::Value;

const REFERENCE: &str = include_str!("data/tokenizer/ids.json");

const MORE: &str = include_str!("data/tokenizer/more_ids.json");

struct Reference(Value);

impl Reference {
    fn read() -> Self {
        let mut reference: Value = serde_json::from_str(REFERENCE).unwrap();
        let mut more: Value = serde_json::from_str(MORE).unwrap();
        let all = reference.as_object_mut().unwrap();
        all.append(more.as_object_mut().unwrap());
        Self(reference)
    }

    fn texts(&self) -> Vec<&str> {
        let texts = self.0["texts"].as_array().unwrap().iter();
        texts.map(|text| text.as_str().unwrap()).collect()
    }

    /// Ids of each text; `None` if the file omits them.
    fn ids(&self, key: &str) -> Vec<Option<Vec<u32>>> {
        let ids = |row: &Value| {
            let ids = row.as_array()?.iter().map(|id| id.as_u64().unwrap());
            Some(ids.map(|id| u32::try_from(id).unwrap()).collect())
        };
        self.0[key].as_array().unwrap().iter().map(ids).collect()
    }
}

/// Key of the real model's own ids.
const OWN: &str = "smollm_plain";

fn model() -> Gguf {
    Gguf::open(&hearthnet_testkit::smollm2()).unwrap()
}

/// Compares all texts, and shows the first few that differ.
fn assert_same_ids(tokenizer: &Tokenizer, special: Special, key: &str, fallback: &str) {
    let reference = Reference::read();
    let expected = reference.ids(key);
    let fallback = reference.ids(fallback);
    let mut wrong = Vec::new();
    for ((text, expected), fallback) in reference.texts().iter().zip(expected).zip(fallback) {
        let expected = expected.or(fallback).unwrap();
        let got = tokenizer.encode(text, special).unwrap();
        if got != expected {
            wrong.push(format!(
                "{key}: {text:?}\n   ours {got:?}\n  llama {expected:?}"
            ));
        }
    }
    assert_none_differ(&wrong);
}

#[test]
fn ids_of_the_real_model_equal_those_of_llama_cpp() {
    let tokenizer = Tokenizer::from_gguf(&model()).unwrap();
    assert_same_ids(&tokenizer, Special::Parse, "smollm_parse", OWN);
    assert_same_ids(&tokenizer, Special::Plain, OWN, OWN);
}

#[test]
fn ids_under_other_pre_tokenisers_equal_those_of_llama_cpp() {
    let gguf = model();
    let rules = "gpt-2 llama-bpe qwen2 default tekken gpt-4o qwen35 falcon deepseek-llm deepseek-coder deepseek-v3";
    for pre in rules.split(' ') {
        let parts = TokenizerParts {
            pre,
            ..TokenizerParts::from_gguf(&gguf).unwrap()
        };
        assert_same_ids(&Tokenizer::new(&parts).unwrap(), Special::Plain, pre, OWN);
    }
}

#[test]
fn ids_of_sentencepiece_vocabularies_equal_those_of_llama_cpp() {
    let file = |name: &str| {
        let name = format!("ggml-vocab-{name}.gguf");
        Gguf::open(&hearthnet_testkit::vocabularies().join(name)).unwrap()
    };
    let (llama, phi) = (file("llama-spm"), file("phi-3"));
    let parts = TokenizerParts::from_gguf(&llama).unwrap();
    let mut without_prefix = parts.clone();
    without_prefix.add_space_prefix = Some(false);
    let key = "llama-spm_plain";
    let tokenizer = Tokenizer::new(&parts).unwrap();
    assert_same_ids(&tokenizer, Special::Plain, key, key);
    assert_same_ids(&tokenizer, Special::Parse, "llama-spm_parse", key);
    let tokenizer = Tokenizer::new(&without_prefix).unwrap();
    assert_same_ids(&tokenizer, Special::Plain, "no-prefix_plain", key);
    let tokenizer = Tokenizer::from_gguf(&phi).unwrap();
    assert_same_ids(&tokenizer, Special::Parse, "phi-3_parse", key);
}

#[test]
fn the_corpus_covers_what_it_claims() {
    let reference = Reference::read();
    assert!(reference.texts().len() > 400);
    let differing = |key| reference.ids(key).iter().flatten().count();
    for key in "tekken deepseek-llm llama-spm_parse phi-3_parse no-prefix_plain".split(' ') {
        assert!(differing(key) > 0, "{key}");
    }
    assert!(differing("llama-bpe") > 30 && differing("default") > 30 && differing("gpt-2") > 5);
    assert_ne!(reference.ids("smollm_parse"), reference.ids("smollm_plain"));
}

#[test]
fn every_text_of_the_corpus_comes_back_from_its_ids() {
    let tokenizer = Tokenizer::from_gguf(&model()).unwrap();
    for text in Reference::read().texts() {
        let ids = tokenizer.encode(text, Special::Plain).unwrap();
        // SmolLM2 has no token for some bytes; llama.cpp drops them, and so does HearthNet.
        let whole = |byte: &u8| tokenizer.encodes_byte(*byte);
        let expected: Vec<u8> = text.bytes().filter(whole).collect();
        let bytes = ids.iter().map(|id| tokenizer.token_bytes(*id).unwrap());
        assert_eq!(bytes.collect::<Vec<_>>().concat(), expected);
        let parsed = tokenizer.encode(text, Special::Parse).unwrap();
        if tokenizer.encodes(text) {
            assert_eq!(tokenizer.decode(&ids), text);
            assert_eq!(tokenizer.decode_with_special(&parsed), text);
        }
    }
}

#[test]
fn the_real_model_ends_where_llama_cpp_says() {
    let tokenizer = Tokenizer::from_gguf(&model()).unwrap();
    // <|endoftext|>, <|im_end|>, <reponame>: llama.cpp prints these as "EOG tokens".
    let mut ends: Vec<u32> = (0..tokenizer.vocab_size() as u32).collect();
    ends.retain(|id| tokenizer.is_end_of_generation(*id));
    assert_eq!(ends, [0, 2, 4]);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert!(!tokenizer.adds_bos() && !tokenizer.adds_eos());
    assert_eq!(tokenizer.vocab_size(), 49_152);
    assert_eq!(tokenizer.token_bytes(2), Some(&b"<|im_end|>"[..]));
    assert_eq!(tokenizer.token_bytes(49_152), None);
}
