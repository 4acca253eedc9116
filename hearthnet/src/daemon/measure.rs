//! Measures this node and announces it to members (`node.measured`), for plans and routes.
//!
//! | number | source |
//! |---|---|
//! | memory | as plans count it, for the layers that `[manners]` and the settings let this node hold; 0 while no layers may be served, or can be because no adopted model is open |
//! | share of the time online | hours in which the daemon ran (`home/online.rs`) |
//! | time per layer | a benchmark of held layers, unless the host's steps take longer |
//! | time of a step beside its layers | the host's steps less that benchmark, up to a limit |
//! | time per prefill row | that benchmark |
//! | time of the head | rows through it |
//! | delay of a link | this node's chats over the host, else small requests (`links.rs`) |
//! | bandwidth of a link | the best rate of weights from the member (`node/link_rates.rs`), else what a row of a chat shows |
//!
//! Benchmarks run while no chat is answered, in rounds of which the shortest counts: other programs may
//! disturb one. The data directory keeps the results for layers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{
    ADVERT_LIFE_MS, Body, LinkSpeed, MAX_LINK_SPEEDS, MAX_MODEL_SPEEDS, Measured, ModelSpeed,
};
use hearthnet_engine::bench::PROMPT_DEPTH;
use hearthnet_files::WeightsId;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::placement::observed::sharing;
use hearthnet_orchestrator::placement::plan::Model;
use hearthnet_orchestrator::placement::room;
use hearthnet_orchestrator::service::ServedModel;
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use super::chats::are_answered;
use super::layer_host::LayerHost;
use super::links::{Probed, chat_link, probed_link};
use super::manners::Give;
use super::news::is_news;
use super::rounds::Rounds;
use crate::cli::Stop;
use crate::cli::args::EngineKind;
use crate::config::Config;
use crate::home::{Home, Online, now_ms};
use crate::hosting::layer_times::{
    Times, benchmark, bytes_in_use, duration_us, sample, swept_beside, whole_us,
};
use crate::models::{given_bytes, share_of_free, weights_budget};
use crate::node::{DaemonNode, wait_until_synced};
use crate::planning::shape;

/// Interval of measurements.
const INTERVAL: Duration = Duration::from_secs(40);
/// Life of an announcement.
const LIFE: Duration = Duration::from_millis(ADVERT_LIFE_MS);
/// Benchmarks of a model's layers, one per interval: other programs may disturb one.
const BENCHMARKS: u32 = 3;
/// Largest share of the free memory for a benchmark, in per cent.
const BENCHMARK_PERCENT: u64 = 25;

const TIMES_FILE: &str = "layer_times.json";
/// Longest file in bytes, and most entries.
const MAX_BYTES: u64 = 64 << 10;
const MAX_TIMES: usize = 64;

/// Limit of what a step takes beside its layers. A step that takes longer has slower layers than the
/// benchmark: something else computes on the machine.
const MAX_STEP_US: u32 = 500;

const HOUR_MS: u64 = 3_600_000;

/// Measures and announces; see the module.
pub(super) struct Measurer {
    pub(super) home: Home,
    pub(super) config: Config,
    pub(super) node: Arc<DaemonNode>,
    pub(super) layer_host: Arc<LayerHost>,
    pub(super) chats: Option<Service>,
    /// False while no adopted model is open, or at the start not all of them are.
    pub(super) is_ready: watch::Receiver<bool>,
}

/// Results of earlier rounds.
struct Known {
    heads: BTreeMap<WeightsId, Rounds>,
    /// By weights, instruction set, threads, size of the held layers and the head, and depth of the
    /// prompt.
    layers: BTreeMap<String, Times>,
    /// Models whose benchmark failed.
    failed: Vec<WeightsId>,
    probed: Probed,
}

impl Measurer {
    /// Measures and announces until a stop. Then withdraws the measurements, so that no plan counts on
    /// a node that has stopped.
    pub(super) async fn run(self, stop: Stop) {
        tokio::select! {
            () = stop.asked() => {}
            () = self.announce() => {}
        }
        let own = self.home.key.id();
        let state = self.home.state();
        if state.measured(now_ms()).any(|(node, _)| *node == own) {
            let nothing = Body::NodeMeasured(Measured::default());
            if let Err(error) = self.home.append_own(nothing).await {
                tracing::debug!("measurements are not withdrawn: {error}");
            }
        }
    }

    async fn announce(&self) {
        let started = Instant::now();
        let mut give = self.layer_host.watch.give();
        let mut is_ready = self.is_ready.clone();
        wait_until_synced(&self.node.node).await;
        let dir = &self.home.dir;
        let mut online = Online::read(dir);
        let mut known = Known {
            heads: BTreeMap::new(),
            layers: read_times(dir),
            failed: Vec::new(),
            probed: Probed::default(),
        };
        let mut said: Option<(Instant, Measured)> = None;
        loop {
            if online.note(now_ms() / HOUR_MS)
                && let Err(error) = online.write(dir)
            {
                tracing::debug!(%error, "the hours online are not stored");
            }
            // Before the measurement, which sees the models that are open by then.
            let holds_layers = *is_ready.borrow_and_update();
            if self.home.require_research(&self.config).is_ok() {
                let mut now = self.measure(&mut known, online.permille()).await;
                now.running_s = u32::try_from(started.elapsed().as_secs()).unwrap_or(u32::MAX);
                if *give.borrow_and_update() != Give::Serve || !holds_layers {
                    now.memory_bytes = 0;
                }
                let is_due = said.as_ref().is_none_or(|(at, before)| {
                    at.elapsed() + INTERVAL >= LIFE || is_news(before, &now)
                });
                let body = Body::NodeMeasured(now.clone());
                if is_due {
                    match self.home.append_own(body).await {
                        Ok(()) => said = Some((Instant::now(), now)),
                        // The disk may be full for a while.
                        Err(error) => tracing::debug!("measurements are not announced: {error}"),
                    }
                }
            }
            // A pause counts at once, and so do opened models.
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                Ok(()) = give.changed() => {}
                Ok(()) = is_ready.changed() => {}
            }
        }
    }

    async fn measure(&self, known: &mut Known, online_permille: u16) -> Measured {
        let models = self.chats.as_ref().map_or_else(Vec::new, Service::models);
        let mut speeds: BTreeMap<[u8; 32], ModelSpeed> = BTreeMap::new();
        for model in models.iter().take(MAX_MODEL_SPEEDS) {
            let times = self.layer_times(known, model).await;
            let speed = ModelSpeed {
                head_us: self.head_us(known, model).await,
                step_us: 0,
                weights: model.weights.0,
                layer_us: times.map_or(0, |times| times.layer_us),
                prefill_row_us: times.map_or(0, |times| times.prefill_row_us),
            };
            speeds.insert(model.weights.0, speed);
        }
        for host in self.layer_host.served.all() {
            let Ok(WeightsId(weights)) = host.weights_sha256.parse::<WeightsId>() else {
                continue;
            };
            let (lo, hi) = host.layer_range;
            let layers = hi.saturating_sub(lo).saturating_add(1);
            let took_us = whole_us(f64::from(host.ms_per_token) * 1e3);
            if took_us == 0 || (speeds.len() >= MAX_MODEL_SPEEDS && !speeds.contains_key(&weights))
            {
                continue;
            }
            let speed = speeds.entry(weights).or_insert(ModelSpeed {
                head_us: 0,
                step_us: 0,
                weights,
                layer_us: 0,
                prefill_row_us: 0,
            });
            (speed.step_us, speed.layer_us) = parts_of_step(took_us, layers, speed.layer_us);
        }
        let memory_bytes = self.memory(&models, &speeds);
        Measured {
            links: self.links(known).await,
            models: speeds.into_values().collect(),
            memory_bytes,
            online_permille,
            ..Measured::default()
        }
    }

    /// Memory that this node gives to any of the models, as plans count it: so a plan gives it no more
    /// layers than a host here can hold.
    fn memory(&self, models: &[Arc<ServedModel>], speeds: &BTreeMap<[u8; 32], ModelSpeed>) -> u64 {
        let (rooms, held) = {
            let ranges = self.layer_host.ranges.borrow();
            (ranges.rooms(), ranges.held())
        };
        let state = self.home.state();
        let sharing = sharing(&state, models.iter().map(|model| model.weights));
        let budget = weights_budget(&self.config, held) / sharing;
        let part = |model: &Arc<ServedModel>| {
            let shape = shape(&model.file, 0..model.file.spec().layers);
            let known = rooms.get(&model.weights).copied();
            let room = known.unwrap_or_else(|| room(budget, &shape.layer_bytes));
            // A plan leaves the head to a node that has measured it.
            let speed = speeds.get(&model.weights.0);
            let chats = speed.is_some_and(|it| it.head_us > 0);
            Part::new(&shape, room, chats)
        };
        let parts: Vec<Part> = models.iter().map(part).collect();
        announced_bytes(&parts, sharing, given_bytes(&self.config, held))
    }

    /// Links whose delay is known: first those of this node's chats.
    async fn links(&self, known: &mut Known) -> Vec<LinkSpeed> {
        let own = self.home.key.id();
        let mut ways = self.node.health.ways();
        ways.retain(|way| way.node != own);
        let chatted: BTreeSet<NodeId> = ways.iter().map(|way| way.node).collect();
        // Requests wait behind the pieces of a transfer.
        if !self.is_busy() && !self.node.is_downloading() {
            known.probed.refresh(&self.node.node, &chatted).await;
        }
        let rate = |node: &NodeId| self.node.link_rates.kbit_s(node);
        let chats = ways.iter().map(|way| chat_link(way, rate(&way.node)));
        let others = known.probed.delays();
        let others = others.filter(|(node, _)| !chatted.contains(node));
        let others = others.map(|(node, delay)| probed_link(node, delay, rate(&node)));
        chats.chain(others).take(MAX_LINK_SPEEDS).collect()
    }

    /// Whether a benchmark would disturb an answer, or be disturbed by one.
    fn is_busy(&self) -> bool {
        are_answered(self.chats.as_ref()) || self.layer_host.is_computing()
    }

    /// Time of a caller's head; 0 if it is not known yet.
    async fn head_us(&self, known: &mut Known, model: &Arc<ServedModel>) -> u32 {
        let rounds = known.heads.entry(model.weights).or_default();
        if rounds.is_due(Instant::now()) && !self.is_busy() {
            let served = Arc::clone(model);
            let budget = share_of_free(BENCHMARK_PERCENT);
            let swept = swept_beside(&model.file, model.file.head_bytes(), budget);
            let measured = spawn_blocking(move || served.text.head.measure(swept)).await;
            rounds.add(measured.ok().and_then(Result::ok), Instant::now());
        }
        let shortest = rounds.shortest();
        shortest.map_or(0, |took| duration_us(took).max(1))
    }

    /// Times of a layer of the model, from the benchmark.
    async fn layer_times(&self, known: &mut Known, model: &Arc<ServedModel>) -> Option<Times> {
        // Layers for others run on another engine.
        if self.config.research.distributed_inference.backend != EngineKind::Exact {
            return None;
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let options = self
            .config
            .engine_options(Some(self.config.host_threads(cores)));
        let (isa, threads) = (options.isa.name(), options.threads);
        // A home that holds more of the model reads more between two passes through a layer.
        let in_use = bytes_in_use(&model.file) >> 20;
        // Versions that timed the first chunk of a prompt stored shorter times.
        let key = format!(
            "{} {isa} {threads} {in_use} MiB at {PROMPT_DEPTH}",
            model.weights
        );
        let before = known.layers.get(&key).copied();
        let is_known = before.is_some_and(|times| times.runs >= BENCHMARKS);
        if is_known || self.is_busy() || known.failed.contains(&model.weights) {
            return before;
        }
        let Some(sample) = sample(&model.file, share_of_free(BENCHMARK_PERCENT)) else {
            return before;
        };
        let Some(times) = benchmark(Arc::clone(&model.file), sample, options).await else {
            known.failed.push(model.weights);
            return before;
        };
        let times = before.map_or(times, |before| before.shorter(times));
        if known.layers.len() >= MAX_TIMES {
            known.layers.clear();
        }
        known.layers.insert(key, times);
        if let Err(error) = write_times(&self.home.dir, &known.layers) {
            tracing::debug!(%error, "the times of layers are not stored");
        }
        Some(times)
    }
}

/// Part of a model that this node can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// Memory with which a plan gives this node that part.
    bytes: u64,
    is_whole: bool,
}

impl Part {
    /// Part with `room` layers, and the head if people chat here.
    fn new(model: &Model, room: u32, chats: bool) -> Self {
        let layers = match room {
            // That is a byte less than a plan needs for a layer.
            0 => model.memory_of_any(1).saturating_sub(1),
            _ => model.memory_of_any(room),
        };
        let head = if chats { model.head_bytes } else { 0 };
        Self {
            bytes: layers.saturating_add(head),
            is_whole: room >= model.layers(),
        }
    }
}

/// Memory to announce, of which each of `sharing` models gets the same share, if the owner gives
/// `given` bytes (`specs/placement.md` 1).
fn announced_bytes(parts: &[Part], sharing: u64, given: u64) -> u64 {
    let limited = parts.iter().filter(|part| !part.is_whole);
    let least = limited.map(|part| part.bytes).min();
    let largest = parts.iter().map(|part| part.bytes).max().unwrap_or(0);
    match least {
        Some(least) => least.saturating_mul(sharing),
        None => largest.saturating_mul(sharing).max(given),
    }
}

/// Time of a step beside its layers, and per layer, if a step of `layers` layers takes `took_us` and
/// the benchmark of a layer `benchmark_us` (0: none).
fn parts_of_step(took_us: u32, layers: u32, benchmark_us: u32) -> (u32, u32) {
    let layers = layers.max(1);
    let step_us = match benchmark_us {
        0 => 0,
        us => took_us
            .saturating_sub(us.saturating_mul(layers))
            .min(MAX_STEP_US),
    };
    (step_us, took_us.saturating_sub(step_us).div_ceil(layers))
}

/// Stored times; none if the file is missing or damaged.
fn read_times(dir: &Path) -> BTreeMap<String, Times> {
    let bytes = regular_file::read(&dir.join(TIMES_FILE), MAX_BYTES).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn write_times(dir: &Path, times: &BTreeMap<String, Times>) -> std::io::Result<()> {
    let json = serde_json::to_vec(times)?;
    whole_file::replace(&dir.join(TIMES_FILE), &json, Access::Owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_takes_longer_than_its_layers_has_a_fixed_part_up_to_a_limit() {
        assert_eq!(parts_of_step(1_300, 10, 100), (300, 100));
        assert_eq!(parts_of_step(1_000, 10, 100), (0, 100));
        assert_eq!(parts_of_step(905, 10, 100), (0, 91));
        assert_eq!(parts_of_step(3_500, 10, 100), (500, 300));
        assert_eq!(parts_of_step(1_300, 10, 0), (0, 130));
    }

    /// Model with equal layers.
    fn model(layers: usize, layer_bytes: u64, head_bytes: u64) -> Model {
        Model {
            layer_bytes: vec![layer_bytes; layers],
            head_bytes,
            row_bytes: 4_096,
            kv_bytes_per_token_per_layer: 1,
            kv_tokens: 10,
            uncut: Vec::new(),
            private_first: 0,
            private_last: 0,
        }
    }

    #[test]
    fn a_model_that_fits_whole_does_not_limit_the_memory_for_others() {
        let (small, large) = (model(4, 90, 50), model(8, 990, 500));
        let whole = Part::new(&small, 4, true);
        assert_eq!((whole.bytes, whole.is_whole), (450, true));
        // Three of eight layers, with 10 bytes of keys and values each.
        let some = Part::new(&large, 3, true);
        assert_eq!((some.bytes, some.is_whole), (3_500, false));
        assert_eq!(announced_bytes(&[whole, some], 2, 9_000), 7_000);
        assert_eq!(announced_bytes(&[some, whole], 2, 10), 7_000);
        // Of two that do not fit, the one whose part is smaller is the limit.
        let fewer = Part::new(&large, 2, false);
        assert_eq!(announced_bytes(&[whole, some, fewer], 3, 9_000), 6_000);
    }

    #[test]
    fn models_that_all_fit_leave_the_rest_of_the_memory_to_plans() {
        let whole = Part::new(&model(4, 90, 50), 4, true);
        assert_eq!(announced_bytes(&[whole], 1, 9_000), 9_000);
        // A plan may count more for keys and values than the owner gives.
        assert_eq!(announced_bytes(&[whole, whole], 2, 100), 900);
        assert_eq!(announced_bytes(&[], 1, 9_000), 9_000);
    }

    #[test]
    fn a_model_of_which_no_layer_fits_gets_none_and_leaves_memory_to_others() {
        let large = model(8, 990, 500);
        let none = Part::new(&large, 0, true);
        assert_eq!(announced_bytes(&[none], 2, 9_000) / 2, 1_499);
        assert!(1_499 - large.head_bytes < large.memory_of_any(1));
    }

    #[test]
    fn times_survive_in_their_directory_and_damage_forgets_them() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_times(dir.path()), BTreeMap::new());
        let times = Times {
            layer_us: 700,
            prefill_row_us: 90,
            runs: 2,
        };
        let all = BTreeMap::from([("07 avx2 4".to_owned(), times)]);
        write_times(dir.path(), &all).unwrap();
        assert_eq!(read_times(dir.path()), all);
        let slower = Times {
            layer_us: 900,
            prefill_row_us: 80,
            runs: 1,
        };
        let best = times.shorter(slower);
        assert_eq!(
            (best.layer_us, best.prefill_row_us, best.runs),
            (700, 80, 3)
        );
        std::fs::write(dir.path().join(TIMES_FILE), "{").unwrap();
        assert_eq!(read_times(dir.path()), BTreeMap::new());
    }
}
