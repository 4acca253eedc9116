//! Every node keeps each member's events for ever. Each author therefore has a quota in the log.
//! All unknown authors share one small quota, and their events are not passed on. Otherwise a
//! member could fill every disk, with its own key or with generated ones.

use super::prelude::*;

/// Quota of an author (`specs/event-log.md` section 4).
const AUTHOR_BYTES: usize = 8 << 20;
/// Shared quota of all unknown authors.
const STRANGERS_BYTES: usize = 1 << 20;

/// Events of the flood, of the maximum size: twice the quota.
const FLOOD: usize = 2 * AUTHOR_BYTES / MAX_BODY;
/// Generated authors with one event each: twice the quota.
const STRANGERS: usize = 2 * STRANGERS_BYTES / MAX_BODY;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let test_community = bench.community()?;
    let flood: Vec<_> = (0..FLOOD)
        .map(|n| test_community.attacker.note(MAX_BODY, n as u8))
        .collect();
    let note = test_community.guest.note(10, 1);
    let community = test_community.community;
    let mut made_up = Vec::new();
    for n in 0..STRANGERS {
        made_up.push(Author::new(community, &new_key()?).note(MAX_BODY, n as u8));
    }

    let most = |events: &[Vec<u8>], bytes: usize| bytes / events.first().map_or(1, Vec::len);
    for (what, events, bytes) in [
        ("a flood by one author", &flood, AUTHOR_BYTES),
        ("a flood by made-up authors", &made_up, STRANGERS_BYTES),
    ] {
        let pushed = bench.gossip(&attacker).await?.push(events).await;
        let (sent, fits) = (events.len() as u64, most(events, bytes) as u64);
        let (accepted, refused) = match pushed {
            Pushed::Stored { accepted, refused } => (accepted, refused),
            Pushed::Closed(_) => (0, 0),
        };
        let held = accepted <= fits && accepted >= fits * 9 / 10 && accepted + refused == sent;
        let expected = format!("about {fits} of {sent} kept, the others refused");
        let seen = format!("{accepted} kept, {refused} refused");
        found.counted(what, expected, seen, held, "log_quota");
    }
    let kept = bench.victim.gauges().await?.events_of(&attacker.id());

    // Others can still write, and only events of members are passed on.
    bench.stores(found, "another member's event", &guest, &[note]).await?;
    let heard = bench
        .community()?
        .wait_for_events(&attacker.id(), kept)
        .await;
    found.same("the accepted events are passed on", true, heard);
    let authors = bench.community()?.authors();
    // The root, the anchor, the attacker and the guest. The host has written no durable events.
    let what = "authors that were passed on";
    found.check(what, "at most 5", authors, authors <= 5);
    bench.still_works(found).await
}
