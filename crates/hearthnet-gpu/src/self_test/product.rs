//! Case of products.

use hearthnet_engine::kernels::{Arena, Matrix as FileMatrix, Packed};
use hearthnet_files::blocks::WeightType;

use super::operands::{INPUTS, OUTPUTS, PRODUCTS, finite_activations, small_scales, weights};
use crate::buffers::Buffer;
use crate::device::Gpu;
use crate::error::GpuError;
use crate::kernels::Kernel;
use crate::step::Step;

/// Rows of activations for a kernel: each once for one that takes a row at a time. For others the first
/// ones have no block with a small scale, so their chains are not computed on the bits. All others
/// follow, for [`Kernel::Tiles`] in each place of a tile.
fn order(kernel: Kernel) -> Vec<u32> {
    let (together, all) = match kernel {
        Kernel::Matrix { paired: true, .. } | Kernel::Matrix { rows: 1, .. } => (0, PRODUCTS),
        Kernel::Matrix { rows, .. } => (rows, PRODUCTS),
        _ => (32, 7 * PRODUCTS),
    };
    let usual = (0..together).map(|i| [0, 2][i as usize % 2]);
    usual.chain((0..all).map(|i| i % PRODUCTS)).collect()
}

/// Results of a kernel for each row once; all of them if the results of a row differ.
pub(super) fn once(kernel: Kernel, all: Vec<u32>) -> Vec<u32> {
    let order = order(kernel);
    let rows: Vec<&[u32]> = all.chunks(OUTPUTS as usize).collect();
    let row = |i: u32| order.iter().zip(&rows).find(|(of, _)| **of == i);
    let once: Vec<&[u32]> = (0..PRODUCTS).filter_map(row).map(|(_, row)| *row).collect();
    let same = |(of, row): (&u32, &&[u32])| once.get(*of as usize) == Some(row);
    match order.iter().zip(&rows).all(same) {
        true => once.concat(),
        false => all,
    }
}

pub(super) fn product(
    gpu: &Gpu,
    step: &mut Step,
    kernel: Kernel,
    weight_type: WeightType,
) -> Result<Vec<Buffer>, GpuError> {
    let bytes = match kernel {
        Kernel::Matrix {
            weight_type: WeightType::MXFP4,
            careful: true,
            ..
        } => small_scales(),
        _ => weights(weight_type),
    };
    let packed = Packed::pack_stacked(
        &mut Arena::default(),
        &[FileMatrix {
            weight_type,
            rows: OUTPUTS as usize,
            cols: INPUTS as usize,
            bytes: &bytes,
        }],
    );
    let Ok(packed) = packed else {
        return Err(GpuError::OutOfMemory {
            bytes: bytes.len() as u64,
        });
    };
    let matrix = gpu.matrix(&packed)?;
    let (paired, single) = match kernel {
        Kernel::Matrix { rows, paired, .. } => (paired, rows == 1 && !paired),
        _ => (false, false),
    };
    let rows = order(kernel);
    let count = rows.len() as u32;
    let known = finite_activations();
    let known: Vec<&[u32]> = known.chunks(INPUTS as usize).collect();
    let x: Vec<&[u32]> = rows.iter().map(|row| known[*row as usize]).collect();
    let x = gpu.upload(&x.concat())?;
    let act = gpu.act(count, INPUTS)?;
    let out = gpu.buffer(u64::from(count * OUTPUTS))?;
    if single {
        for row in 0..PRODUCTS {
            // Activations of a product begin at row 0.
            let x = x.rows_at(row * INPUTS, INPUTS);
            let input = step.input(weight_type, x, &act, (1, INPUTS));
            step.matmul(&matrix, input, out.rows_at(row * OUTPUTS, OUTPUTS), 1);
        }
        return Ok(vec![out]);
    }
    let input = step.input(weight_type, x.rows(INPUTS), &act, (count, INPUTS));
    let out_rows = out.rows(OUTPUTS);
    if paired {
        let pairs: Vec<u32> = (0..PRODUCTS).flat_map(|row| [row, 0]).collect();
        let pairs = gpu.upload(&pairs)?;
        step.matmul_pairs(
            &matrix, OUTPUTS, &pairs, input, PRODUCTS, out_rows, PRODUCTS,
        );
    } else {
        step.matmul_by(kernel, &matrix, 0..matrix.panels(), input, out_rows, count);
    }
    Ok(vec![out])
}
