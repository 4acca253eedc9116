//! Homes that `hearthnet up` runs, on loopback: each has a folder of models of its own.

use std::path::PathBuf;

use hearthnet_files::WeightsId;
use hearthnet_files::part::Part;
use hearthnet_testkit::TinyLlama;

use super::gauges::Gauges;
use super::*;

/// Random model with 11 MiB per layer.
pub(crate) fn medium(layers: u32) -> TinyLlama {
    TinyLlama {
        layers,
        width: 512,
        heads: 8,
        kv_heads: 4,
        head_dim: 64,
        ffn: 1408,
        weights: "f32",
        ..TinyLlama::default()
    }
}

/// A household without a terminal.
pub(crate) struct Household {
    pub(crate) home: Home,
    settings: Vec<String>,
}

impl Household {
    /// Household that gives `memory_mb` MiB to layers, and knows these addresses.
    pub(crate) fn new(memory_mb: u32, peers: &[&str]) -> Self {
        let settings = [
            "discovery.mdns=false".to_owned(),
            "engine.threads=1".to_owned(),
            format!("discovery.static_peers={peers:?}"),
            format!("research.distributed_inference.host.memory_budget_mb={memory_mb}"),
        ];
        Self {
            home: Home::new(),
            settings: settings.to_vec(),
        }
    }

    /// The same home with private layers up to this one, so that it fetches these layers.
    pub(crate) fn holding(self, layers: u32) -> Self {
        let private = "research.distributed_inference.private_first_layers";
        self.with(&format!("{private}={layers}"))
    }

    /// Adds a setting to the home.
    pub(crate) fn with(mut self, setting: &str) -> Self {
        self.settings.push(setting.to_owned());
        self
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let sets = self.settings.iter();
        let sets = sets.flat_map(|set| ["--set", set]).collect::<Vec<_>>();
        let mut command = self.home.hearthnet(&[&sets[..], args].concat());
        command.env("XDG_CACHE_HOME", self.home.path().join("cache"));
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("hearthnet starts")
    }

    #[track_caller]
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let said = succeeded(&self.run(args));
        serde_json::from_str(&said).expect("one JSON object")
    }

    /// Starts `up` on a free port, and waits until the daemon is ready.
    pub(crate) fn up(&self, args: &[&str]) -> Up {
        self.up_at("127.0.0.1:0", args)
    }

    pub(crate) fn up_at(&self, listen: &str, args: &[&str]) -> Up {
        self.start(&[&["up", "--no-open"][..], args].concat(), listen)
    }

    /// Starts `serve` of a home that is in a community.
    pub(crate) fn serve(&self, args: &[&str]) -> Up {
        self.start(&[&["serve"][..], args].concat(), "127.0.0.1:0")
    }

    fn start(&self, args: &[&str], listen: &str) -> Up {
        let addresses = ["--http", "127.0.0.1:0", "--listen", listen];
        let [out, log] = ["stdout", "stderr"].map(|name| self.home.path().join(name));
        let mut appending = File::options();
        appending.append(true).create(true);
        let mut command = self.command(&[args, &addresses[..]].concat());
        // Files, because the test does not read on while the daemon runs.
        command.stdout(File::create(&out).expect("a file"));
        command.stderr(appending.open(&log).expect("a file"));
        let mut up = Up {
            child: command.spawn().expect("hearthnet starts"),
            out,
            log,
            code: None,
            address: String::new(),
            http: String::new(),
        };
        until("the daemon is ready", || up.is_ready());
        up
    }

    /// Folders of parts on this home's disk.
    pub(crate) fn parts(&self) -> Vec<PathBuf> {
        let parts = self.home.path().join("cache/hearthnet/models/parts");
        let found = std::fs::read_dir(parts).into_iter().flatten().flatten();
        let folders = found.map(|entry| entry.path());
        let is_part = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            path.is_dir() && name.is_some_and(|name| name.parse::<WeightsId>().is_ok())
        };
        folders.filter(is_part).collect()
    }

    /// The part on this home's disk; `None` before it is made.
    pub(crate) fn part(&self) -> Option<Part> {
        let folders = self.parts();
        Part::open_reading(folders.first()?).ok()
    }

    /// State of its node, as it sees it itself; null while it does not answer.
    pub(crate) fn running(&self) -> Value {
        let status = self.run(&["status", "--json"]).stdout;
        let status: Value = serde_json::from_slice(&status).unwrap_or_default();
        status["node"]["running"].clone()
    }

    /// Ids of the shards that this home advertises, as it sees them itself.
    pub(crate) fn shards(&self) -> Vec<String> {
        let running = self.running();
        let shards = running["serving"].as_str();
        let shards = shards.into_iter().flat_map(|all| all.split(", "));
        let mut shards: Vec<String> = shards.map(str::to_owned).collect();
        shards.sort();
        shards
    }

    /// Layers of the first model that this home advertises, as it sees them itself.
    pub(crate) fn serving(&self) -> Option<(u32, u32)> {
        let shards = self.shards();
        let (_, range) = shards.first()?.rsplit_once(':')?;
        let (lo, hi) = range.split_once('-')?;
        Some((lo.parse().ok()?, hi.parse().ok()?))
    }

    /// Waits until this home serves layers.
    pub(crate) fn until_serving(&self, up: &Up) -> (u32, u32) {
        let mut range = None;
        up.until("layers are served", TIMEOUT, || {
            range = self.serving();
            range.is_some()
        });
        range.expect("a range")
    }

    /// Answer of the whole file on one machine alone.
    pub(crate) fn alone(&self, question: &[&str], file: &Path) -> String {
        let file = file.to_str().expect("UTF-8");
        let local = ["--local", "--model", file];
        succeeded(&self.run(&[question, &local].concat()))
    }
}

/// `hearthnet up` that became the daemon, killed when dropped.
pub(crate) struct Up {
    pub(crate) child: Child,
    out: PathBuf,
    log: PathBuf,
    /// Invite code that it printed.
    pub(crate) code: Option<String>,
    pub(crate) address: String,
    /// Address of its HTTP interface.
    pub(crate) http: String,
}

impl Up {
    /// Reads what it has printed. Returns whether that includes its addresses.
    fn is_ready(&mut self) -> bool {
        let ended = self.child.try_wait().expect("a child");
        assert!(ended.is_none(), "it ended: {}", self.said());
        let out = std::fs::read_to_string(&self.out).expect("a file");
        for line in out.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                [code] if code.starts_with("hearth1") => self.code = Some((*code).to_owned()),
                ["address", at, ..] => self.address = at.trim_end_matches(',').to_owned(),
                ["page", url] => self.http = url.trim_start_matches("http://").to_owned(),
                _ => {}
            }
        }
        out.ends_with('\n') && !self.http.is_empty()
    }

    /// Its standard output, and the standard error of all runs of this home.
    pub(crate) fn said(&self) -> String {
        let files = [&self.out, &self.log];
        let said = files.map(|file| std::fs::read_to_string(file).unwrap_or_default());
        said.concat()
    }

    /// Polls until `is` holds. Each look starts a program. A failure shows what the daemon said.
    pub(crate) fn until(&self, what: &str, within: Duration, mut is: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is() {
            assert!(start.elapsed() < within, "{what}: {}", self.said());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub(crate) fn code(&self) -> &str {
        self.code.as_deref().expect("a code")
    }

    /// Bytes of weights that it has sent.
    pub(crate) fn sent(&self) -> u64 {
        let metrics = Gauges::at(&self.http);
        let sent = metrics.value("hearthnet_weights_sent_bytes_total");
        sent.unwrap_or_default() as u64
    }

    /// Kills it, as a power failure would.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("its end");
    }

    pub(crate) fn stop(mut self) {
        interrupt(&self.child);
        self.child.wait().expect("its end");
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // The test itself may have ended it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
