//! Any blocks of weights, multiplied on every instruction set.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_engine::fuzzing::weight_blocks(data));
