//! Handling of requests that are answered before their bodies are read, as refusals are.
//!
//! The unread rest would precede the client's next request. A short rest is read and dropped, so
//! that the connection can continue. With a long one the response says `Connection: close`, and the
//! connection is closed in steps (RFC 9112, section 9.6): closing a socket while bytes arrive
//! resets it, and a client that is still sending would lose the response.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::middleware::{self, Next};
use axum::{Error, Router};
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep, timeout};

/// Longest rest that is read to keep the connection, in bytes: a new connection costs about as
/// much.
const SHORT_BYTES: u64 = 64 << 10;

/// Time limit for reading a short rest: the client sends it without waiting.
const SHORT_TIME: Duration = Duration::from_secs(1);

/// Bounds of a long rest that is dropped before the socket is closed.
const LINGER_BYTES: usize = 16 << 20;
const LINGER_TIME: Duration = Duration::from_secs(2);

/// True if the connection must end because of an unread body.
pub(super) type Unread = Arc<AtomicBool>;

/// Handles the bodies that `router` leaves unread on one connection.
pub(super) fn read_or_close(router: Router, unread: &Unread) -> Router {
    let unread = Arc::clone(unread);
    router.layer(middleware::from_fn(move |request: Request, next: Next| {
        let unread = Arc::clone(&unread);
        async move {
            if request.body().is_end_stream() {
                return next.run(request).await;
            }
            // Reading would ask for a body that the client holds back.
            let waits = request.headers().contains_key(header::EXPECT);
            let (head, body) = request.into_parts();
            let shared = Shared(Arc::new(Mutex::new(Inner { body, ended: false })));
            let request = Request::from_parts(head, Body::new(shared.clone()));
            let mut response = next.run(request).await;
            if !shared.has_ended() && (waits || !shared.read_short_rest().await) {
                unread.store(true, Ordering::Relaxed);
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
            }
            response
        }
    }))
}

/// A body whose rest can be read after its reader was dropped.
#[derive(Clone)]
struct Shared(Arc<Mutex<Inner>>);

struct Inner {
    body: Body,
    /// The body was read to its end.
    ended: bool,
}

impl Shared {
    fn has_ended(&self) -> bool {
        let inner = self.0.lock();
        inner.ended || inner.body.is_end_stream()
    }

    /// Reads and drops a short rest. Returns true if the body has ended.
    async fn read_short_rest(&self) -> bool {
        let mut left = SHORT_BYTES;
        if self.size_hint().lower() > left {
            return false;
        }
        let mut rest = self.clone();
        let read = async {
            while let Some(frame) = poll_fn(|cx| Pin::new(&mut rest).poll_frame(cx)).await {
                let bytes = frame.ok()?.data_ref().map_or(0, Bytes::len);
                left = left.checked_sub(bytes as u64)?;
            }
            Some(())
        };
        matches!(timeout(SHORT_TIME, read).await, Ok(Some(())))
    }
}

impl HttpBody for Shared {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut inner = self.0.lock();
        let frame = ready!(Pin::new(&mut inner.body).poll_frame(cx));
        inner.ended |= frame.is_none();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().body.size_hint()
    }
}

/// A stream that closes in steps after an unread body: it ends the response, drops input until the
/// client closes, and then closes the socket.
pub(super) struct Lingering<S> {
    stream: S,
    unread: Unread,
    left: usize,
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> Lingering<S> {
    pub(super) fn new(stream: S, unread: Unread) -> Self {
        Self {
            stream,
            unread,
            left: LINGER_BYTES,
            until: None,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lingering<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Lingering<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.until.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            if !this.unread.load(Ordering::Relaxed) {
                return Poll::Ready(Ok(()));
            }
        }
        let until = this
            .until
            .get_or_insert_with(|| Box::pin(sleep(LINGER_TIME)));
        let mut dropped = [0; 16 << 10];
        while this.left > 0 && until.as_mut().poll(cx).is_pending() {
            let mut dropped = ReadBuf::new(&mut dropped);
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, &mut dropped));
            let bytes = dropped.filled().len();
            if read.is_err() || bytes == 0 {
                break;
            }
            this.left = this.left.saturating_sub(bytes);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
