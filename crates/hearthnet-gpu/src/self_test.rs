//! Test of a kernel on the card before its first use.
//!
//! Each kernel runs on operands that were chosen to show wrong roundings: ties and almost ties,
//! cancellation, subnormal operands and results, infinities and NaN. The SHA-256 of its results, cut
//! to 64 bits, is compared with a constant ([`DIGESTS`], also in `specs/gpu-arithmetic.md`), which a
//! test computes with the processor's kernels.

mod operands;
mod product;
mod recurrence;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::RopeKind;
use sha2::{Digest as _, Sha256};

use crate::buffers::{Buffer, attention_words};
use crate::device::Gpu;
use crate::error::GpuError;
use crate::kernels::{Formula, Kernel};
use crate::operations::AttentionShape;
use crate::pipelines::Trial;
use crate::step::Step;
pub use operands::*;
use product::{once, product};
use recurrence::recurrence;
pub use recurrence::*;

/// Digest of each kernel's results, by its name.
pub const DIGESTS: &[(&str, u64)] = &[
    ("float operations", 0x552d_6d75_df0e_3e21),
    ("rms_norm", 0x76d2_1d42_1e7a_bbcb),
    ("l2_norm", 0xa118_c87a_8130_4f47),
    ("layer_norm", 0x5f2c_6960_734d_cf26),
    ("quantise", 0xe0aa_b988_331e_7521),
    ("rope interleaved", 0x7f43_f9fc_3596_5d50),
    ("rope halves", 0x80db_3ea5_387c_4347),
    ("attention", 0xd50f_7533_50a7_0317),
    ("find_overflow", 0x07ff_3f85_2630_dcda),
    ("convolution", 0x415b_f91d_86e9_b637),
    ("delta_rule", 0x3cfb_9b2f_fe03_4032),
    ("mamba_scan", 0x0dfa_4f53_0ce3_920d),
    ("add_round", 0x90ef_13e1_493f_8505),
    ("round", 0xaf5a_7442_dcb2_f2cd),
    ("scale", 0xdcaf_1b76_6ad9_abac),
    ("multiply", 0x8ff1_9c2a_09cf_edf8),
    ("add_scaled", 0x760f_4340_a9aa_0697),
    ("softcap", 0x98ae_5699_76b6_bd28),
    ("copy", 0xbecd_21b4_babd_ff0f),
    ("exp", 0x73b2_db87_f019_eff7),
    ("silu", 0x6ad8_64e8_87a8_6bb3),
    ("sigmoid", 0x7546_9923_09ab_77a1),
    ("gelu", 0x9d96_ae3c_3529_bb3f),
    ("gelu_erf", 0x3d36_4ad9_fcf4_76f2),
    ("squared_relu", 0xb8d5_d59d_290c_f096),
    ("gate silu", 0x4522_f9c9_96b1_29d6),
    ("gate gelu", 0xcc8f_52ad_83ed_973b),
    ("gate gelu_erf", 0xd645_32e9_7311_2735),
    ("gate squared_relu", 0x66cc_428d_c198_231b),
    ("gate clamped", 0x6529_c119_fcef_f2b6),
    ("matrix F32", 0x711a_ecbc_e3f6_d4e5),
    ("matrix F16", 0xe8e0_1231_b496_9161),
    ("matrix BF16", 0x4cb7_4af3_dc52_360e),
    ("matrix Q8_0", 0xda94_0744_cc9f_8fac),
    ("matrix Q6_K", 0xc47e_f5ab_08fa_05be),
    ("matrix Q5_1", 0x60f7_887f_75e1_5ffb),
    ("matrix Q5_K", 0x286f_4432_3200_edae),
    ("matrix Q5_0", 0x13cb_9a4f_7550_9ec7),
    ("matrix Q4_1", 0xf455_b1f5_24c5_b450),
    ("matrix Q4_K", 0xd0f1_2c61_461a_30fb),
    ("matrix Q4_0", 0x895f_71d7_bf48_0915),
    ("matrix IQ4_NL", 0x714d_6ab7_8052_7105),
    ("matrix IQ4_XS", 0x3ba9_e591_f8a3_151f),
    ("matrix MXFP4", 0x2384_58c6_826c_87c7),
    ("matrix Q3_K", 0x9756_7f17_a3c7_69f2),
    ("matrix Q2_K", 0x395c_bfbc_92d8_9464),
    ("matrix MXFP4 careful", 0x20af_3fc8_f0bc_20a5),
];

/// Kernels that are tested together: those of attention, and those of a convolution, need one
/// another.
pub(crate) fn family(kernel: Kernel) -> Vec<Kernel> {
    let attention = [Kernel::StoreKv, Kernel::Score, Kernel::Softmax, Kernel::Mix];
    match kernel {
        _ if attention.contains(&kernel) => attention.to_vec(),
        Kernel::Convolve | Kernel::Keep => vec![Kernel::Convolve, Kernel::Keep],
        _ => vec![kernel],
    }
}

/// Whether the pipelines of a kernel's family give the right bytes.
///
/// # Errors
/// Those of a card that is lost or has no memory.
pub(crate) fn passes(gpu: &Gpu, kernel: Kernel, trial: &Trial) -> Result<bool, GpuError> {
    let name = kernel.to_string();
    let mut known = DIGESTS.iter();
    let known = known.find(|(of, _)| *of == name).map(|(_, digest)| *digest);
    let results = run(gpu, kernel, trial)?;
    Ok(known == Some(digest(&results)))
}

/// First 64 bits of the SHA-256 of words, with one NaN for all.
pub fn digest(words: &[u32]) -> u64 {
    let mut hash = Sha256::new();
    for word in words {
        let nan = word & 0x7fff_ffff > 0x7f80_0000;
        hash.update(if nan { 0x7fc0_0000 } else { *word }.to_le_bytes());
    }
    let hash = hash.finalize();
    hash.iter()
        .take(8)
        .fold(0, |all, byte| all << 8 | u64::from(*byte))
}

/// Words of [`Step::rope`] and [`Step::attention`] per row.
fn info(rows: impl IntoIterator<Item = (u32, u32)>) -> Vec<u32> {
    let rows = rows.into_iter();
    rows.flat_map(|(table, position)| [position, table, 0, 0])
        .collect()
}

/// First entry in [`PAGES`] of a sequence.
fn table(sequence: u32) -> u32 {
    sequence * POSITIONS[0].div_ceil(32)
}

/// Results of a kernel on its operands.
pub(crate) fn run(gpu: &Gpu, kernel: Kernel, trial: &Trial) -> Result<Vec<u32>, GpuError> {
    let mut step = Step::trial(gpu.clone(), trial.clone());
    let outputs = record(gpu, &mut step, kernel)?;
    step.submit()?;
    let mut all = Vec::new();
    for out in outputs {
        all.extend(gpu.read(&out, 0..out.words())?);
    }
    Ok(match kernel {
        Kernel::Matrix { .. } | Kernel::Tiles { .. } => once(kernel, all),
        _ => all,
    })
}

/// Records a kernel's case; returns the buffers of the results.
fn record(gpu: &Gpu, step: &mut Step, kernel: Kernel) -> Result<Vec<Buffer>, GpuError> {
    let case = Case::new(Case::any(kernel));
    let upload = |words: &[u32]| gpu.upload(words);
    let [x, y, z] = [upload(&case.x)?, upload(&case.y)?, upload(&case.z)?];
    let (rows, cols) = (ROWS, COLS);
    let (xv, yv) = (x.rows(COLS), y.rows(COLS));
    match kernel {
        Kernel::Probe => {
            let [a, b, c] = triples();
            let [a, b, c] = [upload(&a)?, upload(&b)?, upload(&c)?];
            let out = gpu.buffer(8 * TRIPLES as u64)?;
            step.probe([&a, &b, &c], &out, TRIPLES as u32);
            return Ok(vec![out]);
        }
        Kernel::Elementwise(formula) => match formula {
            Formula::Unary(function) => step.activate(function, xv, rows, cols),
            Formula::Gate(activation) => step.gate(activation, xv, yv, xv, rows, cols),
            Formula::AddRound => {
                let dtypes = [BoundaryDtype::F32, BoundaryDtype::F16, BoundaryDtype::Bf16];
                for (row, dtype) in (0..).zip(dtypes) {
                    step.add_round(x.rows_at(row * COLS, COLS), yv, 1, cols, dtype);
                }
            }
            Formula::Round => {
                for (row, dtype) in [(0, BoundaryDtype::F16), (1, BoundaryDtype::Bf16)] {
                    let row = x.rows_at(row * COLS, COLS);
                    step.round(row, 1, cols, dtype);
                }
            }
            Formula::Scale => step.scale(xv, rows, cols, FACTOR),
            Formula::Multiply => {
                step.multiply(xv, yv, rows, cols);
                step.scale_rows(xv, z.rows(COLS), rows, cols);
            }
            Formula::AddScaled => step.add_scaled(xv, yv, rows, cols, z.rows(COLS)),
            Formula::Softcap => step.softcap(xv, rows, cols, CAP),
            Formula::Copy => step.copy(yv, xv, rows, cols),
        },
        Kernel::RmsNorm => {
            let out = gpu.buffer(x.words())?;
            step.rms_norm(xv, out.rows(COLS), rows, GROUPS, WIDTH, None, EPS);
            step.rms_norm(xv, xv, rows, GROUPS, WIDTH, Some(&y), EPS);
            return Ok(vec![out, x]);
        }
        Kernel::L2Norm => step.l2_norm(xv, rows, GROUPS, WIDTH, EPS, FACTOR),
        Kernel::LayerNorm => step.layer_norm(xv, xv, rows, COLS, &y, &z, EPS),
        Kernel::Quantise => {
            let values = upload(&activations())?;
            let act = gpu.act(PRODUCTS, INPUTS)?;
            step.quantise(values.rows(INPUTS), &act, PRODUCTS, INPUTS);
            return Ok(vec![act]);
        }
        Kernel::Rope { interleaved } => {
            let kind = match interleaved {
                true => RopeKind::Interleaved,
                false => RopeKind::NeoX,
            };
            let info = upload(&info([0, 5, 2].map(|position| (0, position))))?;
            let x = x.rows(HEADS * HEAD_DIM);
            step.rope(x, 3, HEADS, HEAD_DIM, kind, &y, PAIRS, info.rows(4));
        }
        Kernel::StoreKv | Kernel::Score | Kernel::Softmax | Kernel::Mix => {
            return attention(gpu, step);
        }
        Kernel::Convolve | Kernel::Keep | Kernel::DeltaRule | Kernel::MambaScan => {
            return recurrence(gpu, step, kernel, [&x, &y, &z]);
        }
        Kernel::Overflow => {
            // Few columns, so that some rows are finite.
            let rows = ROWS * COLS / 4;
            let flags = gpu.buffer(u64::from(rows))?;
            step.find_overflow(x.rows(4), rows, 4, &flags, 0);
            return Ok(vec![flags]);
        }
        Kernel::Matrix { weight_type, .. } | Kernel::Tiles { weight_type, .. } => {
            return product(gpu, step, kernel, weight_type);
        }
    }
    Ok(vec![x])
}

fn attention(gpu: &Gpu, step: &mut Step) -> Result<Vec<Buffer>, GpuError> {
    let AttentionShape {
        heads,
        kv_heads,
        head_dim,
        ..
    } = QUERIES;
    let [q, k, v, sinks] = sequences();
    let [q, k, v, sinks] = [
        gpu.upload(&q)?,
        gpu.upload(&k)?,
        gpu.upload(&v)?,
        gpu.upload(&sinks)?,
    ];
    let tables = gpu.upload(&PAGES)?;
    let kv = gpu.kv(PAGES.len() as u32, kv_heads, head_dim)?;
    let stored = (0..2).flat_map(|s| (0..POSITIONS[s as usize]).map(move |p| (table(s), p)));
    let stored = gpu.upload(&info(stored))?;
    let total = POSITIONS[0] + POSITIONS[1];
    let (k, v) = (k.rows(kv_heads * head_dim), v.rows(kv_heads * head_dim));
    step.store_kv(
        k,
        v,
        total,
        kv_heads,
        head_dim,
        &kv,
        &tables,
        stored.rows(4),
    );
    let asked = gpu.upload(&info(ASKED.map(|(s, p)| (table(s), p))))?;
    let (rows, width) = (ASKED.len() as u32, heads * head_dim);
    let scores = gpu.buffer(attention_words(rows, heads, POSITIONS[0]))?;
    let mut outputs = vec![kv.clone()];
    for (shape, sinks) in [(QUERIES, None), (LIMITED, Some(&sinks))] {
        let out = gpu.buffer(q.words())?;
        step.attention(
            &shape,
            q.rows(width),
            out.rows(width),
            rows,
            &kv,
            &tables,
            asked.rows(4),
            &scores,
            POSITIONS[0],
            sinks,
        );
        outputs.push(out);
    }
    Ok(outputs)
}
