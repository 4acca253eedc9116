//! Any bytes as the body of a request of every HTTP API.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearthnet_orchestrator::fuzzing::http_request(data));
