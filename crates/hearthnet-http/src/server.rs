//! HTTP server: connection limits, deadlines and shutdown.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::http::StatusCode;
use axum::routing::MethodRouter;
use axum::{Extension, Router};
use hearthnet_platform::local_socket::{LocalListener, LocalStream, SocketFile, SocketMode};
use hearthnet_platform::peer::{User, user_of};
use hearthnet_transport::{accept, subscriber};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutWriter;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::auth::{Access, Client, guarded};
use crate::connections::{Connections, track_requests};
use crate::error::ApiError;
use crate::keys::{ApiKey, NamedKeys};
use crate::pages::{self, Page};
use crate::tls::Tls;
use crate::unread::{Lingering, Unread, read_or_close};

/// Upper bound of a request's head, and of bytes read ahead, in bytes: more than clients send.
const HEAD_BYTES: usize = 64 << 10;

/// Settings of the HTTP server.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // Built with `..HttpSettings::default()`.
pub struct HttpSettings {
    /// Listen address, `ADDRESS:PORT`; port 0 picks a free one.
    pub listen: String,
    /// Unix socket beside it, for programs of this machine.
    pub socket: Option<SocketSettings>,
    /// Certificate of the listener; without one, it speaks HTTP.
    pub tls: Option<Tls>,
    /// Key that clients must send; without one, only this machine is served.
    pub api_key: Option<ApiKey>,
    /// Further keys with limits of their own, in force if there is `api_key`.
    pub named_keys: Option<NamedKeys>,
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

/// A Unix socket.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // A part of `HttpSettings`.
pub struct SocketSettings {
    pub path: PathBuf,
    /// Users that may connect.
    pub mode: SocketMode,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7602".into(),
            socket: None,
            tls: None,
            api_key: None,
            named_keys: None,
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
    /// The Unix socket cannot be made.
    #[error("cannot listen at the socket {}: {source}", path.display())]
    Socket {
        path: PathBuf,
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
    has_tls: bool,
    named_keys: Option<NamedKeys>,
    stop: CancellationToken,
    /// A task for each door. The connections are tasks of these, and end with them.
    accepting: JoinSet<()>,
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
        let hosts = match (&settings.api_key, &settings.tls) {
            (None, _) => pages::Hosts::ThisMachine,
            (Some(_), None) => pages::Hosts::Addresses,
            // A browser accepts the certificate only under its own names.
            (Some(_), Some(_)) => pages::Hosts::Any,
        };
        let pages = pages::routes(settings.pages, hosts);
        let access = Access {
            key: settings.api_key.clone(),
            named: settings.named_keys.clone(),
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
        let mut doors = vec![Door::Port(listener, settings.tls.clone())];
        if let Some(SocketSettings { path, mode }) = &settings.socket {
            let made = LocalListener::publish(path, *mode);
            let (listener, file) = made.map_err(|source| HttpError::Socket {
                path: path.clone(),
                source,
            })?;
            doors.push(Door::Socket {
                listener,
                _file: file,
            });
        }
        let (stop, mut accepting) = (CancellationToken::new(), JoinSet::new());
        let slots = Connections::new(settings.max_connections);
        for door in doors {
            let (slots, router) = (Arc::clone(&slots), router.clone());
            accepting.spawn(accept_until(
                stop.clone(),
                door,
                slots,
                router,
                settings.clone(),
            ));
        }
        Ok(Self {
            addr,
            has_tls: settings.tls.is_some(),
            named_keys: settings.named_keys.clone(),
            stop,
            accepting,
        })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// URL of the listener, without a slash at its end.
    pub fn url(&self) -> String {
        let scheme = if self.has_tls { "https" } else { "http" };
        format!("{scheme}://{}", self.addr)
    }

    /// Use of the named keys.
    pub fn named_keys(&self) -> Option<&NamedKeys> {
        self.named_keys.as_ref()
    }

    /// Stops accepting, lets requests in progress finish, and returns when the last has ended or at
    /// the deadline. The caller should end its requests first and keep the listener open until
    /// then, so that new clients are told that the service is stopping.
    pub async fn shutdown(mut self, deadline: Duration) {
        self.stop.cancel();
        let closed = async { while self.accepting.join_next().await.is_some() {} };
        let _ = timeout(deadline, closed).await;
    }
}

/// A listener, and what belongs to it.
enum Door {
    Port(TcpListener, Option<Tls>),
    Socket {
        listener: LocalListener,
        _file: SocketFile,
    },
}

/// An accepted connection.
struct Arrival {
    stream: Stream,
    /// Address of the client: one for all of this machine.
    ip: IpAddr,
    /// User of the client, as far as the system names it.
    user: Option<User>,
    /// Addresses of both ends of a port's connection.
    ends: Option<(SocketAddr, SocketAddr)>,
}

enum Stream {
    Port(TcpStream, Option<Tls>),
    Socket(LocalStream),
}

impl Door {
    /// Next connection. With a key (`has_key`), the user of a port's client is not looked up.
    async fn next(&self, has_key: bool) -> Arrival {
        let here = Ipv4Addr::LOCALHOST.into();
        match self {
            Self::Port(listener, tls) => {
                let (stream, peer) = accept(|cx| listener.poll_accept(cx)).await;
                // Send small tokens at once. A failure only costs speed.
                let _ = stream.set_nodelay(true);
                let ends = stream.local_addr().ok().map(|own| (peer, own));
                // The look-up reads all sockets of the system; with a key, few requests need it.
                let known = ends.filter(|_| !has_key);
                let user = known.and_then(|(peer, own)| user_of(peer, own));
                // All loopback addresses count as one, since local programs can use any of
                // them.
                let ip = match peer.ip().is_loopback() {
                    true => here,
                    false => peer.ip().to_canonical(),
                };
                Arrival {
                    stream: Stream::Port(stream, tls.clone()),
                    ip,
                    user,
                    ends,
                }
            }
            Self::Socket { listener, .. } => {
                let stream = accept(|cx| listener.poll_accept(cx)).await;
                Arrival {
                    ip: here,
                    user: listener.user(&stream),
                    ends: None,
                    stream: Stream::Socket(stream),
                }
            }
        }
    }
}

/// Serves the connections of a door, and after `stop` those that are open.
async fn accept_until(
    stop: CancellationToken,
    door: Door,
    slots: Arc<Connections>,
    router: Router,
    settings: HttpSettings,
) {
    let has_key = settings.api_key.is_some();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            Arrival { stream, ip, user, ends } = door.next(has_key) => {
                let who = (subscriber(ip), user.map(|user| user.id));
                let Some(connection) = slots.admit(who) else {
                    // All connections are active: close this one.
                    continue;
                };
                let client = Client {
                    by_socket: matches!(stream, Stream::Socket(_)),
                    ends,
                    ..Client::new(ip, user, connection.id)
                };
                let unread = Unread::default();
                let router = track_requests(router.clone(), &connection)
                    .layer(Extension(client));
                let router = read_or_close(router, &unread);
                let served = open(stream, unread, router, settings.client_deadline, stop.clone());
                connections.spawn(async move {
                    tokio::select! {
                        () = served => {}
                        () = connection.closed() => {}
                    }
                });
            }
        }
        metrics::gauge!("hearthnet_http_connections").set(slots.count() as f64);
    }
    drop(door);
    while connections.join_next().await.is_some() {}
    metrics::gauge!("hearthnet_http_connections").set(slots.count() as f64);
}

/// Serves a connection, after its TLS handshake if it has one.
async fn open(
    stream: Stream,
    unread: Unread,
    router: Router,
    deadline: Duration,
    stop: CancellationToken,
) {
    match stream {
        Stream::Socket(stream) => serve(stream, unread, router, deadline, stop).await,
        Stream::Port(stream, None) => serve(stream, unread, router, deadline, stop).await,
        Stream::Port(stream, Some(tls)) => match timeout(deadline, handshake(stream, &tls)).await {
            Ok(Ok(stream)) => serve(stream, unread, router, deadline, stop).await,
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        },
    }
}

/// First byte of a TLS connection: the type of a handshake record.
const HANDSHAKE: u8 = 22;

/// Makes a TLS connection. A client that begins with anything else is told what is wrong.
async fn handshake(mut stream: TcpStream, tls: &Tls) -> io::Result<TlsStream<TcpStream>> {
    let mut first = [HANDSHAKE];
    stream.peek(&mut first).await?;
    if first == [HANDSHAKE] {
        return tls.acceptor().accept(stream).await;
    }
    let text = "this server speaks HTTPS: write https:// in its address";
    let body = ApiError::new(StatusCode::BAD_REQUEST, "https_needed", text).body();
    let body = body.to_string();
    let head = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json";
    let answer = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    stream.write_all(answer.as_bytes()).await?;
    // A socket that is closed before its input was read resets the connection.
    let unread = Arc::new(AtomicBool::new(true));
    Lingering::new(stream, unread).shutdown().await?;
    Err(io::Error::other("the client speaks no TLS"))
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    unread: Unread,
    router: Router,
    deadline: Duration,
    stop: CancellationToken,
) {
    let stream = Lingering::new(stream, unread);
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
    use axum::routing::get;
    use rustls::crypto::ring;
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, ServerName};
    use rustls::{ClientConfig, RootCertStore};
    use tokio::io::{AsyncReadExt as _, duplex};
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::tls::tests::pair;

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
    async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, host: &str) -> String {
        let request = format!("GET /v1/x HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn a_server_answers_over_tls_and_at_its_socket_and_advises_a_client_without_tls() {
        let dir = tempfile::tempdir().unwrap();
        let (certificate, key) = pair(dir.path(), "a");
        let path = dir.path().join("socket");
        let settings = HttpSettings {
            listen: "127.0.0.1:0".into(),
            tls: Some(Tls::open(&certificate, &key).unwrap()),
            socket: Some(SocketSettings {
                path: path.clone(),
                mode: SocketMode::default(),
            }),
            api_key: ApiKey::new("a-key-of-16-bytes"),
            ..HttpSettings::default()
        };
        let hello = Router::new().route("/v1/x", get(async || "hello"));
        let health = get(async || "");
        let server = HttpServer::open(hello.clone(), health.clone(), &settings);
        let server = server.await.unwrap();
        assert!(server.url().starts_with("https://127.0.0.1:"));

        let mut roots = RootCertStore::empty();
        let pem = std::fs::read(&certificate).unwrap();
        roots
            .add(CertificateDer::from_pem_slice(&pem).unwrap())
            .unwrap();
        let provider = Arc::new(ring::default_provider());
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(client));
        let name = ServerName::try_from("hearth.example").unwrap();
        let connect = || TcpStream::connect(server.local_addr());
        let stream = connector
            .connect(name, connect().await.unwrap())
            .await
            .unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), None);
        let answer = exchange(stream, "hearth.example").await;
        assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");

        let answer = exchange(connect().await.unwrap(), "127.0.0.1").await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
        assert!(answer.contains("https_needed"), "{answer}");

        // The system says that the owner asks, so no key is needed, whatever host it names.
        let local = LocalStream::connect(&path).await.unwrap();
        let answer = exchange(local, "anything").await;
        assert!(
            answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("hello"),
            "{answer}"
        );

        let again = HttpServer::open(hello, health, &settings).await;
        let error = again.err().unwrap();
        assert!(matches!(error, HttpError::Socket { .. }), "{error}");
        server.shutdown(Duration::from_secs(5)).await;
        assert!(!path.exists());
    }
}
