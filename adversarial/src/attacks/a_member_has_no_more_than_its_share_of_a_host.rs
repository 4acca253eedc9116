//! A member may use what a host has, all of it if nobody else wants any. One that takes every session
//! or every place for a stream, and gives none back, would have the host for itself.

use std::time::{Duration, Instant};

use hearthnet_transport::CloseCode;
use tokio::time::interval;

use crate::honest::Call;
use crate::raw::kind;
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
    let mut alive: Vec<u32> = (1..=STREAMS).collect();
    let mut ended = Vec::new();
    let guest = loop {
        asks.tick().await;
        let mut left = Vec::new();
        for stream in alive {
            peer.send(bench.zeros(stream, 1).frame()).await;
            let answer = peer.receive().await;
            match answer.is(kind::STREAM_ERROR) {
                true => ended.push(answer),
                false => left.push(stream),
            }
        }
        alive = left;
        match Call::open(&bench.target, &bench.guest, 1).await {
            Err(_) if begin.elapsed() < PATIENCE => {}
            guest => break guest,
        }
    };
    for stream in alive {
        peer.send(bench.zeros(stream, 1).frame()).await;
        let answer = peer.receive().await;
        if answer.is(kind::STREAM_ERROR) {
            ended.push(answer);
        }
    }
    let guest = found.done("another member's stream beside its seven", "opened", guest);
    let one = ended.len() == 1;
    found.check(
        "streams that it had to give up for that",
        "1",
        ended.len(),
        one,
    );
    for answer in &ended {
        found.refused("the stream that it gave up", "preempted", answer);
    }
    if let Some(guest) = guest {
        let _ = guest.close().await;
    }
    drop((peer, sessions));
    Ok(())
}
