//! A member may use what a host has, all of it if nobody else wants any. One that takes every session
//! or every place for a stream, and gives none back, would have the host for itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hearthnet_transport::CloseCode;
use tokio::time::interval;

use crate::honest::Call;
use crate::raw::{Arrived, Peer, kind};
use crate::{Bench, Findings, HarnessError};

/// Sessions that one member may have.
const SESSIONS: usize = 16;
/// Places for streams that the honest caller leaves.
const STREAMS: u32 = 7;
/// Long after a claim is due, which is so after 10 s.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(bench.pipeline().await?);
    }
    let token = crate::bench::token(&bench.attacker, bench.target.node)?;
    let ending = bench.show(token).await?;
    found.ended(
        "one more session of a member with 16",
        CloseCode::SessionLimit,
        &ending,
    );

    let Some(mut peer) = sessions.pop() else {
        return Err(HarnessError::attacker("no session"));
    };
    for stream in 1..=STREAMS {
        peer.send(bench.stream_open(stream)).await;
        let opened = peer.receive().await.is(kind::STREAM_OPENED);
        found.check(format!("stream {stream}"), "opened", opened, opened);
    }
    // It works on all of them without a pause, so that none of them rests.
    let (begin, mut asks) = (Instant::now(), interval(Duration::from_millis(250)));
    let mut ended = BTreeMap::new();
    let guest = loop {
        asks.tick().await;
        for stream in 1..=STREAMS {
            step(bench, &mut peer, stream, &mut ended).await;
        }
        match Call::open(&bench.target, &bench.guest, 1).await {
            Err(_) if begin.elapsed() < PATIENCE => {}
            guest => break guest,
        }
    };
    for stream in 1..=STREAMS {
        step(bench, &mut peer, stream, &mut ended).await;
    }
    let guest = found.done("another member's stream beside its seven", "opened", guest);
    let one = ended.len() == 1;
    found.check(
        "streams that it had to give up for that",
        "1",
        ended.len(),
        one,
    );
    for answer in ended.values() {
        found.refused("the stream that it gave up", "preempted", answer);
    }
    if let Some(guest) = guest {
        let _ = guest.close().await;
    }
    drop((peer, sessions));
    Ok(())
}

/// A step on a stream, unless that has `ended`. The end of a stream may come unasked, while another
/// one's answer is awaited, and once more to a step that crossed it: the first counts.
async fn step(bench: &Bench, peer: &mut Peer, stream: u32, ended: &mut BTreeMap<u32, Arrived>) {
    if ended.contains_key(&stream) {
        return;
    }
    peer.send(bench.zeros(stream, 1).frame()).await;
    loop {
        let answer = peer.receive().await;
        let of = answer.number("stream").filter(|_| answer.is(kind::STREAM_ERROR));
        let Some(of) = of else { return };
        ended.entry(of).or_insert(answer);
        if of == stream {
            return;
        }
    }
}
