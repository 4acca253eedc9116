//! Recurrent layers: gated delta rule, Mamba-2, short convolution.
//!
//! The softplus of the scores is one of f64, which cards lack: the processor computes it. So each
//! layer with scores takes one read from the card.

use hearthnet_engine::EngineError;
use hearthnet_engine::kernels::{Kernels, softplus};
use hearthnet_engine::layer::{Delta, Layer, Mamba, ShortConvolution};
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::{Activation, DeltaSpec, MambaSpec};

use super::pass::{Pass, device_error};
use super::weights::{BranchEnd, GpuLoadError};
use crate::{Buffer, Gpu, GpuError, Heads, Matrix, Sharing, StateView, Unary, View};

/// Recurrence of a layer.
pub(super) struct CardRecurrence {
    norm: Option<Buffer>,
    /// Matrices of the input. Their outputs lie side by side.
    pub(super) matrices: Vec<Matrix>,
    convolution: CardConvolution,
    kind: Kind,
    pub(super) output: Matrix,
    pub(super) end: BranchEnd,
}

struct CardConvolution {
    positions: u32,
    channels: u32,
    weights: Buffer,
}

enum Kind {
    Short,
    Delta(CardDelta),
    Mamba(CardMamba),
}

struct CardDelta {
    spec: DeltaSpec,
    decay: Vec<f32>,
    decay_bias: Vec<f32>,
    norm: Buffer,
    /// For each value head, the columns of its scores of correction and decay among the scores.
    scores: Vec<(usize, usize)>,
}

struct CardMamba {
    spec: MambaSpec,
    convolution_bias: Buffer,
    step_bias: Vec<f32>,
    decay: Vec<f32>,
    skip: Buffer,
    /// Weights of the norm, a buffer per group.
    norms: Vec<Buffer>,
}

impl CardRecurrence {
    /// Sends the weights to the card; `None` if the layer has no recurrence.
    pub(super) fn upload(
        gpu: &Gpu,
        layer: &Layer,
        norm: Option<Buffer>,
        end: BranchEnd,
    ) -> Result<Option<Self>, GpuLoadError> {
        let Some(output) = &layer.attn_output else {
            return Ok(None);
        };
        let (convolution, kind) = match (&layer.delta, &layer.mamba, &layer.convolution) {
            (Some(delta), ..) => {
                let kind = Kind::Delta(CardDelta::upload(gpu, delta)?);
                (&delta.convolution, kind)
            }
            (_, Some(mamba), _) => {
                let kind = Kind::Mamba(CardMamba::upload(gpu, mamba)?);
                (&mamba.convolution, kind)
            }
            (.., Some(convolution)) => (convolution, Kind::Short),
            _ => return Ok(None),
        };
        let matrices = layer.qkv.parts.iter().map(|packed| gpu.matrix(packed));
        Ok(Some(Self {
            norm,
            matrices: matrices.collect::<Result<_, _>>()?,
            convolution: CardConvolution::upload(gpu, convolution)?,
            kind,
            output: gpu.matrix(output)?,
            end,
        }))
    }

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
    fn upload(gpu: &Gpu, of: &ShortConvolution) -> Result<Self, GpuError> {
        Ok(Self {
            positions: of.positions as u32,
            channels: of.width as u32,
            weights: gpu.upload_f32(&of.weights)?,
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

    fn heads(&self) -> Heads {
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
    fn factors(&self, scores: &[f32]) -> Vec<f32> {
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

    fn heads(&self) -> Heads {
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
    fn factors(&self, scores: &[f32]) -> Vec<f32> {
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
    convolved: Buffer,
    scores: Buffer,
    factors: Buffer,
}

impl RecurrenceBuffers {
    /// Buffers that depend on the rows.
    pub(super) fn of_rows(&self) -> [&Buffer; 3] {
        [&self.convolved, &self.scores, &self.factors]
    }

    /// Buffers for so many rows, with so many channels and factors each.
    pub(super) fn new(
        gpu: &Gpu,
        rows: u32,
        (channels, factors): (u32, u32),
    ) -> Result<Self, GpuError> {
        let of = |width: u32| gpu.buffer(u64::from(rows) * u64::from(width.max(1)));
        Ok(Self {
            convolved: of(channels)?,
            scores: of(factors)?,
            factors: of(factors)?,
        })
    }
}

impl<'a> Pass<'a> {
    /// Recurrence of a layer: reads `x`, writes the branch.
    pub(super) fn recur(&mut self, of: &CardRecurrence, layer: usize) -> Result<(), EngineError> {
        let (rows, b) = (self.rows, self.buffers);
        let columns = |column: u32| b.qkv.rows_at(column, b.widths.qkv);
        let input = self.norm(of.norm.as_ref());
        self.prepare(input, &of.matrices);
        let mut column = 0;
        for matrix in &of.matrices {
            self.multiply(matrix, input, columns(column))?;
            column += matrix.rows();
        }
        let (Some(own), Some([inputs, states])) = (&b.recurrence, self.pages.states(layer)) else {
            return Err(EngineError::Device(
                "a recurrence without states".to_owned(),
            ));
        };
        let channels = of.convolution.channels;
        let convolved = own.convolved.rows(channels);
        let outputs = match &of.kind {
            Kind::Short => {
                let factors = Some(columns(0));
                self.convolve(of, columns(2 * channels), factors, convolved, inputs)?;
                self.step
                    .multiply(convolved, columns(channels), rows, channels);
                convolved
            }
            Kind::Delta(delta) => {
                self.convolve(of, columns(0), None, convolved, inputs)?;
                self.step.activate(Unary::Silu, convolved, rows, channels);
                self.delta(delta, own, states)?
            }
            Kind::Mamba(mamba) => {
                let values = mamba.spec.values();
                self.convolve(of, columns(values), None, convolved, inputs)?;
                let bias = mamba.convolution_bias.rows(0);
                let f32 = BoundaryDtype::F32;
                self.step.add_round(convolved, bias, rows, channels, f32);
                self.step.activate(Unary::Silu, convolved, rows, channels);
                self.mamba(mamba, own, states)?
            }
        };
        self.prepare(outputs, [&of.output]);
        self.multiply(&of.output, outputs, self.branch())
    }

    fn convolve(
        &mut self,
        of: &CardRecurrence,
        x: View<'a>,
        factors: Option<View<'a>>,
        out: View<'a>,
        states: StateView<'a>,
    ) -> Result<(), EngineError> {
        let CardConvolution {
            positions,
            channels,
            ref weights,
        } = of.convolution;
        for pieces in self.info.rounds() {
            let rows = u64::from(pieces.count * pieces.rows);
            self.make_room(rows * u64::from(channels) * u64::from(positions) * 4)?;
            let shape = (positions, channels);
            self.step
                .convolve(x, factors, out, shape, weights, pieces, states);
        }
        Ok(())
    }

    /// Takes rows from the outputs of the convolution to the inputs of the output projection.
    fn delta(
        &mut self,
        of: &CardDelta,
        own: &'a RecurrenceBuffers,
        states: StateView<'a>,
    ) -> Result<View<'a>, EngineError> {
        let (rows, b, spec) = (self.rows, self.buffers, &of.spec);
        let (channels, values) = (spec.channels(), spec.values());
        let columns = |column: u32| own.convolved.rows_at(column, channels);
        let all = [0, spec.keys(), 2 * spec.keys()].map(columns);
        let scale = 1.0 / (spec.key_width as f32).sqrt();
        for (x, scale) in [(all[0], scale), (all[1], 1.0)] {
            let (heads, width, eps) = (spec.key_heads, spec.key_width, spec.norm_eps);
            self.step.l2_norm(x, rows, heads, width, eps, scale);
        }
        let scores = self.scores(own, channels + values, 2 * spec.value_heads)?;
        // No launch is under way that reads the factors of another layer.
        self.gpu.write_f32(&own.factors, 0, &of.factors(&scores));
        let heads = of.heads();
        for pieces in self.info.rounds() {
            self.make_room(work(heads, pieces.count * pieces.rows))?;
            self.step
                .delta_rule(heads, all, &own.factors, pieces, states);
        }
        let (out, eps) = (all[2], self.spec.norm_eps);
        let (groups, width) = (spec.value_heads, spec.value_width);
        self.step
            .rms_norm(out, out, rows, groups, width, Some(&of.norm), eps);
        let (gates, gated) = (b.qkv.rows_at(channels, b.widths.qkv), b.attn.rows(values));
        self.step
            .gate(Activation::Silu, gates, out, gated, rows, values);
        Ok(gated)
    }

    fn mamba(
        &mut self,
        of: &CardMamba,
        own: &'a RecurrenceBuffers,
        states: StateView<'a>,
    ) -> Result<View<'a>, EngineError> {
        let (rows, b, spec) = (self.rows, self.buffers, &of.spec);
        let (channels, values, keys) = (spec.channels(), spec.values(), spec.keys());
        let columns = |column: u32| own.convolved.rows_at(column, channels);
        // The order of the operation: B, C, values.
        let all = [values, values + keys, 0].map(columns);
        let scores = self.scores(own, values + channels, spec.heads)?;
        // No launch is under way that reads the factors of another layer.
        self.gpu.write_f32(&own.factors, 0, &of.factors(&scores));
        let heads = of.heads();
        for pieces in self.info.rounds() {
            self.make_room(work(heads, pieces.count * pieces.rows))?;
            self.step
                .mamba_scan(heads, all, &own.factors, &of.skip, pieces, states);
        }
        let (gates, gated) = (b.qkv.rows(b.widths.qkv), b.attn.rows(values));
        self.step
            .gate(Activation::Silu, gates, all[2], gated, rows, values);
        let (width, eps) = (values / spec.groups.max(1), self.spec.norm_eps);
        for (group, weights) in (0..).zip(&of.norms) {
            let x = b.attn.rows_at(group * width, values);
            self.step.rms_norm(x, x, rows, 1, width, Some(weights), eps);
        }
        Ok(gated)
    }

    /// Reads some columns of the rows. Waits for all that was recorded.
    fn scores(
        &mut self,
        own: &'a RecurrenceBuffers,
        column: u32,
        width: u32,
    ) -> Result<Vec<f32>, EngineError> {
        let (rows, b) = (self.rows, self.buffers);
        let from = b.qkv.rows_at(column, b.widths.qkv);
        self.step.copy(from, own.scores.rows(width), rows, width);
        self.submit()?;
        let words = u64::from(rows) * u64::from(width);
        let read = self.gpu.read(&own.scores, 0..words).map_err(device_error)?;
        Ok(read.into_iter().map(f32::from_bits).collect())
    }
}

/// Estimate of the bytes that rows move: for each row, three times the states of all heads.
fn work(heads: Heads, rows: u32) -> u64 {
    let cells = u64::from(heads.heads) * u64::from(heads.width) * u64::from(heads.rows);
    u64::from(rows) * cells * 12
}
