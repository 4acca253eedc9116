//! Any bytes as one event of a community's log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::fuzzing::log_event(data));
