//! Any bytes as a compressed tensor chunk.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_transport::fuzzing::decompress(data));
