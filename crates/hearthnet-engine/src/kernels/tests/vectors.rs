//! Checks that the kernels reproduce the test values of specs/canonical-arithmetic.md, sections 5 to 15,
//! and that the specification states them.

use hearthnet_files::blocks::WeightType;
use hearthnet_files::floats::{f16_to_f32, f32_to_f16};
use hearthnet_files::spec::{CacheDtype, RopeKind, YarnSpec};
use sha2::{Digest, Sha256};

use super::super::*;
use super::values::{
    activations, all_kernels, fields, matrix, packed_matrix, plain_attention, product,
};

const SPEC: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../specs/canonical-arithmetic.md"
));

fn assert_in_spec(line: &str) {
    assert!(
        SPEC.lines().any(|l| l.contains(line)),
        "the specification lacks {line:?}"
    );
}

#[test]
fn the_exponentials_of_the_specification_hold() {
    for kernels in all_kernels() {
        for (x, bits) in [
            (0.0f32, 0x3f80_0000u32),
            (1.0, 0x402d_f854),
            (-1.0, 0x3ebc_5ab2),
            (0.5, 0x3fd3_094c),
            (f32::from_bits(0x3eb1_7218), 0x3fb5_04f3),
            (-20.0, 0x310d_a433),
            (-86.9, 0x00c6_0f89),
            (88.0, 0x7ef8_82b7),
        ] {
            let mut y = [x];
            kernels.exp(&mut y);
            assert_eq!(y[0].to_bits(), bits, "exp({x}) on {}", kernels.isa());
            assert_in_spec(&format!("| `{:08x}` | `{bits:08x}` |", x.to_bits()));
        }
    }
}

#[test]
fn the_rotation_table_has_the_digest_of_the_specification() {
    let mut table = RopeTable::new(RopeKind::Interleaved, RopeTable::frequencies(64, 1e5), 1.0);
    table.cover(8192);
    let mut hash = Sha256::new();
    for position in 0..8192 {
        let row = table.row(position);
        for (i, (c, s)) in row.cos.iter().zip(row.sin).enumerate() {
            hash.update(c.to_le_bytes());
            hash.update(s.to_le_bytes());
            if [(1, 0), (1, 1), (100, 5), (8191, 31)].contains(&(position, i)) {
                let (c, s) = (c.to_bits(), s.to_bits());
                assert_in_spec(&format!("| {position} | {i} | `{c:08x}` | `{s:08x}` |"));
            }
        }
    }
    let digest: String = hex::encode(hash.finalize());
    assert_in_spec(&format!("`{digest}`"));
}

#[test]
fn the_clamped_gates_of_the_specification_hold() {
    for kernels in all_kernels() {
        for (g, u) in [
            (1.0f32, 2.0f32),
            (-3.0, 0.5),
            (8.0, -9.0),
            (20.0, 20.0),
            (-60.0, 1.0),
        ] {
            let mut out = [g];
            kernels.gate(hearthnet_files::spec::Activation::Clamped, &mut out, &[u]);
            assert_in_spec(&format!("| {g} | {u} | `{:08x}` |", out[0].to_bits()));
        }
    }
}

#[test]
fn the_sigmoids_and_softplus_of_the_specification_hold() {
    for kernels in all_kernels() {
        for x in [1.0f32, -2.0, 25.0, -30.0] {
            let mut sigmoid = [x];
            kernels.sigmoid(&mut sigmoid);
            let (sigmoid, softplus) = (sigmoid[0].to_bits(), softplus(x).to_bits());
            assert_in_spec(&format!("| {x} | `{sigmoid:08x}` | `{softplus:08x}` |"));
        }
    }
}

#[test]
fn the_norms_of_heads_of_the_specification_hold() {
    let head: Vec<f32> = (0..20).map(|i| (i as f32 - 9.0) / 4.0).collect();
    for kernels in all_kernels() {
        let (mut key, mut query) = (head.clone(), head.clone());
        kernels.l2_norm(&mut key, 20, 1e-6, 1.0);
        kernels.l2_norm(&mut query, 20, 1e-6, 1.0 / 20f32.sqrt());
        let [k, q, last] = [key[0], query[0], query[19]].map(f32::to_bits);
        assert_in_spec(&format!("`{k:08x}` as a key, and `{q:08x}` as a query"));
        assert_in_spec(&format!("x[19] becomes `{last:08x}`"));
    }
}

#[test]
fn the_layer_norm_of_the_specification_holds() {
    let x: Vec<f32> = (0..20).map(|i| (i * i % 13) as f32 / 4.0).collect();
    let w: Vec<f32> = (0..20).map(|i| (8 + i) as f32 / 8.0).collect();
    let b: Vec<f32> = (0..20).map(|i| (i as f32 - 10.0) / 16.0).collect();
    for kernels in all_kernels() {
        let mut y = x.clone();
        kernels.layer_norm_in_place(&mut y, &w, &b, 1e-12);
        let [first, last] = [y[0], y[19]].map(f32::to_bits);
        assert_in_spec(&format!("y[0] is `{first:08x}`, y[19] is `{last:08x}`"));
    }
}

#[test]
fn gelu_by_the_error_function_has_the_values_of_the_specification() {
    for kernels in all_kernels() {
        for x in [0.0f32, 1.0, -2.0, 5.0, -9.0] {
            let mut y = [x];
            kernels.gelu_erf(&mut y);
            assert_in_spec(&format!("| {x} | `{:08x}` |", y[0].to_bits()));
        }
    }
}

#[test]
fn the_window_on_both_sides_of_the_specification_holds() {
    let cells = |of: &dyn Fn(usize, usize) -> f32| -> Vec<u16> {
        let cells = (0..3).flat_map(|t| (0..8).map(move |i| (t, i)));
        cells.map(|(t, i)| f32_to_f16(of(t, i))).collect()
    };
    let keys = cells(&|t, i| (((3 * t + i) % 5) as f32 - 2.0) / 2.0);
    let values = cells(&|t, i| (t + i) as f32 / 8.0);
    let q: Vec<f32> = (0..8).map(|i| (i as f32 - 3.0) / 4.0).collect();
    let mut page = vec![0u16; page_len(8, CacheDtype::F16)];
    for t in 0..3 {
        let row = 8 * t..8 * t + 8;
        write_kv(&mut page, t, &keys[row.clone()], &values[row]);
    }
    for kernels in all_kernels() {
        for window in [None, Some(2)] {
            let pages = [&page[..]];
            let attention = Attention {
                window,
                both_sides: Some(3),
                ..plain_attention(8, f32::from_bits(0x3eb5_04f3), 0, &pages)
            };
            let (mut out, mut scratch) = (vec![0.0; 8], AttentionScratch::default());
            let tile = TileMut::new(&mut out, 1, 8, 8);
            kernels.attention(&attention, &q, 8, &mut scratch, tile);
            let window = window.map_or("none".to_owned(), |w: usize| w.to_string());
            assert_in_spec(&format!("| {window} | `{:08x}` |", out[0].to_bits()));
        }
    }
}

#[test]
fn the_convolution_of_the_specification_holds() {
    let window: Vec<f32> = (-3..4).map(|p| (p.max(-1) as f32 + 1.0) / 3.0).collect();
    for kernels in all_kernels() {
        let convolution = Convolution {
            weights: &[0.1, -0.2, 0.3, 0.4],
            stride: 1,
            positions: 4,
            channels: 1,
        };
        let mut out = [0.0; 4];
        kernels.convolve(&convolution, &window, &mut out);
        let sums = out.map(f32::to_bits);
        kernels.silu(&mut out);
        for (p, (sum, out)) in sums.into_iter().zip(out.map(f32::to_bits)).enumerate() {
            assert_in_spec(&format!("| {p} | `{sum:08x}` | `{out:08x}` |"));
        }
    }
}

#[test]
fn the_short_convolution_of_the_specification_holds() {
    let rows = 0..4;
    let mut window = vec![0.0; 2];
    window.extend(
        rows.clone()
            .map(|p| (p + 1) as f32 / 3.0 * ((2 - p) as f32 / 5.0)),
    );
    for kernels in all_kernels() {
        let convolution = Convolution {
            weights: &[0.1, -0.2, 0.3],
            stride: 1,
            positions: 3,
            channels: 1,
        };
        let mut out = [0.0; 4];
        kernels.convolve(&convolution, &window, &mut out);
        for (p, (u, c)) in rows.clone().zip(window[2..].iter().zip(out)) {
            let o = (p + 2) as f32 / 7.0 * c;
            let [u, c, o] = [*u, c, o].map(f32::to_bits);
            assert_in_spec(&format!("| {p} | `{u:08x}` | `{c:08x}` | `{o:08x}` |"));
        }
    }
}

/// Three rows of two values each: of the index of a value, and of a row.
fn rows(value: fn(f32, f32) -> f32) -> Vec<f32> {
    let rows = (0..3).flat_map(|p| (0..2).map(move |i| (i as f32, p as f32)));
    rows.map(|(i, p)| value(i, p)).collect()
}

#[test]
fn the_recurrence_of_the_specification_holds() {
    let (keys, queries) = (
        rows(|i, p| (i + p + 1.0) / 5.0),
        rows(|i, p| (2.0 - i + p) / 7.0),
    );
    for kernels in all_kernels() {
        let (mut state, mut out) = ([0.0; 4], rows(|j, p| (p + 1.0) / (j + 3.0)));
        let all = DeltaRows {
            queries: &queries,
            keys: &keys,
            decay: &[1.0, 0.5, 1.0 / 3.0],
            beta: &[1.0 / 3.0, 2.0 / 3.0, 1.0],
        };
        kernels.delta_rule(&all, &mut state, &mut out);
        for out in out.chunks(2) {
            let [a, b] = [out[0], out[1]].map(f32::to_bits);
            assert_in_spec(&format!("| `{a:08x}` | `{b:08x}` |"));
        }
    }
}

#[test]
fn the_scan_of_mamba_2_of_the_specification_holds() {
    let (write, read) = (
        rows(|i, p| (i + p + 1.0) / 5.0),
        rows(|i, p| (2.0 - i + p) / 7.0),
    );
    let values = rows(|j, p| (p + 1.0) / (j + 3.0));
    let steps = [1.0 / 3.0, 2.0 / 3.0, 1.0];
    for kernels in all_kernels() {
        let (mut state, mut out) = ([0.0; 4], values.clone());
        let all = MambaRows {
            write: &write,
            read: &read,
            decay: &[1.0, 0.5, 1.0 / 3.0],
            steps: &steps,
            skip: 0.5,
        };
        kernels.mamba_scan(&all, &mut state, &mut out);
        let rows = values.chunks(2).zip(out.chunks(2)).zip(steps);
        for (p, ((values, out), step)) in rows.enumerate() {
            let bits = |x: f32| format!("`{:08x}`", x.to_bits());
            let [a, b] = [values[0] * step, values[1] * step].map(bits);
            let [c, d] = [out[0], out[1]].map(bits);
            assert_in_spec(&format!("| {p} | {a} | {b} | {c} | {d} |"));
        }
        let mut squares = [-2.0, 1.5];
        kernels.squared_relu(&mut squares);
        let [a, b] = squares.map(f32::to_bits);
        assert_in_spec(&format!("relu2(-2) is `{a:08x}`, relu2(1.5) is `{b:08x}`"));
    }
}

#[test]
fn the_stretched_rotations_of_the_specification_hold() {
    let amplitude = YarnSpec::usual_amplitude(32.0, 0.0);
    assert_in_spec(&format!("amplitude {amplitude}"));
    for (whole, pairs) in [(false, &[5, 9, 12, 31][..]), (true, &[9, 12])] {
        let yarn = YarnSpec {
            factor: 32.0,
            original: 4096,
            fast: 32.0,
            slow: 1.0,
            whole,
            amplitude,
        };
        let mut frequencies = RopeTable::frequencies(64, 150_000.0);
        RopeTable::stretch(&mut frequencies, 150_000.0, &yarn);
        let mut table = RopeTable::new(RopeKind::NeoX, frequencies, amplitude);
        table.cover(1001);
        let row = table.row(1000);
        for &pair in pairs {
            let (c, s) = (row.cos[pair].to_bits(), row.sin[pair].to_bits());
            assert_in_spec(&format!("| {whole} | {pair} | `{c:08x}` | `{s:08x}` |"));
        }
    }
}

#[test]
fn the_quantised_block_of_the_specification_holds() {
    let x: Vec<f32> = (0..32).map(|j| ((7 * j % 32) - 15) as f32 / 10.0).collect();
    let u = |j: usize| ((5 * j + 3) % 16) as u8;
    let mut block = vec![0x66, 0x2e, 0x00, 0xba];
    block.extend((0..16).map(|j| u(j) | (u(j + 16) << 4)));
    let packed = packed_matrix(&matrix(WeightType::Q4_1, 1, 32, &block));
    for kernels in all_kernels() {
        let (act, out) = (
            activations(kernels, &packed, &x),
            product(kernels, &packed, &x),
        );
        let (q, meta) = (&act.quants, act.meta[0]);
        let sum: i32 = q.iter().map(|q| i32::from(*q)).sum();
        let integer: i32 = (0..32).map(|j| i32::from(u(j)) * i32::from(q[j])).sum();
        assert_in_spec(&format!("| d | `{:08x}` |", meta.d.to_bits()));
        assert_in_spec(&format!("| S | {sum} |"));
        assert_in_spec(&format!("| {}, {}, {}, {} |", q[0], q[1], q[2], q[3]));
        assert_in_spec(&format!("| I | {integer} |"));
        assert_in_spec(&format!("| acc | `{:08x}` |", out[0].to_bits()));
    }
}

#[test]
fn the_blocks_of_every_type_in_the_specification_hold() {
    for ty in WeightType::ALL {
        let cols = ty.inputs().max(32);
        let x: Vec<f32> = (0..cols)
            .map(|j| ((7 * j % 61) as f32 - 30.0) / 10.0)
            .collect();
        let bytes: Vec<u8> = if ty.quantised() {
            let mut block: Vec<u8> = (0..ty.file_block()).map(|i| (37 * i + 11) as u8).collect();
            for (at, field) in fields(ty).iter().zip([0x2e66u16, 0xba00]) {
                block[*at..at + 2].copy_from_slice(&field.to_le_bytes());
            }
            if ty == WeightType::MXFP4 {
                block[0] = 125;
            }
            block
        } else {
            // Weights that all three types represent exactly.
            let weights = (0..cols).map(|j| ((11 * j % 32) as f32 - 16.0) / 16.0);
            let bytes = |w: f32| match ty {
                WeightType::F32 => w.to_le_bytes().to_vec(),
                WeightType::F16 => f32_to_f16(w).to_le_bytes().to_vec(),
                _ => half::bf16::from_f32(w).to_le_bytes().to_vec(),
            };
            weights.flat_map(bytes).collect()
        };
        let packed = packed_matrix(&matrix(ty, 1, cols, &bytes));
        let mut weights = vec![f32::NAN; cols];
        packed.dequantise_row(0, &mut weights);
        for kernels in all_kernels() {
            let out = product(kernels, &packed, &x);
            let [first, last, acc] = [weights[0], weights[cols - 1], out[0]].map(f32::to_bits);
            assert_in_spec(&format!(
                "| {ty:?} | `{first:08x}` | `{last:08x}` | `{acc:08x}` |"
            ));
        }
    }
}

#[test]
fn the_absorbed_latent_attention_of_the_specification_holds() {
    let (keys, dims, values) = (8usize, 8usize, 2usize);
    let width = keys + dims;
    let f32_bytes = |rows: usize, of: &dyn Fn(usize, usize) -> f32| -> Vec<u8> {
        let cells = (0..rows).flat_map(|row| (0..keys).map(move |i| (row, i)));
        cells
            .flat_map(|(row, i)| of(row, i).to_le_bytes())
            .collect()
    };
    let key_up = f32_bytes(keys, &|c, i| (((c + 2 * i) % 7) as f32 - 3.0) / 4.0);
    let value_up = f32_bytes(values, &|j, i| (i as f32 - 2.0 * j as f32) / 8.0);
    let range = |of: &dyn Fn(f32) -> f32| -> Vec<f32> { (0..8).map(|i| of(i as f32)).collect() };
    let (still, rotated) = (range(&|i| (i - 2.0) / 4.0), range(&|i| (3.0 - i) / 8.0));
    for kernels in all_kernels() {
        let multiply = |bytes: &[u8], rows: usize, x: &[f32]| -> Vec<f32> {
            let packed = packed_matrix(&matrix(WeightType::F32, rows, keys, bytes));
            product(kernels, &packed, x)
        };
        let query = [multiply(&key_up, keys, &still), rotated.clone()].concat();
        let mut page = vec![0u16; page_len(width, CacheDtype::F16)];
        let mut scores = Vec::new();
        for t in 0..2 {
            let row = range(&|i| (((5 * t + 3 * i as usize) % 7) as f32 - 2.0) / 3.0);
            let turned = range(&|i| (t as f32 - i) / 8.0);
            let (key, value) = ([&row[..], &turned].concat(), [&row[..], &[0.0; 8]].concat());
            let shared = SharedMut::new(&mut page);
            // SAFETY: there is one thread.
            unsafe { kernels.store_kv(shared, CacheDtype::F16, t, &key, &value) };
            let cached = key.iter().map(|k| f16_to_f32(f32_to_f16(*k)));
            let sum = cached
                .zip(&query)
                .fold(0.0, |acc, (k, q)| k.mul_add(*q, acc));
            scores.push(sum * 0.25);
        }
        let pages = [&page[..]];
        let attention = plain_attention(width, 0.25, 1, &pages);
        let (mut out, mut scratch) = (vec![0.0; width], AttentionScratch::default());
        let tile = TileMut::new(&mut out, 1, width, width);
        kernels.attention(&attention, &query, width, &mut scratch, tile);
        assert_eq!(out[keys..], [0.0; 8]);
        let a = multiply(&value_up, values, &out[..keys]);
        let told = [query[0], query[7], scores[0], scores[1], out[0], a[0], a[1]];
        let told: Vec<String> = told
            .iter()
            .map(|x| format!("`{:08x}`", x.to_bits()))
            .collect();
        assert_in_spec(&format!("| {} |", told.join(" | ")));
    }
}

#[test]
fn the_cache_of_8_bits_of_the_specification_holds() {
    let row = |of: &dyn Fn(usize) -> f32| -> Vec<f32> { (0..32).map(of).collect() };
    let keys = |t: usize| row(&|i| ((7 * i + 5 * t) % 32) as f32 / 10.0 - 1.5);
    let values = |t: usize| row(&|i| ((3 * i + t) % 11) as f32 / 7.0);
    let q = row(&|i| (i as f32 - 15.0) / 16.0);
    let cache = CacheDtype::Q8_0;
    for kernels in all_kernels() {
        let mut page = vec![0u16; page_len(32, cache)];
        for t in 0..3 {
            let shared = SharedMut::new(&mut page);
            // SAFETY: there is one thread.
            unsafe { kernels.store_kv(shared, cache, t, &keys(t), &values(t)) };
            let (quants, scales) = page.split_at(PAGE * 32);
            let quants: &[i8] = bytemuck::cast_slice(quants);
            let (k, v) = (key_cell(1, t, 0), value_cell(1, t, 0));
            let [k, v] = [scales[k], scales[v]].map(|scale| u32::from(scale) << 16);
            let first = |cell: fn(usize, usize, usize) -> usize| quants[cell(32, t, 0)];
            let last = |cell: fn(usize, usize, usize) -> usize| quants[cell(32, t, 31)];
            assert_in_spec(&format!(
                "| {t} | `{k:08x}` | {}, {} | `{v:08x}` | {}, {} |",
                first(key_cell),
                last(key_cell),
                first(value_cell),
                last(value_cell)
            ));
        }
        let pages = [&page[..]];
        let attention = Attention {
            cache,
            ..plain_attention(32, 0.25, 2, &pages)
        };
        let (mut out, mut scratch) = (vec![0.0; 32], AttentionScratch::default());
        let tile = TileMut::new(&mut out, 1, 32, 32);
        kernels.attention(&attention, &q, 32, &mut scratch, tile);
        let [first, last] = [out[0], out[31]].map(f32::to_bits);
        assert_in_spec(&format!("o[0] is `{first:08x}`, o[31] is `{last:08x}`"));
    }
}
