//! A header that names more or less payload than the message has is a lie about where the next
//! field is. There is no next frame in a message and no rest to wait for: it must match exactly.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, Message};
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 1;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let truth = 8;
        for (what, length) in [
            ("one byte more than there is", truth + 1),
            ("one byte less than there is", truth - 1),
            ("nothing, with a body", 0),
            ("4 GiB", u32::MAX),
        ] {
            let mut peer = bench.pipeline().await?;
            peer.send(Frame::ping().length(length)).await;
            found.ended(what, CloseCode::FrameLength, &peer.ending().await);
        }
        for length in [0, 1, 15] {
            let mut peer = bench.pipeline().await?;
            peer.send(Message::binary(vec![1; length])).await;
            let what = format!("a message of {length} bytes, less than a header");
            found.ended(what, CloseCode::FrameLength, &peer.ending().await);
        }
        let mut peer = bench.upgraded().await?;
        peer.send(bench.hello("pipeline")?.frame().length(5000))
            .await;
        found.ended("a HELLO", CloseCode::FrameLength, &peer.ending().await);
        Ok(found.verdict())
    }
}
