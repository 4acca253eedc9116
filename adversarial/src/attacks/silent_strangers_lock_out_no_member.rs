//! Before the handshake is complete a peer is unknown, so silent peers take handshake slots too. An
//! attacker can connect from several addresses, and again whenever it loses a slot.

use super::half_open_connections_lock_out_no_member::from;
use super::prelude::*;

/// Addresses of the crowd, all in the home's own network, and connections of each: together the
/// limit of pending handshakes.
const ADDRESSES: u8 = 4;
const EACH: u8 = 16;

/// A realistic size of a community.
const MEMBERS: u8 = 30;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let addr = bench.target.addr;
    let before = bench.victim.gauges().await?.raised("connection_limit");
    let mut crowd = Vec::new();
    for n in 0..ADDRESSES * EACH {
        crowd.push(from([127, 0, 0, 10 + n % ADDRESSES], addr).await?);
    }
    let (mut at_home, mut elsewhere) = (0, 0);
    for n in 0..MEMBERS {
        // From addresses that members have used before, and from new ones.
        if let Ok(call) = Call::open(&bench.target, &bench.guest, 1).await {
            at_home += u8::from(call.close().await.is_ok());
        }
        let stream = from([127, 0, 0, 100 + n], addr).await?;
        let credentials = Credentials::of(&bench.guest.secret());
        let member = Peer::secured_over(Box::new(stream), &credentials).await;
        if let Ok(mut member) = member {
            let answer = member.upgrade_at("/bus/v1").await?;
            elsewhere += u8::from(answer.starts_with(SWITCHING));
        }
        crowd.push(from([127, 0, 0, 10 + n % ADDRESSES], addr).await?);
    }
    let all = MEMBERS.to_string();
    let what = "sessions of a member beside a silent crowd";
    found.check(what, &all, at_home, at_home == MEMBERS);
    let what = "a member at new addresses, beside a silent crowd";
    found.check(what, &all, elsewhere, elsewhere == MEMBERS);
    let gone = bench.victim.gauges().await?.raised("connection_limit") - before;
    let what = "connections of the crowd that made room";
    found.counted(what, "some", gone, gone > 0, "connection_limit");
    Ok(())
}
