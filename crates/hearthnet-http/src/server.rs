//! HTTP server: connection limits, deadlines and shutdown.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::time::Duration;

use axum::routing::MethodRouter;
use axum::{Extension, Router};
use hearthnet_platform::peer::user_of;
use hearthnet_transport::{accept, subscriber};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio_io_timeout::TimeoutWriter;
use tokio_util::sync::CancellationToken;

use crate::auth::{Access, ApiKey, Client, guarded};
use crate::connections::{Connections, track_requests};
use crate::pages::{self, Page};
use crate::unread::{Lingering, Unread, read_or_close};

/// Upper bound of a request's head, and of bytes read ahead, in bytes: more than clients send.
const HEAD_BYTES: usize = 64 << 10;

/// Settings of the HTTP server.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // Built with `..HttpSettings::default()`.
pub struct HttpSettings {
    /// Listen address, `ADDRESS:PORT`; port 0 picks a free one.
    pub listen: String,
    /// Key that clients must send; without one, only this machine is served.
    pub api_key: Option<ApiKey>,
    /// Host names that clients may ask for without a key, besides those of this machine.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may use the paths under `/v1/` (CORS).
    pub cors_origins: Vec<String>,
    /// Ids of models by other names; `default` stands for every other name.
    pub aliases: BTreeMap<String, String>,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
    /// Whether the API refuses the fields that it would ignore.
    pub strict: bool,
    /// Time limit for a request's head, for its body, for an idle connection, and for a client that
    /// does not read its response.
    pub client_deadline: Duration,
    /// Upper bound of concurrent requests; further ones are refused. As many connections may be
    /// idle; one more evicts the longest idle one.
    pub max_connections: usize,
    /// Files that browsers get without the key.
    pub pages: &'static [Page],
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7602".into(),
            api_key: None,
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            aliases: BTreeMap::new(),
            max_body_bytes: 1 << 20,
            strict: false,
            client_deadline: Duration::from_secs(30),
            max_connections: 256,
            pages: &[],
        }
    }
}

/// Why the listener could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The address is not valid or cannot be bound.
    #[error("cannot listen on {listen}: {source}")]
    Listen {
        /// Configured address.
        listen: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Other machines can reach the address, so a key is required.
    #[error("{0} can be reached by other machines, so a key is needed")]
    KeyNeeded(IpAddr),
}

/// An open HTTP listener. Dropping it closes it at once.
pub struct HttpServer {
    addr: SocketAddr,
    stop: CancellationToken,
    accepting: JoinHandle<()>,
}

impl HttpServer {
    /// Serves the paths of `inner` to authorised clients, and `/healthz` and the pages to all. Must be called
    /// within a Tokio runtime.
    ///
    /// # Errors
    /// [`HttpError`].
    pub async fn open(
        inner: Router,
        health: MethodRouter,
        settings: &HttpSettings,
    ) -> Result<Self, HttpError> {
        let pages = pages::routes(settings.pages, settings.api_key.is_none());
        let access = Access {
            key: settings.api_key.clone(),
            hosts: settings.allowed_hosts.as_slice().into(),
            origins: settings.cors_origins.as_slice().into(),
        };
        let router = guarded(inner, access, health, pages);
        let failed = |source| HttpError::Listen {
            listen: settings.listen.clone(),
            source,
        };
        // Resolved once, so that the checked addresses are the bound ones.
        let addrs: Vec<SocketAddr> = tokio::net::lookup_host(&settings.listen)
            .await
            .map_err(failed)?
            .collect();
        if let Some(open) = addrs.iter().find(|addr| !addr.ip().is_loopback())
            && settings.api_key.is_none()
        {
            return Err(HttpError::KeyNeeded(open.ip()));
        }
        let listener = TcpListener::bind(addrs.as_slice()).await.map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        let stop = CancellationToken::new();
        let accepting = accept_until(stop.clone(), listener, router, settings.clone());
        Ok(Self {
            addr,
            stop,
            accepting: tokio::spawn(accepting),
        })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Stops accepting, lets requests in progress finish, and returns when the last has ended or at
    /// the deadline. The caller should end its requests first and keep the listener open until
    /// then, so that new clients are told that the service is stopping.
    pub async fn shutdown(mut self, deadline: Duration) {
        self.stop.cancel();
        let _ = tokio::time::timeout(deadline, &mut self.accepting).await;
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        // The connections are tasks of the accept task and end with it.
        self.accepting.abort();
    }
}

/// Serves the connections of a listener, and after `stop` those that are open.
async fn accept_until(
    stop: CancellationToken,
    listener: TcpListener,
    router: Router,
    settings: HttpSettings,
) {
    let slots = Connections::new(settings.max_connections);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            (stream, peer) = accept(|cx| listener.poll_accept(cx)) => {
                // Send small tokens at once. A failure only costs speed.
                let _ = stream.set_nodelay(true);
                let ends = stream.local_addr().ok().map(|own| (peer, own));
                // The look-up reads all sockets of the system; with a key, few requests need it.
                let known = ends.filter(|_| settings.api_key.is_none());
                let user = known.and_then(|(peer, own)| user_of(peer, own));
                // All loopback addresses count as one, since local programs can use any of
                // them.
                let ip = match peer.ip().is_loopback() {
                    true => Ipv4Addr::LOCALHOST.into(),
                    false => peer.ip().to_canonical(),
                };
                let who = (subscriber(ip), user.map(|user| user.id));
                let Some(connection) = slots.admit(who) else {
                    // All connections are active: close this one.
                    continue;
                };
                let client = Client {
                    ends,
                    ..Client::new(ip, user, connection.id)
                };
                let unread = Unread::default();
                let router = track_requests(router.clone(), &connection)
                    .layer(Extension(client));
                let router = read_or_close(router, &unread);
                let stream = Lingering::new(stream, unread);
                let served = serve(stream, router, settings.client_deadline, stop.clone());
                connections.spawn(async move {
                    tokio::select! {
                        () = served => {}
                        () = connection.closed() => {}
                    }
                });
            }
        }
        metrics::gauge!("hearthnet_http_connections").set(connections.len() as f64);
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
    metrics::gauge!("hearthnet_http_connections").set(0.0);
}

async fn serve(
    stream: Lingering<TcpStream>,
    router: Router,
    deadline: Duration,
    stop: CancellationToken,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(deadline)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(
            TokioIo::new(with_write_timeout(stream, deadline)),
            TowerToHyperService::new(router),
        );
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// A stream that fails if its peer reads nothing for `deadline`.
fn with_write_timeout<S: AsyncRead + AsyncWrite>(
    stream: S,
    deadline: Duration,
) -> Pin<Box<TimeoutWriter<S>>> {
    let mut stream = TimeoutWriter::new(stream);
    stream.set_timeout(Some(deadline));
    Box::pin(stream)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn only_a_peer_that_reads_nothing_ends_the_connection() {
        let (near, mut far) = duplex(16);
        let mut near = with_write_timeout(near, Duration::from_millis(20));
        // The slow peer reads a little at a time; each read restarts the deadline.
        let slow = tokio::spawn(async move {
            let mut some = [0; 8];
            for _ in 0..4 {
                far.read_exact(&mut some).await.unwrap();
            }
            far
        });
        near.write_all(&[7; 32]).await.unwrap();
        let _far = slow.await.unwrap();
        let error = near.write_all(&[7; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
