//! Any bytes as what a crash left of SQLite's write-ahead log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::fuzzing::log_wal(data));
