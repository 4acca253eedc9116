//! A demoted anchor keeps its key, and can give its next event any Lamport time, also one before
//! its demotion. If the fold only checked the level at that position, it could go on admitting
//! Sybils, revoking members and changing the policy for ever, with a log that passes every check.

use hearthnet_bus::NodeKey;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, Level};

use crate::raw::event::{Event, admission, bytes, now_ms};
use crate::raw::{Credentials, SWITCHING, cbor};
use crate::victim::Gauges;
use crate::{Bench, Findings, HarnessError};

/// Room for Lamport times before the demotion.
const ROOM: u64 = 1000;

const HOUR_MS: u64 = 3_600_000;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, guest] = bench.members();
    let (attacker_id, root) = (attacker.id(), bench.test_community()?.id().root());
    let level = |level, last_seq| Body::LevelChanged {
        node: attacker_id,
        level,
        last_seq: Some(last_seq),
    };

    // The attacker is an anchor, and the host has seen it act as one.
    let before = bench.test_community()?.events_of(&root);
    bench
        .test_community()?
        .append_as_root(level(Level::Anchor, 0))?;
    let heard = |gauges: &Gauges| gauges.events_of(&root) > before;
    bench
        .wait_until(found, "the host has the promotion", "it does", heard)
        .await?;
    let test_community = bench.test_community()?;
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
    let heard_by_anchor = bench
        .test_community()?
        .wait_for_events(&attacker_id, 1)
        .await
        && bench
            .test_community()?
            .wait_for_events(&guest.id(), 1)
            .await;
    found.holds("the anchor has both events", "true", heard_by_anchor);

    // The attacker is demoted and at once back-dates events.
    let seen = bench.test_community()?.events_of(&attacker_id);
    bench
        .test_community()?
        .append_as_root(level(Level::Member, seen))?;
    bench.wait_for_agreement(found).await?;
    let state = bench.test_community()?.state();
    let community = bench.test_community()?.id();
    let expires_ms = now_ms() + HOUR_MS;
    let invite = Invite::generate(community, expires_ms / 1000, Vec::new())?;
    let sybil = NodeKey::generate()?;
    let backdated = [
        (
            "member.invited",
            cbor(&[
                ("key", bytes(invite.key().id().as_bytes())),
                ("uses", 9.into()),
                ("level", "trusted".into()),
                ("until", expires_ms.into()),
            ]),
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
    let test_community = bench.test_community()?;
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
    let same = after.state() == state;
    found.holds(
        "the community state of the host",
        "the same as before",
        same,
    );
    for (who, key, may) in [
        ("the Sybil that it admitted", &sybil, false),
        ("the neighbour that it revoked", &guest, true),
    ] {
        let mut peer = bench.secured_with(&Credentials::of(&key.secret())).await?;
        let open = peer.upgrade_at("/sync/v1").await?.starts_with(SWITCHING);
        found.check(format!("{who} gets in"), may.to_string(), open, open == may);
    }
    bench.still_works(found).await
}
