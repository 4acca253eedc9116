//! Serves layers to members of the community from a daemon, and advertises them in the log.
//!
//! ```text
//!             right lost, pause                    other layers are needed more
//!  suspended <------------- serving <----------------------------------+
//!      |                      ^  |                                     |
//!      +-- right, and give ---+  +-- fetch, withdraw, drain, load -----+
//! ```
//!
//! A host whose unloaded weights cannot be loaded again withdraws, and loads them like a new one.
//! `manners.rs` decides about pauses, `choose_layers.rs` about moves.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, OptionFuture, join};
use hearthnet_bus::log::Body;
use hearthnet_bus::{Descriptor, NodeId};
use hearthnet_http::Health;
use hearthnet_orchestrator::placement::{missing, runs_text};
use hearthnet_shard::RunningHost;
use tokio::time::Instant;

use super::choose_layers::Chooser;
use super::layer_events::{EventSink, LayerEvent};
use super::layer_host::{ANSWERED, LayerHost, Place};
use super::layer_request::{LayerRequest, Memory};
use super::manners::{Give, Why};
use super::ranges::Range;
use super::watch::{RELEASE_WITHIN, reason};
use crate::cli::args::Layers;
use crate::cli::{Failure, Stop};
use crate::hosting::host_config::{Ready, engine_failed, shard_config, stopping};
use crate::hosting::host_engine::no_layer_fits;
use crate::node::wait_until_synced;

/// Interval of advertisements. An advertisement is valid for four times as long.
const HEARTBEAT: Duration = Duration::from_secs(30);
/// Shortest interval between advertisements when the load changes.
const LOAD_NEWS: Duration = Duration::from_secs(5);
/// Poll interval for the host's load and for other advertisements.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Time without moves after a fetch that failed, and between attempts to load a file that is gone.
const RETRY: Duration = Duration::from_secs(60);

impl LayerHost {
    /// Serves layers until `stop`, or until an error. Without the right to serve it waits, and
    /// reports that.
    ///
    /// # Errors
    /// Returns an error if layers of the model are served already, if the layers cannot be loaded,
    /// if the engine fails, or if this node is no longer a member.
    pub(crate) async fn serve(
        &self,
        request: LayerRequest,
        tell: EventSink,
        stop: Stop,
    ) -> Result<(), Failure> {
        let mut changes = self.ranges.subscribe();
        let place = loop {
            changes.mark_unchanged();
            match self.place(&request)? {
                Some(place) => break place,
                // The previous range is draining its streams.
                None => tokio::select! {
                    _ = changes.changed() => {}
                    () = stop.asked() => return Ok(()),
                },
            }
        };
        let serving = Serving {
            own: self.home.key.id(),
            host: self,
            place,
            request,
            tell,
            stop,
        };
        serving.run().await
    }
}

/// Outcome of serving one range.
enum Next {
    Move((u32, u32)),
    /// Only these layers fit into the memory.
    Keep((u32, u32)),
    /// The weights were unloaded, and cannot be loaded again for this reason.
    Reload(String),
    Stop,
    /// The right to serve is lost, for now.
    Suspend(Failure),
    /// This machine gives nothing to others for now.
    Pause(Why),
}

/// Report about the layers that no reachable host serves.
#[derive(PartialEq, Eq)]
struct Lacking {
    missing: Vec<(u32, u32)>,
    /// Memory or disk that this host lacks to serve all layers, if it is left alone.
    lacks: Option<String>,
}

/// Range to which this host moves, and the fetch of its layers.
type Fetching<'a> = ((u32, u32), BoxFuture<'a, Result<(), Failure>>);

struct Serving<'a> {
    host: &'a LayerHost,
    place: Place<'a>,
    own: NodeId,
    request: LayerRequest,
    tell: EventSink,
    stop: Stop,
}

impl Serving<'_> {
    fn total(&self) -> u32 {
        self.request.model.file.spec().layers
    }

    /// Serves ranges one after another, until a stop or an error.
    async fn run(&self) -> Result<(), Failure> {
        let (host, asked) = (self.host, &self.request);
        let model = &asked.model;
        let on_disk = match &asked.fetch {
            Some((fetcher, part)) if asked.layers == Layers::Auto => {
                fetcher.layers_on_disk(part, asked.models).await?
            }
            _ => self.total(),
        };
        let (node, of) = (&host.daemon_node.node, (model, &asked.engine));
        let layers = (asked.layers, on_disk);
        let mut chooser = Chooser::new(&host.home, node, of, layers, self.budget())?;
        self.take_budget(&mut chooser);
        let mut chosen = None;
        // Why the weights could not be loaded again, until they are.
        let mut lost: Option<String> = None;
        loop {
            tokio::select! {
                right = self.until_allowed() => right?,
                () = self.stop.asked() => return Ok(()),
            }
            tokio::select! {
                () = self.until_given() => {}
                () = self.stop.asked() => return Ok(()),
            }
            let range = match chosen.take() {
                // The memory may have shrunk since it was chosen.
                Some(range) if self.fits(range)? => range,
                _ => tokio::select! {
                    range = self.first_range(&mut chooser) => range?,
                    () = self.stop.asked() => return Ok(()),
                },
            };
            let running = tokio::select! {
                running = self.start(range) => running,
                () = self.stop.asked() => return Ok(()),
                // Ends the start.
                _ = self.pause() => continue,
            };
            let running = match running {
                Ok(running) => running,
                // The user's own file may come back, for instance with its drive.
                Err(why) if lost.is_some() && self.request.fetch.is_none() => {
                    let text = Some(why.to_string());
                    if lost != text {
                        let back =
                            "if the file comes back, its layers are served again within a minute";
                        self.suspended(&why.beside_hint(back));
                        lost = text;
                    }
                    chosen = Some(range);
                    tokio::select! {
                        () = tokio::time::sleep(RETRY) => continue,
                        () = self.stop.asked() => return Ok(()),
                    }
                }
                Err(why) => return Err(why),
            };
            lost = None;
            self.place.set(Range::begins);
            let rows = running.given_layer_rows();
            host.computed.begin(model.weights, rows, self.total());
            let next = self.serve(&running, range, &mut chooser).await;
            let ends = matches!(next, Ok(Next::Stop) | Err(_));
            self.place.set(|range| {
                range.is_computing = false;
                range.is_leaving = ends;
                range.health = match ends {
                    true => Health::Leaving,
                    false => Health::Starting,
                };
            });
            // First, so that no caller opens a stream that would have to move.
            let shard_id = running.descriptor().shard_id;
            self.host.served.remove(&shard_id);
            self.place.set_serving(Ok(None));
            let settings = &self.host.config.research.distributed_inference.host;
            let mut within = Duration::from_secs(settings.drain_seconds.0);
            match &next {
                Ok(Next::Move((lo, hi))) => {
                    chooser.moves_to((*lo, *hi));
                    self.say(format!("moving to layers {lo}-{hi}, which are needed more"));
                }
                Ok(Next::Keep((lo, hi))) => self.say(format!(
                    "keeping only layers {lo}-{hi}: another model gets a part of the memory"
                )),
                Ok(Next::Reload(why)) => {
                    let (lo, hi) = range;
                    self.say(format!(
                        "layers {lo}-{hi} are withdrawn, because their weights cannot be loaded again: {why}"
                    ));
                }
                Ok(Next::Stop) => self.say(stopping(settings)),
                Ok(Next::Pause(why)) => {
                    self.place.set_serving(Err(reason(why).to_string()));
                    if *why == Why::Memory {
                        within = within.min(RELEASE_WITHIN);
                    }
                }
                // Without an engine, or without the right to serve, streams end at once.
                Ok(Next::Suspend(_)) | Err(_) => within = Duration::ZERO,
            }
            tokio::select! {
                // Streams do not wait for the disk of the log.
                _ = join(self.withdraw(shard_id), running.shutdown(within)) => {}
                () = self.stop.asked_twice() => return Ok(()),
                // Memory ran short while streams were drained.
                () = self.until_memory_is_short(), if within > RELEASE_WITHIN => {}
            }
            host.computed.end(model.weights);
            match next? {
                Next::Move(range) | Next::Keep(range) => chosen = Some(range),
                Next::Reload(why) => (chosen, lost) = (Some(range), Some(why)),
                Next::Stop => return Ok(()),
                // The missing range may have changed by then, so it is chosen again.
                Next::Suspend(why) => self.suspended(&why),
                Next::Pause(_) => {}
            }
        }
    }

    /// Memory, and the number of layers of which the KV budget holds a page.
    fn budget(&self) -> (Memory, u32) {
        let memory = self.place.memory();
        let in_kv = self.request.layers_with_kv(memory.kv, &self.host.config);
        (memory, in_kv)
    }

    /// Whether the memory holds these layers.
    fn fits(&self, (lo, hi): (u32, u32)) -> Result<bool, Failure> {
        let (memory, in_kv) = self.budget();
        let layers = hi.saturating_sub(lo).saturating_add(1);
        Ok(layers <= in_kv && self.request.bytes((lo, hi))? <= memory.weights)
    }

    /// Takes over the memory of the range, which changes with the number of adopted models.
    fn take_budget(&self, chooser: &mut Chooser) {
        chooser.set_budget(self.budget());
        if let Some(room) = chooser.room() {
            self.place.set_room(room);
        }
    }

    fn say(&self, line: impl Into<String>) {
        let line: String = line.into();
        let ranges = self.host.ranges.borrow().len();
        let text = match ranges.max(self.request.models) {
            0 | 1 => line,
            _ => format!("{}: {line}", self.request.model.id),
        };
        (self.tell)(LayerEvent::Line { text });
    }

    fn suspended(&self, why: &Failure) {
        self.place.set_serving(Err(why.to_string()));
        self.say(format!("no layers are served for now: {}", why.with_hint()));
    }

    /// Waits for the right to serve. Returns an error if this node is no longer a member.
    async fn until_allowed(&self) -> Result<(), Failure> {
        let host = self.host;
        // Before the first look at the log, so that no change is missed.
        let mut changes = host.home.log.changes();
        let mut right = host.settled_right(&self.tell).await;
        let mut said = None;
        while let Err(why) = right {
            // A revoked or frozen node does not wait.
            host.home.level()?;
            let text = why.to_string();
            if said.as_ref() != Some(&text) {
                self.suspended(&why);
                said = Some(text);
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            right = host.right();
        }
        if said.is_some() {
            self.say("this node may serve layers again");
        }
        Ok(())
    }

    /// Waits until this machine gives memory and time to others, and reports why it does not.
    async fn until_given(&self) {
        let mut give = self.host.watch.give();
        let mut said = None;
        loop {
            let Give::Pause(why) = *give.borrow_and_update() else {
                break;
            };
            if said != Some(why) {
                self.suspended(&reason(&why));
                said = Some(why);
            }
            if give.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
        if said.is_some() {
            self.say("layers are served again");
        }
    }

    /// Resolves when this machine gives nothing to others.
    async fn pause(&self) -> Why {
        self.pause_that(|_| true).await
    }

    /// Resolves when memory is short.
    async fn until_memory_is_short(&self) {
        self.pause_that(|why| why == Why::Memory).await;
    }

    async fn pause_that(&self, is: impl Fn(Why) -> bool) -> Why {
        let mut give = self.host.watch.give();
        loop {
            match *give.borrow_and_update() {
                Give::Pause(why) if is(why) => return why,
                _ => {}
            }
            if give.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    async fn first_range(&self, chooser: &mut Chooser) -> Result<(u32, u32), Failure> {
        if let Layers::Range(lo, hi) = self.request.layers {
            return Ok((lo, hi));
        }
        self.say("looking at what the community serves");
        wait_until_synced(&self.host.daemon_node.node).await;
        self.take_budget(chooser);
        chooser.look();
        if let Some(range) = chooser.first(|layer| self.is_here((layer, layer))) {
            self.request.check_here(range)?;
            return Ok(range);
        }
        let LayerRequest { model, models, .. } = &self.request;
        let memory = self.place.memory();
        self.request
            .check_kv_of_any(1, memory.kv, &self.host.config)?;
        let layers = self.request.engine.layer_bytes(&model.file)?;
        let is_shared = *models > 1 || self.host.ranges.borrow().len() > 1;
        Err(no_layer_fits(&model.id, &layers, memory.weights, is_shared))
    }

    async fn start(&self, range: (u32, u32)) -> Result<RunningHost, Failure> {
        let (all, daemon_node) = (&self.host.config, &self.host.daemon_node);
        let listen = daemon_node.node.listen_addr();
        let listen = listen.map_or_else(String::new, |at| at.to_string());
        let endpoint = daemon_node.addresses().into_iter().next();
        let (model, threads) = (&self.request.model, self.request.threads);
        let config = || {
            let mut config = shard_config(model, range, &listen, threads, all);
            config.serve.endpoint.clone_from(&endpoint);
            config.serve.kv_budget_bytes = self.place.memory().kv;
            config
        };
        let engine = &self.request.engine;
        let (lo, hi) = range;
        if let Some((fetcher, part)) = &self.request.fetch {
            fetcher.fetch(part, part.table().of_layers(lo, hi)).await?;
        }
        // Missing layers are refused by the engine.
        let held = self.request.bytes(range)?;
        self.place.set(|range| range.held = held);
        let started = engine.start(config(), &daemon_node.node, &listen).await;
        let (Err(why), Some((fetcher, part))) = (&started, &self.request.fetch) else {
            return started;
        };
        // A damaged piece ends the load.
        let wanted = part.table().of_layers(lo, hi);
        if !fetcher.finds_damage(part, &wanted).await? {
            return started;
        }
        self.say(format!("{why}; fetching the damaged pieces again"));
        fetcher.fetch(part, wanted).await?;
        engine.start(config(), &daemon_node.node, &listen).await
    }

    /// Advertises and watches, until another range is needed more, or until a stop.
    async fn serve(
        &self,
        running: &RunningHost,
        range: (u32, u32),
        chooser: &mut Chooser,
    ) -> Result<Next, Failure> {
        self.advertise(running).await?;
        let descriptor = running.descriptor();
        let address = format!("{}#{}", descriptor.endpoint, self.own);
        let shard = descriptor.shard_id;
        self.place.set_serving(Ok(Some(shard)));
        let ready = Ready::of(running, address, self.host.metrics.clone());
        (self.tell)(LayerEvent::Ready(Box::new(ready)));
        let mut lacking = None;
        let mut said = (Instant::now(), self.description(running));
        let mut wait_limits = chooser.wait_limits();
        let mut fetching: Option<Fetching<'_>> = None;
        let mut moves_from = Instant::now();
        let mut changes = self.host.home.log.changes();
        let (mut steps, mut computing) = (0, false);
        loop {
            let computed = running.stats().steps;
            let computes = computed != std::mem::replace(&mut steps, computed);
            if std::mem::replace(&mut computing, computes) != computes {
                self.place.set(|range| range.is_computing = computes);
            }
            if computes {
                moves_from = moves_from.max(Instant::now() + ANSWERED);
            }
            chooser.look();
            self.tell_whole(range, chooser, &mut lacking);
            let fetch = fetching.as_mut().map(|(_, done)| done);
            tokio::select! {
                () = running.failed() => return Err(engine_failed()),
                why = running.unavailable() => return Ok(Next::Reload(why)),
                () = self.stop.asked() => return Ok(Next::Stop),
                why = self.pause() => return Ok(Next::Pause(why)),
                Some(fetched) = OptionFuture::from(fetch) => {
                    fetching = None;
                    if let Err(why) = fetched {
                        self.gives_up_fetch(range);
                        let why = why.with_hint();
                        self.say(format!("no move to other layers for now: {why}"));
                        moves_from = Instant::now() + RETRY;
                    }
                }
                _ = changes.changed() => {}
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
            // The right may end at any time: of this node, or of the whole community.
            if let Err(why) = self.host.right() {
                // Membership does not come back.
                self.host.home.level()?;
                return Ok(Next::Suspend(why));
            }
            let now = self.description(running);
            let moved = now.endpoint != said.1.endpoint;
            let news = moved || now.queue_depth != said.1.queue_depth;
            let due = said.0.elapsed() >= HEARTBEAT || (news && said.0.elapsed() >= LOAD_NEWS);
            if due {
                // A full disk may be temporary; meanwhile the last advertisement expires.
                if let Err(error) = self.advertise(running).await {
                    tracing::warn!("not advertised: {error}");
                }
                said = (Instant::now(), now);
            }
            self.take_budget(chooser);
            running.set_kv_budget(self.place.memory().kv);
            let is_idle = Instant::now() >= moves_from;
            if let Some(kept) = chooser.kept(range, self.place.is_too_large(), is_idle) {
                return Ok(Next::Keep(kept));
            }
            match chooser.due(range, &mut wait_limits).await {
                None => {
                    if fetching.take().is_some() {
                        self.gives_up_fetch(range);
                    }
                }
                Some(_) if Instant::now() < moves_from => {}
                Some(next) if self.is_here(next) => return Ok(Next::Move(next)),
                Some(next) if fetching.as_ref().is_some_and(|(to, _)| *to == next) => {}
                Some(next) => fetching = self.fetching(range, next),
            }
        }
    }

    /// Whether the weights of these layers are on this machine.
    fn is_here(&self, (lo, hi): (u32, u32)) -> bool {
        let Some((_, part)) = &self.request.fetch else {
            return self.request.model.file.holds_layers(lo, hi);
        };
        part.missing(&part.table().of_layers(lo, hi)).is_empty()
    }

    /// Begins to fetch layers `next` while `range` is served. Dropping the result ends the fetch.
    fn fetching(&self, range: (u32, u32), next: (u32, u32)) -> Option<Fetching<'_>> {
        let (fetcher, part) = self.request.fetch.as_ref()?;
        let [served, wanted] = [range, next].map(|(lo, hi)| part.table().of_layers(lo, hi));
        Some((next, fetcher.fetch_beside(part, wanted, served).boxed()))
    }

    /// Only the pieces of `range` are in use again.
    fn gives_up_fetch(&self, (lo, hi): (u32, u32)) {
        if let Some((fetcher, part)) = &self.request.fetch {
            fetcher.serves(part, part.table().of_layers(lo, hi));
        }
    }

    /// Reports when the layers change that no reachable host serves, given that this host serves
    /// `range`, or what it lacks to take them. `said` is the last report.
    fn tell_whole(&self, range: (u32, u32), chooser: &Chooser, said: &mut Option<Lacking>) {
        let mut held = chooser.served_by_others();
        held.push(range);
        let missing = missing(self.total(), &held);
        let lacks = chooser.lacks().filter(|_| !missing.is_empty());
        let now = Lacking { missing, lacks };
        if said.as_ref() == Some(&now) {
            return;
        }
        let state = self.host.home.state();
        let name = &state.name;
        let command = match state.model(&self.request.model.weights.0) {
            Some(_) => "hearthnet up",
            None => "hearthnet serve --layers auto",
        };
        self.say(match now.missing.as_slice() {
            [] => format!(
                "{name:?} serves the whole model now: `hearthnet chat \"...\"` on any member"
            ),
            lacking => format!(
                "layers {} are {} missing: `{command}` on another trusted machine serves them{}",
                runs_text(lacking),
                match said {
                    Some(before) if before.missing.is_empty() => "now",
                    _ => "still",
                },
                match &now.lacks {
                    Some(lacks) => format!(". {lacks}"),
                    None => String::new(),
                }
            ),
        });
        *said = Some(now);
    }

    /// Descriptor to advertise, with the current address of the listener.
    fn description(&self, running: &RunningHost) -> Descriptor {
        let mut descriptor = running.descriptor();
        if let Some(address) = self.host.daemon_node.addresses().into_iter().next() {
            descriptor.endpoint = address;
        }
        descriptor
    }

    async fn advertise(&self, running: &RunningHost) -> Result<(), Failure> {
        let descriptor = self.description(running);
        self.host.served.set(descriptor.clone());
        let body = Body::ShardAdvertised(Box::new(descriptor));
        self.host.home.append_own(body).await
    }

    async fn withdraw(&self, shard_id: String) {
        let body = Body::ShardWithdrawn { shard_id };
        // If this fails, the advertisement expires by itself.
        if let Err(error) = self.host.home.append_own(body).await {
            tracing::warn!("not withdrawn: {error}");
        }
    }
}
