//! Any bytes as the heads of a peer's log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::fuzzing::log_heads(data));
