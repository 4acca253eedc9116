//! Listening side: an accept loop that survives errors, with limits on the number and duration of
//! handshakes and on the number of sessions.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::accept_hdr_async_with_config;
use tokio_tungstenite::tungstenite::handshake::server::{
    Callback, ErrorResponse, Request, Response,
};
use tokio_tungstenite::tungstenite::http::header::{CONNECTION, CONTENT_LENGTH};
use tokio_tungstenite::tungstenite::http::{HeaderValue, StatusCode};

use super::caps::{Caps, Full, Place};
use super::connection::{Connection, Pending};
use super::driver::websocket_config;
use super::frame_limiter::Socket;
use super::frame_limiter::{FrameLimiter, LimitedStream};
use super::metrics::{self, OpenSocket, Side, tls_cause};
use super::paths::{Arrival, PathRule};
use super::peer_socket;
use super::pending_peers::{PendingLimits, PendingPeer, PendingPeers};
use super::tls::{peer_of, server_config};
use super::{BoxIo, Io, PATH, Phase};
use crate::NodeId;
use crate::background::{background, give_way};
use crate::code::{CloseCode, Code, SessionClosed};
use crate::config::{CONTROL_MESSAGE_BYTES, Config, ConfigError};
use crate::identity::Identity;
use crate::session::rate::KeyedBuckets;
use crate::session::{Session, max_message_bytes};
use crate::time::Time;
use crate::wire::control::Hello;

/// Open sessions that wait to be accepted by the application.
const ACCEPT_QUEUE: usize = 16;
/// Pause of an accept loop when the system is out of sockets: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Interval of the warning about that, over all listeners of the process.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Time of the last warning.
static LAST_WARNING: Mutex<Option<Instant>> = Mutex::new(None);
/// Time for a refused peer to read the TLS alert.
const LINGER: Duration = Duration::from_millis(500);
/// Connections of one party over all paths: burst, and rate per second. A chat makes two
/// connections to each of its hosts. A TLS handshake costs about half a millisecond, so 16 a second
/// take 1% of a core.
const CONNECTION_BURST: u64 = 256;
const CONNECTIONS_PER_SECOND: u64 = 16;
/// Parties whose connections are counted.
const MAX_PARTIES: usize = 1024;
/// Header of a refused upgrade, with the close code.
pub(super) const REFUSED_HEADER: &str = "x-hearthnet-refused";

/// Decides which peers may connect, and for what.
///
/// Called from the tasks that run the handshakes: must not block.
pub trait Admission: Send + Sync {
    /// Returns whether a node with this key may connect at all. Called during the TLS handshake;
    /// the peer has not yet proved that it holds the key.
    fn admit_peer(&self, key: &NodeId) -> bool;

    /// Returns whether the holder of this proved key is a member. Strangers have few slots of their
    /// own, and never take those of members. By default every admitted peer counts as a member.
    fn belongs(&self, _key: &NodeId) -> bool {
        true
    }

    /// Quota group that sessions and sockets of this peer count with; by default the peer itself.
    fn counts_with(&self, key: &NodeId) -> NodeId {
        *key
    }

    /// Checks whether the holder of this proved key may use a path. Called during the upgrade; a
    /// refusal is answered with HTTP 403 and the code. By default the tensor path is open, since
    /// HELLO follows, and every other path is closed.
    ///
    /// # Errors
    /// The code for the peer, such as `unauthorized` or `revoked`.
    fn admit_path(&self, _key: &NodeId, path: &str) -> Result<(), CloseCode> {
        match path {
            PATH => Ok(()),
            _ => Err(CloseCode::Unauthorized),
        }
    }

    /// Checks the HELLO of a peer with a proved key. `now_unix` is in seconds.
    ///
    /// # Errors
    /// The close code, such as `purpose_unknown` or one of the `token_` codes.
    fn admit_hello(&self, key: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode>;

    /// Reports the end of an admitted peer's connection to the tensor path, even if it never became
    /// a session, so that refusals during the handshakes are counted as well.
    fn session_ended(&self, _key: &NodeId, _closed: &SessionClosed) {}

    /// Reports the end of a connection to another path.
    fn path_ended(&self, _key: &NodeId, _path: &str, _closed: &SessionClosed) {}

    /// Reports a connection that became neither session nor socket. Its peer may be unknown.
    fn connection_refused(&self, _why: &RefusedConnection) {}
}

/// Error of setting up a listener.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The address is in use, or not one of this machine's.
    #[error("cannot listen on {addr}: {source}")]
    Address { addr: String, source: io::Error },
    /// The TLS library refused the identity.
    #[error("TLS could not be set up: {0}")]
    Tls(String),
    /// A setting is out of its range.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Reason why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedConnection {
    /// A phase took longer than its deadline.
    #[error("{0} did not complete in time")]
    Timeout(Phase),
    /// The TLS handshake failed.
    #[error("{} failed: {reason}", Phase::Tls)]
    Tls {
        /// Single word: `not_tls`, `not_admitted`, `broken_off` and some more.
        cause: &'static str,
        reason: String,
    },
    /// Another phase failed.
    #[error("{phase} failed: {reason}")]
    Handshake { phase: Phase, reason: String },
    /// The peer may not use the path, or not now.
    #[error("the path {path} was refused: {code}")]
    Path {
        /// Path as served, not as asked for.
        path: &'static str,
        code: CloseCode,
    },
    /// The session ended before it opened.
    #[error(transparent)]
    Closed(SessionClosed),
}

impl RefusedConnection {
    /// Stable code, out of a fixed set.
    pub fn code(&self) -> Code {
        Code::new(match self {
            RefusedConnection::Timeout(_) => "timeout",
            RefusedConnection::Tls { cause, .. } => cause,
            RefusedConnection::Handshake { phase, .. } => match phase {
                Phase::Connect => "connect_failed",
                Phase::Tls => "tls_failed",
                Phase::Upgrade => "upgrade_failed",
                Phase::Hello => "hello_failed",
            },
            RefusedConnection::Path { code, .. } => code.as_str(),
            RefusedConnection::Closed(closed) => closed.code.as_str(),
        })
    }
}

/// Runs the listening side's handshakes over byte streams of any origin.
#[derive(Clone)]
pub struct Acceptor {
    tls: Arc<ServerConfig>,
    admission: Arc<dyn Admission>,
    config: Arc<Config>,
    sessions: Arc<Caps<NodeId>>,
    /// Connection budget of each [quota group](Admission::counts_with).
    connections: Arc<Mutex<KeyedBuckets<NodeId>>>,
    begin: Instant,
    paths: Arc<[Path]>,
    /// Runtime of the sessions and sockets.
    runtime: Handle,
}

/// A served path, with the sockets on it.
struct Path {
    rule: PathRule,
    sockets: Arc<Caps<NodeId>>,
    /// Sockets per [quota group](Admission::counts_with).
    parties: Arc<Caps<NodeId>>,
    /// Sockets of strangers.
    strangers: Arc<PendingPeers>,
}

impl Acceptor {
    /// Makes an acceptor of tensor sessions, with a limit of its own, and of sockets on other
    /// paths.
    ///
    /// # Errors
    /// [`BindError::Tls`] or [`BindError::Config`].
    ///
    /// # Panics
    /// Outside of a runtime: sessions and sockets run on the one in which this is called.
    pub fn new(
        identity: &Identity,
        admission: Arc<dyn Admission>,
        config: Config,
        paths: &[PathRule],
    ) -> Result<Acceptor, BindError> {
        config.validate()?;
        let tls = server_config(identity, admission.clone())
            .map_err(|error| BindError::Tls(error.to_string()))?;
        let sessions = Caps::new(config.max_sessions, config.max_sessions_per_peer);
        let with_caps = |rule: &PathRule| Path {
            rule: rule.clone(),
            sockets: Caps::new(rule.max_sockets, rule.max_sockets_per_peer),
            parties: Caps::new(rule.max_sockets, rule.max_sockets_per_party()),
            strangers: PendingPeers::new(PendingLimits {
                unexpected: rule.max_strangers,
                all: rule.max_sockets,
                each: rule.max_strangers.div_ceil(4),
            }),
        };
        let connections = KeyedBuckets::new(CONNECTIONS_PER_SECOND, CONNECTION_BURST, MAX_PARTIES);
        Ok(Acceptor {
            tls,
            admission,
            connections: Arc::new(Mutex::new(connections)),
            begin: Instant::now(),
            config: Arc::new(config),
            sessions,
            paths: paths.iter().map(with_caps).collect(),
            runtime: Handle::current(),
        })
    }

    /// Sessions that are open, or in their HELLOs.
    pub fn sessions(&self) -> usize {
        self.sessions.taken()
    }

    /// Takes one connection of this member from its party's budget. `false` if it is exhausted.
    fn may_connect(&self, peer: &NodeId) -> bool {
        let party = self.admission.counts_with(peer);
        let now = Time::from(self.begin.elapsed());
        self.connections.lock().take(&party, now)
    }

    /// Turns a byte stream into a session or a socket, as the peer asks.
    ///
    /// # Errors
    /// See [`RefusedConnection`]; the peer has been told, as far as possible.
    pub async fn arrive(&self, io: Box<dyn Io>) -> Result<Arrival, RefusedConnection> {
        self.arrive_as(io, None).await
    }

    /// Like [`arrive`](Self::arrive), for a connection counted by `pending_peer`.
    async fn arrive_as(
        &self,
        io: BoxIo,
        pending_peer: Option<&PendingPeer>,
    ) -> Result<Arrival, RefusedConnection> {
        let result = self.shake_hands(io, pending_peer).await;
        if let Err(error) = &result {
            match error {
                RefusedConnection::Tls { cause, .. } => metrics::tls_failed(Side::Host, cause),
                RefusedConnection::Timeout(Phase::Tls) => {
                    metrics::tls_failed(Side::Host, "timeout");
                }
                _ => {}
            }
            self.count_refusal(error);
        }
        result
    }

    fn count_refusal(&self, why: &RefusedConnection) {
        metrics::refused(Side::Host, why.code());
        self.admission.connection_refused(why);
    }

    async fn shake_hands(
        &self,
        io: BoxIo,
        pending_peer: Option<&PendingPeer>,
    ) -> Result<Arrival, RefusedConnection> {
        let begin = Instant::now();
        let d = &self.config.deadlines;

        if let Some(pending_peer) = pending_peer {
            pending_peer.wait_if_slowed().await;
        }
        let accepting = TlsAcceptor::from(self.tls.clone())
            .accept(io)
            .into_fallible();
        let stream = match timeout(d.tls, accepting).await {
            Err(_) => return Err(RefusedConnection::Timeout(Phase::Tls)),
            Ok(Err((error, io))) => {
                linger(io).await;
                return Err(RefusedConnection::Tls {
                    cause: tls_cause(&error),
                    reason: error.to_string(),
                });
            }
            Ok(Ok(stream)) => stream,
        };
        give_way();
        let peer = peer_of(stream.get_ref().1)
            .ok_or_else(|| failed(Phase::Tls, "the peer has no certificate".to_owned()))?;
        let belongs = self.admission.belongs(&peer);
        if let (true, Some(pending_peer)) = (belongs, pending_peer) {
            pending_peer.mark_member(peer);
        }
        let is_within_rate = !belongs || self.may_connect(&peer);
        if let (false, Some(pending_peer)) = (is_within_rate, pending_peer) {
            pending_peer.slow_down();
        }

        let limiter = FrameLimiter::new(true, CONTROL_MESSAGE_BYTES, Time::ZERO);
        let limited = LimitedStream::new(Box::new(stream), limiter, begin);
        // The path shows only in the upgrade; the frame limiter then gets the path's own limit.
        let tensors = max_message_bytes(self.config.chunk_bytes, self.config.inline_max);
        let largest = self.paths.iter().map(|path| path.rule.max_message_bytes);
        let largest = largest.max().unwrap_or(0).max(tensors);
        let websocket = websocket_config(largest, self.config.read_buffer_bytes);
        let mut choice = Choice::NotFound;
        let route = Route {
            of: self,
            peer,
            belongs,
            is_within_rate,
            choice: &mut choice,
        };
        let upgrading = accept_hdr_async_with_config(limited, route, Some(websocket));
        let upgraded = timeout(d.upgrade, upgrading).await;
        if let Choice::Refused(path, code) = choice {
            let closed = SessionClosed::by_us(code, "");
            match path {
                PATH => self.admission.session_ended(&peer, &closed),
                path => self.admission.path_ended(&peer, path, &closed),
            }
            return Err(RefusedConnection::Path { path, code });
        }
        let mut socket = match upgraded {
            Err(_) => return Err(RefusedConnection::Timeout(Phase::Upgrade)),
            Ok(Err(error)) => return Err(failed(Phase::Upgrade, error.to_string())),
            Ok(Ok(socket)) => socket,
        };
        let Choice::Socket(path, place) = choice else {
            let opened = self.open_session(socket, peer, begin).await?;
            return Ok(Arrival::Session(opened));
        };
        let Path {
            rule, strangers, ..
        } = path;
        let limiter = &mut socket.get_mut().limiter;
        limiter.set_limit(rule.max_message_bytes);
        limiter.allow_text(rule.text);
        // Some byte streams have no address.
        let no_address = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        let address = pending_peer.map_or(no_address, |pending_peer| pending_peer.address);
        let (stranger, evicted) = (!belongs).then(|| strangers.enter(address)).unzip();
        let stranger = stranger.map(Arc::new);
        let places = (place, stranger.clone());
        let (admission, path) = (self.admission.clone(), rule.path);
        let open = OpenSocket::new(Side::Host, path);
        let ended = move |closed: &SessionClosed| {
            open.end(closed);
            admission.path_ended(&peer, path, closed);
            drop(places);
        };
        let ended = Box::new(ended);
        let (rule, config) = (rule.clone(), &self.config);
        let socket = {
            let _there = self.runtime.enter();
            peer_socket::start(socket, peer, rule, begin, config, ended, stranger)
        };
        if let Some(evicted) = evicted {
            let closer = socket.closer();
            self.runtime.spawn(async move {
                let _ = evicted.await;
                closer.close(CloseCode::SessionLimit);
            });
        }
        Ok(Arrival::Peer(socket))
    }

    /// Exchanges the HELLOs of a tensor session.
    async fn open_session(
        &self,
        socket: Socket,
        peer: NodeId,
        begin: Instant,
    ) -> Result<Connection, RefusedConnection> {
        let place = self.sessions.enter(self.admission.counts_with(&peer));
        let has_room = place.is_ok();
        let session = Session::host(&self.config, Time::from(begin.elapsed()));
        let admission = self.admission.clone();
        let ended = move |closed: &SessionClosed| {
            admission.session_ended(&peer, closed);
            // The session counts against the limit until its connection is gone.
            drop(place);
        };
        let pending = {
            let _there = self.runtime.enter();
            let ended = Box::new(ended);
            Pending::start(
                session,
                socket,
                peer,
                begin,
                &self.config,
                Side::Host,
                ended,
            )
        };
        let admit = |hello: &Hello| match has_room {
            true => self.admission.admit_hello(&peer, hello, unix_now()),
            false => Err(CloseCode::SessionLimit),
        };
        let opened = pending.opened(Hello::new("", Vec::new()), admit).await;
        opened.map_err(RefusedConnection::Closed)
    }
}

fn failed(phase: Phase, reason: String) -> RefusedConnection {
    RefusedConnection::Handshake { phase, reason }
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
    // This side cannot know whether the alert was read, and need not.
    let _ = timeout(LINGER, drain).await;
}

/// Result of an upgrade request.
enum Choice<'a> {
    /// No served path, or not yet known.
    NotFound,
    /// A tensor session.
    Session,
    /// A socket. The permits are held until it is gone; a stranger has none.
    Socket(&'a Path, Option<[Place<NodeId>; 2]>),
    /// A path that is refused to this peer.
    Refused(&'static str, CloseCode),
}

/// Finds the requested path, and checks whether this peer may use it.
struct Route<'a, 'b> {
    of: &'b Acceptor,
    peer: NodeId,
    belongs: bool,
    /// The budget of its party was not exhausted.
    is_within_rate: bool,
    choice: &'a mut Choice<'b>,
}

impl<'b> Route<'_, 'b> {
    fn choose(&self, asked: &str) -> Choice<'b> {
        let admit = |path| match self.is_within_rate {
            true => self.of.admission.admit_path(&self.peer, path),
            false => Err(CloseCode::SessionLimit),
        };
        if asked == PATH {
            return match admit(PATH) {
                Ok(()) => Choice::Session,
                Err(code) => Choice::Refused(PATH, code),
            };
        }
        let Some(path) = self.of.paths.iter().find(|path| path.rule.path == asked) else {
            return Choice::NotFound;
        };
        if let Err(code) = admit(path.rule.path) {
            return Choice::Refused(path.rule.path, code);
        }
        // Strangers have no permits: closed sockets take a while to be gone, and must not block
        // members.
        let enter = || {
            let party = self.of.admission.counts_with(&self.peer);
            let party = path.parties.enter(party)?;
            Ok::<_, Full>([path.sockets.enter(self.peer)?, party])
        };
        match self.belongs.then(enter).transpose() {
            Ok(places) => Choice::Socket(path, places),
            Err(_) => Choice::Refused(path.rule.path, CloseCode::SessionLimit),
        }
    }
}

impl Callback for Route<'_, '_> {
    // The error type is tungstenite's.
    #[allow(clippy::result_large_err)]
    fn on_request(self, request: &Request, response: Response) -> Result<Response, ErrorResponse> {
        *self.choice = self.choose(request.uri().path());
        let (status, code) = match self.choice {
            Choice::Session | Choice::Socket(..) => return Ok(response),
            Choice::NotFound => (StatusCode::NOT_FOUND, None),
            Choice::Refused(_, CloseCode::SessionLimit) => (
                StatusCode::SERVICE_UNAVAILABLE,
                Some(CloseCode::SessionLimit),
            ),
            Choice::Refused(_, code) => (StatusCode::FORBIDDEN, Some(*code)),
        };
        // No body: the caller's frame limiter takes bytes after the head for WebSocket frames.
        let mut refusal = ErrorResponse::new(None);
        *refusal.status_mut() = status;
        let headers = refusal.headers_mut();
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        if let Some(code) = code {
            let value = HeaderValue::from_static(code.as_str());
            headers.insert(REFUSED_HEADER, value);
        }
        Err(refusal)
    }
}

/// Listens on a TCP address and yields tensor sessions, and sockets on other paths.
pub struct Listener {
    addr: SocketAddr,
    arrivals: mpsc::Receiver<Arrival>,
    task: AbortHandle,
}

impl Listener {
    /// Binds `addr` (`host:port`; port 0 lets the system choose) and starts accepting. The tensor
    /// path always exists, though [`Admission::admit_path`] may refuse it; `paths` are the others.
    ///
    /// # Errors
    /// See [`BindError`].
    pub async fn bind(
        addr: &str,
        identity: &Identity,
        admission: Arc<dyn Admission>,
        config: Config,
        paths: &[PathRule],
    ) -> Result<Listener, BindError> {
        let address = |source| BindError::Address {
            addr: addr.to_owned(),
            source,
        };
        let pending_peers = PendingPeers::new(PendingLimits {
            unexpected: config.max_handshakes.div_ceil(2),
            all: config.max_handshakes,
            each: config.max_handshakes_per_address,
        });
        let acceptor = Acceptor::new(identity, admission, config, paths)?;
        let tcp = TcpListener::bind(addr).await.map_err(address)?;
        let addr = tcp.local_addr().map_err(address)?;
        let (ready, arrivals) = mpsc::channel(ACCEPT_QUEUE);
        let task = tokio::spawn(accept_loop(tcp, acceptor, pending_peers, ready));
        Ok(Listener {
            addr,
            arrivals,
            task: task.abort_handle(),
        })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the next open session or socket. Handshakes proceed independently of this call.
    pub async fn accept(&mut self) -> Arrival {
        match self.arrivals.recv().await {
            Some(arrival) => arrival,
            // The loop ends only with the listener itself.
            None => std::future::pending().await,
        }
    }

    /// Returns the next open session, on a listener without other paths.
    pub async fn session(&mut self) -> Connection {
        loop {
            if let Arrival::Session(connection) = self.accept().await {
                return connection;
            }
        }
    }
}

impl Drop for Listener {
    /// Stops accepting and aborts handshakes; open sessions and sockets live on.
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A listener of the system: a TCP port or a Unix socket.
pub trait Accepts {
    /// Accepted stream and the peer's address.
    type Accepted;

    /// As [`TcpListener::poll_accept`].
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Self::Accepted>>;
}

impl Accepts for TcpListener {
    type Accepted = (TcpStream, SocketAddr);

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Self::Accepted>> {
        self.poll_accept(cx)
    }
}

impl Accepts for UnixListener {
    type Accepted = (UnixStream, tokio::net::unix::SocketAddr);

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Self::Accepted>> {
        self.poll_accept(cx)
    }
}

/// Accepts the next connection; retries after errors of the system. Cancel safe.
pub async fn accept<L: Accepts>(listener: &L) -> L::Accepted {
    let mut pause = FIRST_PAUSE;
    loop {
        match poll_fn(|cx| listener.poll_accept(cx)).await {
            Ok(accepted) => return accepted,
            Err(error) if is_about_one_connection(&error) => {}
            Err(error) => {
                if may_warn(&mut LAST_WARNING.lock(), Instant::now()) {
                    tracing::warn!(
                        %error,
                        "no connection can be accepted; retrying (the limit of open files is \
                         `ulimit -n`, or LimitNOFILE= in a systemd unit)"
                    );
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Returns whether a warning is due, and counts it as given.
fn may_warn(last: &mut Option<Instant>, now: Instant) -> bool {
    let due = last.is_none_or(|last| now.duration_since(last) >= WARN_EVERY);
    if due {
        *last = Some(now);
    }
    due
}

async fn accept_loop(
    tcp: TcpListener,
    acceptor: Acceptor,
    pending_peers: Arc<PendingPeers>,
    ready: mpsc::Sender<Arrival>,
) {
    // Dropping this set, with the task, aborts the handshakes.
    let mut handshakes = JoinSet::new();
    // The listening socket stays with this runtime, and so do accepted sessions and sockets.
    let background = background();
    loop {
        while handshakes.try_join_next().is_some() {}
        let (stream, address) = accept(&tcp).await;
        let (pending_peer, evicted) = pending_peers.enter(address.ip().to_canonical());
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        let shaking = async move {
            give_way();
            let result = tokio::select! {
                result = handshake(&acceptor, stream, &pending_peer) => result,
                _ = evicted => {
                    let limit = SessionClosed::by_us(CloseCode::ConnectionLimit, "");
                    let refused = RefusedConnection::Closed(limit);
                    acceptor.count_refusal(&refused);
                    Err(refused)
                }
            };
            // From here on it counts as a session, or as a socket of its path.
            drop(pending_peer);
            match result {
                Ok(arrival) => {
                    let _ = ready.send(arrival).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection was refused");
                }
            }
        };
        handshakes.spawn_on(shaking, &background);
    }
}

async fn handshake(
    acceptor: &Acceptor,
    stream: TcpStream,
    pending_peer: &PendingPeer,
) -> Result<Arrival, RefusedConnection> {
    let no_delay = stream.set_nodelay(true);
    no_delay.map_err(|error| failed(Phase::Connect, error.to_string()))?;
    acceptor
        .arrive_as(Box::new(stream), Some(pending_peer))
        .await
}

/// Returns whether the error concerns the accepted connection, not this process.
fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A listener of a process without free file descriptors.
    struct Exhausted(AtomicU32);

    impl Accepts for Exhausted {
        type Accepted = ();

        fn poll_accept(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let error = rustix::io::Errno::MFILE;
            Poll::Ready(Err(error.into()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_descriptors_accepting_is_tried_less_and_less_and_said_once_a_minute() {
        let listener = Exhausted(AtomicU32::new(0));
        let minutes = Duration::from_secs(600);
        timeout(minutes, accept(&listener)).await.unwrap_err();
        let tried = listener.0.load(Ordering::Relaxed);
        assert!((600..620).contains(&tried), "{tried} attempts in 600 s");

        let (mut last, begin) = (None, Instant::now());
        let said = (0..600u64).filter(|&second| {
            let now = begin + Duration::from_secs(second);
            may_warn(&mut last, now)
        });
        assert_eq!(said.count(), 10);
    }
}
