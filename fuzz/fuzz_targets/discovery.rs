//! Received announcements, and static peers as configured by a person.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::discovery::fuzzing::announcement(data));
