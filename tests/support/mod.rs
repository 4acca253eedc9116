//! Shared parts of the whole-program tests: a home of its own for every test, and hosts that end
//! with it.

pub(crate) mod caller;
pub(crate) mod community;
pub(crate) mod gauges;
pub(crate) mod http;
pub(crate) mod memory_group;
pub(crate) mod own_host;
pub(crate) mod up;

use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Lines, Read, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::{LazyLock, mpsc};
use std::time::{Duration, Instant};

use hearthnet_testkit::lab;
use parking_lot::RwLock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;

/// Long enough for a loaded machine; reaching it is a failure, never a wait.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// Consent to the research, which joint computing needs.
pub(crate) const ENABLE: [&str; 2] = ["--set", "policy.research.enable=true"];
/// No multicast: only named nodes are found.
pub(crate) const QUIET: [&str; 2] = ["--set", "discovery.mdns=false"];
/// Only hosts answer, or the command fails.
pub(crate) const TOGETHER: [&str; 2] = [
    "--set",
    "research.distributed_inference.fallback_to_local=false",
];

/// Lock on the processors of this machine. A [`caller::Caller`] shares it, because it compares the
/// pace of its hosts with limits. A test whose processes load every processor for long holds it
/// exclusively, and must not make a `Caller`: that would wait for the lock for ever.
pub(crate) static PROCESSORS: RwLock<()> = RwLock::new(());

/// Says that a test, or a part of it, does not run here, and why. libtest captures what the macros print,
/// but not this.
pub(crate) fn skipped(why: &str) {
    let test = std::thread::current();
    let name = test.name().unwrap_or_default();
    let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {why}");
}

/// Arguments that name hosts.
pub(crate) fn shards<'a>(addresses: impl IntoIterator<Item = &'a String>) -> Vec<&'a str> {
    let addresses = addresses.into_iter();
    addresses.flat_map(|at| ["--shard", at.as_str()]).collect()
}

/// Arguments of a command, none of which contains a space.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// User with an own key and no configuration, sharing only the model cache.
pub(crate) struct Home {
    dir: tempfile::TempDir,
    /// Machine of a virtual LAN on which the user's commands run.
    machine: Option<lab::Host>,
}

impl Home {
    pub(crate) fn new() -> Self {
        Self {
            dir: tempfile::tempdir().expect("a temporary directory"),
            machine: None,
        }
    }

    /// Home on a machine of a virtual LAN.
    pub(crate) fn on(machine: &lab::Host) -> Self {
        Self {
            machine: Some(machine.clone()),
            ..Self::new()
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// `hearthnet ARGS` as this user.
    pub(crate) fn hearthnet(&self, args: &[&str]) -> Command {
        let program = env!("CARGO_BIN_EXE_hearthnet");
        let command = match &self.machine {
            Some(machine) => machine.command(program),
            None => Command::new(program),
        };
        self.hearthnet_with(command, args)
    }

    /// `hearthnet ARGS` as this user, started by `command`.
    pub(crate) fn hearthnet_with(&self, mut command: Command, args: &[&str]) -> Command {
        command
            .args(args)
            .env("HEARTHNET_DATA_DIR", self.dir.path().join("data"))
            .env("XDG_CONFIG_HOME", self.dir.path().join("config"))
            .env("TMPDIR", self.dir.path())
            .env_remove("HEARTHNET_CONFIG")
            .env_remove("HEARTHNET_LOG")
            .stdin(Stdio::null());
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        let mut command = self.hearthnet(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        output(command.spawn().expect("hearthnet starts"), args)
    }

    /// Runs a command with a text on its standard input.
    pub(crate) fn run_with(&self, args: &[&str], input: &str) -> Output {
        let mut command = self.hearthnet(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = command.stdin(Stdio::piped()).spawn();
        let mut child = started.expect("hearthnet starts");
        let mut stdin = child.stdin.take().expect("a pipe");
        // The command may have refused without reading.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        output(child, args)
    }

    /// Output of a command that must succeed.
    #[track_caller]
    pub(crate) fn says(&self, args: &[&str]) -> String {
        succeeded(&self.run(args))
    }

    /// JSON output of a command that must succeed.
    #[track_caller]
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        json_output(&self.run(args))
    }

    /// Starts a command whose outputs the test reads itself.
    pub(crate) fn spawn(&self, args: &[&str]) -> Child {
        let mut command = self.hearthnet(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("hearthnet starts")
    }

    pub(crate) fn node_id(&self) -> String {
        self.json(&["id", "--json"])["node_id"]
            .as_str()
            .expect("a node id")
            .to_owned()
    }

    /// `hearthnet chat --json` over hosts.
    pub(crate) fn ask(&self, prompt: &str, hosts: &[&Host], extra: &[&str]) -> Output {
        let hosts = shards(hosts.iter().map(|host| &host.address));
        self.run(&[&ENABLE[..], &["chat", prompt, "--json"], &hosts, extra].concat())
    }
}

/// Lets `outer` run the command `inner`, in its environment.
pub(crate) fn wrap(outer: &mut Command, inner: &Command) {
    outer.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
}

/// Running program, killed when dropped.
pub(crate) struct Running {
    pub(crate) child: Child,
    /// Lines of its standard output.
    pub(crate) lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let started = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = started.expect("hearthnet starts");
        let stdout = child.stdout.take().expect("a pipe");
        let lines = BufReader::new(stdout).lines();
        Self { child, lines }
    }

    /// Next line, which there must be.
    pub(crate) fn line(&mut self) -> String {
        let line = self.lines.next().expect("another line");
        line.expect("a line")
    }

    /// Standard error, up to the end of the program.
    pub(crate) fn complaint(&mut self) -> String {
        let mut why = String::new();
        let stderr = self.child.stderr.as_mut().expect("a pipe");
        stderr.read_to_string(&mut why).expect("UTF-8");
        why
    }

    /// Exit status.
    pub(crate) fn status(&mut self) -> Option<i32> {
        self.child.wait().expect("its end").code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The test itself may have ended it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// New terminal, and the standard streams of programs on it.
pub(crate) fn terminal() -> (File, impl Fn() -> Stdio) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC);
    let master = master.expect("a terminal");
    grantpt(&master).expect("a terminal of our own");
    unlockpt(&master).expect("a terminal that can be opened");
    let name = ptsname(&master, Vec::new()).expect("a name");
    let stream = move || {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = open(name.as_c_str(), flags, Mode::empty()).expect("a terminal");
        Stdio::from(file)
    };
    (File::from(master), stream)
}

/// Serving process, stopped when dropped, and its message when it became ready.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) ready: Value,
}

impl Server {
    /// Starts `hearthnet ARGS` as a user and waits for its ready line in JSON.
    pub(crate) fn start(home: &Home, args: &[&str]) -> Self {
        Self::run(&mut home.hearthnet(args))
    }

    /// Starts any command and waits for its ready line in JSON.
    pub(crate) fn run(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("hearthnet starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        if line.is_empty() {
            let mut why = String::new();
            let stderr = child.stderr.as_mut().expect("a pipe");
            let _ = stderr.read_to_string(&mut why);
            panic!("{command:?} did not start: {why}");
        }
        let ready = serde_json::from_str(&line).expect("a JSON line");
        Self { child, ready }
    }

    /// Starts `hearthnet serve` of a model as a user, with its HTTP interface at a free port, with
    /// `before` in front of the command and `after` behind it.
    pub(crate) fn api(home: &Home, before: &[&str], model: &str, after: &[&str]) -> Self {
        let serve = ["serve", "--json", "--lifeline", "--http", "127.0.0.1:0"];
        Self::start(home, &[before, &serve, &["--model", model], after].concat())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(pid(self.child.id()), signal).expect("it runs");
    }

    /// Sends a signal, and returns the exit status.
    pub(crate) fn end(&mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        self.child.wait().expect("its end")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The test itself may have ended it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Host process.
pub(crate) struct Host {
    pub(crate) process: Server,
    pub(crate) address: String,
}

impl Host {
    /// Starts `shard serve` for a range of layers, admitting one node.
    pub(crate) fn start(
        home: &Home,
        model: &str,
        layers: &str,
        admit: &str,
        extra: &[&str],
    ) -> Self {
        Self::start_with(home, model, layers, admit, extra, &[])
    }

    /// Starts it with environment variables.
    pub(crate) fn start_with(
        home: &Home,
        model: &str,
        layers: &str,
        admit: &str,
        extra: &[&str],
        environment: &[(&str, &str)],
    ) -> Self {
        let serve = [&["shard", "serve"][..], &ENABLE, &["--json", "--lifeline"]].concat();
        let what = ["--model", model, "--layers", layers, "--threads", "1"];
        let args = [&serve[..], &what, &["--peer-key", admit], extra].concat();
        let process = Server::run(home.hearthnet(&args).envs(environment.iter().copied()));
        let address = process.ready["address"].as_str().expect("an address");
        Self {
            address: address.to_owned(),
            process,
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }
}

pub(crate) fn pid(id: u32) -> Pid {
    Pid::from_raw(id as i32).expect("a process id")
}

/// Output of a command, which is killed, and named in a panic, if it still runs after ten minutes: one
/// that serves instead of failing would hold up all tests.
#[track_caller]
fn output(child: Child, args: &[&str]) -> Output {
    let id = child.id();
    let (give, take) = mpsc::channel();
    std::thread::spawn(move || give.send(child.wait_with_output()));
    match take.recv_timeout(5 * TIMEOUT) {
        Ok(output) => output.expect("its end"),
        Err(_) => {
            kill_process(pid(id), Signal::KILL).expect("it runs");
            panic!("{args:?} did not end");
        }
    }
}

/// Waits until a process, possibly not a child, has ended; panics after [`TIMEOUT`].
pub(crate) fn wait_for_end(id: u32) {
    // A process that has ended already has no descriptor to wait on.
    let Ok(fd) = pidfd_open(pid(id), PidfdFlags::empty()) else {
        return;
    };
    let timeout = Timespec {
        tv_sec: TIMEOUT.as_secs() as i64,
        tv_nsec: 0,
    };
    let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).expect("poll");
    assert_eq!(ready, 1, "process {id} is still running");
}

/// Sends a process SIGINT, as Ctrl-C does.
pub(crate) fn interrupt(child: &Child) {
    kill_process(pid(child.id()), Signal::INT).expect("it runs");
}

/// Host that admits a home, with a user of its own.
pub(crate) fn host(home: &Home, layers: &str, extra: &[&str]) -> Host {
    Host::start(&Home::new(), model(), layers, &home.node_id(), extra)
}

/// Such hosts of these layer ranges.
pub(crate) fn hosts(home: &Home, ranges: &[&str], extra: &[&str]) -> Vec<Host> {
    ranges
        .iter()
        .map(|range| host(home, range, extra))
        .collect()
}

/// Index of the host, among some, that runs layers of a chat according to its frames.
pub(crate) fn serving(
    frames: &[Value],
    ids: &[impl AsRef<str>],
    among: impl IntoIterator<Item = usize>,
) -> usize {
    let ready = told(frames, "shard_status");
    let serves = |at: &usize| {
        ready
            .iter()
            .any(|status| status["host"] == ids[*at].as_ref())
    };
    among.into_iter().find(serves).expect("one of them")
}

/// Number in a line of the kernel's status of a process, such as `VmRSS:` in KiB.
pub(crate) fn kernel_number(id: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.unwrap_or_else(|| panic!("no {name} in {status}"))
}

/// Child processes of a process.
pub(crate) fn children_of(id: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{id}/task")).expect("the process runs");
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .filter_map(|id| id.parse().ok())
        .collect()
}

/// Process that computes for a daemon: the only child of its starter.
pub(crate) fn engine_of(daemon: u32) -> u32 {
    let [starter] = children_of(daemon)[..] else {
        panic!("not one starter of {daemon}: {:?}", children_of(daemon));
    };
    match children_of(starter)[..] {
        [engine] => engine,
        ref other => panic!("not one engine of {daemon}: {other:?}"),
    }
}

/// Runs a command to its successful end and returns the frames that it prints, one per line. After
/// `count` frames `on_frames` is called once with the frames so far.
pub(crate) fn frames(
    command: &mut Command,
    count: usize,
    on_frames: impl FnOnce(&[Value]),
) -> Vec<Value> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("hearthnet starts");
    let stdout = child.stdout.take().expect("a pipe");
    let (mut frames, mut on_frames) = (Vec::new(), Some(on_frames));
    for line in BufReader::new(stdout).lines() {
        let line = line.expect("a line");
        frames.push(serde_json::from_str::<Value>(&line).expect("JSON"));
        if frames.len() == count
            && let Some(on_frames) = on_frames.take()
        {
            on_frames(&frames);
        }
    }
    let output = child.wait_with_output().expect("its end");
    assert!(output.status.success(), "{}", text(&output.stderr));
    frames
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Writes a small Gemma 4 of six layers with per-layer embeddings. It can be cut before layers 1 and
/// 2.
pub(crate) fn layer_inputs(folder: &Path) -> PathBuf {
    let families = "../crates/hearthnet-files/tests/data/families";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(families);
    let file = hearthnet_files::Gguf::open(&path.join("gemma4ple.gguf")).expect("a file");
    let path = folder.join("layer-inputs.gguf");
    let bytes = hearthnet_testkit::with_tiny_vocabulary(&file, 1024);
    std::fs::write(&path, bytes).expect("a writable folder");
    path
}

/// File of the real model, for every `--model` here.
pub(crate) fn model() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| {
        let path = hearthnet_testkit::smollm2();
        path.to_str().expect("a UTF-8 path").to_owned()
    });
    &PATH
}

/// Polls until `is` holds. Returns the time taken. Pauses between polls, because the polled process
/// may need the same core.
pub(crate) fn until(what: &str, mut is: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    start.elapsed()
}

/// Repeats a command until it succeeds: the nodes that it needs may not be known yet.
pub(crate) fn until_answered(mut ask: impl FnMut() -> Output) -> Output {
    let start = Instant::now();
    loop {
        let output = ask();
        if output.status.success() {
            return output;
        }
        assert!(start.elapsed() < TIMEOUT, "{}", text(&output.stderr));
    }
}

/// Data of all frames of one kind.
pub(crate) fn told<'a>(frames: &'a [Value], event: &str) -> Vec<&'a Value> {
    let of_kind = frames.iter().filter(|frame| frame["event"] == event);
    of_kind.map(|frame| &frame["data"]).collect()
}

/// `examples/chat_app.py`, beside a home's running node.
pub(crate) fn chat_app(home: &Home, args: &[&str]) -> Output {
    python("../examples/chat_app.py")
        .args(args)
        .env("HEARTHNET_DATA_DIR", home.path().join("data"))
        .output()
        .expect("Python starts")
}

/// JSON output of a script in `tests/clients`.
pub(crate) fn client(script: &str, args: &[&str]) -> Value {
    let mut client = python(&format!("../tests/clients/{script}"));
    json_output(&client.args(args).output().expect("Python starts"))
}

/// Sets the permissions of a file.
pub(crate) fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("permissions");
}

/// Permissions of a file.
pub(crate) fn mode(path: &Path) -> u32 {
    let about = std::fs::metadata(path).expect("a file");
    about.permissions().mode() & 0o777
}

/// Script of the repository, by its path from this crate, in the Python that has the third-party
/// packages of the tests.
pub(crate) fn python(script: &str) -> Command {
    let python = std::env::var_os("HEARTHNET_TEST_PYTHON")
        .unwrap_or_else(|| panic!("run tests/run, or set HEARTHNET_TEST_PYTHON to its Python"));
    let mut command = Command::new(python);
    command
        .arg("-B")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(script))
        .env("PYTHONIOENCODING", "utf-8");
    command
}

/// Output of a program that must have succeeded.
#[track_caller]
pub(crate) fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// JSON output of a program that must have succeeded.
#[track_caller]
pub(crate) fn json_output(output: &Output) -> Value {
    serde_json::from_str(&succeeded(output)).expect("one JSON object on standard output")
}

/// Asserts that a program's standard error contains these words.
#[track_caller]
pub(crate) fn assert_complains(output: &Output, words: &str) {
    let complaint = text(&output.stderr);
    assert!(complaint.contains(words), "{words}: {complaint}");
}

/// Asserts that a text contains each of these words.
#[track_caller]
pub(crate) fn assert_contains(said: &str, words: &[&str]) {
    for words in words {
        assert!(said.contains(words), "{words}: {said}");
    }
}

/// Asserts a failure of the program: exit status, code on standard output (JSON), a hint, and no
/// sign of a panic.
pub(crate) fn assert_fails(output: &Output, status: i32, code: &str) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "{out}{err}");
    assert!(!err.contains("panicked"), "{err}");
    assert!(err.contains("error: "), "{err}");
    let line = out.lines().last().unwrap_or_default();
    let value: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {out}{err}"));
    assert_eq!(value["error"]["code"], code, "{out}{err}");
}
