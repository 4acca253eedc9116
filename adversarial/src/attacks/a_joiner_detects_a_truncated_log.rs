//! The node that admits a joiner hands it the log, and could hand over one that ends before a
//! revocation. A joiner asks another member before it trusts that its log is complete, and it knows
//! when no other member was reachable.

use std::sync::Arc;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::joining::{self, SecondOpinion, join_through, second_opinion};
use hearthnet_bus::log::{Event, Lane};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::testing::{TruncatingMember, durable_copy};

use super::prelude::*;
use crate::bench::Target;

/// Starts a node that knows only these addresses of other nodes.
async fn start(
    key: NodeKey,
    log: EventLog,
    listen: Option<&str>,
    (registry, peers): (Registry, Vec<StaticPeer>),
) -> Result<Node> {
    let mut settings = NodeSettings::new("node");
    settings.listen = listen.map(str::to_owned);
    settings.discovery.mdns = false;
    settings.discovery.static_peers = peers;
    let node = Node::start(Arc::new(key), log, settings, Arc::new(registry));
    node.await.map_err(HarnessError::attacker)
}

/// Second opinion of a joiner that knows these addresses besides the liar's.
async fn asks(
    (key, log): (&NodeKey, &EventLog),
    liar: NodeId,
    peers: Vec<StaticPeer>,
) -> Result<SecondOpinion> {
    let own = NodeKey::from_secret(&key.secret());
    let node = async || start(own, log.clone(), None, (Registry::new(), peers)).await;
    second_opinion(log, (key.id(), liar), node).await
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, accomplice] = bench.members();
    let (liar, accomplice) = (attacker.id(), accomplice.id());
    let test_community = bench.community()?;
    let invite = test_community.invite(Level::Member, 1);
    let others = test_community.copy("others")?;
    let folder = bench._files.path();
    let kept = durable_copy(&folder.join("kept"), &others);
    let log = EventLog::prepare(&folder.join("joined"), invite.community())?;
    bench.community()?.revoke(accomplice);
    let is_out = |gauges: &Gauges| gauges.has_revoked(&accomplice);
    let expected = "has the revocation";
    bench
        .wait_until(found, "the host", expected, is_out)
        .await?;

    // The joiner contacts the liar. The host accepts the liar's admission of the joiner like that
    // of any other member.
    let (before, registry) = (others.heads(), Registry::new());
    let key = Arc::new(NodeKey::from_secret(&attacker.secret()));
    let keeps_back = TruncatingMember::new(key, kept.clone(), others.clone());
    registry.register(joining::descriptor(), Arc::new(keeps_back))?;
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
    let joined = join_through(&client, liar, &request, &log, |_| {}).await;
    found.done("the liar lets a joiner in", "a member", joined);
    let believes = log.state().level(&accomplice).is_some();
    let what = "the joiner takes the accomplice for a member";
    found.same(what, true, believes);
    let mut said = others.missing(&before, 100, 1 << 20)?.events;
    said.retain(|raw| {
        Event::verify(raw).is_ok_and(|event| matches!(event.lane, Lane::Durable { .. }))
    });
    let pushed = bench.gossip(&attacker).await?.push(&said).await;
    let what = "the admission of the joiner, pushed to the host";
    found.taken(what, (1, 0), None, &pushed);

    // No other member is reachable: the joiner knows that it has asked only the liar.
    let joiner = (&key, &log);
    let opinion = asks(joiner, liar, vec![to_liar.clone()]).await?;
    let what = "other members asked, without any in reach";
    found.same(what, 0, opinion.from.len());
    let opinion = asks(joiner, liar, vec![to_liar, to_host]).await?;
    let other = opinion.from.first().is_some_and(|node| *node != liar);
    found.same("another member is asked", true, other);
    let heard = opinion.revoked == [accomplice];
    found.same("the joiner learns of the revoked member", true, heard);
    let knows = log.state().is_revoked(&accomplice);
    found.same("the joiner has revoked the accomplice", true, knows);
    lies.shutdown().await;
    bench.still_works(found).await
}
