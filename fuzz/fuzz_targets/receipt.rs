//! Any bytes as the statement of a receipt, and a script for the hashes of rows.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::fuzzing::receipt(data));
