//! A member announces its addresses, and every node connects to them. If it could announce services
//! on the others' own machines, or a hundred ports of a third party, all nodes would connect there
//! as often as it wants.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ciborium::Value;
use tokio::net::TcpListener;

use super::prelude::*;

/// Announced services of the host's machine, per batch, and number of batches.
const AT_ONCE: usize = 8;
const BATCHES: u64 = 8;
/// Observation time: the absence of connections can only be tested by waiting.
const WATCHED: Duration = Duration::from_secs(3);

/// Announcement of a member's addresses.
fn seen(author: &Author, seq: u64, endpoints: &[String]) -> Vec<u8> {
    let endpoints = endpoints
        .iter()
        .map(|at| Value::from(at.as_str()))
        .collect();
    let body = cbor(&[
        ("name", "kim".into()),
        ("software", "s".into()),
        ("endpoints", Value::Array(endpoints)),
    ]);
    author
        .say("node.seen", "node", seq, 120_000, body)
        .signed(author.key())
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [_, guest] = bench.members();
    let knocks = Arc::new(AtomicUsize::new(0));
    let mut services: Vec<String> = Vec::new();
    for _ in 0..AT_ONCE as u64 * BATCHES {
        let service = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        services.push(service.local_addr()?.to_string());
        let knocks = Arc::clone(&knocks);
        tokio::spawn(async move {
            while service.accept().await.is_ok() {
                knocks.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    // The other members announce an address that must not be tried either.
    let test_community = bench.community()?;
    let elsewhere = seen(
        &test_community.guest,
        now_ms(),
        &["192.0.2.10:80".to_owned()],
    );
    let events: Vec<Vec<u8>> = (1..)
        .zip(services.chunks(AT_ONCE))
        .map(|(n, at)| seen(&test_community.attacker, now_ms() + n, at))
        .collect();
    let mut gossip = bench.gossip(&guest).await?;
    found.taken("the guest's address", (1, 0), None, &gossip.push(&[elsewhere]).await);
    for event in events {
        let what = "services of the host's own machine, announced as the attacker's";
        found.taken(what, (1, 0), None, &gossip.push(&[event]).await);
    }
    tokio::time::sleep(WATCHED).await;
    found.same("connections to them", 0, knocks.load(Ordering::Relaxed));
    bench.still_works(found).await
}
