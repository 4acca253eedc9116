//! How fast a new node takes over a community's history: two nodes on this machine, one with
//! 100,000 signed events of ten authors, one with none, over TLS on the loopback interface.
//!
//! ```text
//! cargo run --release -p hearthnet-bus --example sync_throughput [EVENTS]
//! ```
//!
//! Counted is from the start of the second node to the moment when its log says the same of itself
//! as the first one's: discovery of the address, handshakes, reading, sending, verifying each
//! signature, storing on disk, folding. Both nodes share the machine's cores.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::Registry;
use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::JoinRequest;
use hearthnet_bus::log::{Body, Event, EventHash, EventId, EventLog, Lane, Level, Policy};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::now_ms;
use hearthnet_bus::{CommunityId, NodeKey};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Each stays within an author's quota.
const AUTHORS: u8 = 10;

fn key(seed: u8) -> NodeKey {
    NodeKey::from_secret(&[seed; 32])
}

/// Seconds of processor time that this process has taken.
fn processor_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / 100.0)
}

/// Notes of ten members, as different nodes would have written them.
fn fill(log: &EventLog, events: u64) -> Result<()> {
    let (founder, invite, now) = (key(1), key(100), now_ms());
    let invited = Body::Invited {
        invite: invite.id(),
        level: Level::Member,
        uses: u32::from(AUTHORS),
        expires_ms: now + 3_600_000,
    };
    log.append(&founder, invited, now)?;
    for seed in 2..2 + AUTHORS {
        let request = JoinRequest::sign(&invite, log.community(), key(seed).id(), "member")?;
        let level = Level::Member;
        log.append(&founder, Body::Admitted { request, level }, now)?;
    }
    let each = events / u64::from(AUTHORS);
    for seed in 2..2 + AUTHORS {
        let key = key(seed);
        let (mut prev, mut batch) = (EventHash::ZERO, Vec::new());
        for seq in 1..=each {
            let event = Event {
                community: log.community(),
                author: key.id(),
                seq,
                lamport: 100 + seq,
                time_ms: now,
                id: EventId::new(now, u128::from(seq) << 8 | u128::from(seed)),
                lane: Lane::Durable { prev },
                body: Body::Unknown {
                    kind: "example.note".into(),
                    slot: None,
                    // A text of 60 characters, as CBOR.
                    bytes: [&[0x78, 60][..], &[b'a'; 60]].concat(),
                },
            };
            let raw = event.sign(&key)?;
            prev = EventHash::of(&raw).ok_or("no hash")?;
            batch.push(raw);
            if batch.len() == 1000 || seq == each {
                let received = log.receive(&batch, key.id(), now)?;
                if let Some((_, why)) = received.refused.first() {
                    return Err(why.to_string().into());
                }
                batch.clear();
            }
        }
    }
    Ok(())
}

async fn node(seed: u8, log: EventLog, peers: Vec<StaticPeer>) -> Result<Node> {
    let mut settings = NodeSettings::new(format!("node {seed}"));
    settings.listen = Some("127.0.0.1:0".into());
    settings.discovery.mdns = false;
    settings.discovery.static_peers = peers;
    let registry = Arc::new(Registry::new());
    Ok(Node::start(Arc::new(key(seed)), log, settings, registry).await?)
}

#[tokio::main]
async fn main() -> Result<()> {
    let events = match std::env::args().nth(1) {
        Some(number) => number.parse()?,
        None => 100_000,
    };
    let dir = std::env::temp_dir().join(format!("hearthnet-sync-{}", std::process::id()));
    let measured = measure(&dir, events).await;
    let _ = std::fs::remove_dir_all(&dir);
    measured
}

async fn measure(dir: &std::path::Path, events: u64) -> Result<()> {
    let root = key(200);
    let (home, founder) = (dir.join("first"), key(1).id());
    let log = EventLog::create(
        &home,
        &root,
        founder,
        "Elm Street",
        Policy::default(),
        now_ms(),
    )?;
    let begin = Instant::now();
    fill(&log, events)?;
    println!("filled in {:.1} s", begin.elapsed().as_secs_f64());
    let first = node(1, log.clone(), Vec::new()).await?;
    let addr = first.listen_addr().ok_or("no listener")?;

    let empty = EventLog::prepare(&dir.join("second"), CommunityId::from(root.id()))?;
    let (begin, processor) = (Instant::now(), processor_seconds());
    let peer = StaticPeer::new(addr, Some(founder));
    let second = node(2, empty.clone(), vec![peer]).await?;
    let mut changes = empty.changes();
    let durable = |log: &EventLog| -> u64 { log.heads().authors.values().map(|h| h.seq).sum() };
    let all = durable(&log);
    while durable(&empty) < all {
        let _ = tokio::time::timeout(Duration::from_secs(60), changes.changed()).await?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    assert_eq!(empty.state().state_hash(), log.state().state_hash());
    let rate = all as f64 / seconds;
    println!("{all} events in {seconds:.2} s: {rate:.0} events/s");
    if let (Some(before), Some(after)) = (processor, processor_seconds()) {
        let taken = after - before;
        println!(
            "{taken:.2} s of processor time for both nodes: {:.0} events/s of one core",
            all as f64 / taken
        );
    }
    second.shutdown().await;
    first.shutdown().await;
    Ok(())
}
