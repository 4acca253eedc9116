//! Who is put out still has the code that let it in, and as many keys as it likes. An invite with
//! uses left would bring it back at once, with a trusted member for an accomplice or without.

use ciborium::Value;
use hearthnet_bus::NodeKey;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, Level};

use crate::raw::{Papers, SWITCHING, cbor};
use crate::{Bench, Findings, HarnessError};

/// The attacker, a trusted member, lets a key in with an invite, and the key tries the host's door.
async fn let_in(bench: &mut Bench, invite: &Invite, key: &NodeKey) -> Result<bool, HarnessError> {
    let [attacker, _] = bench.members();
    let request = invite.request(key.id(), "kim").map_err(HarnessError::attacker)?;
    let bytes = |bytes: &[u8]| Value::Bytes(bytes.to_vec());
    let body = cbor(&[
        ("name", "kim".into()),
        ("node", bytes(key.id().as_bytes())),
        ("level", "member".into()),
        ("proof", bytes(&request.proof.0)),
        ("invite", bytes(invite.key().id().as_bytes())),
    ]);
    let test_community = bench.test_community()?;
    let latest = test_community.lamport()?;
    let mut event = test_community.attacker.draft("member.admitted", body);
    event.lamport = event.lamport.max(latest + 1);
    let (written, event) = (event.seq, test_community.attacker.go_on(&event));
    bench.gossip(&attacker).await?.push(&[event]).await;
    // What the anchor says of the key from now on comes after it.
    bench.test_community()?.hears(&attacker.id(), written).await;
    let mut peer = bench.secured_with(&Papers::of(&key.secret())).await?;
    let answer = peer.upgrade_at("/sync/v1").await?;
    Ok(answer.starts_with(SWITCHING))
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let keys = [(); 3].map(|()| NodeKey::generate().map_err(HarnessError::attacker));
    let [first, second, third] = keys;
    let (first, second, third) = (first?, second?, third?);
    let invites = [5, 1].map(|uses| bench.test_community().map(|c| c.invite(Level::Member, uses)));
    let [invite, other] = invites;
    let (invite, other) = (invite?, other?);
    bench.agrees(found).await?;
    let open = let_in(bench, &invite, &first).await?;
    found.check("a new member with the code", "let in", open, open);

    let node = first.id();
    bench.test_community()?.append(Body::Revoked { node, last_seq: 0 });
    bench.agrees(found).await?;
    let open = let_in(bench, &invite, &second).await?;
    found.check("the same code after it was put out", "not let in", open, !open);
    let open = let_in(bench, &other, &third).await?;
    found.check("somebody else with another code", "let in", open, open);
    bench.goes_on(found).await
}
