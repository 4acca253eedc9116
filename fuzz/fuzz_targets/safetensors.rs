//! Any bytes as a safetensors file.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_files::fuzzing::safetensors(data));
