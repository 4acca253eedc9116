//! The listening side's handshakes: TLS, the choice of the path, HELLO, with limits on the number
//! of sessions and sockets.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::accept_hdr_async_with_config;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::header::{CONNECTION, CONTENT_LENGTH};
use tokio_tungstenite::tungstenite::http::{HeaderValue, StatusCode};

use super::admission::{Admission, BindError, RefusedConnection};
use super::caps::{Caps, Full, Place};
use super::connection::{Connection, Pending};
use super::driver::websocket_config;
use super::frame_limiter::{BoxIo, FrameLimiter, Io, LimitedStream, Socket};
use super::handshake::{PATH, Phase, REFUSED_HEADER};
use super::metrics::{self, OpenSocket, Side, tls_cause};
use super::peer_socket::{self, PeerSocket};
use super::pending_peers::{PendingLimits, PendingPeer, PendingPeers};
use super::tls::{peer_of, server_config};
use crate::NodeId;
use crate::background::give_way;
use crate::code::{CloseCode, SessionClosed};
use crate::config::{CONTROL_MESSAGE_BYTES, Config, PathRule};
use crate::identity::Identity;
use crate::session::rate::KeyedBuckets;
use crate::session::{Session, max_message_bytes};
use crate::time::Time;
use crate::wire::control::Hello;

/// Time for a refused peer to read the TLS alert.
const LINGER: Duration = Duration::from_millis(500);
/// Connections of one party over all paths: burst, and rate per second. A chat makes two
/// connections to each of its hosts. A TLS handshake costs about half a millisecond, so 16 a second
/// take 1% of a core.
const CONNECTION_BURST: u64 = 256;
const CONNECTIONS_PER_SECOND: u64 = 16;
/// Parties whose connections are counted.
const MAX_PARTIES: usize = 1024;

/// New connection of a listener.
#[derive(Debug)]
#[non_exhaustive]
pub enum Arrival {
    /// An open tensor session.
    Session(Connection),
    /// An open socket on one of the other paths.
    Peer(PeerSocket),
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
    pub(super) async fn arrive_as(
        &self,
        io: BoxIo,
        pending_peer: Option<&PendingPeer>,
    ) -> Result<Arrival, RefusedConnection> {
        let result = self.shake_hands(io, pending_peer).await;
        result.inspect_err(|error| self.count_refusal(error))
    }

    pub(super) fn count_refusal(&self, why: &RefusedConnection) {
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
            Err(_) => {
                metrics::tls_failed(Side::Host, "timeout");
                return Err(RefusedConnection::Timeout(Phase::Tls));
            }
            Ok(Err((error, io))) => {
                linger(io).await;
                let (cause, reason) = (tls_cause(&error), error.to_string());
                metrics::tls_failed(Side::Host, cause);
                return Err(RefusedConnection::Tls { cause, reason });
            }
            Ok(Ok(stream)) => stream,
        };
        give_way();
        let peer = peer_of(stream.get_ref().1)
            .ok_or_else(|| broken("no_certificate", "the peer has no certificate"))?;
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
        #[expect(
            clippy::result_large_err,
            reason = "the type that tungstenite asks for"
        )]
        let route = |request: &Request, response: Response| {
            choice = self.choose(peer, belongs, is_within_rate, request.uri().path());
            choice.refusal().map_or(Ok(response), Err)
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
            Ok(Err(error)) => {
                let reason = error.to_string();
                return Err(RefusedConnection::Upgrade { reason });
            }
            Ok(Ok(socket)) => socket,
        };
        let Choice::Socket(path, place) = choice else {
            let opened = self.open_session(socket, peer, begin).await?;
            return Ok(Arrival::Session(opened));
        };
        let rule = path.rule.clone();
        let limiter = &mut socket.get_mut().limiter;
        limiter.limit = rule.max_message_bytes;
        limiter.text = rule.text;
        // Some byte streams have no address.
        let no_address = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        let address = pending_peer.map_or(no_address, |pending_peer| pending_peer.address);
        let (stranger, evicted) = (!belongs).then(|| path.strangers.enter(address)).unzip();
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
        let socket = {
            let (_there, config) = (self.runtime.enter(), &self.config);
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

    /// Finds the requested path, and checks whether this peer may use it. `is_within_rate`: the
    /// budget of its party was not exhausted.
    fn choose(&self, peer: NodeId, belongs: bool, is_within_rate: bool, asked: &str) -> Choice<'_> {
        let admit = |path| match is_within_rate {
            true => self.admission.admit_path(&peer, path),
            false => Err(CloseCode::SessionLimit),
        };
        if asked == PATH {
            return match admit(PATH) {
                Ok(()) => Choice::Session,
                Err(code) => Choice::Refused(PATH, code),
            };
        }
        let Some(path) = self.paths.iter().find(|path| path.rule.path == asked) else {
            return Choice::NotFound;
        };
        if let Err(code) = admit(path.rule.path) {
            return Choice::Refused(path.rule.path, code);
        }
        // Strangers have no permits: closed sockets take a while to be gone, and must not block
        // members.
        let enter = || {
            let party = path.parties.enter(self.admission.counts_with(&peer))?;
            Ok::<_, Full>([path.sockets.enter(peer)?, party])
        };
        match belongs.then(enter).transpose() {
            Ok(places) => Choice::Socket(path, places),
            Err(_) => Choice::Refused(path.rule.path, CloseCode::SessionLimit),
        }
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
            let (config, side, ended) = (&self.config, Side::Host, Box::new(ended));
            Pending::start(session, socket, peer, begin, config, side, ended)
        };
        let admit = |hello: &Hello| match has_room {
            true => self.admission.admit_hello(&peer, hello, unix_now()),
            false => Err(CloseCode::SessionLimit),
        };
        let opened = pending.opened(Hello::new("", Vec::new()), admit).await;
        opened.map_err(RefusedConnection::Closed)
    }
}

/// The connection has failed before it carried HTTP.
pub(super) fn broken(cause: &'static str, reason: impl ToString) -> RefusedConnection {
    let reason = reason.to_string();
    RefusedConnection::Tls { cause, reason }
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

impl Choice<'_> {
    /// Answer to a refused request.
    fn refusal(&self) -> Option<ErrorResponse> {
        let (status, code) = match *self {
            Choice::Session | Choice::Socket(..) => return None,
            Choice::NotFound => (StatusCode::NOT_FOUND, None),
            Choice::Refused(_, code @ CloseCode::SessionLimit) => {
                (StatusCode::SERVICE_UNAVAILABLE, Some(code))
            }
            Choice::Refused(_, code) => (StatusCode::FORBIDDEN, Some(code)),
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
        Some(refusal)
    }
}
