//! Mixtures of experts: the card computes scores and products, the processor chooses the experts of
//! each row, as its own engine does. So each such layer takes one read from the card.
//!
//! A *pair* is a row and one of its experts; pair `row * used + rank`, best expert first.

use hearthnet_engine::kernels::Kernels;
use hearthnet_engine::layer::{Expert, ExpertBias, ExpertNorms, Ffn, Router, SharedExpert};
use hearthnet_engine::{EngineError, Route, choose_experts};
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::{Activation, ExpertSpec};

use super::pass::{Pass, device_error};
use super::weights::{CardFfn, GpuLoadError, unsupported};
use crate::{Buffer, Gpu, GpuError, Input, Matrix, Unary, View};

/// Experts of a layer.
pub(super) struct CardExperts {
    pub(super) router: Matrix,
    /// Bias of the scores, a value per expert.
    router_bias: Option<Vec<f32>>,
    correction: Option<Vec<f32>>,
    /// Factor of the weight of each expert.
    scale: Option<Vec<f32>>,
    /// Matrices of all experts, one below the other. `None` if there is no gate.
    gate: Option<Matrix>,
    up: Matrix,
    down: Matrix,
    /// Panels of one expert in `gate` and `up`, and in `down`.
    panels: [u32; 2],
    pub(super) ffn: u32,
    /// Of each expert, on the processor.
    biases: Vec<ExpertBias>,
    pub(super) shared: Option<CardShared>,
    norms: Option<Norms>,
}

pub(super) struct CardShared {
    /// `None`: the output is added as it is.
    score: Option<Matrix>,
    ffn: CardFfn,
    pub(super) down: Matrix,
}

struct Norms {
    router: Buffer,
    input: Buffer,
    output: Buffer,
    shared_output: Buffer,
}

impl CardExperts {
    pub(super) fn upload(
        gpu: &Gpu,
        router: &Router,
        experts: Vec<Expert>,
        shared: Option<&SharedExpert>,
        norms: Option<&ExpertNorms>,
    ) -> Result<Self, GpuLoadError> {
        let (mut gates, mut ups, mut downs, mut biases) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for Expert { ffn, down, bias } in experts {
            match ffn {
                Ffn::Split { gate, up } => {
                    gates.push(gate);
                    ups.push(up);
                }
                Ffn::Ungated { up, bias: None } => ups.push(up),
                Ffn::Ungated { .. } | Ffn::Fused(_) => {
                    return Err(unsupported("this form of experts is not computed"));
                }
            }
            downs.push(down);
            biases.extend(bias);
        }
        let stack = |all: &[_]| gpu.stack(&all.iter().collect::<Vec<_>>());
        let panels = [&ups, &downs].map(|all| all.first().map_or(0, |one| one.panels() as u32));
        let norms = norms.map(|norms| {
            let [router, input, output, shared_output] = [
                &norms.router,
                &norms.input,
                &norms.output,
                &norms.shared_output,
            ]
            .map(|weights| gpu.upload_f32(weights));
            Ok::<_, GpuError>(Norms {
                router: router?,
                input: input?,
                output: output?,
                shared_output: shared_output?,
            })
        });
        let shared = shared.map(|shared| {
            let score = shared.score.as_ref().map(|score| gpu.matrix(score));
            Ok::<_, GpuLoadError>(CardShared {
                score: score.transpose()?,
                ffn: CardFfn::upload(gpu, &shared.ffn)?,
                down: gpu.matrix(&shared.down)?,
            })
        });
        Ok(Self {
            router: gpu.matrix(&router.matrix)?,
            router_bias: router.bias.clone(),
            correction: router.correction.clone(),
            scale: router.scale.clone(),
            ffn: ups.first().map_or(0, |up| up.rows() as u32),
            gate: match gates.is_empty() {
                true => None,
                false => Some(stack(&gates)?),
            },
            up: stack(&ups)?,
            down: stack(&downs)?,
            panels,
            biases,
            shared: shared.transpose()?,
            norms: norms.transpose()?,
        })
    }
}

/// Buffers for the pairs of a pass.
pub(super) struct PairBuffers {
    pairs: u32,
    scores: Buffer,
    act: Buffer,
    h: Buffer,
    up: Buffer,
    out: Buffer,
    shared: Buffer,
    shared_weights: Buffer,
}

impl PairBuffers {
    /// Buffers that depend on the rows.
    pub(super) fn of_rows(&self) -> [&Buffer; 6] {
        [
            &self.scores,
            &self.act,
            &self.h,
            &self.up,
            &self.out,
            &self.shared,
        ]
    }

    /// Buffers for so many rows, of `width` values, and their pairs.
    pub(super) fn new(
        gpu: &Gpu,
        spec: &ExpertSpec,
        (rows, width, ffn): (u32, u32, u32),
    ) -> Result<Self, GpuError> {
        let pairs = rows * spec.used;
        let of = |rows: u32, width: u32| gpu.buffer(u64::from(rows) * u64::from(width.max(1)));
        Ok(Self {
            pairs,
            scores: of(rows, spec.count)?,
            act: gpu.act(pairs, ffn.next_multiple_of(32))?,
            h: of(pairs, ffn)?,
            up: of(pairs, ffn)?,
            out: of(pairs, width)?,
            shared: of(rows, width)?,
            shared_weights: of(rows, 1)?,
        })
    }
}

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
        let read = read.map_err(device_error)?;
        let routes = routes(of, experts, read);
        self.pairs(of, buffers, input, &routes)?;

        let branch = self.branch();
        self.step
            .clear(branch.buffer, 0..u64::from(rows) * u64::from(width));
        let weights: Vec<f32> = routes.iter().map(|route| route.weight).collect();
        let weights = self.gpu.upload_f32(&weights).map_err(device_error)?;
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
                    ones = self.gpu.upload_f32(&[1.0]).map_err(device_error)?;
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
        let first = list(&|pair| pair / used, up_panels).map_err(device_error)?;
        let second = list(&|pair| pair, down_panels).map_err(device_error)?;
        let (h, up) = (buffers.h.rows(of.ffn), buffers.up.rows(of.ffn));
        let input_of =
            |matrix: &Matrix, act: &'a Buffer, plain| match matrix.weight_type().quantised() {
                true => Input::Quantised(act),
                false => Input::Plain(plain),
            };
        let act = &self.buffers.act;
        let work = |matrix: &Matrix, panels: u32| {
            matrix.bytes() / u64::from(matrix.panels().max(1)) * u64::from(panels * count)
        };
        let activation = self.spec.activation;
        match &of.gate {
            Some(gate) => {
                self.make_room(work(gate, up_panels))?;
                let from = input_of(gate, act, input);
                self.step
                    .matmul_pairs(gate, of.ffn, &first, from, self.rows, h, count);
                self.make_room(work(&of.up, up_panels))?;
                let from = input_of(&of.up, act, input);
                self.step
                    .matmul_pairs(&of.up, of.ffn, &first, from, self.rows, up, count);
                self.add_biases(of, routes, h, of.ffn, |bias| &bias.gate)?;
                self.add_biases(of, routes, up, of.ffn, |bias| &bias.up)?;
                self.step.gate(activation, h, up, h, count, of.ffn);
            }
            None => {
                self.make_room(work(&of.up, up_panels))?;
                let from = input_of(&of.up, act, input);
                self.step
                    .matmul_pairs(&of.up, of.ffn, &first, from, self.rows, h, count);
                let unary = match activation {
                    Activation::GeluErf => Unary::GeluErf,
                    _ => Unary::SquaredRelu,
                };
                self.step.activate(unary, h, count, of.ffn);
            }
        }
        if of.down.weight_type().quantised() {
            self.step.quantise(h, &buffers.act, count, of.ffn);
        }
        self.make_room(work(&of.down, down_panels))?;
        let (from, out) = (input_of(&of.down, &buffers.act, h), buffers.out.rows(width));
        self.step
            .matmul_pairs(&of.down, width, &second, from, count, out, count);
        self.add_biases(of, routes, out, width, |bias| &bias.down)
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
        let all = self.gpu.upload_f32(&all).map_err(device_error)?;
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
        if let Some(bias) = &of.router_bias {
            kernels.add_round(scores, bias, BoundaryDtype::F32);
        }
        choose_experts(kernels, scores, spec, of.correction.as_deref(), routes);
        if let Some(scale) = &of.scale {
            for route in routes {
                route.weight *= scale[route.expert as usize];
            }
        }
    }
    routes
}
