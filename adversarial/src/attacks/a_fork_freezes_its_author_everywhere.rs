//! An author that signs different histories for different members would divide a community for
//! good. Every node that sees both keeps them as proof, passes them on, and freezes that author.

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let test_community = bench.community()?;
    let first = test_community.attacker.note(10, 1);
    let one = test_community.attacker.draft("notes.written", vec![2]);
    let other = test_community.attacker.draft("notes.written", vec![3]);
    let third = test_community.attacker.draft("notes.written", vec![4]);
    let mut twins = [&one, &other, &third].map(|event| (event.hash(), event.signed(&attacker)));
    // The proof consists of the two with the lowest hashes, so a third and higher one adds nothing.
    twins.sort();
    let [(hash, one), (_, other), (_, third)] = twins;
    let mut later = test_community.attacker.draft("notes.written", vec![5]);
    (later.seq, later.lamport) = (later.seq + 1, later.lamport + 1);
    later.lane = Lane::Durable(hash);
    let later = later.signed(&attacker);
    let note = test_community.guest.note(10, 6);

    let mut gossip = bench.gossip(&attacker).await?;
    found.taken("a first history", (2, 0), None, &gossip.push(&[first, one]).await);
    // The session closes as soon as the log has the fork, perhaps before the acknowledgement.
    let pushed = gossip.push(&[other]).await;
    let held = matches!(
        pushed,
        Pushed::Stored { accepted: 1, .. } | Pushed::Closed(_)
    );
    let seen = format!("{pushed:?}");
    found.check("a second history of the same author", "kept", seen, held);
    let is_frozen = |gauges: &Gauges| gauges.has_frozen(&attacker.id());
    let what = "the author at the host";
    bench.wait_until(found, what, "frozen", is_frozen).await?;
    let told = bench.community()?.wait_for_fork(&attacker.id()).await;
    let what = "the author at another node, by the host's proof";
    found.holds(what, "frozen", told);

    // Others may pass its events on, but no further event of it is accepted.
    let mut gossip = bench.gossip(&guest).await?;
    let what = "further events of the author, through another peer";
    found.taken(what, (0, 2), Some("log_fork"), &gossip.push(&[third, later]).await);
    found.taken("that peer's own event", (1, 0), None, &gossip.push(&[note]).await);
    for path in ["/sync/v1", "/bus/v1", "/tensor/v1"] {
        let open = bench.admits(&attacker, path).await?;
        found.holds(format!("the author at {path}"), "no connection", !open);
    }
    bench.still_works(found).await
}
