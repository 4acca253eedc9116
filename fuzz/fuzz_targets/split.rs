//! Any bytes as the files of a split model.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| drop(hearthnet_files::fuzzing::split(data)));
