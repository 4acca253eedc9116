#![no_main]
//! Templates, each checked to end in bounded memory.

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_tokens::fuzzing::template_source(data));
