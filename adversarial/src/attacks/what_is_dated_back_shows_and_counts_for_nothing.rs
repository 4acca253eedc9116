//! An event sorts where its Lamport time says, so whoever signs can date it back. Who has lost a level
//! gains nothing by that; and it shows on every node, also on one that joins later: each event names
//! the one that was the last for its author, and so witnesses that nothing more stood before it then.

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
        "what shows in a quiet log",
        0,
        quiet.void.len() + quiet.late.len(),
    );

    // A member in good standing writes into the time before others wrote.
    let honest = &mut bench.test_community()?.guest;
    let mut note = honest.draft("notes.written", vec![1]);
    note.lamport = 3;
    let note = honest.go_on(&note);
    let pushed = bench.gossip(&guest).await?.push(&[note]).await;
    found.taken("an event that is dated back", (1, 0), None, &pushed);
    let heard = bench.test_community()?.hears(&guest.id(), 1).await;
    found.same("others hear it", true, heard);

    // Somebody is demoted, and then admits a Sybil in the time before.
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
    found.same("the host hears of the demotion", true, heard(&gauges));
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
    // After the invite, and before the demotion.
    event.lamport = last;
    let event = liar.go_on(&event);
    let pushed = bench.gossip(&attacker).await?.push(&[event]).await;
    found.taken(
        "an admission from before the demotion",
        (1, 0),
        None,
        &pushed,
    );
    let heard = bench.test_community()?.hears(&attacker.id(), 1).await;
    found.same("others hear it", true, heard);
    found.same(
        "what others say of the community",
        &state,
        bench.test_community()?.state(),
    );

    let reader = bench.test_community()?.copy("after")?;
    let shown = reader.verify().map_err(HarnessError::victim)?;
    found.same("what is wrong with the log", 0, shown.problems.len());
    let late = shown.late.get(&guest.id()).copied().unwrap_or(0);
    found.same("events of the member that came to light late", 1, late);
    let void = shown.void.get(&attacker.id()).copied().unwrap_or(0);
    found.same("events of who was demoted that count for less", 1, void);
    bench.goes_on(found).await
}
