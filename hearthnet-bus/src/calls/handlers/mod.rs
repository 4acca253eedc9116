//! The capabilities that this crate answers itself.
//!
//! | capability | file |
//! |---|---|
//! | `experimental.distributed_llm.shard.serve@1.0`, `...shard.advertise@1.0` | `shard.rs` |
//!
//! `community.join@1.0` is in `joining.rs`, beside the joiner's side of it; `...chat@1.0` needs
//! a model, so `hearthnet-orchestrator` answers it (`bus.rs`).

mod shard;

use std::sync::Arc;

pub use shard::{Served, ShardGrant};

use super::error::CallError;
use super::registry::{RegisterError, Registry};
use crate::log::{EventLog, Level, LogError};
use crate::{NodeId, NodeKey};
use hearthnet_transport::Code;

/// Adds `shard.serve` and `shard.advertise`: this node grants sessions with the shards in
/// `served`, and lets apps on this machine advertise theirs.
///
/// # Errors
/// [`RegisterError`].
pub fn register_shards(
    registry: &Registry,
    key: Arc<NodeKey>,
    log: EventLog,
    served: Arc<Served>,
) -> Result<(), RegisterError> {
    let serve = shard::Serve {
        key: Arc::clone(&key),
        log: log.clone(),
        served: Arc::clone(&served),
    };
    registry.register(shard::serve_descriptor(), Arc::new(serve))?;
    let advertise = shard::Advertise { key, log, served };
    registry.register(shard::advertise_descriptor(), Arc::new(advertise))
}

/// A log that refuses is the caller's fault if what it asked has no effect.
fn log_refusal(error: &LogError) -> CallError {
    CallError::new(error.code(), error.to_string())
}

/// Runs a short piece of work that blocks, such as a transaction.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CallError> + Send + 'static,
) -> Result<T, CallError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(CallError::new(Code::INTERNAL, "the work was given up")),
    }
}

/// A level of this node itself that is too low for what it offers.
fn own_level(log: &EventLog, own: NodeId, needed: Level, what: &str) -> Result<(), CallError> {
    if log.state().level(&own) >= Some(needed) {
        return Ok(());
    }
    Err(CallError::new(
        Code::UNAUTHORIZED,
        format!("this node cannot {what}: it needs the level {needed} itself"),
    )
    .with_hint("ask another node, or let an anchor promote this one"))
}

#[cfg(test)]
mod tests;
