//! Any bytes as an invite code, and as the content of one.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::fuzzing::invite(data));
