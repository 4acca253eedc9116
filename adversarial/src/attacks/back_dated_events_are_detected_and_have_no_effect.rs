//! An event sorts by its Lamport time, so its author can back-date it. A demoted member gains
//! nothing by that. Back-dating is visible on every node, also on one that joins later: each event
//! names the last event that its author knew, and so proves which events were missing at that time.

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let root = bench.community()?.id().root();
    let reader = bench.community()?.copy("before")?;
    let quiet = reader.verify()?;
    let what = "late events in a quiet log";
    found.same(what, 0, quiet.void.len() + quiet.late.len());

    // A member in good standing back-dates an event before events of others.
    let honest = &mut bench.community()?.guest;
    let note = honest.write("notes.written", vec![1], |note| note.lamport = 3);
    bench.stores(found, "a back-dated event", &guest, &[note]).await?;
    bench.passed_on(found, &guest.id(), 1).await?;

    // A member is demoted, and then back-dates the admission of a Sybil.
    let invite = bench.community()?.invite(Level::Member, 9);
    bench
        .community()?
        .append(Body::Named { name: "elm".into() });
    let last = bench.community()?.lamport()?;
    let demoted = level_change(attacker.id(), Level::Member, 0);
    let written = bench.community()?.events_of(&root) + 1;
    bench.community()?.append_as_root(demoted)?;
    let heard = |gauges: &Gauges| gauges.events_of(&root) >= written;
    bench
        .wait_until(found, "the host has the demotion", "true", heard)
        .await?;
    let state = bench.community()?.state();
    let sybil = NodeKey::generate()?;
    let admitted = admission(&invite, &sybil, "member")?;
    let liar = &mut bench.community()?.attacker;
    // After the invite and before the demotion.
    let event = liar.write("member.admitted", admitted, |event| event.lamport = last);
    bench.stores(found, "an admission from before the demotion", &attacker, &[event]).await?;
    bench.passed_on(found, &attacker.id(), 1).await?;
    let what = "the community state of other nodes";
    found.same(what, &state, bench.community()?.state());

    let reader = bench.community()?.copy("after")?;
    let shown = reader.verify()?;
    found.same("problems of the log", 0, shown.problems.len());
    let late = shown.late.get(&guest.id()).copied().unwrap_or(0);
    found.same("late events of the member", 1, late);
    let void = shown.void.get(&attacker.id()).copied().unwrap_or(0);
    found.same("void events of the demoted member", 1, void);
    bench.still_works(found).await
}
