#![no_main]
//! Messages, checked not to change the structure of a prompt.

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_tokens::fuzzing::template(data));
