//! Any bytes as a SQLite write-ahead log left by a crash.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_bus::fuzzing::log_wal(data));
