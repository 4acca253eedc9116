//! Both sides of a transfer of weights, driven by a script of messages and steps.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::node::weights::fuzzing::session(data));
