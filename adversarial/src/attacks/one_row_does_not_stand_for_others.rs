//! A host that computes one row of a prompt and returns it for others as well: for all of them, or for one.
//! Each lies within the band. No two rows that differ come out the same, so the host is left, and the
//! answer is the one that it would have been.

use super::rows_of_a_prompt_keep_their_places::{Lie, tried};
use crate::{Bench, Findings, HarnessError};

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let all: [(&'static str, Lie); 3] = [
        ("all rows equal to the first", |rows, width| {
            let (first, rest) = rows.split_at_mut(width);
            rest.chunks_exact_mut(width)
                .for_each(|row| row.copy_from_slice(first));
        }),
        ("an earlier row once more", |rows, width| {
            rows.copy_within(2 * width..3 * width, 7 * width);
        }),
        ("the last rows, all equal", |rows, width| {
            let last = rows.len() - width;
            rows.copy_within(last.., last - width);
        }),
    ];
    tried(&all, None, found).await
}
