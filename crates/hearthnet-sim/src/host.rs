//! Hosts: the code of `hearthnet-shard` with the exact engine, which computes in the simulation's
//! own thread, and a disk with the model's file.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_engine::{ARITHMETIC, Engine, EngineOptions};
use hearthnet_files::manifest::record_path;
use hearthnet_files::{ModelFile, ModelSpec};
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_shard::{LoadFault, RunningHost, ServeConfig, ShardConfig, ShardHost, Simulated};
use hearthnet_testkit::{TempDir, memory_folder, one_thread};
use hearthnet_transport::Config;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use crate::lies::Lies;
use crate::model::Model;
use crate::net::{Net, Node};
use crate::observer::{Actor, Observer};
use crate::random::Random;
use crate::watched::{Watch, Watched};

/// Milliseconds of a batch.
const BATCH_MS: u64 = 4;

/// Small limits, so that prompts need several chunks and wait for credit.
pub(crate) fn transport() -> Config {
    Config {
        chunk_bytes: 4 * 1024,
        window_chunks: 2,
        inline_max: 1024,
        // A caller opens more streams in a simulated minute than a person would.
        stream_opens_per_second: 10_000,
        ..Config::default()
    }
}

/// A machine with some of the layers. Its process may be killed and started again.
pub(crate) struct Host {
    pub node: Node,
    pub addr: HostAddr,
    layers: (u32, u32),
    callers: Vec<NodeId>,
    model: Arc<Model>,
    net: Net,
    pub actor: Actor,
    key: [u8; 32],
    running: Mutex<Option<RunningHost>>,
    disk: Disk,
    /// Factor of the duration of batches.
    slow: Arc<AtomicU64>,
    /// Until then, the process stands still.
    paused: Arc<Mutex<Option<Instant>>>,
    /// Number of next batches whose rows are spoiled.
    spoiled: Arc<AtomicU32>,
    /// True if it changes all rows that it returns.
    lying: Arc<AtomicBool>,
    lies: Lies,
    /// Open sequences of all its engines.
    sequences: Arc<AtomicU64>,
}

impl Host {
    pub(crate) fn new(
        node: Node,
        layers: (u32, u32),
        callers: &[NodeId],
        model: &Arc<Model>,
        net: &Net,
        observer: &Observer,
        lies: &Lies,
    ) -> Self {
        let key = [10 + node as u8; 32];
        Self {
            node,
            addr: HostAddr {
                endpoint: format!("host-{node}.sim:4710"),
                node: NodeKey::from_secret(&key).id(),
            },
            layers,
            callers: callers.to_vec(),
            model: Arc::clone(model),
            net: net.clone(),
            actor: observer.actor(format!("host {node}")),
            key,
            running: Mutex::default(),
            disk: Disk::new(),
            slow: Arc::new(AtomicU64::new(1)),
            paused: Arc::default(),
            spoiled: Arc::default(),
            lying: Arc::default(),
            lies: lies.clone(),
            sequences: Arc::default(),
        }
    }

    /// Starts the process, which reads the model from its disk. With a damaged file it must not start.
    pub(crate) async fn start(&self) {
        let (slow, paused) = (Arc::clone(&self.slow), Arc::clone(&self.paused));
        let pace = move || {
            let batch = Duration::from_millis(BATCH_MS * slow.load(Ordering::Relaxed));
            let pause = paused.lock().map(|until| until - Instant::now());
            pause.unwrap_or_default() + batch
        };
        let place = Arc::new(Simulated {
            key: NodeKey::from_secret(&self.key),
            streams: tokio::sync::Mutex::new(self.net.listen(self.node)),
            pace: Box::new(pace),
        });
        let serve = ServeConfig {
            admitted: self.callers.clone(),
            max_concurrent_streams: 64,
            kv_budget_bytes: 16 << 20,
            transport: transport(),
            ..ServeConfig::new(self.addr.endpoint.clone())
        };
        let config = ShardConfig {
            model_id: Some(self.model.model_id().to_owned()),
            expected_weights: Some(self.model.weights),
            engine: one_thread(),
            serve,
            ..ShardConfig::new(self.disk.file(), self.layers, self.addr.endpoint.clone())
        };
        let watch = Watch {
            model: Arc::clone(&self.model),
            host: self.addr.node,
            actor: self.actor.clone(),
            lying: Arc::clone(&self.lying),
            lies: self.lies.clone(),
            spoiled: Arc::clone(&self.spoiled),
            sequences: Arc::clone(&self.sequences),
        };
        let load = |_: &ModelSpec, options: EngineOptions| {
            let load =
                move |file: &ModelFile, layers: Range<u32>, progress: &mut dyn FnMut(u64, u64)| {
                    Ok::<_, LoadFault>(Watched::new(
                        Engine::load(file, layers, &options, progress)?,
                        watch.clone(),
                    ))
                };
            Ok((ARITHMETIC.to_owned(), load))
        };
        // Another fault may damage or repair the file during the start.
        let is_whole = || self.disk.is_whole(&self.model.bytes);
        let was_whole = is_whole();
        match ShardHost::start_with(config, &place, |_| {}, load).await {
            Ok(running) => {
                self.actor.note("starts");
                self.actor.check(was_whole || is_whole(), || {
                    "it starts with a damaged file".into()
                });
                *self.running.lock() = Some(running);
            }
            Err(error) => {
                self.actor.note("does not start");
                self.actor
                    .check(!was_whole || !is_whole(), || format!("start: {error}"));
            }
        }
    }

    /// Ends the process in the middle of a write of its file.
    pub(crate) fn tear(&self, random: &mut Random) {
        self.kill();
        self.done("tear", self.disk.tear(&self.model.bytes, random));
    }

    /// Ends the process on a disk without room.
    pub(crate) fn fill_disk(&self) {
        self.kill();
        self.done("fill", self.disk.fill());
    }

    /// Fetches the file again, on a disk with room.
    pub(crate) fn repair(&self) {
        self.done("repair", self.disk.repair(&self.model.bytes));
    }

    /// A change of the disk was done by the simulation itself, so it must not fail.
    fn done(&self, what: &str, result: io::Result<()>) {
        self.actor
            .check(result.is_ok(), || format!("{what}: {result:?}"));
    }

    /// Ends the process at once.
    pub(crate) fn kill(&self) {
        self.net.kill(self.node);
        if self.running.lock().take().is_some() {
            self.actor.note("is killed");
        }
    }

    /// Ends the process as an operator does. Its callers move to other hosts.
    pub(crate) async fn leave(&self, within: Duration) {
        let running = self.running.lock().take();
        if let Some(running) = running {
            self.actor.note("leaves");
            running.shutdown(within).await;
            self.actor.note("has left");
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.lock().is_some()
    }

    /// Sets the factor of the duration of batches.
    pub(crate) fn set_pace(&self, factor: u64) {
        self.slow.store(factor, Ordering::Relaxed);
    }

    /// Lets the process stand still: it computes nothing until then, except what it has begun.
    pub(crate) fn pause(&self, until: Instant) {
        let mut paused = self.paused.lock();
        *paused = (*paused).max(Some(until));
    }

    /// From now on, all rows that it returns are a little wrong.
    pub(crate) fn lie(&self) {
        self.lying.store(true, Ordering::Relaxed);
    }

    /// Spoils the rows of its next batch.
    pub(crate) fn spoil(&self) {
        self.spoiled.fetch_add(1, Ordering::Relaxed);
    }

    /// Checks that all streams, pages and waiting steps are returned soon, when no chat runs.
    pub(crate) async fn check_returned(&self) {
        let held = || {
            let running = self.running.lock();
            let stats = running.as_ref().map(RunningHost::stats)?;
            let sequences = self.sequences.load(Ordering::Relaxed);
            let held = (
                stats.streams,
                stats.steps_waiting,
                stats.kv_bytes,
                sequences,
            );
            (held != (0, 0, 0, 0)).then_some(held)
        };
        for _ in 0..50 {
            if held().is_none() {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
        self.actor.check(held().is_none(), || {
            format!(
                "streams, steps, bytes of KV and sequences are held: {:?}",
                held()
            )
        });
    }

    pub(crate) fn sessions(&self) -> u32 {
        let running = self.running.lock();
        running
            .as_ref()
            .map_or(0, |running| running.stats().sessions)
    }
}

/// Disk of a host: a folder with the model's file, and beside it what the process writes.
struct Disk(TempDir);

impl Disk {
    fn new() -> Self {
        Self(memory_folder())
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("tiny.gguf")
    }

    fn is_whole(&self, bytes: &[u8]) -> bool {
        fs::read(self.file()).is_ok_and(|found| found == bytes)
    }

    /// A write of the file has stopped: the rest of it is zeros, or is not there.
    fn tear(&self, bytes: &[u8], random: &mut Random) -> io::Result<()> {
        let length = bytes.len();
        // Not in the last bytes: they may be the padding of a tensor.
        let written = random.below(length as u64 * 9 / 10) as usize;
        let mut torn = bytes.get(..written).unwrap_or_default().to_vec();
        if !random.one_in(3) {
            torn.resize(length, 0);
        }
        fs::write(self.file(), torn)
    }

    /// From now on no file can be written beside the model: a folder is in the place of its record.
    fn fill(&self) -> io::Result<()> {
        let record = record_path(&self.file());
        remove(&record)?;
        fs::create_dir(&record)
    }

    fn repair(&self, bytes: &[u8]) -> io::Result<()> {
        let record = record_path(&self.file());
        if record.is_dir() {
            fs::remove_dir(&record)?;
        }
        fs::write(self.file(), bytes)
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match path.is_dir() {
        true => fs::remove_dir(path),
        false => match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        },
    }
}
