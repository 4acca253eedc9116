//! An open stream holds memory, so their number is limited. All streams end with the connection
//! that opened them, including their work in progress.

use super::prelude::*;

/// Stream limit of the victim over all callers; the honest caller has one stream.
const STREAMS: u32 = 8;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    // Streams with rows, because the host preempts streams without rows by itself.
    let step = |bench: &Bench, stream| bench.zeros(stream, 16).frame();
    for round in 1..=4 {
        let mut peer = bench.pipeline().await?;
        for stream in 1..STREAMS {
            let what = format!("stream {stream} in round {round}");
            found.opened(what, &peer.ask(bench.stream_open(stream)).await);
            let what = format!("a step of stream {stream} in round {round}");
            found.answered(what, &peer.ask(step(bench, stream)).await);
        }
        found.refused("one more", "stream_limit", &peer.ask(bench.stream_open(STREAMS)).await);
        // The maximum of work in progress, whose results no client will receive.
        for stream in 1..STREAMS {
            peer.send(step(bench, stream)).await;
        }
        drop(peer);
        // The slots are free as soon as the host has detected the end of the connection.
        let gauges = until(&mut bench.victim, |gauges| gauges.streams <= 1).await?;
        let free = gauges.streams <= 1;
        let what = format!("streams after round {round}, but for the honest one");
        found.check(what, "0", gauges.streams.saturating_sub(1), free);
    }
    Ok(())
}
