//! A node for as long as one command needs it.

use std::sync::Arc;
use std::time::Instant;

use hearthnet_bus::node::{Connections, Node, WeakNode};
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_orchestrator::hosts::{HostSource, InSync, Links};
use tokio::runtime::Handle;

use crate::backends::community_hosts;
use crate::changes::{Follower, follow};
use crate::community::Home;
use crate::config::Config;
use crate::failure::Failure;
use crate::lock::Lock;
use crate::models::OpenModel;
use crate::output::note;

/// What a chat needs of the community while it lasts: somebody who keeps the log even with
/// the others. Where a node runs on this machine, it does.
#[derive(Default)]
pub(crate) struct TransientNode(
    Option<(Node, Instant)>,
    #[expect(dead_code, reason = "held for its Drop")] Option<Follower>,
);

impl TransientNode {
    /// Starts looking for the others, unless a node here has found them already.
    pub(crate) async fn begin(home: &Home, config: &Config) -> Result<Self, Failure> {
        if Lock::is_held(&home.dir) {
            return Ok(Self(None, Some(follow(home))));
        }
        let node = crate::node::transient(home, config).await?;
        Ok(Self(Some((node, Instant::now())), None))
    }

    /// Waits, within bounds, until the log is what others know: what they serve is in it.
    pub(crate) async fn settle(&self) {
        if let Some((node, _)) = &self.0 {
            crate::node::settle_in(node).await;
        }
    }

    /// Where each chat finds the hosts of the community. With `fallback` it waits for them only as
    /// long as the log is not even with the others'.
    pub(crate) fn source(
        &self,
        runtime: &Handle,
        home: &Home,
        config: &Config,
        fallback: bool,
    ) -> impl Fn(&OpenModel) -> Result<Box<dyn HostSource>, Failure> + use<> {
        let (runtime, home, config) = (runtime.clone(), home.clone(), config.clone());
        let in_sync = fallback.then(|| self.in_sync());
        let node = self.0.as_ref().map(|(node, _)| node);
        let node = node.map(|node| (node.connections().clone(), node.discovery().clone()));
        move |model| {
            let connections = match &node {
                Some((connections, _)) => connections.clone(),
                // The node that runs here watches its own connections, and this program these.
                None => {
                    let _inside = runtime.enter();
                    Connections::watched(home.log.clone())
                }
            };
            let links = Links::new(connections, SharedHealth::default());
            let mut hosts = community_hosts(&runtime, &home, model, &config, links)?;
            if let Some((_, discovery)) = &node {
                let discovery = discovery.clone();
                hosts.places = Arc::new(move |id| discovery.endpoints(id));
            }
            hosts.in_sync = in_sync.clone();
            Ok(Box::new(hosts))
        }
    }

    /// Whether the log is even with the others'. Where a node runs here, it sees to that.
    fn in_sync(&self) -> InSync {
        match &self.0 {
            None => Arc::new(|| true),
            Some((node, began)) => in_sync(node.downgrade(), *began),
        }
    }

    /// What `check` says, but not before the others were asked where it refuses: this node's log
    /// may be behind.
    pub(crate) async fn judge(
        &self,
        home: &Home,
        check: impl Fn() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if check().is_ok() {
            return Ok(());
        }
        note("asking the others whether this node may");
        match &self.0 {
            Some((node, _)) => crate::node::learn(node, home).await,
            None => crate::node::settle_beside(home, || check().is_ok()).await,
        }
        check()
    }

    /// Says goodbye.
    pub(crate) async fn end(self) {
        if let Some((node, _)) = self.0 {
            node.shutdown().await;
        }
    }
}

/// Whether a node that began then knows what its neighbours know, or has had the time to.
pub(crate) fn in_sync(node: WeakNode, began: Instant) -> InSync {
    Arc::new(move || {
        let node = node.upgrade();
        node.is_none_or(|node| crate::node::in_sync(&node, began.elapsed()))
    })
}
