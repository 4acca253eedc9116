//! Deterministic test data, ordinary and adversarial.

use hearthnet_files::blocks::WeightType;
use hearthnet_files::floats::f32_to_f16;

use super::super::*;

/// SplitMix64 generator: a seed gives the same data everywhere.
pub(super) struct Values(pub(super) u64);

/// Distribution of the drawn numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// About -1 to 1.
    Ordinary,
    /// Zeros of both signs, subnormals, the smallest and largest magnitudes that do not overflow a
    /// computation, rounding borders, ties.
    Extreme,
    /// Ordinary values and, for one in ten, any bit pattern, including infinities and NaN.
    Anything,
    /// Only negative.
    Negative,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [
        Self::Ordinary,
        Self::Extreme,
        Self::Anything,
        Self::Negative,
    ];
}

impl Values {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform in -1 .. 1.
    pub(super) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(super) fn one(&mut self, kind: Kind) -> f32 {
        let x = self.unit();
        match kind {
            Kind::Ordinary => x,
            Kind::Negative => -x.abs() - 0.01,
            // Every tenth value only; otherwise nearly every sum would be NaN.
            Kind::Anything if self.below(10) == 0 => f32::from_bits(self.bits() as u32),
            Kind::Anything => x,
            Kind::Extreme => match self.below(12) {
                0 => 0.0,
                1 => -0.0,
                2 => f32::from_bits(self.bits() as u32 & 0x807f_ffff),
                3 => x * f32::MIN_POSITIVE,
                4 => x * 1e-30,
                5 => x * 1e15,
                6 => 65504.0 * x.signum(),
                7 => (self.below(255) as f32 - 127.0) / 127.0,
                8 => (self.below(255) as f32 - 127.5) / 127.0,
                9 => x * 1e-4,
                _ => x,
            },
        }
    }

    pub(super) fn many(&mut self, n: usize, kind: Kind) -> Vec<f32> {
        (0..n).map(|_| self.one(kind)).collect()
    }

    /// Numbers of [`Self::unit`].
    pub(super) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    /// Bits of a scale or a minimum.
    fn field(&mut self, kind: Kind) -> u16 {
        // Both zeros, the subnormals next to zero and to the normals, the largest magnitudes.
        const EXTREMES: [u16; 8] = [
            0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff,
        ];
        match kind {
            Kind::Extreme if self.below(2) == 0 => EXTREMES[self.below(EXTREMES.len())],
            Kind::Anything if self.below(10) == 0 => self.bits() as u16,
            _ => f32_to_f16(self.one(kind) * 0.1),
        }
    }

    /// Bytes of a matrix in a file: scales drawn as `kind`, quants arbitrary.
    pub(super) fn weights(
        &mut self,
        ty: WeightType,
        rows: usize,
        cols: usize,
        kind: Kind,
    ) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..rows * cols / ty.inputs() {
            match ty {
                WeightType::F32 => bytes.extend(self.one(kind).to_le_bytes()),
                WeightType::F16 => bytes.extend(f32_to_f16(self.one(kind)).to_le_bytes()),
                WeightType::BF16 => {
                    bytes.extend(half::bf16::from_f32(self.one(kind)).to_le_bytes());
                }
                _ => {
                    // Blocks of the largest and smallest quants reveal sums that overflow.
                    let run = self.below(4);
                    let start = bytes.len();
                    bytes.extend((0..ty.file_block()).map(|_| match run {
                        0 => 0xff,
                        1 => 0x80,
                        2 => 0x7f,
                        _ => self.bits() as u8,
                    }));
                    for at in fields(ty) {
                        let field = self.field(kind).to_le_bytes();
                        bytes[start + at..][..2].copy_from_slice(&field);
                    }
                    if ty == WeightType::MXFP4 && kind == Kind::Ordinary {
                        bytes[start] = 120 + self.below(8) as u8;
                    }
                }
            }
        }
        bytes
    }
}

/// Offsets of the 16-bit floats in a block of the file.
pub(super) fn fields(ty: WeightType) -> &'static [usize] {
    hearthnet_testkit::block_factors(ty.tensor_type())
}

/// Copies the raw binary16 bits of one position into a page.
pub(crate) fn write_kv(page: &mut [u16], slot: usize, key: &[u16], value: &[u16]) {
    let d = key.len();
    kv::check(page.len(), CacheDtype::F16, slot, d, value.len());
    for i in 0..d {
        page[key_cell(d, slot, i)] = key[i];
        page[value_cell(d, slot, i)] = value[i];
    }
}

/// Attention of one head of `head_dim` values over a cache of binary16, without sinks, cap and
/// window. `position` is that of the first row.
pub(super) fn plain_attention<'a>(
    head_dim: usize,
    scale: f32,
    position: usize,
    pages: &'a [&'a [u16]],
) -> Attention<'a> {
    Attention {
        head_dim,
        cache: CacheDtype::F16,
        heads: 1,
        scale,
        softcap: None,
        sinks: None,
        position,
        window: None,
        both_sides: None,
        pages,
    }
}

/// `rows` rows in two parts, without empty ones.
pub(super) fn in_two(rows: usize, cut: usize) -> impl Iterator<Item = Range<usize>> {
    let cut = cut.min(rows);
    let parts = [0..cut, cut..rows].into_iter();
    parts.filter(|part| !part.is_empty())
}

pub(super) fn all_kernels() -> impl Iterator<Item = Kernels> {
    Isa::available().into_iter().filter_map(Kernels::new)
}

pub(super) fn packed_matrix(matrix: &Matrix<'_>) -> Packed {
    Packed::pack_stacked(&mut Arena::default(), &[*matrix]).unwrap()
}

/// Rows of activations in the form that a matrix reads.
pub(super) fn activations(kernels: Kernels, packed: &Packed, x: &[f32]) -> Act {
    let mut act = Act::default();
    kernels.prepare(x, packed.cols(), ActForm::of([packed]), &mut act);
    act
}

/// Product of a matrix with rows of activations, `[rows of x][outputs]`.
pub(super) fn product(kernels: Kernels, packed: &Packed, x: &[f32]) -> Vec<f32> {
    let rows = packed.rows();
    let mut out = vec![f32::NAN; x.len() / packed.cols() * rows];
    let (act, to) = (
        activations(kernels, packed, x),
        TileMut::whole(&mut out, rows),
    );
    kernels.matmul(packed, 0..packed.panels(), &act, Output::Store, to);
    out
}

/// A matrix over `bytes`.
pub(super) fn matrix(ty: WeightType, rows: usize, cols: usize, bytes: &[u8]) -> Matrix<'_> {
    Matrix {
        weight_type: ty,
        rows,
        cols,
        bytes,
    }
}

/// Returns true if the bits are equal or both values are NaN.
pub(super) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Panics at the first index at which two results differ.
#[track_caller]
pub(super) fn assert_same(what: &str, got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len(), "{what}: lengths");
    for (i, (g, w)) in got.iter().zip(wanted).enumerate() {
        assert!(
            same(*g, *w),
            "{what}: value {i} is {g:e} ({:08x}), not {w:e} ({:08x})",
            g.to_bits(),
            w.to_bits()
        );
    }
}
