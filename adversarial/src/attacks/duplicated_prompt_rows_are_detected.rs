//! A host computes one row of a prompt and returns it in place of others, of all or of one. Each
//! lies within the band. Different rows never give equal results, so the caller drops the host, and
//! the answer is the correct one.

use super::prelude::*;
use super::swapped_prompt_rows_are_detected::{Lie, tried};

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let all: [(&'static str, Lie); 3] = [
        ("all rows equal to the first", |rows, width| {
            let (first, rest) = rows.split_at_mut(width);
            rest.chunks_exact_mut(width)
                .for_each(|row| row.copy_from_slice(first));
        }),
        ("a repeated earlier row", |rows, width| {
            rows.copy_within(2 * width..3 * width, 7 * width);
        }),
        ("the last rows, all equal", |rows, width| {
            let last = rows.len() - width;
            rows.copy_within(last.., last - width);
        }),
    ];
    tried(&all, None, found).await
}
