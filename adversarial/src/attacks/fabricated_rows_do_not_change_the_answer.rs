//! A host does no or too little work and returns plausible rows: zeros, its input, earlier output,
//! or its output times a hundred. The caller detects each before it uses the rows, drops the host,
//! and the answer is the correct one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_files::magnitude::{Band, magnitude};
use hearthnet_testkit::Passing;
use parking_lot::Mutex;

use super::prelude::*;

/// Step in which a host lies, in the middle of the answer.
const AT: u32 = PROMPT + TOKENS / 2;

/// Changes rows; the second argument holds the rows that the host returned before.
type Lie = fn(Passing<'_>, &[f32]);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, lies).await
}

fn lies(runtime: &Handle, found: &mut Findings) -> Result<()> {
    // Honest reference: the answer, and a band as in a catalogue entry.
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
    let (lo, hi) = (lo / 2.0, hi * 2.0);
    let fleet = Fleet::new(runtime.clone(), Some(Band { lo, hi }))?;
    let all: [(&str, Lie); 4] = [
        ("zeros", |passing, _| passing.rows.fill(0.0)),
        ("the received rows", |passing, _| {
            passing.rows.copy_from_slice(passing.sent);
        }),
        ("rows of an earlier step", |passing, before| {
            passing.rows.copy_from_slice(before);
        }),
        ("rows times a hundred", |passing, _| {
            passing.rows.iter_mut().for_each(|value| *value *= 100.0);
        }),
    ];
    for (what, lie) in all {
        // The chosen host lies once; the other one takes over.
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
        let lied = lied.load(Ordering::Relaxed);
        asked.corrected(found, what, "tensor_band", lied, &honest);
    }
    Ok(())
}
