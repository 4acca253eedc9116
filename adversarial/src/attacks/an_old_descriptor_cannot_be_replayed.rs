//! An old descriptor of a host is as validly signed as its current one. A node that kept it must
//! not be able to bring it back: not over a newer one, not over a withdrawal, not after its expiry,
//! and not in the slot of another host.

use super::prelude::*;

/// Event kinds of shards.
const ADVERTISED: &str = "experimental.shard.advertised";
const WITHDRAWN: &str = "experimental.shard.withdrawn";

/// Lifetime of the descriptors.
const LIFE_MS: u64 = 600_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let (lo, hi) = bench.target.layers;
    let shard = &*format!("old:{lo}-{hi}");
    let slot = format!("shard:{shard}");
    let base = Descriptor {
        shard_id: shard.to_owned(),
        model_id: "old".to_owned(),
        host: attacker.id(),
        ..bench.victim.descriptor.clone()
    };
    // Later than all events of earlier rounds.
    let now = now_ms();
    let test_community = bench.community()?;
    let say = |seq: u64, queue_depth: u32| -> Result<Event> {
        let descriptor = Descriptor {
            queue_depth,
            ..base.clone()
        };
        let body = descriptor.to_cbor()?;
        let author = &test_community.attacker;
        Ok(author.say(ADVERTISED, &slot, seq, LIFE_MS, body))
    };
    let old = say(now, 7)?.signed(&attacker);
    let new = say(now + 1, 9)?.signed(&attacker);
    let mut expired = say(now + 2, 5)?;
    expired.time = now - LIFE_MS;
    expired.lane = Lane::Ephemeral(slot.clone(), now - 1);
    let expired = expired.signed(&attacker);
    let withdrawn = cbor(&[("shard", shard.into())]);
    let withdrawn = test_community
        .attacker
        .say(WITHDRAWN, &slot, now + 3, LIFE_MS, withdrawn)
        .signed(&attacker);
    // The slot is signed too, and each author has slots of its own.
    let mut foreign = say(now + 9, 3)?;
    foreign.author = *guest.id().as_bytes();
    let foreign = foreign.signed(&guest);

    let mut gossip = bench.gossip(&attacker).await?;
    let offered =
        |gauges: &Gauges| -> Option<u32> { gauges.log.as_ref()?.shards.get(shard).copied() };
    let (none, one, told) = ((0, 0), (1, 0), "the queue length announced after that");
    // A descriptor whose host is not its author is malformed.
    let (stale, malformed) = (Some("log_stale"), Some("log_malformed"));
    for (what, events, taken, code, offer) in [
        ("a descriptor", vec![old.clone()], one, None, Some(7)),
        ("a newer descriptor", vec![new.clone()], one, None, Some(9)),
        ("the old one again", vec![old.clone()], none, stale, Some(9)),
        ("an expired descriptor", vec![expired], none, stale, Some(9)),
        ("another host's", vec![foreign], (0, 1), malformed, Some(9)),
        ("its withdrawal", vec![withdrawn], one, None, None),
        ("both descriptors again", vec![old, new], none, stale, None),
    ] {
        found.taken(what, taken, code, &gossip.push(&events).await);
        let seen = offered(&bench.victim.gauges().await?);
        found.same(told, format!("{offer:?}"), format!("{seen:?}"));
    }
    drop(gossip);
    bench.still_works(found).await
}
