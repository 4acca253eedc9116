//! A host batches short steps of all streams. A caller that floods all of its streams with such
//! steps must not delay the steps of others by the time of the whole batch.

use tokio::sync::watch;

use super::prelude::*;

/// Streams that the honest caller and the guest leave, and rows per step: the most that counts as
/// short.
const STREAMS: u32 = 6;
const ROWS: u32 = 8;
/// Tokens of the guest's answer.
const TOKENS: u32 = 32;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let mut peer = bench.pipeline().await?;
    for stream in 1..=STREAMS {
        found.opened(format!("stream {stream}"), &peer.ask(bench.stream_open(stream)).await);
    }
    let steps = (1..=STREAMS).map(|stream| bench.zeros(stream, ROWS).frame());
    let (stop, stopped) = watch::channel(false);
    let flood = tokio::spawn(flood(peer, steps.collect(), stopped));
    let mut guest = Call::open(&bench.target, &bench.guest, TOKENS).await?;
    for token in 0..TOKENS {
        let answered = guest.step(1, token).await;
        let what = format!("token {token} of a neighbour");
        found.done(what, "answered", answered);
    }
    let closed = guest.close().await;
    found.done("the close of the neighbour's chat", "BYE", closed);
    stop.send_replace(true);
    let answered = flood.await?;
    found.check("steps of the flood", "some", answered, answered > 0);
    Ok(())
}

/// Sends each step again as soon as it was answered. Returns the number of answers.
async fn flood(mut peer: Peer, steps: Vec<Frame>, stop: watch::Receiver<bool>) -> u64 {
    for step in &steps {
        peer.send(step.clone()).await;
    }
    let mut answered = 0;
    while !*stop.borrow() {
        let answer = peer.receive().await;
        let Some(step) = stream_of(&answer).and_then(|stream| steps.get(stream - 1)) else {
            // The host has ended the session; the verdict reports it.
            break;
        };
        answered += 1;
        peer.send(step.clone()).await;
    }
    answered
}

/// Stream number of an answer.
fn stream_of(answer: &Arrived) -> Option<usize> {
    match answer {
        Arrived::Frame {
            kind: kind::STEP_RESULT,
            body,
        } => usize::try_from(u32::from_be_bytes(*body.first_chunk()?)).ok(),
        _ => None,
    }
}
