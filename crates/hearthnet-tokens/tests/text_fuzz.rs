//! Runs the text fuzz targets on random combinations of pieces.

use hearthnet_tokens::fuzzing;
use proptest::prelude::*;

/// Texts made of `pieces` and arbitrary characters.
fn from(pieces: &'static [&'static str]) -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        6 => prop::sample::select(pieces).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_vocabulary_is_refused_or_sound(
        pre in prop::sample::select(vec!["smollm", "llama-bpe", "qwen2", "gpt-2", "default", "tekken", "deepseek-llm", "llama", "llama-", "?"]),
        input in from(&["\n1 a", "\n1 b", "\n1 ab", "\n1 Ġ", "\n3 c", "\n4 ac", "\n2 ", "\n1 ▁a", "\n4 ▁▁", "\n3 <s>", "\n6 <0x0>", "<s>", "\n+a b", "\n+ab c", "\n\n", "a", "b", "c", " "]),
    ) {
        fuzzing::tokenizer(format!("{pre}{input}").as_bytes());
    }

    #[test]
    fn no_conversation_changes_the_structure_of_its_prompt(
        input in from(&["<|im_start|>", "<|im_end|>", "<|", "|>", "im_end", "user", "x", "[", "]", "</t>", "</s>", "</", "s>", "\0", " "]),
    ) {
        fuzzing::template(input.as_bytes());
    }

    #[test]
    fn any_cut_finds_the_same_stop(
        input in from(&["a", "b", "ab", "\n", "\n\n", "é"]),
    ) {
        fuzzing::stop(input.as_bytes());
    }

    #[test]
    fn no_bytes_break_any_target(bytes: Vec<u8>) {
        fuzzing::tokenizer(&bytes);
        fuzzing::template(&bytes);
        fuzzing::template_source(&bytes);
        fuzzing::stop(&bytes);
    }
}
