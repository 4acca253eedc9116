//! While an invite is open, strangers may connect in order to join, with any number of keys. They
//! could hold all call sockets of a node without making a call.

use super::prelude::*;

/// More than all call sockets of a node.
const STRANGERS: usize = 160;
/// Call sockets that strangers may have in total.
const THEIRS: usize = 16;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let invite = bench.community()?.invite(Level::Member, 2);
    bench.wait_for_agreement(found).await?;
    let mut crowd = Vec::new();
    for _ in 0..STRANGERS {
        let (stranger, answer) = bench.upgrade(&new_key()?, "/bus/v1").await?;
        if answer.starts_with(SWITCHING) {
            crowd.push(stranger);
        }
    }
    let called = bench.target.token(&bench.guest).await;
    let told = "a member calls beside a crowd of strangers";
    found.done(told, "answered", called);
    let joined = bench.join(&invite).await;
    found.done("a joiner with a code beside the crowd", "admitted", joined);
    // A socket counts as closed after the close deadline, because strangers do not answer the close.
    let all_but_theirs = |gone: u64| gone >= (STRANGERS - THEIRS) as u64;
    let gone = until(&mut bench.victim, |gauges| {
        all_but_theirs(gauges.raised("session_limit"))
    });
    let gone = gone.await?.raised("session_limit");
    let held = all_but_theirs(gone);
    let what = "sockets of strangers that were closed for others";
    found.counted(what, "all but 16", gone, held, "session_limit");
    drop(crowd);
    bench.still_works(found).await
}
