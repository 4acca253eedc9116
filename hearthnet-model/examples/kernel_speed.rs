//! Speed of the matrix and attention kernels on one thread, for the shapes of a
//! small model (SmolLM2-135M): GB/s of weights for one row (decoding), billions of
//! multiply-adds per second for 64 rows (prefill).
//!
//! `cargo run --release -p hearthnet-model --example kernel_speed [-- avx2|avx512|portable]`

#![allow(clippy::print_stdout, clippy::expect_used)]

use std::time::{Duration, Instant};

use hearthnet_model::kernels::{
    Act, ActForm, Arena, Attention, AttentionScratch, Isa, Kernels, Matrix, Output, PAGE, Packed,
    Tile, TileMut, WeightType, page_len,
};

/// Name, outputs, inputs, and how often it stands in a row of 30 layers.
const SHAPES: [(&str, usize, usize); 5] = [
    ("qkv", 960, 576),
    ("attention output", 576, 576),
    ("gate+up", 3072, 576),
    ("down", 576, 1536),
    ("head", 49152, 576),
];

fn main() {
    let wanted = std::env::args().nth(1);
    for isa in Isa::available() {
        if wanted.as_deref().is_some_and(|name| name != isa.name()) {
            continue;
        }
        let kernels = Kernels::new(isa).expect("listed as available");
        for weight_type in WeightType::ALL {
            matrices(kernels, weight_type);
        }
        for depth in [0, 512, 2048] {
            attention(kernels, depth);
        }
    }
}

/// Repeats `work` for a while and gives the time of the fastest call.
fn fastest(mut work: impl FnMut()) -> Duration {
    let started = Instant::now();
    let mut best = Duration::MAX;
    while started.elapsed() < Duration::from_millis(300) {
        let call = Instant::now();
        work();
        best = best.min(call.elapsed());
    }
    best
}

fn matrices(kernels: Kernels, weight_type: WeightType) {
    for (name, rows, cols) in SHAPES {
        if !weight_type.quantised() && name == "head" {
            continue;
        }
        // Enough copies that the weights of one pass do not stay in the cache.
        let one = Packed::bytes_for(weight_type, rows, cols).expect("a valid shape");
        let copies = (100_000_000 / one).max(1);
        let mut arena = Arena::with_capacity(one * copies).expect("memory");
        let row = weight_type.row_bytes(cols).expect("a valid shape");
        let bytes: Vec<u8> = (0..rows * row)
            .map(|i| if i % 2 == 0 { 0x11 } else { 0x2c })
            .collect();
        let matrix = Matrix {
            weight_type,
            rows,
            cols,
            bytes: &bytes,
        };
        let packed: Vec<Packed> = (0..copies)
            .map(|_| Packed::pack(&mut arena, &matrix).expect("a valid matrix"))
            .collect();
        let mut line = format!("{:9} {weight_type:?} {name:17}", kernels.isa().name());
        for tokens in [1, 4, 8, 64] {
            let x: Vec<f32> = (0..tokens * cols)
                .map(|i| (i * 7919 % 1000) as f32 * 0.002 - 1.0)
                .collect();
            let mut act = Act::default();
            kernels.prepare(&x, cols, ActForm::of(&packed), &mut act);
            let mut out = vec![0.0; tokens * rows];
            // One row: all copies, from memory. Many: one copy, again and again.
            let pass = if tokens < 64 {
                &packed[..]
            } else {
                &packed[..1]
            };
            let time = fastest(|| {
                for packed in pass {
                    let out = TileMut::whole(&mut out, rows);
                    kernels.matmul(packed, 0..packed.panels(), &act, Output::Store, out);
                }
            });
            let weights = (rows * cols * pass.len()) as f64;
            let ns = time.as_nanos() as f64;
            line += &if tokens < 64 {
                format!("  {tokens}: {:6.1} GB/s", (pass.len() * one) as f64 / ns)
            } else {
                format!("  {tokens}: {:6.1} GMAC/s", weights * tokens as f64 / ns)
            };
        }
        println!("{line}");
    }
}

fn attention(kernels: Kernels, depth: usize) {
    const HEAD_DIM: usize = 64;
    const HEADS: usize = 3;
    for rows in [1, 64] {
        let pages: Vec<Vec<u16>> =
            vec![vec![0x2c00; page_len(HEAD_DIM)]; (depth + rows).div_ceil(PAGE)];
        let pages: Vec<&[u16]> = pages.iter().map(Vec::as_slice).collect();
        let q = vec![0.01; rows * HEADS * HEAD_DIM];
        let mut out = q.clone();
        let mut scratch = AttentionScratch::default();
        let a = Attention {
            head_dim: HEAD_DIM,
            heads: HEADS,
            scale: 0.125,
            softcap: None,
            position: depth,
            window: None,
            pages: &pages,
        };
        let time = fastest(|| {
            let width = HEADS * HEAD_DIM;
            let out = TileMut::whole(&mut out, width);
            kernels.attention(&a, Tile::new(&q, rows, width, width), &mut scratch, out);
        });
        let positions: usize = (0..rows).map(|r| depth + r + 1).sum();
        let macs = (2 * positions * HEADS * HEAD_DIM) as f64;
        println!(
            "{:9} attention, {rows} rows at depth {depth}: {:.1} us, {:.1} GMAC/s",
            kernels.isa().name(),
            time.as_nanos() as f64 / 1e3,
            macs / time.as_nanos() as f64
        );
    }
}
