//! A gossip session, driven by a script of messages, steps and results of work.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::sync::fuzzing::session(data));
