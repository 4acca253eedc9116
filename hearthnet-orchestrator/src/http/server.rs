//! Connections: how many, how long, and how they end.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, Sleep};

use super::auth::Client;
use super::connections::{Connection, Connections, attended};
use super::metrics_endpoint::{self, Health};
use super::{HttpSettings, Metrics, router};
use crate::service::Service;

/// Most bytes of a request's head, and of what is read ahead: more than any client sends.
const HEAD_BYTES: usize = 64 << 10;

/// How long the door waits after the system refused a connection, for want of descriptors say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why the door cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The address is none, or cannot be listened on.
    #[error("cannot listen on {listen}: {source}")]
    Listen {
        /// What was asked for.
        listen: String,
        /// What the system says.
        source: io::Error,
    },
    /// Other machines could reach it, and nothing would tell who may.
    #[error("{0} can be reached by other machines, so a key is needed")]
    KeyNeeded(IpAddr),
}

/// A door that is open. Dropping it closes it at once.
pub struct HttpServer {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    accepting: Option<JoinHandle<()>>,
}

impl HttpServer {
    /// Opens the door to a service. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// [`HttpError`].
    pub async fn start(
        service: Service,
        metrics: Option<Metrics>,
        settings: &HttpSettings,
    ) -> Result<Self, HttpError> {
        Self::open(router(service, metrics, settings), settings).await
    }

    /// Opens a door behind which are the numbers of this process, and how it is. Must be called
    /// within a Tokio runtime.
    ///
    /// # Errors
    /// [`HttpError`].
    pub async fn numbers(
        metrics: Metrics,
        health: watch::Receiver<Health>,
        settings: &HttpSettings,
    ) -> Result<Self, HttpError> {
        Self::open(metrics_endpoint::alone(metrics, health, settings), settings).await
    }

    async fn open(router: Router, settings: &HttpSettings) -> Result<Self, HttpError> {
        let failed = |source| HttpError::Listen {
            listen: settings.listen.clone(),
            source,
        };
        // Looked up once: what is checked is what is listened on.
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
        let (stop, stopped) = watch::channel(false);
        let accept = Accept {
            router,
            deadline: settings.client_deadline,
            connections: Connections::new(settings.max_connections),
            stopped,
        };
        Ok(Self {
            addr,
            stop,
            accepting: Some(tokio::spawn(accept.run(listener))),
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Accepts no more connections, lets requests that are being answered end, and returns when
    /// the last has, or at the deadline. [`Service::drain`] is what makes them end; until it has,
    /// the door should stay open, so that whoever comes hears that the service stops.
    pub async fn shutdown(mut self, deadline: Duration) {
        self.stop.send_replace(true);
        if let Some(mut accepting) = self.accepting.take()
            && tokio::time::timeout(deadline, &mut accepting)
                .await
                .is_err()
        {
            accepting.abort();
        }
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        if let Some(accepting) = &self.accepting {
            // Its connections are tasks of its own, and end with it.
            accepting.abort();
        }
    }
}

struct Accept {
    router: Router,
    deadline: Duration,
    connections: Arc<Connections>,
    stopped: watch::Receiver<bool>,
}

impl Accept {
    async fn run(mut self, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                () = told(&mut self.stopped) => break,
                Some(_) = connections.join_next() => {}
                (stream, peer) = accept(&listener) => {
                    let Some(connection) = self.connections.admit() else {
                        // All others are being answered; this one hears so by its end.
                        continue;
                    };
                    let client = Client {
                        ip: peer.ip(),
                        connection: Arc::default(),
                    };
                    let router = attended(self.router.clone(), &connection)
                        .layer(Extension(client));
                    let served = serve(stream, router, self.deadline, self.stopped.clone());
                    connections.spawn(until_closed(connection, served));
                }
            }
            metrics::gauge!("hearthnet_http_connections").set(connections.len() as f64);
        }
        drop(listener);
        while connections.join_next().await.is_some() {}
        metrics::gauge!("hearthnet_http_connections").set(0.0);
    }
}

/// The next connection.
async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// A connection goes on until it ends, or is idle when another one needs its place.
async fn until_closed(connection: Connection, served: impl Future<Output = ()>) {
    tokio::select! {
        () = served => {}
        () = connection.closed() => {}
    }
}

/// Waits until the door is to close.
async fn told(stopped: &mut watch::Receiver<bool>) {
    // Without a sender nobody holds the door any more.
    let _ = stopped.wait_for(|stop| *stop).await;
}

async fn serve(
    stream: TcpStream,
    router: Router,
    deadline: Duration,
    mut stopped: watch::Receiver<bool>,
) {
    // Tokens are small, and wanted at once. A socket that cannot do it is slower, no more.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(deadline)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(
            TokioIo::new(Patient::new(stream, deadline)),
            TowerToHyperService::new(router),
        );
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = told(&mut stopped) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// A stream that fails when its peer takes nothing for too long.
struct Patient<S> {
    stream: S,
    deadline: Duration,
    /// Since when a write has been waiting.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    fn new(stream: S, deadline: Duration) -> Self {
        Self {
            stream,
            deadline,
            waiting: None,
        }
    }

    /// Looks at the clock when a write cannot go on.
    fn judge<T>(
        &mut self,
        cx: &mut Context<'_>,
        write: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.waiting = None;
            return write;
        }
        let deadline = self.deadline;
        let waiting = self
            .waiting
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + deadline)));
        ready!(waiting.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.judge(cx, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.judge(cx, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flush = Pin::new(&mut self.stream).poll_flush(cx);
        self.judge(cx, flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shutdown = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.judge(cx, shutdown)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn a_peer_that_takes_nothing_ends_the_connection_and_a_slow_one_does_not() {
        let (near, mut far) = duplex(16);
        let mut near = Patient::new(near, Duration::from_millis(20));
        // It takes a little now and then, and has as long again each time.
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
