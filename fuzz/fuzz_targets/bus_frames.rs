//! Both sides of the capability bus, driven by a script of messages and steps.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::calls::fuzzing::frames(data));
