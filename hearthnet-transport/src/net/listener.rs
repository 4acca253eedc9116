//! Listening side: an accept loop that survives errors, with limits on the number and duration of
//! handshakes.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::acceptor::{Acceptor, Arrival, broken};
use super::admission::{Admission, BindError, RefusedConnection};
use super::connection::Connection;
use super::pending_peers::{PendingLimits, PendingPeer, PendingPeers};
use crate::background::{background, give_way};
use crate::code::{CloseCode, SessionClosed};
use crate::config::{Config, PathRule};
use crate::identity::Identity;

/// Open sessions that wait to be accepted by the application.
const ACCEPT_QUEUE: usize = 16;
/// Pause of an accept loop when the system is out of sockets: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Interval of the warning about that, over all listeners of the process.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Time of the last warning.
static LAST_WARNING: Mutex<Option<Instant>> = Mutex::new(None);

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

/// Accepts the next connection with the `poll_accept` of a listener; retries after errors of the
/// system. Cancel safe.
pub async fn accept<T>(mut poll_accept: impl FnMut(&mut Context<'_>) -> Poll<io::Result<T>>) -> T {
    let mut pause = FIRST_PAUSE;
    loop {
        match poll_fn(&mut poll_accept).await {
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
        let (stream, address) = accept(|cx| tcp.poll_accept(cx)).await;
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
    no_delay.map_err(|error| broken("broken_off", error))?;
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
    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn without_descriptors_accepting_is_tried_less_and_less_and_said_once_a_minute() {
        let mut tried = 0;
        let exhausted = |_: &mut Context<'_>| {
            tried += 1;
            Poll::Ready(Err::<(), _>(io::Error::from(rustix::io::Errno::MFILE)))
        };
        let minutes = Duration::from_secs(600);
        timeout(minutes, accept(exhausted)).await.unwrap_err();
        assert!((600..620).contains(&tried), "{tried} attempts in 600 s");

        let (mut last, begin) = (None, Instant::now());
        let said = (0..600u64).filter(|&second| {
            let now = begin + Duration::from_secs(second);
            may_warn(&mut last, now)
        });
        assert_eq!(said.count(), 10);
    }
}
