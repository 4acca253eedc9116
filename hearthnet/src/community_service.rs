//! Answering programs on this machine with the community's hosts.

use std::sync::Arc;
use std::time::Instant;

use hearthnet_orchestrator::service::ServedModel;
use hearthnet_orchestrator::{Cancel, Service};
use tokio::runtime::Handle;

use crate::backends::open_backend;
use crate::community::Home;
use crate::config::Config;
use crate::failure::Failure;
use crate::hosts::{CommunityHosts, Links, Places, in_sync};
use crate::local_api::offer_chats;
use crate::models::{OpenModel, engine_options, load_head, text_model};
use crate::node::DaemonNode;
use crate::service_setup::{load, on_demand};

/// Makes the node answer `experimental.distributed_llm.chat` with a model whose layers the
/// community's hosts hold. Chats share the embedding, the sessions with hosts, and the engine of
/// this machine that goes on when hosts cannot.
pub(crate) fn offer(
    runtime: &Handle,
    daemon_node: &DaemonNode,
    home: &Home,
    model: OpenModel,
    config: &Config,
) -> Result<Service, Failure> {
    let head = load_head(&model, &engine_options(config, None))?;
    let text = text_model(&model, head)?;
    // A wrong setting is told now, and not to every caller.
    config.transport()?;
    let (id, weights) = (model.id.clone(), model.weights);
    let places: Places = {
        let discovery = daemon_node.node.discovery().clone();
        Arc::new(move |node| discovery.endpoints(node))
    };
    let settings = crate::service_setup::settings(config);
    let fallback = config.research.distributed_inference.fallback_to_local;
    let local = fallback.then(|| Arc::new(on_demand(&model, config)));
    let path = model.path.clone();
    let links = Links::new(
        daemon_node.node.connections().clone(),
        daemon_node.health.clone(),
    );
    let (home, all) = (home.clone(), config.clone());
    let handle = runtime.clone();
    let (here, began) = (daemon_node.node.downgrade(), Instant::now());
    let opener = move |cancel: &Cancel| {
        let mut hosts = CommunityHosts::new(
            handle.clone(),
            &home,
            &model,
            &all,
            Arc::clone(&places),
            links.clone(),
        )
        .map_err(|e| hearthnet_orchestrator::ChatError::Engine(e.to_string()))?;
        hosts.here = Some(here.clone());
        hosts.in_sync = fallback.then(|| in_sync(here.clone(), began));
        let local = local.as_ref().map(load);
        open_backend(&handle, &model, Box::new(hosts), &all, local, cancel)
    };
    let served = ServedModel {
        id,
        weights,
        text,
        opener: Box::new(opener),
    };
    let service = Service::new(runtime.clone(), vec![served], settings);
    let registry = daemon_node.node.call_server().registry();
    offer_chats(registry, &service, &path, config)?;
    Ok(service)
}
