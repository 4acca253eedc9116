//! A peer that asks for data and then never returns its credit would keep it in the host's
//! memory for ever. There is a deadline.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, chunk, dtype, flag, kind};
use crate::{Bench, Budget, Findings, HarnessError, Verdict};

/// The smallest chunk that can be agreed on.
const CHUNK: u32 = 4096;

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 11;
    const BUDGET: Budget = Budget::SESSION;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let hello = bench
            .hello("bench")?
            .with("chunk_bytes", CHUNK)
            .with("window_chunks", 1);
        let mut peer = bench.session(&hello).await?;
        // Two chunks come back, and the window has room for one.
        let data = vec![0x55; CHUNK as usize];
        for flags in [0, flag::FINAL] {
            let body = chunk(1, dtype::I8, &[2 * CHUNK], &data);
            peer.send(Frame::new(kind::TENSOR_DATA, body).flags(flags))
                .await;
        }
        let what = "an echo of two chunks, no credit for the first";
        found.ended(what, CloseCode::CreditStall, &peer.ending().await);
        Ok(found.verdict())
    }
}
