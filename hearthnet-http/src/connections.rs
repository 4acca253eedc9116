//! Which connections there may be: a budget for those that nothing is asked on.
//!
//! A connection is *attended* while a request on it is being answered, and *idle* otherwise: before
//! the first request, between two, and while the head of one arrives. When there are as many as may
//! be, one that is idle goes: of whoever has most, the one that has been for longest. One client has
//! three quarters of them at most. So connections that ask nothing keep nobody out, and whoever opens
//! many of them closes its own.

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

/// All connections of a server.
pub(super) struct Connections {
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Counts what happens: the order in which connections became idle, and their names.
    clock: u64,
    all: BTreeMap<u64, Open>,
}

/// Who has a connection, as far as the system tells: an address, or the network of an IPv6 one, and which
/// user of this machine.
pub(super) type Who = (IpAddr, Option<u32>);

struct Open {
    who: Who,
    closed: Arc<Notify>,
    /// Requests that are being answered.
    requests: usize,
    /// Since when it has been idle, if it is, and has not been told to go.
    idle: Option<u64>,
}

/// One connection. Dropping it gives its place back.
pub(super) struct Connection {
    connections: Arc<Connections>,
    id: u64,
    closed: Arc<Notify>,
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

    /// A place for a connection; an idle one makes room where there is none, or this client has as
    /// many as it may. `None` if none is idle.
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
                // Who has as many as it may takes nobody else's.
                open.idle.is_some() && (!has_all || open.who == who)
            });
            let longest = idle.max_by_key(|open| (of(&open.who), Reverse(open.idle)))?;
            // Its place is counted until it has ended, which is soon.
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
    /// Its number, which no other one has.
    pub(super) fn number(&self) -> u64 {
        self.id
    }

    /// Resolves when it has to go.
    pub(super) async fn closed(&self) {
        self.closed.notified().await;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.state.lock().all.remove(&self.id);
    }
}

/// A request that is being answered on a connection, which may be gone before it is.
struct Attended {
    connections: Arc<Connections>,
    id: u64,
}

impl Attended {
    fn new(connections: &Arc<Connections>, id: u64) -> Self {
        if let Some(open) = connections.state.lock().all.get_mut(&id) {
            open.requests += 1;
            open.idle = None;
        }
        let connections = Arc::clone(connections);
        Self { connections, id }
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        let mut state = self.connections.state.lock();
        let now = state.tick();
        if let Some(open) = state.all.get_mut(&self.id) {
            open.requests = open.requests.saturating_sub(1);
            open.idle = (open.requests == 0).then_some(now);
        }
    }
}

/// Takes note of the requests of a connection.
pub(super) fn attended(router: Router, connection: &Connection) -> Router {
    let (connections, id) = (Arc::clone(&connection.connections), connection.id);
    router.layer(middleware::from_fn(move |request: Request, next: Next| {
        let attended = Attended::new(&connections, id);
        async move { held(next.run(request).await, attended) }
    }))
}

/// A response that holds something until it has been sent, or given up.
pub fn held<T: Send + Unpin + 'static>(response: Response<Body>, it: T) -> Response<Body> {
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

    /// A user of this machine.
    fn user(id: u32) -> Who {
        (IpAddr::from([127, 0, 0, 1]), Some(id))
    }

    fn ask(connection: &Connection) -> Attended {
        Attended::new(&connection.connections, connection.id)
    }

    #[test]
    fn the_connection_that_has_been_idle_for_longest_makes_room_and_an_attended_one_never() {
        let connections = Connections::new(1);
        let admit = || connections.admit(user(0));
        let a = admit().unwrap();
        let b = admit().unwrap();
        let asked = ask(&a);
        let c = admit().unwrap();
        assert!(b.closed().now_or_never().is_some());
        assert!(a.closed().now_or_never().is_none());
        drop(b);
        // Now A has been idle for less long than C.
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
    fn whoever_opens_many_closes_its_own_and_has_a_quarter_less_than_all() {
        let connections = Connections::new(4);
        let guest = connections.admit(user(1)).unwrap();
        let crowd: Vec<Connection> = (0..100)
            .map(|_| connections.admit(user(2)).unwrap())
            .collect();
        let is_open = |one: &Connection| one.closed().now_or_never().is_none();
        assert!(is_open(&guest));
        assert_eq!(crowd.iter().filter(|one| is_open(one)).count(), 6);
        // What it asks on all of them keeps nobody else out, nor lets it have more.
        let asked: Vec<Attended> = crowd.iter().map(ask).collect();
        assert!(connections.admit(user(2)).is_none());
        drop((crowd, asked));
        assert!(connections.admit(user(3)).is_some() && is_open(&guest));
    }

    #[test]
    fn whoever_has_an_ipv6_network_has_the_connections_of_one_address() {
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
    fn what_has_ended_is_not_idle() {
        let connections = Connections::new(1);
        let a = connections.admit(user(0)).unwrap();
        let asked = ask(&a);
        drop(a);
        drop(asked);
        assert!(connections.state.lock().all.is_empty());
    }
}
