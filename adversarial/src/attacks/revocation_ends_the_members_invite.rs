//! A revoked member still has its invite code, and can generate any number of keys. An invite with
//! uses left would let it back in at once, with or without a trusted member as an accomplice.

use super::prelude::*;

/// The attacker, a trusted member, admits a key by an invite. Returns whether the host then accepts
/// the key.
async fn let_in(bench: &mut Bench, invite: &Invite, key: &NodeKey) -> Result<bool> {
    let [attacker, _] = bench.members();
    let body = admission(invite, key, "member")?;
    let test_community = bench.community()?;
    let latest = test_community.lamport()?;
    let mut event = test_community.attacker.draft("member.admitted", body);
    event.lamport = event.lamport.max(latest + 1);
    let (written, event) = (event.seq, test_community.attacker.go_on(&event));
    bench.gossip(&attacker).await?.push(&[event]).await;
    // Later events of the anchor about the key sort after this admission.
    bench
        .community()?
        .wait_for_events(&attacker.id(), written)
        .await;
    bench.admits(key, "/sync/v1").await
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let (first, second, third) = (new_key()?, new_key()?, new_key()?);
    let test_community = bench.community()?;
    let [invite, other] = [5, 1].map(|uses| test_community.invite(Level::Member, uses));
    bench.wait_for_agreement(found).await?;
    let open = let_in(bench, &invite, &first).await?;
    found.holds("a new member with the code", "admitted", open);

    bench.community()?.revoke(first.id());
    bench.wait_for_agreement(found).await?;
    let open = let_in(bench, &invite, &second).await?;
    found.holds("the same code after the revocation", "refused", !open);
    let open = let_in(bench, &other, &third).await?;
    found.holds("a new member with another code", "admitted", open);
    bench.still_works(found).await
}
