//! A demoted anchor keeps its key, and can give its next event any Lamport time, also one before
//! its demotion. If the fold only checked the level at that position, it could go on admitting
//! Sybils, revoking members and changing the policy for ever, with a log that passes every check.

use super::prelude::*;

/// Room for Lamport times before the demotion.
const ROOM: u64 = 1000;

const HOUR_MS: u64 = 3_600_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let (attacker_id, root) = (attacker.id(), bench.community()?.id().root());

    // The attacker is an anchor, and the host has seen it act as one.
    let before = bench.community()?.events_of(&root);
    let promoted = level_change(attacker_id, Level::Anchor, 0);
    bench.community()?.append_as_root(promoted)?;
    let heard = |gauges: &Gauges| gauges.events_of(&root) > before;
    let what = "the host has the promotion";
    bench.wait_until(found, what, "it does", heard).await?;
    let test_community = bench.community()?;
    let lamport = now_ms() / 2;
    let at = |event: &mut Event| event.lamport = lamport;
    let note = test_community.attacker.write("notes.written", vec![1], at);
    let at = |event: &mut Event| event.lamport = lamport + ROOM;
    let later = test_community.guest.write("notes.written", vec![2], at);
    bench.stores(found, "an event written as an anchor", &attacker, &[note]).await?;
    bench.stores(found, "a later event of another member", &guest, &[later]).await?;
    for author in [&attacker_id, &guest.id()] {
        bench.passed_on(found, author, 1).await?;
    }

    // The attacker is demoted and at once back-dates events.
    let seen = bench.community()?.events_of(&attacker_id);
    let demoted = level_change(attacker_id, Level::Member, seen);
    bench.community()?.append_as_root(demoted)?;
    bench.wait_for_agreement(found).await?;
    let state = bench.community()?.state();
    let community = bench.community()?.id();
    let expires_ms = now_ms() + HOUR_MS;
    let invite = Invite::generate(community, expires_ms / 1000, Vec::new())?;
    let sybil = NodeKey::generate()?;
    let backdated = [
        (
            "member.invited",
            invitation(&invite, 9, "trusted", expires_ms),
        ),
        ("member.admitted", admission(&invite, &sybil, "trusted")?),
        (
            "member.revoked",
            cbor(&[("seq", 0.into()), ("node", bytes(guest.id().as_bytes()))]),
        ),
        (
            "community.policy",
            cbor(&[("invite", "member".into()), ("research", false.into())]),
        ),
    ];
    let test_community = bench.community()?;
    let events: Vec<Vec<u8>> = backdated
        .into_iter()
        .map(|(kind, body)| test_community.attacker.write(kind, body, |_| {}))
        .collect();
    bench.stores(found, "its back-dated events", &attacker, &events).await?;
    let after = bench.victim.gauges().await?;
    found.same("the community state of the host", state, after.state());
    for (who, key, may) in [
        ("the Sybil that it admitted", &sybil, false),
        ("the neighbour that it revoked", &guest, true),
    ] {
        let open = bench.admits(key, "/sync/v1").await?;
        found.check(format!("{who} gets in"), may.to_string(), open, open == may);
    }
    bench.still_works(found).await
}
