//! Streams hold memory for as long as they are open, so there is a strict number of them, and
//! they go with the connection that opened them: whatever was under way.

use crate::raw::kind;
use crate::victim::until;
use crate::{Bench, Findings, HarnessError};

/// Streams that the victim allows, over all callers; the honest one has one of them.
const STREAMS: u32 = 8;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    // Streams that are used: one that holds no rows gives way to others by itself.
    let step = |bench: &Bench, stream| bench.zeros(stream, 16).frame();
    for round in 1..=4 {
        let mut peer = bench.pipeline().await?;
        for stream in 1..STREAMS {
            peer.send(bench.stream_open(stream)).await;
            let opened = peer.receive().await.is(kind::STREAM_OPENED);
            let what = format!("stream {stream} in round {round}");
            found.holds(what, "opened", opened);
            peer.send(step(bench, stream)).await;
            let answered = peer.receive().await.is(kind::STEP_RESULT);
            let what = format!("a step of stream {stream} in round {round}");
            found.holds(what, "answered", answered);
        }
        peer.send(bench.stream_open(STREAMS)).await;
        found.refused("one more", "stream_limit", &peer.receive().await);
        // As much work as they may have, of which nobody will hear.
        for stream in 1..STREAMS {
            peer.send(step(bench, stream)).await;
        }
        drop(peer);
        // The places are free as soon as the host sees that the connection is gone.
        let gauges = until(&mut bench.victim, |gauges| gauges.streams <= 1).await?;
        let free = gauges.streams <= 1;
        let what = format!("streams after round {round}, but for the honest one");
        found.check(what, "0", gauges.streams.saturating_sub(1), free);
    }
    Ok(())
}
