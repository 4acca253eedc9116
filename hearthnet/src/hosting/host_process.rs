//! Host processes that this program starts on this machine, for `demo` and `bench mesh`.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeKey;
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_orchestrator::{Cancel, ChatError};
use hearthnet_platform::cores::{cores, on_core};
use hearthnet_platform::process::resident_bytes_of_all;
use hearthnet_platform::terminal::in_own_group;

use crate::cli::args::HostLayers;
use crate::cli::{Failure, Kind, failure};
use crate::config::Config;
use crate::hosting::host_config::Ready;
use crate::models::OpenModel;

/// Time limit to load the layers. Loading is bound by the disk.
const READY_DEADLINE: Duration = Duration::from_secs(120);

/// Time after which a host that does not end is killed.
const LEAVE_DEADLINE: Duration = Duration::from_secs(3);

/// Splits the layers into inclusive ranges: evenly, or at the user's cuts.
pub(crate) fn split(
    hosted: Range<u32>,
    shards: Option<u32>,
    cuts: &[u32],
) -> Result<Vec<(u32, u32)>, Failure> {
    let layers = hosted.end.saturating_sub(hosted.start);
    let wrong = |why: String| Failure::new(Kind::Config, why).hint("see `hearthnet demo --help`");
    let cuts: Vec<u32> = match (cuts, shards) {
        ([], shards) => {
            let shards = shards.unwrap_or(2);
            if !(1..=layers).contains(&shards) {
                return Err(wrong(format!(
                    "--shards must lie between 1 and {layers}, the number of layers that hosts run"
                )));
            }
            let share = |i: u32| (u64::from(i) * u64::from(layers) / u64::from(shards)) as u32;
            (1..shards).map(|i| hosted.start + share(i)).collect()
        }
        (cuts, Some(shards)) if shards as usize != cuts.len() + 1 => {
            return Err(wrong(format!(
                "--cuts makes {} hosts, and --shards asks for {shards}: leave one of them out",
                cuts.len() + 1
            )));
        }
        (cuts, _) => cuts.to_vec(),
    };
    let firsts = std::iter::once(hosted.start).chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain([hosted.end]);
    let ranges = firsts
        .zip(ends)
        .map(|(lo, end)| (lo < end).then(|| (lo, end - 1)));
    ranges.collect::<Option<_>>().ok_or_else(|| {
        let (least, most) = (hosted.start + 1, hosted.end - 1);
        wrong(format!(
            "--cuts must rise and lie between {least} and {most}"
        ))
    })
}

/// Common settings of the host processes.
pub(crate) struct HostPlan<'a> {
    pub(crate) model: &'a OpenModel,
    pub(crate) config: &'a Config,
    /// Most streams of each host.
    pub(crate) streams: usize,
}

/// Host processes that share the layers of a model. Dropping them ends the processes.
pub(crate) struct HostProcesses {
    pub(crate) all: Vec<HostProcess>,
    /// Key of the only caller that they admit.
    pub(crate) key: Arc<NodeKey>,
    /// Whether each host is pinned to a core of its own.
    pub(crate) pinned: bool,
    _homes: tempfile::TempDir,
}

impl HostProcesses {
    /// Starts the hosts, and waits until all of them serve.
    pub(crate) fn start(
        plan: &HostPlan<'_>,
        hosts: &[HostLayers],
        cancel: &Cancel,
    ) -> Result<Self, Failure> {
        let key = Arc::new(NodeKey::generate().map_err(Failure::internal)?);
        let homes = tempfile::tempdir()
            .map_err(|e| failure!(Host, "cannot make a temporary directory: {e}"))?;
        let cores = own_cores(hosts);
        let pinned = cores.iter().all(Option::is_some);
        let mut all = Vec::new();
        for (index, (&host, core)) in hosts.iter().zip(cores).enumerate() {
            let home = homes.path().join(format!("host-{index}"));
            all.push(HostProcess::spawn(plan, host, core, &key, &home)?);
        }
        for host in &mut all {
            host.wait_until_ready(cancel)?;
        }
        Ok(Self {
            all,
            key,
            pinned,
            _homes: homes,
        })
    }

    pub(crate) fn addresses(&self) -> Vec<HostAddr> {
        self.all.iter().filter_map(HostProcess::address).collect()
    }

    pub(crate) fn stop(&mut self) {
        self.all.iter_mut().for_each(HostProcess::stop);
    }
}

/// Error if the hosts' answers differ from this machine's.
pub(crate) fn require_same_answers(are_same: bool, command: &str) -> Result<(), Failure> {
    if are_same {
        return Ok(());
    }
    Err(failure!(
        Internal,
        "the hosts and this machine alone gave different answers, which must never happen"
    )
    .hint(format!(
        "please report this with the output of `{command} --json`"
    )))
}

/// Assigns a core to each host, if hosts have one thread and there are enough cores.
fn own_cores(hosts: &[HostLayers]) -> Vec<Option<usize>> {
    let cores = cores();
    let enough = hosts.iter().all(|host| host.threads == 1) && cores.len() >= hosts.len();
    (0..hosts.len())
        .map(|host| cores.get(host).copied().filter(|_| enough))
        .collect()
}

/// A `hearthnet shard serve` child process. Dropping it ends the process.
pub(crate) struct HostProcess {
    child: Child,
    /// Files with its standard output and standard error.
    said: PathBuf,
    trouble: PathBuf,
    pub(crate) layers: (u32, u32),
    pub(crate) ready: Option<Ready>,
}

impl HostProcess {
    /// Starts a host in the directory `home`, for a caller with `key`. `core` pins the process to
    /// one core.
    fn spawn(
        plan: &HostPlan<'_>,
        host: HostLayers,
        core: Option<usize>,
        key: &NodeKey,
        home: &Path,
    ) -> Result<Self, Failure> {
        let fail = |e: std::io::Error| failure!(Host, "cannot start a host process: {e}");
        let program = std::env::current_exe().map_err(fail)?;
        let [said, trouble] = ["json", "log"].map(|kind| home.with_extension(kind));
        let inference = &plan.config.research.distributed_inference;
        let set = |key: &str, value: &dyn std::fmt::Display| {
            format!("research.distributed_inference.{key}={value}")
        };
        let streams = set("host.max_concurrent_streams", &plan.streams);
        let activations = set("activation_dtype", &inference.activation_dtype);
        let cache = set("cache_dtype", &inference.cache_dtype);
        let HostLayers { layers, threads } = host;
        let (lo, hi) = layers;
        let mut command = Command::new(program);
        command
            .args(["--set", "policy.research.enable=true", "--set", &streams])
            .args(["--set", "research.distributed_inference.enabled=true"])
            .args(["--set", &activations, "--set", &cache])
            .arg("--data-dir")
            .arg(home)
            .args(["shard", "serve", "--json", "--lifeline"])
            .args(["--listen", "127.0.0.1:0"])
            .arg("--model")
            .arg(&plan.model.path)
            .args(["--layers", &format!("{lo}-{hi}")])
            .args(["--threads", &threads.to_string()])
            .args(["--peer-key", &key.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(File::create(&said).map_err(fail)?)
            .stderr(File::create(&trouble).map_err(fail)?);
        // Ctrl-C then reaches only the caller, which stops its hosts in order. If the caller dies,
        // their standard input ends, and so do they.
        in_own_group(&mut command);
        Ok(Self {
            child: on_core(core, || command.spawn()).map_err(fail)?,
            said,
            trouble,
            layers,
            ready: None,
        })
    }

    fn wait_until_ready(&mut self, cancel: &Cancel) -> Result<(), Failure> {
        let deadline = Instant::now() + READY_DEADLINE;
        loop {
            if cancel.is_cancelled() {
                return Err(ChatError::Cancelled.into());
            }
            // Check first: if the process has ended, its output is complete.
            let ended = self.child.try_wait()?.is_some();
            let said = fs::read_to_string(&self.said)?;
            if let Some((line, _)) = said.split_once('\n') {
                let ready = serde_json::from_str(line).map_err(|e| {
                    Failure::internal(format!("a host process printed an unexpected line: {e}"))
                })?;
                self.ready = Some(ready);
                return Ok(());
            }
            if ended || Instant::now() >= deadline {
                let why = fs::read_to_string(&self.trouble)?;
                let why = match why.trim() {
                    "" => "no reason given".to_owned(),
                    why => why.replace('\n', "; "),
                };
                let layers = self.layers_text();
                let what = format!("the host process for layers {layers} did not start: {why}");
                return Err(Failure::new(Kind::Host, what));
            }
            sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn layers_text(&self) -> String {
        format!("{}-{}", self.layers.0, self.layers.1)
    }

    fn address(&self) -> Option<HostAddr> {
        self.ready.as_ref()?.address.parse().ok()
    }

    pub(crate) fn address_text(&self) -> String {
        self.ready
            .as_ref()
            .map_or_else(String::new, |r| r.address.clone())
    }

    /// Resident memory of the process and its engine's, if the system reports it.
    pub(crate) fn resident_bytes(&self) -> Option<u64> {
        resident_bytes_of_all(self.child.id())
    }

    /// Ends the process: closes its standard input, then kills it after a timeout.
    fn stop(&mut self) {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + LEAVE_DEADLINE;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(None) => sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
        // Errors mean that the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_split_evenly_and_completely() {
        assert_eq!(split(0..30, Some(2), &[]).unwrap(), [(0, 14), (15, 29)]);
        assert_eq!(split(2..30, Some(2), &[]).unwrap(), [(2, 15), (16, 29)]);
        assert_eq!(split(0..5, Some(3), &[]).unwrap(), [(0, 0), (1, 2), (3, 4)]);
        assert_eq!(split(0..3, Some(3), &[]).unwrap(), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(split(0..30, Some(1), &[]).unwrap(), [(0, 29)]);
    }

    #[test]
    fn layers_are_cut_where_the_user_says() {
        let cuts = [7, 20];
        assert_eq!(
            split(0..30, None, &cuts).unwrap(),
            [(0, 6), (7, 19), (20, 29)]
        );
        assert_eq!(
            split(2..29, None, &cuts).unwrap(),
            [(2, 6), (7, 19), (20, 28)]
        );
        assert_eq!(split(0..30, Some(3), &cuts).unwrap().len(), 3);
    }

    #[test]
    fn cuts_and_a_number_of_hosts_must_not_contradict_each_other() {
        assert_eq!(split(0..30, None, &[]).unwrap().len(), 2);
        for shards in [1, 2, 4] {
            let refused = split(0..30, Some(shards), &[7, 20]).unwrap_err();
            assert!(refused.to_string().contains("makes 3 hosts"), "{refused}");
        }
    }

    #[test]
    fn impossible_splits_are_refused() {
        assert!(split(0..4, Some(0), &[]).is_err());
        assert!(split(0..4, Some(5), &[]).is_err());
        for cuts in [&[0][..], &[4], &[2, 2], &[3, 1], &[u32::MAX]] {
            assert!(split(0..4, None, cuts).is_err(), "{cuts:?}");
        }
        assert!(split(2..6, None, &[2]).is_err());
        assert!(split(2..6, Some(5), &[]).is_err());
    }
}
