//! If nodes followed the greatest Lamport time that they hear of, and dated their own events to
//! match, one event at the limit would push everybody to it: a node whose clock is two seconds
//! slow would refuse what the others write, and what is to hold for two minutes would hold for
//! twelve. What leaps waits for its moment instead, and nobody follows.

use crate::raw::event::now_ms;
use crate::{Bench, Findings, HarnessError};

/// Just within what the host accepts.
const LEAP_MS: u64 = 595_000;
/// How much later than now an honest event may be dated: several are written in one moment.
const SLACK_MS: u64 = 1_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, _] = bench.members();
    let attacker_id = attacker.id();
    let mut leap = bench
        .test_community()?
        .attacker
        .draft("notes.written", vec![1]);
    leap.time = now_ms() + LEAP_MS;
    leap.lamport = leap.time;
    let leap = bench.test_community()?.attacker.go_on(&leap);
    let pushed = bench.gossip(&attacker).await?.push(&[leap]).await;
    found.taken(
        "an event ten minutes ahead, all but five seconds",
        (1, 0),
        None,
        &pushed,
    );
    let heard = bench.test_community()?.hears(&attacker_id, 1).await;
    found.same("the anchor hears it", true, heard);

    // The anchor writes after it, and says where it is; so does the host.
    bench.goes_on(found).await?;
    let now = now_ms();
    let (written, held_for) = bench.test_community()?.ahead(now)?;
    found.check(
        "how far ahead the anchor's next event is dated, in ms",
        format!("at most {SLACK_MS}"),
        written,
        written <= SLACK_MS,
    );
    found.check(
        "how long what honest nodes say of themselves holds, in ms",
        "at most 120000",
        held_for,
        held_for <= 120_000 + SLACK_MS,
    );
    Ok(())
}
