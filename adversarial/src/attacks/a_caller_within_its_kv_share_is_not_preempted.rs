//! KV memory is the scarcest resource of a host, and a host opens more streams than it could fill.
//! A caller that opens many streams, fills them as fast as it can and reopens each preempted one
//! must not exceed its share at the cost of others. A caller within its share is never preempted,
//! and gets the same answers as on a quiet host.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, interval};

use super::prelude::*;
use crate::target::Target;
use crate::victim::{PAGE, Scene};

/// KV pages of the host. Three callers run: the honest one of every attack, a guest with a long
/// conversation, and the grabber.
const PAGES: u32 = 12;
/// Share of each caller.
const SHARE: u32 = PAGES / 3;

/// Pages wanted by each stream of the grabber: all that the honest caller leaves. The other three
/// streams of the host are one of the honest caller and two of the guest.
const WANTS: [u32; 5] = [3, 2, 2, 2, 2];

/// Streams that the grabber opens, at the highest rate that a session allows (burst 256, then 64
/// per second). One more would end its session.
const OPENS: u32 = 200;
const OPENS_PER_SECOND: u32 = 60;

/// Attempts of the guest to exceed its share.
const TRIES: u32 = 20;

/// Host with [`PAGES`] pages.
pub(super) const SCENE: Scene = Scene {
    kv_pages: Some(PAGES),
    ..Scene::ALONE
};

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let gauges = bench.victim.gauges().await?;
    let sessions = gauges.sessions;
    let pages = gauges.kv_pages_used + gauges.kv_pages_left;
    found.same("pages of the host", PAGES, pages);

    // The pages of the first conversation count until the host has processed its end.
    let quiet = talk(bench).await?;
    until(&mut bench.victim, |gauges| gauges.sessions <= sessions).await?;
    let beyond = want_more(bench).await?;
    until(&mut bench.victim, |gauges| gauges.sessions <= sessions).await?;
    found.done("more than its share, on a quiet host", "served", beyond);

    let (stop, stopped) = watch::channel(false);
    let peer = bench.pipeline().await?;
    let grabber = tokio::spawn(grab(peer, bench.target, stopped));
    let full = until(&mut bench.victim, |gauges| gauges.kv_pages_left == 0).await?;
    found.same("free pages beside the grabber", 0, full.kv_pages_left);

    let answers = talk(bench).await?;
    let same = answers.is_ok() && quiet == answers;
    let what = format!("{SHARE} pages for a guest, beside the grabber");
    found.check_or(what, "the same answers", same, || {
        answers.err().unwrap_or_else(|| "other answers".to_owned())
    });

    // Proves that the grabber exerts pressure: a caller that exceeds its share is preempted.
    let mut beyond = Ok(());
    for _ in 0..TRIES {
        until(&mut bench.victim, |gauges| gauges.sessions <= sessions + 1).await?;
        beyond = want_more(bench).await?;
        if beyond.is_err() {
            break;
        }
    }
    let seen = beyond.err().unwrap_or_else(|| "served".to_owned());
    let held = ["stream error kv_full", "stream error preempted"].contains(&&*seen);
    let what = "more than its share, beside the grabber";
    found.check(what, "kv_full or preempted", seen, held);

    stop.send_replace(true);
    let grabbed = grabber.await?;
    found.refused("a stream of the grabber", "preempted", &grabbed.preempted);
    let rows = grabbed.rows;
    found.check("rows of the grabber", "some", rows, rows > 0);
    Ok(())
}

/// Runs a conversation that takes the guest's whole share. Returns its answers or the failure.
async fn talk(bench: &Bench) -> Result<Result<Vec<Bytes>, String>> {
    let positions = SHARE * PAGE;
    let mut call = Call::open(&bench.target, &bench.guest, positions).await?;
    let mut answers = Vec::new();
    for position in 0..positions {
        match call.step(1, position).await {
            Ok(answer) => answers.push(answer),
            Err(why) => return Ok(Err(why)),
        }
    }
    Ok(call.close().await.map(|()| answers))
}

/// Runs the same conversation with a second stream beside it. Returns the refusal of the host, if
/// there is one.
async fn want_more(bench: &Bench) -> Result<Result<(), String>> {
    let positions = SHARE * PAGE;
    let mut call = Call::open(&bench.target, &bench.guest, positions).await?;
    let trying = async {
        for position in 0..positions {
            call.step(1, position).await?;
        }
        call.stream(2, positions).await?;
        for position in 0..3 * PAGE {
            call.step(2, position).await?;
        }
        Ok(())
    };
    let served = trying.await;
    // The session is not used any more.
    let _ = call.close().await;
    Ok(served)
}

/// Stream of the grabber.
#[derive(Clone, Copy, Default)]
struct Held {
    epoch: u32,
    is_open: bool,
    /// True while a request has no answer.
    is_waiting: bool,
    length: u32,
    /// Positions to fill.
    want: u32,
}

struct Grabbed {
    /// First preemption of a stream of the grabber.
    preempted: Arrived,
    /// Rows computed for the grabber.
    rows: u64,
}

/// Fills streams until it is stopped, and reopens each preempted one.
async fn grab(mut peer: Peer, target: Target, stop: watch::Receiver<bool>) -> Grabbed {
    let mut streams = WANTS.map(|pages| Held {
        want: pages * PAGE,
        ..Held::default()
    });
    let (begin, mut opens) = (Instant::now(), 0);
    let mut pace = interval(Duration::from_millis(5));
    let mut grabbed = Grabbed {
        preempted: Arrived::Nothing,
        rows: 0,
    };
    while !*stop.borrow() {
        for (stream, held) in (1..).zip(&mut streams) {
            let earned = begin.elapsed().as_secs() as u32 * OPENS_PER_SECOND;
            if held.is_waiting || !held.is_open && opens >= OPENS + earned {
                continue;
            }
            held.is_waiting = true;
            if held.is_open {
                peer.send(step(stream, held, target.width)).await;
            } else {
                (opens, held.epoch, held.length) = (opens + 1, held.epoch + 1, 0);
                peer.send(open(stream, held.epoch, &target)).await;
            }
        }
        if !streams.iter().any(|held| held.is_waiting) {
            // All streams are closed, and the open rate is used up for the moment.
            pace.tick().await;
            continue;
        }
        let answer = peer.receive().await;
        let Some((stream, epoch)) = life(&answer) else {
            // The host has ended the session; the verdict reports it.
            break;
        };
        let index = stream.wrapping_sub(1) as usize;
        let Some(held) = streams.get_mut(index).filter(|held| held.epoch == epoch) else {
            continue;
        };
        if answer.is(kind::STREAM_ERROR) {
            (held.is_open, held.is_waiting) = (false, false);
            if answer.text("code").as_deref() == Some("preempted") {
                grabbed.preempted = answer;
            }
        } else if answer.is(kind::STREAM_OPENED) {
            (held.is_open, held.is_waiting) = (true, false);
        } else {
            held.is_waiting = false;
            let rows = rows(held);
            held.length = held.want.min(held.length + rows);
            grabbed.rows += u64::from(rows);
        }
    }
    grabbed
}

/// Rows of a stream's next step: a page. Once the stream is full, its last page is repeated, so
/// that it is never idle.
fn rows(held: &Held) -> u32 {
    match held.length < held.want {
        true => PAGE,
        false => 1,
    }
}

fn step(stream: u32, held: &Held, width: u32) -> Frame {
    let rows = rows(held);
    let step = Step {
        stream,
        epoch: held.epoch,
        position: held.length.min(held.want - rows),
        rows,
        width,
        want: 0,
        data: vec![0; (rows * width) as usize * 2],
        ..Step::default()
    };
    step.frame()
}

fn open(stream: u32, epoch: u32, target: &Target) -> Frame {
    stream_open_in(epoch, stream, &target.weights, target.layers, SHARE * PAGE)
}

/// Stream and epoch of a frame.
fn life(answer: &Arrived) -> Option<(u32, u32)> {
    match answer {
        Arrived::Frame {
            kind: kind::STEP_RESULT,
            body,
        } => {
            let number = |at| Some(u32::from_be_bytes(*body.get(at..)?.first_chunk()?));
            Some((number(0)?, number(4)?))
        }
        _ => Some((answer.number("stream")?, answer.number("epoch")?)),
    }
}
