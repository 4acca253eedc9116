//! Serving side: answers the requests of peers from a store, at low priority.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::OptionFuture;
use hearthnet_transport::{
    CloseCode, Frame, PathRule, PeerSender, PeerSocket, SendError, SessionClosed, background,
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::message::{DATA_LENGTHS, MAX_MESSAGE_BYTES, Reply, Request};
use super::pace::Pacer;
use super::session::Received;
use super::store::{Busy, WeightsStore};
use crate::NodeId;

/// Path of the transfer on a node's listener.
pub(crate) const WEIGHTS_PATH: &str = "/weights/v1";
/// Time without a request after which a connection is closed.
const IDLE: Duration = Duration::from_secs(120);
/// Calls of the store at a time.
const STORE_CALLS: usize = 2;
/// Bytes of a DATA message. It is copied several times on its way, so that it should fit into the caches
/// of a processor, and into memory that the allocator keeps.
const PART_BYTES: usize = 64 * 1024;
/// Bytes of a DATA message while the node is busy. On a link of 1 Gbit/s a small message waits at
/// most 0.13 ms behind it.
const BUSY_PART_BYTES: usize = 16 * 1024;

/// Path rule of the transfer, for listeners and diallers.
pub fn path_rule() -> PathRule {
    PathRule::new(WEIGHTS_PATH, MAX_MESSAGE_BYTES)
        .with_sockets(16, 4)
        .with_low_priority()
}

/// State of the transfer in a node: the store that it serves, and what its connections share.
pub(crate) struct Weights {
    serving: RwLock<Option<Serving>>,
    store_calls: Arc<Semaphore>,
    /// One permit per [quota group](hearthnet_transport::Admission::counts_with), held while a
    /// request is answered: groups take turns, however many connections each has.
    turns: Mutex<HashMap<NodeId, Weak<Semaphore>>>,
    sending: Pacer,
    /// Pace of this node's own requests.
    fetching: Pacer,
    sent: AtomicU64,
}

#[derive(Clone)]
struct Serving {
    store: Arc<dyn WeightsStore>,
    busy: Busy,
}

impl Default for Weights {
    fn default() -> Weights {
        Weights {
            serving: RwLock::default(),
            store_calls: Arc::new(Semaphore::new(STORE_CALLS)),
            turns: Mutex::default(),
            sending: Pacer::new(),
            fetching: Pacer::new(),
            sent: AtomicU64::new(0),
        }
    }
}

impl Weights {
    /// Serves `store` from now on.
    pub(crate) fn serve(&self, store: Arc<dyn WeightsStore>, busy: Busy) {
        *self.serving.write() = Some(Serving { store, busy });
    }

    pub(crate) fn is_served(&self) -> bool {
        self.serving.read().is_some()
    }

    /// Bytes of weights sent since the start of the node.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Waits until this node may ask for `bytes` more bytes.
    pub(super) async fn before_fetching(&self, bytes: usize) {
        let serving = self.serving.read().clone();
        let busy = serving.is_some_and(|serving| (serving.busy)());
        self.fetching.wait(bytes, busy).await;
    }

    /// The semaphore of a quota group.
    fn turns_of(&self, party: NodeId) -> Arc<Semaphore> {
        let mut all = self.turns.lock();
        if let Some(turns) = all.get(&party).and_then(Weak::upgrade) {
            return turns;
        }
        all.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Semaphore::new(1));
        all.insert(party, Arc::downgrade(&turns));
        turns
    }

    /// Answers the requests of a connection until it ends. `party` is the quota group of the peer.
    pub(crate) async fn attend(&self, mut socket: PeerSocket, party: NodeId) -> SessionClosed {
        let sender = socket.sender();
        let turns = self.turns_of(party);
        let mut received = Received::default();
        let mut answering = None;
        loop {
            let first = received.first();
            if answering.is_none() {
                answering = first.map(|(number, request)| {
                    Box::pin(self.answer(&sender, &turns, number, request))
                });
            }
            let code = tokio::select! {
                frame = socket.recv() => match frame {
                    Ok(Frame::Binary(message)) => match received.receive(&message) {
                        Ok(()) => continue,
                        Err(violation) => {
                            socket.close(violation.code);
                            return SessionClosed::by_us(violation.code, violation.detail);
                        }
                    },
                    // The path's rule admits no text frames.
                    Ok(Frame::Text(_)) => CloseCode::WebSocket,
                    Err(closed) => return closed,
                },
                Some(answered) = OptionFuture::from(answering.as_mut()) => match answered {
                    Ok(()) => {
                        answering = None;
                        received.answered();
                        continue;
                    }
                    Err(code) => code,
                },
                () = sleep(IDLE), if first.is_none() => CloseCode::Normal,
            };
            socket.close(code);
            return SessionClosed::by_us(code, "");
        }
    }

    /// Answers one request. Returns when the answer is queued.
    async fn answer(
        &self,
        sender: &PeerSender,
        turns: &Semaphore,
        number: u32,
        request: Request,
    ) -> Result<(), CloseCode> {
        let _turn = turns.acquire().await.map_err(|_| CloseCode::Internal)?;
        let permit = Arc::clone(&self.store_calls).acquire_owned().await;
        let permit = permit.map_err(|_| CloseCode::Internal)?;
        let serving = self.serving.read().clone();
        let Serving { store, busy } = serving.ok_or(CloseCode::PurposeUnknown)?;
        let called = background().spawn_blocking(move || {
            let reply = look_up(&*store, &request);
            // Held to the end of the call, also if the connection ends before.
            drop(permit);
            reply
        });
        // The store has panicked, or the process ends.
        let reply = called.await.map_err(|_| CloseCode::Internal)?;
        let Reply::Data { bytes, .. } = reply else {
            let message = reply.encode(number);
            self.sending.wait(message.len(), busy()).await;
            return send(sender, message).await;
        };
        let mut rest = bytes;
        while !rest.is_empty() {
            let is_busy = busy();
            let most = if is_busy { BUSY_PART_BYTES } else { PART_BYTES };
            let bytes = rest.split_to(most.min(rest.len()));
            self.sending.wait(bytes.len(), is_busy).await;
            let len = bytes.len() as u64;
            let more = !rest.is_empty();
            send(sender, Reply::Data { more, bytes }.encode(number)).await?;
            self.sent.fetch_add(len, Ordering::Relaxed);
            metrics::counter!("hearthnet_weights_sent_bytes_total").increment(len);
        }
        Ok(())
    }
}

/// Looks up the answer. Blocks.
fn look_up(store: &dyn WeightsStore, request: &Request) -> Reply {
    let (bytes, lengths) = match request {
        Request::Held { weights } => {
            return store.held(weights).map_or(Reply::None, Reply::Held);
        }
        Request::Piece { weights, index } => (store.piece(weights, *index), DATA_LENGTHS),
        Request::Range {
            weights,
            object,
            offset,
            len,
        } => {
            let bytes = store.read(weights, *object, *offset, *len);
            (bytes, *len as usize..=*len as usize)
        }
    };
    match bytes {
        Some(bytes) if lengths.contains(&bytes.len()) => Reply::Data {
            more: false,
            bytes: Bytes::from(bytes),
        },
        Some(_) => {
            tracing::warn!("weights: the store gave bytes of another length; nothing is sent");
            Reply::None
        }
        None => Reply::None,
    }
}

async fn send(sender: &PeerSender, message: Bytes) -> Result<(), CloseCode> {
    match sender.send(Frame::Binary(message)).await {
        Ok(()) => Ok(()),
        Err(SendError::Closed(closed)) => Err(closed.code),
        // A message of this side exceeded its own limit.
        Err(_) => Err(CloseCode::Internal),
    }
}
