//! Speed of the matrix and attention kernels on one thread, for the shapes of a small model
//! (TinyLlama-1.1B, whose rows fill blocks of all types). The units are GB/s of weights for few
//! rows (decoding), and billions of multiply-adds per second for 24 rows (a piece of a prompt). The
//! first figure is the repacking speed of a type, in GB/s of the file.
//!
//! `cargo run --release -p hearthnet-engine --example kernel_speed [-- avx2|avx512|portable [TYPE...]]`
//!
//! The type `attention` stands for attention.

#![allow(clippy::print_stdout, clippy::expect_used)]

use std::time::{Duration, Instant};

use hearthnet_engine::kernels::{
    Act, ActForm, Arena, Attention, AttentionScratch, Isa, Kernels, Matrix, Output, PAGE, Packed,
    TileMut, page_len,
};
use hearthnet_files::blocks::WeightType;
use hearthnet_files::spec::CacheDtype;

/// Name, outputs, inputs; a quarter of the output matrix.
const SHAPES: [(&str, usize, usize); 5] = [
    ("qkv", 2560, 2048),
    ("attention output", 2048, 2048),
    ("gate+up", 11264, 2048),
    ("down", 2048, 5632),
    ("head", 8192, 2048),
];
/// Rows of a piece of a prompt; with fewer rows, weights come from memory.
const PREFILL: usize = 24;

/// Width of a head, and query heads that share keys and values.
const GROUPS: [(usize, usize); 4] = [(64, 3), (128, 3), (128, 7), (128, 8)];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next();
    let types: Vec<String> = arguments.collect();
    let named = |ty: &WeightType| {
        let name = ty.tensor_type().name();
        types.is_empty() || types.iter().any(|wanted| wanted == name)
    };
    WeightType::ALL
        .into_iter()
        .filter(named)
        .for_each(repacking);
    for isa in Isa::available() {
        if wanted.as_deref().is_some_and(|name| name != isa.name()) {
            continue;
        }
        let kernels = Kernels::new(isa).expect("listed as available");
        for weight_type in WeightType::ALL.into_iter().filter(named) {
            matrices(kernels, weight_type);
        }
        if types.is_empty() || types.iter().any(|wanted| wanted == "attention") {
            for depth in [0, 512, 4096] {
                for (head_dim, heads) in GROUPS {
                    for cache in CacheDtype::ALL {
                        attention(kernels, depth, head_dim, heads, cache);
                    }
                }
            }
        }
    }
}

/// Repeats `work` for a while, passing the call's number, and returns the time of the fastest call.
/// Calls are short, so that some are not interrupted even on a busy machine.
fn fastest(mut work: impl FnMut(usize)) -> Duration {
    let started = Instant::now();
    let mut best = Duration::MAX;
    for count in 0.. {
        if started.elapsed() >= Duration::from_millis(300) {
            break;
        }
        let call = Instant::now();
        work(count);
        best = best.min(call.elapsed());
    }
    best
}

/// Bytes in a file for one row of `cols` weights.
fn row_bytes(weight_type: WeightType, cols: usize) -> usize {
    let bytes = weight_type.tensor_type().row_bytes(cols as u64);
    bytes.expect("a valid shape") as usize
}

fn repacking(weight_type: WeightType) {
    let (rows, cols) = (2048, 2048);
    let row = row_bytes(weight_type, cols);
    let bytes = vec![0x2c; rows * row];
    let matrix = Matrix {
        weight_type,
        rows,
        cols,
        bytes: &bytes,
    };
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let time = alone.expect("a thread").install(|| {
        fastest(|_| {
            let mut arena = Arena::default();
            Packed::pack_stacked(&mut arena, &[matrix]).expect("a valid matrix");
        })
    });
    let speed = bytes.len() as f64 / time.as_nanos() as f64;
    println!("repacking {:6} {speed:6.2} GB/s", weight_type.tensor_type());
}

fn matrices(kernels: Kernels, weight_type: WeightType) {
    for (name, rows, cols) in SHAPES {
        if !weight_type.quantised() && name == "head" {
            continue;
        }
        // Enough copies that the weights of one pass do not fit into the cache.
        let one = Packed::bytes_for(weight_type, rows, cols).expect("a valid shape");
        let copies = (100_000_000 / one).max(1);
        let mut arena = Arena::with_capacity(one * copies).expect("memory");
        let row = row_bytes(weight_type, cols);
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
            .map(|_| Packed::pack_stacked(&mut arena, &[matrix]).expect("a valid matrix"))
            .collect();
        let ty = weight_type.tensor_type();
        let mut line = format!("{:9} {ty:6} {name:17}", kernels.isa().name());
        for tokens in [1, 4, PREFILL] {
            let x: Vec<f32> = (0..tokens * cols)
                .map(|i| (i * 7919 % 1000) as f32 * 0.002 - 1.0)
                .collect();
            let mut act = Act::default();
            kernels.prepare(&x, cols, ActForm::of(&packed), &mut act);
            let mut out = vec![0.0; tokens * rows];
            // Few rows: one copy after the other, from memory. Many rows: the same copy repeatedly.
            let pass = if tokens < PREFILL {
                &packed[..]
            } else {
                &packed[..1]
            };
            let time = fastest(|count| {
                let packed = &pass[count % pass.len()];
                let out = TileMut::new(&mut out, tokens, rows, rows);
                kernels.matmul(packed, 0..packed.panels(), &act, Output::Store, out);
            });
            let weights = (rows * cols) as f64;
            let ns = time.as_nanos() as f64;
            line += &if tokens < PREFILL {
                format!("  {tokens}: {:6.1} GB/s", one as f64 / ns)
            } else {
                format!("  {tokens}: {:6.1} GMAC/s", weights * tokens as f64 / ns)
            };
        }
        println!("{line}");
    }
}

fn attention(kernels: Kernels, depth: usize, head_dim: usize, heads: usize, cache: CacheDtype) {
    for rows in [1, 64] {
        let count = (depth + rows).div_ceil(PAGE);
        // With one row, keys and values come from memory, as in decoding.
        let cells = page_len(head_dim, cache);
        let bytes = count * cells * size_of::<u16>();
        let copies = if rows == 1 {
            (100_000_000 / bytes).min(1000)
        } else {
            1
        };
        let pages = vec![0x2c00; copies * count * cells];
        let pages: Vec<&[u16]> = pages.chunks_exact(cells).collect();
        let q = vec![0.01; rows * heads * head_dim];
        let mut out = q.clone();
        let mut scratch = AttentionScratch::default();
        let time = fastest(|call| {
            let a = Attention {
                head_dim,
                cache,
                heads,
                scale: 0.125,
                softcap: None,
                sinks: None,
                position: depth,
                window: None,
                both_sides: None,
                pages: &pages[call % copies * count..][..count],
            };
            let width = heads * head_dim;
            let out = TileMut::new(&mut out, rows, width, width);
            kernels.attention(&a, &q, width, &mut scratch, out);
        });
        let positions: usize = (0..rows).map(|r| depth + r + 1).sum();
        let macs = (2 * positions * heads * head_dim) as f64;
        let ns = time.as_nanos() as f64;
        println!(
            "{:9} attention, {rows:2} rows at depth {depth:4}, {heads} heads of {head_dim:3}, {cache:4}: {:7.1} us, {:5.1} GMAC/s, {:5.1} GB/s",
            kernels.isa().name(),
            ns / 1e3,
            macs / ns,
            bytes as f64 / ns
        );
    }
}
