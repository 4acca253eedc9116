//! Frames, application calls and timeouts on one side of an open session.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_transport::fuzzing::session(data));
