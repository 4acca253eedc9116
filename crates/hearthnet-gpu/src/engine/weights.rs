//! Weights of layers on the card.

use hearthnet_engine::kernels::Packed;
use hearthnet_engine::layer::{FeedForward, Layer, LayerNorm};
use hearthnet_files::spec::{BlockSpec, Rotation};

use super::experts::CardExperts;
use super::latent::CardLatent;
use super::parts::{BranchEnd, CardFfn};
use super::recurrence::{CardConvolution, CardRecurrence, Kind};
use crate::{Buffer, Gpu, GpuLoadError, Matrix};

/// Weights of one layer.
pub(super) struct CardLayer {
    /// `None` if the layer has a recurrence, or a feed-forward layer only.
    pub(super) attention: Option<Attention>,
    pub(super) recurrence: Option<CardRecurrence>,
    /// Before the feed-forward layer.
    pub(super) ffn_norm: Option<Buffer>,
    pub(super) feed: Feed,
    pub(super) per_layer: Option<PerLayer>,
    /// Factor of the layer's output.
    pub(super) scale: Option<f32>,
}

/// Attention of a layer. Widths are in values.
pub(super) struct Attention {
    pub(super) norm: Option<Buffer>,
    /// Their outputs lie side by side: queries, keys, values, gates.
    pub(super) qkv: Vec<Matrix>,
    pub(super) bias: Option<Buffer>,
    pub(super) latent: Option<CardLatent>,
    /// Index, among the engine's layers, of the one whose keys and values it uses.
    pub(super) keys_of: usize,
    pub(super) q: u32,
    /// Width of keys, and of values; 0 if the layer uses those of another one.
    pub(super) kv: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    /// Norms of queries, keys and values; each is as wide as its weights.
    pub(super) norms: [Option<Buffer>; 3],
    pub(super) keys_as_values: bool,
    pub(super) rotation: Rotation,
    pub(super) window: Option<u32>,
    pub(super) sinks: Option<Buffer>,
    pub(super) output: Matrix,
    pub(super) end: BranchEnd,
}

pub(super) enum Feed {
    None,
    Dense {
        ffn: CardFfn,
        down: Matrix,
        end: BranchEnd,
    },
    Experts {
        experts: Box<CardExperts>,
        end: BranchEnd,
    },
}

impl Feed {
    pub(super) fn end(&self) -> Option<&BranchEnd> {
        match self {
            Self::None => None,
            Self::Dense { end, .. } | Self::Experts { end, .. } => Some(end),
        }
    }
}

/// Use of the per-layer input.
pub(super) struct PerLayer {
    pub(super) gate: Matrix,
    pub(super) output: Matrix,
    pub(super) norm: Buffer,
}

impl CardLayer {
    /// Sends the weights of a layer to the card. `first` is the engine's first layer.
    pub(super) fn upload(
        gpu: &Gpu,
        block: &BlockSpec<'_>,
        first: u32,
        layer: Layer,
    ) -> Result<Self, GpuLoadError> {
        let vector = |values: &[f32]| gpu.upload_f32(values);
        let optional = |values: &Option<Vec<f32>>| values.as_deref().map(vector).transpose();
        let matrix = |packed: &Packed| gpu.matrix(packed);
        let matrices = |all: &[Packed]| all.iter().map(matrix).collect::<Result<Vec<_>, _>>();
        let end = |bias, norm, sum_norm: &Option<LayerNorm>| {
            let sum_norm = sum_norm.as_ref().map(|LayerNorm { weight, bias }| {
                let weight = vector(weight)?;
                Ok::<_, GpuLoadError>((weight, vector(bias)?))
            });
            Ok::<_, GpuLoadError>(BranchEnd {
                bias: optional(bias)?,
                norm: optional(norm)?,
                sum_norm: sum_norm.transpose()?,
            })
        };
        let norm = optional(&layer.attn_norm)?;
        let mixer_end = end(
            &layer.attn_output_bias,
            &layer.attn_post_norm,
            &layer.attn_sum_norm,
        )?;
        let (mut attention, mut recurrence) = (None, None);
        match (&layer.attn_output, &layer.recurrence) {
            (None, _) => {}
            (Some(output), Some(of)) => {
                recurrence = Some(CardRecurrence {
                    norm,
                    matrices: matrices(&layer.qkv.parts)?,
                    convolution: CardConvolution::upload(gpu, of)?,
                    kind: Kind::upload(gpu, of)?,
                    output: matrix(output)?,
                    end: mixer_end,
                });
            }
            (Some(output), None) => {
                attention = Some(Attention {
                    norm,
                    qkv: matrices(&layer.qkv.parts)?,
                    bias: optional(&layer.qkv.bias)?,
                    latent: match &layer.latent {
                        Some(latent) => Some(CardLatent::upload(gpu, latent)?),
                        None => None,
                    },
                    keys_of: block.keys_of.saturating_sub(first) as usize,
                    q: narrow(layer.q)?,
                    kv: narrow(layer.kv)?,
                    kv_heads: block.kv_heads,
                    head_dim: block.key_width(),
                    norms: [
                        optional(&layer.q_norm)?,
                        optional(&layer.k_norm)?,
                        optional(&layer.v_norm)?,
                    ],
                    keys_as_values: layer.keys_as_values,
                    rotation: layer.rotation,
                    window: block.window,
                    sinks: optional(&layer.sinks)?,
                    output: matrix(output)?,
                    end: mixer_end,
                });
            }
        }
        let end = end(&layer.ffn_bias, &layer.ffn_post_norm, &layer.ffn_sum_norm)?;
        let feed = match layer.feed_forward {
            FeedForward::None => Feed::None,
            FeedForward::Dense { ffn, down } => Feed::Dense {
                ffn: CardFfn::upload(gpu, &ffn)?,
                down: matrix(&down)?,
                end,
            },
            FeedForward::Experts {
                router,
                experts,
                shared,
                norms,
                ..
            } => {
                let (shared, norms) = (shared.as_deref(), norms.as_deref());
                let experts = CardExperts::upload(gpu, &router, experts, shared, norms)?;
                Feed::Experts {
                    experts: Box::new(experts),
                    end,
                }
            }
        };
        let per_layer = match &layer.per_layer {
            None => None,
            Some(own) => Some(PerLayer {
                gate: matrix(&own.gate)?,
                output: matrix(&own.output)?,
                norm: vector(&own.norm)?,
            }),
        };
        Ok(Self {
            attention,
            recurrence,
            ffn_norm: optional(&layer.ffn_norm)?,
            feed,
            per_layer,
            scale: layer.scale,
        })
    }
}

/// Values of a row, which fit into 32 bits in every model that the checks of files let through.
fn narrow(values: usize) -> Result<u32, GpuLoadError> {
    u32::try_from(values).map_err(|_| {
        GpuLoadError::unsupported("rows of more than 4 billion values are not computed")
    })
}
