//! Client side of calls: calls to one node over one socket.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hearthnet_transport::{Code, PeerSocket, Violation, retry};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;
use tokio_util::sync::DropGuard;

use super::Cancel;
use super::envelope::Envelope;
use super::error::CallError;
use super::frame::Request;
use super::session::{CallingSession, ClientEvent};
use super::wire::{Ended, Wire};
use crate::now_ms;
use crate::{Capability, NodeId, NodeKey};

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
    /// Name, defined by the capability.
    pub name: String,
    pub data: Value,
}

/// Key that signs the calls, and the called node.
struct Signs {
    key: Arc<NodeKey>,
    node: NodeId,
}

struct Handle {
    shared: Arc<Shared>,
    signs: Option<Signs>,
    /// Ends the task that drives the socket.
    _stop: DropGuard,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// A message is ready to be sent.
    written: Notify,
    /// A call has received a message, or the connection has ended.
    heard: Notify,
    stop: Cancel,
}

#[derive(Default)]
struct State {
    session: CallingSession,
    lost: Option<CallError>,
}

impl Client {
    /// Calls the node at the other end of `socket`, signing with `key`. Must be called within a
    /// tokio runtime; a spawned task drives the socket.
    pub fn new(socket: PeerSocket, key: Arc<NodeKey>) -> Self {
        let node = socket.peer();
        Self::start(socket.into(), Some(Signs { key, node }))
    }

    /// [`Client::new`] over any other transport to `node`.
    pub fn over(wire: Wire, key: Arc<NodeKey>, node: NodeId) -> Self {
        Self::start(wire, Some(Signs { key, node }))
    }

    /// Calls without signatures, through the local API.
    pub fn local(wire: Wire) -> Self {
        Self::start(wire, None)
    }

    fn start(wire: Wire, signs: Option<Signs>) -> Self {
        let shared = Arc::new(Shared::default());
        tokio::spawn(drive(Arc::clone(&shared), wire));
        let _stop = shared.stop.clone().drop_guard();
        let handle = Handle {
            shared,
            signs,
            _stop,
        };
        Self {
            handle: Arc::new(handle),
        }
    }

    /// Begins a call. The stream yields its events and its result.
    ///
    /// # Errors
    /// `busy` if too many calls are open, `bad_request` if the request does not fit into a message,
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

    /// True once the connection has ended, so that every further call would fail.
    #[cfg(test)]
    pub(crate) fn is_lost(&self) -> bool {
        self.handle.shared.state.lock().lost.is_some()
    }
}

/// Drives the socket until it closes or the last handle is dropped.
async fn drive(shared: Arc<Shared>, mut wire: Wire) {
    let receive = |text: &str| -> Result<(), Violation> {
        shared.state.lock().session.receive(text)?;
        shared.heard.notify_waiters();
        Ok(())
    };
    let next = || shared.state.lock().session.poll_transmit();
    let ended = tokio::select! {
        ended = wire.exchange(|| ready(()), receive, &shared.written, next) => Some(ended),
        () = shared.stop.cancelled() => None,
    };
    let reason = match &ended {
        None => "the client was dropped".to_owned(),
        Some(Ended::Closed) => "the node closed the connection".to_owned(),
        Some(Ended::Lost(reason)) => reason.clone(),
        Some(Ended::Broken(violation)) => format!("the node violated the protocol: {violation}"),
    };
    let lost = CallError::new(Code::UNREACHABLE, format!("the connection ended: {reason}"))
        .with_hint("ask again; another node may answer");
    shared.state.lock().lost = Some(lost);
    shared.heard.notify_waiters();
    if let Some(Ended::Broken(violation)) = ended {
        wire.refuse(violation).await;
    }
}

/// A running call. Dropping it before its end cancels the call.
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
    /// The next event; `None` after a successful end. Cancel-safe: no event is lost.
    ///
    /// # Errors
    /// The error that ended the call, or `unreachable` if the connection was lost.
    pub async fn next(&mut self) -> Result<Option<Event>, CallError> {
        let shared = &self.handle.shared;
        loop {
            if let Some(ended) = &self.ended {
                return ended.clone().map(|_| None);
            }
            let heard = retry(&shared.heard, || self.look()).await;
            match heard {
                ClientEvent::Event { event, data } => {
                    shared.written.notify_one();
                    return Ok(Some(Event { name: event, data }));
                }
                ClientEvent::End(value) => self.ended = Some(Ok(value)),
                ClientEvent::Failed(error) => self.ended = Some(Err(error)),
            }
        }
    }

    /// The next received message of the call, or the error of a lost connection.
    fn look(&self) -> Option<ClientEvent> {
        let mut state = self.handle.shared.state.lock();
        let heard = state.session.take(self.call);
        heard.or_else(|| state.lost.clone().map(ClientEvent::Failed))
    }

    /// Waits for the result and discards the remaining events.
    ///
    /// # Errors
    /// As [`CallStream::next`].
    pub async fn result(mut self) -> Result<Value, CallError> {
        while self.next().await?.is_some() {}
        self.ended
            .take()
            .unwrap_or_else(|| Err(CallError::internal("the call has no end")))
    }

    /// [`CallStream::result`] with a time limit, after which the call is cancelled.
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
