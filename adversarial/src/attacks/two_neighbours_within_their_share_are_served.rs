//! Control, not an attack: two neighbours use the host within their limits, one with token-by-token
//! decoding and one with a prompt in chunks. The latency of the honest caller here is the reference
//! for the attacks of this group.

use super::prelude::*;

/// Tokens of the first neighbour, and how many of them per prompt chunk of the second.
const TOKENS: u32 = 32;
const TO_A_PIECE: u32 = 4;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let mut chat = Call::open(&bench.target, &bench.guest, TOKENS).await?;
    let mut reader = bench.pipeline().await?;
    found.opened("a stream of the reader", &reader.ask(bench.stream_open(1)).await);
    for token in 0..TOKENS {
        if token % TO_A_PIECE == 0 {
            let mut piece = bench.zeros(1, 16);
            piece.want = 0;
            reader.send(piece.frame()).await;
        }
        let answered = chat.step(1, token).await;
        found.done(format!("token {token}"), "answered", answered);
        if token % TO_A_PIECE == TO_A_PIECE - 1 {
            let answered = reader.receive().await.is(kind::STEP_RESULT);
            let what = format!("the piece before token {token}");
            found.holds(what, "answered", answered);
        }
    }
    let closed = chat.close().await;
    found.done("the end of the chat", "BYE", closed);
    Ok(())
}
