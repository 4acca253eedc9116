//! A root key used in two disconnected places writes two histories. A node would be frozen for
//! that. The root key must stay usable, so both histories count.

use hearthnet_bus::log::Policy;

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let level = |node, level| level_change(node, level, 0);
    let here = bench.community()?.copy("here")?;
    let there = bench.community()?.copy("there")?;
    let one = vec![
        level(guest.id(), Level::Trusted),
        level(guest.id(), Level::Anchor),
    ];
    let policy = Policy {
        who_may_invite: Level::Trusted,
        research: true,
    };
    let other = vec![
        level(attacker.id(), Level::Member),
        Body::PolicyChanged(policy),
    ];
    for (who, log, bodies) in [(&guest, &here, one), (&attacker, &there, other)] {
        let events = appended(log, &key(ROOT), bodies)?;
        let pushed = bench.gossip(who).await?.push(&events).await;
        let what = "events that the root signed in one place";
        found.taken(what, (2, 0), None, &pushed);
    }
    let says = |log: &EventLog| {
        let state = log.state();
        let levels = [guest.id(), attacker.id()].map(|node| state.level(&node));
        (levels, state.policy.who_may_invite, state.frozen().count())
    };
    let expected = (
        [Some(Level::Anchor), Some(Level::Member)],
        Level::Trusted,
        0,
    );
    let root = key(ROOT).id();
    let begin = std::time::Instant::now();
    let reader = loop {
        let name = format!("reader {:?}", begin.elapsed());
        let reader = bench.community()?.reader(&name)?;
        if says(&reader) == expected || begin.elapsed().as_secs() > 30 {
            break reader;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    };
    found.same(
        "state of a new node with both histories",
        format!("{expected:?}"),
        format!("{:?}", says(&reader)),
    );
    let problems = reader.verify()?.problems;
    found.same("problems of its log", 0, problems.len());

    // Later events continue from there.
    let next = bench
        .community()?
        .append_as_root(level(guest.id(), Level::Member));
    found.done("what it says next", "written", next);
    let state = bench.community()?.state();
    let agrees = |gauges: &Gauges| gauges.state() == state;
    let gauges = until(&mut bench.victim, agrees).await?;
    let what = "its next event has effect everywhere";
    found.same(what, true, agrees(&gauges));
    let frozen = gauges
        .log
        .is_some_and(|log| log.frozen.contains(&root.to_string()));
    found.same("the root is frozen", false, frozen);
    bench.still_works(found).await
}
