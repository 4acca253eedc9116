//! The listening side: an accept loop that survives, handshakes that are bounded in number and in
//! time, and sessions that are bounded in number.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tokio_rustls::{TlsAcceptor, TlsStream};
use tokio_tungstenite::accept_hdr_async_with_config;
use tokio_tungstenite::tungstenite::handshake::server::{
    Callback, ErrorResponse, Request, Response,
};

use super::connection::{Connection, start, websocket_config};
use super::guard::{Guarded, Meter};
use super::tls::server_config;
use super::{BoxIo, Io, PATH, Phase};
use crate::code::{CloseCode, SessionClosed};
use crate::config::{CONTROL_MESSAGE_BYTES, Config, ConfigError};
use crate::identity::{Identity, PeerKey};
use crate::session::{Event, Session};
use crate::time::Time;
use crate::wire::control::Hello;

/// Open sessions that wait to be accepted by the application.
const ACCEPT_QUEUE: usize = 16;
/// How long the accept loop rests when the system has no more sockets to give.
const OUT_OF_SOCKETS: Duration = Duration::from_millis(100);
/// How long a refused peer has to read why.
const LINGER: Duration = Duration::from_millis(500);

/// Who may connect, and with what.
///
/// Called from the tasks that run the handshakes: answers must come without blocking.
pub trait Admission: Send + Sync {
    /// Whether a node with this key may connect at all. Asked during the TLS handshake; the peer
    /// has not yet proved that it holds the key.
    fn admit_peer(&self, key: &PeerKey) -> bool;

    /// Whether a session may be opened. `key` is proved; `now_unix` is in seconds.
    ///
    /// # Errors
    /// The code to close with: such as `purpose_unknown`, or one of the `token_` codes.
    fn admit_hello(&self, key: &PeerKey, hello: &Hello, now_unix: u64) -> Result<(), CloseCode>;

    /// A connection of an admitted peer has ended, whether or not it became a session, and why.
    /// For counting: so that what is refused during the handshakes is seen as well.
    fn session_ended(&self, _key: &PeerKey, _closed: &SessionClosed) {}
}

/// Why a listener could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The address is in use, or not one of this machine's.
    #[error("cannot listen on {addr}: {source}")]
    Address {
        /// The address that was asked for.
        addr: String,
        /// What the system said.
        source: io::Error,
    },
    /// The TLS library refused the identity.
    #[error("TLS could not be set up: {0}")]
    Tls(String),
    /// A setting is out of its range.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedConnection {
    /// A phase took longer than its deadline.
    #[error("{0} did not complete in time")]
    Timeout(Phase),
    /// A phase failed.
    #[error("{phase} failed: {reason}")]
    Handshake {
        /// Where it failed.
        phase: Phase,
        /// What was seen.
        reason: String,
    },
    /// The session ended before it opened.
    #[error(transparent)]
    Closed(SessionClosed),
}

/// What a listener has seen since it was bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Connections that the system handed over.
    pub connections: u64,
    /// Of these: turned away because too many handshakes were under way.
    pub over_limit: u64,
    /// Of these: refused or failed in a handshake.
    pub refused: u64,
    /// Of these: became sessions.
    pub sessions: u64,
    /// Times that accepting failed, such as for want of file descriptors.
    pub accept_errors: u64,
}

#[derive(Default)]
struct Counters {
    connections: AtomicU64,
    over_limit: AtomicU64,
    refused: AtomicU64,
    sessions: AtomicU64,
    accept_errors: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Handshakes under way: in all, and per address.
struct HalfOpen {
    by_address: Mutex<(usize, HashMap<IpAddr, usize>)>,
    max: usize,
    max_per_address: usize,
}

/// One handshake's place; given back when dropped.
struct Place {
    of: Arc<HalfOpen>,
    address: IpAddr,
}

impl HalfOpen {
    fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let mut guard = self
            .by_address
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (total, by_address) = &mut *guard;
        let here = by_address.get(&address).copied().unwrap_or(0);
        if *total >= self.max || here >= self.max_per_address {
            return None;
        }
        *total += 1;
        by_address.insert(address, here + 1);
        Some(Place {
            of: self.clone(),
            address,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut guard = self
            .of
            .by_address
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (total, by_address) = &mut *guard;
        *total = total.saturating_sub(1);
        if let Some(here) = by_address.get_mut(&self.address) {
            *here -= 1;
            if *here == 0 {
                by_address.remove(&self.address);
            }
        }
    }
}

/// Runs the listening side's handshakes over byte streams, wherever they come from.
#[derive(Clone)]
pub struct Acceptor {
    tls: Arc<ServerConfig>,
    admission: Arc<dyn Admission>,
    config: Arc<Config>,
    sessions: Arc<Semaphore>,
}

impl Acceptor {
    /// An acceptor with its own count of sessions.
    ///
    /// # Errors
    /// [`BindError::Tls`] or [`BindError::Config`].
    pub fn new(
        identity: &Identity,
        admission: Arc<dyn Admission>,
        config: Config,
    ) -> Result<Acceptor, BindError> {
        config.validate()?;
        let tls = server_config(identity, admission.clone())
            .map_err(|error| BindError::Tls(error.to_string()))?;
        let sessions = Arc::new(Semaphore::new(
            config.max_sessions.min(Semaphore::MAX_PERMITS),
        ));
        Ok(Acceptor {
            tls,
            admission,
            config: Arc::new(config),
            sessions,
        })
    }

    /// Sessions that are open, or in their HELLOs.
    pub fn sessions(&self) -> usize {
        self.config
            .max_sessions
            .saturating_sub(self.sessions.available_permits())
    }

    /// Turns a byte stream into a session.
    ///
    /// # Errors
    /// See [`RefusedConnection`]; the peer has been told, as far as that is possible.
    pub async fn accept(&self, io: Box<dyn Io>) -> Result<Connection, RefusedConnection> {
        let io: BoxIo = io;
        let begin = Instant::now();
        let d = &self.config.deadlines;
        let failed = |phase| move |reason: String| RefusedConnection::Handshake { phase, reason };

        let accepting = TlsAcceptor::from(self.tls.clone())
            .accept(io)
            .into_fallible();
        let stream = match timeout(d.tls, accepting).await {
            Err(_) => return Err(RefusedConnection::Timeout(Phase::Tls)),
            Ok(Err((error, io))) => {
                linger(io).await;
                return Err(failed(Phase::Tls)(error.to_string()));
            }
            Ok(Ok(stream)) => stream,
        };
        let peer = stream
            .get_ref()
            .1
            .peer_certificates()
            .and_then(|chain| PeerKey::from_certificate(chain.first()?).ok())
            .ok_or_else(|| failed(Phase::Tls)("the peer has no certificate".to_owned()))?;

        let meter = Meter::new(true, CONTROL_MESSAGE_BYTES, Time::ZERO);
        let guarded = Guarded::new(TlsStream::Server(stream), meter, begin);
        let upgrading =
            accept_hdr_async_with_config(guarded, Route, Some(websocket_config(&self.config)));
        let socket = match timeout(d.upgrade, upgrading).await {
            Err(_) => return Err(RefusedConnection::Timeout(Phase::Upgrade)),
            Ok(Err(error)) => return Err(failed(Phase::Upgrade)(error.to_string())),
            Ok(Ok(socket)) => socket,
        };

        let permit = self.sessions.clone().try_acquire_owned().ok();
        let has_room = permit.is_some();
        let session = Session::host(&self.config, Time::from(begin.elapsed()));
        let admission = self.admission.clone();
        let ended = move |closed: &SessionClosed| {
            admission.session_ended(&peer, closed);
            // The session counts against the limit until its connection is gone.
            drop(permit);
        };
        let mut pending = start(session, socket, peer, begin, &self.config, Box::new(ended));
        let mut purpose = String::new();
        loop {
            match pending.event().await.map_err(RefusedConnection::Closed)? {
                Event::Hello(hello) => {
                    let answer = if has_room {
                        self.admission.admit_hello(&peer, &hello, unix_now())
                    } else {
                        Err(CloseCode::SessionLimit)
                    };
                    purpose = hello.purpose;
                    pending.answer(answer);
                }
                Event::Opened(terms) => {
                    return pending.open(purpose, terms).ok_or_else(|| {
                        failed(Phase::Hello)("the session opened twice".to_owned())
                    });
                }
                _ => {}
            }
        }
    }
}

fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Lets a refused peer read the TLS alert. Closing at once, with its next bytes unread, would make
/// the system send a reset, which can overtake the alert.
async fn linger(mut io: BoxIo) {
    let drain = async {
        io.shutdown().await?;
        let mut scratch = [0u8; 1024];
        for _ in 0..64 {
            if io.read(&mut scratch).await? == 0 {
                break;
            }
        }
        Ok::<(), io::Error>(())
    };
    // Whether it was read cannot be known, and does not matter to this side.
    let _ = timeout(LINGER, drain).await;
}

/// Serves [`PATH`] and nothing else.
struct Route;

impl Callback for Route {
    // The type is tungstenite's.
    #[allow(clippy::result_large_err)]
    fn on_request(self, request: &Request, response: Response) -> Result<Response, ErrorResponse> {
        if request.uri().path() == PATH {
            return Ok(response);
        }
        let mut refusal = ErrorResponse::new(None);
        *refusal.status_mut() = tokio_tungstenite::tungstenite::http::StatusCode::NOT_FOUND;
        Err(refusal)
    }
}

/// Listens on a TCP address and yields open sessions.
pub struct Listener {
    addr: SocketAddr,
    sessions: mpsc::Receiver<Connection>,
    counters: Arc<Counters>,
    task: AbortHandle,
}

impl Listener {
    /// Binds `addr` (`host:port`; port 0 lets the system choose) and starts accepting.
    ///
    /// # Errors
    /// See [`BindError`].
    pub async fn bind(
        addr: &str,
        identity: &Identity,
        admission: Arc<dyn Admission>,
        config: Config,
    ) -> Result<Listener, BindError> {
        let address = |source| BindError::Address {
            addr: addr.to_owned(),
            source,
        };
        let half_open = Arc::new(HalfOpen {
            by_address: Mutex::default(),
            max: config.max_handshakes,
            max_per_address: config.max_handshakes_per_address,
        });
        let acceptor = Acceptor::new(identity, admission, config)?;
        let tcp = TcpListener::bind(addr).await.map_err(address)?;
        let addr = tcp.local_addr().map_err(address)?;
        let counters = Arc::new(Counters::default());
        let (ready, sessions) = mpsc::channel(ACCEPT_QUEUE);
        let task = tokio::spawn(accept_loop(
            tcp,
            acceptor,
            half_open,
            ready,
            counters.clone(),
        ));
        Ok(Listener {
            addr,
            sessions,
            counters,
            task: task.abort_handle(),
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// The next open session. Handshakes go on whether or not this is being called.
    pub async fn accept(&mut self) -> Connection {
        match self.sessions.recv().await {
            Some(connection) => connection,
            // The loop ends only with the listener itself.
            None => std::future::pending().await,
        }
    }

    /// What has happened so far.
    pub fn stats(&self) -> ListenerStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ListenerStats {
            connections: read(&self.counters.connections),
            over_limit: read(&self.counters.over_limit),
            refused: read(&self.counters.refused),
            sessions: read(&self.counters.sessions),
            accept_errors: read(&self.counters.accept_errors),
        }
    }
}

impl Drop for Listener {
    /// Stops accepting and drops the handshakes under way; open sessions live on.
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept_loop(
    tcp: TcpListener,
    acceptor: Acceptor,
    half_open: Arc<HalfOpen>,
    ready: mpsc::Sender<Connection>,
    counters: Arc<Counters>,
) {
    // Dropped with this task, and the handshakes with it.
    let mut handshakes = JoinSet::new();
    loop {
        while handshakes.try_join_next().is_some() {}
        let (stream, address) = match tcp.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                count(&counters.accept_errors);
                if !is_about_one_connection(&error) {
                    tracing::warn!(%error, "accepting connections is paused");
                    tokio::time::sleep(OUT_OF_SOCKETS).await;
                }
                continue;
            }
        };
        count(&counters.connections);
        let Some(place) = half_open.enter(address.ip().to_canonical()) else {
            count(&counters.over_limit);
            tracing::debug!(code = %CloseCode::ConnectionLimit, "a connection was turned away");
            continue;
        };
        let (acceptor, ready, counters) = (acceptor.clone(), ready.clone(), counters.clone());
        handshakes.spawn(async move {
            let result = handshake(&acceptor, stream).await;
            // From here on it counts as a session.
            drop(place);
            match result {
                Ok(connection) => {
                    count(&counters.sessions);
                    let _ = ready.send(connection).await;
                }
                Err(error) => {
                    count(&counters.refused);
                    tracing::debug!(%error, "a connection was refused");
                }
            }
        });
    }
}

async fn handshake(
    acceptor: &Acceptor,
    stream: TcpStream,
) -> Result<Connection, RefusedConnection> {
    let no_delay = stream.set_nodelay(true);
    no_delay.map_err(|error| RefusedConnection::Handshake {
        phase: Phase::Connect,
        reason: error.to_string(),
    })?;
    acceptor.accept(Box::new(stream)).await
}

/// Whether accepting failed because of the connection that was accepted, not of this process.
fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}
