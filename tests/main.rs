//! Whole-program tests in one binary, so that the program is linked once. Each file of this folder
//! is a module, except `chat_app.rs`, a test of hearthnet-orchestrator, and `with_torch.rs`, which has
//! the tests of libtorch. To run one file:
//!
//! ```text
//! cargo test -p hearthnet --test program -- failover::
//! ```
//!
//! Tests of different files run at the same time in this process. Each test has homes, ports and
//! processes of its own; only `many_chats` sets state of this process, the recorder of metrics.
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests print measurements"
)]

mod support;

mod absent_source;
mod adversarial;
mod architecture;
mod at_home;
mod bad_input;
mod bus_app;
mod cancel;
#[cfg(feature = "line-editor")]
mod chat_terminal;
mod client_programs;
mod community_life;
mod conformance;
mod demo;
mod diagnose;
mod discovery_lab;
mod disputes;
mod embed;
mod failover;
mod former_hosts;
mod full_disk;
mod isolation;
mod leaving;
mod manners;
mod many_chats;
mod metrics;
mod models;
mod one_daemon;
mod one_writer;
mod openai_http;
mod operations;
mod page;
mod parts;
mod python_client;
mod refusals;
mod running_service;
mod same_answer;
mod second_opinion;
mod secrets;
mod soak;
mod up;
mod weights;
mod wrong_clock;
