//! A caller's pipeline, over hosts that fail.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_orchestrator::fuzzing::pipeline(data));
