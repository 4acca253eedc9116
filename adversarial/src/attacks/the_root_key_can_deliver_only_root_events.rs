//! Events of the root key must spread even from a revoked node, so the root key may open a gossip
//! session by itself. Such a session delivers only events signed by the root key; it receives no
//! events.

use hearthnet_bus::log::{Event, Heads};

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let (root, community) = (key(ROOT), bench.community()?.community);
    // Home of the root key: its node is revoked and receives nothing more.
    let home = bench.community()?.copy("home of the root key")?;
    bench.community()?.revoke(attacker.id());

    let mut gossip = Gossip::open(bench.target.addr, &root, &community).await?;
    let (heads, events) = gossip.ask(&Heads::empty(home.community())).await?;
    let authors: Vec<_> = heads.authors.keys().copied().collect();
    let what = "authors whose events it receives";
    found.same(what, format!("{:?}", [root.id()]), format!("{authors:?}"));
    let others = events.iter().filter(|raw| {
        let event = Event::verify(raw);
        event.map_or(true, |event| event.author != root.id())
    });
    found.same("events of others that it receives", 0, others.count());

    let before = home.heads();
    let promoted = level_change(guest.id(), Level::Trusted, 0);
    home.append(&root, promoted, now_ms())?;
    let word = home.missing(&before, 10, 1 << 20)?;
    let note = bench.community()?.guest.note(10, 1);
    found.taken("an event signed by another key", (0, 1), None, &gossip.push(&[note]).await);
    found.taken("an event signed by the root key", (1, 0), None, &gossip.push(&word.events).await);
    bench
        .passed_on(found, &root.id(), before.authors[&root.id()].seq + 1)
        .await?;
    bench.wait_for_agreement(found).await?;

    for path in ["/bus/v1", "/tensor/v1"] {
        let open = bench.admits(&root, path).await?;
        found.same(format!("the root key at {path}"), false, open);
    }
    bench.still_works(found).await
}
