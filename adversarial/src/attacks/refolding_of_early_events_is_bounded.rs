//! The effect of an event depends on the events that sort before it. If each early event caused a
//! full fold, one member could keep every node busy by sending such events one by one: the work
//! would grow with their square. Folding therefore has a budget, and the state catches up later.

use std::time::Instant;

use super::prelude::*;

/// Existing events, and events that are sent to sort before them.
const THERE: usize = 500;
const FIRST: usize = 500;
/// Events that may be folded again at once, and per second (`specs/event-log.md`, section 5).
const AT_ONCE: u64 = 100_000;
const PER_SECOND: u64 = 8_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let honest = &mut bench.community()?.guest;
    let late = |event: &mut Event| event.lamport = 1_000_000;
    let mut there = vec![honest.write("notes.written", vec![1], late)];
    there.extend((1..THERE).map(|n| honest.note(10, n as u8)));
    bench.stores(found, "existing events", &guest, &there).await?;

    let begin = Instant::now();
    let mut gossip = bench.gossip(&attacker).await?;
    let mut taken = 0;
    for n in 0..FIRST {
        let event = bench.community()?.attacker.note(10, n as u8);
        let pushed = gossip.push(&[event]).await;
        taken += u64::from(matches!(pushed, Pushed::Stored { accepted: 1, refused: 0 }));
    }
    found.same("early events, accepted one by one", FIRST, taken);
    let gauges = bench.victim.gauges().await?;
    let reworked = gauges.log.map_or(u64::MAX, |log| log.reworked);
    // One extra pass, because the budget is checked before a pass.
    let most = AT_ONCE + PER_SECOND * (begin.elapsed().as_secs() + 1) + 2 * (THERE + FIRST) as u64;
    let what = "events that were folded again for them";
    found.check(what, format!("at most {most}"), reworked, reworked <= most);
    bench.still_works(found).await
}
