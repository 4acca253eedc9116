//! `shard.serve` hands out session grants for the tensor path; `shard.advertise` lets an
//! app on this machine put a shard of its own into the log.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::future::BoxFuture;
use hearthnet_transport::Code;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::descriptor::{CallLimits, CapabilityDescriptor, Trust};
use super::super::error::CallError;
use super::super::params::{Kind, Params};
use super::super::registry::{CallContext, Handler};
use super::super::server::FrameSink;
use super::{blocking, log_refusal, own_level};
use crate::log::{Body, EventLog, Level};
use crate::now_ms;
use crate::{Capability, Descriptor, Grant, MAX_LAYERS, MAX_TEXT, NodeId, NodeKey};

/// How long a grant holds, in seconds: it is used at once, and the session that it opens
/// lives on.
const GRANT_SECONDS: u64 = 60;
/// Largest number in a descriptor that JSON readers agree on.
const MAX_JSON_INTEGER: i64 = (1 << 53) - 1;

/// The shards that this node serves, as its shard host and the apps on this machine say.
#[derive(Debug, Default)]
pub struct Served(Mutex<BTreeMap<String, Descriptor>>);

impl Served {
    /// Serves a shard, or says something new about it.
    pub fn set(&self, descriptor: Descriptor) {
        self.0
            .lock()
            .insert(descriptor.shard_id.clone(), descriptor);
    }

    /// Serves a shard no longer. Whether it was served.
    pub fn remove(&self, shard_id: &str) -> bool {
        self.0.lock().remove(shard_id).is_some()
    }

    /// What is served under this id.
    pub fn get(&self, shard_id: &str) -> Option<Descriptor> {
        self.0.lock().get(shard_id).cloned()
    }

    /// All that is served.
    pub fn all(&self) -> Vec<Descriptor> {
        self.0.lock().values().cloned().collect()
    }
}

/// What `shard.serve` ends with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardGrant {
    /// `ADDR:PORT` of the tensor endpoint, as it is advertised. A caller that reached the
    /// node elsewhere may find the endpoint at that address, too.
    pub endpoint: String,
    /// The node that serves, and that the TLS handshake must prove.
    pub node: NodeId,
    /// The session token for HELLO (`specs/session-grant.md`), base64url: good for one
    /// session of the caller with this node.
    pub grant: String,
    /// First Unix second in which it no longer holds.
    pub expires: u64,
}

impl ShardGrant {
    /// The token's bytes; `None` if they are not base64url.
    pub fn token(&self) -> Option<Vec<u8>> {
        URL_SAFE_NO_PAD.decode(&self.grant).ok()
    }
}

pub(super) struct Serve {
    pub(super) key: Arc<NodeKey>,
    pub(super) log: EventLog,
    pub(super) served: Arc<Served>,
}

pub(super) fn serve_descriptor() -> CapabilityDescriptor {
    CapabilityDescriptor {
        params: Params::none().required("shard_id", Kind::text(MAX_TEXT)),
        ..CapabilityDescriptor::new(
            Capability::shard_serve(),
            "Grants the caller one session with a shard that this node serves.",
            // The community's members chat, and to chat is to orchestrate: it is the host
            // that has to be trusted, for it sees what others compute.
            Trust::Member,
        )
    }
}

impl Handler for Serve {
    fn call(
        &self,
        ctx: CallContext,
        params: Value,
        _: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        Box::pin(std::future::ready(self.grant(&ctx, &params)))
    }
}

impl Serve {
    fn grant(&self, ctx: &CallContext, params: &Value) -> Result<Value, CallError> {
        let own = self.key.id();
        own_level(&self.log, own, Level::Trusted, "serve shards")?;
        let shard_id = params["shard_id"].as_str().unwrap_or_default();
        let descriptor = self.served.get(shard_id).ok_or_else(|| {
            CallError::new(
                Code::new("shard_unavailable"),
                "this node does not serve the shard that is asked for",
            )
            .with_hint("its advertisement is out of date; choose another host")
        })?;
        let mut id = [0; 16];
        getrandom::fill(&mut id)
            .map_err(|_| CallError::new(Code::INTERNAL, "the system gave no randomness"))?;
        let now = now_ms() / 1000;
        let grant = Grant {
            issuer: own,
            subject: ctx.caller,
            audience: own,
            scope: Capability::shard_serve(),
            not_before: now,
            expires: now + GRANT_SECONDS,
            id,
        };
        let token = grant
            .sign(&self.key)
            .map_err(|e| CallError::new(Code::INTERNAL, e.to_string()))?;
        Ok(json!(ShardGrant {
            endpoint: descriptor.endpoint,
            node: own,
            grant: URL_SAFE_NO_PAD.encode(token),
            expires: grant.expires,
        }))
    }
}

pub(super) struct Advertise {
    pub(super) key: Arc<NodeKey>,
    pub(super) log: EventLog,
    pub(super) served: Arc<Served>,
}

pub(super) fn advertise_descriptor() -> CapabilityDescriptor {
    let natural = |max| Kind::Integer { min: 0, max };
    let layer = || natural(i64::from(MAX_LAYERS));
    let text = || Kind::text(MAX_TEXT);
    let fields = Params::none()
        .required("shard_id", text())
        .required("model_id", text())
        .required("weights_sha256", text())
        .required("layer_range", Kind::list(2, layer()))
        .required("total_layers", layer())
        .required("vram_required_mb", natural(MAX_JSON_INTEGER))
        .optional("weights_mb", natural(MAX_JSON_INTEGER))
        .optional("kv_mb", natural(MAX_JSON_INTEGER))
        .required("max_concurrent_streams", natural(i64::from(u32::MAX)))
        .required("host", text())
        .required("endpoint", text())
        .required("advertised_at", natural(MAX_JSON_INTEGER))
        .required("boundary_dtype", text())
        .required("arithmetic", text())
        .required("ms_per_token", Kind::Number { min: 0.0, max: 1e9 })
        .required("queue_depth", natural(i64::from(u32::MAX)))
        .required("software", text());
    CapabilityDescriptor {
        params: Params::none()
            .optional("advertise", Kind::Object { fields })
            .optional("withdraw", text()),
        limits: CallLimits {
            concurrent: 4,
            ..CallLimits::default()
        },
        ..CapabilityDescriptor::new(
            Capability::shard_advertise(),
            "Advertises a shard that an app on this node's machine serves, or withdraws it.",
            Trust::Trusted,
        )
    }
}

impl Handler for Advertise {
    fn call(
        &self,
        ctx: CallContext,
        params: Value,
        _: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        let this = Self {
            key: Arc::clone(&self.key),
            log: self.log.clone(),
            served: Arc::clone(&self.served),
        };
        Box::pin(async move {
            // An advertisement is signed by the host itself, so a node cannot advertise
            // for others: they have logs of their own.
            if ctx.caller != this.key.id() {
                return Err(CallError::new(
                    Code::UNAUTHORIZED,
                    "a node advertises what runs on its own machine only",
                )
                .with_hint("call the node on the machine that serves the shard"));
            }
            let take = |name| params.get(name).cloned();
            match (take("advertise"), take("withdraw")) {
                (Some(descriptor), None) => blocking(move || this.advertise(descriptor)).await,
                (None, Some(Value::String(shard_id))) => {
                    blocking(move || this.withdraw(shard_id)).await
                }
                _ => Err(CallError::bad_request(
                    "params",
                    "give one of advertise and withdraw",
                )),
            }
        })
    }
}

impl Advertise {
    fn advertise(&self, descriptor: Value) -> Result<Value, CallError> {
        let bad = |e: &dyn std::fmt::Display| CallError::bad_request("advertise", e);
        let descriptor: Descriptor = serde_json::from_value(descriptor).map_err(|e| bad(&e))?;
        descriptor.validate().map_err(|e| bad(&e))?;
        if descriptor.host != self.key.id() {
            let problem = "must be this node's id, which signs the advertisement";
            return Err(CallError::bad_request("advertise.host", problem));
        }
        let now_ms = now_ms();
        let body = Body::ShardAdvertised(Box::new(descriptor.clone()));
        self.log
            .append(&self.key, body, now_ms)
            .map_err(|e| log_refusal(&e))?;
        self.served.set(descriptor);
        Ok(json!({ "expires_ms": now_ms.saturating_add(crate::log::ADVERT_LIFE_MS) }))
    }

    fn withdraw(&self, shard_id: String) -> Result<Value, CallError> {
        let was_served = self.served.remove(&shard_id);
        let body = Body::ShardWithdrawn { shard_id };
        self.log
            .append(&self.key, body, now_ms())
            .map_err(|e| log_refusal(&e))?;
        Ok(json!({ "was_advertised": was_served }))
    }
}
