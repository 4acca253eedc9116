//! A node that starts from an outdated copy of its data writes two histories, and all nodes freeze
//! its key. If it was the only anchor, the community must not be stuck: an event of the root key
//! replaces its key. The frozen node itself can deliver that event, although it receives none any
//! more. No other key can do this.

use super::prelude::*;

/// Events signed by `by` that replace an old key by a new one.
fn successor(log: &EventLog, by: &NodeKey, old: &NodeKey, new: &NodeKey) -> Result<Vec<Vec<u8>>> {
    let level = Level::Trusted;
    let expires_ms = now_ms() + 60_000;
    let invite = Invite::generate(log.community(), expires_ms / 1000, Vec::new())?;
    let request = invite.request(new.id(), "attic")?;
    let invited = Body::Invited {
        invite: invite.key().id(),
        level,
        uses: 1,
        expires_ms,
    };
    let revoked = Body::Revoked {
        node: old.id(),
        last_seq: 1,
    };
    appended(log, by, [invited, Body::Admitted { request, level }, revoked])
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let community = bench.community()?.community;
    let first = bench.community()?.attacker.note(10, 1);
    // Copy of its data from which it will sign.
    let home = bench.community()?.copy("its data")?;
    let author = &bench.community()?.attacker;
    let twins = [2, 3].map(|n| author.draft("notes.written", vec![n]));
    let mut events = vec![first];
    events.extend(twins.map(|twin| twin.signed(&attacker)));
    let _ = bench.gossip(&attacker).await?.push(&events).await;
    let is_frozen = |gauges: &Gauges| gauges.has_frozen(&attacker.id());
    bench
        .wait_until(found, "it", "is frozen", is_frozen)
        .await?;
    let open = bench.admits(&bench.attacker, "/sync/v1").await?;
    found.same("a session of the frozen key", false, open);

    let new = new_key()?;
    let word = successor(&home, &key(ROOT), &attacker, &new)?;
    // The root of another community signs the same for a key of its own.
    let mine = new_key()?;
    let other = Gossip::open(bench.target.addr, &mine, &community).await;
    found.same("another key is refused as the root", true, other.is_err());
    let mut gossip = Gossip::open(bench.target.addr, &key(ROOT), &community).await?;
    found.taken("events of the root key", (3, 0), None, &gossip.push(&word).await);
    for (who, key_of, may) in [
        ("the new key", &new, true),
        ("the old key", &attacker, false),
        ("a neighbour", &guest, true),
    ] {
        let open = bench.admits(key_of, "/sync/v1").await?;
        found.same(format!("{who} gets in"), may, open);
    }
    bench.still_works(found).await
}
