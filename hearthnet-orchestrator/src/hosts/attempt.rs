//! Attempts to open a session with a host of the community, and limits on repeated dialling.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::{CallError, CallStream, Client, ShardGrant};
use hearthnet_bus::node::{Connections, WeakNode, bus_rule, first_of};
use hearthnet_bus::{Capability, NodeId, NodeKey};
use hearthnet_transport::{Config, ConnectError, Hello, KeyedBuckets, Time, connect_path};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::timeout;

use super::opening::SignOfLife;
use crate::error::ChatError;
use crate::hosts::link::{HostAddr, HostLink, PIPELINE};

/// Time limit per address: connecting, the grant, the session.
const PER_ADDRESS: Duration = Duration::from_secs(5);

/// Burst of dials to unproved addresses of one host.
const DIAL_BURST: u64 = 64;
/// Seconds per further dial. A restarted host is found within this time.
const SECONDS_PER_DIAL: u64 = 2;
/// Maximum number of hosts with a budget, and of proved addresses.
const MAX_REMEMBERED: usize = 512;

/// Dial budgets of hosts. A host announces its own addresses: without a budget, it could make other
/// nodes dial any address again and again.
#[derive(Debug)]
pub(super) struct DialBudgets {
    began: Instant,
    seconds: KeyedBuckets<NodeId>,
    /// Last address at which each host proved its key.
    proved: BTreeMap<NodeId, SocketAddr>,
}

impl Default for DialBudgets {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            seconds: KeyedBuckets::new(1, DIAL_BURST * SECONDS_PER_DIAL, MAX_REMEMBERED),
            proved: BTreeMap::new(),
        }
    }
}

impl DialBudgets {
    /// Charges a dial to an address; returns false if the budget is used up. The proved address is
    /// free.
    fn may(&mut self, host: NodeId, address: SocketAddr, now: Instant) -> bool {
        if self.proved(&host) == Some(address) {
            return true;
        }
        let now = Time::from(now.saturating_duration_since(self.began));
        let seconds = self.seconds.of(&host, now);
        let may = seconds.has(SECONDS_PER_DIAL);
        if may {
            seconds.spend(SECONDS_PER_DIAL);
        }
        may
    }

    /// Last address at which a host proved its key.
    pub(super) fn proved(&self, host: &NodeId) -> Option<SocketAddr> {
        self.proved.get(host).copied()
    }

    /// Records whether a host proved its key at an address.
    fn note(&mut self, host: NodeId, address: SocketAddr, proved: bool) {
        if proved {
            if self.proved.len() >= MAX_REMEMBERED && !self.proved.contains_key(&host) {
                self.proved.pop_first();
            }
            self.proved.insert(host, address);
        } else if self.proved(&host) == Some(address) {
            self.proved.remove(&host);
        }
    }
}

/// Parameters of an attempt to open a session with a host.
pub(super) struct Attempt {
    pub(super) node: NodeId,
    /// Parameters of the grant request.
    pub(super) wanted: Value,
    pub(super) key: Arc<NodeKey>,
    pub(super) transport: Config,
    /// Closes the connections when the host loses its authorisation.
    pub(super) connections: Connections,
    pub(super) budgets: Arc<Mutex<DialBudgets>>,
    /// Set once the host answers.
    pub(super) heard: SignOfLife,
}

fn unavailable(why: impl Display) -> ChatError {
    ChatError::ShardUnavailable(why.to_string())
}

impl Attempt {
    /// Opens a session with this process's own layers: the same grant, no network connection.
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
        let link = HostLink::over(&addr, self.node, &token, connection, lifetime).await?;
        self.connections
            .watch_host(self.node, Some(&token), link.closer());
        Ok(link)
    }

    /// Tries addresses until one leads to the host and it grants a session ([`first_of`]).
    /// Addresses beyond the dial budget are skipped.
    pub(super) async fn with_any_of(
        &self,
        addresses: &[SocketAddr],
    ) -> Result<HostLink, ChatError> {
        let attempts = first_of(addresses.iter().copied(), async |address: SocketAddr| {
            let may = self.budgets.lock().may(self.node, address, Instant::now());
            if !may {
                return Err(None);
            }
            let attempt = timeout(PER_ADDRESS, self.at(address)).await;
            let silent = |_| {
                let seconds = PER_ADDRESS.as_secs();
                Err(unavailable(format!(
                    "{address} did not answer in {seconds} s"
                )))
            };
            attempt.unwrap_or_else(silent).map_err(Some)
        });
        attempts.await.map(|(_, link)| link).map_err(|failed| {
            let last = failed.into_iter().rev().find_map(|(_, why)| why);
            last.unwrap_or_else(|| match addresses.is_empty() {
                true => unavailable("it has announced no address"),
                false => unavailable("it was not at its addresses: they are tried again soon"),
            })
        })
    }

    async fn at(&self, address: SocketAddr) -> Result<HostLink, ChatError> {
        let identity = self.key.identity().map_err(unavailable)?;
        let (endpoint, node) = (address.to_string(), self.node);
        let rule = bus_rule();
        let socket = connect_path(&endpoint, &identity, Some(node), &rule, &self.transport).await;
        let proved = matches!(socket, Ok(_) | Err(ConnectError::Refused { .. }));
        self.budgets.lock().note(node, address, proved);
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

/// Session token of a host's grant.
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
    fn dials_of_a_host_are_limited_except_to_its_proved_address() {
        let (mut budgets, begin) = (DialBudgets::default(), Instant::now());
        let mut tried = |host: u8, ports: std::ops::Range<u16>, seconds: u64| {
            let now = begin + Duration::from_secs(seconds);
            let may = ports.filter(|port| budgets.may(id(host), address(*port), now));
            may.count() as u64
        };
        // The budget covers different addresses and the same one.
        assert_eq!(tried(1, 2000..3000, 0), DIAL_BURST);
        assert_eq!(tried(1, 2000..2001, 1), 0);
        assert_eq!(tried(1, 2000..2010, 10), 5);
        assert_eq!(tried(2, 2000..2003, 10), 3);
        let now = begin + Duration::from_secs(10);
        budgets.note(id(1), address(2000), true);
        let found =
            |budgets: &mut DialBudgets| (0..50).all(|_| budgets.may(id(1), address(2000), now));
        assert!(found(&mut budgets));
        assert!(
            !budgets.may(id(1), address(2001), now),
            "others are none of its"
        );
        budgets.note(id(1), address(2001), false);
        assert!(found(&mut budgets));
        budgets.note(id(1), address(2000), false);
        assert!(!found(&mut budgets));
        for seed in 0..=255 {
            for more in 0..3 {
                let secret = [seed, more].repeat(16).try_into().unwrap();
                let host = hearthnet_bus::NodeKey::from_secret(&secret).id();
                budgets.may(host, address(2000), now);
            }
        }
        assert_eq!(budgets.seconds.len(), MAX_REMEMBERED);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_host_cannot_make_others_dial_a_foreign_address_repeatedly() {
        let service = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let there = [service.local_addr().unwrap()];
        let dials = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&dials);
        tokio::spawn(async move {
            // Counted before the connection is closed, which the caller waits for.
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
            budgets: Arc::default(),
            heard: SignOfLife::default(),
        };
        let (begin, mut why) = (Instant::now(), String::new());
        for _ in 0..500 {
            why = attempt.with_any_of(&there).await.unwrap_err().to_string();
        }
        let most = DIAL_BURST + begin.elapsed().as_secs() / SECONDS_PER_DIAL + 1;
        let dials = dials.load(Ordering::Relaxed) as u64;
        assert!(dials >= DIAL_BURST && dials <= most, "{dials}: {why}");
    }
}
