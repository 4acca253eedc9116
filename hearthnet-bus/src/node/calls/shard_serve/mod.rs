//! `shard.serve`: session grants for the tensor path (`specs/capability-bus.md`, section 10).
//!
//! A shard host needs no capability to advertise a shard: it holds the node's key and signs the
//! event itself ([`Body::ShardAdvertised`](crate::community::log::Body)).

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hearthnet_transport::Code;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::descriptor::CapabilityDescriptor;
use super::error::CallError;
use super::frame_sink::FrameSink;
use super::params::{Kind, Params};
use super::registry::{Answering, CallContext, Handler, RegisterError, Registry};
use crate::community::log::{EventLog, Level};
use crate::{Capability, Descriptor, Grant, MAX_TEXT, NodeId, NodeKey};

/// Validity of a grant, in seconds. Only the start of the session needs it.
const GRANT_SECONDS: u64 = 60;

/// Shards that this node serves, set by its shard host.
#[derive(Debug, Default)]
pub struct Served(Mutex<BTreeMap<String, Descriptor>>);

impl Served {
    /// Adds or replaces a shard.
    pub fn set(&self, descriptor: Descriptor) {
        self.0
            .lock()
            .insert(descriptor.shard_id.clone(), descriptor);
    }

    /// Removes a shard. Returns true if it was served.
    pub fn remove(&self, shard_id: &str) -> bool {
        self.0.lock().remove(shard_id).is_some()
    }

    pub fn get(&self, shard_id: &str) -> Option<Descriptor> {
        self.0.lock().get(shard_id).cloned()
    }

    pub fn all(&self) -> Vec<Descriptor> {
        self.0.lock().values().cloned().collect()
    }
}

/// Result of `shard.serve`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardGrant {
    /// Advertised `ADDR:PORT` of the tensor endpoint. A caller that reached the node at another
    /// address may find the endpoint at that one, too.
    pub endpoint: String,
    /// The serving node, to be proved by the TLS handshake.
    pub node: NodeId,
    /// Session token for HELLO (`specs/session-grant.md`), base64url. Valid for one session of the
    /// caller with this node.
    pub grant: String,
    /// First Unix second in which the grant is no longer valid.
    pub expires: u64,
}

impl ShardGrant {
    /// The token's bytes; `None` if `grant` is not base64url.
    pub fn token(&self) -> Option<Vec<u8>> {
        URL_SAFE_NO_PAD.decode(&self.grant).ok()
    }
}

/// Registers `shard.serve`, which grants sessions for the shards in `served`.
///
/// # Errors
/// [`RegisterError`].
pub fn register_shards(
    registry: &Registry,
    key: Arc<NodeKey>,
    log: EventLog,
    served: Arc<Served>,
) -> Result<(), RegisterError> {
    let descriptor = CapabilityDescriptor {
        params: Params::none().required("shard_id", Kind::text(MAX_TEXT)),
        ..CapabilityDescriptor::new(
            Capability::shard_serve(),
            "Grants the caller one session with a shard that this node serves.",
            // Every member may chat, and a chat is orchestrated by the caller. Only the host must
            // be trusted, since it sees the caller's rows.
            Some(Level::Member),
        )
    };
    registry.register(descriptor, Arc::new(Serve { key, log, served }))
}

struct Serve {
    key: Arc<NodeKey>,
    log: EventLog,
    served: Arc<Served>,
}

impl Handler for Serve {
    fn call(&self, ctx: CallContext, params: Value, _: FrameSink) -> Answering<'_> {
        Box::pin(std::future::ready(self.grant(&ctx, &params)))
    }
}

impl Serve {
    fn grant(&self, ctx: &CallContext, params: &Value) -> Result<Value, CallError> {
        let own = self.key.id();
        if self.log.state().level(&own) < Some(Level::Trusted) {
            return Err(CallError::new(
                Code::UNAUTHORIZED,
                "this node cannot serve shards: it needs the level trusted itself",
            )
            .with_hint("ask another node, or let an anchor promote this one"));
        }
        let shard = params["shard_id"]
            .as_str()
            .and_then(|id| self.served.get(id));
        let descriptor = shard.ok_or_else(|| {
            CallError::new(
                Code::new("shard_unavailable"),
                "this node does not serve the shard that is asked for",
            )
            .with_hint("its advertisement is out of date; choose another host")
        })?;
        let mut weights = [0; 32];
        hex::decode_to_slice(&descriptor.weights_sha256, &mut weights)
            .map_err(CallError::internal)?;
        let grant = Grant::of_host(own, ctx.caller, own, &weights, GRANT_SECONDS)
            .map_err(|_| CallError::internal("the system gave no randomness"))?;
        let token = grant.sign(&self.key).map_err(CallError::internal)?;
        Ok(json!(ShardGrant {
            endpoint: descriptor.endpoint,
            node: own,
            grant: URL_SAFE_NO_PAD.encode(token),
            expires: grant.expires,
        }))
    }
}

#[cfg(test)]
mod tests;
