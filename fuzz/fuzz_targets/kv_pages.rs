//! Operations on the pages of keys and values.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_engine::fuzzing::kv_pages(data));
