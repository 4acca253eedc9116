//! `hearthnet status`: members, peers, layers, health and the log; without a community, the service
//! of this machine.
//!
//! Everything except live connections is in the log, so the command works without a running node:
//! it first syncs with other members. A running node reports its connected peers through the local
//! API.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use futures_util::future::{join_all, select_ok};
use hearthnet_bus::NodeId;
use hearthnet_bus::discovery::{Claims, Local};
use hearthnet_bus::joining::JOINS_MS;
use hearthnet_bus::log::{Advert, Community, Level, LogHealth};
use hearthnet_http::KeyUse;
use hearthnet_orchestrator::coverage::{Coverage, by_model};
use hearthnet_orchestrator::exact::is_exact;
use hearthnet_orchestrator::health::{AuditCounts, Standing};
use hearthnet_orchestrator::placement::runs_text;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::answering::local_service::standalone_status;
use crate::cli::{Failure, block_on, bytes, note, print, print_json, span, table};
use crate::config::{Config, Context};
use crate::home::{Home, HttpKeys, KeyStatus, Paused, key_status, members, now_ms};
use crate::models::text_disagreement;
use crate::node::{Running, SoFar, find_home, no_community, sync_or_note};

pub(crate) fn run(json: bool, cx: &Context) -> Result<(), Failure> {
    let Some(home) = find_home(cx)? else {
        return without_community(json, cx);
    };
    let (running, hosts) = block_on(async {
        sync_or_note(&home, &cx.config).await;
        let params = json!({ "hosts": true });
        let running = Running::ask(&home.dir, &params).await;
        let hosts = match &running {
            Some(running) => running.hosts.clone(),
            None => probe_hosts(&home).await,
        };
        Ok((running, hosts))
    })?;
    // Reads events that a running node has received meanwhile.
    if let Err(error) = home.log.update() {
        tracing::warn!("the event log could not be read: {error}");
    }
    let state = home.state();
    let now = now_ms();
    // Hosts that advertised after the probe count as reachable.
    let answers = |host: &NodeId| hosts.get(host).copied().unwrap_or(true);
    // No route uses a convicted host.
    let serves = |host: &NodeId| answers(host) && !state.reputation(host).is_convicted();
    let models = by_model(state.shards(now), serves);
    let disputes = state
        .disputes()
        .filter(|(_, case)| state.outcome(case).is_none());
    let open_disputes = disputes.count();
    let keys = named_keys(running.as_ref(), &home.dir);
    let (health, reason) = health(home.log.health());
    let disk = try_disk(&home.dir);
    let paused = Paused::read(&home.dir);
    let heads = home.log.heads();
    let durable: u64 = heads.authors.values().map(|head| head.seq).sum();
    let ephemeral: usize = heads.authors.values().map(|head| head.slots.len()).sum();
    let size = log_bytes(&home);
    let ahead = key_status::dated_ahead(&home, running.as_ref().map(|it| &it.dated_ahead));
    let back = key_status::dated_back(&home);
    let log = json!({
        "dated_ahead": ahead,
        "dated_back": back,
        "durable_events": durable,
        "ephemeral_events": ephemeral,
        "bytes": size,
        "health": health,
        "reason": reason,
        "disk": disk.as_ref().err(),
        "state_hash": hex::encode(state.state_hash()),
        "frozen": state.frozen().map(|(node, _)| node.to_string()).collect::<Vec<_>>(),
    });
    if json {
        return print_json(&json!({
            "node": {
                "id": home.key.id().to_string(),
                "short": home.key.id().short(),
                "level": state.level(&home.key.id()),
                "revoked": state.is_revoked(&home.key.id()),
                "standing": key_status::json(&home),
                "running": running,
                "paused": paused,
                "research": cx.config.policy.research.enable,
            },
            "community": {
                "id": home.log.community().to_string(),
                "name": state.name,
                "policy": {
                    "research": state.policy.research,
                    "who_may_invite": state.policy.who_may_invite,
                },
            },
            "members": members::json(&state, &home.key.id(), &back),
            "open_disputes": open_disputes,
            "http_keys": keys,
            "models": models.iter().map(|m| model_json(m, &state, now, &answers)).collect::<Vec<_>>(),
            "log": log,
        }));
    }
    let mut out = String::new();
    heading(&mut out, &home, &state, &cx.config);
    roster(&mut out, &home, &state, now, running.as_ref());
    if open_disputes > 0 {
        let _ = writeln!(
            out,
            "\ndisputes   {open_disputes} open (`hearthnet audit list`)"
        );
    }
    given(&mut out, &state, running.as_ref());
    peers(&mut out, &state, now, running.as_ref());
    http_keys(&mut out, &keys);
    if let Some(paused) = paused.filter(|_| running.as_ref().is_none_or(|r| r.suspended.is_none()))
    {
        let _ = writeln!(out, "layers     {paused}; `hearthnet resume` ends that");
    }
    for model in &models {
        shards(&mut out, model, &state, now, &answers);
    }
    hosts_seen(&mut out, &state, running.as_ref());
    if models.is_empty() {
        let how = match state.models().is_empty() {
            true => "an anchor chooses a model with `hearthnet model adopt MODEL`",
            false => "`hearthnet up` on a trusted node does",
        };
        let _ = writeln!(out, "\nlayers     no host serves any; {how}");
    }
    let _ = writeln!(
        out,
        "\nlog        {durable} events and {ephemeral} short-lived ones, {}; {}",
        bytes(size),
        match (reason, disk) {
            (None, Ok(())) if ahead.is_empty() => "healthy".to_owned(),
            (None, Ok(())) => "NOT THE SAME EVERYWHERE".to_owned(),
            (Some(why), _) => format!("READ-ONLY: {why}"),
            (None, Err(why)) => format!("NOTHING CAN BE WRITTEN: {why}"),
        }
    );
    let back = key_status::dated_back_line(&state, &back);
    for line in ahead.into_iter().chain(back) {
        let _ = writeln!(out, "           {line}");
    }
    print(out)
}

/// Timeout of a probe connection.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Probes the addresses of all hosts at once with a TCP connection, without a running node.
async fn probe_hosts(home: &Home) -> BTreeMap<NodeId, bool> {
    let (state, now) = (home.state(), now_ms());
    let own = home.key.id();
    let claims = Claims::new(&state, &[], Local::read(&[]), now);
    let asked = state.shards(now).map(|advert| {
        let told = state.endpoints_of(&advert.author, now).to_vec();
        let told = told.into_iter().chain([advert.descriptor.endpoint.clone()]);
        let addresses: BTreeSet<SocketAddr> = told.filter_map(|at| claims.admit(&at)).collect();
        async move {
            let tries = addresses.into_iter().map(TcpStream::connect).map(Box::pin);
            let connects = async { tries.len() > 0 && select_ok(tries).await.is_ok() };
            // No node runs here, so its own layers are not served.
            let is_there =
                advert.author != own && timeout(PROBE_TIMEOUT, connects).await.unwrap_or(false);
            (advert.author, is_there)
        }
    });
    join_all(asked).await.into_iter().collect()
}

/// Writes a page into the data directory and removes it again, to test the disk as the log uses it.
fn try_disk(dir: &Path) -> Result<(), String> {
    use std::io::Write as _;
    let path = dir.join(format!(".status.{}.tmp", std::process::id()));
    let written = std::fs::File::create(&path).and_then(|mut file| {
        file.write_all(&[0; 4096])?;
        file.sync_data()
    });
    // Fails only if the file was not created, in which case nothing is left.
    let _ = std::fs::remove_file(&path);
    written.map_err(|e| format!("{}: {e}", dir.display()))
}

fn heading(out: &mut String, home: &Home, state: &Community, config: &Config) {
    let id = home.key.id();
    let level = match state.level(&id) {
        Some(level) => match KeyStatus::of(home) {
            KeyStatus::Refused(by) => format!("revoked, says {by}"),
            _ => level.to_string(),
        },
        None if state.is_revoked(&id) => "revoked".to_owned(),
        None if state.is_frozen(&id) => "frozen: two histories were signed with its key".to_owned(),
        None => "no member".to_owned(),
    };
    let research = match (config.policy.research.enable, state.policy.research) {
        (true, true) => "on",
        (false, _) => "off here (policy.research.enable)",
        (true, false) => "off in the community (`hearthnet community policy --research on`)",
    };
    let _ = writeln!(
        out,
        "community  {} ({})\nthis node  {} ({level})\nresearch   {research}",
        state.name,
        home.log.community().short(),
        state.label(&id, now_ms()),
    );
    let (joined, _) = state.joined_since(now_ms().saturating_sub(JOINS_MS), &id);
    if joined > 0 {
        let _ = writeln!(out, "joined     {joined} in the last {}", span(JOINS_MS));
    }
}

fn roster(out: &mut String, home: &Home, state: &Community, now: u64, running: Option<&Running>) {
    let all = members::table(state, "member", |node| {
        let mut peers = running.into_iter().flat_map(|running| &running.peers);
        let connected = peers.any(|peer| peer.connected && peer.node == *node);
        match (members::judged(state, node), *node == home.key.id()) {
            _ if state.is_frozen(node) => "frozen",
            (Some(judged), _) => judged,
            (_, true) if running.is_some() => "this node, running",
            (_, true) => "this node, not running",
            _ if connected => "connected",
            _ if state.nodes(now).any(|seen| seen.node == *node) => "seen recently",
            _ => "",
        }
    });
    let _ = write!(out, "\n{all}");
}

/// Contributions of each home, as it announces them once a day, and those of the running node up to
/// now.
fn given(out: &mut String, state: &Community, running: Option<&Running>) {
    let table = members::given(state, "gave");
    if !table.is_empty() {
        let _ = write!(
            out,
            "\n{table}  by each home's own count, once a day; a token through half of the layers counts half\n"
        );
    }
    let so_far = running.and_then(|running| running.gave);
    if let Some(gave) = so_far.filter(|gave| *gave != SoFar::default()) {
        let _ = writeln!(
            out,
            "\ngave       this node up to now: {} tokens, {} of serving layers, {} of weights",
            gave.tokens,
            members::hours(gave.minutes),
            bytes(gave.weights_bytes)
        );
    }
}

fn peers(out: &mut String, state: &Community, now: u64, running: Option<&Running>) {
    let Some(running) = running else {
        out.push_str("\npeers      no node runs here; `hearthnet up` starts one\n");
        return;
    };
    let listen = running.listen.as_deref().unwrap_or("nowhere");
    let (mdns, isolation) = (&running.mdns, &running.isolation);
    let _ = writeln!(
        out,
        "\nlistening  {listen}; mDNS {mdns}\nisolated   {isolation}"
    );
    if let Some(why) = &running.suspended {
        let _ = writeln!(out, "layers     none are served here for now: {why}");
    }
    if running.peers.is_empty() {
        out.push_str("peers      none\n");
        return;
    }
    let rows = running.peers.iter().map(|peer| {
        let name = Some(state.shown_name(&peer.node, now)).filter(|name| !name.is_empty());
        [
            name.unwrap_or_else(|| peer.node.to_string()),
            peer.endpoint.clone(),
            peer.found.clone(),
            if peer.connected {
                "connected"
            } else {
                "not connected"
            }
            .to_owned(),
        ]
    });
    out.push_str(&table("peer|at|found by|", rows));
}

/// Status without a community: the service that answers programs of this machine.
fn without_community(json: bool, cx: &Context) -> Result<(), Failure> {
    let dir = cx.global.dir()?;
    let running = block_on(async { Ok(standalone_status(&dir).await) })?;
    let keys = named_keys(running.as_ref(), &dir);
    if running.is_none() && keys.is_empty() {
        return Err(no_community());
    }
    if json {
        return print_json(&json!({
            "node": {"running": running}, "community": null, "http_keys": keys,
        }));
    }
    let mut out = "community  none: `hearthnet community create NAME` founds one, `hearthnet community join CODE` joins one\n".to_owned();
    let url = running.and_then(|running| running.url);
    let service = match &url {
        Some(url) => format!("answers at {url}"),
        None => "none runs here; `hearthnet serve --local` starts one".to_owned(),
    };
    let _ = writeln!(out, "service    {service}");
    http_keys(&mut out, &keys);
    print(out)
}

/// Named keys of the HTTP interface, with their use if it runs.
fn named_keys(running: Option<&Running>, dir: &Path) -> Vec<KeyUse> {
    if let Some(running) = running {
        return running.keys.clone();
    }
    let keys = HttpKeys::read(dir).unwrap_or_else(|why| {
        note(format!("warning: {why}"));
        HttpKeys::default()
    });
    let unused = keys.named().into_iter().map(|key| KeyUse {
        name: key.name,
        limits: key.limits,
        ..KeyUse::default()
    });
    unused.collect()
}

/// Limits and use of the named keys of the HTTP interface.
fn http_keys(out: &mut String, keys: &[KeyUse]) {
    if keys.is_empty() {
        return;
    }
    let limit = |most: Option<u64>| most.map_or_else(|| "-".to_owned(), |most| most.to_string());
    let rows = keys.iter().map(|key| {
        let counts = [
            u64::from(key.running),
            key.requests,
            key.tokens,
            key.refused,
        ];
        let limits = [
            key.limits.requests.map(u64::from),
            key.limits.tokens_per_minute,
            key.limits.tokens_per_day,
        ];
        let mut row = vec![key.name.clone()];
        row.extend(counts.map(|count| count.to_string()));
        row.extend(limits.map(limit));
        row
    });
    let header = "HTTP key|running|requests|tokens|refused|most at a time|per minute|per day";
    let table = table(header, rows);
    let _ = write!(out, "\n{table}");
}

/// Health of hosts as the running node's chats measured it, over about ten minutes.
fn hosts_seen(out: &mut String, state: &Community, running: Option<&Running>) {
    let all = running.map_or(&[][..], |running| &running.host_health);
    // Chats do not use hosts that lost the right to serve.
    let may_serve = |host: &NodeId| state.level(host) >= Some(Level::Trusted);
    let all: Vec<_> = all.iter().filter(|one| may_serve(&one.host)).collect();
    if all.is_empty() {
        return;
    }
    let ms = |value: Option<f64>| value.map_or_else(String::new, |ms| format!("{ms:.2} ms"));
    let rows = all.iter().map(|one| {
        let speed = one.shards.first();
        let failures = one.failures.iter();
        let failures: Vec<String> = failures
            .filter(|(_, worth)| **worth >= 0.1)
            .map(|(kind, worth)| format!("{} {worth:.1}", kind.into_str()))
            .collect();
        [
            state.label(&one.host, now_ms()),
            match one.standing {
                Standing::Quarantined => format!("quarantined, {}", span(one.quarantine_ms)),
                standing => standing.into_str().to_owned(),
            },
            match one.last_seen_ms {
                Some(ms) if one.online => format!("{} ago", span(ms)),
                Some(ms) => format!("did not answer; last did {} ago", span(ms)),
                None => "did not answer".to_owned(),
            },
            ms(speed.map(|speed| speed.p50_ms)),
            ms(speed.map(|speed| speed.p95_ms)),
            audits(&one.audits),
            failures.join(", "),
        ]
    });
    let table = table(
        "asked|standing|seen|p50/layer|p95/layer|audits|failures",
        rows,
    );
    let _ = write!(out, "\n{table}");
}

/// How much of a host's answers can be audited, and what audits have found.
fn audits(counts: &AuditCounts) -> String {
    let AuditCounts {
        answers,
        signed,
        confirmed,
        mismatches,
        not_auditable,
        ..
    } = *counts;
    if answers == 0 {
        return String::new();
    }
    if signed == 0 {
        return "not auditable".to_owned();
    }
    let mut found = vec![format!("{}% signed", signed.min(answers) * 100 / answers)];
    let results = [
        (confirmed, "confirmed"),
        (mismatches, "wrong"),
        (not_auditable, "without another host"),
    ];
    let results = results.iter().filter(|(count, _)| *count > 0);
    found.extend(results.map(|(count, what)| format!("{count} {what}")));
    found.join(", ")
}

fn shards(
    out: &mut String,
    model: &Coverage<'_>,
    state: &Community,
    now: u64,
    answers: &dyn Fn(&NodeId) -> bool,
) {
    let total = model.total;
    let covered = match model.missing.is_empty() {
        true => format!("all {total} layers are served"),
        false => format!(
            "missing layers {} of {total}; `hearthnet plan` says which home could hold them, or how \
             much memory is missing",
            runs_text(&model.missing)
        ),
    };
    let _ = writeln!(out, "\n{}  {covered}", model.names.join(" = "));
    let rows = model.shards.iter().map(|advert| {
        let d = &advert.descriptor;
        [
            state.label(&advert.author, now_ms()),
            format!("{}-{}", d.layer_range.0, d.layer_range.1),
            // Memory for the weights, and for the KV cache.
            format!("{} + {} MiB", d.weights_mb, d.kv_mb),
            format!("{} of {}", d.queue_depth, d.max_concurrent_streams),
            if d.ms_per_token > 0.0 {
                format!("{:.2}", d.ms_per_token)
            } else {
                String::new()
            },
            address(advert, state, now),
            match answers(&advert.author) {
                _ if state.reputation(&advert.author).is_convicted() => "CONVICTED".to_owned(),
                true => span(advert.expires_ms.saturating_sub(now)),
                false => "UNREACHABLE".to_owned(),
            },
        ]
    });
    out.push_str(&table(
        "host|layers|memory|streams|ms/token|at|holds for",
        rows,
    ));
    for advert in &model.shards {
        let arithmetic = &advert.descriptor.arithmetic;
        if !is_exact(arithmetic) {
            let host = state.label(&advert.author, now);
            let _ = writeln!(out, "  {host} is not exact: it computes with {arithmetic}");
        }
    }
    for advert in &model.shards {
        if let Some(card) = advert.descriptor.card() {
            let host = state.label(&advert.author, now);
            let _ = writeln!(out, "  {host} computes on a graphics card: {card}");
        }
    }
    if let Some(disagreement) = text_disagreement(model, state, now) {
        let _ = writeln!(out, "  warning: {disagreement}");
    }
}

/// Address of a host: the advertised one, unless the host has since reported others.
fn address(advert: &Advert, state: &Community, now: u64) -> String {
    let told = state.endpoints_of(&advert.author, now).to_vec();
    let advertised = &advert.descriptor.endpoint;
    match told.first() {
        Some(first) if !told.contains(advertised) => first.clone(),
        _ => advertised.clone(),
    }
}

fn model_json(
    model: &Coverage<'_>,
    state: &Community,
    now: u64,
    answers: &dyn Fn(&NodeId) -> bool,
) -> Value {
    let shards = model.shards.iter().map(|advert| {
        json!({
            "node": advert.author.to_string(),
            "name": state.name_of(&advert.author, now),
            "expires_in_ms": advert.expires_ms.saturating_sub(now),
            "reachable": answers(&advert.author),
            "convicted": state.reputation(&advert.author).is_convicted(),
            "address": address(advert, state, now),
            "descriptor": advert.descriptor,
            "text": advert.descriptor.text_id(),
        })
    });
    json!({
        "model_id": model.names.first(),
        "names": model.names,
        "weights_sha256": model.weights,
        "total_layers": model.total,
        "missing_layers": model.missing,
        "complete": model.missing.is_empty(),
        "shards": shards.collect::<Vec<_>>(),
    })
}

/// Size of the log and its write-ahead log, in bytes.
fn log_bytes(home: &Home) -> u64 {
    let size = |tail: &str| {
        let mut path = home.log.path().as_os_str().to_owned();
        path.push(tail);
        std::fs::metadata(path).map_or(0, |meta| meta.len())
    };
    size("") + size("-wal")
}

/// Health code of the log, with the reason.
fn health(health: LogHealth) -> (&'static str, Option<String>) {
    match health {
        LogHealth::Ok => ("ok", None),
        LogHealth::ReadOnly { reason, .. } => ("read_only", Some(reason)),
        LogHealth::Damaged { what, .. } => ("damaged", Some(what)),
        _ => ("read_only", Some("unknown".to_owned())),
    }
}
