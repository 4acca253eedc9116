#![no_main]
//! Templates, and whether each comes to an end in bounded memory.

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_model::fuzzing::template_source(data));
