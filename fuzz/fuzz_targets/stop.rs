#![no_main]
//! Stop strings and a text to look for them in.

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_tokens::fuzzing::stop(data));
