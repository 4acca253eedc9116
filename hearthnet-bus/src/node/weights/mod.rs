//! Transfer of weights between members: the path `/weights/v1`. `specs/weights-transfer.md` is the
//! normative text.
//!
//! | concept | type | file |
//! |---|---|---|
//! | messages | [`Request`], [`Reply`] | `message.rs` |
//! | requests in flight, of either side | | `session.rs` |
//! | pace while this node answers | | `pace.rs` |
//! | source of the bytes that a node serves | [`WeightsStore`] | `store.rs` |
//! | serving peers from it; path and limits | | `server.rs` |
//! | asking a peer | [`WeightsPeer`] | `client.rs` |
//!
//! This module knows neither tensors nor files. A [`WeightsStore`] supplies the bytes; the asking
//! side verifies them.

mod client;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod message;
mod pace;
mod server;
mod session;
mod store;
#[cfg(test)]
mod tests;

pub use client::{WeightsError, WeightsPeer};
pub use message::{MAX_DATA_BYTES, MAX_RUNS, Reply, Request};
pub use server::path_rule;
pub(super) use server::{WEIGHTS_PATH, Weights};
pub use store::{Busy, Held, Object, WeightsStore};
