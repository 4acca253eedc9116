//! The capabilities that this crate answers itself.
//!
//! | capability | file |
//! |---|---|
//! | `experimental.distributed_llm.shard.serve@1.0`, `...shard.advertise@1.0` | `shard.rs` |
//!
//! `community.join@1.0` is in `joining.rs`, beside the joiner's side of it; `...chat@1.0` needs
//! a model, so `hearthnet-orchestrator` answers it (`service.rs`).

mod shard;

use std::sync::Arc;

pub use shard::{Served, ShardGrant};

use super::descriptor::Trust;
use super::error::{CallError, Code};
use super::registry::{RegisterError, Registry};
use super::server::{Authority, Research};
use crate::log::{EventLog, Level, LogError};
use crate::{NodeId, NodeKey};

/// What the event log says about callers, as [`CallServer`](super::CallServer) asks it.
#[derive(Clone)]
pub struct LogAuthority {
    log: EventLog,
    research_here: bool,
}

impl std::fmt::Debug for LogAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogAuthority")
            .field("community", &self.log.community())
            .field("research_here", &self.research_here)
            .finish_non_exhaustive()
    }
}

impl LogAuthority {
    /// Asks `log`; `research_here` is the setting `policy.research.enable` of this node.
    pub fn new(log: EventLog, research_here: bool) -> Self {
        Self { log, research_here }
    }
}

impl Authority for LogAuthority {
    fn trust(&self, node: &NodeId) -> Trust {
        self.log.state().level(node).into()
    }

    fn research(&self) -> Research {
        if !self.research_here {
            Research::OffHere
        } else if self.log.state().policy.research {
            Research::On
        } else {
            Research::OffInCommunity
        }
    }
}

impl From<Option<Level>> for Trust {
    fn from(level: Option<Level>) -> Self {
        match level {
            None => Self::Anyone,
            Some(Level::Member) => Self::Member,
            Some(Level::Trusted) => Self::Trusted,
            Some(Level::Anchor) => Self::Anchor,
        }
    }
}

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
    let code = Code::parse(error.code()).unwrap_or(Code::INTERNAL);
    CallError::new(code, error.to_string())
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
