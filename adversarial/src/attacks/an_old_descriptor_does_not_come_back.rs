//! What a host said about itself a while ago is signed as well as what it says now. Whoever kept it
//! must not be able to bring it back: neither over something newer, nor over a withdrawal, nor
//! after its time, nor in another's slot.

use hearthnet_bus::Descriptor;

use crate::raw::cbor;
use crate::raw::event::{Event, now_ms};
use crate::victim::{Gauges, Scene};
use crate::{Bench, Findings, HarnessError, Verdict};

/// The kinds of events about shards.
const ADVERTISED: &str = "experimental.shard.advertised";
const WITHDRAWN: &str = "experimental.shard.withdrawn";

/// How long the descriptors here hold.
const LIFE_MS: u64 = 600_000;

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 24;

    const SCENE: Scene = Scene::COMMUNITY;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let [attacker, guest] = bench.members();
        let shard = "old:0-1";
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
            let body = descriptor.to_cbor();
            let body = body.map_err(|error| HarnessError::Attacker(error.to_string()))?;
            let author = &test_community.attacker;
            Ok(author.say(ADVERTISED, &slot, seq, LIFE_MS, body))
        };
        let (old, new) = (
            say(now, 7)?.signed(&attacker),
            say(now + 1, 9)?.signed(&attacker),
        );
        let mut expired = say(now + 2, 5)?;
        (expired.time, expired.lane) = (
            now - LIFE_MS,
            crate::raw::event::Lane::Ephemeral(slot.clone(), now - 1),
        );
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
        let mut look = async |found: &mut Findings, what: &str, expected: Option<u32>| {
            let seen = offered(&bench.victim.gauges().await?);
            let held = seen == expected;
            found.check(what, format!("{expected:?}"), format!("{seen:?}"), held);
            Ok::<_, HarnessError>(())
        };
        let none = (0, 0);
        let pushed = gossip.push(std::slice::from_ref(&old)).await;
        found.taken("a descriptor", (1, 0), None, &pushed);
        look(&mut found, "the queue that is told then", Some(7)).await?;
        let pushed = gossip.push(std::slice::from_ref(&new)).await;
        found.taken("a newer one", (1, 0), None, &pushed);
        look(&mut found, "the queue that is told then", Some(9)).await?;
        let pushed = gossip.push(std::slice::from_ref(&old)).await;
        found.taken("the old one again", none, Some("log_stale"), &pushed);
        look(&mut found, "the queue that is told then", Some(9)).await?;
        let pushed = gossip.push(&[expired]).await;
        found.taken("one whose time is over", none, Some("log_stale"), &pushed);
        look(&mut found, "the queue that is told then", Some(9)).await?;
        let pushed = gossip.push(&[foreign]).await;
        // A descriptor whose host is not its author is no event at all.
        found.taken(
            "another's descriptor in one's own name",
            (0, 1),
            Some("log_malformed"),
            &pushed,
        );
        look(&mut found, "the queue that is told then", Some(9)).await?;
        let pushed = gossip.push(&[withdrawn]).await;
        found.taken("its withdrawal", (1, 0), None, &pushed);
        look(&mut found, "the shard then", None).await?;
        let pushed = gossip.push(&[old, new]).await;
        found.taken("both again", none, Some("log_stale"), &pushed);
        look(&mut found, "the shard then", None).await?;
        drop(gossip);
        bench.goes_on(&mut found).await?;
        Ok(found.verdict())
    }
}
