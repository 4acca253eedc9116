//! Test of a kernel on the card before its first use.
//!
//! Each kernel runs on operands that were chosen to show wrong roundings: ties and almost ties,
//! cancellation, subnormal operands and results, infinities and NaN. The SHA-256 of its results, cut
//! to 64 bits, is compared with a constant ([`DIGESTS`], also in `specs/gpu-arithmetic.md`), which a
//! test computes with the processor's kernels.

mod product;
mod recurrence;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::blocks::WeightType;
use hearthnet_files::spec::{Activation, RopeKind};
use sha2::{Digest as _, Sha256};

use crate::buffers::{Buffer, attention_words};
use crate::device::{Gpu, Trial};
use crate::error::GpuError;
use crate::kernels::{Formula, Gate, Kernel};
use crate::operations::AttentionShape;
use crate::step::Step;
use product::product;
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
    ("matrix MXFP4", 0x20af_3fc8_f0bc_20a5),
    ("matrix Q3_K", 0x9756_7f17_a3c7_69f2),
    ("matrix Q2_K", 0x395c_bfbc_92d8_9464),
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

/// SplitMix64.
#[derive(Debug)]
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u32) -> u32 {
        (self.bits() % u64::from(n)) as u32
    }

    /// Any significand and sign, with a biased exponent of this range.
    pub fn float(&mut self, least: u32, most: u32) -> u32 {
        let exponent = least + self.below(most - least + 1);
        (self.bits() as u32 & 0x807f_ffff) | exponent << 23
    }

    /// Numbers of all kinds, half of them ordinary.
    pub fn any(&mut self) -> u32 {
        const EDGES: [u32; 16] = [
            0,
            0x8000_0000,
            1,
            0x8000_0001,
            0x007f_ffff,
            0x0080_0000,
            0x0080_0001,
            0x7f7f_ffff,
            0x7f80_0000,
            0xff80_0000,
            0x7fc0_0000,
            0x3f80_0000,
            0xbf80_0000,
            0x3f7f_ffff,
            0x3f80_0001,
            0x4b80_0000,
        ];
        match self.below(16) {
            0 => EDGES[self.below(16) as usize],
            1 => self.bits() as u32 & 0x807f_ffff,
            2 => self.float(1, 30),
            3 => self.float(225, 254),
            4..8 => self.bits() as u32,
            _ => self.float(110, 140),
        }
    }

    /// Finite values around 1, some of them 0, small or subnormal.
    pub fn value(&mut self) -> u32 {
        match self.below(16) {
            0 => 0,
            1 => self.bits() as u32 & 0x807f_ffff,
            2 => self.float(60, 110),
            _ => self.float(118, 129),
        }
    }

    pub fn many(&mut self, n: usize, one: fn(&mut Self) -> u32) -> Vec<u32> {
        (0..n).map(|_| one(self)).collect()
    }
}

/// Triples of [`Kernel::Probe`].
pub const TRIPLES: usize = 8192;

/// Operands of [`Kernel::Probe`].
pub fn triples() -> [Vec<u32>; 3] {
    let mut draw = Draw::new(1);
    let mut all = [const { Vec::new() }; 3];
    for i in 0..TRIPLES {
        let float = f32::from_bits;
        let [a, b, c] = match i % 8 {
            // The product is half way between two floats: only the sign of c decides.
            0 => {
                let odd = |draw: &mut Draw, bits: u32| {
                    (((draw.bits() as u32 >> (32 - bits)) | 1 << (bits - 1) | 1) as f32).to_bits()
                };
                [odd(&mut draw, 13), odd(&mut draw, 12), draw.float(30, 127)]
            }
            // The sum is small, and often exact.
            1 | 2 => {
                let [a, b] = [draw.float(90, 160), draw.float(90, 160)];
                let c = (-(float(a) * float(b))).to_bits();
                [a, b, c.wrapping_add(draw.below(3)).wrapping_sub(1)]
            }
            // Terms of chains.
            3 => [
                draw.float(110, 140),
                draw.float(110, 140),
                draw.float(110, 145),
            ],
            // Subnormal results.
            4 => [draw.float(40, 70), draw.float(40, 70), draw.float(0, 3)],
            5 => [draw.float(1, 60), draw.float(60, 127), draw.any()],
            _ => [draw.any(), draw.any(), draw.any()],
        };
        for (all, one) in all.iter_mut().zip([a, b, c]) {
            all.push(one);
        }
    }
    all
}

/// Shapes of the cases.
pub const ROWS: u32 = 4;
pub const COLS: u32 = 224;
/// Runs of a row, and their width.
pub const GROUPS: u32 = 2;
pub const WIDTH: u32 = 112;
pub const EPS: f32 = 1e-5;
pub const FACTOR: f32 = 0.707_106_77;
pub const CAP: f32 = 30.0;
/// Outputs of a matrix, its inputs, and rows.
pub const OUTPUTS: u32 = 40;
pub const INPUTS: u32 = 768;
pub const PRODUCTS: u32 = 5;
/// Rotation: positions of the table, heads, their width, pairs.
pub const ANGLES: u32 = 8;
pub const HEADS: u32 = 2;
pub const HEAD_DIM: u32 = 16;
pub const PAIRS: u32 = 6;
/// Attention: heads, key/value heads, width of a head, positions of two sequences, their pages.
pub const QUERIES: AttentionShape = AttentionShape {
    heads: 4,
    kv_heads: 2,
    head_dim: 24,
    scale: 0.204_124_15,
    softcap: None,
    window: None,
};
pub const LIMITED: AttentionShape = AttentionShape {
    softcap: Some(CAP),
    window: Some(40),
    ..QUERIES
};
pub const POSITIONS: [u32; 2] = [70, 33];
pub const PAGES: [u32; 5] = [2, 0, 1, 4, 3];
/// Rows: sequence and position.
pub const ASKED: [(u32, u32); 6] = [(0, 0), (0, 31), (1, 32), (0, 69), (0, 45), (1, 3)];

/// Operands of a kernel. What a kernel does not need is not used.
#[derive(Debug)]
pub struct Case {
    /// `[ROWS][COLS]`.
    pub x: Vec<u32>,
    pub y: Vec<u32>,
    pub z: Vec<u32>,
}

impl Case {
    /// Operands of all kinds, or without large and infinite ones.
    pub fn new(any: bool) -> Self {
        let one = if any { Draw::any } else { Draw::value };
        let mut draw = Draw::new(2);
        let n = (ROWS * COLS) as usize;
        Self {
            x: draw.many(n, one),
            y: draw.many(n, one),
            z: draw.many(n, one),
        }
    }

    /// Whether the kernel gets operands of all kinds.
    pub fn any(kernel: Kernel) -> bool {
        matches!(kernel, Kernel::Elementwise(_) | Kernel::Overflow)
    }
}

/// Rows of activations of products and of [`Kernel::Quantise`], `[PRODUCTS][INPUTS]`: usual; small,
/// so that sums are subnormal; large; with blocks of zeros, infinities and NaN; tiny.
pub fn activations() -> Vec<u32> {
    let mut draw = Draw::new(3);
    let mut all = Vec::new();
    for row in 0..PRODUCTS {
        for i in 0..INPUTS {
            all.push(match row {
                0 => draw.float(120, 128),
                1 => draw.float(20, 44),
                2 => draw.float(180, 210),
                3 if i / 32 == 20 => draw.float(1, 20),
                3 if i == 700 => 0x7f80_0000,
                3 => draw.value(),
                _ => draw.float(2, 12),
            });
        }
    }
    all
}

/// A row whose products are NaN is of no use, so products take these.
pub fn finite_activations() -> Vec<u32> {
    let finite = |x: u32| if x & 0x7f80_0000 == 0x7f80_0000 { 0 } else { x };
    activations().into_iter().map(finite).collect()
}

/// A matrix in the form of a file, `[OUTPUTS][INPUTS]`.
pub fn weights(ty: WeightType) -> Vec<u8> {
    use WeightType as T;
    let fields: &[usize] = match ty {
        T::Q4_1 | T::Q5_1 | T::Q4_K | T::Q5_K => &[0, 2],
        T::Q2_K => &[80, 82],
        T::Q3_K => &[108],
        T::Q6_K => &[208],
        T::F32 | T::F16 | T::BF16 | T::MXFP4 => &[],
        _ => &[0],
    };
    let mut draw = Draw::new(4);
    let mut bytes = Vec::new();
    for i in 0..OUTPUTS as usize * INPUTS as usize / ty.inputs() {
        // A binary16: usual, subnormal, or large.
        let half = |draw: &mut Draw| {
            let exponent = match i % 7 {
                0 => 0,
                1 => 30,
                _ => 6 + draw.below(8),
            };
            ((draw.bits() as u32 & 0x83ff) | exponent << 10) as u16
        };
        match ty {
            T::F32 => bytes.extend(draw.value().to_le_bytes()),
            T::F16 => bytes.extend(half(&mut draw).to_le_bytes()),
            T::BF16 => bytes.extend(((draw.value() >> 16) as u16).to_le_bytes()),
            _ => {
                let start = bytes.len();
                bytes.extend((0..ty.file_block()).map(|_| draw.bits() as u8));
                for at in fields {
                    let field = half(&mut draw).to_le_bytes();
                    bytes[start + at..][..2].copy_from_slice(&field);
                }
                if ty == T::MXFP4 {
                    bytes[start] = [90, 1, 122, 124, 127, 130, 134][i % 7];
                }
            }
        }
    }
    bytes
}

/// Queries, keys and values of [`QUERIES`], and a sink per head.
pub fn sequences() -> [Vec<u32>; 4] {
    let mut draw = Draw::new(5);
    let kv = (POSITIONS[0] + POSITIONS[1]) * QUERIES.kv_heads * QUERIES.head_dim;
    let q = ASKED.len() as u32 * QUERIES.heads * QUERIES.head_dim;
    let value = |draw: &mut Draw| match draw.below(32) {
        // Subnormal binary16, and those that are rounded to one.
        0 => draw.float(100, 112),
        1 => draw.float(113, 113),
        _ => draw.float(120, 128),
    };
    let mut many = |n: u32| (0..n).map(|_| value(&mut draw)).collect();
    [many(q), many(kv), many(kv), many(QUERIES.heads)]
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
    Ok(all)
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
            Formula::Gate(gate) => {
                let activation = match gate {
                    Gate::Silu => Activation::Silu,
                    Gate::Gelu => Activation::Gelu,
                    Gate::GeluErf => Activation::GeluErf,
                    Gate::SquaredRelu => Activation::SquaredRelu,
                    Gate::Clamped => Activation::Clamped,
                };
                step.gate(activation, xv, yv, xv, rows, cols);
            }
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
                false => RopeKind::Halves,
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
        Kernel::Matrix {
            weight_type,
            rows,
            paired,
            ..
        } => return product(gpu, step, weight_type, rows, paired),
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
