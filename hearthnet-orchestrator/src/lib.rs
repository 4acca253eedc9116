//! Chats over a model whose layers run on hosts: routes, pipelines, sampling, and checks of the
//! rows that hosts return.
//!
//! | concept | where |
//! |---|---|
//! | which hosts run which layers | [`router`] (pure) |
//! | steps in flight, replay after a failure | `pipeline` (pure) |
//! | detection of slow hosts | `hop_timeout` (pure) |
//! | failures and speed of hosts over all calls | [`health`] (pure) |
//! | plausibility of returned rows | `checks` (pure) |
//! | layers for a new host, layers of the community | [`placement`], [`coverage`] (pure) |
//! | a session with a host; hosts by address or of a community | [`link`], [`hosts`] |
//! | event loop of all running chats | `chat_loop` |
//! | layers on this machine, layers on hosts | [`local`], [`sharded`], behind [`Backend`] |
//! | layers whose input no host may see | [`private_layers`] |
//! | switch from hosts to this machine in the middle of an answer | [`fallback`] |
//! | text in, tokens out | [`chat`] |
//! | logits of several chats in one matrix product | `logits_batcher` |
//! | formation of batches | `batcher` |
//! | chat as a capability of the bus | [`bus`] |
//! | several callers: queueing, prefix cache, cancellation | [`service`] |
//! | the OpenAI-compatible HTTP interface | [`http`] |
//! | frames of an answer | `frames` |
//! | measured times | `times` (pure) |
//! | host events for flight record, metrics and readers | `events` |
//! | arithmetics that an answer may be computed with | [`exact`] (pure) |
//! | error codes, hints, blame | [`error`] |

pub mod backend;
mod batcher;
pub mod bus;
pub mod chat;
mod chat_loop;
mod checks;
pub mod coverage;
pub mod error;
mod events;
pub mod exact;
pub mod fallback;
mod frames;
pub mod health;
mod hop_timeout;
pub mod hosts;
pub mod http;
pub mod link;
pub mod local;
mod logits_batcher;
mod pipeline;
pub mod placement;
pub mod private_layers;
pub mod router;
pub mod service;
pub mod sharded;
mod times;

/// Node id of a test host with a short name.
#[cfg(test)]
fn node(name: &str) -> hearthnet_bus::NodeId {
    let mut bytes = [0; 32];
    for (byte, letter) in bytes.iter_mut().zip(name.bytes()) {
        *byte = letter;
    }
    hearthnet_bus::NodeId::from_checked(bytes)
}

pub use backend::Backend;
pub use error::ChatError;
pub use hearthnet_bus::calls::Cancel;
pub use service::Service;
