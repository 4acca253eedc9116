//! A question and its answer stay with the user. A unique text is sent over HTTP, through the local
//! API and by a command, in requests that succeed and in requests that fail. Afterwards it is
//! searched for, as text, as token ids and in some encodings, where others could find it:
//!
//! | where | must hold |
//! |---|---|
//! | the wire between caller and host, copied by a tap | nothing: TLS |
//! | logs of caller and host at `trace`, files below the data, cache, state and temporary folders of both, metrics, the flight record, error messages | nothing |
//! | the memory of the host, at any time | nothing: the host gets rows of numbers |
//! | the memory of the caller's daemon, after the answers have ended and no conversation is in the prefix cache | nothing: freed memory is wiped |
//! | a core dump of either | there is none |
//!
//! Reading the memory needs root. Stacks and registers of a thread are not wiped but overwritten by
//! its next work: the claim is that the answers and one later question have done so. The user's
//! terminal and the client's own memory are not searched. Command lines are visible to all users
//! (`specs/threat-model.md`): the text is never in one.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::interval;

use super::prelude::*;
use crate::canary::Canary;
use crate::household::{ask, send};
use crate::program::{Daemon, Program};

/// Time limit until freed data must be gone.
const SETTLE: Duration = Duration::from_secs(20);
/// Tokens of an answer.
const TOKENS: u32 = 48;

/// Home directory of a user, with a folder for temporary files.
struct Home {
    folder: TempDir,
    program: Program,
}

impl Home {
    fn new(bench: &Bench) -> Result<Home> {
        let folder = tempfile::tempdir()?;
        let data = folder.path().join("data");
        for folder in [&data, &folder.path().join("tmp")] {
            std::fs::create_dir_all(folder)?;
        }
        let program = Program::new(bench.program(), folder.path(), &data).logging("trace");
        Ok(Home { folder, program })
    }

    fn key(&self) -> Result<NodeKey> {
        let file = self.folder.path().join("data").join(KEY_FILE);
        NodeKey::load_or_create(&file).map_err(HarnessError::honest)
    }
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let (asks, serves) = (Home::new(bench)?, Home::new(bench)?);
    let models = tempfile::tempdir()?;
    let file = Model::Tiny.description().write(models.path());
    let file = file.display().to_string();
    let caller = asks.key()?.id().to_string();
    let shard = ["shard", "serve", "--model", &file, "--layers", "0-1"];
    let host = [&shard[..], &["--peer-key", &caller]].concat();
    let host = serves.program.start(&host).await?;
    let place = host.ready["address"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let (endpoint, node) = place.split_once('#').unwrap_or_default();
    let tap = Tap::listen(endpoint.parse()?).await?;
    let at = format!("{}#{node}", tap.addr);
    let keep = "research.distributed_inference.kept_conversations=1";
    // All layers on the host, which then receives rows of the embedding table: more than by
    // default.
    let all = "research.distributed_inference.private_first_layers=0";
    let serve = [
        "--set", keep, "--set", all, "--model", &file, "--shard", &at,
    ];
    let daemon = asks.program.serve(&serve).await?;

    let canary = Canary::new()?;
    let mut shown = asked(&daemon, &canary, found).await?;
    // Through the local API.
    let chat = ["chat", "--model", &file, "--max-tokens", "8"];
    let said = asks.program.says_of(&chat, canary.text()).await?;
    shown.push(("output of a chat over the service", said.errors));
    found.check(
        "connections to the host",
        "through the tap",
        tap.copied().len(),
        tap.copied().len() > 10_000,
    );
    remembered(found, &canary, &daemon, &host)?;

    // Another question displaces the conversation from the prefix cache.
    let other = Canary::new()?;
    let (status, _) = completion(&daemon, other.text(), TOKENS).await?;
    found.same("another question", 200, status);
    forgotten(found, &canary, &daemon).await?;

    // The connection to the host ends during an answer, which both daemons log.
    tap.cut();
    let (status, _) = completion(&daemon, canary.text(), TOKENS).await?;
    found.same(
        "a question whose host disconnects, continued locally",
        200,
        status,
    );
    shown.push(("metrics", get(&daemon, "/metrics").await?));
    for (what, args) in [
        ("status", &["status", "--json"][..]),
        ("diagnose", &["diagnose", "--json", "--shard", &place]),
        ("diagnose for people", &["diagnose", "--shard", &place]),
    ] {
        let said = asks.program.says(args).await?;
        shown.push((what, said.output + &said.errors));
    }
    for (what, text) in shown {
        hits(found, &format!("{what}: the text"), &canary.hits(&text));
    }
    hits(found, "the wire: the text", &canary.hits(tap.copied()));
    dumped(found, &canary, daemon, host).await?;
    for (what, home) in [("the caller's", &asks), ("the host's", &serves)] {
        let folder = home.folder.path();
        hits(
            found,
            &format!("{what} files: the text"),
            &canary.in_files(folder)?,
        );
    }
    searches(found, &canary, models.path()).await
}

fn hits(found: &mut Findings, what: &str, hits: &[impl std::fmt::Display]) {
    let first: Vec<String> = hits.iter().take(4).map(ToString::to_string).collect();
    let seen = format!("{} hits {}", hits.len(), first.join("; "));
    found.check(what, "no hits", seen, hits.is_empty());
}

/// Sends requests over HTTP that succeed and requests that are refused. Returns the error messages.
async fn asked(
    daemon: &Daemon,
    canary: &Canary,
    found: &mut Findings,
) -> Result<Vec<(&'static str, String)>> {
    let text = canary.text();
    let model = model(daemon).await?;
    let message = |text: &str| json!([{ "role": "user", "content": text }]);
    for stream in [false, true] {
        let messages = message(text);
        let body =
            json!({ "model": model, "messages": messages, "max_tokens": TOKENS, "stream": stream });
        let told = ask(daemon.http(), "/v1/chat/completions", &body.to_string()).await?;
        let status = told.map_or(0, |(status, _)| status);
        found.same(format!("a chat, streamed: {stream}"), 200, status);
    }
    let (status, _) = completion(daemon, text, TOKENS).await?;
    found.same("a completion", 200, status);
    let long = text.repeat(8);
    let mut shown = Vec::new();
    let chat = |messages: Value| json!({ "model": model, "messages": messages }).to_string();
    let (foreign, odd) = (
        json!([{ "role": "x", "content": text }]),
        json!([{ "role": "user", "content": { "of": text } }]),
    );
    let tools = json!({ "model": model, "messages": message(text), "tools": [text] });
    for (what, body) in [
        ("a refusal: too long", chat(message(&long))),
        ("a refusal: a wrong role", chat(foreign)),
        ("a refusal: no text", chat(odd)),
        ("a refusal: a field of another type", chat(json!(text))),
        ("a refusal: tools", tools.to_string()),
        (
            "a refusal: no JSON",
            format!("{{ \"messages\": [\"{text}\" {text}"),
        ),
    ] {
        let told = ask(daemon.http(), "/v1/chat/completions", &body).await?;
        let (seen, body) = told.unwrap_or_default();
        found.same(what, 400, seen);
        shown.push((what, body));
    }
    Ok(shown)
}

async fn model(daemon: &Daemon) -> Result<Value> {
    let listed: Value = serde_json::from_str(&get(daemon, "/v1/models").await?)?;
    Ok(listed["data"][0]["id"].clone())
}

async fn get(daemon: &Daemon, path: &str) -> Result<String> {
    let told = ask(daemon.http(), path, "").await?;
    Ok(told.unwrap_or_default().1)
}

/// Sends a text completion. Returns the status and the completion.
async fn completion(daemon: &Daemon, prompt: &str, tokens: u32) -> Result<(u16, String)> {
    let body = json!({ "model": model(daemon).await?, "prompt": prompt, "max_tokens": tokens });
    let told = ask(daemon.http(), "/v1/completions", &body.to_string()).await?;
    let (status, body) = told.unwrap_or_default();
    let body: Value = serde_json::from_str(&body).unwrap_or_default();
    let text = body["choices"][0]["text"].as_str();
    Ok((status, text.unwrap_or_default().to_owned()))
}

/// While a conversation is in the prefix cache, the caller's daemon has its tokens in memory, and
/// the host does not.
fn remembered(found: &mut Findings, canary: &Canary, daemon: &Daemon, host: &Daemon) -> Result<()> {
    if let Some(seen) = canary.in_memory(daemon.pid()?)? {
        let held = seen.iter().any(|hit| hit.starts_with("token ids"));
        let what = "while a conversation is kept: its tokens";
        found.check(what, "found", seen.len(), held);
    }
    if let Some(seen) = canary.in_memory(host.pid()?)? {
        hits(found, "the host's memory: the text", &seen);
    }
    Ok(())
}

/// After another conversation has displaced it, the daemon has no trace of it.
async fn forgotten(found: &mut Findings, canary: &Canary, daemon: &Daemon) -> Result<()> {
    let (begin, mut asking) = (Instant::now(), interval(Duration::from_millis(50)));
    loop {
        asking.tick().await;
        let Some(seen) = canary.in_memory(daemon.pid()?)? else {
            return Ok(());
        };
        if seen.is_empty() || begin.elapsed() >= SETTLE {
            hits(found, "the caller's memory after the end: the text", &seen);
            return Ok(());
        }
    }
}

/// Crashes both daemons and searches for core dumps.
async fn dumped(found: &mut Findings, canary: &Canary, daemon: Daemon, host: Daemon) -> Result<()> {
    for (what, process) in [("the caller", daemon), ("the host", host)] {
        let (dumped, log) = process.crash().await?;
        found.same(
            format!("{what} crashes: a core dump is written"),
            false,
            dumped,
        );
        found.holds(format!("{what}'s log"), "has lines", log.contains(" INFO "));
        hits(
            found,
            &format!("{what}'s log: the text"),
            &canary.hits(&log),
        );
    }
    Ok(())
}

/// Proves that the search finds the text in a file and on a wire that contain it.
async fn searches(found: &mut Findings, canary: &Canary, folder: &Path) -> Result<()> {
    std::fs::write(folder.join("found"), canary.text())?;
    let files = canary.in_files(folder)?.len();
    found.same("files with the text, where there is one", 1, files);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let tap = Tap::listen(listener.local_addr()?).await?;
    let mut client = TcpStream::connect(tap.addr).await?;
    send(&mut client, "/", canary.text()).await?;
    let (mut came, _) = listener.accept().await?;
    let mut some = [0; 16];
    tokio::io::AsyncReadExt::read_exact(&mut came, &mut some).await?;
    let what = "a wire with the text";
    found.holds(what, "found", !canary.hits(tap.copied()).is_empty());
    Ok(())
}
