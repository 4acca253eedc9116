//! Numbers to compute with, ordinary and adversarial; a seed gives the same everywhere.

use half::{bf16, f16};
use hearthnet_model::kernels::WeightType;
use hearthnet_testkit::block_factors;

/// SplitMix64.
pub(crate) struct Values(pub(crate) u64);

/// What kind of numbers to draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// About -1 to 1.
    Ordinary,
    /// Zeros of both signs, subnormals, magnitudes near the ends of what does not overflow, ties.
    Extreme,
    /// Any bits: infinities and NaN among them.
    Anything,
}

pub(crate) const KINDS: [Kind; 3] = [Kind::Ordinary, Kind::Extreme, Kind::Anything];

impl Values {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub(crate) fn one(&mut self, kind: Kind) -> f32 {
        let x = (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        match kind {
            Kind::Ordinary => x,
            // Every tenth, or else nearly every sum would be NaN.
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
                7 => (self.below(255) as f32 - 127.5) / 127.0,
                8 => x * 1e-4,
                9 => x * 100.0,
                _ => x,
            },
        }
    }

    pub(crate) fn many(&mut self, n: usize, kind: Kind) -> Vec<f32> {
        let mut values: Vec<f32> = (0..n).map(|_| self.one(kind)).collect();
        // Whole blocks around what counts as zero when they are quantised.
        for block in values.chunks_mut(32) {
            if kind == Kind::Extreme && self.below(6) == 0 {
                let scale = [1e-27, 1e-30, 1e-36][self.below(3)];
                block.fill_with(|| self.one(Kind::Ordinary) * scale);
            }
        }
        values
    }

    fn field(&mut self, kind: Kind) -> [u8; 2] {
        const ENDS: [u16; 8] = [0, 0x8000, 1, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff];
        let bits = match kind {
            Kind::Extreme if self.below(2) == 0 => ENDS[self.below(ENDS.len())],
            Kind::Anything if self.below(10) == 0 => self.bits() as u16,
            _ => f16::from_f32(self.one(kind) * 0.1).to_bits(),
        };
        bits.to_le_bytes()
    }

    /// The file's bytes of a matrix.
    pub(crate) fn weights(
        &mut self,
        ty: WeightType,
        rows: usize,
        cols: usize,
        kind: Kind,
    ) -> Vec<u8> {
        use WeightType as T;
        let block = ty.row_bytes(ty.inputs()).unwrap();
        let fields = block_factors(ty.tensor_type().name());
        let mut bytes = Vec::new();
        for _ in 0..rows * cols / ty.inputs() {
            match ty {
                T::F32 => bytes.extend(self.one(kind).to_le_bytes()),
                T::F16 => bytes.extend(f16::from_f32(self.one(kind)).to_le_bytes()),
                T::BF16 => bytes.extend(bf16::from_f32(self.one(kind)).to_le_bytes()),
                _ => {
                    // Runs of the largest and smallest quants find a sum that overflows.
                    let (run, start) = (self.below(5), bytes.len());
                    bytes.extend((0..block).map(|_| match run {
                        0 => 0xff,
                        1 => 0x80,
                        2 => 0x7f,
                        _ => self.bits() as u8,
                    }));
                    for at in fields {
                        bytes[start + at..][..2].copy_from_slice(&self.field(kind));
                    }
                    if ty == T::MXFP4 && kind == Kind::Ordinary {
                        bytes[start] = 120 + self.below(8) as u8;
                    }
                }
            }
        }
        bytes
    }
}

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

pub(crate) fn ints(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_le_bytes).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    let (values, _) = bytes.as_chunks::<4>();
    values
        .iter()
        .map(|value| f32::from_le_bytes(*value))
        .collect()
}

/// A buffer whose content nobody may read.
pub(crate) fn nothing(floats: usize) -> Vec<u8> {
    vec![0xff; 4 * floats]
}

/// Fails at the first place where two results differ; one NaN is as good as another.
#[track_caller]
pub(crate) fn assert_same(what: &str, got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len(), "{what}: lengths");
    for (i, (g, w)) in got.iter().zip(wanted).enumerate() {
        assert!(
            g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()),
            "{what}: value {i} is {g:e} ({:08x}), not {w:e} ({:08x})",
            g.to_bits(),
            w.to_bits()
        );
    }
}
