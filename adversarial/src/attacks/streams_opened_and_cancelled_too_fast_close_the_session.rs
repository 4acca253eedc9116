//! Opening a stream makes the host work, and cancelling it at once makes it work for nothing
//! (the "rapid reset" of HTTP/2). What was begun counts, whether or not it was cancelled.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, cbor, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

/// Streams that the attacker would open if nobody stopped it. The limit is 64 in a second, with
/// four seconds' worth saved up.
const STREAMS: u32 = 10_000;

pub(super) struct Attack;

fn close(stream: u32) -> Frame {
    let body = cbor(&[("stream", stream.into()), ("epoch", 1.into())]);
    Frame::new(kind::STREAM_CLOSE, body)
}

impl crate::Attack for Attack {
    const CASE: u8 = 13;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let mut peer = bench.pipeline().await?;
        let churn = (1..=STREAMS).flat_map(|stream| [bench.stream_open(stream), close(stream)]);
        let churn: Vec<Frame> = churn.collect();
        let flood = peer.flood(churn).await;
        let what = "streams opened and cancelled at once";
        found.ended(what, CloseCode::StreamChurn, &flood.ending);
        Ok(found.verdict())
    }
}
