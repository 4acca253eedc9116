//! Accuracy of the kernels against exact results computed in `f64`.

use hearthnet_files::blocks::WeightType;
use hearthnet_files::floats::{f16_to_f32, f32_to_f16};
use hearthnet_files::spec::CacheDtype;

use super::super::*;
use super::values::{Kind, Values, matrix, packed_matrix, plain_attention, product};

fn kernels() -> Kernels {
    Kernels::best()
}

#[test]
fn the_exponential_is_accurate_to_less_than_1_2e_7() {
    let x: Vec<f32> = (0..1_750_000).map(|i| -87.0 + i as f32 * 1e-4).collect();
    let mut got = x.clone();
    kernels().exp(&mut got);
    let mut worst = 0.0f64;
    for (x, got) in x.iter().zip(&got) {
        let wanted = libm::exp(f64::from(*x));
        if wanted >= f64::from(f32::MIN_POSITIVE) {
            worst = worst.max((f64::from(*got) / wanted - 1.0).abs());
        }
    }
    assert!(worst < 1.2e-7, "{worst:e}");
    assert!(worst > 2e-8, "{worst:e} is too good to be a rounded result");
}

#[test]
fn gelu_by_the_error_function_is_accurate() {
    for step in -60_000..=60_000_i32 {
        let x = step as f32 / 4096.0;
        let mut y = [x];
        kernels().gelu_erf(&mut y);
        let wide = f64::from(x);
        let wanted = 0.5 * wide * libm::erfc(-wide / std::f64::consts::SQRT_2);
        let allowed = 1.5e-7 * wide.abs().max(1.0);
        assert!(
            (f64::from(y[0]) - wanted).abs() <= allowed,
            "{x}: {} instead of {wanted}",
            y[0]
        );
    }
    let mut ends = [-0.0, -200.0, 1e30, f32::NAN];
    kernels().gelu_erf(&mut ends);
    assert!(ends[0] == 0.0 && ends[1] == 0.0 && ends[2] == 1e30 && ends[3].is_nan());
}

#[test]
fn the_exponential_has_the_limits_that_softmax_needs() {
    let mut x = [0.0, -0.0, -87.1, f32::NEG_INFINITY, 1000.0, f32::NAN];
    kernels().exp(&mut x);
    assert_eq!(x[..4], [1.0, 1.0, 0.0, 0.0]);
    assert!(x[4].is_finite() && x[4] > 1e38 && x[5].is_nan());
}

#[test]
fn float_matrices_are_accurate_to_f32_rounding() {
    let (rows, cols, tokens) = (48, 1536, 3);
    for ty in WeightType::ALL.into_iter().filter(|ty| !ty.quantised()) {
        let mut values = Values(3);
        let bytes = values.weights(ty, rows, cols, Kind::Ordinary);
        let packed = packed_matrix(&matrix(ty, rows, cols, &bytes));
        let x = values.many(tokens * cols, Kind::Ordinary);
        let out = product(kernels(), &packed, &x);
        let mut weights = vec![0.0; cols];
        for r in 0..rows {
            packed.dequantise_row(r, &mut weights);
            for t in 0..tokens {
                let terms = weights
                    .iter()
                    .zip(&x[t * cols..])
                    .map(|(w, x)| f64::from(*w) * f64::from(*x));
                let magnitude: f64 = terms.clone().map(f64::abs).sum();
                let error = (f64::from(out[t * rows + r]) - terms.sum::<f64>()).abs();
                assert!(
                    error < 2e-6 * magnitude,
                    "{ty:?}: {error:e} of {magnitude:e}"
                );
            }
        }
    }
}

#[test]
fn quantised_matrices_err_by_the_quantisation_of_activations_only() {
    let (rows, cols) = (48, 1536);
    for ty in WeightType::ALL.into_iter().filter(|ty| ty.quantised()) {
        let mut values = Values(4);
        let bytes = values.weights(ty, rows, cols, Kind::Ordinary);
        let packed = packed_matrix(&matrix(ty, rows, cols, &bytes));
        let x = values.many(cols, Kind::Ordinary);
        let out = product(kernels(), &packed, &x);
        let mut weights = vec![0.0; cols];
        for r in 0..rows {
            packed.dequantise_row(r, &mut weights);
            let mut exact = 0.0;
            let mut bound = 0.0;
            for (block, x) in weights.chunks(32).zip(x.chunks(32)) {
                // Half a quantisation step per activation, plus rounding.
                let step = f64::from(x.iter().fold(0.0f32, |m, v| m.max(v.abs()))) / 127.0;
                for (w, x) in block.iter().zip(x) {
                    exact += f64::from(*w) * f64::from(*x);
                    bound += f64::from(w.abs()) * (0.5001 * step + 1e-6 * f64::from(x.abs()));
                }
            }
            let error = (f64::from(out[r]) - exact).abs();
            assert!(error <= bound, "{ty:?}: {error:e} beyond {bound:e}");
        }
    }
}

#[test]
fn normalisation_is_accurate_to_f32_rounding() {
    let n = 576;
    for scale in [1e-4f32, 1.0, 6e4] {
        let x: Vec<f32> = Values(5)
            .many(n, Kind::Ordinary)
            .iter()
            .map(|x| x * scale)
            .collect();
        let w = Values(6).many(n, Kind::Ordinary);
        let mut y = x.clone();
        kernels().rms_norm_in_place(&mut y, &w, 1e-5);
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
        let s = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
        for i in 0..n {
            let wanted = f64::from(x[i]) * s * f64::from(w[i]);
            assert!((f64::from(y[i]) - wanted).abs() <= 1e-6 * wanted.abs());
        }
    }
}

#[test]
fn attention_is_accurate_to_f32_rounding_of_a_f64_softmax() {
    let (d, heads, rows, position) = (64, 3, 5, 700);
    let n = position + rows;
    let mut values = Values(8);
    let mut cells = |scale: f32| -> Vec<u16> {
        values
            .many(n * d, Kind::Ordinary)
            .iter()
            .map(|x| f32_to_f16(x * scale))
            .collect()
    };
    let (keys, vals) = (cells(4.0), cells(1.0));
    let mut pages = vec![vec![0u16; page_len(d, CacheDtype::F16)]; n.div_ceil(PAGE)];
    for p in 0..n {
        let cells = p * d..(p + 1) * d;
        write_kv(
            &mut pages[p / PAGE],
            p % PAGE,
            &keys[cells.clone()],
            &vals[cells],
        );
    }
    let pages: Vec<&[u16]> = pages.iter().map(Vec::as_slice).collect();
    let q = values.many(rows * heads * d, Kind::Ordinary);
    let mut out = vec![0.0; q.len()];
    let a = Attention {
        heads,
        ..plain_attention(d, 0.125, position, &pages)
    };
    kernels().attention(
        &a,
        &q,
        heads * d,
        &mut AttentionScratch::default(),
        TileMut::whole(&mut out, heads * d),
    );
    let wide = |h: u16| f64::from(f16_to_f32(h));
    for (i, (q, out)) in q.chunks(d).zip(out.chunks(d)).enumerate() {
        let limit = position + i / heads + 1;
        let weights: Vec<f64> = (0..limit)
            .map(|p| {
                (0..d)
                    .map(|j| f64::from(q[j]) * wide(keys[p * d + j]))
                    .sum::<f64>()
                    * 0.125
            })
            .map(libm::exp)
            .collect();
        let sum: f64 = weights.iter().sum();
        for j in 0..d {
            let wanted = (0..limit)
                .map(|p| weights[p] * wide(vals[p * d + j]))
                .sum::<f64>()
                / sum;
            assert!(
                (f64::from(out[j]) - wanted).abs() < 2e-6,
                "{} and {wanted}",
                out[j]
            );
        }
    }
}

#[test]
fn matrices_that_cannot_be_packed_are_refused() {
    use WeightType as T;
    let (none, bytes): (&[u8], &[u8]) = (&[], &[0; 34 * 4]);
    let refused = |ty, rows, cols, bytes| {
        let packed = Packed::pack_stacked(&mut Arena::default(), &[matrix(ty, rows, cols, bytes)]);
        format!("{:?}", packed.unwrap_err())
    };
    for (ty, rows, cols, bytes, error) in [
        (T::Q8_0, 1, 33, bytes, "Columns { cols: 33, block: 32 }"),
        (T::Q4_K, 1, 128, bytes, "Columns { cols: 128, block: 256 }"),
        (T::Q8_0, 2, 32, bytes, "Length { expected: 68, found: 136 }"),
        (T::F32, 0, 32, none, "NoRows"),
        (T::F32, usize::MAX, 32, bytes, "TooLarge"),
    ] {
        assert_eq!(refused(ty, rows, cols, bytes), error);
    }
    let (part, other) = (matrix(T::Q8_0, 4, 32, bytes), matrix(T::F16, 68, 1, bytes));
    let stacked = Packed::pack_stacked(&mut Arena::default(), &[part, part]);
    assert!(matches!(stacked, Err(PackError::PartialPanel(4))));
    let gated = Packed::pack_gate_up(&mut Arena::default(), &part, &other);
    assert!(matches!(gated, Err(PackError::Mismatch)));
}

#[test]
fn stacking_equals_packing_the_concatenation() {
    let ty = WeightType::Q4_1;
    let mut values = Values(9);
    let (a, b) = (
        values.weights(ty, 32, 64, Kind::Ordinary),
        values.weights(ty, 20, 64, Kind::Ordinary),
    );
    let mut arena = Arena::with_capacity(3 << 20).unwrap();
    let both = [matrix(ty, 32, 64, &a), matrix(ty, 20, 64, &b)];
    let stacked = Packed::pack_stacked(&mut arena, &both).unwrap();
    let joined = [a, b].concat();
    let whole = Packed::pack_stacked(&mut arena, &[matrix(ty, 52, 64, &joined)]).unwrap();
    assert_eq!(stacked.data(), whole.data());
    assert_eq!(stacked.data().as_ptr().align_offset(64), 0);
}
