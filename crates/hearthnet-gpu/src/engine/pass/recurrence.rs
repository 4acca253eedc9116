//! Steps of recurrent layers. Each layer with scores takes one read from the card, since the
//! processor computes the softplus.

use hearthnet_engine::EngineError;
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::Activation;

use super::Pass;
use crate::engine::recurrence::{
    CardConvolution, CardDelta, CardMamba, CardRecurrence, Kind, RecurrenceBuffers,
};
use crate::{Heads, StateView, Unary, View};

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
        let states = self.memory.states().layer(layer);
        let (Some(own), Some((buffer, words))) = (&b.recurrence, states) else {
            return Err(EngineError::Device(
                "a recurrence without states".to_owned(),
            ));
        };
        let [inputs, states] = [0, of.convolution.state()].map(|at| StateView {
            buffer,
            words: words as u32,
            at,
        });
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
        let read = self.gpu.read(&own.scores, 0..words)?;
        Ok(read.into_iter().map(f32::from_bits).collect())
    }
}

/// Estimate of the bytes that rows move: for each row, three times the states of all heads.
fn work(heads: Heads, rows: u32) -> u64 {
    let cells = u64::from(heads.heads) * u64::from(heads.width) * u64::from(heads.rows);
    u64::from(rows) * cells * 12
}
