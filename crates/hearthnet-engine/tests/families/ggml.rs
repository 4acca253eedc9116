//! Encoders for blocks of 32 as in llama.cpp: `quantize_row_*_ref` and, for IQ4_NL, the search of
//! `quantize_row_iq4_nl_impl` in ggml's `ggml-quants.c`, value by value.
//!
//! [`quantize::encode`] handles the types that it supports.

use half::f16;
use hearthnet_files::gguf::TensorType;
use hearthnet_files::quantize;

/// Appends `values`, stored as `dtype`, to `out`.
pub(crate) fn encode(dtype: TensorType, values: &[f32], out: &mut Vec<u8>) {
    let encode = match dtype {
        TensorType::Q5_0 => encode_q5_0,
        TensorType::Q5_1 => encode_q5_1,
        TensorType::IQ4_NL => encode_iq4_nl,
        TensorType::MXFP4 => encode_mxfp4,
        // Also values that the encoder of weights refuses.
        TensorType::F32 => return out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        _ => return quantize::encode(dtype, values, out).unwrap(),
    };
    let (blocks, rest) = values.as_chunks();
    assert!(rest.is_empty());
    blocks.iter().for_each(|block| encode(block, out));
}

/// The value of largest magnitude, whatever its sign.
fn largest(block: &[f32; 32]) -> f32 {
    let larger = |most: f32, v: &f32| if v.abs() > most.abs() { *v } else { most };
    block.iter().fold(0.0, larger)
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Four bits of each code, two codes per byte: `j` low, `j + 16` high.
fn nibbles(codes: &[u8; 32]) -> impl Iterator<Item = u8> {
    (0..16).map(|j| (codes[j] & 15) | (codes[j + 16] << 4))
}

/// The fifth bits, then the nibbles.
fn fives(codes: &[u8; 32], out: &mut Vec<u8>) {
    let bits = codes.iter().enumerate();
    let high = bits.fold(0u32, |high, (j, code)| high | (u32::from(code >> 4) << j));
    out.extend(high.to_le_bytes());
    out.extend(nibbles(codes));
}

fn encode_q5_0(block: &[f32; 32], out: &mut Vec<u8>) {
    let d = largest(block) / -16.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    fives(&block.map(|v| ((v * id + 16.5) as u8).min(31)), out);
}

fn encode_q5_1(block: &[f32; 32], out: &mut Vec<u8>) {
    let min = block.iter().copied().fold(f32::MAX, f32::min);
    let max = block.iter().copied().fold(f32::MIN, f32::max);
    let d = (max - min) / 31.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    out.extend(f16::from_f32(min).to_le_bytes());
    fives(&block.map(|v| ((v - min) * id + 0.5) as u8), out);
}

/// The scale is the power of two that maps the largest magnitude to 4 to 8; codes end at 6.
fn encode_mxfp4(block: &[f32; 32], out: &mut Vec<u8>) {
    const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let most = largest(block).abs();
    let exponent = match most {
        0.0 => 0,
        _ => (most.log2().floor() - 2.0 + 127.0) as u8,
    };
    let scale = (f32::from(exponent) - 127.0).exp2();
    out.push(exponent);
    out.extend(nibbles(&block.map(|value| {
        let error = |code: u8| {
            let size = E2M1[usize::from(code % 8)] * scale;
            (if code < 8 { size } else { -size } - value).abs()
        };
        let best = (0..16).min_by(|a, b| error(*a).total_cmp(&error(*b)));
        best.unwrap()
    })));
}

fn encode_iq4_nl(block: &[f32; 32], out: &mut Vec<u8>) {
    const TABLE: [f32; 16] = [
        -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0,
        69.0, 89.0, 113.0,
    ];
    // The nearest; of two equally near, the upper one.
    let nearest = |x: f32| {
        let upper = TABLE[1..15].iter().take_while(|v| **v <= x).count() + 1;
        let lower = upper - 1;
        let is_lower = x - TABLE[lower] < TABLE[upper] - x;
        if is_lower { lower } else { upper }
    };
    let max = largest(block);
    if max.abs() < 1e-15 {
        out.extend([0; 18]);
        return;
    }
    // For this inverse scale, the best scale is the first sum divided by the second.
    let sums = |id: f32| {
        block.iter().fold((0f32, 0f32), |(qx, q2), x| {
            let (q, weight) = (TABLE[nearest(id * x)], x * x);
            (qx + weight * q * x, q2 + weight * q * q)
        })
    };
    let scale = |(qx, q2): (f32, f32)| if q2 > 0.0 { qx / q2 } else { 0.0 };
    let first = sums(1.0 / (-max / TABLE[0]));
    let mut d = scale(first);
    let mut best = d * first.0;
    for step in -7i8..=7 {
        let (qx, q2) = sums((f32::from(step) + TABLE[0]) / max);
        if q2 > 0.0 && qx * qx > best * q2 {
            d = scale((qx, q2));
            best = d * qx;
        }
    }
    out.extend(f16::from_f32(d).to_le_bytes());
    let id = inverse(d);
    out.extend(nibbles(&block.map(|x| nearest(id * x) as u8)));
}
