//! Answers to chats: over hosts, or on this machine.
//!
//! | concept | file |
//! |---|---|
//! | models and conversations, by configuration | `chat_setup.rs` |
//! | backends that run the layers | `chat_backends.rs` |
//! | layers that this machine computes itself | `private_layers.rs` |
//! | judgement of disputes | `judge.rs` |
//! | one answer, printed as it arrives | `stream.rs` |
//! | report on an answer's route and times | `timing_report.rs` |
//! | service for programs on this machine | `local_service.rs` |
//! | HTTP listeners | `http.rs` |

pub(crate) mod chat_backends;
pub(crate) mod chat_setup;
pub(crate) mod http;
pub(crate) mod judge;
pub(crate) mod local_service;
pub(crate) mod private_layers;
pub(crate) mod stream;
pub(crate) mod timing_report;
