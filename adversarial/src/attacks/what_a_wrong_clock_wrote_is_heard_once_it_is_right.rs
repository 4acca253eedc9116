//! Whoever wrote one event by a clock that is a day ahead would be cut off for that day, for others
//! refuse it, and all that follows it in the chain. The next event of the same author, by a clock
//! that is right, vouches for it: it names it, so it was made later. Nothing else does.

use crate::raw::event::{Event, now_ms};
use crate::{Bench, Findings, HarnessError};

const DAY_MS: u64 = 86_400_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, guest] = bench.members();
    let guest_id = guest.id();
    let honest = &mut bench.test_community()?.guest;
    let mut first = honest.draft("notes.written", vec![1]);
    first.time = now_ms() + DAY_MS;
    let first = honest.go_on(&first);
    let second = honest.note(10, 2);
    // The attacker's next event does not name the one before it.
    let liar = &bench.test_community()?.attacker;
    let mut ahead = liar.draft("notes.written", vec![3]);
    ahead.time = now_ms() + DAY_MS;
    let other = Event {
        seq: 2,
        lamport: ahead.lamport + 1,
        time: now_ms(),
        lane: crate::raw::event::Lane::Durable([7; 32]),
        ..ahead.clone()
    };
    let events = [ahead.signed(&attacker), other.signed(&attacker)];
    let pushed = bench.gossip(&attacker).await?.push(&events).await;
    found.taken(
        "an event a day ahead, and one that does not name it",
        (1, 1),
        Some("log_time"),
        &pushed,
    );

    let mut gossip = bench.gossip(&guest).await?;
    let pushed = gossip.push(std::slice::from_ref(&first)).await;
    found.taken("an event a day ahead", (0, 1), Some("log_time"), &pushed);
    let pushed = gossip.push(&[first, second]).await;
    found.taken(
        "the same with what was written after it",
        (2, 0),
        None,
        &pushed,
    );
    let heard = bench.test_community()?.hears(&guest_id, 2).await;
    found.same("both are passed on", true, heard);
    bench.goes_on(found).await
}
