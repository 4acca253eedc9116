//! A member sends its name, its model and its software version; a host that is asked for its flight
//! record sends texts of its own, or an error. The real program shows all of this, to people and to
//! programs. The text must be harmless, and none of it may become a line of its own.

use hearthnet_bus::calls::{CallError, Code};
use hearthnet_bus::node::bus_rule;
use hearthnet_bus::testing::DiagnoseHost;
use hearthnet_text::is_plain;
use serde_json::{Value, json};

use super::prelude::*;
use crate::program::{Program, Said};

/// Looks like a line of the program's own output.
const FORGED: &str = "10:00:00.000 all is well";
/// Text for fields that refuse control characters, and for fields that do not.
const NAME: &str = "evil\u{202e}live\u{200b}\u{2028}\u{e0041}";
const WORDS: &str = "evil\u{1b}]0;owned\u{7}\u{9b}2J\r\n10:00:00.000 all is well\u{202e}";

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, _] = bench.members();
    let named = cbor(&[
        ("name", WORDS.into()),
        ("software", "x".into()),
        ("endpoints", ciborium::Value::Array(Vec::new())),
    ]);
    let author = &bench.community()?.attacker;
    let named = author.say("node.seen", "node", now_ms(), 60_000, named);
    let pushed = bench
        .gossip(&attacker)
        .await?
        .push(&[named.signed(&attacker)])
        .await;
    let what = "a name with control characters";
    found.taken(what, (0, 1), Some("log_malformed"), &pushed);

    let descriptor = Descriptor {
        model_id: NAME.to_owned(),
        shard_id: Descriptor::shard_id(NAME, 0, 1),
        layer_range: (0, 1),
        host: attacker.id(),
        software: NAME.to_owned(),
        ..bench.victim.descriptor.clone()
    };
    let home = bench.community()?.home("operator")?;
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
    let (rules, busy) = ([bus_rule()], CallError::new(Code::BUSY, WORDS));
    let telling = DiagnoseHost::start(Ok(vec![page("failed_over"), page(WORDS)]), &rules).await;
    let refusing = DiagnoseHost::start(Err(busy.with_hint(WORDS)), &rules).await;
    let lost = DiagnoseHost::start(Ok(vec![json!({ "records": WORDS })]), &rules).await;
    let hosts = [&telling, &refusing, &lost].map(|host| host.at.as_str());
    let [a, b, c] = hosts;
    let shards = ["--shard", a, "--shard", b, "--shard", c];
    let people = [&["diagnose"][..], &shards].concat();
    let programs = [&["diagnose", "--json"][..], &shards].concat();
    let members = ["community", "members", "--json"];
    for (what, args, evil) in [
        ("status", &["status"][..], true),
        ("status for programs", &["status", "--json"], true),
        ("diagnose", &people, true),
        ("diagnose for programs", &programs, true),
        ("members", &["community", "members"], true),
        ("members for programs", &members, true),
        ("invites", &["community", "invites"], false),
        ("the log", &["log", "show"], true),
        ("the log for programs", &["log", "export"], true),
        ("models", &["model", "list"], false),
        ("a check of the log", &["log", "verify"], false),
    ] {
        let Said { output, errors } = program.says(args).await?;
        let whole = format!("{output}{errors}");
        let told = !evil || output.contains("evil");
        found.check_or(format!("{what}: texts of others"), "shown", told, || {
            whole.clone()
        });
        let acts = |c: &char| !matches!(c, '\n' | '\t') && !is_plain(*c);
        let acts: String = whole.chars().filter(acts).collect();
        let of = format!("{what}: control characters");
        found.same(of, "\"\"", format!("{acts:?}"));
        let forged = whole.lines().filter(|line| line.trim().starts_with(FORGED));
        let what = format!("{what}: lines forged by another node");
        found.same(what, 0, forged.count());
    }
    bench.still_works(found).await
}

/// Page of a flight record in which every text is hostile.
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
