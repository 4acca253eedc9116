//! Who is put out still has the code that let it in, and as many keys as it likes. An invite with
//! uses left would bring it back at once, with a trusted member for an accomplice or without.

use hearthnet_bus::NodeKey;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, Level};

use crate::bench::new_key;
use crate::raw::event::admission;
use crate::raw::{Credentials, SWITCHING};
use crate::{Bench, Findings, HarnessError};

/// The attacker, a trusted member, lets a key in with an invite, and the key tries the host's door.
async fn let_in(bench: &mut Bench, invite: &Invite, key: &NodeKey) -> Result<bool, HarnessError> {
    let [attacker, _] = bench.members();
    let body = admission(invite, key, "member")?;
    let test_community = bench.test_community()?;
    let latest = test_community.lamport()?;
    let mut event = test_community.attacker.draft("member.admitted", body);
    event.lamport = event.lamport.max(latest + 1);
    let (written, event) = (event.seq, test_community.attacker.go_on(&event));
    bench.gossip(&attacker).await?.push(&[event]).await;
    // What the anchor says of the key from now on comes after it.
    bench.test_community()?.hears(&attacker.id(), written).await;
    let mut peer = bench.secured_with(&Credentials::of(&key.secret())).await?;
    let answer = peer.upgrade_at("/sync/v1").await?;
    Ok(answer.starts_with(SWITCHING))
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let (first, second, third) = (new_key()?, new_key()?, new_key()?);
    let test_community = bench.test_community()?;
    let [invite, other] = [5, 1].map(|uses| test_community.invite(Level::Member, uses));
    bench.agrees(found).await?;
    let open = let_in(bench, &invite, &first).await?;
    found.holds("a new member with the code", "let in", open);

    let node = first.id();
    bench
        .test_community()?
        .append(Body::Revoked { node, last_seq: 0 });
    bench.agrees(found).await?;
    let open = let_in(bench, &invite, &second).await?;
    found.holds("the same code after it was put out", "not let in", !open);
    let open = let_in(bench, &other, &third).await?;
    found.holds("somebody else with another code", "let in", open);
    bench.goes_on(found).await
}
