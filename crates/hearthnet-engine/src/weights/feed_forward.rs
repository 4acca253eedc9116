//! Feed-forward layers: dense ones, and mixtures of experts.

use std::ops::Range;

use hearthnet_files::TensorView;
use hearthnet_files::spec::{Activation, LayerTensor};

use super::{Loader, matrices};
use crate::error::LoadError;
use crate::kernels::{ActForm, PackError, Packed};

#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense {
        ffn: Ffn,
        down: Packed,
    },
    Experts {
        router: Router,
        /// All experts, which have equal sizes.
        experts: Vec<Expert>,
        bytes: usize,
        shared: Option<SharedExpert>,
        /// `None`: router, experts and shared expert read the row that `ffn_norm` gives.
        norms: Option<ExpertNorms>,
    },
}

/// Norms of experts and of the shared expert, which are separate branches.
#[derive(Debug)]
pub(crate) struct ExpertNorms {
    pub(crate) router: Vec<f32>,
    pub(crate) input: Vec<f32>,
    pub(crate) output: Vec<f32>,
    pub(crate) shared_output: Vec<f32>,
}

/// Expert that all rows go through.
#[derive(Debug)]
pub(crate) struct SharedExpert {
    /// Matrix of one row; `None`: the output has no weight.
    pub(crate) score: Option<Packed>,
    pub(crate) ffn: Ffn,
    pub(crate) down: Packed,
}

/// Matrix that scores the experts of a layer.
#[derive(Debug)]
pub(crate) struct Router {
    pub(crate) matrix: Packed,
    pub(crate) bias: Option<Vec<f32>>,
    /// Factor of the weight of each expert.
    pub(crate) scale: Option<Vec<f32>>,
}

#[derive(Debug)]
pub(crate) struct Expert {
    pub(crate) ffn: Ffn,
    pub(crate) down: Packed,
    pub(crate) bias: Option<ExpertBias>,
}

#[derive(Debug)]
pub(crate) struct ExpertBias {
    pub(crate) gate: Vec<f32>,
    pub(crate) up: Vec<f32>,
    pub(crate) down: Vec<f32>,
}

#[derive(Debug)]
pub(crate) enum Ffn {
    /// Interleaved panels, so that the kernel applies the gate in the same pass.
    Fused(Packed),
    /// Separate matrices, for cases that the fused kernel does not cover (see [`Loader::ffn`]).
    Split { gate: Packed, up: Packed },
}

impl Ffn {
    pub(crate) fn form(&self) -> ActForm {
        match self {
            Self::Fused(both) => ActForm::of([both]),
            Self::Split { gate, up } => ActForm::of([gate, up]),
        }
    }

    /// Panels of each of the two matrices.
    pub(crate) fn panels(&self) -> usize {
        self.gate().panels()
    }

    pub(crate) fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        self.gate().columns(panels)
    }

    fn gate(&self) -> &Packed {
        match self {
            Self::Fused(both) => both,
            Self::Split { gate, .. } => gate,
        }
    }
}

impl Loader<'_> {
    pub(super) fn feed_forward(&mut self, layer: u32) -> Result<FeedForward, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let get = |tensor| file.layer_tensor(layer, tensor);
        if !file.has(layer, T::Router) {
            let (gate, up) = match file.has(layer, T::FfnGateUp) {
                true => {
                    let both = get(T::FfnGateUp)?;
                    match matrices(file.spec(), &both, T::FfnGateUp)[..] {
                        [gate, up] => (gate, up),
                        _ => return Err(LoadError::Unsupported(format!("{:?}", both.name))),
                    }
                }
                false => (get(T::FfnGate)?, get(T::FfnUp)?),
            };
            return Ok(FeedForward::Dense {
                ffn: self.ffn(&gate, &up)?,
                down: self.matrix(&get(T::FfnDown)?)?,
            });
        }
        let router = Router {
            matrix: self.matrix(&get(T::Router)?)?,
            bias: self.optional(layer, T::RouterBias)?,
            scale: self.optional(layer, T::ExpertScale)?,
        };
        let split = |tensor| Ok::<_, LoadError>(matrices(file.spec(), &get(tensor)?, tensor));
        let (gates, ups) = match file.has(layer, T::ExpertGateUp) {
            true => {
                let both = split(T::ExpertGateUp)?;
                let every_second = |first| both.iter().skip(first).step_by(2).copied();
                (every_second(0).collect(), every_second(1).collect())
            }
            false => (split(T::ExpertGate)?, split(T::ExpertUp)?),
        };
        let downs = split(T::ExpertDown)?;
        let before = self.bytes;
        let mut biases = self.expert_biases(layer)?.into_iter();
        let mut experts = Vec::with_capacity(downs.len());
        for ((gate, up), down) in gates.iter().zip(&ups).zip(&downs) {
            experts.push(Expert {
                ffn: self.ffn(gate, up)?,
                down: self.matrix(down)?,
                bias: biases.next(),
            });
        }
        let bytes = self.bytes - before;
        let shared = match file.has(layer, T::SharedGate) {
            true => Some(SharedExpert {
                score: match file.has(layer, T::SharedScore) {
                    true => Some(self.matrix(&get(T::SharedScore)?)?),
                    false => None,
                },
                ffn: self.ffn(&get(T::SharedGate)?, &get(T::SharedUp)?)?,
                down: self.matrix(&get(T::SharedDown)?)?,
            }),
            false => None,
        };
        Ok(FeedForward::Experts {
            router,
            experts,
            bytes,
            shared,
            norms: match file.has(layer, T::RouterNorm) {
                true => Some(ExpertNorms {
                    router: self.router_norm(layer)?,
                    input: self.vector(&get(T::ExpertNorm)?)?,
                    output: self.vector(&get(T::ExpertPostNorm)?)?,
                    shared_output: self.vector(&get(T::SharedPostNorm)?)?,
                }),
                false => None,
            },
        })
    }

    /// Weights of the norm before the router: the stored ones over the root of the width.
    fn router_norm(&mut self, layer: u32) -> Result<Vec<f32>, LoadError> {
        let mut weights = self.vector(&self.file.layer_tensor(layer, LayerTensor::RouterNorm)?)?;
        let root = 1.0 / (self.file.spec().width as f32).sqrt();
        weights.iter_mut().for_each(|weight| *weight *= root);
        Ok(weights)
    }

    /// Loads the biases of each expert of a layer. Empty if there are none.
    fn expert_biases(&mut self, layer: u32) -> Result<Vec<ExpertBias>, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        if !file.has(layer, T::ExpertGateBias) {
            return Ok(Vec::new());
        }
        let (width, ffn) = (file.spec().width as usize, file.spec().ffn as usize);
        let mut all = |which| self.vector(&file.layer_tensor(layer, which)?);
        let (gates, ups) = (all(T::ExpertGateBias)?, all(T::ExpertUpBias)?);
        let downs = all(T::ExpertDownBias)?;
        let gates = gates.chunks_exact(ffn).zip(ups.chunks_exact(ffn));
        let biases = gates.zip(downs.chunks_exact(width));
        let biases = biases.map(|((gate, up), down)| ExpertBias {
            gate: gate.to_vec(),
            up: up.to_vec(),
            down: down.to_vec(),
        });
        Ok(biases.collect())
    }

    fn ffn(&mut self, gate: &TensorView<'_>, up: &TensorView<'_>) -> Result<Ffn, LoadError> {
        // The fused kernel supports only SiLU, without biases.
        let spec = self.file.spec();
        let plain = !spec.experts.is_some_and(|experts| experts.bias);
        let fused = plain && spec.activation == Activation::Silu && gate.dtype == up.dtype;
        Ok(match fused {
            true => Ffn::Fused(self.pack(&[gate, up], |arena, both| match both {
                [gate, up] => Packed::pack_gate_up(arena, gate, up),
                _ => Err(PackError::Mismatch),
            })?),
            false => Ffn::Split {
                gate: self.matrix(gate)?,
                up: self.matrix(up)?,
            },
        })
    }
}
