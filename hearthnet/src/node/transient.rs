//! A node for as long as one command needs it.

use std::sync::Arc;
use std::time::Instant;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::node::{Connections, Node, WeakNode};
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_orchestrator::hosts::{HostSource, InSync, Links};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::settle::{self, settle_beside, settle_in};
use super::{failure, neighbours, settings};
use crate::backends::community_source;
use crate::changes::follow;
use crate::community::Home;
use crate::config::Config;
use crate::failure::Failure;
use crate::lock::Lock;
use crate::models::OpenModel;
use crate::output::note;

/// A node that keeps this home's log even with the others while a command runs, and goes. What members
/// say about its key and its clock is noted meanwhile.
pub(crate) async fn start(home: &Home, config: &Config) -> Result<Node, Failure> {
    let settings = settings(home, config)?;
    let registry = Arc::new(Registry::new());
    let node = Node::start(Arc::clone(&home.key), home.log.clone(), settings, registry)
        .await
        .map_err(|e| failure(&e))?;
    tokio::spawn(neighbours::watch(node.downgrade(), home.clone(), false));
    Ok(node)
}

/// Waits, within bounds, until the log is what others know, or they have said that they tell this node
/// nothing more.
pub(crate) async fn learn(node: &Node, home: &Home) {
    settle_in(node).await;
    neighbours::hear_refusals(node, home);
}

/// Does `work` with a node that has asked the others what they know; with none where the daemon of this
/// home does so, and where there is nobody else.
pub(crate) async fn among_others<T>(
    home: &Home,
    config: &Config,
    work: impl AsyncFnOnce(Option<&Node>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    if Lock::is_held(&home.dir) || home.state().members().count() < 2 {
        return work(None).await;
    }
    let node = start(home, config).await?;
    learn(&node, home).await;
    let done = work(Some(&node)).await;
    node.shutdown().await;
    done
}

/// What a chat needs of the community while it lasts: somebody who keeps the log even with
/// the others. Where a node runs on this machine, it does.
#[derive(Default)]
pub(crate) struct TransientNode(
    Option<(Node, Instant)>,
    #[expect(dead_code, reason = "held for its Drop")] Option<JoinSet<()>>,
);

impl TransientNode {
    /// Starts looking for the others, unless a node here has found them already.
    pub(crate) async fn begin(home: &Home, config: &Config) -> Result<Self, Failure> {
        if Lock::is_held(&home.dir) {
            return Ok(Self(None, Some(follow(home))));
        }
        let node = start(home, config).await?;
        Ok(Self(Some((node, Instant::now())), None))
    }

    /// Waits, within bounds, until the log is what others know: what they serve is in it.
    pub(crate) async fn settle(&self) {
        if let Some((node, _)) = &self.0 {
            settle_in(node).await;
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
    ) -> impl Fn(&OpenModel, Exact) -> Result<Box<dyn HostSource>, Failure> + use<> {
        let node = self.0.as_ref().map(|(node, _)| node);
        let connections = match node {
            Some(node) => node.connections().clone(),
            // The node that runs here watches its own connections, and this program these.
            None => {
                let _inside = runtime.enter();
                Connections::watched(home.log.clone())
            }
        };
        let links = Links::new(connections, SharedHealth::default());
        let discovery = node.map(|node| node.discovery().clone());
        let even = fallback.then(|| match &self.0 {
            // The node that runs here sees to that.
            None => Arc::new(|| true) as InSync,
            Some((node, began)) => in_sync(node.downgrade(), *began),
        });
        community_source(runtime, home, config, links, discovery, None, even)
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
            Some((node, _)) => learn(node, home).await,
            None => settle_beside(home, || check().is_ok()).await,
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
        node.is_none_or(|node| settle::in_sync(&node, began.elapsed()))
    })
}
