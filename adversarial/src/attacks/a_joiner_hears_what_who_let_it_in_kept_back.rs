//! Who lets a node in hands it the log, and can hand it one that ends before a revocation: its own, say.
//! A joiner asks another member before it believes that it is up to date, and knows when there was
//! none.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::log::{Body, Event, EventLog, Heads, Lane};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::{NodeId, NodeKey, now_ms};

use crate::victim::until;
use crate::victim::{Gauges, KEY_FILE};
use crate::{Bench, Findings, HarnessError};

/// How long the joiner asks, where nobody else is.
const ALONE: Duration = Duration::from_secs(3);
/// And where there is somebody.
const PATIENCE: Duration = Duration::from_secs(30);

async fn start(key: NodeKey, log: EventLog, peers: Vec<StaticPeer>) -> Result<Node, HarnessError> {
    let mut settings = NodeSettings::new("node");
    settings.listen = Some("127.0.0.1:0".to_owned());
    settings.discovery.mdns = false;
    settings.discovery.static_peers = peers;
    let node = Node::start(Arc::new(key), log, settings, Arc::default());
    node.await.map_err(HarnessError::attacker)
}

/// A log with all that lasts in another one: not with who is where, for the joiner is to meet nobody
/// whom it is not told of.
fn fed(folder: &Path, log: &EventLog) -> Result<EventLog, HarnessError> {
    let fed = EventLog::prepare(folder, log.community()).map_err(HarnessError::attacker)?;
    let all = log.missing(&Heads::empty(log.community()), 1000, 1 << 20);
    let mut all = all.map_err(HarnessError::attacker)?.events;
    all.retain(|raw| {
        Event::verify(raw).is_ok_and(|event| matches!(event.lane, Lane::Durable { .. }))
    });
    let from = log.community().root();
    fed.receive(&all, from, now_ms())
        .map_err(HarnessError::attacker)?;
    Ok(fed)
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, _] = bench.members();
    let liar = attacker.id();
    let home = bench.test_community()?.home("joiner")?;
    let key = || NodeKey::load(&home.join(KEY_FILE)).map_err(HarnessError::victim);
    let all = bench.test_community()?.copy("all")?;
    let folder = bench._files.path();
    let [kept, log] = ["kept", "joined"].map(|name| fed(&folder.join(name), &all));
    let (kept, log) = (kept?, log?);
    bench.test_community()?.append(Body::Revoked {
        node: liar,
        last_seq: 0,
    });
    let name = liar.to_string();
    let is_out = |gauges: &Gauges| {
        gauges
            .log
            .as_ref()
            .is_some_and(|log| log.revoked.contains(&name))
    };
    let gauges = until(&mut bench.victim, is_out).await?;
    found.same("the host hears of the revocation", true, is_out(&gauges));

    let lies = start(attacker, kept, Vec::new()).await?;
    let addr = lies
        .listen_addr()
        .ok_or_else(|| HarnessError::attacker("no listener"))?;
    let to_liar = StaticPeer::new(addr, Some(liar));
    let to_host = StaticPeer::new(bench.victim.addr, Some(bench.victim.node));
    let other = |node: &NodeId| *node != liar;

    // Nobody else is there: it knows that it has asked one only.
    let node = start(key()?, log.clone(), vec![to_liar.clone()]).await?;
    let even = tokio::time::timeout(PATIENCE, node.until_even_with(|_| true)).await;
    found.same("it is even with who let it in", true, even.is_ok());
    let asked = tokio::time::timeout(ALONE, node.until_even_with(other)).await;
    found.same("and with nobody else", true, asked.is_err());
    node.shutdown().await;
    drop(node);

    let node = start(key()?, log, vec![to_liar, to_host]).await?;
    let asked = tokio::time::timeout(PATIENCE, node.until_even_with(other)).await;
    found.same("another member is asked", true, asked.is_ok());
    let knows = node.log().state().is_revoked(&liar);
    found.same("it knows then that who let it in was put out", true, knows);
    node.shutdown().await;
    lies.shutdown().await;
    bench.goes_on(found).await
}
