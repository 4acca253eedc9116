//! Frames are numbered from 1, one by one. TLS delivers in order, so any other number is a defect
//! or an attempt to have a frame counted twice, or not at all.

use hearthnet_transport::CloseCode;

use crate::raw::Frame;
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 5;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        for (what, number) in [
            ("HELLO numbered 0", 0),
            ("HELLO numbered 2", 2),
            ("HELLO with the last number", u32::MAX),
        ] {
            let mut peer = bench.upgraded().await?;
            peer.send(bench.hello("pipeline")?.frame().sequence(number))
                .await;
            found.ended(what, CloseCode::FrameSequence, &peer.ending().await);
        }
        // HELLO was 1, so 2 is due.
        for (what, number) in [
            ("a gap of one", 3),
            ("a jump to the last number", u32::MAX),
            ("a duplicate", 1),
            ("a wrap to 0", 0),
        ] {
            let mut peer = bench.pipeline().await?;
            peer.send(Frame::ping().sequence(number)).await;
            found.ended(what, CloseCode::FrameSequence, &peer.ending().await);
        }
        let mut peer = bench.pipeline().await?;
        peer.send(Frame::ping()).await;
        peer.send(Frame::ping()).await;
        peer.send(Frame::ping().sequence(2)).await;
        let what = "a number from before";
        found.ended(what, CloseCode::FrameSequence, &peer.ending().await);
        Ok(found.verdict())
    }
}
