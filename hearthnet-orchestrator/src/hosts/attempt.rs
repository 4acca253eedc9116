//! Opening a session with a host of the community, wherever it is; and how often that is tried where it is
//! not.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hearthnet_bus::calls::{CallError, CallStream, Client, ShardGrant};
use hearthnet_bus::node::{Connections, WeakNode, bus_rule};
use hearthnet_bus::{Capability, NodeId, NodeKey};
use hearthnet_transport::{Config, ConnectError, Hello, Time, TokenBucket, connect_path};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::timeout;

use super::opening::SignOfLife;
use super::source::GRACE;
use crate::error::ChatError;
use crate::link::{HostAddr, HostLink, PIPELINE};

/// How long one address of a host may take: connecting, the grant, the session.
const PER_ADDRESS: Duration = Duration::from_secs(5);

/// Addresses of a host at which it may be looked for, at once, until it has proved to be at one of them.
const KNOCKS: u64 = 64;
/// And one more in so many seconds: no later than that a host is found that is being started again.
const KNOCK_S: u64 = 2;
/// Most hosts that are remembered; the one that was tried longest ago goes.
const MAX_REMEMBERED: usize = 512;

/// Where hosts may be looked for. Where a host is it says itself, so without this it could make others
/// knock, with each chat and each try for one, at whatever it names.
#[derive(Debug, Default)]
pub(super) struct Knocks {
    began: Option<Instant>,
    hosts: BTreeMap<NodeId, Door>,
}

#[derive(Debug)]
struct Door {
    /// Where the host has last proved to be.
    proved: Option<SocketAddr>,
    left: TokenBucket,
    last: Time,
}

impl Knocks {
    /// Whether a host may be looked for at an address, which then counts.
    fn may(&mut self, host: NodeId, address: SocketAddr, now: Instant) -> bool {
        let began = *self.began.get_or_insert(now);
        let now = Time::from(now.saturating_duration_since(began));
        let full = TokenBucket::with_burst(1, KNOCKS * KNOCK_S, now);
        let door = self.hosts.entry(host).or_insert(Door {
            proved: None,
            left: full,
            last: now,
        });
        door.last = now;
        door.left.refill(now);
        let may = door.proved == Some(address) || door.left.has(KNOCK_S);
        if may && door.proved != Some(address) {
            door.left.spend(KNOCK_S);
        }
        if self.hosts.len() > MAX_REMEMBERED {
            let oldest = self.hosts.iter().min_by_key(|(_, door)| door.last);
            if let Some(oldest) = oldest.map(|(host, _)| *host) {
                self.hosts.remove(&oldest);
            }
        }
        may
    }

    /// Where a host has last proved to be.
    pub(super) fn proved(&self, host: &NodeId) -> Option<SocketAddr> {
        self.hosts.get(host)?.proved
    }

    /// Notes whether a host has proved to be at an address.
    fn note(&mut self, host: &NodeId, address: SocketAddr, proved: bool) {
        if let Some(door) = self.hosts.get_mut(host) {
            match proved {
                true => door.proved = Some(address),
                false => drop(door.proved.take_if(|known| *known == address)),
            }
        }
    }
}

/// What it takes to open a session with a host.
pub(super) struct Attempt {
    pub(super) node: NodeId,
    /// What its grant is asked for.
    pub(super) wanted: Value,
    pub(super) key: Arc<NodeKey>,
    pub(super) transport: Config,
    /// Watches the connections.
    pub(super) connections: Connections,
    pub(super) knocks: Arc<Mutex<Knocks>>,
    /// Noted once the host answers.
    pub(super) heard: SignOfLife,
}

fn unavailable(why: impl Display) -> ChatError {
    ChatError::ShardUnavailable(why.to_string())
}

impl Attempt {
    /// A session with the layers that this very process serves: the same grant, and no wire.
    pub(super) async fn with_self(
        &self,
        here: &WeakNode,
        endpoint: String,
    ) -> Result<HostLink, ChatError> {
        let node = here.upgrade();
        let node = node.ok_or_else(|| unavailable("this node is stopping"))?;
        let capability = Capability::shard_serve();
        let call = node.call(self.node, &capability, &self.wanted).await;
        let token = granted(call).await?;
        let hello = Hello::new(PIPELINE, token.clone());
        let connection = node
            .open_here(&hello, &self.transport)
            .map_err(unavailable)?;
        let addr = HostAddr {
            endpoint,
            node: self.node,
        };
        let lifetime = self.transport.session_lifetime;
        let link = HostLink::over(&addr, &token, connection, lifetime).await?;
        self.connections
            .watch_host(self.node, Some(&token), link.closer());
        Ok(link)
    }

    /// Tries the addresses until one leads to the host and it grants a session: the next one when
    /// one has failed, or has said nothing for [`GRACE`], beside it. A host that was not there again and
    /// again is not looked for at once.
    pub(super) async fn with_any_of(
        &self,
        addresses: &[SocketAddr],
    ) -> Result<HostLink, ChatError> {
        let mut last = match addresses.is_empty() {
            true => unavailable("it says nowhere where it is"),
            false => unavailable("it was not where it says: it is looked for again in a moment"),
        };
        let (mut attempts, mut rest) = (FuturesUnordered::new(), addresses.iter());
        loop {
            if let Some(address) = rest.next() {
                if !self.may_knock(*address) {
                    continue;
                }
                attempts.push(async move {
                    let silent = format!("{address} did not answer in {} s", PER_ADDRESS.as_secs());
                    let attempt = timeout(PER_ADDRESS, self.at(*address)).await;
                    attempt.unwrap_or_else(|_| Err(unavailable(silent)))
                });
            } else if attempts.is_empty() {
                return Err(last);
            }
            let patience = if rest.len() > 0 { GRACE } else { PER_ADDRESS };
            match timeout(patience, attempts.next()).await {
                Ok(Some(Ok(link))) => return Ok(link),
                Ok(Some(Err(why))) => last = why,
                Ok(None) | Err(_) => {}
            }
        }
    }

    fn may_knock(&self, address: SocketAddr) -> bool {
        let mut knocks = self.knocks.lock();
        knocks.may(self.node, address, Instant::now())
    }

    async fn at(&self, address: SocketAddr) -> Result<HostLink, ChatError> {
        let identity = self.key.identity().map_err(unavailable)?;
        let (endpoint, node) = (address.to_string(), self.node);
        let rule = bus_rule();
        let socket = connect_path(&endpoint, &identity, Some(node), &rule, &self.transport).await;
        let proved = matches!(socket, Ok(_) | Err(ConnectError::Refused { .. }));
        self.knocks.lock().note(&node, address, proved);
        let socket = socket.map_err(unavailable)?;
        self.heard.note();
        self.connections.watch_host(node, None, socket.closer());
        let client = Client::new(socket, Arc::clone(&self.key));
        let token = granted(client.call(&Capability::shard_serve(), &self.wanted)).await?;
        let addr = HostAddr { endpoint, node };
        let transport = self.transport.clone();
        let link = HostLink::connect_with(&addr, &self.key, token.clone(), transport).await?;
        self.connections
            .watch_host(node, Some(&token), link.closer());
        Ok(link)
    }
}

/// The session token that a host answers with.
async fn granted(call: Result<CallStream, CallError>) -> Result<Vec<u8>, ChatError> {
    let answer = call.map_err(unavailable)?.result_within(PER_ADDRESS).await;
    let grant: ShardGrant =
        serde_json::from_value(answer.map_err(unavailable)?).map_err(unavailable)?;
    let token = grant.token();
    token.ok_or_else(|| unavailable("its grant is not base64url"))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hearthnet_bus::testing::{Home, id, key};
    use serde_json::json;
    use tokio::net::TcpListener;

    use super::*;

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([192, 168, 1, 7], port))
    }

    #[test]
    fn a_host_is_looked_for_so_often_and_always_where_it_was_last() {
        let (mut knocks, begin) = (Knocks::default(), Instant::now());
        let mut tried = |host: u8, ports: std::ops::Range<u16>, seconds: u64| {
            let now = begin + Duration::from_secs(seconds);
            let may = ports.filter(|port| knocks.may(id(host), address(*port), now));
            may.count() as u64
        };
        // Whatever it names: one place after the other, or the same again.
        assert_eq!(tried(1, 2000..3000, 0), KNOCKS);
        assert_eq!(tried(1, 2000..2001, 1), 0);
        assert_eq!(tried(1, 2000..2010, 10), 5);
        assert_eq!(tried(2, 2000..2003, 10), 3);
        let now = begin + Duration::from_secs(10);
        knocks.note(&id(1), address(2000), true);
        let found = |knocks: &mut Knocks| (0..50).all(|_| knocks.may(id(1), address(2000), now));
        assert!(found(&mut knocks));
        assert!(
            !knocks.may(id(1), address(2001), now),
            "others are none of its"
        );
        knocks.note(&id(1), address(2001), false);
        assert!(found(&mut knocks));
        knocks.note(&id(1), address(2000), false);
        assert!(!found(&mut knocks));
        for seed in 0..=255 {
            for more in 0..3 {
                let secret = [seed, more].repeat(16).try_into().unwrap();
                let host = hearthnet_bus::NodeKey::from_secret(&secret).id();
                knocks.may(host, address(2000), now);
            }
        }
        assert_eq!(knocks.hosts.len(), MAX_REMEMBERED);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nobody_is_knocked_at_again_and_again_because_a_host_says_that_it_is_there() {
        let service = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let there = [service.local_addr().unwrap()];
        let knocks = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&knocks);
        tokio::spawn(async move {
            // Counted before it is closed, on which the other side goes on.
            while let Ok(_connection) = service.accept().await {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        let home = Home::founded(key(1), true);
        let attempt = Attempt {
            node: id(2),
            wanted: json!({ "shard_id": "all" }),
            key: Arc::clone(&home.key),
            transport: Config::default(),
            connections: Connections::watched(home.log.clone()),
            knocks: Arc::default(),
            heard: SignOfLife::default(),
        };
        let (begin, mut why) = (Instant::now(), String::new());
        for _ in 0..500 {
            why = attempt.with_any_of(&there).await.unwrap_err().to_string();
        }
        let most = KNOCKS + begin.elapsed().as_secs() / KNOCK_S + 1;
        let knocks = knocks.load(Ordering::Relaxed) as u64;
        assert!(knocks >= KNOCKS && knocks <= most, "{knocks}: {why}");
    }
}
