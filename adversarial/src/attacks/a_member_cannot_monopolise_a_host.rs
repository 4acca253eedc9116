//! A member may use a whole host while no other member wants it. A member that takes all sessions
//! or all stream slots and never gives them back must not lock others out.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio::time::interval;

use super::prelude::*;

/// Maximum sessions of a member.
const SESSIONS: usize = 16;
/// Stream slots that the honest caller leaves.
const STREAMS: u32 = 7;
/// Well above the 10 s after which a claim is due.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(bench.pipeline().await?);
    }
    let token = crate::bench::token(&bench.attacker, bench.target.node)?;
    let ending = bench.show(token).await?;
    let what = "one more session of a member with 16";
    found.ended(what, CloseCode::SessionLimit, &ending);

    let Some(mut peer) = sessions.pop() else {
        return Err(HarnessError::attacker("no session"));
    };
    for stream in 1..=STREAMS {
        found.opened(format!("stream {stream}"), &peer.ask(bench.stream_open(stream)).await);
    }
    // The attacker keeps all of its streams busy, so that none counts as idle.
    let (begin, mut asks) = (Instant::now(), interval(Duration::from_millis(250)));
    let mut ended = BTreeMap::new();
    let guest = loop {
        asks.tick().await;
        for stream in 1..=STREAMS {
            step(bench, &mut peer, stream, &mut ended).await;
        }
        match Call::open(&bench.target, &bench.guest, 1).await {
            Err(_) if begin.elapsed() < TIMEOUT => {}
            guest => break guest,
        }
    };
    for stream in 1..=STREAMS {
        step(bench, &mut peer, stream, &mut ended).await;
    }
    let guest = found.done("another member's stream beside its seven", "opened", guest);
    let one = ended.len() == 1;
    found.check("streams preempted for it", "1", ended.len(), one);
    for answer in ended.values() {
        found.refused("the preempted stream", "preempted", answer);
    }
    if let Some(guest) = guest {
        let _ = guest.close().await;
    }
    drop((peer, sessions));
    Ok(())
}

/// Runs a step on a stream that is not in `ended`. The host may end a stream while another answer
/// is awaited, and again for a step that crossed the end; the first one counts.
async fn step(bench: &Bench, peer: &mut Peer, stream: u32, ended: &mut BTreeMap<u32, Arrived>) {
    if ended.contains_key(&stream) {
        return;
    }
    peer.send(bench.zeros(stream, 1).frame()).await;
    loop {
        let answer = peer.receive().await;
        let of = answer
            .number("stream")
            .filter(|_| answer.is(kind::STREAM_ERROR));
        let Some(of) = of else { return };
        ended.entry(of).or_insert(answer);
        if of == stream {
            return;
        }
    }
}
