//! A host that answers just before each deadline can delay an answer at will. It may have been fast
//! in earlier chats, where other hosts show the usual speed, or be slow from its first token,
//! without any comparison. In both cases the caller moves to another host with the same layers, and
//! the answer is the same. A host that answers one row and then preempts the stream before the next
//! uses up the caller's total waiting time for memory, however many rows it answers in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use hearthnet_shard::StreamFault;

use super::prelude::*;
use crate::fleet::Hosts;

/// No host is slow yet.
const NOBODY: usize = usize::MAX;
/// Chats after which both hosts have been measured.
const BEFORE: usize = 4;
/// Time per prompt chunk of a slow host. 32 times as long is more than its time per token.
const PIECE: Duration = Duration::from_millis(150);
/// Total time that an answer waits for memory: longer than one pause (2 s), shorter than one pause
/// per token (6.6 s at least).
const ROOM: Duration = Duration::from_secs(3);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, chats).await
}

fn chats(runtime: &Handle, found: &mut Findings) -> Result<()> {
    let what = "good in four chats, then 0.7 s a token";
    slow(runtime, found, what, (BEFORE, 700))?;
    let what = "2.3 s a token from the first one on";
    slow(runtime, found, what, (0, 2300))?;
    let rows = preempted(runtime)?;
    let what = "a preemption after each row: the answer";
    let held = (1..TOKENS).contains(&rows);
    found.check_or(what, "ends", held, || format!("continues for {rows} rows"));
    Ok(())
}

/// Rows of an answer from a single host which preempts the stream after each of them.
fn preempted(runtime: &Handle) -> Result<u32> {
    let mut fleet = Fleet::new(runtime.clone(), None)?;
    fleet.pump.room_timeout = ROOM;
    let rows = Arc::new(AtomicU32::new(0));
    let (answered, mut served) = (Arc::clone(&rows), PROMPT);
    let preempts: Tamper = Box::new(move |passing| {
        let decode = passing.spans.iter().find(|span| span.rows == 1);
        let Some(at) = decode.map(|span| span.position) else {
            return;
        };
        if at > served {
            (served, *passing.fault) = (at, Some(StreamFault::Preempted));
        } else {
            answered.fetch_max((at + 1).saturating_sub(PROMPT), Ordering::Relaxed);
        }
    });
    match fleet.ask(0, vec![preempts]) {
        Ok(_) => Ok(TOKENS),
        // The answer was cut short.
        Err(_) => Ok(rows.load(Ordering::Relaxed)),
    }
}

/// Asks over two hosts, after `before` chats at full speed. One of them is slow from then on, with
/// this pause per token in milliseconds.
fn slow(
    runtime: &Handle,
    found: &mut Findings,
    what: &str,
    (before, pause): (usize, u64),
) -> Result<()> {
    let fleet = Fleet::new(runtime.clone(), None)?;
    // The host of the first token in the measured chat is slow from then on.
    let (slow, count) = (
        Arc::new(AtomicUsize::new(NOBODY)),
        Arc::new(AtomicUsize::new(0)),
    );
    let pause = Arc::new((AtomicU64::new(0), pause));
    let width = fleet.width();
    let host = |name: usize| -> Tamper {
        let (slow, count, pause) = (Arc::clone(&slow), Arc::clone(&count), Arc::clone(&pause));
        Box::new(move |passing| {
            let ms = pause.0.load(Ordering::Relaxed);
            let decode = passing.rows.len() == width
                && passing.spans.iter().all(|span| span.position >= PROMPT);
            if ms == 0 {
                return;
            }
            if !decode {
                // Without this, the difference between prompt and tokens would be too large.
                sleep(PIECE);
                return;
            }
            let first = slow.compare_exchange(NOBODY, name, Ordering::AcqRel, Ordering::Acquire);
            if first.is_ok() || first == Err(name) {
                count.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(ms));
            }
        })
    };
    let each = vec![(new_key()?, host(0)), (new_key()?, host(1))];
    let hosts: Hosts = fleet.hosts(new_key()?, each)?;
    let honest = fleet.ask(0, vec![unchanged()])?;
    for _ in 0..before {
        fleet.ask_over(&hosts, 0, TOKENS)?;
    }
    pause.0.store(pause.1, Ordering::Relaxed);
    let asked = fleet.ask_over(&hosts, 0, TOKENS)?;
    let count = count.load(Ordering::Relaxed);
    asked.corrected(found, what, "degraded", count > 0, &honest);
    // Three tokens, and one that was in flight.
    let few = (1..=4).contains(&count);
    found.check(format!("{what}: slow tokens"), "at most 4", count, few);
    Ok(())
}
