//! No attack, but what others are to be measured by: two neighbours use the host as they may, one that is
//! answered token by token, and one whose prompt is read piece by piece. A caller beside them waits for its
//! share of the machine; beside whoever does harm it should not wait for much longer.

use crate::honest::Call;
use crate::raw::kind;
use crate::{Bench, Findings, HarnessError};

/// Tokens of the one, and how many of them there are to a piece of the other's prompt.
const TOKENS: u32 = 32;
const TO_A_PIECE: u32 = 4;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let mut chat = Call::open(&bench.target, &bench.guest, TOKENS).await?;
    let mut reader = bench.pipeline().await?;
    reader.send(bench.stream_open(1)).await;
    let opened = reader.receive().await.is(kind::STREAM_OPENED);
    found.holds("a stream of the reader", "opened", opened);
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
            found.holds(format!("the piece before token {token}"), "answered", answered);
        }
    }
    let closed = chat.close().await;
    found.done("the end of the chat", "a goodbye", closed);
    Ok(())
}
