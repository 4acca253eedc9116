//! Rotary position embedding.

use serde::{Deserialize, Serialize};

use super::check::{SpecError, base, ensure, is_default, positive, size};

/// Rotary position embedding: rotates value pair `i` of the first `dims` values of a head by
/// `position * theta^(-2i / dims)` radians, modified by `scaling`. The rest of the head stays
/// unchanged. (In latent attention: the last `dims` values, see
/// [`LatentSpec`](super::LatentSpec).)
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    pub kind: RopeKind,
    /// Rotated values of a head: even, at most the head's width.
    pub dims: u32,
    /// Base of the frequencies, at least 1.
    pub theta: f64,
    #[serde(default, skip_serializing_if = "is_default")]
    pub scaling: Option<RopeScaling>,
    /// Base of the frequencies, without scaling, for blocks with a sliding window; `None`: as in
    /// the other blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub local_theta: Option<f64>,
    /// Every n-th block (n, 2n, ... counted from 1) has no RoPE.
    #[serde(default, skip_serializing_if = "is_default")]
    pub skip_every: Option<u32>,
}

impl RopeSpec {
    pub(super) fn check(&self) -> Result<(), SpecError> {
        base("rope.local_theta", self.local_theta.unwrap_or(1.0))?;
        match self.scaling {
            Some(RopeScaling::Linear { factor }) => positive("rope.scaling.factor", Some(factor)),
            Some(RopeScaling::Long { amplitude, .. }) => {
                positive("rope.scaling.amplitude", Some(amplitude))
            }
            Some(RopeScaling::Yarn(yarn)) => {
                ensure(self.theta > 1.0, "rope.theta", "must be above 1 for YaRN")?;
                yarn.check()
            }
            Some(RopeScaling::Factors) | None => Ok(()),
        }
    }
}

/// Scaling of RoPE frequencies.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// Divides all frequencies by `factor`.
    Linear { factor: f64 },
    /// Divides each frequency by its factor from the tensor `rope_freqs.weight` (Llama 3.1).
    Factors,
    /// Divides each frequency by its factor, and multiplies cosines and sines by `amplitude`
    /// (LongRoPE, Phi-3).
    Long {
        /// Tensor with the factors: `rope_factors_long.weight` if the context exceeds the original
        /// training length, else `rope_factors_short.weight`.
        long: bool,
        amplitude: f64,
    },
    /// Divides slow frequencies, keeps fast frequencies (YaRN).
    Yarn(YarnSpec),
}

/// YaRN ("YaRN: Efficient Context Window Extension of Large Language Models", arXiv 2309.00071).
///
/// A pair that makes many turns within the original context distinguishes neighbours and keeps its
/// frequency. A pair that makes less than one turn encodes absolute positions, and its frequency is
/// divided, so that its angles stay in the trained range. Frequencies between are interpolated.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YarnSpec {
    /// Divisor of the frequencies of slow pairs, at least 1.
    pub factor: f64,
    /// Context length of the original training, in positions.
    pub original: u32,
    /// Pairs with at least this many turns within `original` are fast.
    pub fast: f64,
    /// Pairs with at most this many turns within `original` are slow; below `fast`.
    pub slow: f64,
    /// Whether the pair indices at which the ramp begins and ends are rounded outwards to whole
    /// numbers.
    pub whole: bool,
    /// Factor of cosines and sines.
    pub amplitude: f64,
}

impl YarnSpec {
    /// The amplitude that the paper recommends, divided by a correction that a model may ask for:
    /// `(0.1 ln(factor) + 1) / (0.1 undo ln(factor) + 1)`.
    pub fn usual_amplitude(factor: f64, undo: f64) -> f64 {
        let log = libm::log(factor);
        (0.1 * log + 1.0) / (0.1 * undo * log + 1.0)
    }

    fn check(&self) -> Result<(), SpecError> {
        let stretched = (1.0..=f64::from(f32::MAX)).contains(&self.factor);
        ensure(
            stretched,
            "rope.scaling.factor",
            "must be at least 1 for YaRN",
        )?;
        size("rope.scaling.original", self.original)?;
        positive("rope.scaling.fast", Some(self.fast))?;
        let slow = (f64::from(f32::MIN_POSITIVE)..self.fast).contains(&self.slow);
        let reason = "must be positive and below beta_fast";
        ensure(slow, "rope.scaling.slow", reason)?;
        positive("rope.scaling.yarn.amplitude", Some(self.amplitude))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rotation {
    /// With [`RopeSpec::theta`] and [`RopeSpec::scaling`].
    Global,
    /// With [`RopeSpec::local_theta`].
    Local,
    /// No RoPE.
    None,
}

/// Pairing of the values that RoPE rotates.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeKind {
    /// Neighbours: `2i` and `2i + 1` (ggml's "norm" kind). Llama files use it: their converter has
    /// permuted the rows of the query and key matrices accordingly.
    Interleaved,
    /// `i` and `i + dims / 2` (ggml's "neox" kind).
    #[serde(rename = "halves")]
    NeoX,
}
