//! A host swaps the rows of a prompt. All of them lie within the band, and none equals an input or
//! an earlier row, but tokens get each other's meaning. The distances between sent rows must match
//! those between returned rows, so the caller drops the host, and the answer is the correct one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_files::magnitude::Band;

use super::prelude::*;

/// Changes the rows of a prompt chunk; the second argument is the values per row.
pub(super) type Lie = fn(&mut [f32], usize);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let all: [(&'static str, Lie); 4] = [
        ("rows reversed", |rows, width| {
            let reversed: Vec<f32> = rows.rchunks(width).flatten().copied().collect();
            rows.copy_from_slice(&reversed);
        }),
        ("rows rotated by one", |rows, width| {
            rows.rotate_right(width);
        }),
        ("two rows swapped", |rows, width| {
            let (before, behind) = rows.split_at_mut(9 * width);
            before[3 * width..4 * width].swap_with_slice(&mut behind[..width]);
        }),
        ("a repeated earlier row, slightly changed", |rows, width| {
            rows.copy_within(3 * width..4 * width, 9 * width);
            rows[9 * width..10 * width]
                .iter_mut()
                .for_each(|value| *value *= 1.01);
        }),
    ];
    // Any band works, because the model was measured.
    let measured = Band {
        lo: f32::MIN_POSITIVE,
        hi: f32::MAX,
    };
    tried(&all, Some(measured), found).await
}

/// Asks one question per lie, over hosts that apply it once, in the first chunk of the prompt.
pub(super) async fn tried(
    lies: &[(&'static str, Lie)],
    band: Option<Band>,
    found: &mut Findings,
) -> Result<()> {
    let lies = lies.to_vec();
    let trying = move |runtime: &Handle, heard: &mut Findings| -> Result<()> {
        let mut fleet = Fleet::new(runtime.clone(), band)?;
        // Makes every row come back to the caller.
        fleet.private_last = 1;
        let honest = fleet.ask(2, vec![unchanged()])?;
        let clean = honest.left.is_empty();
        let claim = "an honest host";
        heard.check(claim, "is kept", format!("{:?}", honest.left), clean);
        for (what, lie) in lies {
            let lied = Arc::new(AtomicBool::new(false));
            let liar = || -> Tamper {
                let (lied, width) = (Arc::clone(&lied), fleet.width());
                Box::new(move |passing| {
                    let piece = passing
                        .spans
                        .iter()
                        .all(|s| s.position < PROMPT && s.rows > 9);
                    if piece && !lied.swap(true, Ordering::Relaxed) {
                        lie(passing.rows, width);
                    }
                })
            };
            let asked = fleet.ask(2, vec![liar(), liar()])?;
            let lied = lied.load(Ordering::Relaxed);
            asked.corrected(heard, what, "tensor_band", lied, &honest);
        }
        Ok(())
    };
    blocking(found, trying).await
}
