//! Operands of the cases.

use hearthnet_files::blocks::WeightType;

use crate::kernels::Kernel;
use crate::operations::AttentionShape;

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
                    bytes[start] = [103, 110, 122, 124, 127, 130, 134][i % 7];
                }
            }
        }
    }
    bytes
}

/// [`weights`] of MXFP4 with scales below 2^-24.
pub fn small_scales() -> Vec<u8> {
    let ty = WeightType::MXFP4;
    let mut bytes = weights(ty);
    for (i, block) in bytes.chunks_mut(ty.file_block()).enumerate() {
        if let Some(scale) = [90, 1].get(i % 7) {
            block[0] = *scale;
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
