//! Evidence of a dispute, sealed and opened.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::fuzzing::evidence(data));
