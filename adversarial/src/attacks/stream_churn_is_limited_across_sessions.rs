//! A session may open a limited number of streams, and each session starts from zero. Without a
//! limit across sessions, a caller could open the maximum in one session, reconnect, and repeat.

use std::time::Instant;

use super::prelude::*;

/// Maximum sessions, and streams in each, within the limit of a session.
const SESSIONS: usize = 32;
const STREAMS: u32 = 250;
/// Limit of a caller over all of its sessions: burst, and rate per second.
const AT_ONCE: u64 = 1024;
const PER_SECOND: u64 = 256;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let begin = Instant::now();
    let (mut opened, mut refused) = (0u64, None);
    'sessions: for _ in 0..SESSIONS {
        let mut peer = bench.pipeline().await?;
        for stream in 1..=STREAMS {
            let answer = peer.ask(bench.stream_open(stream)).await;
            if !answer.is(kind::STREAM_OPENED) {
                refused = Some(answer);
                break 'sessions;
            }
            opened += 1;
            let close = Frame::new(kind::STREAM_CLOSE, life(stream, 1));
            peer.send(close).await;
        }
    }
    let most = AT_ONCE + PER_SECOND * (begin.elapsed().as_secs() + 1);
    let held = opened <= most;
    let what = "streams that were opened";
    found.check(what, format!("at most {most}"), opened, held);
    match refused {
        Some(answer) => found.refused("one more", "stream_churn", &answer),
        None => found.holds("one more", "refused", false),
    }
    let guest = Call::open(&bench.target, &bench.guest, 1).await;
    if let Some(guest) = found.done("a neighbour's stream", "opened", guest) {
        let closed = guest.close().await;
        found.done("its end", "BYE", closed);
    }
    Ok(())
}
