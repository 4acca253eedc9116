//! Gossip work for a member has a budget. If members may invite, one could create others with
//! budgets of their own, so invited members share the budget of their inviter. Members invited by
//! an anchor have their own budget, because the anchor may have invited everyone.

use std::time::Duration;

use ciborium::Value;
use hearthnet_bus::NodeKey;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, Level, Policy};

use crate::bench::new_key;
use crate::raw::event::{Author, now_ms};
use crate::raw::{Pushed, cbor};
use crate::victim::Gauges;
use crate::victim::until;
use crate::{Bench, Findings, HarnessError};

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
async fn is_answered(
    bench: &mut Bench,
    key: &NodeKey,
    events: &[Vec<u8>],
) -> Result<bool, HarnessError> {
    let mut gossip = bench.gossip(key).await?;
    let pushed = tokio::time::timeout(AT_ONCE, gossip.push(events)).await;
    Ok(matches!(pushed, Ok(Pushed::Stored { .. })))
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, guest] = bench.members();
    let community = bench.test_community()?.community;
    let policy = Policy {
        who_may_invite: Level::Member,
        research: true,
    };
    let anchor = bench.test_community()?.anchor();
    bench.test_community()?.append(Body::PolicyChanged(policy));
    let written = bench.test_community()?.events_of(&anchor);
    let heard = |gauges: &Gauges| gauges.events_of(&anchor) >= written;
    let gauges = until(&mut bench.victim, heard).await?;
    found.same(
        "the host knows that members may invite",
        true,
        heard(&gauges),
    );

    // The attacker admits another node, as the policy allows.
    let sybil = new_key()?;
    let expires_ms = now_ms() + 3_600_000;
    let id = bench.test_community()?.id();
    let invite =
        Invite::generate(id, expires_ms / 1000, Vec::new()).map_err(HarnessError::attacker)?;
    let request = invite
        .request(sybil.id(), "kim")
        .map_err(HarnessError::attacker)?;
    let bytes = |bytes: &[u8]| Value::Bytes(bytes.to_vec());
    let bodies = [
        (
            "member.invited",
            cbor(&[
                ("key", bytes(invite.key().id().as_bytes())),
                ("uses", 9.into()),
                ("level", "member".into()),
                ("until", expires_ms.into()),
            ]),
        ),
        (
            "member.admitted",
            cbor(&[
                ("name", "kim".into()),
                ("node", bytes(sybil.id().as_bytes())),
                ("level", "member".into()),
                ("proof", bytes(&request.proof.0)),
                ("invite", bytes(invite.key().id().as_bytes())),
            ]),
        ),
    ];
    let mut events = Vec::new();
    for (kind, body) in bodies {
        let author = &mut bench.test_community()?.attacker;
        let event = author.draft(kind, body);
        events.push(author.go_on(&event));
    }
    let pushed = bench.gossip(&attacker).await?.push(&events).await;
    found.taken("an invite and an admission", (2, 0), None, &pushed);

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
    let kims = bench.test_community()?.attacker.note(10, 1);
    let answered = is_answered(bench, &sybil, &[kims]).await?;
    found.same("its invited member is answered at once", false, answered);
    let note = bench.test_community()?.guest.note(10, 1);
    let answered = is_answered(bench, &guest, &[note]).await?;
    found.same("a neighbour is answered at once", true, answered);
    bench.still_works(found).await
}
