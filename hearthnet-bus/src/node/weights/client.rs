//! Asking side: requests to one member over one connection.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::{
    CloseCode, Code, Frame, PeerSender, PeerSocket, SessionClosed, Violation, background,
};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::message::{DATA_LENGTHS, MAX_DATA_BYTES, Request};
use super::server::Weights;
use super::session::{Answer, Asked, MAX_IN_FLIGHT};
use super::store::{Held, Object};
use crate::NodeId;
use crate::node::calls::CallError;

/// Time without any message from a peer, while requests are in flight.
const NO_PROGRESS: Duration = Duration::from_secs(20);
/// Shares of that time after which it is checked.
const CHECKS: u32 = 20;

/// Error of a request to a member.
#[derive(Debug, Clone, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum WeightsError {
    /// No connection: the code is that of the inner error, `unreachable` or `unauthorized`.
    #[error(transparent)]
    Connect(CallError),
    /// The member serves no weights: it runs another version, or does not store models.
    #[error("the node does not serve weights; it may run another version of the program")]
    NotServed,
    /// The member's limit of connections is reached.
    #[error("the node has as many transfers of weights as it allows; try again later")]
    Busy,
    /// The connection has ended.
    #[error("the transfer of weights broke off: {0}")]
    ConnectionLost(SessionClosed),
    /// The member broke a rule of the protocol. The connection is closed.
    #[error("the node broke the rules of the transfer of weights: {0}")]
    ProtocolViolation(Violation),
    /// The member sent nothing for 20 s. The connection is closed.
    #[error("the node did not answer within {} s", NO_PROGRESS.as_secs())]
    Timeout,
    /// A range of no bytes, or of more than [`MAX_DATA_BYTES`].
    #[error("a range has 1 to {MAX_DATA_BYTES} bytes, not {0}")]
    BadRequest(u32),
}

impl WeightsError {
    /// Stable code for machines.
    pub fn code(&self) -> Code {
        match self {
            Self::Connect(error) => error.code().clone(),
            other => Code::new(other.into()),
        }
    }
}

/// Connection to a member for its weights. Up to 16 requests are in flight; further ones wait. The
/// connection ends when this is dropped.
pub struct WeightsPeer {
    shared: Arc<Shared>,
    node: NodeId,
    weights: Arc<Weights>,
    /// Ends the task that drives the socket.
    _stop: DropGuard,
}

struct Shared {
    state: Mutex<State>,
    slots: Arc<Semaphore>,
    sender: PeerSender,
}

struct State {
    asked: Asked,
    waiting: HashMap<u32, Waiting>,
    /// Time of the last message of the peer, or of the first request after none was in flight.
    heard: Instant,
    ended: Option<WeightsError>,
}

struct Waiting {
    /// Closed if the request was cancelled; its answer is dropped.
    answer: oneshot::Sender<Answer>,
    /// Freed with the answer, also if the request was cancelled.
    _slot: OwnedSemaphorePermit,
}

impl WeightsPeer {
    /// Must be called within a tokio runtime.
    pub(crate) fn new(socket: PeerSocket, weights: Arc<Weights>) -> WeightsPeer {
        WeightsPeer::with_patience(socket, weights, NO_PROGRESS)
    }

    /// [`new`](Self::new), with another time without progress.
    pub(super) fn with_patience(
        socket: PeerSocket,
        weights: Arc<Weights>,
        no_progress: Duration,
    ) -> WeightsPeer {
        let node = socket.peer();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                asked: Asked::default(),
                waiting: HashMap::new(),
                heard: Instant::now(),
                ended: None,
            }),
            slots: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
            sender: socket.sender(),
        });
        let stop = CancellationToken::new();
        let driving = drive(Arc::clone(&shared), socket, no_progress, stop.clone());
        background().spawn(driving);
        WeightsPeer {
            shared,
            node,
            weights,
            _stop: stop.drop_guard(),
        }
    }

    /// The member.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Pieces of a model that the member says it holds; `None` if it holds no piece.
    ///
    /// # Errors
    /// See [`WeightsError`].
    pub async fn held(&self, weights: &[u8; 32]) -> Result<Option<Held>, WeightsError> {
        let request = Request::Held { weights: *weights };
        match self.ask(request, 0).await? {
            Answer::Held(held) => Ok(Some(held)),
            _ => Ok(None),
        }
    }

    /// Bytes of a piece, not verified; `None`: the member does not hold it.
    ///
    /// # Errors
    /// See [`WeightsError`].
    pub async fn piece(
        &self,
        weights: &[u8; 32],
        index: u32,
    ) -> Result<Option<Vec<u8>>, WeightsError> {
        let weights = *weights;
        let request = Request::Piece { weights, index };
        self.bytes(request, MAX_DATA_BYTES).await
    }

    /// `len` bytes of an object, not verified; `None`: the member does not hold them.
    ///
    /// # Errors
    /// See [`WeightsError`].
    pub async fn read(
        &self,
        weights: &[u8; 32],
        object: Object,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>, WeightsError> {
        if !DATA_LENGTHS.contains(&(len as usize)) {
            return Err(WeightsError::BadRequest(len));
        }
        let request = Request::Range {
            weights: *weights,
            object,
            offset,
            len,
        };
        self.bytes(request, len as usize).await
    }

    async fn bytes(&self, request: Request, len: usize) -> Result<Option<Vec<u8>>, WeightsError> {
        match self.ask(request, len).await? {
            Answer::Bytes(bytes) => Ok(Some(bytes)),
            _ => Ok(None),
        }
    }

    /// Sends a request whose answer has about `len` bytes, and waits for the answer.
    async fn ask(&self, request: Request, len: usize) -> Result<Answer, WeightsError> {
        let shared = &self.shared;
        let Ok(slot) = Arc::clone(&shared.slots).acquire_owned().await else {
            return Err(shared.ended());
        };
        self.weights.before_fetching(len).await;
        let answer = {
            let mut state = shared.state.lock();
            if let Some(ended) = &state.ended {
                return Err(ended.clone());
            }
            if state.asked.is_empty() {
                state.heard = Instant::now();
            }
            let number = state.asked.ask(request);
            let (sender, answer) = oneshot::channel();
            let waiting = Waiting {
                answer: sender,
                _slot: slot,
            };
            state.waiting.insert(number, waiting);
            // The socket's queue has room for all requests in flight. If the socket is closed, the
            // task that reads it ends all requests.
            let _ = shared
                .sender
                .try_send(Frame::Binary(request.encode(number)));
            answer
        };
        answer.await.map_err(|_| shared.ended())
    }
}

impl std::fmt::Debug for WeightsPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeightsPeer")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Takes a message of the peer.
    fn receive(&self, frame: &Frame) -> Result<(), Violation> {
        let Frame::Binary(message) = frame else {
            // The path's rule admits no text frames.
            return Err(CloseCode::WebSocket.violation("a text message"));
        };
        let mut state = self.state.lock();
        state.heard = Instant::now();
        if let Some((number, answer)) = state.asked.receive(message)?
            && let Some(waiting) = state.waiting.remove(&number)
        {
            // Fails if the request was cancelled.
            let _ = waiting.answer.send(answer);
        }
        Ok(())
    }

    fn is_stalled(&self, no_progress: Duration) -> bool {
        let state = self.state.lock();
        !state.asked.is_empty() && state.heard.elapsed() >= no_progress
    }

    /// Ends all requests, and later ones, with `error`.
    fn end(&self, error: WeightsError) {
        let mut state = self.state.lock();
        state.ended = Some(error);
        state.waiting.clear();
        drop(state);
        self.slots.close();
    }

    /// Cause of the end.
    fn ended(&self) -> WeightsError {
        let ended = self.state.lock().ended.clone();
        ended.unwrap_or_else(|| {
            WeightsError::ConnectionLost(SessionClosed::by_us(CloseCode::Internal, ""))
        })
    }
}

/// Drives the socket until it closes or `stop` is cancelled.
async fn drive(
    shared: Arc<Shared>,
    mut socket: PeerSocket,
    no_progress: Duration,
    stop: CancellationToken,
) {
    let mut tick = interval(no_progress / CHECKS);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let error = loop {
        tokio::select! {
            frame = socket.recv() => match frame {
                Ok(frame) => if let Err(violation) = shared.receive(&frame) {
                    socket.close(violation.code);
                    let (peer, error) = (socket.peer(), &violation);
                    tracing::info!(peer = %peer.short(), %error, "weights: closing a connection");
                    break WeightsError::ProtocolViolation(violation);
                },
                Err(closed) => break WeightsError::ConnectionLost(closed),
            },
            _ = tick.tick() => if shared.is_stalled(no_progress) {
                socket.close(CloseCode::PipelineStalled);
                break WeightsError::Timeout;
            },
            () = stop.cancelled() => {
                socket.close(CloseCode::Normal);
                return;
            }
        }
    };
    shared.end(error);
}
