//! What a host said about itself a while ago is signed as well as what it says now. Whoever kept it
//! must not be able to bring it back: neither over something newer, nor over a withdrawal, nor
//! after its time, nor in another's slot.

use hearthnet_bus::Descriptor;

use crate::raw::cbor;
use crate::raw::event::{Event, Lane, now_ms};
use crate::victim::Gauges;
use crate::{Bench, Findings, HarnessError};

/// The kinds of events about shards.
const ADVERTISED: &str = "experimental.shard.advertised";
const WITHDRAWN: &str = "experimental.shard.withdrawn";

/// How long the descriptors here hold.
const LIFE_MS: u64 = 600_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
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
    // Later than all that was said in an earlier round.
    let now = now_ms();
    let test_community = bench.test_community()?;
    let say = |seq: u64, queue_depth: u32| -> Result<Event, HarnessError> {
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
    // The slot is part of what is signed, and each author has its own.
    let mut foreign = say(now + 9, 3)?;
    foreign.author = *guest.id().as_bytes();
    let foreign = foreign.signed(&guest);

    let mut gossip = bench.gossip(&attacker).await?;
    let offered =
        |gauges: &Gauges| -> Option<u32> { gauges.log.as_ref()?.shards.get(shard).copied() };
    let (none, told) = ((0, 0), "the queue that is told then");
    for (what, events, taken, code, offer) in [
        ("a descriptor", vec![old.clone()], (1, 0), None, Some(7)),
        ("a newer one", vec![new.clone()], (1, 0), None, Some(9)),
        (
            "the old one again",
            vec![old.clone()],
            none,
            Some("log_stale"),
            Some(9),
        ),
        (
            "one whose time is over",
            vec![expired],
            none,
            Some("log_stale"),
            Some(9),
        ),
        // A descriptor whose host is not its author is no event at all.
        (
            "another's descriptor in one's own name",
            vec![foreign],
            (0, 1),
            Some("log_malformed"),
            Some(9),
        ),
        ("its withdrawal", vec![withdrawn], (1, 0), None, None),
        ("both again", vec![old, new], none, Some("log_stale"), None),
    ] {
        found.taken(what, taken, code, &gossip.push(&events).await);
        let seen = offered(&bench.victim.gauges().await?);
        found.same(told, format!("{offer:?}"), format!("{seen:?}"));
    }
    drop(gossip);
    bench.goes_on(found).await?;
    Ok(())
}
