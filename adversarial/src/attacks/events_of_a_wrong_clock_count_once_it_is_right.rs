//! A member that wrote one event with a clock a day ahead would be cut off for that day: other
//! nodes refuse the event and all later ones of its chain. The author's next event with a correct
//! clock vouches for the early one: it contains its hash, so it was made later. Nothing else
//! vouches for it.

use super::prelude::*;

const DAY_MS: u64 = 86_400_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let guest_id = guest.id();
    let honest = &mut bench.community()?.guest;
    let a_day_ahead = |event: &mut Event| event.time = now_ms() + DAY_MS;
    let first = honest.write("notes.written", vec![1], a_day_ahead);
    let second = honest.note(10, 2);
    // The attacker's next event does not contain the hash of the one before it.
    let liar = &bench.community()?.attacker;
    let mut ahead = liar.draft("notes.written", vec![3]);
    ahead.time = now_ms() + DAY_MS;
    let other = Event {
        seq: 2,
        lamport: ahead.lamport + 1,
        time: now_ms(),
        lane: Lane::Durable([7; 32]),
        ..ahead.clone()
    };
    let events = [ahead.signed(&attacker), other.signed(&attacker)];
    let pushed = bench.gossip(&attacker).await?.push(&events).await;
    let what = "an event a day ahead, and a later one without its hash";
    found.taken(what, (1, 1), Some("log_time"), &pushed);

    let mut gossip = bench.gossip(&guest).await?;
    let pushed = gossip.push(std::slice::from_ref(&first)).await;
    found.taken("an event a day ahead", (0, 1), Some("log_time"), &pushed);
    let pushed = gossip.push(&[first, second]).await;
    found.taken("the same event with its successor", (2, 0), None, &pushed);
    bench.passed_on(found, &guest_id, 2).await?;
    bench.still_works(found).await
}
