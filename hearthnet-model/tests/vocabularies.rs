//! llama.cpp's own vocabulary tests: `ggml-vocab-NAME.gguf` with texts (`.inp`) and their ids
//! (`.out`).
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_model::gguf::Gguf;
use hearthnet_model::tokenizer::{Special, Tokenizer, TokenizerError};
use std::fs;

/// What stands between the texts.
const BETWEEN: &str = "\n__ggml_vocab_test__\n";

/// The vocabularies that come with texts and ids, and that are supported.
const SUPPORTED: &[&str] = &[
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
];

fn tokenizer(name: &str) -> Result<Tokenizer, TokenizerError> {
    let path = hearthnet_testkit::vocabularies().join(format!("ggml-vocab-{name}.gguf"));
    Tokenizer::from_gguf(&Gguf::open(&path).unwrap())
}

/// The texts of a vocabulary's test, and their ids.
fn cases(name: &str) -> Vec<(String, Vec<u32>)> {
    let folder = hearthnet_testkit::vocabularies();
    let read = |kind| fs::read_to_string(folder.join(format!("ggml-vocab-{name}.gguf.{kind}")));
    let (texts, ids) = (read("inp").unwrap(), read("out").unwrap());
    // The last text has the mark behind it as well.
    let texts = texts.strip_suffix(BETWEEN).unwrap_or(&texts);
    let texts: Vec<_> = texts.split(BETWEEN).map(str::to_owned).collect();
    let ids: Vec<Vec<u32>> = ids
        .lines()
        .map(|line| {
            line.split_whitespace()
                .map(|id| id.parse().unwrap())
                .collect()
        })
        .collect();
    assert_eq!(texts.len(), ids.len(), "{name}");
    texts.into_iter().zip(ids).collect()
}

#[test]
fn ids_equal_those_of_llama_cpp_in_every_vocabulary() {
    let mut compared = 0;
    let mut wrong = Vec::new();
    for name in SUPPORTED {
        let tokenizer = tokenizer(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (text, expected) in cases(name) {
            let got = tokenizer.encode(&text, Special::Plain).unwrap();
            compared += 1;
            if got != expected {
                wrong.push(format!(
                    "{name}: {text:?}\n   ours {got:?}\n  llama {expected:?}"
                ));
            }
        }
    }
    let shown = wrong.iter().take(5).cloned().collect::<Vec<_>>().join("\n");
    assert!(
        wrong.is_empty(),
        "{} of {compared} texts differ\n{shown}",
        wrong.len()
    );
    assert!(compared >= 500, "{compared}");
}
