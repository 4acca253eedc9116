//! Any bytes as a weights manifest.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_files::fuzzing::manifest(data));
