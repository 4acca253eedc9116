//! Any bytes as a peer's certificate.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_transport::fuzzing::certificate(data));
