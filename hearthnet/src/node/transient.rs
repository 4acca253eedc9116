//! A node for the duration of one command.

use std::sync::Arc;
use std::time::Instant;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::node::{Node, WeakNode};
use hearthnet_orchestrator::hosts::InSync;
use tokio::task::JoinSet;

use super::log_writer::follow;
use super::sync::{self, wait_for_daemon_sync, wait_until_synced};
use super::{failure, neighbours, settings};
use crate::cli::{Failure, note};
use crate::config::Config;
use crate::home::{Home, Lock};

/// Starts a node that keeps this home's log in sync while a command runs. Records refusals of its
/// key, and its clock offset.
pub(crate) async fn start(home: &Home, config: &Config) -> Result<Node, Failure> {
    let settings = settings(home, config);
    let registry = Arc::new(Registry::new());
    let node = Node::start(Arc::clone(&home.key), home.log.clone(), settings, registry)
        .await
        .map_err(|e| failure(&e))?;
    tokio::spawn(neighbours::watch(node.downgrade(), home.clone(), false));
    Ok(node)
}

/// Waits, with a time limit, until the log has synced, or other members refuse this node.
pub(crate) async fn sync_log(node: &Node, home: &Home) {
    wait_until_synced(node).await;
    neighbours::handle_refusals(node, home);
}

/// Runs `work` with a node that has synced with other members. Without a node if the daemon of this
/// home keeps the log in sync, or if there are no other members.
pub(crate) async fn with_synced_node<T>(
    home: &Home,
    config: &Config,
    work: impl AsyncFnOnce(Option<&Node>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    if Lock::is_held(&home.dir) || home.state().members().count() < 2 {
        return work(None).await;
    }
    let node = start(home, config).await?;
    sync_log(&node, home).await;
    let done = work(Some(&node)).await;
    node.shutdown().await;
    done
}

/// Syncs with other members before a command reads the log. If that fails, the user is told, and the
/// log is as old as the last command that synced. Does nothing if the daemon of this home runs.
pub(crate) async fn sync_or_note(home: &Home, config: &Config) {
    if let Err(why) = with_synced_node(home, config, async |_| Ok(())).await {
        note(format!(
            "other members could not be asked: {}",
            why.with_hint()
        ));
    }
}

/// Keeps the log in sync during a chat, unless a node already runs on this machine.
#[derive(Default)]
pub(crate) struct TransientNode(
    Option<(Node, Instant)>,
    #[expect(dead_code, reason = "held for its Drop")] Option<JoinSet<()>>,
);

impl TransientNode {
    /// Starts discovery, unless a local node already has its links.
    pub(crate) async fn begin(home: &Home, config: &Config) -> Result<Self, Failure> {
        if Lock::is_held(&home.dir) {
            return Ok(Self(None, Some(follow(home))));
        }
        let node = start(home, config).await?;
        Ok(Self(Some((node, Instant::now())), None))
    }

    /// Waits, with a time limit, until the log has synced, since it lists the served layers.
    pub(crate) async fn wait_until_synced(&self) {
        if let Some((node, _)) = &self.0 {
            wait_until_synced(node).await;
        }
    }

    /// The node of this process; `None` beside a node that already runs on this machine.
    pub(crate) fn node(&self) -> Option<&Node> {
        self.0.as_ref().map(|(node, _)| node)
    }

    /// Check whether the log has synced, or has had the time to.
    pub(crate) fn in_sync(&self) -> InSync {
        match &self.0 {
            // The local node keeps the log in sync.
            None => Arc::new(|| true),
            Some((node, began)) => in_sync(node.downgrade(), *began),
        }
    }

    /// Runs `check`; if it refuses, syncs first and runs it again, since this node's log may be
    /// outdated.
    pub(crate) async fn check_synced(
        &self,
        home: &Home,
        check: impl Fn() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if check().is_ok() {
            return Ok(());
        }
        note("asking other members whether this node may");
        match &self.0 {
            Some((node, _)) => sync_log(node, home).await,
            None => wait_for_daemon_sync(home, || check().is_ok()).await,
        }
        check()
    }

    /// Closes the node's links and stops it.
    pub(crate) async fn end(self) {
        if let Some((node, _)) = self.0 {
            node.shutdown().await;
        }
    }
}

/// Whether a node that started at `began` has synced, or has had the time to.
pub(crate) fn in_sync(node: WeakNode, began: Instant) -> InSync {
    Arc::new(move || {
        let node = node.upgrade();
        node.is_none_or(|node| sync::in_sync(&node, began.elapsed()))
    })
}
