//! `hearthnet shard serve` in a community: layers for its members, advertised in the log.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::{Registry, SHARD_SERVE, Served, register_shards};
use hearthnet_bus::log::{Body, Level};
use hearthnet_bus::{Descriptor, NodeId};
use hearthnet_orchestrator::ChatError;
use hearthnet_orchestrator::http::Health;
use hearthnet_shard::{RunningHost, ServeConfig, ShardConfig, ShardHost, StartProgress};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::args::{Global, Layers, ServeArgs};
use crate::commands::shard::{
    Ready, announcement, resident_bytes, serve_config, start_failure, stop_requests, stopping,
};
use crate::commands::{OpenModel, engine_options, open_model, print_bytes, print_json};
use crate::community::{Home, log_failure, now_ms};
use crate::config::Config;
use crate::coverage::held_by_others;
use crate::failure::{Failure, Kind};
use crate::layers::{Held, Patience, choose, room, runs_text, settle};
use crate::node::{Resident, settle_in};
use crate::numbers::Numbers;
use crate::output::{Progress, bytes, note};

/// How often an advertisement is renewed; it holds for four times as long (M26 section 5.1).
const HEARTBEAT: Duration = Duration::from_secs(30);
/// How soon after an advertisement a change of the load is worth another one.
const LOAD_NEWS: Duration = Duration::from_secs(5);
/// How often the host looks at its load and at what others advertise.
const LOOK: Duration = Duration::from_millis(500);
/// How long peers have to hear that a shard is withdrawn before the connections end.
const LAST_WORDS: Duration = Duration::from_millis(300);

pub(crate) async fn serve(
    args: ServeArgs,
    home: Home,
    global: &Global,
    config: &Config,
) -> Result<(), Failure> {
    // Signals count from here on: a Ctrl-C while loading ends the program cleanly, too.
    let mut stop = stop_requests(args.lifeline)?;
    home.require_research(config)?;
    home.require(Level::Trusted, "serve layers")?;
    let numbers = Numbers::open(args.metrics.as_deref(), config).await?;
    let model = open_model(global, &args.model)?;
    let total = model.file.spec().layers;
    if let Layers::Range(lo, hi) = args.layers
        && hi >= total
    {
        return Err(Failure::new(
            Kind::BadRequest,
            format!(
                "layers {lo}-{hi} do not exist: {} has layers 0-{}",
                model.id,
                total.saturating_sub(1)
            ),
        )
        .hint("--layers auto chooses what the community lacks"));
    }
    let (registry, served) = (Arc::new(Registry::new()), Arc::new(Served::default()));
    register_shards(
        &registry,
        Arc::clone(&home.key),
        home.log.clone(),
        Arc::clone(&served),
    )
    .map_err(Failure::internal)?;
    let caps = vec![short_name(SHARD_SERVE)];
    let resident = Resident::start(&home, config, args.listen.as_deref(), registry, caps).await?;
    let serving = Serving {
        room: room_here(&model, config),
        args,
        home,
        config,
        model,
        served,
        resident,
        numbers,
    };
    let outcome = serving.run(&mut stop).await;
    serving.leave(&mut stop).await;
    outcome
}

/// How serving a range ends.
enum Next {
    /// Other layers are needed more.
    Move((u32, u32)),
    /// The program was asked to stop.
    Stop,
}

/// The last part of a capability's name, which is enough to announce.
fn short_name(capability: &str) -> String {
    let name = capability.split('@').next().unwrap_or(capability);
    name.split('.').next_back().unwrap_or(name).to_owned()
}

/// Layers that this machine has memory for.
fn room_here(model: &OpenModel, config: &Config) -> u32 {
    let host = &config.research.distributed_inference.host;
    let layers: Vec<u64> = (0..model.file.spec().layers)
        .map(|layer| model.file.layer_bytes(layer))
        .collect();
    room(
        crate::memory::weights_budget(host.memory_budget_mb),
        &layers,
    )
}

struct Serving<'a> {
    args: ServeArgs,
    home: Home,
    config: &'a Config,
    model: OpenModel,
    room: u32,
    served: Arc<Served>,
    resident: Resident,
    numbers: Numbers,
}

impl Serving<'_> {
    fn own(&self) -> NodeId {
        self.home.key.id()
    }

    fn total(&self) -> u32 {
        self.model.file.spec().layers
    }

    /// What others serve of this model now.
    fn others(&self) -> Vec<Held> {
        let state = self.home.state();
        held_by_others(
            state.shards(now_ms()),
            self.own(),
            &self.model.weights.to_string(),
            self.total(),
        )
    }

    /// Serves one range after another, until the host fails or loses its right.
    async fn run(&self, stop: &mut mpsc::Receiver<()>) -> Result<(), Failure> {
        let mut range = tokio::select! {
            range = self.first_range() => range?,
            _ = stop.recv() => return Err(ChatError::Cancelled.into()),
        };
        loop {
            let host = tokio::select! {
                host = self.start(range) => host?,
                _ = stop.recv() => return Err(ChatError::Cancelled.into()),
            };
            self.numbers.say(Health::Serving);
            let next = self.serve(&host, range, stop).await;
            self.numbers.say(match next {
                Ok(Next::Move(_)) => Health::Starting,
                _ => Health::Leaving,
            });
            // First of all, so that nobody comes any more who would have to move.
            self.withdraw(&host.descriptor());
            let settings = &self.config.research.distributed_inference.host;
            let mut within = Duration::from_secs(settings.drain_seconds);
            match &next {
                Ok(Next::Move((lo, hi))) => {
                    self.say(format!("moving to layers {lo}-{hi}, which are needed more"));
                }
                Ok(Next::Stop) => self.say(stopping(settings)),
                // Without an engine, or the right to serve, nothing goes on.
                Err(_) => within = Duration::ZERO,
            }
            tokio::select! {
                _ = host.shutdown(within) => {}
                // Asked twice: at once, then.
                _ = stop.recv() => return Ok(()),
            }
            match next? {
                Next::Move(next) => range = next,
                Next::Stop => return Ok(()),
            }
        }
    }

    fn say(&self, line: impl AsRef<str>) {
        if !self.args.json {
            note(line);
        }
    }

    async fn first_range(&self) -> Result<(u32, u32), Failure> {
        if let Layers::Range(lo, hi) = self.args.layers {
            return Ok((lo, hi));
        }
        self.say("looking at what the community serves");
        settle_in(&self.resident.node).await;
        let host = &self.config.research.distributed_inference.host;
        choose(self.total(), self.room, &self.others()).ok_or_else(|| {
            Failure::new(
                Kind::Host,
                format!(
                    "not one layer of {} ({} each) fits into the memory for weights ({})",
                    self.model.id,
                    bytes(self.model.file.layer_bytes(0)),
                    bytes(crate::memory::weights_budget(host.memory_budget_mb)),
                ),
            )
            .hint("research.distributed_inference.host.memory_budget_mb sets how much it may take")
        })
    }

    async fn start(&self, (lo, hi): (u32, u32)) -> Result<RunningHost, Failure> {
        let settings = &self.config.research.distributed_inference.host;
        let listen = self
            .resident
            .node
            .listen_addr()
            .map_or_else(String::new, |a| a.to_string());
        let endpoint = self.resident.addresses().into_iter().next();
        let config = ShardConfig {
            model_id: Some(self.model.id.clone()),
            expected_weights: Some(self.model.weights),
            engine: engine_options(self.config, self.args.threads),
            serve: ServeConfig {
                endpoint,
                transport: self.config.transport()?,
                ..serve_config(settings, &listen)
            },
            ..ShardConfig::new(&self.model.path, (lo, hi), &listen)
        };
        let mut bar = None;
        let mut phase = "";
        let host = ShardHost::start_in(config, &self.resident.node, move |step| {
            let (what, done, total) = match step {
                StartProgress::Hashing { done, total } => ("hashing the model", done, total),
                StartProgress::Verifying { done, total } => ("checking the layers", done, total),
                StartProgress::Loading { done, total } => ("loading the layers", done, total),
                _ => return,
            };
            if phase != what {
                (bar, phase) = (Some(Progress::new(what)), what);
            }
            if let Some(bar) = &mut bar {
                bar.set(done, total);
            }
        })
        .await
        .map_err(|e| start_failure(&listen, &e))?;
        Ok(host)
    }

    /// Advertises and watches, until there is a better range to serve, or no more to do.
    async fn serve(
        &self,
        host: &RunningHost,
        range: (u32, u32),
        stop: &mut mpsc::Receiver<()>,
    ) -> Result<Next, Failure> {
        self.advertise(host)?;
        self.resident.set_serving(Some(host.descriptor().shard_id));
        self.announce(host)?;
        let mut said = (Instant::now(), host.descriptor().queue_depth);
        let mut patience = Patience::new(now_ms());
        let mut changes = self.home.log.changes();
        loop {
            tokio::select! {
                () = host.failed() => {
                    return Err(Failure::internal("the engine's thread ended unexpectedly"));
                }
                _ = stop.recv() => return Ok(Next::Stop),
                _ = changes.changed() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
            // Rights may end at any time: of this node, or of all to compute together.
            self.home.require_research(self.config)?;
            self.home.require(Level::Trusted, "serve layers")?;
            let depth = host.descriptor().queue_depth;
            let due =
                said.0.elapsed() >= HEARTBEAT || (depth != said.1 && said.0.elapsed() >= LOAD_NEWS);
            if due {
                match self.advertise(host) {
                    Ok(()) => {}
                    // A full disk passes; until then the last advertisement runs out.
                    Err(error) => tracing::warn!("not advertised: {error}"),
                }
                said = (Instant::now(), depth);
            }
            if self.args.layers == Layers::Auto {
                let mine = Held {
                    node: self.own(),
                    range,
                };
                let move_to = settle(self.total(), self.room, mine, &self.others());
                if let Some(next) = patience.look(now_ms(), move_to) {
                    return Ok(Next::Move(next));
                }
            }
        }
    }

    /// What the advertisement says: the host's own words.
    fn advertise(&self, host: &RunningHost) -> Result<(), Failure> {
        let descriptor = host.descriptor();
        self.served.set(descriptor.clone());
        let body = Body::ShardAdvertised(Box::new(descriptor));
        self.home
            .log
            .append(&self.home.key, body, now_ms())
            .map(|_| ())
            .map_err(|e| log_failure(&self.home.dir, &e))
    }

    fn withdraw(&self, descriptor: &Descriptor) {
        self.served.remove(&descriptor.shard_id);
        self.resident.set_serving(None);
        let body = Body::ShardWithdrawn {
            shard_id: descriptor.shard_id.clone(),
        };
        // If this fails, the advertisement runs out by itself.
        if let Err(error) = self.home.log.append(&self.home.key, body, now_ms()) {
            tracing::warn!("not withdrawn: {error}");
        }
    }

    fn announce(&self, host: &RunningHost) -> Result<(), Failure> {
        let descriptor = host.descriptor();
        let ready = Ready {
            address: format!("{}#{}", descriptor.endpoint, self.own()),
            weight_bytes: host.memory().weight_bytes,
            kv_bytes_per_position: host.memory().kv_bytes_per_position,
            resident_bytes: resident_bytes(std::process::id()),
            metrics: self.numbers.url(),
            descriptor,
        };
        if self.args.json {
            return print_json(&ready);
        }
        print_bytes(announcement(&ready).as_bytes())?;
        let mut held: Vec<(u32, u32)> = self.others().iter().map(|h| h.range).collect();
        held.push(ready.descriptor.layer_range);
        let missing = crate::layers::missing(self.total(), &held);
        note(if missing.is_empty() {
            format!(
                "{:?} serves the whole model now: `hearthnet chat \"...\"` on any member",
                self.home.state().name
            )
        } else {
            format!(
                "layers {} are still missing: `hearthnet shard serve` on another trusted machine",
                runs_text(&missing)
            )
        });
        Ok(())
    }

    async fn leave(self, stop: &mut mpsc::Receiver<()>) {
        tokio::select! {
            () = async {
                tokio::time::sleep(LAST_WORDS).await;
                self.resident.stop().await;
                self.numbers.close().await;
            } => {}
            // Asked twice: at once, then.
            _ = stop.recv() => {}
        }
    }
}
