//! Server side of calls: admission ([`CallServer::admit`], with the time as an argument) and the
//! tasks that run admitted calls.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hearthnet_transport::{CloseCode, Code, PeerSocket, Violation};
use parking_lot::Mutex;
use scopeguard::defer;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Cancel;
use super::budget::{BudgetKey, Budgets, Rate};
use super::descriptor::{CapabilityDescriptor, Stability};
use super::envelope::{Envelope, MAX_ENVELOPE_BYTES};
use super::error::CallError;
use super::frame::Request;
use super::frame_sink::{Connection, FrameSink};
use super::registry::{Answering, CallContext, Handler, RegisterError, Registry};
use super::session::ServerEvent;
use super::wire::{Ended, Wire};
use crate::community::log::Level;
use crate::identity::replay::ReplayError;
use crate::now_ms;
use crate::{Capability, NodeId, ReplayCache};

/// Longest connection of a stranger: it only needs to join.
const STRANGER_STAYS: Duration = Duration::from_secs(15);
/// Calls per connection of a stranger: a few, in case of typing errors. Each costs two signature
/// checks, less than the handshake before.
const STRANGER_CALLS: usize = 4;
/// Capacity of the replay cache, shared by all callers. An envelope stays for at most four minutes.
/// A member that uses its whole budget and dates its calls 115 s ahead takes 2,350 entries.
const REMEMBERED_CALLS: usize = 8192;

/// Levels and the policy on experiments; asked again for each call.
pub trait Authority: Send + Sync {
    /// Current level of a node; `None` for strangers and revoked nodes.
    fn level(&self, node: &NodeId) -> Option<Level>;

    fn research(&self) -> Research;

    /// Quota key of a node: itself, or the member that answers for it because it was invited by a
    /// member that is not an anchor.
    fn quota_key(&self, node: &NodeId) -> NodeId {
        *node
    }
}

/// Gives every caller the same level, with experiments on: for an API that only programs of this
/// user reach.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct OneLevel(pub Option<Level>);

impl Authority for OneLevel {
    fn level(&self, _: &NodeId) -> Option<Level> {
        self.0
    }

    fn research(&self) -> Research {
        Research::On
    }
}

/// State of the two switches for experimental capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Research {
    On,
    /// `policy.research.enable` is false in this node's configuration.
    OffHere,
    /// The community's policy `research` is false.
    OffInCommunity,
}

impl Research {
    /// Returns the refusal of the experimental capability `what`, if it may not run.
    ///
    /// # Errors
    /// `experimental_disabled`, with the setting's name.
    pub fn check(self, what: &str) -> Result<(), CallError> {
        let (message, hint) = match self {
            Self::On => return Ok(()),
            Self::OffHere => (
                format!("{what} is switched off on this node: policy.research.enable is false"),
                "its owner can set policy.research.enable = true in the configuration",
            ),
            Self::OffInCommunity => (
                format!("{what} is switched off in this community: its policy `research` is off"),
                "an anchor can switch it on with `hearthnet community policy`",
            ),
        };
        Err(CallError::new(Code::EXPERIMENTAL_DISABLED, message).with_hint(hint))
    }
}

/// Source of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The node whose key the TLS handshake proved.
    Peer(NodeId),
    /// An app on this machine, through the local API.
    Local,
}

/// Admits and runs the calls to this node.
pub struct CallServer {
    own: NodeId,
    registry: Arc<Registry>,
    authority: Arc<dyn Authority>,
    gate: Mutex<Gate>,
}

struct Gate {
    budgets: Budgets,
    seen: ReplayCache,
}

struct Call {
    capability: Capability,
    params: Value,
    /// Id of the call's envelope, and the first millisecond at which it is too old.
    envelope: Option<([u8; 16], u64)>,
}

/// An admitted call, ready to run.
pub struct Admitted {
    handler: Arc<dyn Handler>,
    ctx: CallContext,
    params: Value,
    seconds: u32,
    /// True for a stranger with a valid proof of an invite.
    is_invited: bool,
}

impl std::fmt::Debug for Admitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Parameters may hold a user's text.
        f.debug_struct("Admitted")
            .field("ctx", &self.ctx)
            .finish_non_exhaustive()
    }
}

impl CallServer {
    /// A server for the node `own`, with the budgets [`Rate::MEMBER`] and
    /// [`Rate::STRANGERS`]. Adds [`Capability::bus_describe`] to the registry.
    pub fn new(own: NodeId, registry: Arc<Registry>, authority: Arc<dyn Authority>) -> Self {
        // Fails if another server on this registry has added it already; that is fine.
        let _ = register_describe(&registry);
        Self {
            own,
            registry,
            authority,
            gate: Mutex::new(Gate {
                budgets: Budgets::new(Rate::MEMBER, Rate::STRANGERS, 0),
                seen: ReplayCache::new(REMEMBERED_CALLS),
            }),
        }
    }

    /// The node whose calls are served.
    pub fn own(&self) -> NodeId {
        self.own
    }

    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Checks everything that must hold before a handler runs. Cheap checks come first. Checks
    /// whose refusal tells something about this node come after the check of the caller. A
    /// stranger's request is verified before it takes any scarce resource.
    ///
    /// # Errors
    /// The refusal for the caller.
    pub fn admit(
        &self,
        origin: Origin,
        request: Request,
        now_ms: u64,
    ) -> Result<Admitted, CallError> {
        let (caller, is_local) = match origin {
            Origin::Peer(peer) => (peer, false),
            Origin::Local => (self.own, true),
        };
        let level = self.authority.level(&caller);
        // Members that this node's inviter also invited do not use up its own quota.
        let quota_key = match is_local {
            true => caller,
            false => self.authority.quota_key(&caller),
        };
        let (invite, call) = if level.is_none() && !is_local {
            // Read first: the bucket to charge depends on the proof in the request.
            let brought = self
                .read(origin, request, now_ms)
                .and_then(|call| Ok((self.stranger_invite(&caller, &call)?, call)));
            let budget = match &brought {
                Ok((Some(invite), _)) => BudgetKey::Invite(*invite),
                _ => BudgetKey::Strangers,
            };
            self.charge(budget, now_ms)?;
            brought?
        } else {
            self.charge(BudgetKey::Member(quota_key), now_ms)?;
            (None, self.read(origin, request, now_ms)?)
        };
        self.note(caller, quota_key, &call, now_ms)?;
        let Call {
            capability, params, ..
        } = call;
        let local = self.registry.find(&capability)?;
        let descriptor = &local.descriptor;
        if level < descriptor.trust {
            let name = |level: Option<Level>| level.map_or("no member", Level::into);
            return Err(unauthorized(format!(
                "{} needs the level {}, {caller} is {}",
                descriptor.capability,
                name(descriptor.trust),
                name(level),
            ))
            .with_hint("an anchor can raise it: `hearthnet community promote NODE`"));
        }
        if descriptor.stability == Stability::Experimental {
            self.authority.research().check(capability.name())?;
        }
        check_params(descriptor, &params)?;
        Ok(Admitted {
            ctx: CallContext {
                caller,
                quota_key,
                is_local,
                capability,
                cancel: Cancel::default(),
                slot: local.slot(quota_key, is_local)?,
            },
            params,
            seconds: descriptor.limits.seconds,
            handler: local.handler,
            is_invited: invite.is_some(),
        })
    }

    fn charge(&self, budget: BudgetKey, now_ms: u64) -> Result<(), CallError> {
        let taken = self.gate.lock().budgets.take(budget, now_ms);
        taken.map_err(|wait_ms| {
            CallError::new(Code::RATE_LIMITED, "too many calls in a short time")
                .with_hint(format!("try again in {wait_ms} ms"))
        })
    }

    /// Invite that a stranger's call proves, if any.
    fn stranger_invite(&self, caller: &NodeId, call: &Call) -> Result<Option<NodeId>, CallError> {
        if !is_join(&call.capability) {
            return Err(
                unauthorized(format!("{caller} is not a member of this community"))
                    .with_hint("join with an invite code: `hearthnet community join CODE`"),
            );
        }
        let local = self.registry.find(&call.capability)?;
        check_params(&local.descriptor, &call.params)?;
        local.handler.authorize_stranger(caller, &call.params)
    }

    /// Decodes a request, before any check of the caller's rights.
    fn read(&self, origin: Origin, request: Request, now_ms: u64) -> Result<Call, CallError> {
        let problem = match (origin, request) {
            (Origin::Peer(peer), Request::Signed { envelope, params }) => {
                return self.open_signed(peer, &envelope, &params, now_ms);
            }
            (Origin::Local, Request::Plain { capability, params }) => {
                return Ok(Call {
                    capability,
                    params,
                    envelope: None,
                });
            }
            (Origin::Local, Request::Signed { .. }) => "calls from this machine carry no envelope",
            (Origin::Peer(_), Request::Plain { .. }) => {
                "is missing; calls between nodes are signed"
            }
        };
        Err(CallError::bad_request("envelope", problem))
    }

    fn open_signed(
        &self,
        sender: NodeId,
        envelope: &str,
        params: &str,
        now_ms: u64,
    ) -> Result<Call, CallError> {
        let unreadable = || CallError::bad_request("envelope", "is not base64url of an envelope");
        if envelope.len() > MAX_ENVELOPE_BYTES.div_ceil(3) * 4 {
            return Err(unreadable());
        }
        let bytes = URL_SAFE_NO_PAD.decode(envelope).map_err(|_| unreadable())?;
        let envelope = Envelope::open(&bytes, params, sender, self.own, now_ms)?;
        let params = serde_json::from_str(params)
            .map_err(|_| CallError::bad_request("params", "is not JSON"))?;
        Ok(Call {
            envelope: Some((envelope.id, envelope.expires_at_ms())),
            capability: envelope.capability,
            params,
        })
    }

    /// Adds a call's envelope to the replay cache, so that it is accepted once.
    fn note(
        &self,
        sender: NodeId,
        quota_key: NodeId,
        call: &Call,
        now_ms: u64,
    ) -> Result<(), CallError> {
        let Some((id, expires_at_ms)) = call.envelope else {
            return Ok(());
        };
        let mut gate = self.gate.lock();
        let noted = gate
            .seen
            .note((sender, id), quota_key, expires_at_ms, now_ms);
        noted.map_err(|refusal| match refusal {
            ReplayError::Seen => {
                CallError::new(Code::CALL_REPLAYED, "the envelope was used before")
                    .with_hint("make a new one for each call")
            }
            ReplayError::Full => {
                CallError::new(Code::RATE_LIMITED, "too many calls in the last minutes")
            }
        })
    }

    /// Serves the calls of a peer until its socket closes.
    pub async fn serve(&self, socket: PeerSocket) {
        let origin = Origin::Peer(socket.peer());
        self.serve_wire(socket.into(), origin).await;
    }

    /// [`CallServer::serve`] over any transport. Dropping the future ends every call and the
    /// socket.
    pub(crate) async fn serve_wire(&self, mut wire: Wire, origin: Origin) {
        let is_stranger = match origin {
            Origin::Peer(peer) => self.authority.level(&peer).is_none(),
            Origin::Local => false,
        };
        let connection = Arc::new(Connection::default());
        defer! {
            connection.close();
        }
        // Dropping the set aborts the running calls.
        let mut running = JoinSet::new();
        let (mut calls, peer) = (0, wire.peer());
        let receive = |text: &str| -> Result<(), Violation> {
            while running.try_join_next().is_some() {}
            match connection.receive(text)? {
                ServerEvent::Open { .. } if is_stranger && calls == STRANGER_CALLS => {
                    let detail = "a stranger made too many calls";
                    return Err(CloseCode::FrameRate.violation(detail));
                }
                ServerEvent::Open { call, request } => {
                    calls += 1;
                    match request.and_then(|r| self.admit(origin, r, now_ms())) {
                        Ok(admitted) => {
                            if let (true, Some(peer)) = (admitted.is_invited, &peer) {
                                peer.is_invited();
                            }
                            running.spawn(run(Arc::clone(&connection), call, admitted));
                        }
                        Err(refusal) => connection.finish(call, Err(refusal)),
                    }
                }
                _ => {}
            }
            Ok(())
        };
        let stay = async {
            if is_stranger {
                sleep(STRANGER_STAYS).await;
            } else {
                std::future::pending::<()>().await;
            }
        };
        let (ready, next) = (|| connection.until_drained(), || connection.next_message());
        let ended = tokio::select! {
            ended = wire.exchange(ready, receive, &connection.written, next) => ended,
            () = stay => Ended::Closed,
        };
        drop(running);
        match ended {
            Ended::Closed => {}
            Ended::Lost(reason) => tracing::debug!(%reason, "a caller's connection was lost"),
            Ended::Broken(violation) => {
                tracing::info!(
                    code = %violation.code,
                    "a caller violated the protocol: {}", violation.detail
                );
                wire.refuse(violation).await;
            }
        }
    }
}

/// Runs one call to its end.
async fn run(connection: Arc<Connection>, call: u32, admitted: Admitted) {
    let Admitted {
        handler,
        ctx,
        params,
        seconds,
        ..
    } = admitted;
    // Held here because a handler may drop its context at once.
    let (cancel, _slot) = (ctx.cancel.clone(), ctx.slot.clone());
    // If the handler panics, the caller still gets an error. Threads that work for the call stop.
    defer! {
        cancel.cancel();
        let broken = CallError::internal("the handler of this capability failed");
        connection.finish(call, Err(broken));
    }
    if !connection.watch(call, cancel.clone()) {
        return;
    }
    let out = FrameSink::new(Arc::clone(&connection), call);
    let limit = Duration::from_secs(u64::from(seconds));
    let result = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(CallError::cancelled()),
        ended = timeout(limit, handler.call(ctx, params, out)) => ended.unwrap_or_else(|_| {
            Err(CallError::new(Code::TIMEOUT, format!("the call took longer than {seconds} s")))
        }),
    };
    connection.finish(call, result);
}

struct Describe(std::sync::Weak<Registry>);

impl Handler for Describe {
    fn call(&self, _: CallContext, _: Value, _: FrameSink) -> Answering<'_> {
        // The server that runs this call keeps the registry alive.
        let descriptors = self.0.upgrade().map(|registry| registry.descriptors());
        Box::pin(std::future::ready(Ok(
            json!({ "capabilities": descriptors }),
        )))
    }
}

fn register_describe(registry: &Arc<Registry>) -> Result<(), RegisterError> {
    let summary = "Lists what this node can be asked to do.";
    let level = Some(Level::Member);
    let descriptor = CapabilityDescriptor::new(Capability::bus_describe(), summary, level);
    registry.register(descriptor, Arc::new(Describe(Arc::downgrade(registry))))
}

fn check_params(descriptor: &CapabilityDescriptor, params: &Value) -> Result<(), CallError> {
    let checked = descriptor.params.check(params);
    checked.map_err(|e| CallError::bad_request(&e.field, e.problem))
}

fn is_join(capability: &Capability) -> bool {
    capability.name() == Capability::community_join().name()
}

fn unauthorized(message: String) -> CallError {
    CallError::new(Code::UNAUTHORIZED, message)
}

#[cfg(test)]
mod tests;
