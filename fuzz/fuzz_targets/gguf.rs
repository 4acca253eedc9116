//! Any bytes as a GGUF file.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_tokens::fuzzing::gguf(data));
