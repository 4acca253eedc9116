//! Second implementation of specs/canonical-arithmetic.md, for one value at a time and from the
//! layout of the file. It shares no code with the kernels.

use half::f16;
use hearthnet_files::blocks::WeightType;

/// Rounding of a product and a sum. `Separate` is wrong on purpose: it proves that the bit tests
/// can fail.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fma {
    Fused,
    Separate,
}

impl Fma {
    fn of(self, a: f32, b: f32, c: f32) -> f32 {
        match self {
            Self::Fused => a.mul_add(b, c),
            Self::Separate => a * b + c,
        }
    }
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
    // The power of two of a NaN is undefined; the result is the NaN.
    if x.is_nan() {
        x
    } else {
        p * f32::from_bits(((n as i32 + 127) as u32) << 23)
    }
}

pub(super) fn silu(g: f32) -> f32 {
    g / (1.0 + exp(-g))
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Section 13: a head of queries or keys.
pub(super) fn l2_norm(x: &[f32], eps: f32, scale: f32) -> Vec<f32> {
    let r = fold16(x.len(), |i, lane| fma(x[i], x[i], lane));
    let s = 1.0 / (r + eps).sqrt();
    x.iter().map(|x| (x * s) * scale).collect()
}

/// Section 13: one channel; `weights` oldest first.
pub(super) fn convolve(weights: &[f32], inputs: &[f32]) -> Vec<f32> {
    let outputs = (0..inputs.len()).map(|p| {
        let mut acc = 0.0;
        for (j, weight) in weights.iter().enumerate() {
            let input = (p + 1 + j).checked_sub(weights.len());
            acc = fma(*weight, input.map_or(0.0, |p| inputs[p]), acc);
        }
        acc
    });
    outputs.collect()
}

/// Section 13: one row of one head. `state[i][j]` belongs to value i of the key and j of the value.
pub(super) fn delta_row(
    state: &mut [Vec<f32>],
    [query, key, value]: [&[f32]; 3],
    [decay, beta]: [f32; 2],
    how: Fma,
) -> Vec<f32> {
    let fma = |a, b, c| how.of(a, b, c);
    let out = (0..value.len()).map(|j| {
        let (mut read, mut out) = (0.0, 0.0);
        for (state, k) in state.iter_mut().zip(key) {
            state[j] *= decay;
            read = fma(*k, state[j], read);
        }
        let d = (value[j] - read) * beta;
        for ((state, k), q) in state.iter_mut().zip(key).zip(query) {
            state[j] = fma(*k, d, state[j]);
            out = fma(*q, state[j], out);
        }
        out
    });
    out.collect()
}

/// Section 15: one row of one head. `state[i][j]` belongs to value i of B and j of the head.
pub(super) fn mamba_row(
    state: &mut [Vec<f32>],
    [write, read, value]: [&[f32]; 3],
    [decay, step, skip]: [f32; 3],
    how: Fma,
) -> Vec<f32> {
    let fma = |a, b, c| how.of(a, b, c);
    let out = (0..value.len()).map(|j| {
        let (d, mut out) = (value[j] * step, 0.0);
        for ((state, b), c) in state.iter_mut().zip(write).zip(read) {
            state[j] = fma(*b, d, state[j] * decay);
            out = fma(*c, state[j], out);
        }
        fma(skip, value[j], out)
    });
    out.collect()
}

/// Section 5.
pub(super) fn squared_relu(u: f32) -> f32 {
    let r = if 0.0 > u { 0.0 } else { u };
    r * r
}

pub(super) fn rms_norm(x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let sum = fold16(x.len(), |i, lane| fma(x[i], x[i], lane));
    let s = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    x.iter().zip(w).map(|(x, w)| x * s * w).collect()
}

/// Section 15.
pub(super) fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f32) -> Vec<f32> {
    let n = x.len() as f32;
    let mean = fold16(x.len(), |i, lane| lane + x[i]) / n;
    let d: Vec<f32> = x.iter().map(|x| x - mean).collect();
    let square = fold16(d.len(), |i, lane| fma(d[i], d[i], lane));
    let s = 1.0 / (square / n + eps).sqrt();
    let rest = w.iter().zip(b);
    let values = d.iter().zip(rest);
    values.map(|(d, (w, b))| fma(d * s, *w, *b)).collect()
}

/// Section 15.
pub(super) fn gelu_erf(g: f32) -> f32 {
    let z = if g > -g { g } else { -g };
    let k = 1.0 / fma(z, 0.25, 1.0);
    let mut t = f32::from_bits(0x3cda_51b7);
    for c in [
        0xbe21_2cb4,
        0x3e9c_91ee,
        0xbe5e_569c,
        0x3e56_db0b,
        0x3cf0_aa17,
        0x3dd6_6826,
        0x3dc9_7a9c,
        0x3dcc_671c,
    ] {
        t = fma(t, k, f32::from_bits(c));
    }
    let tail = (t * k) * exp((z * -0.5) * z);
    fma(-z, tail, if g > 0.0 { g } else { 0.0 })
}

/// Section 8: positions that a query attends to.
pub(super) fn seen(
    own: usize,
    window: Option<usize>,
    both_sides: Option<usize>,
) -> std::ops::Range<usize> {
    let reach = window.map_or(usize::MAX / 2, |window| window - 1);
    let end = both_sides.map_or(own + 1, |end| end.min(own + reach + 1));
    own.saturating_sub(reach)..end
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

/// The integer weight at index `i` of a block, as section 6.3 defines it for each type.
fn weight(ty: WeightType, block: &[u8], i: usize) -> i32 {
    use WeightType as T;
    const NON_LINEAR: [i32; 16] = [
        -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
    ];
    const E2M1: [i32; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
    let byte = |at: usize| i32::from(block[at]);
    let nibble = |from: usize, i: usize| match i {
        0..16 => byte(from + i) & 15,
        _ => byte(from + i - 16) >> 4,
    };
    let fifth = |from: usize| (byte(from + i / 8) >> (i % 8) & 1) << 4;
    let (sub, l) = (i / 32, i % 32);
    let (half, quarter) = (sub / 4, sub % 4);
    match ty {
        T::Q4_0 => nibble(2, i) - 8,
        T::Q4_1 => nibble(4, i),
        T::Q5_0 => (nibble(6, i) | fifth(2)) - 16,
        T::Q5_1 => nibble(8, i) | fifth(4),
        T::Q8_0 => i32::from(block[2 + i] as i8),
        T::IQ4_NL => NON_LINEAR[nibble(2, i) as usize],
        T::MXFP4 => E2M1[nibble(1, i) as usize],
        T::Q2_K => byte(16 + 32 * half + l) >> (2 * quarter) & 3,
        T::Q3_K => {
            let low = byte(32 + 32 * half + l) >> (2 * quarter) & 3;
            (low | (byte(l) >> sub & 1) << 2) - 4
        }
        T::Q4_K => byte(16 + 32 * (sub / 2) + l) >> (4 * (sub % 2)) & 15,
        T::Q5_K => {
            let low = byte(48 + 32 * (sub / 2) + l) >> (4 * (sub % 2)) & 15;
            low | (byte(16 + l) >> sub & 1) << 4
        }
        T::Q6_K => {
            let low = byte(64 * half + 32 * (quarter % 2) + l) >> (4 * (quarter / 2)) & 15;
            (low | (byte(128 + 32 * half + l) >> (2 * quarter) & 3) << 4) - 32
        }
        T::IQ4_XS => NON_LINEAR[nibble(8 + 16 * sub, l) as usize],
        T::F32 | T::F16 | T::BF16 => unreachable!("not quantised"),
    }
}

/// The integer factors of scale and minimum at index `i` of a block.
fn factors(ty: WeightType, block: &[u8], i: usize) -> (i32, i32) {
    use WeightType as T;
    let byte = |at: usize| i32::from(block[at]);
    let sub = i / 32;
    match ty {
        T::Q2_K => (byte(i / 16) & 15, byte(i / 16) >> 4),
        T::Q3_K => {
            let s = i / 16;
            let low = byte(96 + s % 8) >> (4 * (s / 8)) & 15;
            (
                (low | (byte(104 + s % 4) >> (2 * (s / 4)) & 3) << 4) - 32,
                0,
            )
        }
        T::Q4_K | T::Q5_K if sub < 4 => (byte(4 + sub) & 63, byte(8 + sub) & 63),
        T::Q4_K | T::Q5_K => (
            byte(8 + sub) & 15 | byte(sub) >> 6 << 4,
            byte(8 + sub) >> 4 | byte(4 + sub) >> 6 << 4,
        ),
        T::Q6_K => (i32::from(block[192 + i / 16] as i8), 0),
        T::IQ4_XS => {
            let low = byte(4 + sub / 2) >> (4 * (sub % 2)) & 15;
            let high = i32::from(u16::from_le_bytes([block[2], block[3]]));
            ((low | (high >> (2 * sub) & 3) << 4) - 32, 0)
        }
        _ => (1, 1),
    }
}

/// Scale and minimum of a block.
fn fields(ty: WeightType, block: &[u8]) -> (f32, f32) {
    use WeightType as T;
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    match ty {
        T::Q4_1 | T::Q5_1 => (half(0), half(2)),
        T::Q4_K | T::Q5_K => (half(0), -half(2)),
        T::Q2_K => (half(80), -half(82)),
        T::Q3_K => (half(108), 0.0),
        T::Q6_K => (half(208), 0.0),
        T::MXFP4 => (2f64.powi(i32::from(block[0]) - 128) as f32, 0.0),
        _ => (half(0), 0.0),
    }
}

/// Weights of a row of the file, for a quantised type.
pub(super) fn weights(ty: WeightType, row: &[u8]) -> Vec<f32> {
    let blocks = row.chunks_exact(ty.file_block());
    let values = blocks.flat_map(|block| {
        let (d, m) = fields(ty, block);
        (0..ty.inputs()).map(move |i| {
            let (scale, min) = factors(ty, block, i);
            let product = d * scale as f32 * weight(ty, block, i) as f32;
            match ty {
                WeightType::Q4_1
                | WeightType::Q5_1
                | WeightType::Q2_K
                | WeightType::Q4_K
                | WeightType::Q5_K => product + m * min as f32,
                _ => product,
            }
        })
    });
    values.collect()
}

/// Dot product of a row of weights (bytes of the file) and a row of activations.
pub(super) fn dot(ty: WeightType, row: &[u8], x: &[f32], how: Fma) -> f32 {
    use WeightType as T;
    let mut acc = 0.0f32;
    let add = |a, b, acc| how.of(a, b, acc);
    if !ty.quantised() {
        for (w, x) in row.chunks_exact(ty.file_block()).zip(x) {
            let w = match ty {
                T::F32 => f32::from_le_bytes([w[0], w[1], w[2], w[3]]),
                T::F16 => f16::from_le_bytes([w[0], w[1]]).to_f32(),
                _ => half::bf16::from_le_bytes([w[0], w[1]]).to_f32(),
            };
            acc = add(w, *x, acc);
        }
        return acc;
    }
    let blocks = row.chunks_exact(ty.file_block());
    for (block, x) in blocks.zip(x.chunks_exact(ty.inputs())) {
        let (scale, min) = fields(ty, block);
        for (sub, x) in x.chunks_exact(32).enumerate() {
            let (q, d, s) = quantise(x);
            let places = || (0..32).map(|j| (j, 32 * sub + j));
            let product = |(j, i): (usize, usize)| weight(ty, block, i) * q[j];
            let (first, first_min) = factors(ty, block, 32 * sub);
            // Factors common to all 32 weights stay outside of the integer sum.
            match ty {
                T::Q4_1 | T::Q5_1 => acc = fma(min, d * s as f32, acc),
                T::Q4_K | T::Q5_K => acc = fma(min * first_min as f32, d * s as f32, acc),
                T::Q2_K => {
                    let sum: i32 = places().map(|(j, i)| factors(ty, block, i).1 * q[j]).sum();
                    acc = fma(min, d * sum as f32, acc);
                }
                _ => {}
            }
            let (integer, scale): (i32, f32) = match ty {
                T::Q2_K | T::Q3_K | T::Q6_K => {
                    let scaled = |(j, i)| factors(ty, block, i).0 * product((j, i));
                    (places().map(scaled).sum(), scale)
                }
                _ => (places().map(product).sum(), scale * first as f32),
            };
            acc = add(integer as f32, scale * d, acc);
        }
    }
    acc
}

/// `[rows of x][outputs]`.
pub(super) fn matmul(ty: WeightType, bytes: &[u8], cols: usize, x: &[f32], how: Fma) -> Vec<f32> {
    let row_bytes = cols / ty.inputs() * ty.file_block();
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

pub(super) fn clamped(g: f32, u: f32) -> f32 {
    let cut = |x: f32| if x > 7.0 { 7.0 } else { x };
    let (g, u) = (cut(g), cut(u));
    let u = if u < -7.0 { -7.0 } else { u };
    (u + 1.0) * (g / (1.0 + exp(-(g * 1.702))))
}

pub(super) fn gelu(g: f32) -> f32 {
    let inner = fma(
        g * g,
        f32::from_bits(0x3d92_2279),
        f32::from_bits(0x3fcc_422a),
    ) * g;
    g / (1.0 + exp(-inner))
}

/// Section 17: values of the cache for a key or a value of whole blocks of 32.
pub(super) fn q8_cached(x: &[f32]) -> Vec<f32> {
    let block = |x: &[f32]| {
        let m = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let d = match x.iter().all(|v| v.is_finite()) {
            false => f32::NAN,
            true if m < 1e-30 => 0.0,
            true => half::bf16::from_f32(m / 127.0).to_f32(),
        };
        let r = 1.0 / d;
        let cached = x.iter().map(move |v| match d > 0.0 {
            true => (f64::from(*v) * f64::from(r)).round_ties_even() as i32 as f32 * d,
            false => d,
        });
        cached.collect::<Vec<f32>>()
    };
    x.chunks(32).flat_map(block).collect()
}

/// Attention of one query over `positions`; `keys` and `values` are those of the cache, `[position][d]`.
pub(super) fn attention(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    positions: std::ops::Range<usize>,
    scale: f32,
    softcap: Option<f32>,
    sink: Option<f32>,
) -> Vec<f32> {
    let d = q.len();
    let cell = |cells: &[f32], p: usize, i: usize| cells[p * d + i];
    let score = |p: usize| {
        let score = (0..d).fold(0.0, |acc, i| fma(cell(keys, p, i), q[i], acc)) * scale;
        softcap.map_or(score, |cap| tanh(score / cap) * cap)
    };
    let scores: Vec<f32> = positions.clone().map(score).collect();
    let max = scores
        .iter()
        .chain(&sink)
        .fold(f32::NEG_INFINITY, |m, s| if *s > m { *s } else { m });
    let e: Vec<f32> = scores.iter().map(|s| exp(s - max)).collect();
    let (start, end) = (positions.start, positions.end);
    let sum = fold16(
        end,
        |p, lane| {
            if p < start { lane } else { lane + e[p - start] }
        },
    );
    let inverse = 1.0 / sink.map_or(sum, |sink| sum + exp(sink - max));
    (0..d)
        .map(|i| {
            let weighted = |acc, p: usize| fma(cell(values, p, i), e[p - start], acc);
            positions.clone().fold(0.0, weighted) * inverse
        })
        .collect()
}
