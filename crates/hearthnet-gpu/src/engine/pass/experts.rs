//! Steps of mixtures of experts. Each such layer takes one read from the card, since the processor
//! chooses the experts.

use hearthnet_engine::kernels::Kernels;
use hearthnet_engine::layer::ExpertBias;
use hearthnet_engine::{EngineError, Route, choose_experts};
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::ExpertSpec;

use super::Pass;
use crate::engine::experts::{CardExperts, PairBuffers};
use crate::{Buffer, Input, Matrix, Unary, View};

impl<'a> Pass<'a> {
    /// Feed-forward layer with experts: reads `x`, writes the branch.
    pub(super) fn experts(
        &mut self,
        of: &CardExperts,
        norm: Option<&Buffer>,
    ) -> Result<(), EngineError> {
        let (spec, rows, width) = (self.spec, self.rows, self.spec.width);
        let (Some(experts), Some(buffers)) = (&spec.experts, &self.buffers.pairs) else {
            return Ok(());
        };
        let shared_out = buffers.shared.rows(width);
        let mut input = self.norm(norm);
        if let Some(shared) = &of.shared {
            self.dense(&shared.ffn, &shared.down, input, shared_out)?;
            if let Some(score) = &shared.score {
                let weights = buffers.shared_weights.rows(1);
                self.prepare(input, [score]);
                self.multiply(score, input, weights)?;
                self.step.activate(Unary::Sigmoid, weights, rows, 1);
            }
        }
        if let Some(norms) = &of.norms {
            input = self.norm(Some(&norms.router));
        }
        let scores = buffers.scores.rows(experts.count);
        self.prepare(input, [&of.router]);
        self.multiply(&of.router, input, scores)?;
        if let Some(norms) = &of.norms {
            input = self.norm(Some(&norms.input));
        }
        let matrices = of.gate.iter().chain([&of.up]);
        self.prepare(input, matrices);
        self.submit()?;
        let words = u64::from(rows) * u64::from(experts.count);
        let read = self.gpu.read(&buffers.scores, 0..words);
        let read = read?;
        let routes = routes(of, experts, read);
        self.pairs(of, buffers, input, &routes)?;

        let branch = self.branch();
        self.step
            .clear(branch.buffer, 0..u64::from(rows) * u64::from(width));
        let weights: Vec<f32> = routes.iter().map(|route| route.weight).collect();
        let weights = self.gpu.upload_f32(&weights)?;
        for rank in 0..experts.used {
            let out = buffers.out.rows_at(rank * width, experts.used * width);
            let factors = weights.rows_at(rank, experts.used);
            self.step.add_scaled(branch, out, rows, width, factors);
        }
        if let Some(norms) = &of.norms {
            let eps = spec.norm_eps;
            for (x, weight) in [(branch, &norms.output), (shared_out, &norms.shared_output)] {
                self.step.rms_norm(x, x, rows, 1, width, Some(weight), eps);
            }
            let f32 = BoundaryDtype::F32;
            self.step.add_round(branch, shared_out, rows, width, f32);
        } else if let Some(shared) = &of.shared {
            let ones;
            let factors = match &shared.score {
                Some(_) => buffers.shared_weights.rows(1),
                None => {
                    ones = self.gpu.upload_f32(&[1.0])?;
                    ones.rows(0)
                }
            };
            self.step
                .add_scaled(branch, shared_out, rows, width, factors);
        }
        Ok(())
    }

    /// Takes each row through its experts, to `out` of the buffers.
    fn pairs(
        &mut self,
        of: &CardExperts,
        buffers: &'a PairBuffers,
        input: View<'a>,
        routes: &[Route],
    ) -> Result<(), EngineError> {
        let (count, width) = (routes.len() as u32, self.spec.width);
        debug_assert!(count <= buffers.pairs, "more pairs than the buffers hold");
        let used = (count / self.rows.max(1)).max(1);
        let list = |row: &dyn Fn(u32) -> u32, panels: u32| {
            let pairs = routes.iter().enumerate();
            let pairs = pairs.flat_map(|(pair, route)| [row(pair as u32), route.expert * panels]);
            self.gpu.upload(&pairs.collect::<Vec<_>>())
        };
        let [up_panels, down_panels] = of.panels;
        let first = list(&|pair| pair / used, up_panels)?;
        let second = list(&|pair| pair, down_panels)?;
        let (h, up) = (buffers.h.rows(of.ffn), buffers.up.rows(of.ffn));
        let from = (input, &self.buffers.act, self.rows);
        match &of.gate {
            Some(gate) => {
                self.multiply_pairs((gate, up_panels), &first, from, (h, of.ffn), count)?;
                self.multiply_pairs((&of.up, up_panels), &first, from, (up, of.ffn), count)?;
                self.add_biases(of, routes, h, of.ffn, |bias| &bias.gate)?;
                self.add_biases(of, routes, up, of.ffn, |bias| &bias.up)?;
                self.step
                    .gate(self.spec.activation, h, up, h, count, of.ffn);
            }
            None => {
                self.multiply_pairs((&of.up, up_panels), &first, from, (h, of.ffn), count)?;
                self.activate(h, count, of.ffn);
            }
        }
        if of.down.weight_type().quantised() {
            self.step.quantise(h, &buffers.act, count, of.ffn);
        }
        let (from, out) = ((h, &buffers.act, count), buffers.out.rows(width));
        self.multiply_pairs((&of.down, down_panels), &second, from, (out, width), count)?;
        self.add_biases(of, routes, out, width, |bias| &bias.down)
    }

    /// Multiplies the row of each pair in `list` with the matrix of its expert. `matrix` stacks the
    /// experts' matrices, of `panels` panels and `outputs` outputs each. `act` has the `rows` rows
    /// of `x` quantised. Only the form that the type of the weights needs is read.
    fn multiply_pairs(
        &mut self,
        (matrix, panels): (&Matrix, u32),
        list: &Buffer,
        (x, act, rows): (View<'a>, &'a Buffer, u32),
        (out, outputs): (View<'a>, u32),
        count: u32,
    ) -> Result<(), EngineError> {
        let panel = matrix.bytes() / u64::from(matrix.panels().max(1));
        self.make_room(panel * u64::from(panels * count))?;
        let input = Input::of(matrix.weight_type(), x, act);
        self.step
            .matmul_pairs(matrix, outputs, list, input, rows, out, count);
        Ok(())
    }

    /// Adds to the row of each pair the bias of its expert.
    fn add_biases(
        &mut self,
        of: &CardExperts,
        routes: &[Route],
        x: View<'a>,
        width: u32,
        which: impl Fn(&ExpertBias) -> &Vec<f32>,
    ) -> Result<(), EngineError> {
        if of.biases.is_empty() {
            return Ok(());
        }
        let biases = routes
            .iter()
            .filter_map(|route| of.biases.get(route.expert as usize));
        let all: Vec<f32> = biases.flat_map(which).copied().collect();
        let all = self.gpu.upload_f32(&all)?;
        let (count, f32) = (routes.len() as u32, BoundaryDtype::F32);
        self.step.add_round(x, all.rows(width), count, width, f32);
        Ok(())
    }
}

/// Experts of each row, best first, and their weights.
fn routes(of: &CardExperts, spec: &ExpertSpec, scores: Vec<u32>) -> Vec<Route> {
    let kernels = Kernels::best();
    let (count, used) = (spec.count as usize, spec.used as usize);
    let mut scores: Vec<f32> = scores.into_iter().map(f32::from_bits).collect();
    let mut routes = vec![Route::default(); scores.len() / count.max(1) * used];
    let rows = scores.chunks_exact_mut(count.max(1));
    for (scores, routes) in rows.zip(routes.chunks_exact_mut(used.max(1))) {
        choose_experts(kernels, scores, spec, &of.vectors, routes);
    }
    routes
}
