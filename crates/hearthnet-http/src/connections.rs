//! Connection limits, with eviction of idle connections.
//!
//! A connection is *active* while a request on it is being answered, and *idle* otherwise: before
//! the first request, between two requests, and while the head of one arrives. At the limit, a new
//! connection evicts the longest idle one of the client with the most connections. One client has
//! at most three quarters of all. So idle connections do not lock others out, and a client that
//! opens many evicts its own.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
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

pub(super) struct Connections {
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Logical clock: orders the starts of idleness, and numbers the connections.
    clock: u64,
    all: BTreeMap<u64, Open>,
}

/// Quota key of a connection: the address (for IPv6, its network), and the local user if known.
pub(super) type Who = (IpAddr, Option<u32>);

struct Open {
    who: Who,
    closed: Arc<Notify>,
    /// Requests in progress.
    requests: usize,
    /// Start of idleness; `None` if active or evicted.
    idle: Option<u64>,
}

/// A connection. Dropping it frees its slot.
pub(super) struct Connection {
    connections: Arc<Connections>,
    /// Number of the connection, unique within the listener.
    pub(super) id: u64,
    closed: Arc<Notify>,
}

impl Connections {
    /// Limits for `most` concurrent requests, each on its own connection, and as many idle
    /// connections.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(1).saturating_mul(2),
            state: Mutex::default(),
        })
    }

    /// Number of open connections.
    pub(super) fn count(&self) -> usize {
        self.state.lock().all.len()
    }

    /// A slot for a connection. If all are in use, or this client has its maximum, an idle one is
    /// evicted. `None` if none is idle.
    pub(super) fn admit(self: &Arc<Self>, who: Who) -> Option<Connection> {
        let mut state = self.state.lock();
        let mut of_each = HashMap::<Who, usize>::new();
        for open in state.all.values() {
            *of_each.entry(open.who).or_default() += 1;
        }
        let of = |who: &Who| of_each.get(who).copied().unwrap_or(0);
        let has_all = of(&who) >= self.most - self.most / 4;
        if has_all || state.all.len() >= self.most {
            let idle = state.all.values_mut().filter(|open| {
                // At its maximum, a client only evicts its own.
                open.idle.is_some() && (!has_all || open.who == who)
            });
            let longest = idle.max_by_key(|open| (of(&open.who), Reverse(open.idle)))?;
            // The slot stays in use until the connection has ended, which is soon.
            longest.idle = None;
            longest.closed.notify_one();
        }
        let (id, closed) = (state.tick(), Arc::<Notify>::default());
        let open = Open {
            who,
            closed: Arc::clone(&closed),
            requests: 0,
            idle: Some(id),
        };
        state.all.insert(id, open);
        Some(Connection {
            connections: Arc::clone(self),
            id,
            closed,
        })
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

impl Connection {
    /// Resolves when the connection is evicted.
    pub(super) async fn closed(&self) {
        self.closed.notified().await;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.state.lock().all.remove(&self.id);
    }
}

/// Guard of a request in progress; the connection may end before it.
struct ActiveRequest {
    connections: Arc<Connections>,
    id: u64,
}

impl ActiveRequest {
    fn new(connections: &Arc<Connections>, id: u64) -> Self {
        if let Some(open) = connections.state.lock().all.get_mut(&id) {
            open.requests += 1;
            open.idle = None;
        }
        let connections = Arc::clone(connections);
        Self { connections, id }
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let mut state = self.connections.state.lock();
        let now = state.tick();
        if let Some(open) = state.all.get_mut(&self.id) {
            open.requests = open.requests.saturating_sub(1);
            open.idle = (open.requests == 0).then_some(now);
        }
    }
}

/// Counts the requests of a connection.
pub(super) fn track_requests(router: Router, connection: &Connection) -> Router {
    let (connections, id) = (Arc::clone(&connection.connections), connection.id);
    router.layer(middleware::from_fn(move |request: Request, next: Next| {
        let active = ActiveRequest::new(&connections, id);
        async move { hold_until_sent(next.run(request).await, active) }
    }))
}

/// A response that keeps `it` until it has been sent or dropped.
pub fn hold_until_sent<T: Send + Unpin + 'static>(
    response: Response<Body>,
    it: T,
) -> Response<Body> {
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
    use std::net::Ipv6Addr;

    use futures_util::FutureExt as _;
    use hearthnet_transport::subscriber;

    use super::*;

    fn user(id: u32) -> Who {
        (IpAddr::from([127, 0, 0, 1]), Some(id))
    }

    fn ask(connection: &Connection) -> ActiveRequest {
        ActiveRequest::new(&connection.connections, connection.id)
    }

    #[test]
    fn the_longest_idle_connection_is_evicted_and_an_active_one_never() {
        let connections = Connections::new(1);
        let admit = || connections.admit(user(0));
        let a = admit().unwrap();
        let b = admit().unwrap();
        let asked = ask(&a);
        let c = admit().unwrap();
        assert!(b.closed().now_or_never().is_some());
        assert!(a.closed().now_or_never().is_none());
        drop(b);
        // A has now been idle for less time than C.
        drop(asked);
        let d = admit().unwrap();
        assert!(c.closed().now_or_never().is_some());
        drop(c);
        let (_a, _d) = (ask(&a), ask(&d));
        assert!(admit().is_none());
        drop(a);
        assert!(admit().is_some());
    }

    #[test]
    fn a_client_evicts_its_own_and_has_at_most_three_quarters() {
        let connections = Connections::new(4);
        let guest = connections.admit(user(1)).unwrap();
        let crowd: Vec<Connection> = (0..100)
            .map(|_| connections.admit(user(2)).unwrap())
            .collect();
        let is_open = |one: &Connection| one.closed().now_or_never().is_none();
        assert!(is_open(&guest));
        assert_eq!(crowd.iter().filter(|one| is_open(one)).count(), 6);
        // Its requests on all of them neither lock others out nor raise its limit.
        let asked: Vec<ActiveRequest> = crowd.iter().map(ask).collect();
        assert!(connections.admit(user(2)).is_none());
        drop((crowd, asked));
        assert!(connections.admit(user(3)).is_some() && is_open(&guest));
    }

    #[test]
    fn an_ipv6_network_counts_as_one_client() {
        let connections = Connections::new(4);
        let guest = connections.admit(user(1)).unwrap();
        let crowd: Vec<Connection> = (1..100)
            .map(|host| {
                let ip = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host).into();
                connections.admit((subscriber(ip), None)).unwrap()
            })
            .collect();
        let is_open = |one: &Connection| one.closed().now_or_never().is_none();
        assert!(is_open(&guest));
        assert_eq!(crowd.iter().filter(|one| is_open(one)).count(), 6);
    }

    #[test]
    fn an_ended_connection_is_not_idle() {
        let connections = Connections::new(1);
        let a = connections.admit(user(0)).unwrap();
        let asked = ask(&a);
        drop(a);
        drop(asked);
        assert!(connections.state.lock().all.is_empty());
    }
}
