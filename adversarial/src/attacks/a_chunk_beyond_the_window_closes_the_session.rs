//! Credit bounds what a peer can have in the host's hands. The host returns it when it can say
//! so: against a peer that does not listen, it keeps it, and one chunk more than the window is
//! the end.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, chunk, dtype, flag, kind};
use crate::{Bench, Budget, Findings, HarnessError, Verdict};

/// Bytes of a chunk: what both sides agree on by default.
const CHUNK: u32 = 1 << 20;

/// Chunks that the attacker sends at most, without ever reading an ACK: sockets and the host's
/// write buffer take about 8 MiB of echoes before the ACKs behind them are stuck, then the window
/// of 16 is used up. (Loopback sockets hold up to 10 MiB.)
const CHUNKS: u16 = 48;

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 8;
    // What arrives is echoed: it is held once as received and once as queued, never more than
    // the receive and send buffers that the limits name.
    const BUDGET: Budget = Budget::SESSION.and(
        128 << 20,
        "the 64 MiB each that a session may have received and queued, and 8 MiB of noise",
    );

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        // A session for measuring: its tensors come back, which fills the way back.
        let hello = bench
            .hello("bench")?
            .with("window_chunks", 1024)
            .with("recv_buffer_bytes", u32::MAX);
        let mut peer = bench.session(&hello).await?;
        let data = vec![0x55; CHUNK as usize];
        for tensor in 1..=CHUNKS {
            let body = chunk(tensor, dtype::I8, &[CHUNK], &data);
            peer.send(Frame::new(kind::TENSOR_DATA, body).flags(flag::FINAL))
                .await;
        }
        let what = format!("{CHUNKS} chunks without reading an ACK");
        found.cut_off(what, CloseCode::CreditOverrun, &peer.ending().await);
        Ok(found.verdict())
    }
}
