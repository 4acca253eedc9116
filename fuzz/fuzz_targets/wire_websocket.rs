//! Any bytes as a WebSocket stream, metered whole and in pieces.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_transport::fuzzing::websocket(data));
