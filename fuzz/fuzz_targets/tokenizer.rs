#![no_main]
//! A vocabulary and a text to encode with it.

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_tokens::fuzzing::tokenizer(data));
