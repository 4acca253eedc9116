//! Recurrent layers: gated delta rule, Mamba-2, short convolution.
//!
//! The softplus of the scores is one of f64, which cards lack: the processor computes it. So each
//! layer with scores takes one read from the card.

use hearthnet_engine::kernels::{Kernels, softplus};
use hearthnet_engine::layer::{Delta, Mamba, Recurrence};
use hearthnet_files::spec::{DeltaSpec, MambaSpec};

use super::parts::BranchEnd;
use super::row_buffers::RowBuffers;
use crate::{Buffer, Gpu, GpuError, Heads, Matrix, Sharing};

/// Recurrence of a layer.
pub(super) struct CardRecurrence {
    pub(super) norm: Option<Buffer>,
    /// Matrices of the input. Their outputs lie side by side.
    pub(super) matrices: Vec<Matrix>,
    pub(super) convolution: CardConvolution,
    pub(super) kind: Kind,
    pub(super) output: Matrix,
    pub(super) end: BranchEnd,
}

pub(super) struct CardConvolution {
    pub(super) positions: u32,
    pub(super) channels: u32,
    pub(super) weights: Buffer,
}

pub(super) enum Kind {
    Short,
    Delta(CardDelta),
    Mamba(CardMamba),
}

pub(super) struct CardDelta {
    pub(super) spec: DeltaSpec,
    decay: Vec<f32>,
    decay_bias: Vec<f32>,
    pub(super) norm: Buffer,
    /// For each value head, the columns of its scores of correction and decay among the scores.
    scores: Vec<(usize, usize)>,
}

pub(super) struct CardMamba {
    pub(super) spec: MambaSpec,
    pub(super) convolution_bias: Buffer,
    step_bias: Vec<f32>,
    decay: Vec<f32>,
    pub(super) skip: Buffer,
    /// Weights of the norm, a buffer per group.
    pub(super) norms: Vec<Buffer>,
}

impl CardRecurrence {
    /// Values of a row of the matrices' outputs.
    pub(super) fn row(&self) -> u32 {
        self.matrices.iter().map(Matrix::rows).sum()
    }

    pub(super) fn channels(&self) -> u32 {
        self.convolution.channels
    }

    /// Scores of a row.
    pub(super) fn scores(&self) -> u32 {
        match &self.kind {
            Kind::Short => 0,
            Kind::Delta(delta) => 2 * delta.spec.value_heads,
            Kind::Mamba(mamba) => mamba.spec.heads,
        }
    }

    /// Factors of a row.
    pub(super) fn factors(&self) -> u32 {
        match &self.kind {
            Kind::Short => 0,
            Kind::Delta(delta) => 2 * delta.spec.value_heads,
            Kind::Mamba(mamba) => 2 * mamba.spec.heads,
        }
    }
}

impl CardConvolution {
    pub(super) fn upload(gpu: &Gpu, of: &Recurrence) -> Result<Self, GpuError> {
        let of = match of {
            Recurrence::Delta(delta) => &delta.convolution,
            Recurrence::Convolution(convolution) => convolution,
            Recurrence::Mamba(mamba) => &mamba.convolution,
        };
        Ok(Self {
            positions: of.positions as u32,
            channels: of.width as u32,
            weights: gpu.upload_f32(&of.weights)?,
        })
    }

    /// Values of its earlier inputs in a state; those of the heads lie behind them.
    pub(super) fn state(&self) -> u32 {
        self.positions.saturating_sub(1) * self.channels
    }
}

impl Kind {
    pub(super) fn upload(gpu: &Gpu, of: &Recurrence) -> Result<Self, GpuError> {
        Ok(match of {
            Recurrence::Delta(delta) => Self::Delta(CardDelta::upload(gpu, delta)?),
            Recurrence::Convolution(_) => Self::Short,
            Recurrence::Mamba(mamba) => Self::Mamba(CardMamba::upload(gpu, mamba)?),
        })
    }
}

impl CardDelta {
    fn upload(gpu: &Gpu, of: &Delta) -> Result<Self, GpuError> {
        let first = (of.spec.channels() + of.spec.values()) as usize;
        let scores = of.scores.iter();
        Ok(Self {
            spec: of.spec,
            decay: of.decay.clone(),
            decay_bias: of.decay_bias.clone(),
            norm: gpu.upload_f32(&of.norm)?,
            scores: scores
                .map(|(beta, alpha)| (beta - first, alpha - first))
                .collect(),
        })
    }

    pub(super) fn heads(&self) -> Heads {
        let DeltaSpec {
            key_heads,
            value_heads,
            key_width,
            value_width,
            tiled,
            ..
        } = self.spec;
        Heads {
            heads: value_heads,
            width: value_width,
            rows: key_width,
            sharing: match tiled {
                true => Sharing::Tiled(key_heads),
                false => Sharing::Blocks(value_heads / key_heads.max(1)),
            },
        }
    }

    /// For each row and head, the factors of the state and of the correction.
    pub(super) fn factors(&self, scores: &[f32]) -> Vec<f32> {
        let heads = self.scores.len();
        let (mut decay, mut beta) = (Vec::new(), Vec::new());
        for row in scores.chunks_exact(2 * heads.max(1)) {
            for (head, (own_beta, alpha)) in self.scores.iter().enumerate() {
                beta.push(row[*own_beta]);
                let step = softplus(row[*alpha] + self.decay_bias[head]);
                decay.push(self.decay[head] * step);
            }
        }
        let kernels = Kernels::best();
        kernels.sigmoid(&mut beta);
        kernels.exp(&mut decay);
        decay
            .into_iter()
            .zip(beta)
            .flat_map(<[f32; 2]>::from)
            .collect()
    }
}

impl CardMamba {
    fn upload(gpu: &Gpu, of: &Mamba) -> Result<Self, GpuError> {
        let group = of.spec.values() / of.spec.groups.max(1);
        let norms = of.norm.chunks_exact(group.max(1) as usize);
        Ok(Self {
            spec: of.spec,
            convolution_bias: gpu.upload_f32(&of.convolution_bias)?,
            step_bias: of.step_bias.clone(),
            decay: of.decay.clone(),
            skip: gpu.upload_f32(&of.skip)?,
            norms: norms
                .map(|weights| gpu.upload_f32(weights))
                .collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn heads(&self) -> Heads {
        let MambaSpec {
            heads,
            groups,
            head_width,
            state_rows,
            ..
        } = self.spec;
        Heads {
            heads,
            width: head_width,
            rows: state_rows,
            sharing: Sharing::Blocks(heads / groups.max(1)),
        }
    }

    /// For each row and head, the factors of the state and of the values.
    pub(super) fn factors(&self, scores: &[f32]) -> Vec<f32> {
        let heads = self.step_bias.len().max(1);
        let scores = scores.iter().enumerate();
        let steps = scores.map(|(i, score)| softplus(score + self.step_bias[i % heads]));
        let steps: Vec<f32> = steps.collect();
        let decay = steps.iter().enumerate();
        let mut decay: Vec<f32> = decay
            .map(|(i, step)| step * self.decay[i % heads])
            .collect();
        Kernels::best().exp(&mut decay);
        decay
            .into_iter()
            .zip(steps)
            .flat_map(<[f32; 2]>::from)
            .collect()
    }
}

/// Buffers for the rows of a pass.
pub(super) struct RecurrenceBuffers {
    pub(super) convolved: Buffer,
    pub(super) scores: Buffer,
    pub(super) factors: Buffer,
}

impl RecurrenceBuffers {
    /// Buffers for rows with so many channels and factors each.
    pub(super) fn new(
        buffers: &mut RowBuffers<'_>,
        (channels, factors): (u32, u32),
    ) -> Result<Self, GpuError> {
        Ok(Self {
            convolved: buffers.of(channels)?,
            scores: buffers.of(factors)?,
            factors: buffers.of(factors)?,
        })
    }
}
