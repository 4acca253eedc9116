//! A host of layers, driven by messages of three callers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_shard::fuzzing::host_streams(data));
