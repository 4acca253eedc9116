//! The text of the kernels, run thread by thread on a processor, gives the bytes of the engine.
//!
//! No card is needed, and none is shown to do so.

use crate::emulation::{Card, Program};
use crate::values::{KINDS, Kind, Values, assert_same, bytes, floats, ints, nothing};
use hearthnet_cuda::launch::{self, Cache, Heads, Launch, Quantised, Weights};
use hearthnet_model::kernels::{
    Act, ActForm, Arena, Attention, AttentionScratch, Isa, Kernels, Matrix, Output, PAGE, Packed,
    RopeTable, Tile, TileMut, WeightType, f32_to_f16, key_cell, page_len, value_cell,
};
use hearthnet_model::spec::Activation;
use hearthnet_model::{BoundaryDtype, RopeKind};
use proptest::prelude::*;

/// The scalar reference.
fn engine() -> Kernels {
    Kernels::new(Isa::Portable).unwrap()
}

fn card(seed: u64) -> Card<'static> {
    let mut card = Program::of_this_crate().card();
    card.seed = seed as u32;
    card
}

/// Launches over some buffers, of which the last one is returned.
fn run(seed: u64, launches: &[Launch<usize>], mut buffers: Vec<Vec<u8>>) -> Vec<f32> {
    let mut card = card(seed);
    for launch in launches {
        card.run(launch, &mut buffers);
    }
    floats(&buffers.pop().unwrap())
}

fn pack(matrix: &Matrix<'_>) -> Packed {
    Packed::pack(&mut Arena::default(), matrix).unwrap()
}

fn kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(KINDS.to_vec())
}

type Product = fn(Weights<usize>, Quantised<usize>, usize, usize) -> launch::Result<usize>;

/// A few cases. Those that fail are told, and not kept in a file.
fn few() -> ProptestConfig {
    ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Section 6.2 of the specification.
fn quantise(x: &[f32]) -> (Vec<i8>, f32, [i32; 2]) {
    let m = x.iter().fold(0f32, |m, x| m.max(x.abs()));
    let (quants, d) = if !x.iter().all(|x| x.is_finite()) {
        (vec![0; 32], f32::NAN)
    } else if m < 1e-30 {
        (vec![0; 32], 0.0)
    } else {
        let r = f64::from(127.0 / m);
        let quant = |x: &f32| (f64::from(*x) * r).round_ties_even() as i8;
        (x.iter().map(quant).collect(), m / 127.0)
    };
    let sum = |quants: &[i8]| quants.iter().map(|q| i32::from(*q)).sum();
    let sums = [sum(&quants[..16]), sum(&quants[16..])];
    (quants, d, sums)
}

#[test]
fn every_matrix_of_every_type_agrees() {
    for ty in WeightType::ALL {
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(6));
        let shapes = (
            1usize..=40,
            1usize..=3,
            1usize..=41,
            kind(),
            kind(),
            any::<u64>(),
        );
        let agrees = |(outputs, blocks, rows, weights_kind, kind, seed)| {
            matrix_agrees(ty, (outputs, blocks, rows), (weights_kind, kind), seed);
            Ok(())
        };
        runner.run(&shapes, agrees).unwrap();
    }
}

/// One matrix, as product of few and of many rows, and as embedding.
fn matrix_agrees(
    ty: WeightType,
    (outputs, blocks, rows): (usize, usize, usize),
    (weights_kind, kind): (Kind, Kind),
    seed: u64,
) {
    let mut values = Values(seed);
    let inputs = match (ty.quantised(), ty.inputs()) {
        (false, _) => 1 + values.below(100),
        // More blocks than the kernel keeps in shared memory at a time, now and then.
        (true, 32) => 32 * [1, 7, 31, 33, 64, 65][values.below(6)],
        (true, inputs) => inputs * (blocks + 2 * values.below(3)),
    };
    let file = values.weights(ty, outputs, inputs, weights_kind);
    let packed = pack(&Matrix {
        weight_type: ty,
        rows: outputs,
        cols: inputs,
        bytes: &file,
    });
    let x = values.many(rows * inputs, kind);
    let mut act = Act::default();
    engine().prepare(&x, inputs, ActForm::of([&packed]), &mut act);
    let mut wanted = vec![0.0; rows * outputs];
    let out = TileMut::whole(&mut wanted, outputs);
    engine().matmul(&packed, 0..packed.panels(), &act, Output::Store, out);

    let weights = Weights {
        buffer: 0,
        weight_type: ty,
        outputs,
        inputs,
    };
    let data = packed.data().to_vec();
    if ty.quantised() {
        let act = Quantised {
            quants: 2,
            scales: 3,
            sums: 4,
        };
        // Few rows suffice for the kernel that takes them one by one.
        for (rows, product) in [
            (rows.min(3), launch::matvec::<usize> as Product),
            (rows, launch::matmul),
        ] {
            let quantised = launch::quantise(1, rows, inputs, act).unwrap();
            let product = product(weights, act, rows, 5).unwrap();
            let blocks = rows * inputs / 32;
            let buffers = vec![
                data.clone(),
                bytes(&x),
                vec![0xff; 32 * blocks],
                nothing(blocks),
                nothing(2 * blocks),
                nothing(rows * outputs),
            ];
            let got = run(seed, &[quantised, product.clone()], buffers);
            assert_same(&product.kernel, &got, &wanted[..rows * outputs]);
        }
    } else {
        let product = launch::plain(weights, 1, rows, 2).unwrap();
        let buffers = vec![data.clone(), bytes(&x), nothing(rows * outputs)];
        assert_same(
            &product.kernel,
            &run(seed, std::slice::from_ref(&product), buffers),
            &wanted,
        );
    }

    let mut tokens: Vec<i32> = (0..rows).map(|_| values.below(outputs) as i32).collect();
    let mut wanted = vec![0.0; rows * inputs];
    for (token, row) in tokens.iter().zip(wanted.chunks_mut(inputs)) {
        packed.dequantise_row(*token as usize, row);
    }
    if rows > 1 {
        tokens[0] = [-1, outputs as i32, i32::MAX][values.below(3)];
        wanted[..inputs].fill(f32::NAN);
    }
    let embed = launch::embed(weights, 1, rows, 2).unwrap();
    let buffers = vec![data, ints(tokens), nothing(rows * inputs)];
    assert_same(
        &embed.kernel,
        &run(seed, std::slice::from_ref(&embed), buffers),
        &wanted,
    );
}

proptest! {
    #![proptest_config(few())]

    #[test]
    fn activations_are_quantised_as_the_specification_says(
        rows in 1usize..=3, blocks in 1usize..=9, kind in kind(), seed: u64,
    ) {
        let mut values = Values(seed);
        let x = values.many(32 * rows * blocks, kind);
        let act = Quantised { quants: 1, scales: 2, sums: 3 };
        let launch = launch::quantise(0, rows, 32 * blocks, act).unwrap();
        let all = rows * blocks;
        let mut buffers = vec![bytes(&x), vec![0xff; 32 * all], nothing(all), nothing(2 * all)];
        card(seed).run(&launch, &mut buffers);
        let (mut quants, mut scales, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        for x in x.chunks(32) {
            let (q, d, s) = quantise(x);
            quants.extend(q.iter().map(|q| *q as u8));
            scales.push(d);
            sums.extend(s);
        }
        assert_eq!(buffers[1], quants);
        assert_same("scales", &floats(&buffers[2]), &scales);
        assert_eq!(buffers[3], ints(sums));
    }

    #[test]
    fn norms_agree(cols in 1usize..=700, rows in 1usize..=3, kind in kind(), in_place: bool, seed: u64) {
        let mut values = Values(seed);
        let x = values.many(rows * cols, kind);
        let w = values.many(cols, Kind::Ordinary);
        let eps = [1e-5, 0.0][values.below(2)];
        let mut wanted = x.clone();
        engine().rms_norm_in_place(&mut wanted, &w, eps);
        let (x, w) = (bytes(&x), bytes(&w));
        let (launch, buffers) = if in_place {
            (launch::rms_norm(1, 0, eps, rows, cols, 1), vec![w, x])
        } else {
            (launch::rms_norm(0, 1, eps, rows, cols, 2), vec![x, w, nothing(rows * cols)])
        };
        assert_same("norm", &run(seed, &[launch.unwrap()], buffers), &wanted);
    }

    #[test]
    fn rotations_agree(
        heads in 1usize..=5, eights in 1usize..=10, position in 0usize..200, rows in 1usize..=3,
        halves: bool, kind in kind(), seed: u64,
    ) {
        let mut values = Values(seed);
        let head_dim = 8 * eights;
        let pairs = 1 + values.below(head_dim / 2);
        let kind_of_pairs = if halves { RopeKind::Halves } else { RopeKind::Interleaved };
        let mut table = RopeTable::new(kind_of_pairs, RopeTable::frequencies(2 * pairs, 1e4), 1.0);
        table.cover(position + rows);
        let x = values.many(rows * heads * head_dim, kind);
        let mut wanted = x.clone();
        for (row, x) in wanted.chunks_mut(heads * head_dim).enumerate() {
            engine().rope(&table, position + row, x, head_dim);
        }
        let angles = (0..position + rows).map(|p| table.angles(p).unwrap());
        let (cosines, sines): (Vec<_>, Vec<_>) = angles.unzip();
        let shape = Heads { heads, kv_heads: heads, head_dim, position, rows, window: None };
        let launch = launch::rope(2, (0, 1), kind_of_pairs, heads, pairs, &shape).unwrap();
        let buffers = vec![bytes(&cosines.concat()), bytes(&sines.concat()), bytes(&x)];
        assert_same("rotation", &run(seed, &[launch], buffers), &wanted);
    }

    #[test]
    fn what_is_done_value_by_value_agrees(n in 1usize..=300, rows in 1usize..=3, kind in kind(), seed: u64) {
        let mut values = Values(seed);
        let all = rows * n;
        let spread = [1.0, 30.0, 200.0][values.below(3)];
        let x: Vec<f32> = values.many(all, kind).iter().map(|x| x * spread).collect();
        let u = values.many(all, kind);
        let factor = values.one(Kind::Ordinary);
        let one = |launch: launch::Result<usize>| run(seed, &[launch.unwrap()], vec![bytes(&u), bytes(&x)]);

        for activation in [Activation::Silu, Activation::Gelu, Activation::Clamped] {
            let mut wanted = x.clone();
            engine().gate(activation, &mut wanted, &u);
            assert_same(&format!("{activation:?}"), &one(launch::gate(1, 0, activation, all)), &wanted);
        }
        for dtype in BoundaryDtype::ALL {
            let mut wanted = x.clone();
            engine().add_round(&mut wanted, &u, dtype);
            assert_same("sum", &one(launch::add_round(1, 0, dtype, rows, n, false)), &wanted);
            let mut wanted = x.clone();
            for row in wanted.chunks_mut(n) {
                engine().add_round(row, &u[..n], dtype);
            }
            assert_same("bias", &one(launch::add_round(1, 0, dtype, rows, n, true)), &wanted);
            let mut wanted: Vec<f32> = x.iter().map(|x| x * factor).collect();
            dtype.round(&mut wanted);
            assert_same("factor", &one(launch::multiply(1, factor, dtype, all)), &wanted);
        }
        let wanted: Vec<f32> = x.iter().map(|x| x / factor).collect();
        assert_same("quotient", &one(launch::divide(1, factor, all)), &wanted);
        let mut wanted = x.clone();
        engine().softcap(&mut wanted, 30.0);
        assert_same("softcap", &one(launch::softcap(1, 30.0, all)), &wanted);
        let mut wanted = x.clone();
        engine().add_scaled(&mut wanted, &u, factor);
        assert_same("expert", &one(launch::add_scaled(1, 0, factor, all)), &wanted);

        let marks: Vec<i32> = x.chunks(n).map(|x| i32::from(!engine().all_finite(x))).collect();
        let mut buffers = vec![bytes(&x), ints(vec![0; rows])];
        card(seed).run(&launch::mark_overflow(0, rows, n, 1).unwrap(), &mut buffers);
        assert_eq!(buffers[1], ints(marks));
    }

    #[test]
    fn attention_agrees(
        kv_heads in 1usize..=2, group in 1usize..=3, eights in 1usize..=5,
        position in prop_oneof![2 => 0usize..120, 1 => 290usize..400],
        rows in 1usize..=3, window in prop::option::weighted(0.3, 1usize..150), cap in prop::option::of(Just(20f32)),
        sinks: bool, kind in kind(), seed: u64,
    ) {
        let mut values = Values(seed);
        let (heads, head_dim) = (kv_heads * group, 8 * eights);
        let shape = Heads { heads, kv_heads, head_dim, position, rows, window };
        let end = position + rows;
        let (per_head, page) = (shape.pages(), page_len(head_dim));

        // Pages of other sequences lie between those of this one, and cells beyond the end are NaN.
        let pages = 2 * kv_heads * per_head + 1;
        let mut order: Vec<usize> = (0..pages).collect();
        (1..pages).rev().for_each(|i| order.swap(i, values.below(i + 1)));
        let table: Vec<i32> = order[..kv_heads * per_head].iter().map(|page| *page as i32).collect();
        let mut cells = vec![0x7e00u16; pages * page];
        let width = kv_heads * head_dim;
        let keys = values.many(end * width, kind);
        let mixed = values.many(end * width, kind);
        let mut put = |p: usize| {
            for head in 0..kv_heads {
                let page = page * table[head * per_head + p / PAGE] as usize;
                for i in 0..head_dim {
                    let from = p * width + head * head_dim + i;
                    cells[page + key_cell(head_dim, p % PAGE, i)] = f32_to_f16(keys[from]);
                    cells[page + value_cell(head_dim, p % PAGE, i)] = f32_to_f16(mixed[from]);
                }
            }
            cells.clone()
        };
        // The rows' own positions are written by the card.
        let before = (0..position).map(&mut put).last();
        let after = (position..end).map(&mut put).last().unwrap();
        let before = before.unwrap_or_else(|| vec![0x7e00; pages * page]);

        let scale = 1.0 / (head_dim as f32).sqrt();
        let q = values.many(rows * heads * head_dim, kind);
        let sinks = sinks.then(|| values.many(heads, kind));
        let mut wanted = vec![0.0; q.len()];
        for head in 0..kv_heads {
            let columns = head * group * head_dim;
            let own: Vec<&[u16]> = table[head * per_head..][..per_head]
                .iter()
                .map(|number| &after[page * *number as usize..][..page])
                .collect();
            let attention = Attention {
                head_dim,
                heads: group,
                scale,
                softcap: cap,
                sinks: sinks.as_ref().map(|sinks| &sinks[head * group..][..group]),
                position,
                window,
                pages: &own,
            };
            let all = heads * head_dim;
            let tile = Tile::new(&q[columns..], rows, group * head_dim, all);
            let out = TileMut::new(&mut wanted[columns..], rows, group * head_dim, all);
            engine().attention(&attention, tile, &mut AttentionScratch::default(), out);
        }

        let stride = end + values.below(40);
        let cells_bytes = |cells: &[u16]| cells.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>();
        let mut buffers = vec![
            bytes(&q),
            bytes(&keys[position * width..]),
            bytes(&mixed[position * width..]),
            ints(table),
            cells_bytes(&before),
            nothing(rows * heads * stride),
            sinks.as_ref().map(|sinks| bytes(sinks)).unwrap_or_default(),
            nothing(rows * heads),
            nothing(rows * heads * head_dim),
        ];
        let cache = Cache { cells: 4, pages, table: 3, table_pages: per_head };
        let (scores, inverse) = ((5, stride), 7);
        let mut card = card(seed);
        card.run(&launch::store_kv(1, 2, &shape, cache).unwrap(), &mut buffers);
        let same = |a: &u16, b: &u16| half::f16::from_bits(*a).is_nan() && half::f16::from_bits(*b).is_nan() || a == b;
        let stored = buffers[4].as_chunks::<2>().0.iter().map(|c| u16::from_le_bytes(*c));
        assert!(stored.zip(&after).all(|(a, b)| same(&a, b)), "cells");
        for launch in [
            launch::attention_scores(0, &shape, (scale, cap), cache, scores),
            launch::attention_softmax(scores, &shape, sinks.as_ref().map(|_| 6), inverse),
            launch::attention_mix(scores, inverse, &shape, cache, 8),
        ] {
            card.run(&launch.unwrap(), &mut buffers);
        }
        assert_same("attention", &floats(&buffers[8]), &wanted);
    }
}

#[test]
fn pages_that_are_not_there_are_nan_and_never_touched() {
    let shape = Heads {
        heads: 1,
        kv_heads: 1,
        head_dim: 8,
        position: 0,
        rows: 1,
        window: None,
    };
    for page in [-1, 1, i32::MAX] {
        let cache = Cache {
            cells: 4,
            pages: 1,
            table: 3,
            table_pages: 1,
        };
        let cells = vec![0u8; 2 * page_len(8)];
        let mut buffers = vec![
            bytes(&[1.0; 8]),
            bytes(&[1.0; 8]),
            bytes(&[1.0; 8]),
            ints([page]),
            cells.clone(),
            nothing(1),
            nothing(1),
            bytes(&[1.0; 8]),
        ];
        let mut card = card(1);
        for launch in [
            launch::store_kv(1, 2, &shape, cache),
            launch::attention_scores(0, &shape, (1.0, None), cache, (5, 1)),
            launch::attention_softmax((5, 1), &shape, None, 6),
            launch::attention_mix((5, 1), 6, &shape, cache, 7),
        ] {
            card.run(&launch.unwrap(), &mut buffers);
        }
        assert_eq!(buffers[4], cells);
        assert!(floats(&buffers[7]).iter().all(|x| x.is_nan()));
    }
}
