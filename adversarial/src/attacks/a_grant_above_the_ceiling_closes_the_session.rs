//! A grant widens the window in which the host may send. Unbounded it would overflow a counter,
//! or make the host pile up what a peer never reads: the ceiling is 1,024 chunks.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, cbor, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

fn grant(chunks: u32) -> Frame {
    Frame::new(kind::FLOWCTL, cbor(&[("grant", chunks.into())]))
}

impl crate::Attack for Attack {
    const CASE: u8 = 9;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        // The window begins at 16.
        for (what, grants) in [
            ("u32::MAX, twice", vec![u32::MAX, u32::MAX]),
            ("one more than the ceiling", vec![1024 - 16 + 1]),
            ("beyond the ceiling in two steps", vec![1000, 1000]),
            (
                "a sum that wraps around to a small window",
                vec![u32::MAX - 15],
            ),
            ("nothing", vec![0]),
        ] {
            let hello = bench.hello("pipeline")?.with("window_chunks", 16);
            let mut peer = bench.session(&hello).await?;
            for chunks in grants {
                peer.send(grant(chunks)).await;
            }
            found.ended(what, CloseCode::CreditOverflow, &peer.ending().await);
        }
        // In HELLO the same number is a value out of its range.
        let hello = bench.hello("pipeline")?.with("window_chunks", u32::MAX);
        let mut peer = bench.upgraded().await?;
        peer.send(hello.frame()).await;
        let what = "a window of u32::MAX in HELLO";
        found.ended(what, CloseCode::BodyMalformed, &peer.ending().await);
        Ok(found.verdict())
    }
}
