//! A host whose every answer comes just before it would be late holds an answer up for as long as it
//! likes: fast in earlier chats and slow in this one, where others show what is usual; or slow from
//! its first token, where nobody shows anything. Either way it is left, where another one has its
//! layers, and the answer is the same. One that answers a row and takes the stream's memory back before
//! the next is out of its time for room, however many rows it answers in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use hearthnet_shard::StreamFault;
use hearthnet_testkit::Tamper;
use hearthnet_transport::Code;
use tokio::runtime::Handle;

use crate::bench::new_key;
use crate::fleet::{Fleet, Hosts, PROMPT, TOKENS};
use crate::{Bench, Findings, HarnessError};

/// Nobody is slow yet.
const NOBODY: usize = usize::MAX;
/// Chats after which both hosts have been measured: two of one, and then one of the other.
const BEFORE: usize = 4;
/// What a piece of the prompt takes a host that is slow: 32 times as long is no less than a token takes it.
const PIECE: Duration = Duration::from_millis(150);
/// How long an answer that has begun asks for room: longer than any one pause (2 s), and shorter than as
/// many as it has tokens (6.6 s at least).
const ROOM: Duration = Duration::from_secs(3);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    for (what, before, pause) in [
        ("good in four chats, then 0.7 s a token", BEFORE, 700),
        ("2.3 s a token from the first one on", 0, 2300),
    ] {
        let runtime = Handle::current();
        let asked = tokio::task::spawn_blocking(move || asked(runtime, before, pause));
        let (left, same, slow) = asked.await??;
        let degraded = left == "degraded" && slow > 0;
        found.check(
            format!("{what}: why it is left"),
            "degraded",
            &left,
            degraded,
        );
        found.holds(format!("{what}: the same answer"), "yes", same);
        // Three tokens, and one that was on its way.
        let few = (1..=4).contains(&slow);
        found.check(format!("{what}: slow tokens"), "at most 4", slow, few);
    }
    let runtime = Handle::current();
    let rows = tokio::task::spawn_blocking(move || preempted(runtime));
    let rows = rows.await.map_err(HarnessError::attacker)??;
    found.check_or(
        "a row, then the memory taken back, and again: the answer",
        "ends",
        (1..TOKENS).contains(&rows),
        || format!("goes on for {rows} rows"),
    );
    Ok(())
}

/// How many rows of its answer a question gets out of the only host, which takes its memory back after
/// each of them.
fn preempted(runtime: Handle) -> Result<u32, HarnessError> {
    let mut fleet = Fleet::new(runtime, None)?;
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
        // The answer has ended without its end.
        Err(_) => Ok(rows.load(Ordering::Relaxed)),
    }
}

/// Why hosts were left, whether the answer was the honest one, and how many tokens were slow.
fn asked(
    runtime: Handle,
    before: usize,
    pause: u64,
) -> Result<(String, bool, usize), HarnessError> {
    let fleet = Fleet::new(runtime, None)?;
    // Whichever host has the first token of the chat in question is slow from then on.
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
                // A prompt that takes as long as would explain the tokens.
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
    let honest = fleet.ask(0, vec![Box::new(|_| {})])?;
    for _ in 0..before {
        fleet.ask_over(&hosts, 0, TOKENS)?;
    }
    pause.0.store(pause.1, Ordering::Relaxed);
    let asked = fleet.ask_over(&hosts, 0, TOKENS)?;
    let left: Vec<&str> = asked.left.iter().map(Code::as_str).collect();
    let same = asked.done.token_ids == honest.done.token_ids;
    Ok((left.join(" "), same, count.load(Ordering::Relaxed)))
}
