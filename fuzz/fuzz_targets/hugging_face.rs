//! Any bytes as files of a Hugging Face directory.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_files::fuzzing::hugging_face(data));
