//! If nodes followed the greatest Lamport time that they receive, one event at the limit would drag
//! the whole community to it. A node whose clock is two seconds slow would then refuse the events
//! of others, and an event with a life of two minutes would live for twelve. A node therefore holds
//! such an event until its time has come, and does not adopt its Lamport time.

use super::prelude::*;

/// Just below the limit of the host.
const LEAP_MS: u64 = 595_000;
/// Tolerance for honest events: several may be written within one millisecond.
const SLACK_MS: u64 = 1_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, _] = bench.members();
    let attacker_id = attacker.id();
    let author = &mut bench.community()?.attacker;
    let leap = author.write("notes.written", vec![1], |leap| {
        leap.time = now_ms() + LEAP_MS;
        leap.lamport = leap.time;
    });
    let what = "an event ten minutes ahead, all but five seconds";
    bench.stores(found, what, &attacker, &[leap]).await?;
    bench.passed_on(found, &attacker_id, 1).await?;

    // The anchor and the host write after it, including their addresses.
    bench.still_works(found).await?;
    let now = now_ms();
    let (written, held_for) = bench.community()?.ahead(now)?;
    let what = "how far ahead the anchor's next event is dated, in ms";
    let most = format!("at most {SLACK_MS}");
    found.check(what, most, written, written <= SLACK_MS);
    let what = "longest lifetime of an honest announcement, in ms";
    let held = held_for <= 120_000 + SLACK_MS;
    found.check(what, "at most 120000", held_for, held);
    Ok(())
}
