//! Decoder of the weight blocks of a GGUF file.
//!
//! A quantised type stores, per 32 weights of a row, 32 unsigned *quants* and the factors that
//! turn them into weights: one or two 16-bit *fields* per block and, in types with blocks of
//! 256, a *sub-scale* of one or two small integers per 32 weights. [`Layout`] describes these per
//! type; the engine's packed form and its kernels use nothing else of a type.
//!
//! Sources: the structures of ggml's `ggml-common.h` and its `dequantize_row_*`.

use crate::floats::{bf16_to_f32, f16_to_f32};
use crate::gguf::TensorType;

/// Inputs of a block of the quantised activations, and of the smaller blocks of weights.
pub const BLOCK: usize = 32;

/// Maximum number of 32-weight blocks in one block of a file.
const MAX_BLOCKS: usize = 8;

/// Defines [`WeightType`]: a variant for each [`TensorType`] that the engine computes with.
macro_rules! weight_types {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Element type of a weight matrix in a GGUF file.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)] // names as in ggml
        pub enum WeightType {
            $($(#[$doc])* $name,)*
        }

        impl WeightType {
            /// All types that the kernels support, widest first.
            pub const ALL: [Self; [$(TensorType::$name),*].len()] = [$(Self::$name),*];

            #[inline]
            pub const fn tensor_type(self) -> TensorType {
                match self {
                    $(Self::$name => TensorType::$name,)*
                }
            }
        }
    };
}

weight_types! {
    F32,
    F16,
    BF16,
    /// Blocks of 32: scale (f16) and signed bytes; weight = d * q.
    Q8_0,
    /// Blocks of 256, 16 at a time with a factor: weight = d * sc * (q - 32), q of 6 bits.
    Q6_K,
    /// Blocks of 32: scale, minimum (f16) and 5-bit quants; weight = d * q + m.
    Q5_1,
    /// `Q4_K` with quants of 5 bits.
    Q5_K,
    /// Blocks of 32: scale (f16) and 5-bit quants; weight = d * (q - 16).
    Q5_0,
    /// Blocks of 32: scale, minimum (f16) and 4-bit quants; weight = d * q + m.
    Q4_1,
    /// Blocks of 256, 32 at a time with factors: weight = d * sc * q - m * mc, q of 4 bits.
    Q4_K,
    /// Blocks of 32: scale (f16) and 4-bit quants; weight = d * (q - 8).
    Q4_0,
    /// Blocks of 32: scale (f16) and 4-bit indices into a table; weight = d * table\[q\].
    IQ4_NL,
    /// Blocks of 256, 32 at a time with a factor: weight = d * sc * table\[q\].
    IQ4_XS,
    /// Blocks of 32: scale (a power of two) and 4-bit floats E2M1.
    MXFP4,
    /// Blocks of 256, 16 at a time with a factor: weight = d * sc * (q - 4), q of 3 bits.
    Q3_K,
    /// Blocks of 256, 16 at a time with factors: weight = d * sc * q - m * mc, q of 2 bits.
    Q2_K,
}

impl WeightType {
    /// Weight type of tensors of `dtype`, or `None` if the kernels do not support it.
    pub fn of(dtype: TensorType) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.tensor_type() == dtype)
    }

    /// Whether matrices of this type are multiplied with quantised activations.
    #[inline]
    pub const fn quantised(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// Inputs in a record of the packed form and in a block of the file. The inputs of a matrix
    /// are a multiple of it.
    #[inline]
    pub const fn inputs(self) -> usize {
        if self.quantised() {
            BLOCK * Layout::of(self).blocks
        } else {
            1
        }
    }

    /// Bytes in the file for `inputs()` weights of one row.
    #[inline]
    pub const fn file_block(self) -> usize {
        self.tensor_type().block_bytes() as usize
    }
}

impl TensorType {
    /// Types that the engine computes with, widest first.
    pub fn supported() -> impl Iterator<Item = Self> {
        WeightType::ALL.into_iter().map(WeightType::tensor_type)
    }

    /// Whether the engine computes with weights of this type.
    pub fn is_supported(self) -> bool {
        WeightType::of(self).is_some()
    }
}

/// Mapping of a quant to an integer weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// `quant - offset`.
    Offset(i32),
    /// `table[quant]`.
    Table(&'static [i8; 16]),
}

/// Factors stored per 32 weights, beside their quants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubScale {
    None,
    /// A signed factor of the scale.
    Scale,
    /// Unsigned factors of the scale and of the minimum.
    ScaleMin,
    /// Signed factors of the scale for the first and the second 16 weights.
    Scale16,
    /// For the first and the second 16 weights: a factor of the scale (low four bits) and of the
    /// minimum (high four bits).
    ScaleMin16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    Two,
    Three,
    Four,
    Five,
    Six,
    Eight,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Blocks of 32 weights that share the fields.
    pub blocks: usize,
    /// 1 for a scale; 2 for scale and minimum.
    pub fields: usize,
    /// The fields are bfloat16 instead of binary16.
    pub bf16_fields: bool,
    pub sub_scale: SubScale,
    pub bits: Bits,
    pub code: Code,
}

impl SubScale {
    /// Bytes per row and 32 weights in the packed form.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Self::None => 0,
            Self::Scale => 1,
            Self::ScaleMin | Self::Scale16 | Self::ScaleMin16 => 2,
        }
    }

    /// Whether factors apply to 16 weights instead of 32.
    #[inline]
    pub const fn per_16(self) -> bool {
        matches!(self, Self::Scale16 | Self::ScaleMin16)
    }
}

impl Bits {
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Two => 8,
            Self::Three => 12,
            Self::Four => 16,
            Self::Five => 20,
            Self::Six => 24,
            Self::Eight => 32,
        }
    }
}

/// Values of IQ4_NL and IQ4_XS: ggml's `kvalues_iq4nl`.
const NON_LINEAR: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];
/// Twice the values of the 4-bit float E2M1: ggml's `kvalues_mxfp4`.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Layout {
    /// Layout of a quantised type. For F32, F16 and BF16 the result has no meaning.
    pub const fn of(ty: WeightType) -> Self {
        use Bits::{Eight, Five, Four, Six, Three, Two};
        use Code::{Offset, Table};
        use WeightType as T;
        const LARGE: usize = MAX_BLOCKS;
        // Blocks, fields, sub-scale, bits, code.
        let (blocks, fields, sub_scale, bits, code) = match ty {
            T::Q4_0 => (1, 1, SubScale::None, Four, Offset(8)),
            T::Q4_1 => (1, 2, SubScale::None, Four, Offset(0)),
            T::Q5_0 => (1, 1, SubScale::None, Five, Offset(16)),
            T::Q5_1 => (1, 2, SubScale::None, Five, Offset(0)),
            T::Q8_0 => (1, 1, SubScale::None, Eight, Offset(128)),
            T::IQ4_NL => (1, 1, SubScale::None, Four, Table(&NON_LINEAR)),
            T::MXFP4 => (1, 1, SubScale::None, Four, Table(&E2M1)),
            T::Q2_K => (LARGE, 2, SubScale::ScaleMin16, Two, Offset(0)),
            T::Q3_K => (LARGE, 1, SubScale::Scale16, Three, Offset(4)),
            T::Q4_K => (LARGE, 2, SubScale::ScaleMin, Four, Offset(0)),
            T::Q5_K => (LARGE, 2, SubScale::ScaleMin, Five, Offset(0)),
            T::Q6_K => (LARGE, 1, SubScale::Scale16, Six, Offset(32)),
            T::IQ4_XS => (LARGE, 1, SubScale::Scale, Four, Table(&NON_LINEAR)),
            T::F32 | T::F16 | T::BF16 => (1, 1, SubScale::None, Four, Offset(0)),
        };
        Self {
            blocks,
            fields,
            bf16_fields: matches!(ty, T::MXFP4),
            sub_scale,
            bits,
            code,
        }
    }

    #[inline]
    pub fn field(&self, bits: u16) -> f32 {
        if self.bf16_fields {
            bf16_to_f32(bits)
        } else {
            f16_to_f32(bits)
        }
    }
}

/// Unpacked numbers of one block of one row.
pub struct Block {
    /// Bit patterns of scale and minimum, as stored.
    pub fields: [u16; 2],
    /// Bytes of each [`SubScale`]; [`SubScale::Scale`] uses only the first.
    pub sub_scales: [[u8; 2]; MAX_BLOCKS],
    pub quants: [u8; MAX_BLOCKS * BLOCK],
}

impl Block {
    pub const EMPTY: Self = Self {
        fields: [0; 2],
        sub_scales: [[0; 2]; MAX_BLOCKS],
        quants: [0; MAX_BLOCKS * BLOCK],
    };

    /// Decodes a block of a file. `block` has [`WeightType::file_block`] bytes.
    pub fn read(&mut self, ty: WeightType, block: &[u8]) {
        use WeightType as T;
        let half = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        let (sub_scales, quants) = (&mut self.sub_scales, &mut self.quants);
        self.fields = fields(ty, block);
        match ty {
            T::F32 | T::F16 | T::BF16 => {}
            T::Q4_0 | T::IQ4_NL => nibbles(&block[2..18], quants),
            T::Q4_1 => nibbles(&block[4..20], quants),
            T::MXFP4 => nibbles(&block[1..17], quants),
            T::Q5_0 | T::Q5_1 => {
                let (_, rest) = block.split_at(block.len() - 20);
                let (high, low) = rest.split_at(4);
                nibbles(low, quants);
                for (eight, bits) in quants.as_chunks_mut::<8>().0.iter_mut().zip(high) {
                    for (j, quant) in eight.iter_mut().enumerate() {
                        *quant |= (bits >> j & 1) << 4;
                    }
                }
            }
            T::Q8_0 => {
                for (quant, byte) in quants.iter_mut().zip(&block[2..34]) {
                    *quant = byte ^ 0x80;
                }
            }
            T::Q2_K | T::Q3_K => {
                let pairs = if ty == T::Q2_K {
                    &block[16..80]
                } else {
                    &block[32..96]
                };
                let blocks = quants.as_chunks_mut::<BLOCK>().0.iter_mut();
                for (s, quants) in blocks.enumerate() {
                    let pairs = &pairs.as_chunks::<BLOCK>().0[s / 4];
                    for (quant, pairs) in quants.iter_mut().zip(pairs) {
                        *quant = pairs >> (2 * (s % 4)) & 3;
                    }
                    if ty == T::Q3_K {
                        for (quant, bits) in quants.iter_mut().zip(block) {
                            *quant |= (bits >> s & 1) << 2;
                        }
                    }
                }
                for (i, sub_scale) in sub_scales.as_flattened_mut().iter_mut().enumerate() {
                    *sub_scale = if ty == T::Q2_K {
                        block[i]
                    } else {
                        let factors = &block[96..108];
                        let low = factors[i % 8] >> (4 * (i / 8)) & 15;
                        let high = factors[8 + i % 4] >> (2 * (i / 4)) & 3;
                        (low | high << 4).wrapping_sub(32)
                    };
                }
            }
            T::Q4_K | T::Q5_K => {
                let factors = &block[4..16];
                for (s, sub_scale) in sub_scales.iter_mut().enumerate() {
                    *sub_scale = if s < 4 {
                        [factors[s] & 63, factors[s + 4] & 63]
                    } else {
                        let low = factors[s + 4];
                        [
                            low & 15 | factors[s - 4] >> 6 << 4,
                            low >> 4 | factors[s] >> 6 << 4,
                        ]
                    };
                }
                let low = &block[block.len() - 128..];
                for (s, quants) in quants.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                    let low = &low.as_chunks::<BLOCK>().0[s / 2];
                    for (quant, low) in quants.iter_mut().zip(low) {
                        *quant = low >> (4 * (s % 2)) & 15;
                    }
                    if ty == T::Q5_K {
                        for (quant, bits) in quants.iter_mut().zip(&block[16..]) {
                            *quant |= (bits >> s & 1) << 4;
                        }
                    }
                }
            }
            T::Q6_K => {
                let (low, rest) = block.split_at(128);
                let (high, factors) = rest.split_at(64);
                for (s, quants) in quants.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                    // Halves of 128; in each, blocks 0 and 1 have the low nibbles of 64 bytes.
                    let (half, quarter) = (s / 4, s % 4);
                    let low = &low[64 * half + BLOCK * (quarter % 2)..][..BLOCK];
                    let high = &high[BLOCK * half..][..BLOCK];
                    for ((quant, low), high) in quants.iter_mut().zip(low).zip(high) {
                        *quant = low >> (4 * (quarter / 2)) & 15 | (high >> (2 * quarter) & 3) << 4;
                    }
                }
                sub_scales
                    .as_flattened_mut()
                    .copy_from_slice(&factors[..16]);
            }
            T::IQ4_XS => {
                let high = half(2);
                for (s, sub_scale) in sub_scales.iter_mut().enumerate() {
                    let low = block[4 + s / 2] >> (4 * (s % 2)) & 15;
                    let high = (high >> (2 * s)) as u8 & 3;
                    *sub_scale = [(low | high << 4).wrapping_sub(32), 0];
                }
                for (from, to) in block[8..136]
                    .chunks_exact(BLOCK / 2)
                    .zip(quants.as_chunks_mut::<BLOCK>().0)
                {
                    nibbles(from, to);
                }
            }
        }
    }

    /// Writes the `32 * blocks` weights. Products are exact; adding a minimum rounds once.
    pub fn values(&self, ty: WeightType, out: &mut [f32]) {
        let layout = Layout::of(ty);
        let [d, m] = self.fields.map(|bits| layout.field(bits));
        let blocks = out
            .chunks_exact_mut(BLOCK)
            .zip(self.quants.as_chunks::<BLOCK>().0);
        for ((out, quants), sub_scale) in blocks.zip(self.sub_scales) {
            let signed = sub_scale.map(|factor| f32::from(factor as i8));
            let unsigned = sub_scale.map(f32::from);
            for (j, (out, quant)) in out.iter_mut().zip(quants).enumerate() {
                let w = match layout.code {
                    Code::Offset(offset) => (i32::from(*quant) - offset) as f32,
                    Code::Table(table) => f32::from(table[usize::from(*quant & 15)]),
                };
                let half = j / (BLOCK / 2);
                *out = match layout.sub_scale {
                    SubScale::None if layout.fields == 2 => d * w + m,
                    SubScale::None => d * w,
                    SubScale::Scale => d * signed[0] * w,
                    SubScale::ScaleMin => d * unsigned[0] * w - m * unsigned[1],
                    SubScale::Scale16 => d * signed[half] * w,
                    SubScale::ScaleMin16 => {
                        let factors = sub_scale[half];
                        d * f32::from(factors & 15) * w - m * f32::from(factors >> 4)
                    }
                };
            }
        }
    }
}

/// [`Block::fields`] of a block of a file.
#[inline(always)]
fn fields(ty: WeightType, block: &[u8]) -> [u16; 2] {
    use WeightType as T;
    let half = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    match ty {
        T::Q4_1 | T::Q5_1 | T::Q4_K | T::Q5_K => [half(0), half(2)],
        T::Q2_K => [half(80), half(82)],
        T::Q3_K => [half(108), 0],
        T::Q6_K => [half(208), 0],
        T::MXFP4 => [power_of_two(block[0]), 0],
        _ => [half(0), 0],
    }
}

/// Returns true if all weights in `bytes` (whole blocks of a file) are finite. For quantised types
/// it reads only the fields: finite fields give finite weights.
pub fn all_finite(ty: WeightType, bytes: &[u8]) -> bool {
    // Bit patterns of magnitudes are ordered like the magnitudes. The compiler vectorises a
    // maximum, but not a search.
    let values16 = |limit: u16| {
        let values = bytes.as_chunks::<2>().0.iter();
        let magnitudes = values.map(|bits| u16::from_le_bytes(*bits) & 0x7fff);
        magnitudes.fold(0, u16::max) < limit
    };
    match ty {
        WeightType::F32 => {
            let words = bytes.as_chunks::<4>().0.iter();
            let magnitudes = words.map(|bits| u32::from_le_bytes(*bits) & 0x7fff_ffff);
            magnitudes.fold(0, u32::max) < F32_INFINITY
        }
        WeightType::F16 => values16(F16_INFINITY),
        WeightType::BF16 => values16(BF16_INFINITY),
        _ => {
            let limit = match Layout::of(ty).bf16_fields {
                true => MXFP4_TOO_LARGE,
                false => F16_INFINITY,
            };
            let blocks = bytes.chunks_exact(ty.file_block());
            let magnitudes = blocks.flat_map(|block| fields(ty, block));
            magnitudes.fold(0, |most, field| most.max(field & 0x7fff)) < limit
        }
    }
}

// Bit patterns of infinity.
const F32_INFINITY: u32 = 0x7f80_0000;
const F16_INFINITY: u16 = 0x7c00;
const BF16_INFINITY: u16 = 0x7f80;
/// 2^125 as a bfloat16: the least power of two that overflows `f32` when multiplied by 12, the
/// largest value of [`E2M1`]. The E8M0 NaN (byte 255) maps above it.
const MXFP4_TOO_LARGE: u16 = (125 + 127) << 7;

/// Appends the weights of `bytes`, whole blocks.
pub fn decode(ty: WeightType, bytes: &[u8], out: &mut Vec<f32>) {
    let halves = bytes.as_chunks::<2>().0.iter();
    let halves = halves.map(|bits| u16::from_le_bytes(*bits));
    match ty {
        WeightType::F32 => {
            let values = bytes.as_chunks().0.iter();
            return out.extend(values.map(|bits| f32::from_le_bytes(*bits)));
        }
        WeightType::F16 => return out.extend(halves.map(f16_to_f32)),
        WeightType::BF16 => return out.extend(halves.map(bf16_to_f32)),
        _ => {}
    }
    let mut block = Block::EMPTY;
    for bytes in bytes.chunks_exact(ty.file_block()) {
        let start = out.len();
        out.resize(start + ty.inputs(), 0.0);
        block.read(ty, bytes);
        block.values(ty, &mut out[start..]);
    }
}

/// Unpacks 16 bytes: quant `j` is a low nibble, quant `j + 16` a high nibble.
#[inline(always)]
fn nibbles(from: &[u8], quants: &mut [u8]) {
    if let (Some(from), Some(quants)) = (
        from.first_chunk::<{ BLOCK / 2 }>(),
        quants.first_chunk_mut::<BLOCK>(),
    ) {
        for (j, byte) in from.iter().enumerate() {
            (quants[j], quants[j + BLOCK / 2]) = (byte & 15, byte >> 4);
        }
    }
}

/// 2^(e - 128) as a bfloat16: half the scale of MXFP4's exponent byte `e`, since [`E2M1`] holds
/// twice the values.
fn power_of_two(e: u8) -> u16 {
    match e {
        0 => 0x0020,
        1 => 0x0040,
        e => (u16::from(e) - 1) << 7,
    }
}
