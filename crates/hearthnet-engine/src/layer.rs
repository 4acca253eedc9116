//! Weights of a layer, as the engine uses them.

use std::ops::Range;

use hearthnet_files::spec::{DeltaSpec, MambaSpec, Rotation};

use crate::kernels::{ActForm, Packed};
use crate::kv::KvPlace;

#[derive(Debug)]
pub(super) struct Layer {
    /// `None` if the matrices read the residual stream as it is, or the layer has a feed-forward
    /// layer only.
    pub(super) attn_norm: Option<Vec<f32>>,
    /// Matrices that read the normalised residual stream. With latent attention, their outputs are
    /// the low-rank rows.
    pub(super) qkv: Qkv,
    pub(super) latent: Option<Latent>,
    /// Gated delta rule instead of attention. `qkv` then gives the inputs of the convolution, the
    /// gate of the output, and the scores of each head; `attn_output` is the output projection.
    pub(super) delta: Option<Delta>,
    /// Gated short convolution instead of attention. `qkv` then gives the factors before it, the
    /// factors behind it, and its inputs; `attn_output` is the output projection.
    pub(super) convolution: Option<ShortConvolution>,
    /// Mamba-2 instead of attention. `qkv` then gives the gates of the outputs, the inputs of the
    /// convolution, and the step of each head; `attn_output` is the output projection.
    pub(super) mamba: Option<Mamba>,
    /// Width of the queries of all heads, as attention reads them.
    pub(super) q: usize,
    /// Width of the keys in `qkv`, and of the values; 0 for a layer that uses those of another.
    pub(super) kv: usize,
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    /// Ones: the norm of the values has no weights.
    pub(super) v_norm: Option<Vec<f32>>,
    /// Whether the values are the keys before norm and RoPE.
    pub(super) keys_as_values: bool,
    pub(super) rotation: Rotation,
    /// Sliding window in positions; `None` for all positions.
    pub(super) window: Option<usize>,
    /// Attention sink of each query head.
    pub(super) sinks: Option<Vec<f32>>,
    /// `None` in a layer that has a feed-forward layer only.
    pub(super) attn_output: Option<Packed>,
    pub(super) attn_output_bias: Option<Vec<f32>>,
    pub(super) attn_post_norm: Option<Vec<f32>>,
    /// LayerNorm of the residual stream after the output of attention was added.
    pub(super) attn_sum_norm: Option<LayerNorm>,
    /// `None` if the feed-forward layer reads the residual stream as it is, or there is none.
    pub(super) ffn_norm: Option<Vec<f32>>,
    pub(super) feed_forward: FeedForward,
    /// Bias of the down projection.
    pub(super) ffn_bias: Option<Vec<f32>>,
    pub(super) ffn_post_norm: Option<Vec<f32>>,
    /// LayerNorm of the residual stream after the feed-forward output was added.
    pub(super) ffn_sum_norm: Option<LayerNorm>,
    pub(super) per_layer: Option<PerLayer>,
    /// Factor of the layer's output.
    pub(super) scale: Option<f32>,
    /// Bytes of memory of all weights.
    pub(super) bytes: usize,
    /// Keys and values that the layer uses.
    pub(super) place: KvPlace,
    /// First value of the layer in the state of a sequence.
    pub(super) state: usize,
}

#[derive(Debug)]
pub(super) struct LayerNorm {
    pub(super) weight: Vec<f32>,
    pub(super) bias: Vec<f32>,
}

#[derive(Debug)]
pub(super) enum FeedForward {
    /// The layer has nothing behind its recurrence or attention.
    None,
    Dense {
        ffn: Ffn,
        down: Packed,
    },
    Experts {
        router: Router,
        /// All experts, which have equal sizes.
        experts: Vec<Expert>,
        bytes: usize,
        shared: Option<Box<SharedExpert>>,
        /// `None`: router, experts and shared expert read the row that `ffn_norm` gives.
        norms: Option<Box<ExpertNorms>>,
    },
}

/// Norms of experts and of the shared expert, which are separate branches.
#[derive(Debug)]
pub(super) struct ExpertNorms {
    pub(super) router: Vec<f32>,
    pub(super) input: Vec<f32>,
    pub(super) output: Vec<f32>,
    pub(super) shared_output: Vec<f32>,
}

/// Use of the per-layer input of a layer.
#[derive(Debug)]
pub(super) struct PerLayer {
    pub(super) gate: Packed,
    pub(super) output: Packed,
    pub(super) norm: Vec<f32>,
}

/// Expert that all rows go through.
#[derive(Debug)]
pub(super) struct SharedExpert {
    /// Matrix of one row; `None` if the output is added as it is.
    pub(super) score: Option<Packed>,
    pub(super) ffn: Ffn,
    pub(super) down: Packed,
}

/// Weights of a gated delta rule, beside its matrices.
#[derive(Debug)]
pub(super) struct Delta {
    pub(super) spec: DeltaSpec,
    pub(super) convolution: ShortConvolution,
    pub(super) decay: Vec<f32>,
    pub(super) decay_bias: Vec<f32>,
    pub(super) norm: Vec<f32>,
    /// For each value head, the columns of its scores of correction and decay.
    pub(super) scores: Vec<(usize, usize)>,
}

/// Weights of a short convolution.
#[derive(Debug)]
pub(super) struct ShortConvolution {
    pub(super) positions: usize,
    /// Number of channels.
    pub(super) width: usize,
    /// `[positions][width]`, oldest position first.
    pub(super) weights: Vec<f32>,
}

/// Weights of Mamba-2, beside its matrices.
#[derive(Debug)]
pub(super) struct Mamba {
    pub(super) spec: MambaSpec,
    pub(super) convolution: ShortConvolution,
    pub(super) convolution_bias: Vec<f32>,
    /// One value per head.
    pub(super) step_bias: Vec<f32>,
    pub(super) decay: Vec<f32>,
    pub(super) skip: Vec<f32>,
    pub(super) norm: Vec<f32>,
}

/// Matrix that scores the experts of a layer.
#[derive(Debug)]
pub(super) struct Router {
    pub(super) matrix: Packed,
    pub(super) bias: Option<Vec<f32>>,
    /// See [`ExpertSpec::correction`](hearthnet_files::spec::ExpertSpec::correction).
    pub(super) correction: Option<Vec<f32>>,
    /// Factor of the weight of each expert.
    pub(super) scale: Option<Vec<f32>>,
}

#[derive(Debug)]
pub(super) struct Expert {
    pub(super) ffn: Ffn,
    pub(super) down: Packed,
    pub(super) bias: Option<ExpertBias>,
}

#[derive(Debug)]
pub(super) struct ExpertBias {
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
    pub(super) down: Vec<f32>,
}

/// Query, key and value matrices. Their outputs form one row.
#[derive(Debug)]
pub(super) struct Qkv {
    /// A fused matrix if types and shapes allow it, otherwise three. In latent attention two: of
    /// queries, and of keys and values.
    pub(super) parts: Vec<Packed>,
    pub(super) form: ActForm,
    pub(super) bias: Option<Vec<f32>>,
}

/// Norms and up-projections of the low-rank rows of latent attention.
#[derive(Debug)]
pub(super) struct Latent {
    /// Norm and up-projection of the low-rank rows of queries, if there are any.
    pub(super) queries: Option<(Vec<f32>, Packed)>,
    pub(super) kv_norm: Vec<f32>,
    pub(super) up: LatentUp,
}

/// Up-projections to keys and values.
#[derive(Debug)]
pub(super) enum LatentUp {
    Expanded(Packed),
    /// Of each head: the transposed matrix of the keys, which reads queries, and the matrix of the
    /// values, which reads the output of attention.
    Absorbed {
        keys: Vec<Packed>,
        values: Vec<Packed>,
    },
}

#[derive(Debug)]
pub(super) enum Ffn {
    /// Interleaved panels, so that the kernel applies the gate in the same pass.
    Fused(Packed),
    /// Separate matrices, for cases that the fused kernel does not cover (see `Loader::ffn`).
    Split { gate: Packed, up: Packed },
    /// There is no gate. The bias is that of a dense layer.
    Ungated { up: Packed, bias: Option<Vec<f32>> },
}

impl Qkv {
    pub(super) fn of(parts: Vec<Packed>) -> Self {
        let form = ActForm::of(&parts);
        Self {
            parts,
            form,
            bias: None,
        }
    }

    pub(super) fn panels(&self) -> usize {
        self.parts.iter().map(Packed::panels).sum()
    }
}

impl Delta {
    /// Values of a row from `qkv`: inputs of the convolution, gate, scores.
    pub(super) fn row(spec: &DeltaSpec) -> usize {
        (spec.channels() + spec.values() + 2 * spec.value_heads) as usize
    }
}

impl Latent {
    /// Panels of the up-projections of low-rank rows.
    pub(super) fn panels(&self) -> usize {
        let queries = self.queries.as_ref().map_or(0, |(_, up)| up.panels());
        match &self.up {
            LatentUp::Expanded(up) => queries + up.panels(),
            LatentUp::Absorbed { .. } => queries,
        }
    }

    /// Matrices of the heads that read queries, and those that read the output of attention; empty
    /// unless absorbed.
    pub(super) fn absorbed(&self) -> (&[Packed], &[Packed]) {
        match &self.up {
            LatentUp::Expanded(_) => (&[], &[]),
            LatentUp::Absorbed { keys, values } => (keys, values),
        }
    }
}

impl Ffn {
    pub(super) fn form(&self) -> ActForm {
        match self {
            Self::Fused(both) => ActForm::of([both]),
            Self::Split { gate, up } => ActForm::of([gate, up]),
            Self::Ungated { up, .. } => ActForm::of([up]),
        }
    }

    /// Panels of each matrix.
    pub(super) fn panels(&self) -> usize {
        self.first().panels()
    }

    pub(super) fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        self.first().columns(panels)
    }

    fn first(&self) -> &Packed {
        match self {
            Self::Fused(matrix)
            | Self::Split { gate: matrix, .. }
            | Self::Ungated { up: matrix, .. } => matrix,
        }
    }
}

impl Layer {
    /// Whether the layer has a recurrence instead of attention.
    pub(super) fn is_recurrent(&self) -> bool {
        self.delta.is_some() || self.convolution.is_some() || self.mamba.is_some()
    }

    /// Whether the layer has attention or a recurrence.
    pub(super) fn has_mixer(&self) -> bool {
        self.attn_output.is_some()
    }

    /// Bytes of weights that one row reads, if it is routed to `used` experts.
    pub(super) fn token_bytes(&self, used: usize) -> usize {
        match &self.feed_forward {
            FeedForward::Dense { .. } | FeedForward::None => self.bytes,
            FeedForward::Experts { experts, bytes, .. } => {
                let idle = experts.len().saturating_sub(used);
                self.bytes - bytes / experts.len().max(1) * idle
            }
        }
    }
}
