//! Answering calls: whether one may run ([`CallServer::admit`], time as an argument), and
//! the tasks that run it.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use hearthnet_transport::{Code, PeerSocket};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::runtime::Handle as Runtime;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Cancel;
use super::budget::{Budgets, Rate};
use super::descriptor::{CapabilityDescriptor, Stability, Trust};
use super::envelope::{Envelope, MAX_ENVELOPE_BYTES};
use super::error::CallError;
use super::frame::{Request, Violation, WINDOW_BYTES};
use super::registry::{CallContext, Handler, RegisterError, Registry};
use super::session::{Asked, NotTaken, ServingSession};
use super::wire::{Wire, within};
use crate::now_ms;
use crate::replay::NotNoted;
use crate::{Capability, NodeId, ReplayCache};

/// How long a caller may leave a full window, or a message half taken.
const STALL: Duration = Duration::from_secs(30);
/// How long a stranger may stay: it has one thing to ask.
const STRANGER_STAYS: Duration = Duration::from_secs(15);
/// While more than this waits to be sent, nothing more is received.
const MAX_BACKLOG: usize = WINDOW_BYTES;
/// Envelopes remembered against replay, for four minutes at most: 34 a second.
const REMEMBERED_CALLS: usize = 8192;

/// What the community says about callers and experiments; asked anew for each call.
pub trait Authority: Send + Sync {
    /// How far a node is trusted now; [`Trust::Anyone`] for strangers and the revoked.
    fn trust(&self, node: &NodeId) -> Trust;

    /// Whether experiments may run.
    fn research(&self) -> Research;
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

impl std::fmt::Debug for CallServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallServer")
            .field("own", &self.own)
            .field("registry", &self.registry)
            .finish_non_exhaustive()
    }
}

/// A call that may run.
pub struct Admitted {
    handler: Arc<dyn Handler>,
    ctx: CallContext,
    params: Value,
    seconds: u32,
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
    /// [`Rate::STRANGERS`]. Adds the capability [`BUS_DESCRIBE`](super::BUS_DESCRIBE) to the registry.
    pub fn new(own: NodeId, registry: Arc<Registry>, authority: Arc<dyn Authority>) -> Self {
        Self::with_rates(own, registry, authority, Rate::MEMBER, Rate::STRANGERS)
    }

    /// The same with other budgets.
    pub fn with_rates(
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
    /// what would tell a stranger something comes after the question who asks.
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
        let is_member = trust >= Trust::Member || is_local;
        let taken = self.gate.lock().budgets.take(caller, is_member, now_ms);
        taken.map_err(|wait_ms| {
            CallError::new(Code::RATE_LIMITED, "too many calls in a short time")
                .with_hint(format!("try again in {wait_ms} ms"))
        })?;
        let (capability, params) = match request {
            Request::Signed { envelope, params } if !is_local => {
                self.open_signed(caller, &envelope, params, now_ms)?
            }
            Request::Plain { capability, params } if is_local => (capability, params),
            Request::Signed { .. } => {
                let problem = "calls from this machine carry no envelope";
                return Err(CallError::bad_request("envelope", problem));
            }
            Request::Plain { .. } => {
                let problem = "is missing; calls between nodes are signed";
                return Err(CallError::bad_request("envelope", problem));
            }
        };
        if trust == Trust::Anyone && !is_join(&capability) && !is_local {
            return Err(
                unauthorized(format!("{caller} is not a member of this community"))
                    .with_hint("join with an invite code: `hearthnet community join CODE`"),
            );
        }
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
        descriptor
            .params
            .check(&params)
            .map_err(|e| CallError::bad_request(&e.field, e.problem))?;
        Ok(Admitted {
            ctx: CallContext {
                caller,
                trust,
                is_local,
                capability,
                cancel: Cancel::default(),
                slot: local.slot(caller)?,
            },
            params,
            seconds: descriptor.limits.seconds,
            handler: local.handler,
        })
    }

    fn open_signed(
        &self,
        sender: NodeId,
        envelope: &str,
        params: String,
        now_ms: u64,
    ) -> Result<(Capability, Value), CallError> {
        let unreadable = || CallError::bad_request("envelope", "is no base64url of an envelope");
        if envelope.len() > MAX_ENVELOPE_BYTES.div_ceil(3) * 4 {
            return Err(unreadable());
        }
        let bytes = URL_SAFE_NO_PAD.decode(envelope).map_err(|_| unreadable())?;
        let envelope = Envelope::open(&bytes, &params, sender, self.own, now_ms)?;
        let death = envelope.dead_from_ms();
        let noted = self
            .gate
            .lock()
            .seen
            .note(sender, envelope.id, death, now_ms);
        noted.map_err(|refusal| match refusal {
            NotNoted::Seen => CallError::new(Code::CALL_REPLAYED, "the envelope was used before")
                .with_hint("make a new one for each call"),
            NotNoted::Full => {
                CallError::new(Code::RATE_LIMITED, "too many calls in the last minutes")
            }
        })?;
        let params = serde_json::from_str(&params)
            .map_err(|_| CallError::bad_request("params", "is not JSON"))?;
        Ok((envelope.capability, params))
    }

    /// Answers the calls of a peer until its socket closes.
    pub async fn serve(&self, socket: PeerSocket) {
        let origin = Origin::Peer(socket.peer());
        self.serve_wire(socket.into(), origin).await;
    }

    /// The same over any socket. Dropping the future ends every call and the socket.
    pub async fn serve_wire(&self, wire: Wire, origin: Origin) {
        let is_stranger = match origin {
            Origin::Peer(peer) => self.authority.trust(&peer) == Trust::Anyone,
            Origin::Local => false,
        };
        let Wire {
            mut incoming,
            mut outgoing,
        } = wire;
        let connection = Arc::new(Connection::default());
        let _closes = Closes(&connection);
        let read = async {
            // Dropped, it aborts what runs.
            let mut running = JoinSet::new();
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
                    Ok(Asked::Open { call, request }) => {
                        match request.and_then(|r| self.admit(origin, r, now_ms())) {
                            Ok(admitted) => {
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
                    within(STALL, outgoing.send(text)).await?;
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
                code = %violation.code(),
                "a caller broke a rule: {violation}"
            );
            let _ = timeout(Duration::from_secs(1), outgoing.close(&violation)).await;
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
    let out = FrameSink {
        connection: Arc::clone(&connection),
        call,
        runtime: Runtime::current(),
    };
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
        let broken = CallError::new(Code::INTERNAL, "the handler of this capability failed");
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

/// What the tasks of one connection share.
#[derive(Default)]
struct Connection {
    state: Mutex<State>,
    /// There is something to send.
    written: Notify,
    /// There may be room for events, or a call has ended.
    room: Notify,
    /// Something was sent.
    drained: Notify,
}

#[derive(Default)]
struct State {
    session: ServingSession,
    running: HashMap<u32, Cancel>,
    is_closed: bool,
}

impl Connection {
    fn receive(&self, text: &str) -> Result<Asked, Violation> {
        let mut state = self.state.lock();
        let asked = state.session.receive(text)?;
        if let Asked::Cancelled { call } = asked
            && let Some(cancel) = state.running.remove(&call)
        {
            cancel.cancel();
        }
        drop(state);
        self.room.notify_waiters();
        self.written.notify_one();
        Ok(asked)
    }

    /// Notes how a call that now runs is cancelled. False if it has ended already.
    fn watch(&self, call: u32, cancel: Cancel) -> bool {
        let mut state = self.state.lock();
        let is_open = !state.is_closed && state.session.is_open(call);
        if is_open {
            state.running.insert(call, cancel);
        }
        is_open
    }

    fn finish(&self, call: u32, result: Result<Value, CallError>) {
        let mut state = self.state.lock();
        state.session.finish(call, result.as_ref());
        state.running.remove(&call);
        drop(state);
        self.room.notify_waiters();
        self.written.notify_one();
    }

    fn next_message(&self) -> Option<String> {
        let text = self.state.lock().session.poll_transmit();
        self.drained.notify_one();
        text
    }

    async fn until_drained(&self) {
        while self.state.lock().session.backlog_bytes() > MAX_BACKLOG {
            self.drained.notified().await;
        }
    }

    fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let running: Vec<(u32, Cancel)> = state.running.drain().collect();
        for (call, cancel) in running {
            state.session.finish(call, Err(&CallError::cancelled()));
            cancel.cancel();
        }
        drop(state);
        self.room.notify_waiters();
    }
}

/// Where a handler puts its events.
#[derive(Clone)]
pub struct FrameSink {
    connection: Arc<Connection>,
    call: u32,
    runtime: Runtime,
}

impl std::fmt::Debug for FrameSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FrameSink")
            .field("call", &self.call)
            .finish_non_exhaustive()
    }
}

impl FrameSink {
    /// Sends an event; waits while the caller has not acknowledged earlier ones.
    ///
    /// # Errors
    /// `cancelled` when the call has ended, `timeout` when the caller takes nothing for
    /// 30 s, `internal` for an event that has no proper name or does not fit.
    pub async fn send(&self, event: &str, data: &Value) -> Result<(), CallError> {
        let deadline = Instant::now() + STALL;
        loop {
            let mut room = pin!(self.connection.room.notified());
            // Before trying, so that room that comes in between is not missed.
            room.as_mut().enable();
            let taken = self
                .connection
                .state
                .lock()
                .session
                .event(self.call, event, data);
            match taken {
                Ok(()) => {
                    self.connection.written.notify_one();
                    return Ok(());
                }
                Err(NotTaken::Ended) => return Err(CallError::cancelled()),
                Err(error @ (NotTaken::TooBig | NotTaken::Name)) => {
                    return Err(CallError::new(Code::INTERNAL, error.to_string()));
                }
                Err(NotTaken::Full) => {}
            }
            if timeout_at(deadline, room).await.is_err() {
                let took = format!("the caller took no event for {} s", STALL.as_secs());
                return Err(CallError::new(Code::TIMEOUT, took));
            }
        }
    }

    /// The same for a thread that is not the runtime's.
    ///
    /// # Errors
    /// As [`FrameSink::send`].
    pub fn blocking_send(&self, event: &str, data: &Value) -> Result<(), CallError> {
        self.runtime.block_on(self.send(event, data))
    }
}

/// Lists this node's capabilities.
struct Describe(std::sync::Weak<Registry>);

impl Handler for Describe {
    fn call(
        &self,
        _: CallContext,
        _: Value,
        _: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        let descriptors = self
            .0
            .upgrade()
            .map(|r| r.descriptors())
            .unwrap_or_default();
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
