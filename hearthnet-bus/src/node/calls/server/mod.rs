//! Answering calls: whether one may run ([`CallServer::admit`], time as an argument), and
//! the tasks that run it.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::{SinkExt as _, StreamExt as _};
use hearthnet_transport::{CloseCode, Code, PeerSocket};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Cancel;
use super::budget::{Budgets, Payer, Rate};
use super::descriptor::{CapabilityDescriptor, Stability, Trust};
use super::envelope::{Envelope, MAX_ENVELOPE_BYTES};
use super::error::CallError;
use super::frame::Request;
use super::frame_sink::{Connection, FrameSink, STALL};
use super::registry::{Answering, CallContext, Handler, RegisterError, Registry};
use super::session::Asked;
use super::wire::{Out, Wire, within};
use crate::identity::replay::NotNoted;
use crate::now_ms;
use crate::{Capability, NodeId, ReplayCache};

/// How long a stranger may stay: it has one thing to ask.
const STRANGER_STAYS: Duration = Duration::from_secs(15);
/// Calls that it may make meanwhile: a few, if it mistypes. What each costs this node, two signatures,
/// is less than the handshake before.
const STRANGER_CALLS: usize = 4;
/// Common places for envelopes remembered against replay, for four minutes at most. A member that dates all
/// that its budget allows 115 s ahead takes 2,350 of them.
const REMEMBERED_CALLS: usize = 8192;

/// What the community says about callers and experiments; asked anew for each call.
pub trait Authority: Send + Sync {
    /// How far a node is trusted now; [`Trust::Anyone`] for strangers and the revoked.
    fn trust(&self, node: &NodeId) -> Trust;

    /// Whether experiments may run.
    fn research(&self) -> Research;

    /// Who answers for a node where members have shares: itself, unless somebody who has no more than a
    /// share has let it in.
    fn answers_for(&self, node: &NodeId) -> NodeId {
        *node
    }
}

/// Whether experimental capabilities may run, and if not, which setting says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Research {
    /// Experiments may run.
    On,
    /// `policy.research.enable` is false in this node's configuration.
    OffHere,
    /// The community's policy `research` is false.
    OffInCommunity,
}

impl Research {
    /// The refusal of an experimental capability, unless it may run.
    ///
    /// # Errors
    /// `experimental_disabled`, naming the setting.
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

/// From where a call comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// From the node whose key the TLS handshake proved.
    Peer(NodeId),
    /// From an app on this machine, which showed the local token.
    Local,
}

/// Answers the calls that come to this node.
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

/// What is asked.
struct Call {
    capability: Capability,
    params: Value,
    /// Id of the envelope that it came in, and when that is dead.
    envelope: Option<([u8; 16], u64)>,
}

/// A call that may run.
pub struct Admitted {
    handler: Arc<dyn Handler>,
    ctx: CallContext,
    params: Value,
    seconds: u32,
    /// It is a stranger's that has proved that it is invited.
    is_invited: bool,
}

impl std::fmt::Debug for Admitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Parameters may be somebody's words.
        f.debug_struct("Admitted")
            .field("ctx", &self.ctx)
            .finish_non_exhaustive()
    }
}

impl CallServer {
    /// A server for the node `own`, with the budgets [`Rate::MEMBER`] and
    /// [`Rate::STRANGERS`]. Adds [`Capability::bus_describe`] to the registry.
    pub fn new(own: NodeId, registry: Arc<Registry>, authority: Arc<dyn Authority>) -> Self {
        Self::with_rates(own, registry, authority, Rate::MEMBER, Rate::STRANGERS)
    }

    /// The same with other budgets.
    pub(crate) fn with_rates(
        own: NodeId,
        registry: Arc<Registry>,
        authority: Arc<dyn Authority>,
        member: Rate,
        strangers: Rate,
    ) -> Self {
        // Another server on this registry has added it already, which is as well.
        let _ = register_describe(&registry);
        Self {
            own,
            registry,
            authority,
            gate: Mutex::new(Gate {
                budgets: Budgets::new(member, strangers, 0),
                seen: ReplayCache::new(REMEMBERED_CALLS),
            }),
        }
    }

    /// The node that it answers for.
    pub fn own(&self) -> NodeId {
        self.own
    }

    /// The capabilities it answers for.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Everything that has to hold before a handler runs. What is cheap comes first, and
    /// what would tell a stranger something comes after the question who asks. What a stranger
    /// brings is looked at before it takes anything that there is little of.
    ///
    /// # Errors
    /// The refusal that the caller gets.
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
        let trust = self.authority.trust(&caller);
        let answers = self.authority.answers_for(&caller);
        let (invite, call) = if trust == Trust::Anyone && !is_local {
            // It pays when it is known what it brings.
            let brought = self
                .read(origin, request, now_ms)
                .and_then(|call| Ok((self.vouched(&caller, &call)?, call)));
            let payer = match &brought {
                Ok((Some(invite), _)) => Payer::Invite(*invite),
                _ => Payer::Strangers,
            };
            self.pay(payer, now_ms)?;
            brought?
        } else {
            self.pay(Payer::Member(answers), now_ms)?;
            (None, self.read(origin, request, now_ms)?)
        };
        self.note(caller, answers, &call, now_ms)?;
        let Call {
            capability, params, ..
        } = call;
        let local = self.registry.find(&capability)?;
        let descriptor = &local.descriptor;
        if trust < descriptor.trust {
            return Err(unauthorized(format!(
                "{} needs the level {}, {caller} is {}",
                descriptor.capability,
                level_name(descriptor.trust),
                level_name(trust),
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
                answers,
                trust,
                is_local,
                capability,
                cancel: Cancel::default(),
                slot: local.slot(answers, is_local)?,
            },
            params,
            seconds: descriptor.limits.seconds,
            handler: local.handler,
            is_invited: invite.is_some(),
        })
    }

    fn pay(&self, payer: Payer, now_ms: u64) -> Result<(), CallError> {
        let taken = self.gate.lock().budgets.take(payer, now_ms);
        taken.map_err(|wait_ms| {
            CallError::new(Code::RATE_LIMITED, "too many calls in a short time")
                .with_hint(format!("try again in {wait_ms} ms"))
        })
    }

    /// Who vouches for a stranger that calls this.
    fn vouched(&self, caller: &NodeId, call: &Call) -> Result<Option<NodeId>, CallError> {
        if !is_join(&call.capability) {
            return Err(
                unauthorized(format!("{caller} is not a member of this community"))
                    .with_hint("join with an invite code: `hearthnet community join CODE`"),
            );
        }
        let local = self.registry.find(&call.capability)?;
        check_params(&local.descriptor, &call.params)?;
        local.handler.vouches(caller, &call.params)
    }

    /// What is asked, whoever asks.
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
        let unreadable = || CallError::bad_request("envelope", "is no base64url of an envelope");
        if envelope.len() > MAX_ENVELOPE_BYTES.div_ceil(3) * 4 {
            return Err(unreadable());
        }
        let bytes = URL_SAFE_NO_PAD.decode(envelope).map_err(|_| unreadable())?;
        let envelope = Envelope::open(&bytes, params, sender, self.own, now_ms)?;
        let params = serde_json::from_str(params)
            .map_err(|_| CallError::bad_request("params", "is not JSON"))?;
        Ok(Call {
            envelope: Some((envelope.id, envelope.dead_from_ms())),
            capability: envelope.capability,
            params,
        })
    }

    /// Remembers the envelope of a call, so that it counts once.
    fn note(
        &self,
        sender: NodeId,
        answers: NodeId,
        call: &Call,
        now_ms: u64,
    ) -> Result<(), CallError> {
        let Some((id, death)) = call.envelope else {
            return Ok(());
        };
        let mut gate = self.gate.lock();
        let noted = gate.seen.note((sender, id), answers, death, now_ms);
        noted.map_err(|refusal| match refusal {
            NotNoted::Seen => CallError::new(Code::CALL_REPLAYED, "the envelope was used before")
                .with_hint("make a new one for each call"),
            NotNoted::Full => {
                CallError::new(Code::RATE_LIMITED, "too many calls in the last minutes")
            }
        })
    }

    /// Answers the calls of a peer until its socket closes.
    pub async fn serve(&self, socket: PeerSocket) {
        let origin = Origin::Peer(socket.peer());
        self.serve_wire(socket.into(), origin).await;
    }

    /// The same over any socket. Dropping the future ends every call and the socket.
    pub(crate) async fn serve_wire(&self, wire: Wire, origin: Origin) {
        let is_stranger = match origin {
            Origin::Peer(peer) => self.authority.trust(&peer) == Trust::Anyone,
            Origin::Local => false,
        };
        let Wire {
            mut incoming,
            mut outgoing,
            peer,
        } = wire;
        let connection = Arc::new(Connection::default());
        let _closes = Closes(&connection);
        let read = async {
            // Dropped, it aborts what runs.
            let mut running = JoinSet::new();
            let mut calls = 0;
            loop {
                connection.until_drained().await;
                let text = match incoming.next().await {
                    Some(Ok(text)) => text,
                    Some(Err(reason)) => {
                        tracing::debug!(%reason, "a caller's connection was lost");
                        return None;
                    }
                    None => return None,
                };
                while running.try_join_next().is_some() {}
                match connection.receive(&text) {
                    Ok(Asked::Open { .. }) if is_stranger && calls == STRANGER_CALLS => {
                        let detail = "a stranger that asks again and again";
                        return Some(CloseCode::FrameRate.violation(detail));
                    }
                    Ok(Asked::Open { call, request }) => {
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
                    Ok(_) => {}
                    Err(violation) => return Some(violation),
                }
            }
        };
        let write = async {
            loop {
                while let Some(text) = connection.next_message() {
                    within(STALL, outgoing.send(Out::Text(text))).await?;
                }
                connection.written.notified().await;
            }
        };
        let stay = async {
            if is_stranger {
                sleep(STRANGER_STAYS).await;
            } else {
                std::future::pending::<()>().await;
            }
        };
        let violation = tokio::select! {
            violation = read => violation,
            lost = write => {
                let reason: Result<(), String> = lost;
                tracing::debug!(?reason, "a caller's connection was lost");
                None
            }
            () = stay => None,
        };
        if let Some(violation) = violation {
            tracing::info!(
                code = %violation.code,
                "a caller broke a rule: {}", violation.detail
            );
            let _ = timeout(
                Duration::from_secs(1),
                outgoing.send(Out::Broken(violation)),
            )
            .await;
        }
    }
}

/// Runs one call to its end, whatever that is.
async fn run(connection: Arc<Connection>, call: u32, admitted: Admitted) {
    let Admitted {
        handler,
        ctx,
        params,
        seconds,
        ..
    } = admitted;
    // A handler that needs nothing of its context drops it at once.
    let (cancel, _slot) = (ctx.cancel.clone(), ctx.slot.clone());
    // If the handler panics, the caller hears of it all the same.
    let _ends = Ends {
        connection: &connection,
        call,
        cancel: cancel.clone(),
    };
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

/// At the end of a call, however it comes about.
struct Ends<'a> {
    connection: &'a Connection,
    call: u32,
    cancel: Cancel,
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        // Threads that work for the call stop, too.
        self.cancel.cancel();
        let broken = CallError::internal("the handler of this capability failed");
        self.connection.finish(self.call, Err(broken));
    }
}

/// At the end of a connection, however it comes about.
struct Closes<'a>(&'a Connection);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Lists this node's capabilities.
struct Describe(std::sync::Weak<Registry>);

impl Handler for Describe {
    fn call(&self, _: CallContext, _: Value, _: FrameSink) -> Answering<'_> {
        // The server that calls this holds the registry.
        let descriptors = self.0.upgrade().map(|registry| registry.descriptors());
        Box::pin(std::future::ready(Ok(
            json!({ "capabilities": descriptors }),
        )))
    }
}

fn register_describe(registry: &Arc<Registry>) -> Result<(), RegisterError> {
    let summary = "Lists what this node can be asked to do.";
    let descriptor = CapabilityDescriptor::new(Capability::bus_describe(), summary, Trust::Member);
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

fn level_name(trust: Trust) -> &'static str {
    match trust {
        Trust::Anyone => "no member",
        Trust::Member => "member",
        Trust::Trusted => "trusted",
        Trust::Anchor => "anchor",
    }
}

#[cfg(test)]
mod tests;
