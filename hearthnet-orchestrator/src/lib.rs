//! Chats over a model whose layers run on hosts: routes, pipelines, sampling, and checks of the
//! rows that hosts return.
//!
//! | concept | where |
//! |---|---|
//! | sessions with hosts, their selection, and what is known of them | [`hosts`] |
//! | layers on hosts and on this machine, behind [`Backend`] | [`backend`] |
//! | step loop of all running chats, and batches of them | `steps` |
//! | text in, tokens out | [`chat`] |
//! | several callers: queueing, prefix cache, cancellation | [`service`] |
//! | OpenAI's interface, chat as a capability of the bus | [`http`], [`bus`] |
//! | layers for a new host, layers of the community | [`placement`] (pure) |
//! | frames of an answer | `frames` |
//! | measured times | `times` (pure) |
//! | arithmetics that an answer may be computed with | [`exact`] (pure) |
//! | error codes, hints | [`error`] |

mod api;
pub mod backend;
pub mod chat;
pub mod error;
pub mod exact;
mod frames;
/// Bodies of the fuzz targets. Not a public interface.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::api::http::fuzzing::http_request;
    pub use crate::backend::fuzzing::conversation as pipeline;
}
pub mod hosts;
pub mod placement;
pub mod service;
mod steps;
#[cfg(test)]
mod tests;
mod times;

pub use api::{bus, http};
pub use backend::events::failovers;
pub use backend::{Backend, fallback, local, private_layers, sharded};
pub use error::ChatError;
pub use hearthnet_bus::calls::Cancel;
pub use hosts::{health, link, router};
pub use placement::coverage;
pub use service::Service;
pub use steps::chat_loop::run_in_task;
