//! Mixtures of experts: the card computes scores and products, the processor chooses the experts of
//! each row, as its own engine does. So each such layer takes one read from the card.
//!
//! A *pair* is a row and one of its experts; pair `row * used + rank`, best expert first.

use hearthnet_engine::layer::{
    Expert, ExpertBias, ExpertNorms, Ffn, Router, RouterVectors, SharedExpert,
};
use hearthnet_files::spec::ExpertSpec;

use super::parts::CardFfn;
use super::row_buffers::RowBuffers;
use crate::{Buffer, Gpu, GpuError, GpuLoadError, Matrix};

/// Experts of a layer.
pub(super) struct CardExperts {
    pub(super) router: Matrix,
    pub(super) vectors: RouterVectors,
    /// Matrices of all experts, one below the other. `None` if there is no gate.
    pub(super) gate: Option<Matrix>,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
    /// Panels of one expert in `gate` and `up`, and in `down`.
    pub(super) panels: [u32; 2],
    pub(super) ffn: u32,
    /// Of each expert, on the processor.
    pub(super) biases: Vec<ExpertBias>,
    pub(super) shared: Option<CardShared>,
    pub(super) norms: Option<Norms>,
}

pub(super) struct CardShared {
    /// `None`: the output is added as it is.
    pub(super) score: Option<Matrix>,
    pub(super) ffn: CardFfn,
    pub(super) down: Matrix,
}

pub(super) struct Norms {
    pub(super) router: Buffer,
    pub(super) input: Buffer,
    pub(super) output: Buffer,
    pub(super) shared_output: Buffer,
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
                    return Err(GpuLoadError::unsupported(
                        "this form of experts is not computed",
                    ));
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
            vectors: router.vectors.clone(),
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
    pub(super) pairs: u32,
    pub(super) scores: Buffer,
    pub(super) act: Buffer,
    pub(super) h: Buffer,
    pub(super) up: Buffer,
    pub(super) out: Buffer,
    pub(super) shared: Buffer,
    pub(super) shared_weights: Buffer,
}

impl PairBuffers {
    /// Buffers for rows of `width` values, and their pairs.
    pub(super) fn new(
        buffers: &mut RowBuffers<'_>,
        spec: &ExpertSpec,
        (width, ffn): (u32, u32),
    ) -> Result<Self, GpuError> {
        Ok(Self {
            pairs: buffers.rows * spec.used,
            scores: buffers.of(spec.count)?,
            act: buffers.act(spec.used, ffn)?,
            h: buffers.times(spec.used, ffn)?,
            up: buffers.times(spec.used, ffn)?,
            out: buffers.times(spec.used, width)?,
            shared: buffers.of(width)?,
            shared_weights: buffers.of(1)?,
        })
    }
}
