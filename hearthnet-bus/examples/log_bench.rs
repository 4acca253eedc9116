//! Benchmarks of the event log: its size over time, and the speed of synchronisation.
//!
//! ```text
//! cargo run --release -p hearthnet-bus --example log_bench -- month [DAYS [HOSTS]]
//! cargo run --release -p hearthnet-bus --example log_bench -- sync [EVENTS]
//! cargo run --release -p hearthnet-bus --example log_bench -- gossip [EVENTS]
//! cargo run --release -p hearthnet-bus --example log_bench -- join [EVENTS]
//! ```
//!
//! `month` simulates hosts (20) for some days (30): each advertises a shard every 30 seconds of
//! virtual time, and its addresses every two minutes. Every event is signed, verified and stored;
//! the events of one interval are one transaction, and the log is compacted every ten minutes. It
//! prints the size of the files as it goes.
//!
//! `sync` makes a log of durable events (100,000) by twenty anchors, and times how long an empty
//! log takes to receive all of them, by the functions heads, missing and receive.
//!
//! `gossip` does the same with two nodes on this machine, over TLS on the loopback interface. It
//! measures from the start of the second node until both logs are equal (handshakes, reading,
//! sending, verifying each signature, storing on disk, folding), while both share the machine's
//! cores.
//!
//! `join` times how long a new node takes to join at another one over TLS, from the connection
//! until it has the log (2,000 events by default). All use `TMPDIR`.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::{Client, Registry};
use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::{Invite, JoinRequest};
use hearthnet_bus::joining::{self, JoinHandler, join_through};
use hearthnet_bus::log::{
    ADVERT_LIFE_MS, Body, Event, EventHash, EventId, EventLog, Lane, Level, Policy,
};
use hearthnet_bus::node::{Node, NodeError, NodeSettings, bus_rule};
use hearthnet_bus::testing::{descriptor, key};
use hearthnet_bus::{CommunityId, Descriptor, NodeId, NodeKey, now_ms};
use hearthnet_transport::{Config, connect_path};

/// A day in November 2023, in Unix milliseconds: earlier than the clock of any machine here.
const START: u64 = 1_700_000_000_000;
const BEAT_MS: u64 = 30_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let mut number = |default| args.next().map_or(Ok(default), |text| text.parse::<u64>());
    let dir = tempfile::tempdir()?;
    match what.as_str() {
        "month" => month(dir.path(), number(30)?, number(20)?),
        "sync" => sync(dir.path(), number(100_000)?),
        "gossip" => tokio::runtime::Runtime::new()?.block_on(gossip(dir.path(), number(100_000)?)),
        "join" => tokio::runtime::Runtime::new()?.block_on(join(dir.path(), number(2_000)?)),
        _ => Err("say month, sync, gossip or join".into()),
    }
}

/// Total size of a log's files, in KiB.
fn size(dir: &Path) -> Result<u64, Box<dyn Error>> {
    let mut bytes = 0;
    for file in std::fs::read_dir(dir)? {
        bytes += file?.metadata()?.len();
    }
    Ok(bytes / 1024)
}

/// An author that signs events without a log.
struct Author {
    key: NodeKey,
    community: CommunityId,
    seq: u64,
    prev: EventHash,
    lamport: u64,
}

impl Author {
    fn new(key: NodeKey, community: CommunityId) -> Self {
        Self {
            key,
            community,
            seq: 0,
            prev: EventHash::ZERO,
            lamport: 10,
        }
    }

    fn sign(
        &self,
        seq: u64,
        time_ms: u64,
        lane: Lane,
        body: Body,
    ) -> Result<Vec<u8>, Box<dyn Error>> {
        let event = Event {
            community: self.community,
            author: self.key.id(),
            seq,
            lamport: self.lamport,
            time_ms,
            id: EventId::new(time_ms, u128::from(seq)),
            lane,
            body,
        };
        Ok(event.sign(&self.key)?)
    }

    fn say(&self, now_ms: u64, body: Body) -> Result<Vec<u8>, Box<dyn Error>> {
        let lane = Lane::Ephemeral {
            slot: body.slot().ok_or("a durable kind")?,
            expires_ms: now_ms + ADVERT_LIFE_MS,
        };
        self.sign(now_ms, now_ms, lane, body)
    }

    fn write(&mut self, lamport: u64, body: Body) -> Result<Vec<u8>, Box<dyn Error>> {
        self.seq += 1;
        self.lamport = lamport;
        let lane = Lane::Durable { prev: self.prev };
        let raw = self.sign(self.seq, START, lane, body)?;
        self.prev = EventHash::of(&raw).ok_or("no hash")?;
        Ok(raw)
    }
}

/// A community whose founder has admitted `count` members at `level`.
fn community(
    dir: &Path,
    count: u64,
    level: Level,
) -> Result<(EventLog, Vec<Author>), Box<dyn Error>> {
    let [root, founder, invite] = [1, 2, 3].map(key);
    let (name, policy) = ("Elm Street", Policy::default());
    let log = EventLog::create(dir, &root, founder.id(), name, policy, START)?;
    let id = log.community();
    let uses = u32::try_from(count)?;
    let expires_ms = START + 3_600_000;
    let invited = Body::Invited {
        invite: invite.id(),
        level,
        uses,
        expires_ms,
    };
    log.append(&root, invited, START)?;
    let mut members = Vec::new();
    for _ in 0..count {
        let key = NodeKey::generate()?;
        let request = JoinRequest::sign(&invite, id, key.id(), "attic")?;
        log.append(&founder, Body::Admitted { request, level }, START)?;
        members.push(Author::new(key, id));
    }
    Ok((log, members))
}

/// Receives events, all of which must be accepted.
fn take(log: &EventLog, batch: &[Vec<u8>], from: NodeId, now: u64) -> Result<(), Box<dyn Error>> {
    let received = log.receive(batch, from, now)?;
    match received.accepted.len() == batch.len() {
        true => Ok(()),
        false => Err(format!("refused: {:?}", received.refused).into()),
    }
}

fn month(dir: &Path, days: u64, hosts: u64) -> Result<(), Box<dyn Error>> {
    let (log, hosts) = community(dir, hosts, Level::Trusted)?;
    let me = hosts.first().ok_or("no hosts")?.key.id();
    let began = Instant::now();
    let (mut events, mut now) = (0u64, START);
    for hour in 0..days * 24 {
        for beat in 0..3_600_000 / BEAT_MS {
            now += BEAT_MS;
            let mut batch = Vec::new();
            for host in &hosts {
                batch.push(host.say(now, advert(&host.key, now))?);
                if beat % 4 == 0 {
                    batch.push(host.say(now, seen())?);
                }
            }
            take(&log, &batch, me, now)?;
            events += batch.len() as u64;
            if beat % 20 == 0 {
                log.compact(now)?;
            }
        }
        if hour < 3 || (hour + 1) % 24 == 0 {
            println!(
                "after {:>4} h: {events:>8} events, {:>5} KiB",
                hour + 1,
                size(dir)?
            );
        }
    }
    let live = log.state().shards(now).count();
    println!(
        "{live} shards live; {:.0} s of real time",
        began.elapsed().as_secs_f64()
    );
    let path = log.path().to_owned();
    drop(log);
    println!("closed: {} KiB", std::fs::metadata(path)?.len() / 1024);
    let found = EventLog::open(dir)?.verify()?;
    println!("verified: {found:?}");
    Ok(())
}

/// A log of `count` durable events, and two nodes of its community that wrote none of them.
fn filled(dir: &Path, count: u64) -> Result<(EventLog, [NodeKey; 2]), Box<dyn Error>> {
    let (log, mut anchors) = community(dir, 20, Level::Anchor)?;
    // The authors change the policy in turn, so that every event has an effect.
    let (node, other) = (anchors.pop(), anchors.pop());
    let (node, other) = node.zip(other).ok_or("too few anchors")?;
    let lamport = 1000;
    let began = Instant::now();
    let mut batch = Vec::new();
    for i in 0..count {
        let turn = usize::try_from(i)? % anchors.len();
        let body = Body::PolicyChanged(Policy {
            research: i % 2 == 0,
            ..Policy::default()
        });
        batch.push(anchors[turn].write(lamport + i, body)?);
        if batch.len() == 1000 || i + 1 == count {
            take(&log, &batch, node.key.id(), START)?;
            batch.clear();
        }
    }
    let (seconds, kib) = (began.elapsed().as_secs_f64(), size(dir)?);
    println!("made {count} events in {seconds:.1} s; {kib} KiB");
    Ok((log, [node.key, other.key]))
}

fn sync(dir: &Path, count: u64) -> Result<(), Box<dyn Error>> {
    let to_dir = dir.join("to");
    let (log, [node, _]) = filled(&dir.join("from"), count)?;
    let node = node.id();
    let to = EventLog::prepare(&to_dir, log.community())?;
    let began = Instant::now();
    let (mut theirs, mut events, mut bytes, mut batches) = (to.heads(), 0, 0, 0);
    loop {
        let batch = log.missing(&theirs, 1000, 1 << 20)?;
        events += batch.events.len();
        bytes += batch.events.iter().map(Vec::len).sum::<usize>();
        batches += 1;
        to.receive(&batch.events, node, START)?;
        if !batch.more {
            break;
        }
        theirs = batch.then;
    }
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "took over {events} events ({} KiB) in {batches} batches in {seconds:.2} s: {:.0} events/s",
        bytes / 1024,
        events as f64 / seconds
    );
    if to.state().state_hash() != log.state().state_hash() || to.heads() != log.heads() {
        return Err("the two logs differ".into());
    }
    let began = Instant::now();
    drop(to);
    EventLog::open(&to_dir)?;
    println!(
        "opened, checked and folded again in {:.2} s",
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

async fn start(
    key: NodeKey,
    log: &EventLog,
    peers: Vec<StaticPeer>,
    registry: Registry,
) -> Result<Node, NodeError> {
    let mut settings = NodeSettings::new("bench");
    settings.listen = Some("127.0.0.1:0".into());
    settings.discovery.mdns = false;
    settings.discovery.static_peers = peers;
    Node::start(Arc::new(key), log.clone(), settings, Arc::new(registry)).await
}

async fn join(dir: &Path, count: u64) -> Result<(), Box<dyn Error>> {
    let (log, [first, _]) = filled(&dir.join("from"), count)?;
    let (id, now) = (first.id(), now_ms());
    let until = now / 1000 + 3600;
    let invite = Invite::generate(log.community(), until, Vec::new())?;
    let invited = Body::Invited {
        invite: invite.key().id(),
        level: Level::Member,
        uses: 1,
        expires_ms: until * 1000,
    };
    log.append(&first, invited, now)?;
    let registry = Registry::new();
    let key = Arc::new(NodeKey::from_secret(&first.secret()));
    let handler = JoinHandler::new(log.clone(), key);
    registry.register(joining::descriptor(), Arc::new(handler))?;
    let first = start(first, &log, Vec::new(), registry).await?;
    let addr = first.listen_addr().ok_or("no listener")?.to_string();
    let empty = EventLog::prepare(&dir.join("to"), log.community())?;
    let begin = Instant::now();
    let key = Arc::new(NodeKey::generate()?);
    let (own, config) = (key.identity()?, Config::default());
    let socket = connect_path(&addr, &own, Some(id), &bus_rule(), &config).await?;
    let client = Client::new(socket, Arc::clone(&key));
    let request = invite.request(key.id(), "bench")?;
    join_through(&client, id, &request, &empty, |_| {}).await?;
    println!("joined in {:.3} s", begin.elapsed().as_secs_f64());
    first.shutdown().await;
    Ok(())
}

async fn gossip(dir: &Path, count: u64) -> Result<(), Box<dyn Error>> {
    let (log, [first, second]) = filled(&dir.join("from"), count)?;
    let id = first.id();
    let first = start(first, &log, Vec::new(), Registry::new()).await?;
    let addr = first.listen_addr().ok_or("no listener")?;
    let empty = EventLog::prepare(&dir.join("to"), log.community())?;
    let (begin, processor) = (Instant::now(), processor_seconds());
    let peers = vec![StaticPeer::new(addr, Some(id))];
    let second = start(second, &empty, peers, Registry::new()).await?;
    let mut changes = empty.changes();
    let durable = |log: &EventLog| -> u64 { log.heads().authors.values().map(|h| h.seq).sum() };
    let all = durable(&log);
    while durable(&empty) < all {
        tokio::time::timeout(Duration::from_secs(60), changes.changed()).await??;
    }
    let seconds = begin.elapsed().as_secs_f64();
    if empty.state().state_hash() != log.state().state_hash() {
        return Err("the two logs differ".into());
    }
    let rate = all as f64 / seconds;
    println!("{all} events in {seconds:.2} s: {rate:.0} events/s");
    if let (Some(before), Some(after)) = (processor, processor_seconds()) {
        let taken = after - before;
        let rate = all as f64 / taken;
        println!("{taken:.2} s of processor time for both nodes: {rate:.0} events/s of one core");
    }
    second.shutdown().await;
    first.shutdown().await;
    Ok(())
}

/// Processor time of this process, in seconds.
fn processor_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / 100.0)
}

fn seen() -> Body {
    Body::NodeSeen {
        endpoints: vec!["192.168.1.20:7600".into(), "[fe80::1234]:7600".into()],
        name: "attic".into(),
        software: "hearthnet/0.1.0".into(),
    }
}

fn advert(host: &NodeKey, now_ms: u64) -> Body {
    Body::ShardAdvertised(Box::new(Descriptor {
        shard_id: "smollm2-135m:0-7".into(),
        model_id: "smollm2-135m".into(),
        total_layers: 30,
        vram_required_mb: 40,
        endpoint: "192.168.1.20:7600".into(),
        advertised_at: now_ms / 1000,
        ms_per_token: 3.25,
        queue_depth: 1,
        ..descriptor(host.id())
    }))
}
