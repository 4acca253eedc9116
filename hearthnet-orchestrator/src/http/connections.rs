//! Which connections there may be: a budget for those that nothing is asked on.
//!
//! A connection is *attended* while a request on it is being answered, and *idle* otherwise: before
//! the first request, between two, and while the head of one arrives. When there are as many as may
//! be, the one that has been idle for longest goes. So connections that ask nothing keep nobody out.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::Response;
use axum::middleware::{self, Next};
use axum::{Error, Router};
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// All connections of a door.
pub(super) struct Connections {
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Idle ones by when they became so, the first first.
    idle: BTreeMap<u64, Arc<Notify>>,
    all: usize,
}

/// One connection. Dropping it gives its place back.
pub(super) struct Connection(Arc<Inner>);

struct Inner {
    connections: Arc<Connections>,
    closed: Arc<Notify>,
    standing: Mutex<Standing>,
}

#[derive(Default)]
struct Standing {
    /// Requests that are being answered.
    requests: usize,
    /// Since when it has been idle, if it is.
    idle: Option<u64>,
    gone: bool,
}

impl Connections {
    /// For as many requests at once, each on a connection of its own, and as many connections that
    /// are idle.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(1).saturating_mul(2),
            state: Mutex::default(),
        })
    }

    /// A place for a connection; the one that has been idle for longest makes room where there is
    /// none. `None` if none is idle.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Connection> {
        let mut state = self.state.lock();
        if state.all >= self.most {
            // Its place is counted until it has ended, which is soon.
            let (_, longest) = state.idle.pop_first()?;
            longest.notify_one();
        }
        state.all += 1;
        let inner = Inner {
            connections: Arc::clone(self),
            closed: Arc::default(),
            standing: Mutex::default(),
        };
        inner.standing.lock().idle = Some(state.rest(&inner.closed));
        Some(Connection(Arc::new(inner)))
    }
}

impl State {
    fn rest(&mut self, closed: &Arc<Notify>) -> u64 {
        let at = self.next;
        self.next += 1;
        self.idle.insert(at, Arc::clone(closed));
        at
    }
}

impl Connection {
    /// Resolves when it has to go.
    pub(super) async fn closed(&self) {
        self.0.closed.notified().await;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut standing = self.0.standing.lock();
        standing.gone = true;
        let mut state = self.0.connections.state.lock();
        state.all = state.all.saturating_sub(1);
        if let Some(at) = standing.idle.take() {
            state.idle.remove(&at);
        }
    }
}

/// A request that is being answered.
struct Attended(Arc<Inner>);

impl Attended {
    fn new(inner: &Arc<Inner>) -> Self {
        let mut standing = inner.standing.lock();
        standing.requests += 1;
        if let Some(at) = standing.idle.take() {
            inner.connections.state.lock().idle.remove(&at);
        }
        Self(Arc::clone(inner))
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        let mut standing = self.0.standing.lock();
        standing.requests = standing.requests.saturating_sub(1);
        if standing.requests == 0 && !standing.gone {
            let at = self.0.connections.state.lock().rest(&self.0.closed);
            standing.idle = Some(at);
        }
    }
}

/// Takes note of the requests of a connection.
pub(super) fn attended(router: Router, connection: &Connection) -> Router {
    let inner = Arc::clone(&connection.0);
    router.layer(middleware::from_fn(move |request: Request, next: Next| {
        let attended = Attended::new(&inner);
        async move { held(next.run(request).await, attended) }
    }))
}

/// A response that holds something until it has been sent, or given up.
pub(super) fn held<T: Send + Unpin + 'static>(response: Response<Body>, it: T) -> Response<Body> {
    response.map(|body| Body::new(Holding { body, _it: it }))
}

struct Holding<T> {
    body: Body,
    _it: T,
}

impl<T: Unpin> HttpBody for Holding<T> {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn the_connection_that_has_been_idle_for_longest_makes_room_and_an_attended_one_never() {
        let connections = Connections::new(1);
        let a = connections.admit().unwrap();
        let b = connections.admit().unwrap();
        let asked = Attended::new(&a.0);
        let c = connections.admit().unwrap();
        assert!(b.closed().now_or_never().is_some());
        assert!(a.closed().now_or_never().is_none());
        drop(b);
        // Now A has been idle for less long than C.
        drop(asked);
        let d = connections.admit().unwrap();
        assert!(c.closed().now_or_never().is_some());
        drop(c);
        let (_a, _d) = (Attended::new(&a.0), Attended::new(&d.0));
        assert!(connections.admit().is_none());
        drop(a);
        assert!(connections.admit().is_some());
    }

    #[test]
    fn what_has_ended_is_not_idle() {
        let connections = Connections::new(1);
        let a = connections.admit().unwrap();
        let asked = Attended::new(&a.0);
        drop(a);
        drop(asked);
        let state = connections.state.lock();
        assert_eq!((state.all, state.idle.len()), (0, 0));
    }
}
