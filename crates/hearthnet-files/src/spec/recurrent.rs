//! Blocks that combine the rows of a sequence by a recurrence.

use serde::{Deserialize, Serialize};

use super::check::{MAX_SIZE, SpecError, ensure, epsilon, size};

/// Largest number of positions of a convolution; published models have 3 or 4.
pub const MAX_CONVOLUTION: u32 = 64;

/// Gated delta rule ("Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464):
/// queries, keys and values pass through a short causal convolution; each value head has a matrix
/// `[key_width, value_width]` that decays, and from which a key reads the value to be corrected.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaSpec {
    /// Every n-th block (n, 2n, ... counted from 1) has attention; the others have the recurrence.
    pub attention_every: u32,
    /// Positions of the convolution: a row, and those before it.
    pub convolution: u32,
    /// Heads of queries and of keys.
    pub key_heads: u32,
    /// A multiple of `key_heads`.
    pub value_heads: u32,
    /// Values per head of queries and of keys.
    pub key_width: u32,
    /// Values per value head.
    pub value_width: u32,
    /// Key head of value head `h`: `h mod key_heads` if tiled, otherwise
    /// `h / (value_heads / key_heads)`.
    pub tiled: bool,
    /// Added to the sum of squares when queries and keys are normalised.
    pub norm_eps: f32,
}

/// Gated short convolution ("LFM2 Technical Report", arXiv 2511.23404): the product of two
/// projections of a row passes through a short causal convolution with a channel for each value of
/// the width, and is multiplied by a third projection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvolutionSpec {
    /// Positions of the convolution: a row, and those before it.
    pub positions: u32,
    /// Blocks that have attention instead, in ascending order.
    pub attention: Vec<u32>,
}

/// Mamba-2 ("Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured
/// State Space Duality", arXiv 2405.21060): values, and rows B and C that groups of heads share,
/// pass through a short causal convolution; each head has a matrix `[state_rows, head_width]` that
/// decays, to which B writes the values, and from which C reads the outputs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MambaSpec {
    /// Positions of the convolution: a row, and those before it.
    pub convolution: u32,
    pub heads: u32,
    /// Groups of consecutive heads; a divisor of `heads`.
    pub groups: u32,
    /// Values per head.
    pub head_width: u32,
    /// Rows of the state of a head, and values of a row B or C.
    pub state_rows: u32,
}

/// Values that a sequence keeps for a block, whatever its length.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StateSize {
    /// Inputs of a convolution: so many earlier rows ...
    pub rows: u32,
    /// ... of so many values.
    pub channels: u32,
    /// Values of the recurrence.
    pub values: u32,
}

impl StateSize {
    /// All values; each is an f32.
    pub fn total(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.channels) + u64::from(self.values)
    }
}

impl MambaSpec {
    /// Width of the values of all heads.
    pub fn values(&self) -> u32 {
        self.heads.saturating_mul(self.head_width)
    }

    /// Width of a row B, and of a row C, of all groups.
    pub fn keys(&self) -> u32 {
        self.groups.saturating_mul(self.state_rows)
    }

    /// Channels of the convolution: values, B and C.
    pub fn channels(&self) -> u32 {
        self.values().saturating_add(self.keys().saturating_mul(2))
    }

    /// Outputs of the first matrix: gates, channels, and a step for each head.
    pub fn row(&self) -> u32 {
        let both = self.values().saturating_add(self.channels());
        both.saturating_add(self.heads)
    }

    pub fn group(&self, head: u32) -> u32 {
        head / (self.heads / self.groups.max(1)).max(1)
    }

    pub fn state(&self) -> StateSize {
        StateSize {
            rows: self.convolution.saturating_sub(1),
            channels: self.channels(),
            values: self.values().saturating_mul(self.state_rows),
        }
    }

    pub(super) fn check(&self, context: u32) -> Result<(), SpecError> {
        for (field, value) in [
            ("mamba.convolution", self.convolution),
            ("mamba.heads", self.heads),
            ("mamba.groups", self.groups),
            ("mamba.head_width", self.head_width),
            ("mamba.state_rows", self.state_rows),
        ] {
            size(field, value)?;
        }
        convolution("mamba.convolution", self.convolution, context)?;
        let shared = self.heads.is_multiple_of(self.groups);
        ensure(shared, "mamba.groups", "must divide the number of heads")?;
        let reason = "must be at most 16777216 divided by the number of heads";
        let wide = self.row() <= MAX_SIZE && self.state().values <= MAX_SIZE;
        ensure(wide, "mamba.state_rows", reason)
    }
}

fn convolution(field: &'static str, positions: u32, context: u32) -> Result<(), SpecError> {
    let short = positions <= MAX_CONVOLUTION.min(context);
    let reason = "must be at most 64, and at most the context";
    ensure(short, field, reason)
}

impl DeltaSpec {
    /// Width of the queries, and of the keys, of all heads.
    pub fn keys(&self) -> u32 {
        self.key_heads.saturating_mul(self.key_width)
    }

    /// Width of the values of all heads.
    pub fn values(&self) -> u32 {
        self.value_heads.saturating_mul(self.value_width)
    }

    /// Width of queries, keys and values together: the channels of the convolution.
    pub fn channels(&self) -> u32 {
        let both = self.keys().saturating_mul(2);
        both.saturating_add(self.values())
    }

    /// Key head of a value head.
    pub fn key_head(&self, value_head: u32) -> u32 {
        match self.tiled {
            true => value_head % self.key_heads.max(1),
            false => value_head / (self.value_heads / self.key_heads.max(1)).max(1),
        }
    }

    pub fn state(&self) -> StateSize {
        StateSize {
            rows: self.convolution.saturating_sub(1),
            channels: self.channels(),
            values: self.values().saturating_mul(self.key_width),
        }
    }

    pub(super) fn check(&self, context: u32) -> Result<(), SpecError> {
        for (field, value) in [
            ("delta.attention_every", self.attention_every),
            ("delta.convolution", self.convolution),
            ("delta.key_heads", self.key_heads),
            ("delta.value_heads", self.value_heads),
            ("delta.key_width", self.key_width),
            ("delta.value_width", self.value_width),
        ] {
            size(field, value)?;
        }
        convolution("delta.convolution", self.convolution, context)?;
        let shared = self.value_heads.is_multiple_of(self.key_heads);
        let reason = "must be a multiple of the number of key heads";
        ensure(shared, "delta.value_heads", reason)?;
        let reason = "must be at most 16777216 divided by the number of heads";
        let wide = self.channels() <= MAX_SIZE && self.state().values <= MAX_SIZE;
        ensure(wide, "delta.value_width", reason)?;
        epsilon("delta.norm_eps", self.norm_eps)
    }
}

impl ConvolutionSpec {
    pub(super) fn check(&self, layers: u32, context: u32) -> Result<(), SpecError> {
        let short = (2..=MAX_CONVOLUTION.min(context)).contains(&self.positions);
        let reason = "must be between 2 and 64, and at most the context";
        ensure(short, "convolution.positions", reason)?;
        let ascending = self.attention.is_sorted_by(|a, b| a < b);
        let within = self.attention.last().is_some_and(|last| *last < layers);
        let some = ascending && within && self.attention.len() < layers as usize;
        let reason = "must give some blocks attention, but not all, in ascending order";
        ensure(some, "convolution.attention", reason)
    }
}
