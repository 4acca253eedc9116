//! Every kernel gives the bits of `reference` on every instruction set of this machine.

use hearthnet_files::blocks::WeightType;
use hearthnet_files::floats::{bf16_to_f32, f16_to_f32, f32_to_f16};
use hearthnet_files::spec::{CacheDtype, RopeKind};
use proptest::prelude::*;

use super::super::pack::row_bytes;
use super::super::*;
use super::reference::{self, Fma};
use super::values::{
    Kind, Values, activations, all_kernels, assert_same, fields, in_two, matrix, packed_matrix,
    product, same,
};

fn kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(Kind::ALL.to_vec())
}

fn weight_type() -> impl Strategy<Value = WeightType> {
    prop::sample::select(WeightType::ALL.to_vec())
}

proptest! {
    #[test]
    fn a_matrix_is_finite_exactly_when_all_its_weights_are(ty in weight_type(), seed: u64) {
        let mut values = Values(seed);
        // Blocks of random bits: so few that many of the matrices are finite.
        let cols = 2 * ty.inputs();
        let bytes: Vec<u8> = (0..2 * ty.file_block()).map(|_| values.bits() as u8).collect();
        let matrix = Matrix { weight_type: ty, rows: 1, cols, bytes: &bytes };
        let packed = packed_matrix(&matrix);
        let mut weights = vec![0.0; cols];
        packed.dequantise_row(0, &mut weights);
        let finite = weights.iter().all(|weight| weight.is_finite());
        match packed.not_finite() {
            None => prop_assert!(finite, "{ty:?}"),
            // A scale is refused if only the largest value of the table would overflow.
            Some(0) if ty == WeightType::MXFP4 => {}
            Some(part) => prop_assert!(part == 0 && !finite, "{ty:?}"),
        }
    }
}

#[test]
fn not_finite_returns_the_index_of_the_matrix() {
    let ty = WeightType::Q8_0;
    let whole = vec![0; 16 * ty.file_block()];
    let mut broken = whole.clone();
    // The scale of the last row is an infinity.
    let last = 15 * ty.file_block();
    broken[last..last + 2].copy_from_slice(&0x7c00_u16.to_le_bytes());
    let matrix = |bytes| Matrix {
        weight_type: ty,
        rows: 16,
        cols: 32,
        bytes,
    };
    let (whole, broken) = (matrix(&whole), matrix(&broken));
    for (part, expected) in [(0, Some(0)), (1, Some(1)), (2, Some(2)), (3, None)] {
        let mut all = [whole; 3];
        if let Some(at) = all.get_mut(part) {
            *at = broken;
        }
        let packed = Packed::pack_stacked(&mut Arena::default(), &all).unwrap();
        assert_eq!(packed.not_finite(), expected);
    }
    let packed = Packed::pack_gate_up(&mut Arena::default(), &whole, &broken).unwrap();
    assert_eq!(packed.not_finite(), Some(1));
}

#[test]
fn weight_types_have_the_names_of_the_file_format() {
    for (place, ty) in WeightType::ALL.into_iter().enumerate() {
        assert_eq!(ty as usize, place);
        assert_eq!(format!("{ty:?}"), ty.tensor_type().name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn matrices_agree_for_all_shapes_splits_and_values(
        ty in weight_type(), rows in 1usize..=70, blocks in 1usize..=7, tokens in 1usize..=70,
        weights_kind in kind(), kind in kind(), seed: u64,
    ) {
        let mut values = Values(seed);
        let cols = if ty.quantised() { ty.inputs() * blocks } else { 1 + values.below(100) };
        let bytes = values.weights(ty, rows, cols, weights_kind);
        let x = values.many(tokens * cols, kind);
        let wanted = reference::matmul(ty, &bytes, cols, &x, Fma::Fused);
        let packed = packed_matrix(&matrix(ty, rows, cols, &bytes));
        let before = values.many(tokens * rows, Kind::Ordinary);
        for kernels in all_kernels() {
            let act = activations(kernels, &packed, &x);
            let what = format!("{} {ty:?}", kernels.isa());
            assert_same(&what, &product(kernels, &packed, &x), &wanted);

            // In two parts, added to the output and rounded.
            for dtype in BoundaryDtype::ALL {
                let cut = values.below(packed.panels() + 1);
                let mut sum = before.clone();
                let (left, right) = TileMut::whole(&mut sum, rows).split_cols((cut * 16).min(rows));
                kernels.matmul(&packed, cut..packed.panels(), &act, Output::Add(dtype), right);
                kernels.matmul(&packed, 0..cut, &act, Output::Add(dtype), left);
                let mut rounded: Vec<f32> = before.iter().zip(&wanted).map(|(b, w)| b + w).collect();
                dtype.round(&mut rounded);
                assert_same(&format!("{what} + {dtype}"), &sum, &rounded);
            }
        }
    }

    #[test]
    fn gated_pairs_agree_with_two_matrices(
        ty in weight_type(), rows in 1usize..=50, blocks in 1usize..=4, tokens in 1usize..=20,
        kind in kind(), seed: u64,
    ) {
        let mut values = Values(seed);
        let cols = ty.inputs().max(32) * blocks;
        let gate = values.weights(ty, rows, cols, Kind::Ordinary);
        let up = values.weights(ty, rows, cols, Kind::Ordinary);
        let x = values.many(tokens * cols, kind);
        let g = reference::matmul(ty, &gate, cols, &x, Fma::Fused);
        let u = reference::matmul(ty, &up, cols, &x, Fma::Fused);
        let wanted: Vec<f32> = g.iter().zip(&u).map(|(g, u)| reference::silu(*g) * u).collect();
        let (gate, up) = (matrix(ty, rows, cols, &gate), matrix(ty, rows, cols, &up));
        let packed = Packed::pack_gate_up(&mut Arena::default(), &gate, &up).unwrap();
        for kernels in all_kernels() {
            let act = activations(kernels, &packed, &x);
            let mut out = vec![f32::NAN; tokens * rows];
            let cut = values.below(packed.panels() + 1);
            let (left, right) = TileMut::whole(&mut out, rows).split_cols((cut * 16).min(rows));
            kernels.matmul_swiglu(&packed, 0..cut, &act, left);
            kernels.matmul_swiglu(&packed, cut..packed.panels(), &act, right);
            assert_same(kernels.isa().name(), &out, &wanted);
            let mut apart = g.clone();
            kernels.gate(Activation::Silu, &mut apart, &u);
            assert_same(kernels.isa().name(), &apart, &wanted);
        }
    }

    #[test]
    fn a_row_does_not_depend_on_the_rest_of_the_tile(
        ty in weight_type(), blocks in 1usize..=4, tokens in 2usize..=70, seed: u64,
    ) {
        let mut values = Values(seed);
        let (rows, cols) = (40, ty.inputs().max(32) * blocks);
        let bytes = values.weights(ty, rows, cols, Kind::Ordinary);
        let packed = packed_matrix(&matrix(ty, rows, cols, &bytes));
        let x = values.many(tokens * cols, Kind::Ordinary);
        for kernels in all_kernels() {
            let run = |x| product(kernels, &packed, x);
            let together = run(&x);
            let alone: Vec<f32> = x.chunks(cols).flat_map(run).collect();
            assert_same(kernels.isa().name(), &together, &alone);
        }
    }

    #[test]
    fn normalisation_and_quantisation_agree(
        cols in 1usize..=40, tokens in 1usize..=4, whole: bool, kind in kind(), seed: u64,
    ) {
        let mut values = Values(seed);
        let cols = if whole { 32 * cols } else { cols };
        let x = values.many(tokens * cols, kind);
        let w = values.many(cols, Kind::Ordinary);
        let eps = if values.below(2) == 0 { 1e-5 } else { 0.0 };
        let wanted: Vec<f32> = x.chunks(cols).flat_map(|x| reference::rms_norm(x, &w, eps)).collect();
        let b = values.many(cols, Kind::Ordinary);
        let centred: Vec<f32> = x.chunks(cols).flat_map(|x| reference::layer_norm(x, &w, &b, eps)).collect();
        let form = ActForm { plain: true, quantised: cols % 32 == 0 };
        let first = all_kernels().next().map(|k| {
            let mut act = Act::default();
            k.norm_prepare(&x, &w, eps, form, &mut act);
            act
        }).unwrap();
        for kernels in all_kernels() {
            let mut y = x.clone();
            kernels.rms_norm_in_place(&mut y, &w, eps);
            assert_same(kernels.isa().name(), &y, &wanted);
            let mut y = x.clone();
            kernels.layer_norm_in_place(&mut y, &w, &b, eps);
            assert_same(kernels.isa().name(), &y, &centred);
            let mut act = Act::default();
            kernels.norm_prepare(&x, &w, eps, form, &mut act);
            assert_same(kernels.isa().name(), act.plain(), &wanted);
            prop_assert_eq!(&act.quants, &first.quants);
            for (a, b) in act.meta.iter().zip(&first.meta) {
                prop_assert!(same(a.d, b.d) && same(a.ds, b.ds));
                prop_assert_eq!((a.neg8s, a.neg128s, a.half_sums), (b.neg8s, b.neg128s, b.half_sums));
            }
        }
    }

    #[test]
    fn activations_soft_caps_and_sums_of_experts_agree(n in 1usize..=70, kind in kind(), seed: u64) {
        let mut values = Values(seed);
        let (x, y) = (values.many(n, kind), values.many(n, Kind::Ordinary));
        let gelu: Vec<f32> = x.iter().zip(&y).map(|(x, y)| reference::gelu(*x) * y).collect();
        let exact: Vec<f32> = x.iter().map(|x| reference::gelu_erf(*x)).collect();
        // Scaled so that some values are clamped.
        let (gates, ups): (Vec<f32>, Vec<f32>) = (x.iter().map(|x| 8.0 * x).collect(), y.iter().map(|y| 8.0 * y).collect());
        let clamped: Vec<f32> = gates.iter().zip(&ups).map(|(g, u)| reference::clamped(*g, *u)).collect();
        let capped: Vec<f32> = x.iter().map(|x| reference::tanh(x / 30.0) * 30.0).collect();
        let summed: Vec<f32> = x.iter().zip(&y).map(|(x, y)| y.mul_add(0.3, *x)).collect();
        let w = &y[..1 + n / 3];
        let rows: Vec<f32> = x[..n / w.len() * w.len()].to_vec();
        let normed: Vec<f32> = rows.chunks(w.len()).flat_map(|x| reference::rms_norm(x, w, 1e-6)).collect();
        for kernels in all_kernels() {
            let check = |input: &[f32], run: &dyn Fn(&mut [f32]), wanted: &[f32]| {
                let mut out = input.to_vec();
                run(&mut out);
                assert_same(kernels.isa().name(), &out, wanted);
            };
            check(&x, &|out| kernels.gate(Activation::Gelu, out, &y), &gelu);
            check(&gates, &|out| kernels.gate(Activation::Clamped, out, &ups), &clamped);
            check(&x, &|out| kernels.gelu_erf(out), &exact);
            let gated: Vec<f32> = exact.iter().zip(&y).map(|(g, u)| g * u).collect();
            check(&x, &|out| kernels.gate(Activation::GeluErf, out, &y), &gated);
            check(&x, &|out| kernels.softcap(out, 30.0), &capped);
            check(&x, &|out| kernels.add_scaled(out, &y, 0.3), &summed);
            check(&rows, &|out| kernels.rms_norm_in_place(out, w, 1e-6), &normed);
        }
    }

    #[test]
    fn attention_agrees_and_never_reads_a_stale_cell(
        eighths in 1usize..=18, heads in 1usize..=9, position in 0usize..=150, rows in 1usize..=40,
        window in prop::option::of(1usize..=100), softcap in prop::option::of(1.0f32..50.0),
        after in prop::option::of(0usize..=90), with_sinks: bool, q8: bool, kind in kind(), seed: u64,
    ) {
        let mut values = Values(seed);
        let sinks = with_sinks.then(|| values.many(heads, kind));
        let sinks = sinks.as_deref();
        let last = position + rows;
        let both_sides = after.map(|after| last + after);
        let (cache, d) = match q8 {
            true => (CacheDtype::Q8_0, 32 * eighths.div_ceil(3)),
            false => (CacheDtype::F16, 8 * eighths),
        };
        let n = both_sides.unwrap_or(last);
        let (mut keys, mut vals) = (values.many(n * d, kind), values.many(n * d, Kind::Ordinary));
        // Pages start as NaN; only the positions in use are written.
        let mut pages = vec![vec![0x7fffu16; page_len(d, cache)]; n.div_ceil(PAGE) + 1];
        for p in 0..n {
            let cells = p * d..(p + 1) * d;
            let (key, value) = (&keys[cells.clone()], &vals[cells]);
            let page = SharedMut::new(&mut pages[p / PAGE]);
            // SAFETY: there is no other reference to the page.
            unsafe { Kernels::best().store_kv(page, cache, p % PAGE, key, value) };
        }
        for x in [&mut keys, &mut vals] {
            *x = match cache {
                CacheDtype::F16 => x.iter().map(|x| f16_to_f32(f32_to_f16(*x))).collect(),
                CacheDtype::Q8_0 => reference::q8_cached(x),
            };
        }
        let pages: Vec<&[u16]> = pages.iter().map(Vec::as_slice).collect();
        let q = values.many(rows * heads * d, kind);
        let scale = 1.0 / (d as f32).sqrt();
        let a = Attention { head_dim: d, cache, heads, scale, softcap, sinks, position, window, both_sides, pages: &pages };
        let wanted: Vec<f32> = q
            .chunks(d)
            .enumerate()
            .flat_map(|(i, q)| {
                let own = position + i / heads;
                let seen = reference::seen(own, window, both_sides);
                reference::attention(q, &keys, &vals, seen, scale, softcap, sinks.map(|sinks| sinks[i % heads]))
            })
            .collect();
        for kernels in all_kernels() {
            let mut out = vec![f32::NAN; q.len()];
            let mut scratch = AttentionScratch::default();
            let width = heads * d;
            kernels.attention(&a, &q, width, &mut scratch, TileMut::whole(&mut out, width));
            assert_same(kernels.isa().name(), &out, &wanted);
            // The last head of the last row alone.
            let at = q.len() - d;
            let sinks = sinks.map(|sinks| &sinks[heads - 1..]);
            let one = Attention { heads: 1, position: last - 1, sinks, ..a };
            let mut out = vec![f32::NAN; d];
            kernels.attention(&one, &q[at..], d, &mut scratch, TileMut::whole(&mut out, d));
            assert_same(kernels.isa().name(), &out, &wanted[at..]);
        }
    }

    #[test]
    fn rotation_rounding_and_finiteness_agree(
        eighths in 1usize..=18, heads in 1usize..=4, position in 0usize..200, kind in kind(), seed: u64,
    ) {
        let mut values = Values(seed);
        let d = 8 * eighths;
        let dims = 2 * (1 + values.below(d / 2));
        let x = values.many(heads * d, kind);
        let y = values.many(heads * d, kind);
        for rope in [RopeKind::Interleaved, RopeKind::NeoX] {
            let frequencies = RopeTable::frequencies(dims, 1e4);
            let mut table = RopeTable::new(rope, frequencies.clone(), 1.0);
            table.cover(200);
            let mut wanted = x.clone();
            for head in wanted.chunks_mut(d) {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = libm::sincos(position as f64 * frequency);
                    let (sin, cos) = (sin as f32, cos as f32);
                    let (i, j) = match rope {
                        RopeKind::Interleaved => (2 * i, 2 * i + 1),
                        RopeKind::NeoX => (i, i + dims / 2),
                    };
                    let (a, b) = (head[i], head[j]);
                    head[i] = a.mul_add(cos, -(b * sin));
                    head[j] = a.mul_add(sin, b * cos);
                }
            }
            for kernels in all_kernels() {
                let mut got = x.clone();
                kernels.rope(&table, position, &mut got, d);
                assert_same(kernels.isa().name(), &got, &wanted);
            }
        }
        for dtype in BoundaryDtype::ALL {
            let mut wanted: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
            dtype.round(&mut wanted);
            for kernels in all_kernels() {
                let mut got = x.clone();
                kernels.add_round(&mut got, &y, dtype);
                assert_same(kernels.isa().name(), &got, &wanted);
                prop_assert_eq!(kernels.all_finite(&got), got.iter().all(|v| v.is_finite()));
            }
        }
    }

    #[test]
    fn dequantised_rows_agree_with_the_format(
        ty in weight_type(), rows in 1usize..=40, blocks in 1usize..=3, seed: u64,
    ) {
        let mut values = Values(seed);
        let cols = ty.inputs().max(32) * blocks;
        let bytes = values.weights(ty, rows, cols, Kind::Ordinary);
        let packed = packed_matrix(&matrix(ty, rows, cols, &bytes));
        let row_bytes = row_bytes(ty, cols).unwrap();
        for row in 0..rows {
            let mut got = vec![f32::NAN; cols];
            packed.dequantise_row(row, &mut got);
            let file = &bytes[row * row_bytes..][..row_bytes];
            let mut wanted = vec![0.0; cols];
            match ty {
                WeightType::F32 | WeightType::F16 | WeightType::BF16 => {
                    for (w, out) in file.chunks(ty.file_block()).zip(&mut wanted) {
                        let low = [w[0], w[1]];
                        *out = match ty {
                            WeightType::F32 => f32::from_le_bytes([w[0], w[1], w[2], w[3]]),
                            WeightType::F16 => half::f16::from_le_bytes(low).to_f32(),
                            _ => half::bf16::from_le_bytes(low).to_f32(),
                        };
                    }
                }
                _ => wanted = reference::weights(ty, file),
            }
            assert_same("row", &got, &wanted);
        }
    }
}

#[test]
fn cells_of_a_page_are_used_exactly_once() {
    // Widths of heads, and of their scales in a cache of 8 bits.
    for d in [24, 2] {
        let mut used = vec![0; page_len(d, CacheDtype::F16)];
        for slot in 0..PAGE {
            for i in 0..d {
                used[key_cell(d, slot, i)] += 1;
                used[value_cell(d, slot, i)] += 1;
            }
        }
        assert!(used.iter().all(|n| *n == 1));
    }
    let (bytes, scales) = (PAGE * 64, page_len(2, CacheDtype::F16));
    assert_eq!(page_len(64, CacheDtype::Q8_0), bytes + scales);
}

#[test]
fn store_kv_rounds_to_f16_and_writes_no_other_cell() {
    const UNTOUCHED: u16 = 0x5a5a;
    let mut values = Values(11);
    for d in [8, 16, 24, 40, 64, 128] {
        for kind in Kind::ALL {
            let (key, value) = (values.many(d, kind), values.many(d, kind));
            let slot = values.below(PAGE);
            for kernels in all_kernels() {
                let mut page = vec![UNTOUCHED; page_len(d, CacheDtype::F16)];
                // SAFETY: there is no other reference to the page.
                unsafe {
                    let page = SharedMut::new(&mut page);
                    kernels.store_kv(page, CacheDtype::F16, slot, &key, &value);
                };
                for i in 0..d {
                    for (cell, x) in [
                        (key_cell(d, slot, i), key[i]),
                        (value_cell(d, slot, i), value[i]),
                    ] {
                        let found = std::mem::replace(&mut page[cell], UNTOUCHED);
                        let (found, wanted) = (f16_to_f32(found), f16_to_f32(f32_to_f16(x)));
                        assert!(same(found, wanted), "{} {d} {i}: {x:e}", kernels.isa());
                    }
                }
                assert!(page.iter().all(|cell| *cell == UNTOUCHED), "{d}");
            }
        }
    }
}

#[test]
fn store_kv_quantises_to_q8_0_and_writes_no_other_byte() {
    const UNTOUCHED: u16 = 0x5a5a;
    let cache = CacheDtype::Q8_0;
    let mut values = Values(12);
    for d in [32, 64, 96, 128, 576] {
        for kind in Kind::ALL {
            let (mut key, value) = (values.many(d, kind), values.many(d, kind));
            // The largest quotient of a value and the rounded scale, 127.496.
            key[3] = 127.0 * (1.0 + 1.0 / 256.0);
            let slot = values.below(PAGE);
            for kernels in all_kernels() {
                let mut page = vec![UNTOUCHED; page_len(d, cache)];
                // SAFETY: there is no other reference to the page.
                unsafe {
                    let page = SharedMut::new(&mut page);
                    kernels.store_kv(page, cache, slot, &key, &value);
                };
                let (quants, scales) = page.split_at_mut(PAGE * d);
                let quants: &mut [i8] = bytemuck::cast_slice_mut(quants);
                let cells: [fn(usize, usize, usize) -> usize; 2] = [key_cell, value_cell];
                for (cell, x) in cells.into_iter().zip([&key, &value]) {
                    let wanted = reference::q8_cached(x);
                    for (i, wanted) in wanted.into_iter().enumerate() {
                        let scale = bf16_to_f32(scales[cell(d / 32, slot, i / 32)]);
                        let quant = std::mem::replace(&mut quants[cell(d, slot, i)], 0x5a);
                        let found = f32::from(quant) * scale;
                        assert!(same(found, wanted), "{} {d} {i}: {}", kernels.isa(), x[i]);
                    }
                    for block in 0..d / 32 {
                        scales[cell(d / 32, slot, block)] = UNTOUCHED;
                    }
                }
                assert!(page.iter().all(|cell| *cell == UNTOUCHED), "{d}");
            }
        }
    }
}

#[test]
fn the_exponential_agrees_over_its_whole_range() {
    // A stride coprime to 2^32 visits all exponents and signs.
    let x: Vec<f32> = (0..4_000_000u32)
        .map(|i| f32::from_bits(i.wrapping_mul(1_073_741_827)))
        .collect();
    let dense: Vec<f32> = (0..2_000_000).map(|i| -88.5 + i as f32 * 9e-5).collect();
    for x in [x, dense] {
        let wanted: Vec<f32> = x.iter().map(|x| reference::exp(*x)).collect();
        for kernels in all_kernels() {
            let mut got = x.clone();
            kernels.exp(&mut got);
            assert_same(kernels.isa().name(), &got, &wanted);
        }
    }
}

#[test]
fn the_largest_sums_of_every_type_are_exact() {
    let cols = 512;
    for ty in WeightType::ALL.into_iter().filter(|ty| ty.quantised()) {
        // Rows of equal bytes: all quants and factors at their maximum or minimum.
        let fill = [0x00, 0xff, 0x80, 0x7f, 0x88, 0x77, 0x0f, 0xf0];
        let mut bytes = Vec::new();
        for byte in fill {
            for _ in 0..cols / ty.inputs() {
                let start = bytes.len();
                bytes.resize(start + ty.file_block(), byte);
                for at in fields(ty) {
                    bytes[start + at..][..2].copy_from_slice(&f32_to_f16(0.5).to_le_bytes());
                }
            }
        }
        let packed = packed_matrix(&matrix(ty, fill.len(), cols, &bytes));
        // Activations of one magnitude, so that all quants are 127 or -127. The sign patterns add
        // up within pairs, within groups of four, within 16 inputs, or nowhere.
        let mut x = Vec::new();
        for pattern in [0usize, 1, 2, 4, 8, 16, 32] {
            let sign = |i: usize| if i & pattern == 0 { 1.0 } else { -1.0 };
            x.extend((0..cols).map(sign));
            x.extend((0..cols).map(|i| -sign(i)));
        }
        let wanted = reference::matmul(ty, &bytes, cols, &x, Fma::Fused);
        for kernels in all_kernels() {
            let out = product(kernels, &packed, &x);
            assert_same(&format!("{} {ty:?}", kernels.isa()), &out, &wanted);
        }
    }
}

#[test]
fn an_unfused_product_is_noticed() {
    for ty in WeightType::ALL {
        let mut values = Values(7);
        let (rows, cols) = (64, 768);
        let bytes = values.weights(ty, rows, cols, Kind::Ordinary);
        let x = values.many(4 * cols, Kind::Ordinary);
        let fused = reference::matmul(ty, &bytes, cols, &x, Fma::Fused);
        let separate = reference::matmul(ty, &bytes, cols, &x, Fma::Separate);
        let differ = fused
            .iter()
            .zip(&separate)
            .filter(|(a, b)| !same(**a, **b))
            .count();
        assert!(
            2 * differ > fused.len(),
            "{ty:?}: only {differ} of {} differ",
            fused.len()
        );
    }
}

#[test]
fn a_value_that_is_not_finite_reaches_every_output() {
    let (rows, cols) = (20, 256);
    for ty in WeightType::ALL {
        let bytes = Values(1).weights(ty, rows, cols, Kind::Ordinary);
        let packed = packed_matrix(&matrix(ty, rows, cols, &bytes));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = Values(2).many(cols, Kind::Ordinary);
            x[40] = bad;
            for kernels in all_kernels() {
                let act = activations(kernels, &packed, &x);
                // Finite before, so that an output that is not written is noticed.
                let mut out = vec![0.0; rows];
                let to = TileMut::whole(&mut out, rows);
                kernels.matmul(&packed, 0..packed.panels(), &act, Output::Store, to);
                let spread = out.iter().all(|v| !v.is_finite());
                assert!(spread, "{} {ty:?}", kernels.isa());
            }
        }
    }
}

proptest! {
    #[test]
    fn a_delta_rule_has_the_bits_of_the_reference_however_rows_are_split(
        keys in 1usize..40,
        width in 1usize..170,
        rows in 1usize..9,
        cut in 0usize..9,
        seed: u64,
    ) {
        let mut values = Values(seed);
        let mut draw = |count| values.units(count);
        let (queries, all_keys) = (draw(rows * keys), draw(rows * keys));
        let (inputs, decay, beta) = (draw(rows * width), draw(rows), draw(rows));
        let mut state = vec![vec![0.0; width]; keys];
        let mut expected = Vec::new();
        for row in 0..rows {
            let key = row * keys..(row + 1) * keys;
            let parts = [
                &queries[key.clone()],
                &all_keys[key],
                &inputs[row * width..(row + 1) * width],
            ];
            expected.extend(reference::delta_row(&mut state, parts, [decay[row], beta[row]], Fma::Fused));
        }
        for kernels in all_kernels() {
            let (mut state, mut out) = (vec![0.0; keys * width], inputs.clone());
            for part in in_two(rows, cut) {
                let of_keys = part.start * keys..part.end * keys;
                let rows = DeltaRows {
                    queries: &queries[of_keys.clone()],
                    keys: &all_keys[of_keys],
                    decay: &decay[part.clone()],
                    beta: &beta[part.clone()],
                };
                let out = &mut out[part.start * width..part.end * width];
                kernels.delta_rule(&rows, &mut state, out);
            }
            assert_same(&format!("{kernels:?}"), &out, &expected);
        }
    }

    #[test]
    fn convolutions_and_norms_of_heads_have_the_bits_of_the_reference(
        positions in 1usize..6,
        channels in 1usize..40,
        rows in 1usize..9,
        seed: u64,
    ) {
        let mut values = Values(seed);
        let mut draw = |count| values.units(count);
        // Weights of two more channels lie behind.
        let stride = channels + 2;
        let (weights, inputs) = (draw(positions * stride), draw(rows * channels));
        let mut window = vec![0.0; (positions - 1) * channels];
        window.extend(&inputs);
        let mut expected = vec![0.0; rows * channels];
        for channel in 0..channels {
            let each = |from: &[f32], stride: usize| -> Vec<f32> {
                from.iter().skip(channel).step_by(stride).copied().collect()
            };
            let sums = reference::convolve(&each(&weights, stride), &each(&inputs, channels));
            for (row, sum) in sums.into_iter().enumerate() {
                expected[row * channels + channel] = sum;
            }
        }
        let norm = reference::l2_norm(&inputs, 1e-6, 0.3);
        for kernels in all_kernels() {
            let convolution = Convolution { weights: &weights, stride, positions, channels };
            let mut out = vec![0.0; rows * channels];
            kernels.convolve(&convolution, &window, &mut out);
            assert_same(&format!("{kernels:?}"), &out, &expected);
            let mut out = inputs.clone();
            kernels.l2_norm(&mut out, inputs.len(), 1e-6, 0.3);
            assert_same(&format!("{kernels:?}"), &out, &norm);
            let mut out = inputs.clone();
            kernels.sigmoid(&mut out);
            let expected: Vec<f32> = inputs.iter().map(|x| reference::sigmoid(*x)).collect();
            assert_same(&format!("{kernels:?}"), &out, &expected);
        }
    }
}

#[test]
fn an_unfused_delta_rule_has_other_bits() {
    let mut values = Values(5);
    let mut draw = |count| values.units(count);
    let (query, key, value) = (draw(32), draw(32), draw(32));
    let [fused, separate] = [Fma::Fused, Fma::Separate].map(|how| {
        let mut state = vec![vec![0.0; 32]; 32];
        let parts = [&query[..], &key, &value];
        let rows = (0..2).map(|_| reference::delta_row(&mut state, parts, [0.9, 0.3], how));
        rows.last().unwrap()
    });
    assert!(
        fused
            .iter()
            .zip(&separate)
            .any(|(a, b)| a.to_bits() != b.to_bits())
    );
}
