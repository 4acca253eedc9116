//! Detection of permuted rows in a chunk.
//!
//! A block adds to its input row. So the features that distinguish a row from the others of its
//! chunk are still present in its output, more so after fewer blocks. The [`Signature`] of a row is
//! the set of its values that exceed those of the chunk's mean row. It excludes what all rows have
//! in common, and the few huge values of attention sinks are only a few of its bits.
//!
//! The *displacement* of a row is how much nearer its signature is to that of another sent row than
//! to its own, as a fraction of all values. A token that occurs twice in a chunk has none: two rows
//! that are alike when sent are equally near to any third.
//!
//! Measured behind the second layer, chunks of 8 and 24 rows. SmolLM2-135M (3,648 rows in each of
//! 14 spans): honest chunks had a mean displacement of at most 0.036, and one row of 0.12. Tiny
//! models of Gemma 3 and SmolLM3, 32 values wide: 0.031 and 0.25. Reversed chunks of 24 rows had at
//! least 0.19 through two layers, 0.13 through six, 0.08 through ten; through all layers no more
//! than honest ones, so they are not detected.
//!
//! The first layers rewrite the embedding too thoroughly (0.19 honestly).
//!
//! A chunk of rows that are alike is not checked ([`ALIKE`]): what distinguishes them is less than
//! what a block adds. If a text repeats one word, attention gives equal rows, which have no
//! displacement. The states of recurrent layers still change with the position, a little less with
//! each. So the rows differ by a few percent, and their signatures do not survive a block: tiny
//! models of Qwen3.5 and Qwen3-Next had honest means of up to 0.21. Rows of texts of at least two
//! words differed by 0.29 or more, those of SmolLM2-135M by 0.51.
//!
//! Other models are unknown, so the check is limited to models with bands in the catalogue.

use hearthnet_files::magnitude::magnitude;

/// First layer of the spans that are checked.
pub(super) const FROM_LAYER: u32 = 2;
/// Minimum rows per chunk and values per row: fewer are not significant.
const LEAST: (usize, usize) = (8, 32);
/// Limit of the mean displacement of a chunk: twice the honest maximum.
const PIECE: f32 = 0.08;
/// Limit of the displacement of a row: twice the honest maximum. Narrow rows vary more: 4 standard
/// deviations of the distance between two unrelated signatures.
const ROW: (f32, f32) = (0.25, 2.0);

/// Rows are alike if they differ from their mean row by less than this part of their values, both
/// as medians, which ignore the few huge values of attention sinks.
const ALIKE: f32 = 0.2;

/// Bit set of the values of a row that exceed the mean row's.
type Signature = Vec<u64>;

/// Returns the `returned` row with the largest displacement, if the chunk exceeds a limit.
pub(super) fn permuted(sent: &[f32], returned: &[f32], width: usize) -> Option<u32> {
    let count = sent.len() / width;
    if sent.len() != returned.len() || count < LEAST.0 || width < LEAST.1 {
        return None;
    }
    if distinctness(sent, width) < ALIKE {
        return None;
    }
    let (sent, returned) = (signatures(sent, width), signatures(returned, width));
    let displacements = returned.iter().zip(&sent).map(|(row, own)| {
        let nearest = sent.iter().map(|other| distance(other, row)).min();
        let nearer = distance(own, row) - nearest.unwrap_or_default();
        nearer as f32 / width as f32
    });
    let worst = (0..)
        .zip(displacements.clone())
        .max_by(|(_, a), (_, b)| a.total_cmp(b));
    let mean = displacements.sum::<f32>() / count as f32;
    let most = ROW.0.max(ROW.1 / (width as f32).sqrt());
    let (at, displaced) = worst?;
    (displaced > most || mean > PIECE).then_some(at)
}

fn mean_row(rows: &[f32], width: usize) -> Vec<f32> {
    let mut mean = vec![0.0; width];
    let share = width as f32 / rows.len() as f32;
    for row in rows.chunks_exact(width) {
        let values = mean.iter_mut().zip(row);
        values.for_each(|(mean, value)| *mean += value * share);
    }
    mean
}

/// Part of the values by which rows differ from their mean row.
fn distinctness(rows: &[f32], width: usize) -> f32 {
    let mean = mean_row(rows, width);
    let values = rows.iter().zip(mean.iter().cycle());
    let differences: Vec<f32> = values.map(|(value, mean)| value - mean).collect();
    magnitude(&differences) / magnitude(rows).max(f32::MIN_POSITIVE)
}

fn signatures(rows: &[f32], width: usize) -> Vec<Signature> {
    let mean = mean_row(rows, width);
    let word = |(values, means): (&[f32], &[f32])| {
        let above = values.iter().zip(means).map(|(value, mean)| value > mean);
        above.fold(0, |word, above| word << 1 | u64::from(above))
    };
    let signature = |row: &[f32]| row.chunks(64).zip(mean.chunks(64)).map(word).collect();
    rows.chunks_exact(width).map(signature).collect()
}

/// Number of values in which two signatures differ.
fn distance(a: &Signature, b: &Signature) -> u32 {
    let words = a.iter().zip(b);
    words.map(|(a, b)| (a ^ b).count_ones()).sum()
}
