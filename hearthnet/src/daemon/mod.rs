//! The daemon of a home: a node of the community that gossips and answers calls, the chats of local
//! programs, their OpenAI API, and layers for other members.
//!
//! | part | file |
//! |---|---|
//! | node, listener, local API | `../node/` |
//! | chats | `chats.rs`, `../answering/` |
//! | layers; what is requested; their choice | `layers.rs`, `layer_request.rs`, `choose_layers.rs` |
//! | ranges of all models, their memory; news of them | `layer_host.rs`, `ranges.rs`, `layer_events.rs` |
//! | weights of adopted models | `weights/` |
//! | disputes about rows: announced, their evidence fetched, judged | `disputes.rs` |
//! | what this node gives to others | `contributions.rs` |
//! | whether layers are served: decision, readings | `manners.rs`, `watch.rs` |
//! | `hearthnet pause` and `resume` | `pause.rs` |
//! | measurements for plans and routes, and when they are announced | `measure.rs`, `links.rs`, `rounds.rs`, `news.rs` |
//! | changes of the community that commands request | `../node/log_writer.rs` |
//! | use of a daemon that already runs | `attach.rs` |
//! | sandbox | `isolation.rs` |
//! | metrics of a host | `metrics_server.rs` |
//!
//! `hearthnet serve` and `hearthnet shard serve` both start it, or use the one that already runs.
//! Parts fail independently: a daemon without the model's file, or without the right to serve
//! layers, runs the other parts.

mod attach;
mod chats;
mod choose_layers;
mod contributions;
mod disputes;
pub(crate) mod isolation;
mod layer_events;
mod layer_host;
pub(crate) mod layer_request;
mod layers;
mod links;
mod manners;
mod measure;
pub(crate) mod metrics_server;
mod news;
pub(crate) mod pause;
mod ranges;
mod rounds;
mod watch;
pub(crate) mod weights;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use hearthnet_bus::calls::{CHAT, Registry, SHARD_SERVE, Served, register_shards};
use hearthnet_bus::log::Level;
use hearthnet_bus::node::weights::Busy;
use hearthnet_http::{Health, HttpServer, Part};
use hearthnet_orchestrator::{ChatError, Service};
use hearthnet_shard::Device;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::DropGuard;

use self::chats::{are_answered, shared_model};
use self::contributions::{Computed, Contributions};
use self::disputes::{Disputes, Judge, Shelf};
use self::layer_events::{EventSink, print_event};
use self::layer_host::LayerHost;
use self::layer_request::LayerRequest;
use self::measure::Measurer;
use self::metrics_server::MetricsServer;
use self::ranges::Ranges;
use self::watch::Watch;
use self::weights::{Follower, Parts, offer_file, remove_dropped};
use crate::answering::chat_setup::{most_chats, settings};
use crate::answering::http::{close, count, key_file, open_http, unless_taken};
use crate::answering::{local_service, private_layers};
use crate::cli::args::RunArgs;
use crate::cli::{Failure, Stop, block_on, note, print, print_json};
use crate::config::Context;
use crate::home::evidence::EvidenceFolder;
use crate::home::{Home, Lock, now_ms};
use crate::hosting::host_engine::HostEngine;
use crate::models::adopted::layers_in;
use crate::models::{OpenModel, open_model};
use crate::node::{DaemonNode, local_endpoints};
use crate::page::PageNode;

/// Time limit for running chats when the daemon stops.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// Time for peers to receive the withdrawal of a shard before connections close.
const WITHDRAW_GRACE: Duration = Duration::from_millis(300);

/// Runs the daemon until it is asked to stop, or uses the daemon that already runs.
pub(crate) fn run(args: &RunArgs, home: &Home, cx: &Context) -> Result<(), Failure> {
    block_on(async {
        // Signals are handled from here on, so that Ctrl-C while loading ends the program cleanly.
        let stop = Stop::listen(args.lifeline)?;
        if Lock::is_held(&home.dir) {
            return match args.layers {
                None => attach::tell_endpoints(args, home).await,
                Some(layers) => attach::serve_there(args, layers, home, cx, stop).await,
            };
        }
        let daemon = Daemon::start(args, home, cx, &stop).await?;
        daemon.run(args, home, &stop).await
    })
}

struct Daemon {
    daemon_node: Arc<DaemonNode>,
    layer_host: Arc<LayerHost>,
    /// Task that serves the layers that were requested at the start.
    layers: Option<JoinHandle<Result<(), Failure>>>,
    contributions: Arc<Contributions>,
    /// Task that counts contributions; ends when dropped.
    counting: JoinSet<()>,
    /// When dropped, stops all layers, including those of other commands.
    stops: DropGuard,
    chats: Option<Service>,
    http: Option<HttpServer>,
    numbers: MetricsServer,
}

impl Daemon {
    async fn start(
        args: &RunArgs,
        home: &Home,
        cx: &Context,
        stop: &Stop,
    ) -> Result<Self, Failure> {
        let level = home.level()?;
        let host = &cx.config.research.distributed_inference.host;
        let wanted = args.layers.or_else(|| cx.config.layers());
        let wanted = wanted.or_else(|| args.up.then_some(host.serve_layers));
        let engine = match wanted {
            Some(_) => HostEngine::of(&args.engine, &cx.config)?,
            None => HostEngine::Exact(Device::Processor),
        };
        count(Part::Caller)?;
        let numbers = match wanted {
            Some(_) => {
                count(Part::Host)?;
                MetricsServer::open(args.metrics.as_deref(), &cx.config).await?
            }
            None => MetricsServer::closed(),
        };
        // Without a model of its own, the daemon follows what the community adopts.
        let named = args.model.is_some() || cx.config.model.default.is_some();
        let adopted = || !named && !home.state().models().is_empty();
        let follows = !args.for_layers && (args.up || adopted());
        let model = match follows {
            true => Ok(None),
            false => open_model(cx, args.model.as_ref(), Some(home)).map(Some),
        };
        let request = match (&model, wanted) {
            (Ok(Some(model)), Some(layers)) => {
                let (model, engine) = (model.clone(), engine.clone());
                Some(LayerRequest::of_file(model, layers, args.threads, engine))
            }
            (Err(why), Some(_)) if !args.for_layers => {
                note(format!("no layers are served: {}", why.with_hint()));
                None
            }
            (Err(why), _) if args.for_layers => return Err(why.clone()),
            _ => None,
        };
        if let Some(request) = &request {
            request.check(&cx.config)?;
        }
        let (registry, served) = (Arc::new(Registry::new()), Arc::new(Served::default()));
        let key = Arc::clone(&home.key);
        register_shards(&registry, key, home.log.clone(), Arc::clone(&served))
            .map_err(Failure::internal)?;
        let config = &cx.config;
        let chats = home.require_research(config).and(model);
        let chats = chats.and_then(|mut model| {
            if let Some(model) = &mut model {
                private_layers::load(model, args.answers.private, most_chats(config), config)?;
            }
            Ok(model)
        });
        let mut caps = Vec::new();
        caps.extend(chats.is_ok().then(|| short_name(CHAT)));
        let serves = request.is_some() || (follows && wanted.is_some());
        caps.extend(serves.then(|| short_name(SHARD_SERVE)));
        let listen = args.listen.as_deref();
        let isolation = isolation::stands();
        let daemon_node = tokio::select! {
            node = DaemonNode::start(home, &cx.config, listen, registry, caps, isolation) => node?,
            () = stop.asked() => return Err(ChatError::Cancelled.into()),
        };
        let daemon_node = Arc::new(daemon_node);
        let watch = Arc::new(Watch::start(&home.dir, &cx.config.manners)?);
        let computed = Arc::<Computed>::default();
        let contributions = Contributions::new(home, &daemon_node, &computed, &served);
        let contributions = Arc::new(contributions);
        // The node must not keep its own counter alive, which holds the node.
        let counter = Arc::downgrade(&contributions);
        daemon_node.show_gave(move || counter.upgrade()?.so_far());
        let layer_host = Arc::new(LayerHost {
            home: home.clone(),
            config: cx.config.clone(),
            daemon_node: Arc::clone(&daemon_node),
            served,
            ranges: tokio::sync::watch::Sender::new(Ranges::default()),
            computed: Arc::clone(&computed),
            watch: Arc::clone(&watch),
            health: numbers.health.clone(),
            metrics: numbers.url(),
        });
        let (until_end, stops) = stop.or_dropped();
        attach::offer(&daemon_node, &layer_host, cx, &until_end)?;
        pause::offer(&daemon_node, &watch)?;
        let mut counting = JoinSet::new();
        counting.spawn(Arc::clone(&contributions).run());
        let mut this = Self {
            daemon_node,
            layer_host,
            layers: None,
            contributions,
            counting,
            stops,
            chats: None,
            http: None,
            numbers,
        };
        let follower_engine = (follows && wanted.is_some()).then_some(engine);
        let opening = (request, follower_engine, chats);
        let opened = tokio::select! {
            opened = this.open(args, (home, level), cx, opening, until_end) => opened,
            () = stop.asked() => Err(ChatError::Cancelled.into()),
        };
        // The layers may be advertised already.
        if let Err(why) = opened {
            this.end(args, stop).await;
            return Err(why);
        }
        Ok(this)
    }

    /// Starts the parts that need the node.
    async fn open(
        &mut self,
        args: &RunArgs,
        (home, level): (&Home, Level),
        cx: &Context,
        (request, engine, model): (
            Option<LayerRequest>,
            Option<HostEngine>,
            Result<Option<OpenModel>, Failure>,
        ),
        stop: Stop,
    ) -> Result<(), Failure> {
        let config = &cx.config;
        let silent = args.json && !args.for_layers;
        let json = args.json;
        let tell: EventSink = Arc::new(move |news| match silent {
            // With --json the output is one object.
            true => {}
            false => print_event(json, news),
        });
        if args.for_layers {
            self.layer_host.settled_right(&tell).await?;
        }
        let parts = Arc::<Parts>::default();
        let may_hold = tokio::sync::watch::Sender::new(true);
        let is_ready = may_hold.subscribe();
        let named = args.model.clone().or_else(|| config.model.default.clone());
        let weights = model.as_ref().ok().and_then(Option::as_ref);
        let judged_with = named.zip(weights.map(|model| model.weights));
        match model {
            Ok(model) => {
                let service = Service::new(Handle::current(), Vec::new(), settings(config));
                let registry = self.daemon_node.node.call_server().registry();
                local_service::offer_chats(registry, &service, config)?;
                match model {
                    Some(model) => {
                        service.add_model(shared_model(&self.daemon_node, home, &model, config)?);
                        let (home, parts) = (home.clone(), Arc::clone(&parts));
                        tokio::spawn(offer_file(home, parts, model, stop.clone()));
                    }
                    None => {
                        may_hold.send_replace(false);
                        let follower = Follower {
                            cx: cx.clone(),
                            home: home.clone(),
                            node: Arc::clone(&self.daemon_node),
                            layer_host: Arc::clone(&self.layer_host),
                            service: service.clone(),
                            parts: Arc::clone(&parts),
                            private: args.answers.private,
                            from: args.from.clone(),
                            engine,
                            tell: Arc::clone(&tell),
                            is_ready: may_hold,
                        };
                        self.layers = Some(tokio::spawn(follower.run(stop.clone())));
                    }
                }
                self.chats = Some(service);
            }
            // An explicit HTTP address requires chats.
            Err(why) if args.answers.http.is_some() => return Err(why),
            Err(why) => note(format!(
                "no chats for programs on this machine: {}",
                why.with_hint()
            )),
        }
        let evidence = EvidenceFolder::of(&home.dir);
        let busy = self.busy();
        self.serve_parts(parts, evidence.clone(), Arc::clone(&busy));
        let inference = &config.research.distributed_inference;
        let found = inference.disputes;
        let found = found.then(|| disputes::found(&self.daemon_node.health));
        let judge = inference.judge_disputes.then(|| Judge {
            cx: cx.clone(),
            model: judged_with,
            busy,
        });
        let disputes = Disputes::new(home, &self.daemon_node, evidence, judge);
        tokio::spawn(disputes.run(found, stop.clone()));
        let node = Arc::clone(&self.daemon_node);
        tokio::spawn(remove_dropped(home.clone(), node, stop.clone()));
        let measurer = Measurer {
            home: home.clone(),
            config: config.clone(),
            node: Arc::clone(&self.daemon_node),
            layer_host: Arc::clone(&self.layer_host),
            chats: self.chats.clone(),
            is_ready,
        };
        tokio::spawn(measurer.run(stop.clone()));
        if let Some(request) = request {
            let host = Arc::clone(&self.layer_host);
            self.layers = Some(tokio::spawn(async move {
                host.serve(request, tell, stop).await
            }));
        }
        if let Some(chats) = &self.chats {
            let listen = args.answers.http.as_deref();
            let pause = Arc::clone(&self.layer_host.watch);
            let node = PageNode {
                home: home.clone(),
                config: config.clone(),
                node: Arc::clone(&self.daemon_node),
                pause,
            };
            let opened = open_http(chats, Some(node), listen, &home.dir, config).await;
            let what = "HTTP for programs on this machine";
            self.http = unless_taken(opened, listen.is_some(), what)?;
        }
        let http = self.http.as_ref();
        let url = http.map(|http| format!("{}/v1", http.url()));
        let keys = http.and_then(HttpServer::named_keys);
        let (told, key_file) = (&self.daemon_node.told, key_file(config));
        told.show_http(url.clone(), key_file.as_deref(), keys);
        match args.for_layers {
            true if args.json => Ok(()),
            true => print(local_endpoints(home, url.as_deref())),
            false => ready(args, home, &self.daemon_node, level, url.as_deref()),
        }
    }

    /// Whether this node answers or computes.
    fn busy(&self) -> Busy {
        // Weak, since the host holds the node, and the node holds this function.
        let (chats, host) = (self.chats.clone(), Arc::downgrade(&self.layer_host));
        Arc::new(move || {
            are_answered(chats.as_ref()) || host.upgrade().is_some_and(|host| host.is_computing())
        })
    }

    /// Lets members read the parts of models and the evidence here. Their transfer slows down while
    /// this node is busy.
    fn serve_parts(&self, parts: Arc<Parts>, evidence: EvidenceFolder, busy: Busy) {
        let open = Arc::clone(&parts);
        self.daemon_node.show_holdings(move |model, pieces| {
            let part = open.get(&model.weights)?;
            Some(layers_in(part.table(), model.layers, pieces))
        });
        let shelf = Shelf { parts, evidence };
        let node = &self.daemon_node.node;
        node.serve_weights(Arc::new(shelf), busy);
    }

    /// Runs until a stop or until membership is lost, then shuts down.
    async fn run(mut self, args: &RunArgs, home: &Home, stop: &Stop) -> Result<(), Failure> {
        let outcome = loop {
            tokio::select! {
                () = stop.asked() => break Ok(()),
                why = lost(home) => break Err(why),
                Some(ended) = OptionFuture::from(self.layers.as_mut()) => {
                    self.layers = None;
                    match ended.map_err(Failure::internal).flatten() {
                        outcome if args.for_layers => break outcome,
                        Ok(()) => {}
                        Err(why) => {
                            note(format!("layers are no longer served: {}", why.with_hint()));
                        }
                    }
                }
            }
        };
        self.end(args, stop).await;
        outcome
    }

    /// Shuts down in request, or at once after a second request.
    async fn end(self, args: &RunArgs, stop: &Stop) {
        if !args.json {
            note("stopping");
        }
        tokio::select! {
            () = self.leave() => {}
            () = stop.asked_twice() => {}
        }
    }

    async fn leave(self) {
        self.numbers.health.send_replace(Health::Leaving);
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
        drop(self.counting);
        self.contributions.count(0);
        tokio::time::sleep(WITHDRAW_GRACE).await;
        self.daemon_node.stop().await;
        self.numbers.close().await;
    }
}

/// Last part of a capability's name, as announced in discovery.
fn short_name(capability: &str) -> String {
    let name = capability.split('@').next().unwrap_or(capability);
    name.split('.').next_back().unwrap_or(name).to_owned()
}

/// Resolves when this node is no longer a member.
async fn lost(home: &Home) -> Failure {
    let mut changes = home.log.changes();
    loop {
        if let Err(failure) = home.level() {
            return failure;
        }
        if changes.changed().await.is_err() {
            // The log outlives this task, so no further change can arrive.
            std::future::pending::<()>().await;
        }
    }
}

fn ready(
    args: &RunArgs,
    home: &Home,
    daemon_node: &DaemonNode,
    level: Level,
    url: Option<&str>,
) -> Result<(), Failure> {
    let state = home.state();
    let addresses = daemon_node.addresses();
    if args.json {
        return print_json(&json!({
            "node": home.key.id().to_string(),
            "community": state.name,
            "level": level,
            "addresses": addresses,
            "url": url,
        }));
    }
    let (who, community) = (state.label(&home.key.id(), now_ms()), &state.name);
    let (addresses, local) = (addresses.join(", "), local_endpoints(home, url));
    print(format!(
        "{who} is in {community:?} as {level}\n  address   {addresses}\n{local}"
    ))?;
    if level >= Level::Trusted {
        note("nodes with an invite code can join through this node");
    }
    Ok(())
}
