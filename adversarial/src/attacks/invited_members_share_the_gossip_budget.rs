//! Gossip work for a member has a budget. If members may invite, one could create others with
//! budgets of their own, so invited members share the budget of their inviter. Members invited by
//! an anchor have their own budget, because the anchor may have invited everyone.

use std::time::Duration;

use super::no_member_fills_the_replay_cache::let_in;
use super::prelude::*;

/// Batch sizes that use up the budget. An event checked in vain costs 51 units of 400,000
/// (`specs/gossip.md`, section 4). The last batch begins with almost nothing left, and earning its
/// cost takes 20 s.
const BATCHES: [usize; 9] = [1024, 1024, 1024, 1024, 1024, 1024, 1024, 600, 1024];
/// Time limit of a batch while budget is left, on a machine that is busy with other tests. Far less
/// than the wait of the last batch.
const AT_ONCE: Duration = Duration::from_secs(12);
/// Time limit of the victim for such a batch.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Most expensive events: validly signed, but refused.
fn rubbish(community: [u8; 32], key: &NodeKey) -> Vec<Vec<u8>> {
    let author = Author::new(community, key);
    let mut event = author.draft("notes.written", vec![1]);
    event.time = now_ms() + 86_400_000;
    let event = |n: usize| {
        let mut event = event.clone();
        event.body = n.to_be_bytes().to_vec();
        event.signed(key)
    };
    (0..1024).map(event).collect()
}

/// Whether a member's batch is answered within [`AT_ONCE`].
async fn is_answered(bench: &mut Bench, key: &NodeKey, events: &[Vec<u8>]) -> Result<bool> {
    let mut gossip = bench.gossip(key).await?;
    let pushed = tokio::time::timeout(AT_ONCE, gossip.push(events)).await;
    Ok(matches!(pushed, Ok(Pushed::Stored { .. })))
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let community = bench.community()?.community;
    // The attacker admits another node, as the policy allows.
    let crowd = let_in(bench, found, &attacker, 1).await?;
    let sybil = crowd.first();
    let sybil = sybil.ok_or_else(|| HarnessError::attacker("nobody was let in"))?;

    // The attacker uses up its budget, and continues as the node that it has admitted.
    let waste = rubbish(community, &attacker);
    let mut gossip = bench.gossip(&attacker).await?;
    let mut looked_at = 0;
    for events in BATCHES {
        let events = waste.get(..events).unwrap_or_default();
        match tokio::time::timeout(TIMEOUT, gossip.push(events)).await {
            Ok(Pushed::Stored { .. }) => looked_at += 1,
            _ => break,
        }
    }
    found.same("batches that are processed", BATCHES.len(), looked_at);
    let kims = bench.community()?.attacker.note(10, 1);
    let answered = is_answered(bench, sybil, &[kims]).await?;
    found.same("its invited member is answered at once", false, answered);
    let note = bench.community()?.guest.note(10, 1);
    let answered = is_answered(bench, &guest, &[note]).await?;
    found.same("a neighbour is answered at once", true, answered);
    bench.still_works(found).await
}
