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
    let level = |level, last_seq| Body::LevelChanged {
        node: attacker_id,
        level,
        last_seq: Some(last_seq),
    };

    // The attacker is an anchor, and the host has seen it act as one.
    let before = bench.community()?.events_of(&root);
    bench.community()?.append_as_root(level(Level::Anchor, 0))?;
    let heard = |gauges: &Gauges| gauges.events_of(&root) > before;
    let what = "the host has the promotion";
    bench.wait_until(found, what, "it does", heard).await?;
    let test_community = bench.community()?;
    let mut note = test_community.attacker.draft("notes.written", vec![1]);
    note.lamport = now_ms() / 2;
    let note = test_community.attacker.go_on(&note);
    let mut later = test_community.guest.draft("notes.written", vec![2]);
    later.lamport = now_ms() / 2 + ROOM;
    let later = test_community.guest.go_on(&later);
    let pushed = bench.gossip(&attacker).await?.push(&[note]).await;
    found.taken("an event written as an anchor", (1, 0), None, &pushed);
    let pushed = bench.gossip(&guest).await?.push(&[later]).await;
    found.taken("a later event of another member", (1, 0), None, &pushed);
    for author in [&attacker_id, &guest.id()] {
        bench.passed_on(found, author, 1).await?;
    }

    // The attacker is demoted and at once back-dates events.
    let seen = bench.community()?.events_of(&attacker_id);
    bench
        .community()?
        .append_as_root(level(Level::Member, seen))?;
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
        .map(|(kind, body)| {
            let event: Event = test_community.attacker.draft(kind, body);
            test_community.attacker.go_on(&event)
        })
        .collect();
    let count = events.len() as u64;
    let pushed = bench.gossip(&attacker).await?.push(&events).await;
    found.taken("its back-dated events", (count, 0), None, &pushed);
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
