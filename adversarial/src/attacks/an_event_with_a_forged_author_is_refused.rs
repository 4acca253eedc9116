//! The log holds only events that their authors signed. An event under the name of another author
//! must not be stored, even if it is valid otherwise. Its sender is disconnected, because honest
//! peers check events before they pass them on.

use super::only_strictly_valid_signatures_are_accepted::respelled;
use super::prelude::*;

/// Signature domain of calls, which members sign all the time.
const CALLS: &[u8] = b"hearthnet/call/v1\0";

/// Bytes of a signature.
const SIGNATURE: usize = 64;

fn flipped(mut event: Vec<u8>, from_end: usize) -> Vec<u8> {
    let at = event.len().saturating_sub(from_end);
    if let Some(byte) = event.get_mut(at) {
        *byte ^= 1;
    }
    event
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, _] = bench.members();
    let before = bench.victim.gauges().await?;
    let test_community = bench.community()?;
    let anchor = test_community.anchor();
    let body = cbor(&[("invite", "trusted".into()), ("research", true.into())]);
    let event = test_community.next_of_anchor("community.policy", body)?;
    let good = test_community.signed_by_anchor(&event, DOMAIN);
    let unsigned = event.fields();
    let signature = good.get(unsigned.len()..).unwrap_or_default();
    let mut other = event.clone();
    other.body = cbor(&[("invite", "anchor".into()), ("research", false.into())]);
    let other = other.fields();
    let zeros = [&unsigned[..], &[0; SIGNATURE]].concat();
    let misused = test_community.signed_by_anchor(&event, CALLS);
    let moved = [&other[..], signature].concat();
    let (point, scalar) = (flipped(good.clone(), SIGNATURE), flipped(good.clone(), 1));
    let beyond = respelled(good.clone());
    let forged = [
        ("signed by another member", event.signed(&attacker)),
        ("with a signature of zeros", zeros),
        ("signed for another purpose", misused),
        ("with another body under its signature", moved),
        ("with a flipped bit in the point", point),
        ("with a flipped bit in the scalar", scalar),
        ("with a scalar beyond the group's order", beyond),
    ];
    for (what, event) in forged {
        let pushed = bench.gossip(&attacker).await?.push(&[event]).await;
        let what = format!("an anchor's event {what}");
        found.gossip_ended(what, CloseCode::InvalidSignature, &pushed);
    }
    let after = bench.victim.gauges().await?;
    let same = before.state() == after.state();
    found.holds("the community state", "the same as before", same);
    let (was, is) = (before.events_of(&anchor), after.events_of(&anchor));
    found.same("events of the anchor", was, is);

    // Proves that the signature was the reason: the event with its correct signature is accepted
    // from the same peer.
    bench.stores(found, "the same event, as its author signed it", &attacker, &[good]).await?;
    bench.passed_on(found, &anchor, is + 1).await?;
    bench.still_works(found).await
}
