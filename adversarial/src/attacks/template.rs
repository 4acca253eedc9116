//! Here stands what the attacker gains if the claim does not hold, and what the defence is. `hearthnet
//! adversarial explain` prints these lines. As an example, this attack skips numbers in the sequence
//! of frames.

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    // The control: the same action done correctly succeeds.
    let mut peer = bench.pipeline().await?;
    let answered = peer.ask(Frame::ping()).await.is(kind::PONG);
    found.holds("a ping with the next number", "answered", answered);

    // The attack. The time to detection counts from here.
    found.attempt();
    peer.send(Frame::ping().sequence(7)).await;
    let ending = peer.ending().await;
    found.ended(
        "a ping that skips numbers",
        CloseCode::FrameSequence,
        &ending,
    );
    Ok(())
}
