//! Small models with weights of any type, including types that have no encoder here.

use hearthnet_files::floats::f32_to_f16;
use hearthnet_files::gguf::TensorType;
use hearthnet_files::{Gguf, ModelFile, quantize};

use crate::{TinyLlama, encoded, rewritten};

/// Offsets of the 16-bit floats in a block of the file, in bytes.
pub fn block_factors(dtype: TensorType) -> &'static [usize] {
    use TensorType as T;
    match dtype {
        T::Q4_1 | T::Q5_1 | T::Q4_K | T::Q5_K => &[0, 2],
        T::Q2_K => &[80, 82],
        T::Q3_K => &[108],
        T::Q6_K => &[208],
        T::F32 | T::F16 | T::BF16 | T::MXFP4 => &[],
        _ => &[0],
    }
}

/// Blocks for as many values as `values` has, of about their size. Floats store the values
/// themselves; other types get random quants and factors.
fn blocks(dtype: TensorType, values: &[f32], seed: u64) -> Vec<u8> {
    use TensorType as T;
    let mut out = Vec::new();
    match dtype {
        T::F32 | T::F16 => {
            quantize::encode(dtype, values, &mut out).expect("whole blocks");
            return out;
        }
        T::BF16 => {
            let high = |v: &f32| (v.to_bits() >> 16) as u16;
            return values.iter().flat_map(|v| high(v).to_le_bytes()).collect();
        }
        _ => {}
    }
    let mut state = seed;
    let size = dtype.block_bytes() as usize;
    let count = values.len() / dtype.block_values() as usize;
    out.extend((0..size * count).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    }));
    let set = |out: &mut [u8], scale: f32| {
        for block in out.chunks_mut(size) {
            for &at in block_factors(dtype) {
                block[at..at + 2].copy_from_slice(&f32_to_f16(scale).to_le_bytes());
            }
            if dtype == T::MXFP4 {
                block[0] = 119 + block[0] % 4;
            }
        }
    };
    let mean_square = |values: &[f32]| values.iter().map(|v| v * v).sum::<f32>();
    set(&mut out, 1.0);
    let mut unit = Vec::new();
    quantize::decode(dtype, &out, &mut unit).expect("a type that is known");
    set(&mut out, (mean_square(values) / mean_square(&unit)).sqrt());
    out
}

/// The model, which must be F32, with the matrix types that `choose` picks by tensor name; and the
/// same model with those weights decoded to F32.
///
/// # Panics
/// If a row of a matrix does not fill whole blocks of its type.
pub fn every_weight_as(model: &TinyLlama, choose: impl Fn(&str) -> TensorType) -> [ModelFile; 2] {
    let gguf = Gguf::from_bytes(model.bytes()).expect("a model");
    [false, true].map(|decoded| {
        let mut seed = 0;
        let file = rewritten(&gguf, &[], |info, values| {
            seed += 1;
            let dtype = match info.dims.len() {
                1 => info.dtype,
                _ => choose(&info.name),
            };
            let bytes = blocks(dtype, &values, seed);
            if !decoded {
                return (dtype, bytes);
            }
            let mut values = Vec::new();
            quantize::decode(dtype, &bytes, &mut values).expect("a type that is known");
            encoded(TensorType::F32, &values)
        });
        ModelFile::from_gguf(Gguf::from_bytes(file).expect("a file")).expect("a model")
    })
}
