//! An event sorts by its Lamport time, so its author can back-date it. A demoted member gains
//! nothing by that. Back-dating is visible on every node, also on one that joins later: each event
//! names the last event that its author knew, and so proves which events were missing at that time.

use ciborium::Value;
use hearthnet_bus::NodeKey;
use hearthnet_bus::log::{Body, Level};

use crate::raw::cbor;
use crate::victim::Gauges;
use crate::victim::until;
use crate::{Bench, Findings, HarnessError};

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, guest] = bench.members();
    let root = bench.test_community()?.id().root();
    let reader = bench.test_community()?.copy("before")?;
    let quiet = reader.verify().map_err(HarnessError::victim)?;
    found.same(
        "late events in a quiet log",
        0,
        quiet.void.len() + quiet.late.len(),
    );

    // A member in good standing back-dates an event before events of others.
    let honest = &mut bench.test_community()?.guest;
    let mut note = honest.draft("notes.written", vec![1]);
    note.lamport = 3;
    let note = honest.go_on(&note);
    let pushed = bench.gossip(&guest).await?.push(&[note]).await;
    found.taken("a back-dated event", (1, 0), None, &pushed);
    let heard = bench
        .test_community()?
        .wait_for_events(&guest.id(), 1)
        .await;
    found.same("others hear it", true, heard);

    // A member is demoted, and then back-dates the admission of a Sybil.
    let invite = bench.test_community()?.invite(Level::Member, 9);
    bench
        .test_community()?
        .append(Body::Named { name: "elm".into() });
    let last = bench.test_community()?.lamport()?;
    let demoted = Body::LevelChanged {
        node: attacker.id(),
        level: Level::Member,
        last_seq: Some(0),
    };
    let written = bench.test_community()?.events_of(&root) + 1;
    bench.test_community()?.append_as_root(demoted)?;
    let heard = |gauges: &Gauges| gauges.events_of(&root) >= written;
    let gauges = until(&mut bench.victim, heard).await?;
    found.same("the host has the demotion", true, heard(&gauges));
    let state = bench.test_community()?.state();
    let sybil = NodeKey::generate().map_err(HarnessError::attacker)?;
    let request = invite
        .request(sybil.id(), "kim")
        .map_err(HarnessError::attacker)?;
    let bytes = |bytes: &[u8]| Value::Bytes(bytes.to_vec());
    let admitted = cbor(&[
        ("name", "kim".into()),
        ("node", bytes(sybil.id().as_bytes())),
        ("level", "member".into()),
        ("proof", bytes(&request.proof.0)),
        ("invite", bytes(invite.key().id().as_bytes())),
    ]);
    let liar = &mut bench.test_community()?.attacker;
    let mut event = liar.draft("member.admitted", admitted);
    // After the invite and before the demotion.
    event.lamport = last;
    let event = liar.go_on(&event);
    let pushed = bench.gossip(&attacker).await?.push(&[event]).await;
    found.taken(
        "an admission from before the demotion",
        (1, 0),
        None,
        &pushed,
    );
    let heard = bench
        .test_community()?
        .wait_for_events(&attacker.id(), 1)
        .await;
    found.same("others hear it", true, heard);
    found.same(
        "the community state of other nodes",
        &state,
        bench.test_community()?.state(),
    );

    let reader = bench.test_community()?.copy("after")?;
    let shown = reader.verify().map_err(HarnessError::victim)?;
    found.same("problems of the log", 0, shown.problems.len());
    let late = shown.late.get(&guest.id()).copied().unwrap_or(0);
    found.same("late events of the member", 1, late);
    let void = shown.void.get(&attacker.id()).copied().unwrap_or(0);
    found.same("void events of the demoted member", 1, void);
    bench.still_works(found).await
}
