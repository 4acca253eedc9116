//! A host that does no work, or crude work, and returns rows that look like some: zeros, what it
//! was sent, what it returned before, a hundred times what it computed. Each is found before
//! anything reads it, the host is left, and the answer is the one that it would have been.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_model::catalogue::{Band, magnitude};
use hearthnet_testkit::{Passing, Tamper};
use hearthnet_transport::Code;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::fleet::{Fleet, PROMPT, TOKENS};
use crate::{Bench, Findings, HarnessError};

/// The step in which a host lies: after some tokens of the answer.
const AT: u32 = PROMPT + TOKENS / 2;

/// Changes rows; what the host returned before is at hand.
type Lie = fn(Passing<'_>, &[f32]);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let (runtime, mut heard) = (Handle::current(), Findings::default());
    let lies = tokio::task::spawn_blocking(move || lies(&runtime, &mut heard).map(|()| heard));
    found.0.extend(lies.await??.0);
    Ok(())
}

fn lies(runtime: &Handle, found: &mut Findings) -> Result<(), HarnessError> {
    // What is honest: the answer, and the band of a catalogue entry.
    let seen = Arc::new(Mutex::new((f32::MAX, 0.0f32)));
    let fleet = Fleet::new(runtime.clone(), None)?;
    let (width, range) = (fleet.width(), Arc::clone(&seen));
    let measure: Tamper = Box::new(move |passing| {
        let mut range = range.lock();
        for row in passing.rows.chunks_exact(width) {
            let size = magnitude(row);
            *range = (range.0.min(size), range.1.max(size));
        }
    });
    let honest = fleet.ask(1, vec![measure])?;
    let (lo, hi) = *seen.lock();
    let fleet = Fleet::new(
        runtime.clone(),
        Some(Band {
            lo: lo / 2.0,
            hi: hi * 2.0,
        }),
    )?;
    let all: [(&str, Lie); 4] = [
        ("zeros", |passing, _| passing.rows.fill(0.0)),
        ("what was sent", |passing, _| {
            passing.rows.copy_from_slice(passing.sent);
        }),
        ("what it returned before", |passing, before| {
            passing.rows.copy_from_slice(before);
        }),
        ("a hundred times too much", |passing, _| {
            passing.rows.iter_mut().for_each(|value| *value *= 100.0);
        }),
    ];
    for (what, lie) in all {
        // Whichever of the two is chosen lies, once; the other one takes over.
        let lied = Arc::new(AtomicBool::new(false));
        let liar = || -> Tamper {
            let (lied, mut before) = (Arc::clone(&lied), Vec::new());
            Box::new(move |passing| {
                let step = passing.spans.iter().any(|span| span.position == AT);
                if step && passing.rows.len() == width && !lied.swap(true, Ordering::Relaxed) {
                    lie(passing, &before);
                } else if let Some(last) = passing.rows.chunks_exact(width).last() {
                    before = last.to_vec();
                }
            })
        };
        let asked = fleet.ask(1, vec![liar(), liar()])?;
        let left: Vec<&str> = asked.left.iter().map(Code::as_str).collect();
        let left = left.join(" ");
        let same = asked.done.token_ids == honest.done.token_ids;
        found.check(
            format!("{what}: why the host is left"),
            "tensor_band",
            &left,
            left == "tensor_band" && lied.load(Ordering::Relaxed),
        );
        found.holds(format!("{what}: the same answer"), "yes", same);
    }
    Ok(())
}
