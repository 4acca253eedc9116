//! The one daemon of a home: a node of the community that gossips and answers calls, the chats of
//! programs on this machine, their OpenAI API, and layers for the other members.
//!
//! | part | file |
//! |---|---|
//! | node, listener, local API for programs here | `../node/` |
//! | chats | this file, `../service_setup.rs` |
//! | layers | `layers.rs` |
//! | changes of the community that commands ask for, and word of others | `../changes.rs` |
//! | asking a daemon that runs already | `attach.rs` |
//!
//! `hearthnet serve` and `hearthnet shard serve` both start it; each finds out whether it runs
//! already. Each part ends by itself: a daemon without the model's file, or without the right to
//! serve layers, does the rest.

mod attach;
pub(crate) mod layers;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::{CHAT, ENDPOINT_FILE, Registry, SHARD_SERVE, Served, register_shards};
use hearthnet_bus::log::Level;
use hearthnet_http::{Health, HttpServer, Part};
use hearthnet_orchestrator::hosts::Links;
use hearthnet_orchestrator::{ChatError, Service};
use serde_json::json;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use crate::args::{Layers, PrivateArgs, RunArgs, parse_layers};
use crate::backends::community_source;
use crate::community::{Home, now_ms};
use crate::config::Config;
use crate::context::Context;
use crate::daemon::layers::{LayerHost, Order, Tell, print_news};
use crate::failure::{Failure, Kind};
use crate::host_engine::HostEngine;
use crate::local_api;
use crate::lock::Lock;
use crate::metrics_server::MetricsServer;
use crate::models::{OpenModel, open_model};
use crate::node::DaemonNode;
use crate::node::transient::in_sync;
use crate::output::{note, print, print_json};
use crate::runtime::block_on;
use crate::service_setup::{close, count, hosted_model, open_http, settings};
use crate::signals::{Stop, StopWhenDropped};

/// How long chats that run may take to end when the program is asked to stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// How long peers have to hear that a shard is withdrawn before the connections end.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// What the daemon is to do beside being there.
#[derive(Debug)]
pub(crate) struct Plan {
    /// What the command line says; else the configuration does.
    pub(crate) args: RunArgs,
    /// Whether it is all about the layers: what it prints when ready are they, and it ends when
    /// they cannot be served.
    pub(crate) for_layers: bool,
    /// Threads that compute them.
    pub(crate) threads: Option<usize>,
    /// Where to listen for Prometheus, instead of where the configuration says.
    pub(crate) metrics: Option<String>,
}

impl Plan {
    /// The layers to serve, if any: of the command line, else of the configuration.
    fn wanted_layers(&self, config: &Config) -> Result<Option<Layers>, Failure> {
        match self.args.layers {
            Some(layers) => Ok(Some(layers)),
            None => configured_layers(config),
        }
    }
}

/// The layers to serve according to the configuration, if any.
pub(crate) fn configured_layers(config: &Config) -> Result<Option<Layers>, Failure> {
    let host = &config.research.distributed_inference.host;
    if !host.serve_shards {
        return Ok(None);
    }
    parse_layers(&host.serve_layers).map(Some).map_err(|why| {
        Failure::new(
            Kind::Config,
            format!("the setting research.distributed_inference.host.serve_layers: {why}"),
        )
        .hint("for example \"auto\" or \"0-14\"")
    })
}

/// Runs the daemon until it is asked to stop; where one runs already, asks that one.
pub(crate) fn run(plan: &Plan, home: &Home, cx: &Context) -> Result<(), Failure> {
    block_on(async {
        // Signals count from here on: a Ctrl-C while loading ends the program cleanly, too.
        let stop = Stop::listen(plan.args.lifeline)?;
        if Lock::is_held(&home.dir) {
            return attach::beside(plan, home, cx, stop).await;
        }
        let daemon = Daemon::start(plan, home, cx, &stop).await?;
        daemon.run(plan, home, &stop).await
    })
}

/// A daemon at work.
struct Daemon {
    daemon_node: Arc<DaemonNode>,
    layer_host: Arc<LayerHost>,
    /// The layers of the plan.
    layers: Option<JoinHandle<Result<(), Failure>>>,
    /// Asks all layers to stop, also those of other commands, when they are to end before the daemon
    /// was asked to.
    stops: StopWhenDropped,
    chats: Option<Service>,
    http: Option<HttpServer>,
    numbers: MetricsServer,
}

impl Daemon {
    async fn start(plan: &Plan, home: &Home, cx: &Context, stop: &Stop) -> Result<Self, Failure> {
        let level = home.level()?;
        let wanted = plan.wanted_layers(&cx.config)?;
        let engine = match wanted {
            Some(_) => HostEngine::of(&plan.args.engine, &cx.config)?,
            None => HostEngine::Exact,
        };
        count(Part::Caller)?;
        let numbers = match wanted {
            Some(_) => {
                count(Part::Host)?;
                MetricsServer::open(plan.metrics.as_deref(), &cx.config).await?
            }
            None => MetricsServer::closed(),
        };
        let model = open_model(cx, plan.args.model.as_ref(), Some(home));
        let order = match (&model, wanted) {
            (Ok(model), Some(layers)) => Some(Order {
                model: model.clone(),
                layers,
                threads: plan.threads,
                engine,
            }),
            (Err(why), Some(_)) if !plan.for_layers => {
                note(format!("no layers are served: {why}"));
                None
            }
            (Err(why), _) if plan.for_layers => return Err(why.clone()),
            _ => None,
        };
        if let Some(order) = &order {
            order.check(&cx.config)?;
        }
        let (registry, served) = (Arc::new(Registry::new()), Arc::new(Served::default()));
        let key = Arc::clone(&home.key);
        register_shards(&registry, key, home.log.clone(), Arc::clone(&served))
            .map_err(Failure::internal)?;
        let chats = chat_model(model, plan.args.answers.private, home, &cx.config);
        let mut caps = Vec::new();
        caps.extend(chats.is_ok().then(|| short_name(CHAT)));
        caps.extend(order.is_some().then(|| short_name(SHARD_SERVE)));
        let listen = plan.args.listen.as_deref();
        let daemon_node = tokio::select! {
            node = DaemonNode::start(home, &cx.config, listen, registry, caps) => node?,
            () = stop.asked() => return Err(ChatError::Cancelled.into()),
        };
        let daemon_node = Arc::new(daemon_node);
        let layer_host = Arc::new(LayerHost {
            home: home.clone(),
            config: cx.config.clone(),
            daemon_node: Arc::clone(&daemon_node),
            served,
            busy: Mutex::default(),
            leaving: AtomicBool::new(false),
            health: numbers.health(),
            metrics: numbers.url(),
        });
        let (until_end, stops) = stop.or_dropped();
        attach::offer(&daemon_node, &layer_host, cx, &until_end)?;
        let mut this = Self {
            daemon_node,
            layer_host,
            layers: None,
            stops,
            chats: None,
            http: None,
            numbers,
        };
        let opened = tokio::select! {
            opened = this.open(plan, (home, level), &cx.config, order, chats, until_end) => opened,
            () = stop.asked() => Err(ChatError::Cancelled.into()),
        };
        // Its layers may be advertised by now.
        if let Err(why) = opened {
            this.end(plan, stop).await;
            return Err(why);
        }
        Ok(this)
    }

    /// Starts what stands on the node.
    async fn open(
        &mut self,
        plan: &Plan,
        (home, level): (&Home, Level),
        config: &Config,
        order: Option<Order>,
        model: Result<OpenModel, Failure>,
        stop: Stop,
    ) -> Result<(), Failure> {
        let silent = plan.args.json && !plan.for_layers;
        let json = plan.args.json;
        let tell: Tell = Arc::new(move |news| match silent {
            // What is printed when ready is one object.
            true => {}
            false => print_news(json, news),
        });
        if plan.for_layers {
            self.layer_host.settled_right(&tell).await?;
        }
        if let Some(order) = order {
            let host = Arc::clone(&self.layer_host);
            self.layers = Some(tokio::spawn(
                async move { host.serve(order, tell, stop).await },
            ));
        }
        let handle = Handle::current();
        match model {
            Ok(model) => {
                let chats = offer_chats(&handle, &self.daemon_node, home, &model, config)?;
                self.chats = Some(chats);
            }
            // Whoever names an address for HTTP wants chats.
            Err(why) if plan.args.answers.http.is_some() => return Err(why),
            Err(why) => note(format!("no chats for programs on this machine: {why}")),
        }
        if let Some(chats) = &self.chats {
            self.http = http_listener(plan.args.answers.http.as_deref(), chats, config).await?;
        }
        let url = self.http.as_ref();
        let url = url.map(|http| format!("http://{}/v1", http.local_addr()));
        self.daemon_node.set_url(url.clone());
        match plan.for_layers {
            true if plan.args.json => Ok(()),
            true => print(local_endpoints(home, url.as_deref())),
            false => ready(plan, home, &self.daemon_node, level, url.as_deref()),
        }
    }

    /// Waits for its end, and ends politely.
    async fn run(mut self, plan: &Plan, home: &Home, stop: &Stop) -> Result<(), Failure> {
        let outcome = loop {
            let layers = self.layers.as_mut();
            let layers = async {
                match layers {
                    Some(layers) => layers.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.asked() => break Ok(()),
                why = lost(home) => break Err(why),
                ended = layers => {
                    self.layers = None;
                    match ended.map_err(Failure::internal).flatten() {
                        Ok(()) if plan.for_layers => break Ok(()),
                        Err(why) if plan.for_layers => break Err(why),
                        Ok(()) => {}
                        Err(why) => note(format!("layers are served no longer: {why}")),
                    }
                }
            }
        };
        self.end(plan, stop).await;
        outcome
    }

    /// Ends politely, or at once if it is asked a second time.
    async fn end(self, plan: &Plan, stop: &Stop) {
        if !plan.args.json {
            note("stopping");
        }
        tokio::select! {
            () = self.leave() => {}
            () = stop.asked_twice() => {}
        }
    }

    async fn leave(self) {
        self.numbers.say(Health::Leaving);
        drop(self.stops);
        let layers = async {
            if let Some(layers) = self.layers {
                let _ = layers.await;
            }
            self.layer_host.idle().await;
        };
        let chats = async {
            match (self.http, &self.chats) {
                (Some(http), Some(chats)) => close(http, chats).await,
                (None, Some(chats)) => chats.drain(DRAIN_DEADLINE).await,
                _ => {}
            }
        };
        tokio::join!(layers, chats);
        tokio::time::sleep(LAST_WORDS).await;
        self.daemon_node.stop().await;
        self.numbers.close().await;
    }
}

/// The last part of a capability's name, which is enough to announce.
fn short_name(capability: &str) -> String {
    let name = capability.split('@').next().unwrap_or(capability);
    name.split('.').next_back().unwrap_or(name).to_owned()
}

/// The model for chats, if there are to be any.
fn chat_model(
    model: Result<OpenModel, Failure>,
    private: PrivateArgs,
    home: &Home,
    config: &Config,
) -> Result<OpenModel, Failure> {
    home.require_research(config)?;
    let mut model = model?;
    let chats = crate::private_layers::chats(config);
    crate::private_layers::load(&mut model, private, chats, config)?;
    Ok(model)
}

/// Makes the node answer `experimental.distributed_llm.chat` with a model whose layers the
/// community's hosts hold. Chats share the embedding, the sessions with hosts, and the engine of
/// this machine that goes on when hosts cannot.
fn offer_chats(
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
    let (discovery, here) = (Some(node.discovery().clone()), node.downgrade());
    let even = fallback.then(|| in_sync(here.clone(), Instant::now()));
    let source = community_source(runtime, home, config, links, discovery, Some(here), even);
    let served = hosted_model(model, config, fallback, runtime, source)?;
    let service = Service::new(runtime.clone(), vec![served], settings(config));
    let registry = node.call_server().registry();
    local_api::offer_chats(registry, &service, &model.file, config)?;
    Ok(service)
}

/// The HTTP interface. One that nobody named is left out when its port is taken.
async fn http_listener(
    listen: Option<&str>,
    chats: &Service,
    config: &Config,
) -> Result<Option<HttpServer>, Failure> {
    match open_http(chats, listen, config).await {
        Ok(http) => Ok(Some(http)),
        Err(failure) if listen.is_none() && failure.kind == Kind::Host => {
            note(format!("no HTTP for programs on this machine: {failure}"));
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// Resolves when this node has lost its place in the community.
async fn lost(home: &Home) -> Failure {
    let mut changes = home.log.changes();
    loop {
        if let Err(failure) = home.level() {
            return failure;
        }
        if changes.changed().await.is_err() {
            // The log outlives this task; nothing more will be heard.
            std::future::pending::<()>().await;
        }
    }
}

/// Where programs on this machine come in.
fn local_endpoints(home: &Home, url: Option<&str>) -> String {
    format!(
        "  programs  {}{}\n",
        home.dir.join(ENDPOINT_FILE).display(),
        url.map_or_else(String::new, |url| format!("\n  OpenAI    {url}")),
    )
}

fn ready(
    plan: &Plan,
    home: &Home,
    daemon_node: &DaemonNode,
    level: Level,
    url: Option<&str>,
) -> Result<(), Failure> {
    let state = home.state();
    let addresses = daemon_node.addresses();
    if plan.args.json {
        return print_json(&json!({
            "node": home.key.id().to_string(),
            "community": state.name,
            "level": level,
            "addresses": addresses,
            "url": url,
        }));
    }
    print(format!(
        "{} is in {:?} as {level}\n  address   {}\n{}",
        state.label(&home.key.id(), now_ms()),
        state.name,
        addresses.join(", "),
        local_endpoints(home, url),
    ))?;
    if level >= Level::Trusted {
        note("whoever has an invite code can join through this node");
    }
    Ok(())
}
