//! What a community agrees on is what its members signed. An event in somebody else's name must not
//! be stored by anybody, however right all else in it is; and whoever sends one is no honest
//! peer, for honest ones check before they pass on.

use hearthnet_transport::CloseCode;

use super::only_strictly_valid_signatures_are_believed::respelled;
use crate::raw::cbor;
use crate::raw::event::DOMAIN;
use crate::{Bench, Findings, HarnessError};

/// The domain of calls, which members sign all day.
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

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, _] = bench.members();
    let before = bench.victim.gauges().await?;
    let test_community = bench.test_community()?;
    let anchor = test_community.anchor();
    let body = cbor(&[("invite", "trusted".into()), ("research", true.into())]);
    let event = test_community.next_of_anchor("community.policy", body)?;
    let good = test_community.signed_by_anchor(&event, DOMAIN);
    let unsigned = event.fields();
    let signature = good.get(unsigned.len()..).unwrap_or_default();
    let mut other = event.clone();
    other.body = cbor(&[("invite", "anchor".into()), ("research", false.into())]);
    let other = other.fields();
    let forged = [
        ("signed by another member", event.signed(&attacker)),
        (
            "with a signature of zeros",
            [&unsigned[..], &[0; SIGNATURE]].concat(),
        ),
        (
            "signed for another purpose",
            test_community.signed_by_anchor(&event, CALLS),
        ),
        (
            "with other words under its signature",
            [&other[..], signature].concat(),
        ),
        (
            "with a flipped bit in the point",
            flipped(good.clone(), SIGNATURE),
        ),
        ("with a flipped bit in the scalar", flipped(good.clone(), 1)),
        (
            "with a scalar beyond the group's order",
            respelled(good.clone()),
        ),
    ];
    for (what, event) in forged {
        let pushed = bench.gossip(&attacker).await?.push(&[event]).await;
        let what = format!("an anchor's event {what}");
        found.gossip_ended(what, CloseCode::InvalidSignature, &pushed);
    }
    let after = bench.victim.gauges().await?;
    let same = before.state() == after.state();
    found.holds("what the log says", "the same as before", same);
    let (was, is) = (before.events_of(&anchor), after.events_of(&anchor));
    found.same("events of the anchor", was, is);

    // It was the signatures: the same event with the right one is taken, from the same peer.
    let pushed = bench.gossip(&attacker).await?.push(&[good]).await;
    let what = "the same event, as its author signed it";
    found.taken(what, (1, 0), None, &pushed);
    let heard = bench.test_community()?.hears(&anchor, is + 1).await;
    found.same("it is passed on", true, heard);
    bench.goes_on(found).await?;
    Ok(())
}
