//! Case of products.

use hearthnet_engine::kernels::{Arena, Matrix as FileMatrix, Packed};
use hearthnet_files::blocks::WeightType;

use super::operands::{INPUTS, OUTPUTS, PRODUCTS, finite_activations, weights};
use crate::buffers::{Buffer, Input};
use crate::device::Gpu;
use crate::error::GpuError;
use crate::step::Step;

pub(super) fn product(
    gpu: &Gpu,
    step: &mut Step,
    weight_type: WeightType,
    together: u32,
    paired: bool,
) -> Result<Vec<Buffer>, GpuError> {
    let bytes = weights(weight_type);
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
    let x = gpu.upload(&finite_activations())?;
    let act = gpu.act(PRODUCTS, INPUTS)?;
    let out = gpu.buffer(u64::from(PRODUCTS * OUTPUTS))?;
    let plain = x.rows(INPUTS);
    let input = match weight_type.quantised() {
        true => Input::Quantised(&act),
        false => Input::Plain(plain),
    };
    if weight_type.quantised() {
        step.quantise(plain, &act, PRODUCTS, INPUTS);
    }
    let out_rows = out.rows(OUTPUTS);
    if paired {
        let pairs: Vec<u32> = (0..PRODUCTS).flat_map(|row| [row, 0]).collect();
        let pairs = gpu.upload(&pairs)?;
        step.matmul_pairs(
            &matrix, OUTPUTS, &pairs, input, PRODUCTS, out_rows, PRODUCTS,
        );
    } else if together > 1 {
        step.matmul(&matrix, input, out_rows, PRODUCTS);
    } else {
        for row in 0..PRODUCTS {
            let out = out.rows_at(row * OUTPUTS, OUTPUTS);
            match input {
                Input::Plain(_) => {
                    let x = x.rows_at(row * INPUTS, INPUTS);
                    step.matmul(&matrix, Input::Plain(x), out, 1);
                }
                Input::Quantised(_) => {
                    // Activations of a product begin at row 0.
                    let x = x.rows_at(row * INPUTS, INPUTS);
                    step.quantise(x, &act, 1, INPUTS);
                    step.matmul(&matrix, Input::Quantised(&act), out, 1);
                }
            }
        }
    }
    Ok(vec![out])
}
