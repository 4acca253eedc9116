//! What anybody on the network may announce, and what a person may write as a static peer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::discovery::fuzzing::announcement(data));
