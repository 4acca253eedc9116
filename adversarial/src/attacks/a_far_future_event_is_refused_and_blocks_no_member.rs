//! If the latest time won, an event dated ten years ahead would win for ten years, and a leap in
//! the sequence numbers would use them up. Times are bounded by the receiver's clock, and sequence
//! numbers by their times. An event can still be up to ten minutes ahead, which must not block
//! other members.

use super::prelude::*;

const MINUTE_MS: u64 = 60_000;
const TEN_YEARS_MS: u64 = 10 * 365 * 24 * 60 * MINUTE_MS;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, _] = bench.members();
    let now = now_ms();
    let test_community = bench.community()?;
    let mut event = test_community.attacker.draft("notes.written", vec![1]);
    let mut at = |time: u64, lamport: u64| {
        (event.time, event.lamport) = (time, lamport);
        event.clone()
    };
    let ahead = [
        ("ten years ahead", at(now + TEN_YEARS_MS, 2000)),
        (
            "ten years ahead, with a matching sequence number",
            at(now + TEN_YEARS_MS, now + TEN_YEARS_MS),
        ),
        ("eleven minutes ahead", at(now + 11 * MINUTE_MS, 2000)),
        ("at the end of time", at((1 << 53) - 1, 2000)),
    ];
    let leap = at(now, now + TEN_YEARS_MS);
    let bounded = at(now + 9 * MINUTE_MS, now + 9 * MINUTE_MS);
    let mut said = test_community
        .attacker
        .say("notes.said", "notes", 1, MINUTE_MS, vec![0xa0]);
    said.time = now + TEN_YEARS_MS;
    said.lane = Lane::Ephemeral("notes".to_owned(), said.time + MINUTE_MS);

    let mut gossip = bench.gossip(&attacker).await?;
    for (what, event) in ahead.into_iter().chain([("said ten years ahead", said)]) {
        let what = format!("an event {what}");
        found.taken(what, (0, 1), Some("log_time"), &gossip.push(&[event.signed(&attacker)]).await);
    }
    let what = "a sequence number ten years beyond its time";
    found.taken(what, (0, 1), Some("log_malformed"), &gossip.push(&[leap.signed(&attacker)]).await);
    let kept = bench.victim.gauges().await?.events_of(&attacker.id());
    found.same("events of the attacker", 0, kept);

    // Honest clocks differ, so this much is accepted; it must not block other members.
    let pushed = gossip.push(&[bounded.signed(&attacker)]).await;
    found.taken("an event nine minutes ahead", (1, 0), None, &pushed);
    bench.passed_on(found, &attacker.id(), 1).await?;
    bench.still_works(found).await
}
