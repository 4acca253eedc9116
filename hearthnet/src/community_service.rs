//! Answering programs on this machine with the community's hosts.

use std::sync::Arc;
use std::time::Instant;

use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::hosts::{HostSource, Links};
use tokio::runtime::Handle;

use crate::backends::community_hosts;
use crate::community::Home;
use crate::config::Config;
use crate::failure::Failure;
use crate::local_api::offer_chats;
use crate::models::OpenModel;
use crate::node::DaemonNode;
use crate::service_setup::{hosted_model, settings};
use crate::transient_node::in_sync;

/// Makes the node answer `experimental.distributed_llm.chat` with a model whose layers the
/// community's hosts hold. Chats share the embedding, the sessions with hosts, and the engine of
/// this machine that goes on when hosts cannot.
pub(crate) fn offer(
    runtime: &Handle,
    daemon_node: &DaemonNode,
    home: &Home,
    model: &OpenModel,
    config: &Config,
) -> Result<Service, Failure> {
    // A wrong setting is told now, and not to every caller.
    config.transport()?;
    let node = &daemon_node.node;
    let fallback = config.research.distributed_inference.fallback_to_local;
    let links = Links::new(node.connections().clone(), daemon_node.health.clone());
    let (home, all, handle) = (home.clone(), config.clone(), runtime.clone());
    let (here, discovery, began) = (node.downgrade(), node.discovery().clone(), Instant::now());
    let source = move |model: &OpenModel| {
        let mut hosts = community_hosts(&handle, &home, model, &all, links.clone())?;
        let discovery = discovery.clone();
        hosts.places = Arc::new(move |node| discovery.endpoints(node));
        hosts.here = Some(here.clone());
        hosts.in_sync = fallback.then(|| in_sync(here.clone(), began));
        Ok(Box::new(hosts) as Box<dyn HostSource>)
    };
    let served = hosted_model(model, config, fallback, runtime, source)?;
    let service = Service::new(runtime.clone(), vec![served], settings(config));
    let registry = node.call_server().registry();
    offer_chats(registry, &service, &model.path, config)?;
    Ok(service)
}
