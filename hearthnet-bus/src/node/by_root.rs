//! Delivery of events signed by the root key, also when members refuse this node's own key: the
//! root key proves itself and may deliver the events that it signed (`specs/gossip.md`, section 6).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use hearthnet_transport::{Identity, IdentityError, connect_path};
use tokio::sync::watch;

use super::Node;
use crate::community::sync::{Accounts, Progress, gossip, path_rule};
use crate::{NodeId, NodeKey};

/// Interval at which discovery is polled for more members.
const LOOK: Duration = Duration::from_millis(100);

impl Node {
    /// Delivers the root's events to every member that discovery finds, connecting as `root`. Ends
    /// after `within`, or when at least one member has the events and no attempt is running.
    /// Returns the members that have them.
    ///
    /// # Errors
    /// If no certificate can be made from the key.
    pub async fn push_root_events(
        &self,
        root: &NodeKey,
        within: Duration,
    ) -> Result<BTreeSet<NodeId>, IdentityError> {
        let identity = root.identity()?;
        let (mut tried, mut told) = (BTreeSet::new(), BTreeSet::new());
        let mut running = FuturesUnordered::new();
        let deadline = tokio::time::Instant::now() + within;
        while tokio::time::Instant::now() < deadline && (told.is_empty() || !running.is_empty()) {
            for hint in self.inner.discovery.found() {
                let expected = hint.node.filter(|node| self.is_other_member(node));
                if hint.node.is_some() && expected.is_none() {
                    continue;
                }
                for endpoint in hint.endpoints {
                    if tried.insert((endpoint, expected)) {
                        running.push(self.bring(&identity, root.id(), endpoint, expected));
                    }
                }
            }
            tokio::select! {
                Some(heard) = running.next() => told.extend(heard),
                () = tokio::time::sleep(LOOK) => {}
            }
        }
        Ok(told)
    }

    fn is_other_member(&self, node: &NodeId) -> bool {
        *node != self.inner.id && self.inner.log.state().level(node).is_some()
    }

    /// Delivers to one address. Returns the node there if it is a member and now has all of the
    /// root's events.
    async fn bring(
        &self,
        identity: &Identity,
        root: NodeId,
        endpoint: SocketAddr,
        expected: Option<NodeId>,
    ) -> Option<NodeId> {
        let settings = &self.inner.settings;
        let (addr, rule) = (endpoint.to_string(), path_rule());
        let connected = connect_path(&addr, identity, expected, &rule, &settings.transport).await;
        let socket = connected
            .inspect_err(
                |error| tracing::debug!(%endpoint, %error, "could not connect as the root key"),
            )
            .ok()?;
        let peer = socket.peer();
        if !self.is_other_member(&peer) {
            return None;
        }
        let (log, config) = (self.inner.log.clone(), settings.sync.clone());
        let (shown, mut progress) = watch::channel(Progress::default());
        let accounts = Accounts::new(&config);
        let gossip = gossip(socket, root, log, config, accounts, shown);
        let even = progress.wait_for(|progress| progress.in_sync && progress.declined == 0);
        tokio::select! {
            _ = gossip => None,
            even = even => even.is_ok().then_some(peer),
        }
    }
}
