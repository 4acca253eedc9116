//! A machine serves neighbours, but belongs to its owner. Neighbours that keep all stream slots
//! busy must not lock the owner out.

use super::prelude::*;

/// Stream slots that the honest caller leaves.
const STREAMS: u32 = 7;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let token = bench.target.token(&bench.attacker).await?;
    let mut peer = bench.session(&Hello::new("pipeline", token)).await?;
    for stream in 1..=STREAMS {
        found.opened(format!("stream {stream}"), &peer.ask(bench.stream_open(stream)).await);
        let what = format!("a step of stream {stream}");
        found.answered(what, &peer.ask(bench.zeros(stream, 1).frame()).await);
    }
    found.refused("one more", "stream_limit", &peer.ask(bench.stream_open(STREAMS + 1)).await);

    let owner = bench.community()?.key_of("victim")?;
    let call = Call::open(&bench.target, &owner, 1).await;
    let call = found.done("the owner's stream, at once", "opened", call);
    let what = "the stream preempted for it";
    found.refused(what, "preempted", &peer.receive().await);
    if let Some(call) = call {
        let _ = call.close().await;
    }
    bench.still_works(found).await
}
