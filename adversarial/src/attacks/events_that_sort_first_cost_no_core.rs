//! What an event means depends on those that sort before it. If each that sorts first had all others
//! folded again, one member could keep every node at work by sending its events one by one: the
//! work would grow with their square. It has a budget, and the state catches up afterwards.

use std::time::Instant;

use crate::{Bench, Findings, HarnessError};

/// Events that are there, and that are sent to sort before them.
const THERE: usize = 500;
const FIRST: usize = 500;
/// What may be folded again at once, and per second (`specs/event-log.md`, section 5).
const AT_ONCE: u64 = 100_000;
const PER_SECOND: u64 = 8_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, guest] = bench.members();
    let honest = &mut bench.test_community()?.guest;
    let mut late = honest.draft("notes.written", vec![1]);
    late.lamport = 1_000_000;
    let mut there = vec![honest.go_on(&late)];
    there.extend((1..THERE).map(|n| honest.note(10, n as u8)));
    let pushed = bench.gossip(&guest).await?.push(&there).await;
    found.taken("what is there", (THERE as u64, 0), None, &pushed);

    let begin = Instant::now();
    let mut gossip = bench.gossip(&attacker).await?;
    let mut taken = 0;
    for n in 0..FIRST {
        let event = bench.test_community()?.attacker.note(10, n as u8);
        taken += u64::from(
            gossip.push(&[event]).await
                == (crate::raw::Pushed::Stored {
                    accepted: 1,
                    refused: 0,
                }),
        );
    }
    found.same("events that sort first, taken one by one", FIRST, taken);
    let gauges = bench.victim.gauges().await?;
    let reworked = gauges.log.map_or(u64::MAX, |log| log.reworked);
    // One pass more, for the budget is looked at before it.
    let most = AT_ONCE + PER_SECOND * (begin.elapsed().as_secs() + 1) + 2 * (THERE + FIRST) as u64;
    found.check(
        "events that were folded again for them",
        format!("at most {most}"),
        reworked,
        reworked <= most,
    );
    bench.goes_on(found).await
}
