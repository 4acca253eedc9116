//! Gossip work for a member has a budget. If members may invite, one could create others with
//! budgets of their own, so invited members share the budget of their inviter. Members invited by
//! an anchor have their own budget, because the anchor may have invited everyone.

use std::time::{Duration, Instant};

use super::no_member_fills_the_replay_cache::let_in;
use super::prelude::*;

/// Budget of a member, what it earns, and what an event costs that is checked in vain, in units
/// (`specs/gossip.md`, section 4).
const BUDGET: u64 = 400_000;
const EARNED_A_SECOND: u64 = 2_000;
const EVENT: u64 = 51;
/// Events of a full batch.
const FULL: u64 = 1024;
/// Budget with which the last batch begins, at most. To earn the rest of its cost takes 20 s.
const LAST: u64 = 10_000;
/// Time limit of a batch while budget is left, on a machine that is busy with other tests.
const AT_ONCE: Duration = Duration::from_secs(30);
/// Shortest wait for the budget that is watched: on a busy machine, most of it may be earned before
/// the last batch is answered.
const WATCHED: Duration = Duration::from_secs(3);
/// Time in which a budget is used up, even on a busy machine. A victim that takes 10 s for each full
/// batch needs 123 s: a batch costs 52,224 units, and 20,000 are earned meanwhile.
const TOO_SLOW: Duration = Duration::from_secs(300);
/// Time limit of the victim for such a batch.
const TIMEOUT: Duration = Duration::from_secs(60);

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

/// Whether a member's batch is answered before a deadline.
async fn is_answered(
    bench: &mut Bench,
    key: &NodeKey,
    events: &[Vec<u8>],
    deadline: Instant,
) -> Result<bool> {
    let mut gossip = bench.gossip(key).await?;
    let pushed = tokio::time::timeout_at(deadline.into(), gossip.push(events)).await;
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
    let (begin, mut spent) = (Instant::now(), 0);
    // When a part of the cost of the last batch is still to be earned.
    let mut owed_until = begin;
    let mut is_processed = true;
    while is_processed && owed_until < Instant::now() + WATCHED {
        // If the victim takes long for a batch, as much is earned meanwhile as is spent.
        if begin.elapsed() > TOO_SLOW {
            return Err(HarnessError::victim("it is too slow to use up a budget"));
        }
        // The budget grows while the batches are checked.
        let earned = begin.elapsed().as_secs().saturating_add(1) * EARNED_A_SECOND;
        let left = (BUDGET + earned).saturating_sub(spent);
        let count = match left <= LAST {
            true => {
                let owed = (FULL * EVENT - left) / EARNED_A_SECOND;
                // The costs are not exact, so only a part of the wait is watched.
                owed_until = Instant::now() + Duration::from_secs(owed * 3 / 5);
                FULL
            }
            false => left.div_ceil(EVENT).min(FULL),
        };
        spent += count * EVENT;
        let events = waste.get(..count as usize).unwrap_or_default();
        let pushed = tokio::time::timeout(TIMEOUT, gossip.push(events)).await;
        is_processed = matches!(pushed, Ok(Pushed::Stored { .. }));
    }
    found.same("the batches are processed", true, is_processed);
    let kims = bench.community()?.attacker.note(10, 1);
    let answered = is_answered(bench, sybil, &[kims], owed_until).await?;
    found.same(
        "its invited member is answered without budget",
        false,
        answered,
    );
    let note = bench.community()?.guest.note(10, 1);
    let answered = is_answered(bench, &guest, &[note], Instant::now() + AT_ONCE).await?;
    found.same("a neighbour is answered at once", true, answered);
    bench.still_works(found).await
}
