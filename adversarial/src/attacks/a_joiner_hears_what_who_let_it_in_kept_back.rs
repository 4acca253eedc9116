//! Who lets a node in hands it the log, and can hand it one that ends before somebody was put out: an
//! accomplice, say. A joiner asks another member before it believes that it is up to date, and knows when
//! there was none.

use std::sync::Arc;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::joining::{self, SecondOpinion, join_through, second_opinion};
use hearthnet_bus::log::{Body, Event, EventLog, Lane, Level};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::testing::{KeepsBack, lasting};
use hearthnet_bus::{NodeId, NodeKey, now_ms};

use crate::bench::{Target, new_key};
use crate::victim::{Gauges, until};
use crate::{Bench, Findings, HarnessError};

/// A node that knows of others by these addresses alone.
async fn start(
    key: NodeKey,
    log: EventLog,
    listen: Option<&str>,
    (registry, peers): (Registry, Vec<StaticPeer>),
) -> Result<Node, HarnessError> {
    let mut settings = NodeSettings::new("node");
    settings.listen = listen.map(str::to_owned);
    settings.discovery.mdns = false;
    settings.discovery.static_peers = peers;
    let node = Node::start(Arc::new(key), log, settings, Arc::new(registry));
    node.await.map_err(HarnessError::attacker)
}

/// What a joiner hears from others than the liar, where these addresses are known.
async fn asks(
    (key, log): (&NodeKey, &EventLog),
    liar: NodeId,
    peers: Vec<StaticPeer>,
) -> Result<SecondOpinion, HarnessError> {
    let own = NodeKey::from_secret(&key.secret());
    let node = async || start(own, log.clone(), None, (Registry::new(), peers)).await;
    second_opinion(log, (key.id(), liar), now_ms, node).await
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, accomplice] = bench.members();
    let (liar, accomplice) = (attacker.id(), accomplice.id());
    let test_community = bench.test_community()?;
    let invite = test_community.invite(Level::Member, 1);
    let others = test_community.copy("others")?;
    let folder = bench._files.path();
    let kept = lasting(&folder.join("kept"), &others);
    let log = EventLog::prepare(&folder.join("joined"), invite.community())?;
    bench.test_community()?.append(Body::Revoked {
        node: accomplice,
        last_seq: 0,
    });
    let name = accomplice.to_string();
    let is_out = |gauges: &Gauges| {
        let log = gauges.log.as_ref();
        log.is_some_and(|log| log.revoked.contains(&name))
    };
    let gauges = until(&mut bench.victim, is_out).await?;
    found.same("the host hears of the revocation", true, is_out(&gauges));

    // The joiner comes to the liar, whose word on it reaches the host as that of any member.
    let (before, registry) = (others.heads(), Registry::new());
    let key = Arc::new(NodeKey::from_secret(&attacker.secret()));
    let keeps_back = KeepsBack::new(key, kept.clone(), others.clone());
    registry
        .register(joining::descriptor(), Arc::new(keeps_back))
        .map_err(HarnessError::attacker)?;
    let [own, _] = bench.members();
    let lies = start(own, kept, Some("127.0.0.1:0"), (registry, Vec::new())).await?;
    let addr = lies
        .listen_addr()
        .ok_or_else(|| HarnessError::attacker("no listener"))?;
    let to_liar = StaticPeer::new(addr, Some(liar));
    let to_host = StaticPeer::new(bench.victim.addr, Some(bench.victim.node));
    let key = new_key()?;
    let target = Target {
        addr,
        node: liar,
        ..bench.target
    };
    let client = target.client(&key).await?;
    let request = invite.request(key.id(), "kim")?;
    let joined = join_through(&client, liar, &request, &log, now_ms, |_| {}).await;
    found.done("the liar lets a joiner in", "a member", joined);
    let believes = log.state().level(&accomplice).is_some();
    found.same("to whom the accomplice is a member", true, believes);
    let mut said = others.missing(&before, 100, 1 << 20)?.events;
    said.retain(|raw| {
        Event::verify(raw).is_ok_and(|event| matches!(event.lane, Lane::Durable { .. }))
    });
    let pushed = bench.gossip(&attacker).await?.push(&said).await;
    found.taken("that it let it in, told to the host", (1, 0), None, &pushed);

    // Nobody else is there: it knows that it has asked one only.
    let joiner = (&key, &log);
    let opinion = asks(joiner, liar, vec![to_liar.clone()]).await?;
    found.same("others asked, where there are none", 0, opinion.from.len());
    let opinion = asks(joiner, liar, vec![to_liar, to_host]).await?;
    let other = opinion.from.first().is_some_and(|node| *node != liar);
    found.same("another member is asked", true, other);
    let heard = opinion.put_out == [accomplice];
    found.same("it hears of who was put out", true, heard);
    let knows = log.state().is_revoked(&accomplice);
    found.same("and to it the accomplice is none any more", true, knows);
    lies.shutdown().await;
    bench.goes_on(found).await
}
