//! Weights of a layer, as the exact engines use them.
//!
//! [`each_layer`](crate::each_layer) loads them for an engine with memory of its own.

use std::ops::Range;

use hearthnet_files::spec::{DeltaSpec, MambaSpec, Rotation};

use crate::kernels::{ActForm, Packed};
use crate::memory::KvPlace;

#[derive(Debug)]
pub struct Layer {
    /// `None` if the matrices read the residual stream as it is, or the layer has a feed-forward
    /// layer only.
    pub attn_norm: Option<Vec<f32>>,
    /// Matrices that read the normalised residual stream. With latent attention, their outputs are
    /// the low-rank rows.
    pub qkv: Qkv,
    pub latent: Option<Latent>,
    /// Recurrence instead of attention. `attn_output` is then the output projection.
    pub recurrence: Option<Recurrence>,
    /// Width of the queries of all heads, as attention reads them.
    pub q: usize,
    /// Width of the keys in `qkv`, and of the values; 0 for a layer that uses those of another.
    pub kv: usize,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    /// Ones: the norm of the values has no weights.
    pub v_norm: Option<Vec<f32>>,
    /// Whether the values are the keys before norm and RoPE.
    pub keys_as_values: bool,
    pub rotation: Rotation,
    /// Sliding window in positions; `None` for all positions.
    pub window: Option<usize>,
    /// Attention sink of each query head.
    pub sinks: Option<Vec<f32>>,
    /// `None` in a layer that has a feed-forward layer only.
    pub attn_output: Option<Packed>,
    pub attn_output_bias: Option<Vec<f32>>,
    pub attn_post_norm: Option<Vec<f32>>,
    /// LayerNorm of the residual stream after the output of attention was added.
    pub attn_sum_norm: Option<LayerNorm>,
    /// `None` if the feed-forward layer reads the residual stream as it is, or there is none.
    pub ffn_norm: Option<Vec<f32>>,
    pub feed_forward: FeedForward,
    /// Bias of the down projection.
    pub ffn_bias: Option<Vec<f32>>,
    pub ffn_post_norm: Option<Vec<f32>>,
    /// LayerNorm of the residual stream after the feed-forward output was added.
    pub ffn_sum_norm: Option<LayerNorm>,
    pub per_layer: Option<PerLayer>,
    /// Factor of the layer's output.
    pub scale: Option<f32>,
    /// Bytes of memory of all weights.
    pub bytes: usize,
    /// Keys and values that the layer uses.
    pub(crate) place: KvPlace,
    /// First value of the layer in the state of a sequence.
    pub(crate) state: usize,
}

#[derive(Debug)]
pub struct LayerNorm {
    pub weight: Vec<f32>,
    pub bias: Vec<f32>,
}

#[derive(Debug)]
pub enum FeedForward {
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
pub struct ExpertNorms {
    pub router: Vec<f32>,
    pub input: Vec<f32>,
    pub output: Vec<f32>,
    pub shared_output: Vec<f32>,
}

/// Use of the per-layer input of a layer.
#[derive(Debug)]
pub struct PerLayer {
    pub gate: Packed,
    pub output: Packed,
    pub norm: Vec<f32>,
}

/// Expert that all rows go through.
#[derive(Debug)]
pub struct SharedExpert {
    /// Matrix of one row; `None` if the output is added as it is.
    pub score: Option<Packed>,
    pub ffn: Ffn,
    pub down: Packed,
}

/// Recurrence of a layer; [`Layer::qkv`] gives its inputs.
#[derive(Debug)]
pub enum Recurrence {
    /// Gated delta rule. `qkv` gives the inputs of the convolution, the gate of the output, and the
    /// scores of each head.
    Delta(Delta),
    /// Gated short convolution. `qkv` gives the factors before it, the factors behind it, and its
    /// inputs.
    Convolution(ShortConvolution),
    /// Mamba-2. `qkv` gives the gates of the outputs, the inputs of the convolution, and the step of
    /// each head.
    Mamba(Mamba),
}

/// Weights of a gated delta rule, beside its matrices.
#[derive(Debug)]
pub struct Delta {
    pub spec: DeltaSpec,
    pub convolution: ShortConvolution,
    pub decay: Vec<f32>,
    pub decay_bias: Vec<f32>,
    pub norm: Vec<f32>,
    /// For each value head, the columns of its scores of correction and decay.
    pub scores: Vec<(usize, usize)>,
}

/// Weights of a short convolution.
#[derive(Debug)]
pub struct ShortConvolution {
    pub positions: usize,
    /// Number of channels.
    pub width: usize,
    /// `[positions][width]`, oldest position first.
    pub weights: Vec<f32>,
}

/// Weights of Mamba-2, beside its matrices.
#[derive(Debug)]
pub struct Mamba {
    pub spec: MambaSpec,
    pub convolution: ShortConvolution,
    pub convolution_bias: Vec<f32>,
    /// Has a value per head, like `decay` and `skip`.
    pub step_bias: Vec<f32>,
    pub decay: Vec<f32>,
    pub skip: Vec<f32>,
    pub norm: Vec<f32>,
}

/// Matrix that scores the experts of a layer.
#[derive(Debug)]
pub struct Router {
    pub matrix: Packed,
    pub vectors: RouterVectors,
}

/// Values of a router for each expert.
#[derive(Clone, Default, Debug)]
pub struct RouterVectors {
    /// Bias of the scores.
    pub bias: Option<Vec<f32>>,
    /// See [`ExpertSpec::correction`](hearthnet_files::spec::ExpertSpec::correction).
    pub correction: Option<Vec<f32>>,
    /// Factor of the weight of each expert.
    pub scale: Option<Vec<f32>>,
}

#[derive(Debug)]
pub struct Expert {
    pub ffn: Ffn,
    pub down: Packed,
    pub bias: Option<ExpertBias>,
}

#[derive(Debug)]
pub struct ExpertBias {
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub down: Vec<f32>,
}

/// Query, key and value matrices. Their outputs form one row.
#[derive(Debug)]
pub struct Qkv {
    /// A fused matrix if types and shapes allow it, otherwise three. In latent attention two: of
    /// queries, and of keys and values.
    pub parts: Vec<Packed>,
    pub form: ActForm,
    pub bias: Option<Vec<f32>>,
}

/// Norms and up-projections of the low-rank rows of latent attention.
#[derive(Debug)]
pub struct Latent {
    /// Norm and up-projection of the low-rank rows of queries, if there are any.
    pub queries: Option<(Vec<f32>, Packed)>,
    pub kv_norm: Vec<f32>,
    pub up: LatentUp,
}

/// Up-projections to keys and values.
#[derive(Debug)]
pub enum LatentUp {
    Expanded(Packed),
    /// Of each head: the transposed matrix of the keys, which reads queries, and the matrix of the
    /// values, which reads the output of attention.
    Absorbed {
        keys: Vec<Packed>,
        values: Vec<Packed>,
    },
}

#[derive(Debug)]
pub enum Ffn {
    /// Interleaved panels, so that the kernel applies the gate in the same pass.
    Fused(Packed),
    /// Separate matrices, for cases that the fused kernel does not cover (see `Loader::ffn`).
    Split { gate: Packed, up: Packed },
    /// There is no gate. The bias is that of a dense layer.
    Ungated { up: Packed, bias: Option<Vec<f32>> },
}

impl Qkv {
    pub fn of(parts: Vec<Packed>) -> Self {
        let form = ActForm::of(&parts);
        Self {
            parts,
            form,
            bias: None,
        }
    }

    pub fn panels(&self) -> usize {
        self.parts.iter().map(Packed::panels).sum()
    }
}

impl Delta {
    /// Values of a row from `qkv`: inputs of the convolution, gate, scores.
    pub fn row(spec: &DeltaSpec) -> usize {
        (spec.channels() + spec.values() + 2 * spec.value_heads) as usize
    }
}

impl Latent {
    /// Panels of the up-projections of low-rank rows.
    pub fn panels(&self) -> usize {
        let queries = self.queries.as_ref().map_or(0, |(_, up)| up.panels());
        match &self.up {
            LatentUp::Expanded(up) => queries + up.panels(),
            LatentUp::Absorbed { .. } => queries,
        }
    }

    /// Matrices of the heads that read queries, and those that read the output of attention; empty
    /// unless absorbed.
    pub fn absorbed(&self) -> (&[Packed], &[Packed]) {
        match &self.up {
            LatentUp::Expanded(_) => (&[], &[]),
            LatentUp::Absorbed { keys, values } => (keys, values),
        }
    }
}

impl Ffn {
    pub fn form(&self) -> ActForm {
        match self {
            Self::Fused(both) => ActForm::of([both]),
            Self::Split { gate, up } => ActForm::of([gate, up]),
            Self::Ungated { up, .. } => ActForm::of([up]),
        }
    }

    /// Panels of each matrix.
    pub fn panels(&self) -> usize {
        self.first().panels()
    }

    pub fn columns(&self, panels: &Range<usize>) -> Range<usize> {
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
    /// Whether the layer has attention or a recurrence.
    pub fn has_mixer(&self) -> bool {
        self.attn_output.is_some()
    }

    /// Bytes of weights that one row reads, if it is routed to `used` experts.
    pub fn token_bytes(&self, used: usize) -> usize {
        match &self.feed_forward {
            FeedForward::Dense { .. } | FeedForward::None => self.bytes,
            FeedForward::Experts { experts, bytes, .. } => {
                let idle = experts.len().saturating_sub(used);
                self.bytes - bytes / experts.len().max(1) * idle
            }
        }
    }
}
