//! Case of recurrences: pieces of two sequences, which begin and end in several ways.

use super::operands::Draw;
use crate::buffers::Buffer;
use crate::device::Gpu;
use crate::error::GpuError;
use crate::kernels::Kernel;
use crate::recurrences::{Heads, Pieces, Sharing, StateView, piece};
use crate::step::Step;

/// Values of a row, channels and positions of a convolution.
pub const STATE_COLS: u32 = 64;
pub const CHANNELS: u32 = 28;
pub const TAPS: u32 = 4;
/// Heads of values, their width, heads of keys, their width.
pub const VALUE_HEADS: u32 = 4;
pub const VALUE_WIDTH: u32 = 6;
pub const KEY_HEADS: u32 = 2;
pub const KEY_WIDTH: u32 = 5;
/// First columns of queries, keys and values.
pub const STATE_COLUMNS: [u32; 3] = [0, 10, 20];
/// Words of a state, the first of those that are used, number of states.
pub const STATE_WORDS: u32 = 130;
pub const STATE_AT: u32 = 3;
pub const STATES: u32 = 5;
/// Pieces: first row, rows, state before, state after, its copy.
pub const STATE_PIECES: [(u32, u32, Option<u32>, u32, Option<u32>); 4] = [
    (0, 5, None, 0, Some(1)),
    (7, 2, Some(3), 2, None),
    (5, 2, Some(0), 0, None),
    (9, 5, Some(2), 2, Some(4)),
];

/// States of a case, `[STATES][STATE_WORDS]`.
pub fn states() -> Vec<u32> {
    let mut draw = Draw::new(6);
    draw.many((STATES * STATE_WORDS) as usize, Draw::value)
}

pub(super) fn recurrence(
    gpu: &Gpu,
    step: &mut Step,
    kernel: Kernel,
    [x, y, z]: [&Buffer; 3],
) -> Result<Vec<Buffer>, GpuError> {
    let words = STATE_PIECES
        .iter()
        .flat_map(|&(first, rows, before, after, copy)| piece((first, rows), before, after, copy));
    let pieces = gpu.upload(&words.collect::<Vec<_>>())?;
    let states = gpu.upload(&states())?;
    let view = StateView {
        buffer: &states,
        words: STATE_WORDS,
        at: STATE_AT,
    };
    // The second two pieces follow on the first two.
    let rounds = [0, 2].map(|first| Pieces {
        buffer: &pieces,
        first,
        count: 2,
        rows: 5,
    });
    if kernel == Kernel::Convolve || kernel == Kernel::Keep {
        let out = gpu.buffer(x.words())?;
        for (column, factors) in [(0, None), (CHANNELS, Some(x.rows(STATE_COLS)))] {
            for pieces in rounds {
                let inputs = x.rows_at(CHANNELS, STATE_COLS);
                let outputs = out.rows_at(column, STATE_COLS);
                let shape = (TAPS, CHANNELS);
                step.convolve(inputs, factors, outputs, shape, y, pieces, view);
            }
        }
        return Ok(vec![out, states]);
    }
    let columns = STATE_COLUMNS.map(|column| x.rows_at(column, STATE_COLS));
    for sharing in [
        Sharing::Blocks(VALUE_HEADS / KEY_HEADS),
        Sharing::Tiled(KEY_HEADS),
    ] {
        let heads = Heads {
            heads: VALUE_HEADS,
            width: VALUE_WIDTH,
            rows: KEY_WIDTH,
            sharing,
        };
        for pieces in rounds {
            match kernel {
                Kernel::DeltaRule => step.delta_rule(heads, columns, y, pieces, view),
                _ => step.mamba_scan(heads, columns, y, z, pieces, view),
            }
        }
    }
    Ok(vec![x.clone(), states])
}
