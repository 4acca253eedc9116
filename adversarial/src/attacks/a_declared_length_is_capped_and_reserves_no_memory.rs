//! A length costs the attacker eight bytes. A length above the limit must be refused when the
//! header is read, before the payload. A length below it must not reserve memory: a crowd of
//! sessions that announce the largest message and fall silent must cost almost nothing and end by a
//! deadline.

use super::prelude::*;
use crate::Budget;

const MIB: u64 = 1 << 20;

/// Sessions that declare a message and fall silent. A peer may have 16, and ended ones may count
/// for a moment longer.
const CROWD: usize = 12;

/// Address space that the crowd may reserve, touched or not. A limit below the declared sizes would
/// be too strict, because an honest message needs a buffer; one message per session is allowed.
const RESERVED: u64 = (CROWD as u64 + 8) * (MIB + 256 * 1024) + 64 * MIB;

/// Silent sessions: a quarter of a MiB of buffers each, and no message.
pub(super) const BUDGET: Budget = Budget::SESSION.and(
    CROWD as u64 * 256 * 1024,
    "two sessions, 12 silent ones with 256 KiB of buffers each, and 8 MiB of noise",
);

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let code = CloseCode::FrameTooBig;
    for (what, length) in [
        ("16 MiB", 16 * MIB),
        ("2 MiB", 2 * MIB),
        ("8 EiB", u64::MAX / 2),
        ("16 EiB", u64::MAX),
    ] {
        let mut peer = bench.pipeline().await?;
        peer.send(Message::binary([]).declaring(length)).await;
        found.ended(what, code, &peer.ending().await);
    }

    let mut peer = bench.pipeline().await?;
    let first = Message::binary(vec![0; 1000]).unfinished();
    peer.send(first).await;
    peer.send(Message::of(0, []).declaring(16 * MIB)).await;
    found.ended("16 MiB in fragments", code, &peer.ending().await);

    let mut peer = bench.upgraded().await?;
    peer.send(Message::binary([]).declaring(4097)).await;
    found.ended("5 KiB before HELLO", code, &peer.ending().await);

    let mut peer = bench.pipeline().await?;
    peer.send(Frame::new(kind::TRUNCATE, vec![0; 8192])).await;
    found.ended("a control frame of 8 KiB", code, &peer.ending().await);

    let before = bench.victim.usage();
    let mut crowd = Vec::with_capacity(CROWD);
    for _ in 0..CROWD {
        let mut peer = bench.pipeline().await?;
        // Within the limit, so the host has to wait for the payload for a while.
        peer.send(Message::binary([]).declaring(MIB)).await;
        crowd.push(peer);
    }
    let during = bench.victim.usage();
    for peer in &mut crowd {
        let ending = peer.ending().await;
        found.ended("1 MiB, then silence", CloseCode::PipelineStalled, &ending);
    }
    if let Some((before, during)) = before.zip(during) {
        let grown = during.reserved.saturating_sub(before.reserved);
        let (what, expected) = (
            "address space of the silent sessions",
            format!("at most {} MiB", RESERVED / MIB),
        );
        let seen = format!("{} MiB", grown / MIB);
        found.check(what, expected, seen, grown <= RESERVED);
    }
    Ok(())
}
