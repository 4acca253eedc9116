//! Results of the self-test's cases, by the processor's portable kernels and, where those keep
//! their results to themselves, by the formulas of specs/canonical-arithmetic.md.

use hearthnet_engine::kernels::{
    Act, ActForm, Arena, Attention, AttentionScratch, Convolution, DeltaRows, Isa, Kernels,
    MambaRows, Matrix, Output, PAGE, Packed, TileMut, key_cell, page_len, value_cell,
};
use hearthnet_files::BoundaryDtype;
use hearthnet_files::blocks::WeightType;
use hearthnet_files::floats::{f16_to_f32, f32_to_f16, round_to_bf16};
use hearthnet_files::spec::{Activation, CacheDtype};
use hearthnet_gpu::testing::*;
use hearthnet_gpu::{AttentionShape, Unary, kv_layout};

use super::{floats, words};

pub(crate) fn portable() -> Kernels {
    Kernels::new(Isa::Portable).unwrap()
}

/// What `self_test` must find for a kernel.
pub(crate) fn results(kernel: Kernel) -> Vec<u32> {
    let case = Case::new(Case::any(kernel));
    let [mut x, y, z] = [floats(&case.x), floats(&case.y), floats(&case.z)];
    let kernels = portable();
    let cols = COLS as usize;
    match kernel {
        Kernel::Probe => return probe(),
        Kernel::Elementwise(formula) => match formula {
            Formula::Unary(function) => match function {
                Unary::Exp => kernels.exp(&mut x),
                Unary::Silu => kernels.silu(&mut x),
                Unary::Sigmoid => kernels.sigmoid(&mut x),
                // A product with 1 changes nothing.
                Unary::Gelu => {
                    let ones = vec![1.0; x.len()];
                    kernels.gate(Activation::Gelu, &mut x, &ones);
                }
                Unary::GeluErf => kernels.gelu_erf(&mut x),
                Unary::SquaredRelu => kernels.squared_relu(&mut x),
            },
            Formula::Gate(activation) => kernels.gate(activation, &mut x, &y),
            Formula::AddRound => {
                let dtypes = [BoundaryDtype::F32, BoundaryDtype::F16, BoundaryDtype::Bf16];
                for (row, dtype) in dtypes.into_iter().enumerate() {
                    // All rows get the first row of y.
                    kernels.add_round(&mut x[row * cols..][..cols], &y[..cols], dtype);
                }
            }
            Formula::Round => {
                for x in &mut x[..cols] {
                    *x = f16_to_f32(f32_to_f16(*x));
                }
                for x in &mut x[cols..2 * cols] {
                    *x = round_to_bf16(*x);
                }
            }
            Formula::Scale => x.iter_mut().for_each(|x| *x *= FACTOR),
            Formula::Multiply => {
                let rows = x.chunks_mut(cols).zip(y.chunks(cols)).zip(z.chunks(cols));
                for ((x, y), z) in rows {
                    x.iter_mut().zip(y).for_each(|(x, y)| *x = *x * y * z[0]);
                }
            }
            Formula::AddScaled => {
                let rows = x.chunks_mut(cols).zip(y.chunks(cols)).zip(z.chunks(cols));
                for ((x, y), z) in rows {
                    kernels.add_scaled(x, y, z[0]);
                }
            }
            Formula::Softcap => kernels.softcap(&mut x, CAP),
            Formula::Copy => x = y,
        },
        Kernel::RmsNorm => {
            let mut out = x.clone();
            kernels.rms_norm_in_place(&mut out, &[1.0; WIDTH as usize], EPS);
            kernels.rms_norm_in_place(&mut x, &y[..WIDTH as usize], EPS);
            out.extend(x);
            return words(&out);
        }
        Kernel::L2Norm => kernels.l2_norm(&mut x, WIDTH as usize, EPS, FACTOR),
        Kernel::LayerNorm => kernels.layer_norm_in_place(&mut x, &y[..cols], &z[..cols], EPS),
        Kernel::Quantise => return quantise(&floats(&activations())),
        Kernel::Rope { interleaved } => rope(&mut x, &y, interleaved),
        Kernel::StoreKv | Kernel::Score | Kernel::Softmax | Kernel::Mix => return attention(),
        Kernel::Convolve | Kernel::Keep | Kernel::DeltaRule | Kernel::MambaScan => {
            return recurrence(kernel, x, &y, &z);
        }
        Kernel::Overflow => {
            let rows = x.chunks(4);
            return rows
                .map(|row| u32::from(row.iter().any(|v| !v.is_finite())))
                .collect();
        }
        Kernel::Matrix { weight_type, .. } | Kernel::Tiles { weight_type, .. } => {
            let (rows, cols) = (OUTPUTS as usize, INPUTS as usize);
            let bytes = match kernel {
                Kernel::Matrix { careful: true, .. } if weight_type == WeightType::MXFP4 => {
                    small_scales()
                }
                _ => weights(weight_type),
            };
            let x = floats(&finite_activations());
            return words(&product(weight_type, &bytes, rows, cols, &x));
        }
    }
    words(&x)
}

fn probe() -> Vec<u32> {
    let [a, b, c] = triples();
    let mut exps = floats(&c);
    portable().exp(&mut exps);
    let mut all = Vec::new();
    for i in 0..TRIPLES {
        let [x, y, z] = [a[i], b[i], c[i]].map(f32::from_bits);
        let bf16 = if y.is_nan() {
            0x7fc0_0000
        } else {
            round_to_bf16(y).to_bits()
        };
        let integer = ((a[i] << 8) as i32 >> 8) as f32;
        let fma = x.mul_add(y, z).to_bits();
        all.extend([
            fma,
            fma,
            integer.mul_add(y * z, x).to_bits(),
            (x * y).to_bits(),
            (x / y).to_bits(),
            x.sqrt().to_bits(),
            f16_to_f32(f32_to_f16(x)).to_bits() ^ bf16,
            exps[i].to_bits(),
        ]);
    }
    all
}

/// Section 6.2, in the card's layout.
pub(crate) fn quantise(values: &[f32]) -> Vec<u32> {
    let mut all = Vec::new();
    for block in values.chunks(32) {
        let m = block
            .iter()
            .fold(0f32, |m, v| if v.abs() > m { v.abs() } else { m });
        let (mut d, mut q) = (0.0, [0i32; 32]);
        if block.iter().any(|v| !v.is_finite()) {
            d = f32::NAN;
        } else if m >= 1e-30 {
            d = m / 127.0;
            let r = f64::from(127.0 / m);
            for (q, y) in q.iter_mut().zip(block) {
                // The product is exact in f64.
                *q = (f64::from(*y) * r).round_ties_even() as i32;
            }
        }
        let [first, second] = [&q[..16], &q[16..]].map(|q| q.iter().sum::<i32>());
        all.extend([
            d.to_bits(),
            (d * (first + second) as f32).to_bits(),
            (first as u32 & 0xffff) | (second as u32) << 16,
            u32::from(d != 0.0 && d < f32::from_bits(49 << 23)),
        ]);
        let bytes = q.map(|q| q as u8);
        all.extend(
            bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| u32::from_le_bytes(*b)),
        );
    }
    all
}

/// Section 7, rows at positions 0, 5 and 2.
fn rope(x: &mut [f32], angles: &[f32], interleaved: bool) {
    let (heads, width, pairs) = (HEADS as usize, HEAD_DIM as usize, PAIRS as usize);
    for (row, position) in [0, 5, 2].into_iter().enumerate() {
        for head in x[row * heads * width..][..heads * width].chunks_mut(width) {
            for i in 0..pairs {
                let [c, s] = [0, 1].map(|j| angles[2 * (position * pairs + i) + j]);
                let (at, other) = match interleaved {
                    true => (2 * i, 2 * i + 1),
                    false => (i, i + pairs),
                };
                let (a, b) = (head[at], head[other]);
                head[at] = a.mul_add(c, -(b * s));
                head[other] = a.mul_add(s, b * c);
            }
        }
    }
}

fn attention() -> Vec<u32> {
    let AttentionShape {
        heads,
        kv_heads,
        head_dim,
        ..
    } = QUERIES;
    let (heads, kv_heads, d) = (heads as usize, kv_heads as usize, head_dim as usize);
    let [q, k, v, sinks] = sequences().map(|words| floats(&words));
    // The card's pages, and the processor's by page and head.
    let mut card = vec![0u32; PAGES.len() * kv_heads * kv_layout::page_words(head_dim) as usize];
    let mut pages = vec![vec![0u16; page_len(d, CacheDtype::F16)]; PAGES.len() * kv_heads];
    let mut row = 0;
    let first_page = [0, POSITIONS[0].div_ceil(32) as usize];
    for (sequence, positions) in POSITIONS.into_iter().enumerate() {
        for position in 0..positions as usize {
            let page = PAGES[first_page[sequence] + position / PAGE] as usize;
            let slot = position % PAGE;
            for head in 0..kv_heads {
                let at = (row * kv_heads + head) * d;
                let own = &mut pages[page * kv_heads + head];
                let words = kv_layout::page_words(head_dim) as usize;
                let base = (page * kv_heads + head) * words;
                for i in 0..d {
                    let [k, v] = [k[at + i], v[at + i]].map(f32_to_f16);
                    own[key_cell(d, slot, i)] = k;
                    own[value_cell(d, slot, i)] = v;
                    let (slot, pair, shift) = (slot as u32, i as u32 / 2, 16 * (i % 2));
                    let key = base + kv_layout::key_word(slot, pair) as usize;
                    let value = base + kv_layout::value_word(head_dim, slot, pair) as usize;
                    card[key] |= u32::from(k) << shift;
                    card[value] |= u32::from(v) << shift;
                }
            }
            row += 1;
        }
    }
    let mut all = card;
    for (shape, sinks) in [(QUERIES, None), (LIMITED, Some(&sinks))] {
        for (row, (sequence, position)) in ASKED.into_iter().enumerate() {
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let first = first_page[sequence as usize];
                let count = POSITIONS[sequence as usize].div_ceil(32) as usize;
                let own: Vec<&[u16]> = PAGES[first..][..count]
                    .iter()
                    .map(|page| &pages[*page as usize * kv_heads + kv_head][..])
                    .collect();
                let a = Attention {
                    head_dim: d,
                    cache: CacheDtype::F16,
                    heads: 1,
                    scale: shape.scale,
                    softcap: shape.softcap,
                    sinks: sinks.map(|sinks| &sinks[head..=head]),
                    position: position as usize,
                    window: shape.window.map(|window| window as usize),
                    both_sides: None,
                    pages: &own,
                };
                let mut out = vec![0.0; d];
                let q = &q[(row * heads + head) * d..][..d];
                let (scratch, to) = (
                    &mut AttentionScratch::default(),
                    TileMut::new(&mut out, 1, d, d),
                );
                portable().attention(&a, q, d, scratch, to);
                all.extend(words(&out));
            }
        }
    }
    all
}

/// Products of a matrix in the form of a file, `[rows of x][rows]`.
pub(crate) fn product(
    ty: WeightType,
    bytes: &[u8],
    rows: usize,
    cols: usize,
    x: &[f32],
) -> Vec<f32> {
    let packed = packed(ty, bytes, rows, cols);
    let (kernels, mut act) = (portable(), Act::default());
    kernels.prepare(x, cols, ActForm::of([&packed]), &mut act);
    let mut out = vec![0.0; x.len() / cols * rows];
    let to = TileMut::new(&mut out, x.len() / cols, rows, rows);
    kernels.matmul(&packed, 0..packed.panels(), &act, Output::Store, to);
    out
}

pub(crate) fn packed(weight_type: WeightType, bytes: &[u8], rows: usize, cols: usize) -> Packed {
    let matrix = Matrix {
        weight_type,
        rows,
        cols,
        bytes,
    };
    Packed::pack_stacked(&mut Arena::default(), &[matrix]).unwrap()
}

/// Sections 13 and 16, with the states in the card's layout.
fn recurrence(kernel: Kernel, mut x: Vec<f32>, y: &[f32], z: &[f32]) -> Vec<u32> {
    let mut states = floats(&states());
    let cols = STATE_COLS as usize;
    let place = |state: u32| (state * STATE_WORDS + STATE_AT) as usize;
    if matches!(kernel, Kernel::Convolve | Kernel::Keep) {
        let (channels, taps) = (CHANNELS as usize, TAPS as usize);
        let convolution = Convolution {
            weights: y,
            stride: channels,
            positions: taps,
            channels,
        };
        let mut out = vec![0.0; x.len()];
        for gated in [false, true] {
            for (first, rows, before, after, copy) in STATE_PIECES {
                let kept = (taps - 1) * channels;
                let mut window = match before {
                    Some(state) => states[place(state)..][..kept].to_vec(),
                    None => vec![0.0; kept],
                };
                for row in first..first + rows {
                    let row = &x[row as usize * cols..][..cols];
                    let inputs = row[channels..2 * channels].iter().zip(row);
                    window.extend(inputs.map(|(x, factor)| if gated { x * factor } else { *x }));
                }
                let mut sums = vec![0.0; rows as usize * channels];
                portable().convolve(&convolution, &window, &mut sums);
                for (row, sums) in (first as usize..).zip(sums.chunks(channels)) {
                    let column = if gated { channels } else { 0 };
                    out[row * cols + column..][..channels].copy_from_slice(sums);
                }
                for state in [Some(after), copy].into_iter().flatten() {
                    let last = &window[window.len() - kept..];
                    states[place(state)..][..kept].copy_from_slice(last);
                }
            }
        }
        out.extend(states);
        return words(&out);
    }
    let (width, keys) = (VALUE_WIDTH as usize, KEY_WIDTH as usize);
    for tiled in [false, true] {
        for (first, rows, before, after, copy) in STATE_PIECES {
            for head in 0..VALUE_HEADS as usize {
                let shared = match tiled {
                    true => head % KEY_HEADS as usize,
                    false => head / (VALUE_HEADS / KEY_HEADS) as usize,
                };
                // One column at a time: then the processor's layout is the plain one.
                for column in 0..width {
                    let cell = |i: usize| (head * keys + i) * width + column;
                    let mut state: Vec<f32> = (0..keys)
                        .map(|i| before.map_or(0.0, |state| states[place(state) + cell(i)]))
                        .collect();
                    let all = first as usize..(first + rows) as usize;
                    let [queries, key_columns, values] = STATE_COLUMNS.map(|at| at as usize);
                    let value = |row: usize| row * cols + values + head * width + column;
                    let of = |at: usize| -> Vec<f32> {
                        let begin = at + shared * keys;
                        all.clone()
                            .flat_map(|row| x[row * cols + begin..][..keys].to_vec())
                            .collect()
                    };
                    let factors = |which: usize| -> Vec<f32> {
                        all.clone()
                            .map(|row| y[2 * (row * VALUE_HEADS as usize + head) + which])
                            .collect()
                    };
                    let mut out: Vec<f32> = all.clone().map(|row| x[value(row)]).collect();
                    let (first, second) = (of(queries), of(key_columns));
                    let (decay, other) = (factors(0), factors(1));
                    match kernel {
                        Kernel::DeltaRule => {
                            let rows = DeltaRows {
                                queries: &first,
                                keys: &second,
                                decay: &decay,
                                beta: &other,
                            };
                            portable().delta_rule(&rows, &mut state, &mut out);
                        }
                        _ => {
                            let rows = MambaRows {
                                write: &first,
                                read: &second,
                                decay: &decay,
                                steps: &other,
                                skip: z[head],
                            };
                            portable().mamba_scan(&rows, &mut state, &mut out);
                        }
                    }
                    all.clone()
                        .zip(out)
                        .for_each(|(row, out)| x[value(row)] = out);
                    for to in [Some(after), copy].into_iter().flatten() {
                        for (i, value) in state.iter().enumerate() {
                            states[place(to) + cell(i)] = *value;
                        }
                    }
                }
            }
        }
    }
    x.extend(states);
    words(&x)
}
