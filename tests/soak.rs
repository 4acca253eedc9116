//! Many callers of one service over three host processes. Some cancel, some disconnect, some read
//! slowly, and there are more callers than slots. Every complete answer equals that of this machine
//! alone. Afterwards none of the four processes holds a stream, page, credit, task, descriptor,
//! thread or memory more than before.
//!
//! A sample runs with every test. All 50 chats, twice, and a tenfold overload with a table of
//! results:
//!
//! ```text
//! cargo test -p hearthnet --test program -- soak:: --ignored --nocapture
//! ```
//!
//! Chats come in two equal waves. The first wave allocates everything that a process needs; any
//! growth in the second wave is a leak.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use hearthnet_bus::Capability;
use hearthnet_bus::calls::Client;
use hearthnet_testkit::SplitMix64;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::support::gauges::Gauges;
use crate::support::http::Reply;
use crate::support::*;

const PROMPTS: [&str; 4] = [
    "Tell me a story about a whale.",
    "Name three colours, and say why.",
    "What is bread made of?",
    "Why do the stars shine at night? Explain it to a child who asks again and again.",
];
/// Tokens of the longest answer.
const LONGEST: usize = 48;
const SEED: u64 = 7;
const TEMPERATURE: f64 = 0.8;

/// Layer range of each host.
const LAYERS: [&str; 3] = ["0-9", "10-19", "20-29"];

/// Running and queued chats that the service allows: fewer than there are callers.
const PLACES: usize = 3;
const WAITING: usize = 3;

/// Memory tolerance, because an allocator returns memory at any time.
const RSS_SLACK_KB: u64 = 16 << 10;

/// Process of a host or of the service, with the address of its metrics.
struct Process {
    name: String,
    id: u32,
    metrics: String,
    /// Gauges that are zero when the process is idle.
    gauges: &'static [&'static str],
}

/// Three hosts and a service over them.
struct Mesh {
    home: Home,
    service: Server,
    address: String,
    model: String,
    processes: Vec<Process>,
    /// Text of each token of the longest answer, by prompt.
    answers: Vec<Vec<String>>,
    _hosts: Vec<Host>,
}

impl Mesh {
    fn start() -> Self {
        let (home, path) = (Home::new(), model());
        let hosts = hosts(&home, &LAYERS, &gauges::SHOWN);
        let settings = [
            "policy.research.enable=true".to_owned(),
            format!("research.distributed_inference.max_concurrent_pipelines={PLACES}"),
            format!("research.distributed_inference.max_waiting_chats={WAITING}"),
            format!("research.distributed_inference.max_waiting_chats_per_caller={WAITING}"),
            // The prefix cache is off, because cached conversations look like a leak.
            "research.distributed_inference.kept_conversations=0".to_owned(),
        ];
        let settings: Vec<&str> = settings.iter().flat_map(|s| ["--set", s]).collect();
        let over = shards(hosts.iter().map(|host| &host.address));
        let how = [&["--no-fallback"][..], &over].concat();
        let service = Server::api(&home, &settings, path, &how);
        let answers = PROMPTS.map(|prompt| alone(&home, path, prompt)).into();
        let address = http::address(&service);
        let mut processes: Vec<Process> = hosts
            .iter()
            .zip(LAYERS)
            .map(|(host, layers)| Process {
                name: format!("the host of layers {layers}"),
                id: host.process.child.id(),
                metrics: gauges::address(host),
                gauges: &gauges::HOST,
            })
            .collect();
        processes.push(Process {
            name: "the service".into(),
            id: service.child.id(),
            metrics: address.clone(),
            gauges: &gauges::SERVICE,
        });
        Self {
            model: service.ready["models"][0].as_str().expect("a model").into(),
            home,
            service,
            address,
            processes,
            answers,
            _hosts: hosts,
        }
    }

    fn request(&self, chat: &Chat) -> Value {
        json!({
            "model": self.model, "messages": [{"role": "user", "content": PROMPTS[chat.prompt]}],
            "max_tokens": chat.tokens, "temperature": TEMPERATURE, "seed": SEED,
            "user": format!("caller {}", chat.caller),
        })
    }

    /// Text of the first `tokens` tokens of an answer.
    fn says(&self, chat: &Chat, tokens: usize) -> String {
        let answer = &self.answers[chat.prompt];
        answer[..tokens.min(answer.len())].concat()
    }

    /// Repeats a request until it is accepted. Returns the answer and the number of refusals.
    fn ask(&self, body: &Value) -> (Reply, usize) {
        let deadline = Instant::now() + TIMEOUT;
        for refused in 0.. {
            let mut reply = Reply::chat(&self.address, body);
            if reply.status == 200 {
                return (reply, refused);
            }
            assert_busy(&mut reply);
            assert!(Instant::now() < deadline, "it is refused again and again");
            // Waits for the service's Retry-After.
            std::thread::sleep(reply.retry_after.expect("when to come again"));
        }
        unreachable!("a loop without end")
    }

    /// Waits until no chat runs or waits.
    fn until_idle(&self) {
        until("nothing runs and nothing waits", || {
            let health = http::get_json(&self.address, "/healthz");
            let idle = (&health["running"], &health["waiting"]) == (&json!(0), &json!(0));
            assert!(!idle || health["kept"] == 0, "{health}");
            idle
        });
    }
}

/// Text of each token, as this machine alone generates it.
fn alone(home: &Home, model: &str, prompt: &str) -> Vec<String> {
    let ask = ["chat", prompt, "--local", "--frames", "--model", model];
    let (seed, heat) = (
        format!("--seed={SEED}"),
        format!("--temperature={TEMPERATURE}"),
    );
    let tokens = format!("--max-tokens={LONGEST}");
    let said = home.says(&[&ask[..], &[&tokens, &seed, &heat]].concat());
    let frames = said.lines().map(serde_json::from_str);
    let frames: Vec<Value> = frames.map(|frame| frame.expect("a frame")).collect();
    let tokens = told(&frames, "token_delta").into_iter();
    let text = |token: &Value| token["text"].as_str().expect("a text").to_owned();
    tokens.map(text).collect()
}

fn assert_busy(reply: &mut Reply) {
    assert_eq!(reply.status, 429);
    let after = reply.retry_after.expect("when to come again");
    assert!((1..=60).contains(&after.as_secs()), "{after:?}");
    let body: Value = serde_json::from_str(&reply.text()).expect("JSON");
    assert_eq!(body["error"]["code"], "busy", "{body}");
    assert_eq!(body["error"]["type"], "rate_limit_error", "{body}");
}

/// Behaviour of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Manner {
    /// Reads the answer as one body.
    FullModel,
    /// Reads the stream at once.
    Stream,
    /// Reads the stream slowly.
    Slow,
    /// Disconnects in the middle of the answer.
    CutOff,
    /// Disconnects before it reads any text.
    Unread,
    /// Calls over the bus and cancels in the middle.
    Cancels,
}

#[derive(Debug, Clone)]
struct Chat {
    caller: usize,
    prompt: usize,
    tokens: usize,
    manner: Manner,
    /// Number of tokens after which it cancels or disconnects.
    gives_up_after: usize,
}

/// Plan of `count` chats of every manner and length.
fn plan(seed: u64, count: usize) -> Vec<Chat> {
    let mut numbers = SplitMix64(seed);
    let mut below = |n: usize| (numbers.next() % n as u64) as usize;
    let manners = [
        Manner::FullModel,
        Manner::Stream,
        Manner::CutOff,
        Manner::Cancels,
        Manner::Slow,
        Manner::Unread,
    ];
    (0..count)
        .map(|n| {
            let tokens = 2 + below(LONGEST - 1);
            Chat {
                caller: n,
                prompt: below(PROMPTS.len()),
                tokens,
                manner: manners[n % manners.len()],
                gives_up_after: 1 + below(tokens / 2 + 1),
            }
        })
        .collect()
}

/// Results of a wave.
#[derive(Debug, Default)]
struct Tally {
    complete: usize,
    given_up: usize,
    refused: usize,
}

/// Runs all chats, with more callers at once than slots.
fn wave(mesh: &Mesh, chats: &[Chat], callers: usize) -> Tally {
    let queue = Mutex::new(chats.iter().collect::<VecDeque<_>>());
    let tally = Mutex::new(Tally::default());
    std::thread::scope(|scope| {
        for _ in 0..callers {
            scope.spawn(|| {
                loop {
                    let Some(chat) = queue.lock().pop_front() else {
                        return;
                    };
                    let (complete, refused) = hold(mesh, chat);
                    let mut tally = tally.lock();
                    tally.refused += refused;
                    match complete {
                        true => tally.complete += 1,
                        false => tally.given_up += 1,
                    }
                }
            });
        }
    });
    mesh.until_idle();
    tally.into_inner()
}

/// Runs one chat. Returns whether it was complete, and the number of refusals.
fn hold(mesh: &Mesh, chat: &Chat) -> (bool, usize) {
    let mut body = mesh.request(chat);
    match chat.manner {
        Manner::FullModel => {
            let (mut reply, refused) = mesh.ask(&body);
            let answer: Value = serde_json::from_str(&reply.text()).expect("JSON");
            let tokens = answer["usage"]["completion_tokens"]
                .as_u64()
                .expect("a count");
            let said = answer["choices"][0]["message"]["content"].as_str();
            assert_eq!(
                said,
                Some(mesh.says(chat, tokens as usize).as_str()),
                "{chat:?}"
            );
            (true, refused)
        }
        Manner::Cancels => (false, cancel(mesh, chat)),
        manner => {
            body["stream"] = true.into();
            let (mut reply, refused) = mesh.ask(&body);
            if manner == Manner::Unread {
                return (false, refused);
            }
            let (mut said, mut tokens) = (String::new(), 0);
            while let Some(chunk) = reply.event() {
                assert!(chunk.get("error").is_none(), "{chat:?}: {chunk}");
                let delta = &chunk["choices"][0]["delta"]["content"];
                said.push_str(delta.as_str().unwrap_or_default());
                tokens += 1;
                if manner == Manner::CutOff && tokens > chat.gives_up_after {
                    assert!(
                        mesh.says(chat, LONGEST).starts_with(&said),
                        "{chat:?}: {said}"
                    );
                    return (false, refused);
                }
                if manner == Manner::Slow {
                    // Slow reading is the behaviour under test; the sleep waits for nothing.
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            assert_eq!(said, mesh.says(chat, chat.tokens), "{chat:?}");
            (true, refused)
        }
    }
}

/// Calls over the bus and cancels in the middle. Returns the number of refusals before.
fn cancel(mesh: &Mesh, chat: &Chat) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let dir = mesh.home.path().join("data/service");
        let bus = Client::connect_local(&dir).await.expect("the local API");
        let params = json!({
            "messages": [{"role": "user", "content": PROMPTS[chat.prompt]}],
            "max_tokens": chat.tokens, "temperature": TEMPERATURE, "seed": SEED,
        });
        for refused in 0.. {
            let mut call = bus.call(&Capability::chat(), &params).expect("a call");
            let (mut said, mut tokens) = (String::new(), 0);
            loop {
                let event = match call.next().await {
                    Ok(event) => event.expect("it is given up before its end"),
                    Err(error) => {
                        assert_eq!(error.code().as_str(), "busy", "{error}");
                        break tokio::time::sleep(Duration::from_millis(500)).await;
                    }
                };
                if event.name == "token_delta" {
                    said.push_str(event.data["text"].as_str().expect("a text"));
                    tokens += 1;
                }
                if tokens == chat.gives_up_after {
                    assert!(
                        mesh.says(chat, LONGEST).starts_with(&said),
                        "{chat:?}: {said}"
                    );
                    return refused;
                }
            }
        }
        unreachable!("a loop without end")
    })
}

/// Operating system resources of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holdings {
    /// Open descriptors by kind.
    descriptors: BTreeMap<String, usize>,
    threads: u64,
    rss_kb: u64,
}

impl Holdings {
    fn of(id: u32) -> Self {
        let mut descriptors = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{id}/fd")).expect("the process runs") {
            // The descriptor was closed meanwhile.
            let Ok(target) = std::fs::read_link(entry.expect("an entry").path()) else {
                continue;
            };
            *descriptors.entry(kind(&target)).or_default() += 1;
        }
        Self {
            descriptors,
            threads: kernel_number(id, "Threads:"),
            rss_kb: kernel_number(id, "VmRSS:"),
        }
    }

    /// True if the descriptors equal those of the idle process, and threads and memory do not
    /// exceed those after the first wave.
    fn as_before(&self, idle: &Self, first: &Self) -> bool {
        self.descriptors == idle.descriptors
            && self.threads <= first.threads
            && self.rss_kb <= first.rss_kb + RSS_SLACK_KB
    }
}

/// `socket:[123]` or `/tmp/abc` without its unique part.
fn kind(target: &Path) -> String {
    let target = target.to_string_lossy();
    match target.split_once(":[") {
        Some((kind, _)) => kind.to_owned(),
        None => target.into_owned(),
    }
}

/// Gauges of a process that are not zero when idle.
fn restless(process: &Process) -> Vec<String> {
    Gauges::at(&process.metrics).restless(process.gauges)
}

/// Proves that the gauges of every process react to a running chat, which then disconnects.
fn while_one_is_answered(mesh: &Mesh) {
    let chat = Chat {
        caller: 0,
        prompt: 0,
        tokens: 1000,
        manner: Manner::CutOff,
        gives_up_after: 1,
    };
    let mut body = mesh.request(&chat);
    body["stream"] = true.into();
    let (mut reply, _) = mesh.ask(&body);
    while reply
        .event()
        .is_some_and(|chunk| chunk["choices"][0]["delta"]["content"] == "")
    {}
    for process in &mesh.processes {
        assert!(
            !restless(process).is_empty(),
            "{} says nothing of it",
            process.name
        );
    }
    let gone = Instant::now();
    drop(reply);
    for process in &mesh.processes {
        until(&process.name, || restless(process).is_empty());
    }
    println!(
        "  a caller that was cut off was forgotten by all after {:?}",
        gone.elapsed()
    );
}

/// Runs two equal waves; growth in the second one is a leak.
fn soak(seed: u64, chats: usize, callers: usize) {
    let _alone = PROCESSORS.write();
    println!("seed {seed}: {chats} chats of {callers} callers at once, twice");
    let mesh = Mesh::start();
    let chats = plan(seed, chats);
    let holdings = || -> Vec<Holdings> {
        let processes = mesh.processes.iter();
        processes.map(|process| Holdings::of(process.id)).collect()
    };
    let idle = holdings();
    while_one_is_answered(&mesh);
    let first = wave(&mesh, &chats, callers);
    println!("  first wave: {first:?}");
    let after_first = holdings();
    let second = wave(&mesh, &chats, callers);
    println!("  second wave: {second:?}");
    for tally in [&first, &second] {
        assert_eq!(tally.complete + tally.given_up, chats.len());
        assert!(tally.refused > 0, "there were places for all");
    }
    // Tasks and threads end asynchronously, and hosts learn of the end of a stream a moment later.
    let deadline = Instant::now() + TIMEOUT;
    for ((process, idle), first) in mesh.processes.iter().zip(&idle).zip(&after_first) {
        loop {
            let (now, restless) = (Holdings::of(process.id), restless(process));
            if now.as_before(idle, first) && restless.is_empty() {
                println!("  {}: {now:?}", process.name);
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{} keeps {now:?}; idle {idle:?}, after the first wave {first:?}; {restless:?}",
                process.name
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

#[test]
fn a_dozen_chats_that_come_and_go_leave_nothing_behind() {
    soak(1, 12, 10);
}

#[test]
#[ignore = "takes minutes: see the header"]
fn fifty_chats_that_come_and_go_leave_nothing_behind() {
    soak(2, 50, 12);
}

/// Measurements of a storm.
#[derive(Debug, Default)]
struct Storm {
    /// Time from the accepted request to the first text, in milliseconds.
    first_ms: Vec<f64>,
    tokens: usize,
    refused: usize,
    seconds: f64,
    /// Maxima observed meanwhile.
    running: u64,
    waiting: u64,
    rss_kb: u64,
}

impl Storm {
    fn line(&mut self, load: &str) -> String {
        self.first_ms.sort_by(f64::total_cmp);
        let accepted = self.first_ms.len();
        let at = |percent: usize| self.first_ms[(accepted * percent).div_ceil(100).max(1) - 1];
        format!(
            "  {load:>5} {accepted:>8} {:>8} {:>6.1}% {:>8.1} {:>10.0} {:>10.0} {:>8.1}",
            self.refused,
            100.0 * self.refused as f64 / (self.refused + accepted) as f64,
            self.tokens as f64 / self.seconds,
            at(50),
            at(95),
            self.rss_kb as f64 / 1024.0,
        )
    }
}

/// Runs `callers` callers with `each` requests each; refused requests are repeated.
fn storm(mesh: &Mesh, callers: usize, each: usize, tokens: usize) -> Storm {
    let service = mesh.service.child.id();
    let began = Instant::now();
    let storm = Mutex::new(Storm::default());
    std::thread::scope(|scope| {
        let ask = |caller: usize| {
            let storm = &storm;
            scope.spawn(move || {
                for n in 0..each {
                    let chat = Chat {
                        caller,
                        prompt: (caller + n) % PROMPTS.len(),
                        tokens,
                        manner: Manner::Stream,
                        gives_up_after: 0,
                    };
                    let mut body = mesh.request(&chat);
                    body["stream"] = true.into();
                    let (mut reply, refused) = mesh.ask(&body);
                    let (mut said, mut first) = (String::new(), None);
                    while let Some(chunk) = reply.event() {
                        assert!(chunk.get("error").is_none(), "{chunk}");
                        let delta = &chunk["choices"][0]["delta"]["content"];
                        if let Some(text) = delta.as_str().filter(|text| !text.is_empty()) {
                            first.get_or_insert_with(|| reply.asked.elapsed());
                            said.push_str(text);
                        }
                    }
                    assert_eq!(said, mesh.says(&chat, tokens), "{chat:?}");
                    let mut storm = storm.lock();
                    storm
                        .first_ms
                        .push(first.expect("a word").as_secs_f64() * 1e3);
                    storm.tokens += tokens;
                    storm.refused += refused;
                }
            })
        };
        let asking: Vec<_> = (0..callers).map(ask).collect();
        while !asking.iter().all(|caller| caller.is_finished()) {
            let health = http::get_json(&mesh.address, "/healthz");
            let rss_kb = Holdings::of(service).rss_kb;
            let mut storm = storm.lock();
            let number = |name: &str| health[name].as_u64().expect("a number");
            storm.running = storm.running.max(number("running"));
            storm.waiting = storm.waiting.max(number("waiting"));
            storm.rss_kb = storm.rss_kb.max(rss_kb);
            drop(storm);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let mut storm = storm.into_inner();
    storm.seconds = began.elapsed().as_secs_f64();
    storm
}

/// Clients that occupy a connection: with an unfinished head, an unfinished body, or an unread
/// answer.
fn loiterers(mesh: &Mesh) -> Vec<TcpStream> {
    let post = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n";
    let json = "Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{\"model\": ";
    let ask = json!({
        "model": mesh.model, "messages": [{"role": "user", "content": PROMPTS[0]}],
        "max_tokens": 8, "stream": true, "user": "loiterer",
    });
    let unread = format!(
        "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{ask}",
        ask.to_string().len()
    );
    ["X-Slow: ", json, &unread]
        .iter()
        .cycle()
        .take(9)
        .map(|rest| {
            let mut stream = TcpStream::connect(&mesh.address).expect("the service listens");
            let request = format!("{post}{rest}");
            stream.write_all(request.as_bytes()).expect("a socket");
            stream
        })
        .collect()
}

/// Runs ten times as many callers as there are slots.
fn overload(each: usize, tokens: usize) {
    let _alone = PROCESSORS.write();
    let mesh = Mesh::start();
    let service = mesh.service.child.id();
    let mut calm = storm(&mesh, PLACES, each, tokens);
    mesh.until_idle();
    let before = Holdings::of(service);
    let loiterers = loiterers(&mesh);
    let mut wild = storm(&mesh, 10 * PLACES, each, tokens);
    println!("   load answered  refused   share tokens/s  first p50        p95  RSS MiB");
    println!("{}", calm.line("1x"));
    println!("{}", wild.line("10x"));
    assert_eq!(
        wild.first_ms.len(),
        10 * PLACES * each,
        "every caller is answered in the end"
    );
    assert!(wild.refused > 0, "it was no overload");
    assert!(
        wild.running <= PLACES as u64 && wild.waiting <= WAITING as u64,
        "{wild:?}"
    );
    assert!(
        wild.rss_kb < before.rss_kb + RSS_SLACK_KB,
        "{wild:?}, {before:?}"
    );
    drop(loiterers);
    mesh.until_idle();
    let mut after = storm(&mesh, 1, 1, tokens);
    println!("{}", after.line("after"));
    assert_eq!(after.refused, 0);
}

#[test]
fn a_tenfold_overload_is_refused_with_retry_after_and_served_in_the_end() {
    overload(1, 6);
}

#[test]
#[ignore = "measures: see the header"]
fn tenfold_overload_measured() {
    overload(4, 32);
}
