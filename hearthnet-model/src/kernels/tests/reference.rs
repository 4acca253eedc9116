//! A second implementation of specs/canonical-arithmetic.md: one value at a time,
//! from the file's own layout, sharing nothing with the kernels.

use half::f16;

use super::super::WeightType;

/// How a product and a sum are taken together; the other way shows that the bit
/// tests can fail.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fma {
    Fused,
    Separate,
}

fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// Section 3: element i goes to lane i mod 16, then lanes at distance 8, 4, 2, 1.
fn fold16(n: usize, mut step: impl FnMut(usize, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    for i in 0..n {
        lanes[i % 16] = step(i, lanes[i % 16]);
    }
    let a: Vec<f32> = (0..8).map(|i| lanes[i] + lanes[i + 8]).collect();
    let b: Vec<f32> = (0..4).map(|i| a[i] + a[i + 4]).collect();
    (b[0] + b[2]) + (b[1] + b[3])
}

pub(super) fn exp(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    let c = if x > 88.0 { 88.0 } else { x };
    let rounded = fma(c, f32::from_bits(0x3fb8_aa3b), 12_582_912.0);
    let n = rounded - 12_582_912.0;
    let r = fma(n, -f32::from_bits(0x3f31_7200), c);
    let r = fma(n, -f32::from_bits(0x35bf_be8e), r);
    let mut p = f32::from_bits(0x3ab5_11e8);
    for c in [
        0x3c09_1d10,
        0x3d2a_ac79,
        0x3e2a_aa49,
        0x3eff_fffe,
        0x3f80_0000,
        0x3f80_0000,
    ] {
        p = fma(p, r, f32::from_bits(c));
    }
    // A NaN has no power of two, and is the result.
    if x.is_nan() {
        x
    } else {
        p * f32::from_bits(((n as i32 + 127) as u32) << 23)
    }
}

pub(super) fn silu(g: f32) -> f32 {
    g / (1.0 + exp(-g))
}

pub(super) fn rms_norm(x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let sum = fold16(x.len(), |i, lane| fma(x[i], x[i], lane));
    let s = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    x.iter().zip(w).map(|(x, w)| x * s * w).collect()
}

/// Quants, scale and sum of quants of 32 activations.
fn quantise(x: &[f32]) -> ([i32; 32], f32, i32) {
    let mut q = [0; 32];
    if !x.iter().all(|v| v.is_finite()) {
        return (q, f32::NAN, 0);
    }
    let m = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    if m < 1e-30 {
        return (q, 0.0, 0);
    }
    let inverse = 127.0 / m;
    for (q, v) in q.iter_mut().zip(x) {
        // The exact product fits f64: 24 + 24 bits.
        *q = (f64::from(*v) * f64::from(inverse)).round_ties_even() as i32;
    }
    (q, m / 127.0, q.iter().sum())
}

/// One row of weights, from the file's bytes, times one row of activations.
pub(super) fn dot(ty: WeightType, row: &[u8], x: &[f32], how: Fma) -> f32 {
    let half = |at: &[u8]| f16::from_le_bytes([at[0], at[1]]).to_f32();
    let mut acc = 0.0f32;
    match ty {
        WeightType::F32 | WeightType::F16 => {
            let size = ty.file_block();
            for (w, x) in row.chunks_exact(size).zip(x) {
                let w = if size == 2 {
                    half(w)
                } else {
                    f32::from_le_bytes([w[0], w[1], w[2], w[3]])
                };
                acc = if how == Fma::Fused {
                    fma(w, *x, acc)
                } else {
                    w * x + acc
                };
            }
        }
        _ => {
            for (block, x) in row.chunks_exact(ty.file_block()).zip(x.chunks_exact(32)) {
                let (q, d, s) = quantise(x);
                let quants = &block[block.len() - if ty == WeightType::Q8_0 { 32 } else { 16 }..];
                let weight = |j: usize| match ty {
                    WeightType::Q8_0 => i32::from(quants[j] as i8),
                    _ => {
                        let nibble = if j < 16 {
                            quants[j] & 15
                        } else {
                            quants[j - 16] >> 4
                        };
                        i32::from(nibble) - if ty == WeightType::Q4_0 { 8 } else { 0 }
                    }
                };
                let integer: i32 = (0..32).map(|j| weight(j) * q[j]).sum();
                if ty == WeightType::Q4_1 {
                    acc = fma(half(&block[2..]), d * s as f32, acc);
                }
                let scale = half(block) * d;
                acc = match how {
                    Fma::Fused => fma(integer as f32, scale, acc),
                    Fma::Separate => integer as f32 * scale + acc,
                };
            }
        }
    }
    acc
}

/// `[rows of x][outputs]`.
pub(super) fn matmul(ty: WeightType, bytes: &[u8], cols: usize, x: &[f32], how: Fma) -> Vec<f32> {
    let row_bytes = cols / if ty.quantised() { 32 } else { 1 } * ty.file_block();
    x.chunks_exact(cols)
        .flat_map(|x| {
            bytes
                .chunks_exact(row_bytes)
                .map(move |row| dot(ty, row, x, how))
        })
        .collect()
}

pub(super) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(x + x) + 1.0)
}

pub(super) fn gelu(g: f32) -> f32 {
    let inner = fma(
        g * g,
        f32::from_bits(0x3d92_2279),
        f32::from_bits(0x3fcc_422a),
    ) * g;
    g / (1.0 + exp(-inner))
}

/// One query over some of the keys and values, each `[position][d]`, binary16.
pub(super) fn attention(
    q: &[f32],
    keys: &[u16],
    values: &[u16],
    positions: std::ops::Range<usize>,
    scale: f32,
    softcap: Option<f32>,
) -> Vec<f32> {
    let d = q.len();
    let cell = |cells: &[u16], p: usize, i: usize| f16::from_bits(cells[p * d + i]).to_f32();
    let score = |p: usize| {
        let score = (0..d).fold(0.0, |acc, i| fma(cell(keys, p, i), q[i], acc)) * scale;
        softcap.map_or(score, |cap| tanh(score / cap) * cap)
    };
    let scores: Vec<f32> = positions.clone().map(score).collect();
    let max = scores
        .iter()
        .fold(f32::NEG_INFINITY, |m, s| if *s > m { *s } else { m });
    let e: Vec<f32> = scores.iter().map(|s| exp(s - max)).collect();
    let (start, end) = (positions.start, positions.end);
    let inverse = 1.0
        / fold16(
            end,
            |p, lane| {
                if p < start { lane } else { lane + e[p - start] }
            },
        );
    (0..d)
        .map(|i| {
            let weighted = |acc, p: usize| fma(cell(values, p, i), e[p - start], acc);
            positions.clone().fold(0.0, weighted) * inverse
        })
        .collect()
}
