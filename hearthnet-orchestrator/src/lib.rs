//! Covers a model's layers with shards, drives the pipeline, samples, and checks
//! what comes back.
//!
//! | concept | where |
//! |---|---|
//! | which hosts run which layers | [`router`] (pure) |
//! | what is in flight where, what is replayed after a failure | `pipeline` (pure) |
//! | how slow is too slow | `hop_timeout` (pure) |
//! | what hosts did in all calls before | [`health`] (pure) |
//! | is what a host returned possible | `checks` (pure) |
//! | which layers a host takes, which the community has | [`placement`], [`coverage`] (pure) |
//! | a session with a host; hosts by address, or of a community | [`link`], [`hosts`] |
//! | all running chats taken forward together | `steps` |
//! | the layers here, the layers there | [`local`], [`sharded`], behind [`Backend`] |
//! | layers that nobody else is to see the input of | [`private_layers`] |
//! | from there to here in the middle of an answer | [`fallback`] |
//! | text in, tokens out | [`chat`] |
//! | logits for many chats at once | `logits_batcher` |
//! | how batches of many chats form | `batcher` |
//! | chat as a capability of the bus | [`bus`] |
//! | many callers: turns, kept conversations, giving up | [`service`] |
//! | the OpenAI-compatible HTTP interface | [`http`] |
//! | what a caller hears of its answer | `frames` |
//! | times that were measured | `times` (pure) |
//! | what flight record, numbers and readers hear of hosts | `events` |
//! | which arithmetics an answer may be made with | [`exact`] (pure) |
//! | codes, hints, blame | [`error`] |

pub mod backend;
mod batcher;
pub mod bus;
pub mod chat;
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
mod steps;
mod times;

/// A host of the tests, by a short name.
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
