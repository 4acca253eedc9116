//! Any bytes as a configuration file, and its lines as flags.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet::fuzzing::configuration(data));
