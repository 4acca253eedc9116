//! Asking: calls to one node over one socket.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::{SinkExt as _, StreamExt as _};
use hearthnet_transport::{Code, PeerSocket};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;

use super::Cancel;
use super::envelope::Envelope;
use super::error::CallError;
use super::frame::Request;
use super::session::{CallingSession, Heard};
use super::wire::{Out, Wire, within};
use crate::now_ms;
use crate::{Capability, NodeId, NodeKey};

/// How long the node may leave a message half taken.
const STALL: Duration = Duration::from_secs(30);

/// Calls one node's capabilities. Cheap to clone; the socket closes when the last clone
/// and the last [`CallStream`] are dropped.
#[derive(Clone)]
pub struct Client {
    handle: Arc<Handle>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("node", &self.handle.signs.as_ref().map(|s| s.node))
            .finish_non_exhaustive()
    }
}

/// An event of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its name, which depends on the capability.
    pub name: String,
    /// Its data.
    pub data: Value,
}

/// With what calls are signed, and for whom.
struct Signs {
    key: Arc<NodeKey>,
    node: NodeId,
}

struct Handle {
    shared: Arc<Shared>,
    signs: Option<Signs>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to send.
    written: Notify,
    /// A call heard something, or the connection ended.
    heard: Notify,
    stop: Cancel,
}

#[derive(Default)]
struct State {
    session: CallingSession,
    lost: Option<CallError>,
}

impl Client {
    /// Calls the node at the other end of `socket`, signing with `key`. Must be made
    /// within a tokio runtime, whose task then drives the socket.
    pub fn new(socket: PeerSocket, key: Arc<NodeKey>) -> Self {
        let node = socket.peer();
        Self::start(socket.into(), Some(Signs { key, node }))
    }

    /// Calls over a socket between nodes of another make.
    pub fn over(wire: Wire, key: Arc<NodeKey>, node: NodeId) -> Self {
        Self::start(wire, Some(Signs { key, node }))
    }

    /// Calls without signing, through the local API.
    pub fn local(wire: Wire) -> Self {
        Self::start(wire, None)
    }

    fn start(wire: Wire, signs: Option<Signs>) -> Self {
        let shared = Arc::new(Shared::default());
        tokio::spawn(drive(Arc::clone(&shared), wire));
        Self {
            handle: Arc::new(Handle { shared, signs }),
        }
    }

    /// Begins a call. Its events and its end come from the stream.
    ///
    /// # Errors
    /// `busy` if too many calls are open, `bad_request` if it does not fit into a message,
    /// `unreachable` if the connection is lost.
    pub fn call(&self, capability: &Capability, params: &Value) -> Result<CallStream, CallError> {
        let request = self.request(capability, params)?;
        let shared = &self.handle.shared;
        let mut state = shared.state.lock();
        if let Some(lost) = &state.lost {
            return Err(lost.clone());
        }
        let call = state.session.call(&request)?;
        drop(state);
        shared.written.notify_one();
        Ok(CallStream {
            handle: Arc::clone(&self.handle),
            call,
            ended: None,
        })
    }

    fn request(&self, capability: &Capability, params: &Value) -> Result<Request, CallError> {
        let Some(Signs { key, node }) = &self.handle.signs else {
            return Ok(Request::Plain {
                capability: capability.clone(),
                params: params.clone(),
            });
        };
        let mut id = [0; 16];
        getrandom::fill(&mut id)
            .map_err(|_| CallError::internal("the system gave no randomness"))?;
        let params = params.to_string();
        let envelope =
            Envelope::new(key.id(), *node, capability.clone(), &params, id, now_ms()).sign(key)?;
        Ok(Request::Signed {
            envelope: URL_SAFE_NO_PAD.encode(envelope),
            params,
        })
    }

    /// Whether the connection has ended, so that every further call would fail.
    #[cfg(test)]
    pub(crate) fn is_lost(&self) -> bool {
        self.handle.shared.state.lock().lost.is_some()
    }
}

/// Drives the socket until it closes or nobody needs it.
async fn drive(shared: Arc<Shared>, wire: Wire) {
    let Wire {
        mut incoming,
        mut outgoing,
        ..
    } = wire;
    let mut violation = None;
    let read = async {
        loop {
            let text = match incoming.next().await {
                Some(Ok(text)) => text,
                Some(Err(reason)) => return reason,
                None => return "the node closed the connection".to_owned(),
            };
            if let Err(broken) = shared.state.lock().session.receive(&text) {
                let reason = format!("the node broke a rule: {broken}");
                violation = Some(broken);
                return reason;
            }
            shared.heard.notify_waiters();
        }
    };
    let write = async {
        loop {
            loop {
                let next = shared.state.lock().session.poll_transmit();
                let Some(text) = next else { break };
                if let Err(reason) = within(STALL, outgoing.send(Out::Text(text))).await {
                    return reason;
                }
            }
            shared.written.notified().await;
        }
    };
    let reason = tokio::select! {
        reason = read => reason,
        reason = write => reason,
        () = shared.stop.cancelled() => "nobody needs the connection any more".to_owned(),
    };
    let lost = CallError::new(Code::UNREACHABLE, format!("the connection ended: {reason}"))
        .with_hint("ask again; another node may answer");
    shared.state.lock().lost = Some(lost);
    shared.heard.notify_waiters();
    if let Some(violation) = violation {
        let _ = tokio::time::timeout(
            Duration::from_secs(1),
            outgoing.send(Out::Broken(violation)),
        )
        .await;
    }
}

/// One call. Dropping it before its end cancels the call.
pub struct CallStream {
    handle: Arc<Handle>,
    call: u32,
    ended: Option<Result<Value, CallError>>,
}

impl std::fmt::Debug for CallStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallStream")
            .field("call", &self.call)
            .finish_non_exhaustive()
    }
}

impl CallStream {
    /// The next event; `None` when the call has succeeded and there are no more. May be
    /// dropped and called again; nothing is lost.
    ///
    /// # Errors
    /// What the call failed with, or `unreachable` if the connection was lost.
    pub async fn next(&mut self) -> Result<Option<Event>, CallError> {
        let shared = &self.handle.shared;
        loop {
            if let Some(ended) = &self.ended {
                return ended.clone().map(|_| None);
            }
            let mut news = pin!(shared.heard.notified());
            // Before looking, so that news that come in between are not missed.
            news.as_mut().enable();
            match self.look() {
                Some(Heard::Event { event, data }) => {
                    shared.written.notify_one();
                    return Ok(Some(Event { name: event, data }));
                }
                Some(Heard::End(value)) => self.ended = Some(Ok(value)),
                Some(Heard::Failed(error)) => self.ended = Some(Err(error)),
                None => news.await,
            }
        }
    }

    /// What was heard, or that nothing more will be.
    fn look(&self) -> Option<Heard> {
        let mut state = self.handle.shared.state.lock();
        let heard = state.session.take(self.call);
        heard.or_else(|| state.lost.clone().map(Heard::Failed))
    }

    /// Waits for the end, leaving out the events that still come.
    ///
    /// # Errors
    /// As [`CallStream::next`].
    pub async fn result(mut self) -> Result<Value, CallError> {
        while self.next().await?.is_some() {}
        self.ended
            .take()
            .unwrap_or_else(|| Err(CallError::internal("the call has no end")))
    }

    /// [`CallStream::result`], for at most this long; the call is then cancelled.
    ///
    /// # Errors
    /// As [`CallStream::next`], and `timeout`.
    pub async fn result_within(self, limit: Duration) -> Result<Value, CallError> {
        match tokio::time::timeout(limit, self.result()).await {
            Ok(result) => result,
            Err(_) => Err(CallError::new(
                Code::TIMEOUT,
                format!("no answer came within {} s", limit.as_secs_f32()),
            )),
        }
    }
}

impl Drop for CallStream {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.handle.shared.state.lock().session.cancel(self.call);
            self.handle.shared.written.notify_one();
        }
    }
}
