//! A chunk of one byte costs the host as much work as one of a MiB. Every chunk but the last has
//! exactly the agreed size, and that has a floor.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, chunk, dtype, flag, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

/// Elements of a tensor of two chunks.
const TWO_CHUNKS: u32 = 2 << 20;

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 14;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let code = CloseCode::ChunkTooSmall;
        for length in [0, 1, 4096, (1 << 20) - 1] {
            let mut peer = bench.pipeline().await?;
            let body = chunk(1, dtype::I8, &[TWO_CHUNKS], &vec![0; length]);
            peer.send(Frame::new(kind::TENSOR_DATA, body)).await;
            let what = format!("a first chunk of {length} bytes");
            found.ended(what, code, &peer.ending().await);
        }
        let mut peer = bench.pipeline().await?;
        let byte = Frame::new(kind::TENSOR_DATA, chunk(1, dtype::I8, &[TWO_CHUNKS], &[0]));
        let flood = peer.flood(vec![byte; 10_000]).await;
        found.ended("ten thousand chunks of a byte", code, &flood.ending);

        let mut peer = bench.pipeline().await?;
        let last = chunk(1, dtype::I8, &[1000], &[0; 999]);
        peer.send(Frame::new(kind::TENSOR_DATA, last).flags(flag::FINAL))
            .await;
        found.ended("a last chunk that is short", code, &peer.ending().await);

        let hello = bench.hello("pipeline")?.with("chunk_bytes", 1);
        let mut peer = bench.upgraded().await?;
        peer.send(hello.frame()).await;
        let what = "an agreed size of one byte";
        found.ended(what, CloseCode::BodyMalformed, &peer.ending().await);
        Ok(found.verdict())
    }
}
