//! Small things that cost the host more than the attacker: fragments that are joined, pings that
//! are answered, control frames that change state. Each kind has a rate; beyond it the session
//! ends, and nothing piles up meanwhile.

use std::iter::repeat_n;

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, Message, cbor, kind, opcode};
use crate::{Bench, Findings, HarnessError, Verdict};

/// What the attacker would send if nobody stopped it.
const MILLION: usize = 1_000_000;

pub(super) struct Attack;

fn fragments(payload: &[u8]) -> impl Iterator<Item = Message> {
    let first = Message::binary(payload).unfinished();
    let next = Message::of(opcode::CONTINUATION, payload).unfinished();
    std::iter::once(first).chain(repeat_n(next, MILLION))
}

impl crate::Attack for Attack {
    const CASE: u8 = 6;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let code = CloseCode::FrameRate;

        let flood = bench.pipeline().await?.flood(fragments(&[1])).await;
        found.ended("a million fragments of a byte", code, &flood.ending);
        let stopped = flood.written < MILLION as u64;
        let seen = format!("{} written", flood.written);
        found.check("the flood", "stopped before its end", seen, stopped);

        let flood = bench.pipeline().await?.flood(fragments(&[])).await;
        found.ended("a million empty fragments", code, &flood.ending);

        let flood = bench.upgraded().await?.flood(fragments(&[1])).await;
        found.ended("fragments before HELLO", code, &flood.ending);

        let pings = repeat_n(Message::of(opcode::PING, [0; 125]), MILLION);
        let flood = bench.pipeline().await?.flood(pings).await;
        found.ended("WebSocket pings", code, &flood.ending);

        let pings = repeat_n(Frame::ping(), MILLION);
        let flood = bench.pipeline().await?.flood(pings).await;
        found.ended("PINGs", code, &flood.ending);

        let body = cbor(&[("stream", 9.into()), ("epoch", 9.into())]);
        let closes = repeat_n(Frame::new(kind::STREAM_CLOSE, body), MILLION);
        let flood = bench.pipeline().await?.flood(closes).await;
        found.ended("closes of no stream", code, &flood.ending);

        let describes = repeat_n(Frame::new(kind::DESCRIBE, []), MILLION);
        let flood = bench.pipeline().await?.flood(describes).await;
        found.ended("DESCRIBEs", code, &flood.ending);
        Ok(found.verdict())
    }
}
