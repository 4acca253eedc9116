//! Chats of a daemon with models whose layers the community's hosts hold.

use std::time::Instant;

use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::hosts::Links;
use hearthnet_orchestrator::service::ServedModel;
use tokio::runtime::Handle;

use crate::answering::chat_backends::community_hosts;
use crate::answering::chat_setup::hosted_model;
use crate::cli::Failure;
use crate::config::Config;
use crate::home::Home;
use crate::models::OpenModel;
use crate::node::{DaemonNode, in_sync};

/// A model for [`Service::add_model`]. All its chats share the embedding, the sessions with hosts, and
/// the local fallback engine. Loads the embedding, so it blocks. Requires a runtime.
pub(super) fn shared_model(
    daemon_node: &DaemonNode,
    home: &Home,
    model: &OpenModel,
    config: &Config,
) -> Result<ServedModel, Failure> {
    let (node, runtime) = (&daemon_node.node, Handle::current());
    let fallback = config.research.distributed_inference.fallback_to_local;
    let links = Links::new(node.connections().clone(), daemon_node.health.clone());
    let mut hosts = community_hosts(model, &runtime, home, config, links);
    hosts.discovery = Some(node.discovery().clone());
    hosts.here = Some(node.downgrade());
    hosts.in_sync = fallback.then(|| in_sync(node.downgrade(), Instant::now()));
    hosted_model(model, config, fallback, &runtime, hosts)
}

/// Whether chats are answered at present.
pub(super) fn are_answered(chats: Option<&Service>) -> bool {
    chats.is_some_and(|chats| chats.load().running > 0)
}
