//! Any bytes as one message of the tensor transport.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_transport::fuzzing::frame(data));
