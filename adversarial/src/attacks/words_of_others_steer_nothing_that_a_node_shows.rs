//! A member says what it is called, which model it serves and on which software; a host that is asked what happened
//! tells it in its own words, or says why it does not. The real program shows all of that, to people and to
//! programs: it must take its place there and do nothing else, and no line may be one that another node has made.

use std::sync::Arc;

use hearthnet_bus::calls::{
    Answering, Authority, CallContext, CallError, CallServer, Code, FrameSink, Handler, Registry,
    Research, Trust,
};
use hearthnet_bus::flight::Readers;
use hearthnet_bus::log::{Body, EventLog};
use hearthnet_bus::node::bus_rule;
use hearthnet_bus::{Descriptor, NodeId, now_ms};
use hearthnet_text::is_plain;
use hearthnet_transport::{Admission, Arrival, CloseCode, Config, Hello, Listener};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::bench::new_key;
use crate::program::{Program, Said};
use crate::raw::cbor;
use crate::{Bench, Findings, HarnessError};

/// What looks like a line of the program's own.
const FORGED: &str = "10:00:00.000 all is well";
/// What is said where no control character is let through, and where one may be.
const NAME: &str = "evil\u{202e}live\u{200b}\u{2028}\u{e0041}";
const WORDS: &str = "evil\u{1b}]0;owned\u{7}\u{9b}2J\r\n10:00:00.000 all is well\u{202e}";

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, _] = bench.members();
    let named = cbor(&[
        ("name", WORDS.into()),
        ("software", "x".into()),
        ("endpoints", ciborium::Value::Array(Vec::new())),
    ]);
    let author = &bench.test_community()?.attacker;
    let named = author.say("node.seen", "node", now_ms(), 60_000, named);
    let pushed = bench
        .gossip(&attacker)
        .await?
        .push(&[named.signed(&attacker)])
        .await;
    let what = "a name that speaks to a terminal";
    found.taken(what, (0, 1), Some("log_malformed"), &pushed);

    let descriptor = Descriptor {
        model_id: NAME.to_owned(),
        shard_id: Descriptor::shard_id(NAME, 0, 1),
        layer_range: (0, 1),
        host: attacker.id(),
        software: NAME.to_owned(),
        ..bench.victim.descriptor.clone()
    };
    let home = bench.test_community()?.home("operator")?;
    let log = EventLog::open(&home)?;
    log.append(
        &attacker,
        Body::ShardAdvertised(Box::new(descriptor)),
        now_ms(),
    )?;
    let seen = Body::NodeSeen {
        endpoints: vec![format!("{NAME}:1"), "127.0.0.1:1".to_owned()],
        name: NAME.to_owned(),
        software: NAME.to_owned(),
    };
    log.append(&attacker, seen, now_ms())?;
    let name = NAME.to_owned();
    log.append(&attacker, Body::Named { name }, now_ms())?;
    drop(log);

    let folder = tempfile::tempdir()?;
    let program = Program::new(bench.program(), folder.path(), &home);
    let telling = played(Ok(vec![page("failed_over"), page(WORDS)])).await?;
    let refusing = played(Err(CallError::new(Code::BUSY, WORDS).with_hint(WORDS))).await?;
    let lost = played(Ok(vec![json!({ "records": WORDS })])).await?;
    let hosts = [&telling, &refusing, &lost].map(|host| host.at.as_str());
    let [a, b, c] = hosts;
    let shards = ["--shard", a, "--shard", b, "--shard", c];
    for (what, args, evil) in [
        ("status", &["status"][..], true),
        ("status for programs", &["status", "--json"], true),
        ("diagnose", &[&["diagnose"][..], &shards].concat(), true),
        (
            "diagnose for programs",
            &[&["diagnose", "--json"][..], &shards].concat(),
            true,
        ),
        ("a check of the log", &["log", "verify"], false),
    ] {
        let Said { output, errors } = program.says(args).await?;
        let whole = format!("{output}{errors}");
        let told = !evil || output.contains("evil");
        found.check_or(format!("{what}: what others say"), "told", told, || {
            whole.clone()
        });
        let acts = |c: &char| !matches!(c, '\n' | '\t') && !is_plain(*c);
        let acts: String = whole.chars().filter(acts).collect();
        let of = format!("{what}: characters that do more than take their place");
        found.same(of, "\"\"", format!("{acts:?}"));
        let forged = whole.lines().filter(|line| line.trim().starts_with(FORGED));
        found.same(
            format!("{what}: lines that another node has made"),
            0,
            forged.count(),
        );
    }
    bench.goes_on(found).await
}

/// A page of a flight record, of which everything is the host's own words.
fn page(kind: &str) -> Value {
    let stamp = |mono_us: u64| json!({ "unix_ms": now_ms(), "mono_us": mono_us });
    json!({
        "run": 1, "began": stamp(0), "now": stamp(90_000_000), "forgotten": 0,
        "records": [{
            "seq": 1, "at": stamp(89_000_000),
            "event": {
                "kind": kind, "pipeline": "7ZZZZZZZZZZZZZZZZZZZZZZZZZ", "shard": WORDS,
                "host": null, "replacements": [], "ms": 1, "replayed": 1, "code": WORDS,
                WORDS: WORDS,
            },
        }],
    })
}

/// A host that lets everybody in, and answers whoever asks what happened.
struct Played {
    at: String,
    task: JoinHandle<()>,
}

impl Drop for Played {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn played(answer: Result<Vec<Value>, CallError>) -> Result<Played, HarnessError> {
    let key = new_key()?;
    let registry = Registry::new();
    let offered = registry.register(
        Readers::Callers(key.id()).descriptor(),
        Arc::new(Told(answer)),
    );
    offered.map_err(HarnessError::attacker)?;
    let server = CallServer::new(key.id(), Arc::new(registry), Arc::new(Open));
    let server = Arc::new(server);
    let (identity, config, rules) = (key.identity()?, Config::default(), [bus_rule()]);
    let listening = Listener::bind("127.0.0.1:0", &identity, Arc::new(Open), config, &rules);
    let mut listener = listening.await?;
    let at = format!("{}#{}", listener.local_addr(), key.id());
    let task = tokio::spawn(async move {
        loop {
            if let Arrival::Peer(socket) = listener.accept().await {
                let server = Arc::clone(&server);
                tokio::spawn(async move { server.serve(socket).await });
            }
        }
    });
    Ok(Played { at, task })
}

struct Told(Result<Vec<Value>, CallError>);

impl Handler for Told {
    fn call(&self, _: CallContext, _: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            for page in self.0.as_ref().map_err(Clone::clone)? {
                out.send("page", page).await?;
            }
            Ok(json!({}))
        })
    }
}

struct Open;

impl Admission for Open {
    fn admit_peer(&self, _: &NodeId) -> bool {
        true
    }

    fn admit_path(&self, _: &NodeId, _: &str) -> Result<(), CloseCode> {
        Ok(())
    }

    fn admit_hello(&self, _: &NodeId, _: &Hello, _: u64) -> Result<(), CloseCode> {
        Err(CloseCode::PurposeUnknown)
    }
}

impl Authority for Open {
    fn trust(&self, _: &NodeId) -> Trust {
        Trust::Member
    }

    fn research(&self) -> Research {
        Research::On
    }
}
