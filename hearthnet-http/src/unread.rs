//! Requests that are answered before their bodies have been read, as refusals are.
//!
//! The rest of a body would be in front of the client's next request. A short rest is read and dropped,
//! so that the connection goes on. With a long one the response says `Connection: close`, and the
//! connection is closed in steps (RFC 9112, section 9.6): a socket that is closed while bytes come in
//! is reset, and the client that still sends would lose the response.

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

/// Most bytes of a body's rest that are read for the connection's sake: a new connection costs about as
/// much.
const SHORT_BYTES: u64 = 64 << 10;

/// How long that may take: the client sends it without waiting for anything.
const SHORT_TIME: Duration = Duration::from_secs(1);

/// How much of a long rest is dropped, and for how long, before the socket is closed.
const LINGER_BYTES: usize = 16 << 20;
const LINGER_TIME: Duration = Duration::from_secs(2);

/// Whether a connection ends with a body that was not read.
pub(super) type Unread = Arc<AtomicBool>;

/// Takes care of bodies that `router` leaves unread on one connection.
pub(super) fn read_or_close(router: Router, unread: &Unread) -> Router {
    let unread = Arc::clone(unread);
    router.layer(middleware::from_fn(move |request: Request, next: Next| {
        let unread = Arc::clone(&unread);
        async move {
            if request.body().is_end_stream() {
                return next.run(request).await;
            }
            // Reading it would ask for a body that the client holds back.
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

/// A body of which the rest can be read when its reader has dropped it.
#[derive(Clone)]
struct Shared(Arc<Mutex<Inner>>);

struct Inner {
    body: Body,
    /// It has ended, so that nothing of it is in front of the next request.
    ended: bool,
}

impl Shared {
    fn has_ended(&self) -> bool {
        let inner = self.0.lock();
        inner.ended || inner.body.is_end_stream()
    }

    /// Drops the rest, if it is short and comes soon. Whether the body has ended.
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

/// A stream that is closed in steps where a body was left unread: the response is ended, what still
/// comes is dropped until the client closes, and then the socket is closed.
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
