//! Runs rows through layers: the steps of `hearthnet-engine`'s `forward`, one launch after another.
//!
//! Launches are recorded into steps, and a step is submitted before it would take longer than
//! [`Pace::limit`] allows, so that the card can draw the desktop in between.

mod experts;
mod latent;
mod recurrence;

use hearthnet_engine::EngineError;
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::{Activation, ModelSpec};

use super::memory::CardMemory;
use super::parts::{BranchEnd, CardFfn};
use super::rows::RowInfo;
use super::scratch::{Angles, Buffers};
use super::weights::{Attention, CardLayer, Feed, PerLayer};
use crate::{AttentionShape, Buffer, Gpu, Input, Matrix, Step, Unary, View};

/// Rows of a batch on their way through layers.
pub(super) struct Pass<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) spec: &'a ModelSpec,
    pub(super) memory: &'a CardMemory,
    pub(super) buffers: &'a Buffers,
    pub(super) angles: &'a Angles,
    pub(super) info: &'a RowInfo,
    pub(super) rows: u32,
    pub(super) step: Step,
    /// Work recorded in the step, and its limit, in bytes of weights.
    pub(super) work: u64,
    pub(super) limit: u64,
    /// Work of the whole pass.
    pub(super) done: u64,
}

/// Rows whose matrix products share a pass over the weights.
const SHARED_ROWS: u32 = 16;

impl<'a> Pass<'a> {
    /// Takes `x` through a layer. `layer` is its index among the engine's layers, `nth` that among
    /// the layers of the batch, which are `layers`.
    pub(super) fn layer(
        &mut self,
        of: &CardLayer,
        layer: usize,
        (nth, layers): (u32, u32),
    ) -> Result<(), EngineError> {
        let spec = self.spec;
        let has_sum_norm = of.feed.end().is_some_and(|end| end.sum_norm.is_some());
        let last = match of.scale.is_some() || has_sum_norm {
            true => BoundaryDtype::F32,
            false => spec.boundary,
        };
        let first = match (&of.attention, &of.recurrence) {
            (Some(attention), _) => {
                self.attention(attention)?;
                Some(&attention.end)
            }
            (None, Some(recurrence)) => {
                self.recur(recurrence, layer)?;
                Some(&recurrence.end)
            }
            (None, None) => None,
        };
        if let Some(end) = first {
            let dtype = match of.feed {
                Feed::None => last,
                Feed::Dense { .. } | Feed::Experts { .. } => BoundaryDtype::F32,
            };
            self.end_branch(end, dtype, BoundaryDtype::F32);
        }
        match &of.feed {
            Feed::None => {}
            Feed::Dense { ffn, down, .. } => {
                let (input, out) = (self.norm(of.ffn_norm.as_ref()), self.branch());
                self.dense(ffn, down, input, out)?;
            }
            Feed::Experts { experts, .. } => self.experts(experts, of.ffn_norm.as_ref())?,
        }
        if let Some(end) = of.feed.end() {
            let dtype = match of.per_layer {
                Some(_) => BoundaryDtype::F32,
                None => last,
            };
            self.end_branch(end, dtype, spec.boundary);
        }
        if let Some(own) = &of.per_layer {
            self.per_layer(own, (nth, layers), last)?;
        }
        let (x, rows, width) = (self.x(), self.rows, spec.width);
        if let Some(scale) = of.scale {
            self.step.scale(x, rows, width, scale);
            self.step.round(x, rows, width, spec.boundary);
        }
        let flags = &self.buffers.flags;
        self.step.find_overflow(x, rows, width, flags, nth * rows);
        Ok(())
    }

    fn x(&self) -> View<'a> {
        self.buffers.x.rows(self.spec.width)
    }

    pub(super) fn branch(&self) -> View<'a> {
        self.buffers.branch.rows(self.spec.width)
    }

    /// Input of a branch: `x`, normalised if the layer has a norm.
    pub(super) fn norm(&mut self, weight: Option<&Buffer>) -> View<'a> {
        let Some(weight) = weight else {
            return self.x();
        };
        let (width, eps) = (self.spec.width, self.spec.norm_eps);
        let normed = self.buffers.normed.rows(width);
        self.step
            .rms_norm(self.x(), normed, self.rows, 1, width, Some(weight), eps);
        normed
    }

    /// Quantises `x`, the input of `matrices`, if one of them needs it.
    pub(super) fn prepare<'m>(
        &mut self,
        x: View<'a>,
        matrices: impl IntoIterator<Item = &'m Matrix>,
    ) {
        let quantised = |matrix: &&Matrix| matrix.weight_type().quantised();
        if let Some(matrix) = matrices.into_iter().find(quantised) {
            let act = &self.buffers.act;
            self.step.quantise(x, act, self.rows, matrix.cols());
        }
    }

    /// Writes the product of `x`, for which [`Self::prepare`] was called, with a matrix.
    pub(super) fn multiply(
        &mut self,
        matrix: &Matrix,
        x: View<'a>,
        out: View<'a>,
    ) -> Result<(), EngineError> {
        let work = matrix.bytes() * u64::from(self.rows.div_ceil(SHARED_ROWS));
        self.make_room(work)?;
        let input = Input::of(matrix.weight_type(), x, &self.buffers.act);
        self.step.matmul(matrix, input, out, self.rows);
        Ok(())
    }

    /// Submits the step if it would become too long with so much work more.
    pub(super) fn make_room(&mut self, work: u64) -> Result<(), EngineError> {
        if self.work > 0 && self.work.saturating_add(work) > self.limit {
            self.submit()?;
        }
        self.work = self.work.saturating_add(work);
        self.done = self.done.saturating_add(work);
        Ok(())
    }

    pub(super) fn submit(&mut self) -> Result<(), EngineError> {
        let step = std::mem::replace(&mut self.step, self.gpu.step());
        self.work = 0;
        Ok(step.submit()?)
    }

    fn attention(&mut self, of: &Attention) -> Result<(), EngineError> {
        let (spec, rows, b) = (self.spec, self.rows, self.buffers);
        let (q, kv, d) = (of.q, of.kv, of.head_dim);
        let input = self.norm(of.norm.as_ref());
        let [queries, keys, values] = match &of.latent {
            Some(latent) => self.latent_rows(of, latent, input)?,
            None => self.projected_rows(of, input)?,
        };
        let info = self.info.view(of.window);
        if let Some(factors) = &self.info.factors {
            let factors = factors.rows(1);
            self.step.scale_rows(queries, factors, rows, q);
        }
        let Some((pages, _)) = self.memory.pages().layer(of.keys_of) else {
            return Err(EngineError::Device("a layer without keys".to_owned()));
        };
        let tables = &self.info.tables;
        if kv > 0 {
            self.step
                .store_kv(keys, values, rows, of.kv_heads, d, pages, tables, info);
        }
        let attended = b.attn.rows(q);
        let root = match of.latent {
            // Absorbed keys are wider than heads.
            Some(_) => spec.head_dim,
            None => d,
        };
        let shape = AttentionShape {
            heads: q / d,
            kv_heads: of.kv_heads,
            head_dim: d,
            scale: spec.attention.scale.unwrap_or(1.0 / (root as f32).sqrt()),
            softcap: spec.attention.softcap,
            window: of.window,
        };
        let each = self.info.rows_at_once(shape.heads);
        for first in (0..rows).step_by(each as usize) {
            let count = each.min(rows - first);
            let from = |view: View<'a>| View {
                offset: view.offset + first * view.stride,
                ..view
            };
            let [queries, out, info] = [queries, attended, info].map(from);
            self.make_room(self.info.work(first, count, q))?;
            self.step.attention(
                &shape,
                queries,
                out,
                count,
                pages,
                tables,
                info,
                &b.scores,
                self.info.positions,
                of.sinks.as_ref(),
            );
        }
        if spec.attention.output_gate {
            let gates = b.qkv.rows_at(q + 2 * kv, b.widths.qkv);
            self.step.activate(Unary::Sigmoid, gates, rows, q);
            self.step.multiply(attended, gates, rows, q);
        }
        let outputs = match &of.latent {
            Some(latent) => self.latent_outputs(latent, &b.attn)?,
            None => attended,
        };
        self.prepare(outputs, [&of.output]);
        self.multiply(&of.output, outputs, self.branch())
    }

    /// Queries, keys and values of the rows, of which `input` is the normalised stream.
    fn projected_rows(
        &mut self,
        of: &Attention,
        input: View<'a>,
    ) -> Result<[View<'a>; 3], EngineError> {
        let (spec, rows, b) = (self.spec, self.rows, self.buffers);
        let (q, kv, d) = (of.q, of.kv, of.head_dim);
        let columns = |column: u32| b.qkv.rows_at(column, b.widths.qkv);
        self.prepare(input, &of.qkv);
        let mut column = 0;
        for matrix in &of.qkv {
            self.multiply(matrix, input, columns(column))?;
            column += matrix.rows();
        }
        let [queries, keys, values] = [0, q, q + kv].map(columns);
        if let Some(bias) = &of.bias {
            let width = bias.words() as u32;
            self.step
                .add_round(queries, bias.rows(0), rows, width, BoundaryDtype::F32);
        }
        if of.keys_as_values {
            self.step.copy(keys, values, rows, kv);
        }
        for ((x, width), norm) in [(queries, q), (keys, kv), (values, kv)]
            .into_iter()
            .zip(&of.norms)
        {
            if let Some(weight) = norm.as_ref().filter(|_| width > 0) {
                let each = weight.words() as u32;
                let (groups, eps) = (width / each, spec.norm_eps);
                self.step
                    .rms_norm(x, x, rows, groups, each, Some(weight), eps);
            }
        }
        let info = self.info.view(of.window);
        if let Some((angles, pairs)) = self.angles.table(of.rotation) {
            let heads = (q + kv) / d;
            let kind = spec.rope.kind;
            self.step
                .rope(queries, rows, heads, d, kind, angles, pairs, info);
        }
        Ok([queries, keys, values])
    }

    pub(super) fn dense(
        &mut self,
        ffn: &CardFfn,
        down: &Matrix,
        input: View<'a>,
        out: View<'a>,
    ) -> Result<(), EngineError> {
        let (rows, width) = (self.rows, down.cols());
        let [h, up_out] = [&self.buffers.h, &self.buffers.up].map(|b| b.rows(width));
        self.prepare(input, ffn.matrices());
        match ffn {
            CardFfn::Gated { gate, up } => {
                self.multiply(gate, input, h)?;
                self.multiply(up, input, up_out)?;
                self.step
                    .gate(self.spec.activation, h, up_out, h, rows, width);
            }
            CardFfn::Ungated { up, bias } => {
                self.multiply(up, input, h)?;
                if let Some(bias) = bias {
                    self.step
                        .add_round(h, bias.rows(0), rows, width, BoundaryDtype::F32);
                }
                self.activate(h, rows, width);
            }
        }
        self.prepare(h, [down]);
        self.multiply(down, h, out)
    }

    /// Activates the outputs of a feed-forward layer without a gate.
    fn activate(&mut self, x: View<'a>, rows: u32, cols: u32) {
        let unary = match self.spec.activation {
            Activation::GeluErf => Unary::GeluErf,
            // All other activations need a gate.
            _ => Unary::SquaredRelu,
        };
        self.step.activate(unary, x, rows, cols);
    }

    fn per_layer(
        &mut self,
        own: &PerLayer,
        (nth, layers): (u32, u32),
        dtype: BoundaryDtype,
    ) -> Result<(), EngineError> {
        let (rows, width) = (self.rows, own.gate.rows());
        let h = self.buffers.h.rows(width);
        self.prepare(self.x(), [&own.gate]);
        self.multiply(&own.gate, self.x(), h)?;
        let inputs = self.info.inputs.rows_at(nth * width, layers * width);
        self.step
            .gate(self.spec.activation, h, inputs, h, rows, width);
        self.prepare(h, [&own.output]);
        self.multiply(&own.output, h, self.branch())?;
        self.add_branch(None, Some(&own.norm), dtype);
        Ok(())
    }

    fn end_branch(&mut self, end: &BranchEnd, dtype: BoundaryDtype, of_sum: BoundaryDtype) {
        self.add_branch(end.bias.as_ref(), end.norm.as_ref(), dtype);
        if let Some((weight, bias)) = &end.sum_norm {
            let (x, rows, width) = (self.x(), self.rows, self.spec.width);
            self.step
                .layer_norm(x, x, rows, width, weight, bias, self.spec.norm_eps);
            self.step.round(x, rows, width, of_sum);
        }
    }

    /// Adds the output of a branch to `x`, which then has the format `dtype`.
    fn add_branch(&mut self, bias: Option<&Buffer>, norm: Option<&Buffer>, dtype: BoundaryDtype) {
        let (spec, rows, width) = (self.spec, self.rows, self.spec.width);
        let (x, branch) = (self.x(), self.branch());
        if let Some(bias) = bias {
            self.step
                .add_round(branch, bias.rows(0), rows, width, BoundaryDtype::F32);
        }
        if let Some(norm) = norm {
            let eps = spec.post_norm_eps.unwrap_or(spec.norm_eps);
            self.step
                .rms_norm(branch, branch, rows, 1, width, Some(norm), eps);
        }
        if let Some(factor) = spec.scales.residual {
            self.step.scale(branch, rows, width, factor);
        }
        self.step.add_round(x, branch, rows, width, dtype);
    }
}
