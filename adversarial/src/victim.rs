//! Host under attack: a real shard host with a tiny model, in a process of its own, so that the
//! harness can observe its memory, panics and exit status from outside.
//!
//! ```text
//!  harness                                        victim
//!     | ------- starts: model, admitted nodes -----> |
//!     | <------ its descriptor, one line of JSON --- |  serves
//!     | ------- a line ----------------------------> |
//!     | <------ its gauges, one line of JSON ------- |
//!     | ------- end of input ----------------------> |  shuts down, exits with 0
//! ```
//!
//! The input also ends when the harness dies, so a victim never outlives it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use hearthnet_bus::calls::{Registry, Served, register_shards};
use hearthnet_bus::joining::{self, JoinHandler};
use hearthnet_bus::log::{EventLog, LogHealth};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::{Descriptor, NodeId, NodeKey};
use hearthnet_files::magnitude::Band;
use hearthnet_http::{Metrics, Part};
use hearthnet_shard::{RunningHost, ShardConfig, ShardHost, Stats};
use hearthnet_testkit::{TinyLlama, smollm2_bands, smollm2_on_this_machine};
use hearthnet_transport::{Code, Config};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{interval, timeout};

use crate::memory::{self, Usage};
use crate::{HarnessError, Result};

/// Time limit for the victim to start, to answer a question, or to end.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit for the victim to release the resources of an attack.
const SETTLE: Duration = Duration::from_secs(30);

/// Interval at which the victim's gauges are polled.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// Maximum bytes kept of the victim's standard error, far more than it should ever write.
const LOG_BYTES: u64 = 1 << 20;

/// Deadlines after which the victim drops an inactive peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// Default deadlines of a host.
    #[strum(to_string = "the defaults of a host")]
    Shipped,
    /// Deadlines of one or two seconds, for tests. The limits are the same.
    #[strum(to_string = "about one second each")]
    Brief,
}

impl Pace {
    /// Limits and deadlines of the victim's sessions.
    pub fn limits(self) -> Config {
        let mut config = Config::default();
        if self == Pace::Brief {
            config.deadlines.stall = Duration::from_secs(1);
            config.deadlines.credit = Duration::from_secs(1);
            // Long enough for honest callers on a busy machine.
            config.deadlines.tls = Duration::from_secs(2);
            config.deadlines.upgrade = Duration::from_secs(2);
            config.deadlines.hello = Duration::from_secs(2);
        }
        config
    }
}

/// Configuration of a victim that differs from the default.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    /// Pages of KV, each of [`PAGE`] positions. `None`: the default of a host.
    pub(crate) kv_pages: Option<u32>,
    /// Whether the victim is a node of a community, with a log, gossip and calls beside its layers.
    pub(crate) community: bool,
}

impl Scene {
    /// Host outside of any community, with default settings.
    pub(crate) const ALONE: Scene = Scene {
        kv_pages: None,
        community: false,
    };

    /// Trusted node of a community in which the attacker is a trusted member too.
    pub(crate) const COMMUNITY: Scene = Scene {
        kv_pages: None,
        community: true,
    };
}

/// Model that the victim serves in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// SmolLM2-135M-Instruct, from this user's cache.
    #[strum(to_string = "SmolLM2-135M-Instruct")]
    Real,
    /// Random weights: a home's share of that model, a third of its blocks. A step takes as long as
    /// in a home.
    #[strum(to_string = "random weights, a third of the blocks of SmolLM2-135M")]
    Share,
    /// Random weights: two small blocks, whose steps take almost no time.
    #[strum(to_string = "random weights, two small blocks")]
    Tiny,
}

impl Model {
    /// Shape of the model.
    pub(crate) fn description(self) -> TinyLlama {
        match self {
            Self::Tiny => TinyLlama::default(),
            Self::Real => TinyLlama {
                layers: 30,
                ..Self::Share.description()
            },
            Self::Share => TinyLlama {
                layers: 10,
                width: 576,
                heads: 9,
                kv_heads: 3,
                head_dim: 64,
                ffn: 1536,
                ..TinyLlama::default()
            },
        }
    }

    /// Path of the model's file. A file of random weights is written into `folder`.
    ///
    /// # Errors
    /// If the real model is not on this machine.
    pub(crate) fn file(self, folder: &Path) -> Result<PathBuf> {
        match self {
            Self::Tiny | Self::Share => Ok(self.description().write(folder)),
            Self::Real => real_model().map(|(path, _)| path),
        }
    }

    /// Memory of one page of KV for each stream that the victim serves at once.
    pub(crate) fn kv_of_streams(self) -> u64 {
        STREAMS * page_bytes(&self.description())
    }
}

/// File of the real model, and the bands of its boundaries.
///
/// # Errors
/// If the model is not on this machine.
pub fn real_model() -> Result<(PathBuf, Vec<Band>)> {
    let path = smollm2_on_this_machine().ok_or_else(|| {
        HarnessError::usage(
            "SmolLM2-135M-Instruct is not on this machine: run `hearthnet model pull \
             smollm2-135m-instruct`; attacks also run on random weights, by `--model share`",
        )
    })?;
    Ok((path, smollm2_bands()))
}

/// Streams that a host serves at once by default.
const STREAMS: u64 = 8;

/// Positions of a page of KV (`specs/shard-host.md` section 8).
pub(crate) const PAGE: u32 = 32;

/// Bytes of a page: fp16 keys and values of all layers.
fn page_bytes(model: &TinyLlama) -> u64 {
    let values = 2 * model.layers * model.kv_heads * model.head_dim;
    u64::from(PAGE) * u64::from(values) * 2
}

/// Settings of a victim process, passed as JSON on its command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// File of one of the suite's own models.
    pub model: PathBuf,
    pub(crate) which: Model,
    /// Nodes that may connect, outside of a community.
    pub admitted: Vec<NodeId>,
    /// Folder of a community node, with its key and its log.
    pub home: Option<PathBuf>,
    pub pace: Pace,
    /// Pages of KV; `None`: the default.
    pub kv_pages: Option<u32>,
}

/// Runs the victim process: serves until its input ends.
///
/// # Errors
/// If the host cannot be started.
pub async fn serve(settings: Settings) -> Result<()> {
    let key = Arc::new(match &settings.home {
        None => NodeKey::generate()?,
        Some(home) => NodeKey::load_or_create(&home.join(KEY_FILE))?,
    });
    let model = settings.which.description();
    let layers = (0, model.layers - 1);
    let mut config = ShardConfig::new(settings.model, layers, "127.0.0.1:0");
    config.model_id = Some(MODEL_ID.to_owned());
    config.serve.admitted = settings.admitted;
    config.serve.transport = settings.pace.limits();
    if let Some(pages) = settings.kv_pages {
        config.serve.kv_budget_bytes = u64::from(pages) * page_bytes(&model);
    }
    // The matrices are small, and the honest caller needs the other cores.
    config.engine.threads = 1;
    let (host, member) = match settings.home {
        None => (ShardHost::start(config, &*key, |_| {}).await?, None),
        Some(home) => {
            let member = Member::start(&home, key, settings.pace).await?;
            let host = ShardHost::start(config, &member.node, |_| {}).await?;
            member.served.set(host.descriptor());
            (host, Some(member))
        }
    };
    let mut output = tokio::io::stdout();
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    let mut line = serde_json::to_string(&host.descriptor())?;
    loop {
        line.push('\n');
        output.write_all(line.as_bytes()).await?;
        output.flush().await?;
        if input.next_line().await?.is_none() {
            break;
        }
        line = said(&host, member.as_ref())?;
    }
    host.shutdown(Duration::from_secs(1)).await;
    if let Some(member) = member {
        member.node.shutdown().await;
    }
    Ok(())
}

/// Id of the model.
pub(crate) const MODEL_ID: &str = "tiny";

/// File name of the victim's key in its folder.
pub(crate) const KEY_FILE: &str = "node.key";

/// Victim that is a node of a community.
struct Member {
    node: Node,
    served: Arc<Served>,
    numbers: Metrics,
    /// Code of the recovery at the opening of the log, if there was one.
    recovered: Option<Code>,
    problems: Vec<String>,
}

impl Member {
    async fn start(home: &Path, key: Arc<NodeKey>, pace: Pace) -> Result<Member> {
        let numbers = Metrics::install(Part::Host)?;
        let log = EventLog::open(home)?;
        let recovered = log.recovery().map(|recovery| recovery.code());
        let problems = log.verify()?.problems;
        let (registry, served) = (Arc::new(Registry::new()), Arc::new(Served::default()));
        register_shards(&registry, key.clone(), log.clone(), served.clone())?;
        let join = JoinHandler::new(log.clone(), key.clone());
        registry.register(joining::descriptor(), Arc::new(join))?;
        let mut node = NodeSettings::new("victim");
        node.listen = Some("127.0.0.1:0".to_owned());
        node.discovery.mdns = false;
        node.research = true;
        node.transport = pace.limits();
        Ok(Member {
            node: Node::start(key, log, node, registry).await?,
            served,
            numbers,
            recovered,
            problems,
        })
    }

    fn says(&self) -> LogGauges {
        let log = self.node.log();
        let (state, now_ms) = (log.state(), crate::raw::event::now_ms());
        let hash = state.state_hash();
        let heads = log.heads();
        let seqs = heads.authors.iter();
        let seqs = seqs.map(|(author, head)| (author.to_string(), head.seq));
        let shards = state.shards(now_ms);
        let shards = shards.map(|advert| {
            let descriptor = &advert.descriptor;
            (descriptor.shard_id.clone(), descriptor.queue_depth)
        });
        LogGauges {
            state: hex::encode(hash),
            seqs: seqs.collect(),
            shards: shards.collect(),
            frozen: state.frozen().map(|(node, _)| node.to_string()).collect(),
            revoked: state.revoked().map(|(node, _)| node.to_string()).collect(),
            is_healthy: log.health() == LogHealth::Ok,
            recovered: self.recovered.clone(),
            problems: self.problems.clone(),
            reworked: log.reworked(),
            raised: raised(&self.numbers.render()),
        }
    }
}

/// Number of times each code was raised, parsed from the metrics page.
pub(crate) fn raised(numbers: &str) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for line in numbers.lines() {
        let Some((name, rest)) = line.split_once('{') else {
            continue;
        };
        let Some((labels, count)) = rest.rsplit_once("} ") else {
            continue;
        };
        let by_us = match name {
            "hearthnet_log_refused_total" | "hearthnet_transport_refusals_total" => true,
            "hearthnet_transport_closed_total" => labels.contains("by=\"us\""),
            _ => false,
        };
        // The host itself counts tensor sessions.
        let counted = by_us && !labels.contains("path=\"/tensor/v1\"");
        let code = labels.split("code=\"").nth(1);
        if let Some((code, _)) = code.filter(|_| counted).and_then(|l| l.split_once('"')) {
            let count: f64 = count.trim().parse().unwrap_or(0.0);
            *all.entry(code.to_owned()).or_insert(0) += count as u64;
        }
    }
    all
}

fn said(host: &RunningHost, member: Option<&Member>) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Said {
        #[serde(flatten)]
        stats: Stats,
        log: Option<LogGauges>,
    }
    serde_json::to_string(&Said {
        stats: host.stats(),
        log: member.map(Member::says),
    })
}

/// State of the victim's community log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LogGauges {
    /// Hash of the community state.
    pub(crate) state: String,
    /// Durable events by author.
    pub(crate) seqs: BTreeMap<String, u64>,
    /// Queue length that each currently offered shard announces.
    pub(crate) shards: BTreeMap<String, u32>,
    /// Authors frozen because of a fork.
    pub(crate) frozen: Vec<String>,
    /// Revoked nodes.
    pub(crate) revoked: Vec<String>,
    /// True if events can be written.
    pub(crate) is_healthy: bool,
    /// Code of the recovery at the start, if there was one.
    pub(crate) recovered: Option<Code>,
    /// Problems that the full check at the start found.
    pub(crate) problems: Vec<String>,
    /// Events that were folded again because of late events.
    pub(crate) reworked: u64,
    /// Number of times each code was raised outside of tensor sessions.
    pub(crate) raised: BTreeMap<String, u64>,
}

/// Gauges and counters of the victim.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Gauges {
    /// Connected sessions.
    pub(crate) sessions: u32,
    /// Open streams.
    pub(crate) streams: u32,
    /// Computed steps.
    pub(crate) steps: u64,
    /// Steps that are queued or running.
    pub(crate) steps_waiting: u32,
    /// Bytes of KV in use.
    pub(crate) kv_bytes: u64,
    /// Pages of KV in use.
    pub(crate) kv_pages_used: u64,
    /// Free pages of KV.
    pub(crate) kv_pages_left: u64,
    /// Streams refused or ended by the host, by code.
    pub(crate) errors: BTreeMap<String, u64>,
    /// Sessions ended by the host, by code.
    pub(crate) closed: BTreeMap<String, u64>,
    /// Community log, if the victim is in a community.
    pub(crate) log: Option<LogGauges>,
}

impl Gauges {
    /// Number of times the host raised a code.
    pub(crate) fn raised(&self, code: &str) -> u64 {
        let count = |counts: &BTreeMap<String, u64>| counts.get(code).copied().unwrap_or(0);
        let log = self.log.as_ref().map_or(0, |log| count(&log.raised));
        count(&self.closed) + count(&self.errors) + log
    }

    /// Number of durable events of an author.
    pub(crate) fn events_of(&self, author: &NodeId) -> u64 {
        let seqs = self.log.as_ref().map(|log| &log.seqs);
        seqs.and_then(|seqs| seqs.get(&author.to_string()).copied())
            .unwrap_or(0)
    }

    /// Whether the log has frozen a node because of a fork.
    pub(crate) fn has_frozen(&self, node: &NodeId) -> bool {
        let log = self.log.as_ref();
        log.is_some_and(|log| log.frozen.contains(&node.to_string()))
    }

    /// Whether the log has the revocation of a node.
    pub(crate) fn has_revoked(&self, node: &NodeId) -> bool {
        let log = self.log.as_ref();
        log.is_some_and(|log| log.revoked.contains(&node.to_string()))
    }

    /// Hash of the community state.
    pub(crate) fn state(&self) -> &str {
        self.log.as_ref().map_or("", |log| &log.state)
    }
}

/// Running victim process. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Victim {
    pub(crate) addr: SocketAddr,
    pub(crate) node: NodeId,
    pub(crate) descriptor: Descriptor,
    child: Child,
    pid: u32,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    log: Arc<Mutex<Vec<u8>>>,
}

impl Victim {
    /// Starts `program` as a victim and waits until it serves.
    pub(crate) async fn start(program: &Path, settings: &Settings) -> Result<Victim> {
        let settings = serde_json::to_string(settings)?;
        let mut child = Command::new(program)
            .args(["victim", &settings])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let gone = || HarnessError::victim("it exited at once");
        let pid = child.id().ok_or_else(gone)?;
        let input = child.stdin.take().ok_or_else(gone)?;
        let output = child.stdout.take().ok_or_else(gone)?;
        let errors = child.stderr.take().ok_or_else(gone)?;
        let log = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&log);
        tokio::spawn(async move {
            let (mut errors, mut buffer) = (errors.take(LOG_BYTES), [0; 4096]);
            while let Ok(read @ 1..) = errors.read(&mut buffer).await {
                let fresh = buffer.get(..read).unwrap_or_default();
                kept.lock().extend_from_slice(fresh);
            }
        });
        let mut output = BufReader::new(output).lines();
        let descriptor: Descriptor = match answer(&mut output).await {
            Ok(descriptor) => descriptor,
            Err(trouble) => {
                let log = text(&log);
                return Err(HarnessError::victim(format!("{trouble}; it said: {log}")));
            }
        };
        Ok(Victim {
            addr: descriptor
                .endpoint
                .parse()
                .map_err(|_| HarnessError::victim("its descriptor is invalid"))?,
            node: descriptor.host,
            descriptor,
            child,
            pid,
            input,
            output,
            log,
        })
    }

    /// Current gauges.
    pub(crate) async fn gauges(&mut self) -> Result<Gauges> {
        self.input.write_all(b"\n").await?;
        answer(&mut self.output).await
    }

    /// Current memory, if the system reports it.
    pub(crate) fn usage(&self) -> Option<Usage> {
        memory::usage(self.pid)
    }

    pub(crate) fn forget_peak(&self) {
        memory::forget_peak(self.pid);
    }

    /// Standard error of the victim, which is empty unless something failed.
    pub(crate) fn log(&self) -> String {
        text(&self.log)
    }

    pub(crate) async fn kill(mut self) -> Result<()> {
        self.child.kill().await?;
        Ok(())
    }

    /// Ends the victim normally. `None`: it did not end.
    pub(crate) async fn stop(mut self) -> (Option<ExitStatus>, String) {
        drop(self.input);
        let ended = timeout(TIMEOUT, self.child.wait()).await;
        (ended.ok().and_then(Result::ok), text(&self.log))
    }
}

fn text(log: &Mutex<Vec<u8>>) -> String {
    String::from_utf8_lossy(&log.lock()).into_owned()
}

async fn answer<T: for<'a> Deserialize<'a>>(
    output: &mut Lines<BufReader<ChildStdout>>,
) -> Result<T> {
    let line = timeout(TIMEOUT, output.next_line())
        .await
        .map_err(|_| HarnessError::victim("it does not answer"))??
        .ok_or_else(|| HarnessError::victim("it has ended"))?;
    serde_json::from_str(&line).map_err(|error| HarnessError::Victim(format!("{error} in {line}")))
}

/// Polls the victim until its gauges satisfy `reached` or [`SETTLE`] has passed.
pub(crate) async fn until(
    victim: &mut Victim,
    reached: impl Fn(&Gauges) -> bool,
) -> Result<Gauges> {
    let begin = Instant::now();
    let mut asking = interval(ASK_EVERY);
    loop {
        asking.tick().await;
        let gauges = victim.gauges().await?;
        if reached(&gauges) || begin.elapsed() >= SETTLE {
            return Ok(gauges);
        }
    }
}
