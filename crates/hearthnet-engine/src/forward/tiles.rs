//! Tiles of rows, and the buffers for their intermediate values.

use std::ops::Range;

use hearthnet_files::spec::{LatentSpec, ModelSpec};

use super::tiling::Segment;
use crate::kernels::{Act, Kernels, SharedMut, grow};
use crate::layer::{Delta, FeedForward, Ffn, Layer};
use crate::rope_tables::RopeTables;
use crate::thread_pool::ThreadPool;

/// Everything that stays the same for all rows of a batch.
pub(crate) struct EngineContext<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) kernels: Kernels,
    pub(crate) thread_pool: &'a ThreadPool,
    pub(crate) ropes: &'a RopeTables,
    pub(crate) layers: &'a [Layer],
    /// Per-layer inputs: for each row of the batch those of `layers`.
    pub(crate) inputs: &'a [f32],
}

impl EngineContext<'_> {
    /// Query heads per KV head of a layer.
    pub(super) fn group(&self, layer: &Layer) -> usize {
        self.spec.heads as usize / layer.place.kv_heads
    }

    /// Per-layer input of a row of the batch; empty if the model has none.
    pub(super) fn input(&self, row: usize, index: usize) -> &[f32] {
        let width = self.spec.per_layer.map_or(0, |p| p.width as usize);
        let at = (row * self.layers.len() + index) * width;
        &self.inputs[at..at + width]
    }
}

/// Widths of the intermediate values, in values per row.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub(super) x: usize,
    /// Outputs of the first matrices of a layer: queries, keys, values and gates; or those of a
    /// recurrence.
    pub(super) qkv: usize,
    /// Inputs of the output projection.
    pub(super) attn: usize,
    pub(super) latent: Option<LatentWidths>,
    /// Width of an expert, or 0.
    pub(super) ffn: usize,
    /// Width of the widest feed-forward layer without experts, or 0.
    pub(super) dense: usize,
    /// Width of the per-layer input, or 0.
    pub(super) per_layer: usize,
    /// Width of the shared expert, or 0.
    pub(super) shared: usize,
    pub(super) experts: usize,
    /// Experts per row, or 0.
    pub(super) used: usize,
    /// Whether a layer has separate gate and up matrices.
    pub(super) split_ffn: bool,
    /// Whether the outputs of attention and feed-forward layer are changed (bias, norm, scale)
    /// before they are added to the residual stream, or the sum is normalised.
    pub(super) branches: bool,
}

impl Widths {
    pub(super) fn of(context: &EngineContext<'_>) -> Self {
        let spec = context.spec;
        let widest = |width: fn(&Layer) -> usize| {
            let widths = context.layers.iter().map(width);
            widths.max().unwrap_or(0)
        };
        let q = widest(|layer| layer.q);
        let split = |layer: &Layer| match &layer.feed_forward {
            FeedForward::Dense { ffn, .. } => matches!(ffn, Ffn::Split { .. }),
            FeedForward::Experts { shared, .. } => {
                let ffn = shared.as_ref().map(|shared| &shared.ffn);
                matches!(ffn, Some(Ffn::Split { .. }))
            }
            FeedForward::None => false,
        };
        let gates = if spec.attention.output_gate { q } else { 0 };
        let delta = spec.delta.as_ref();
        let convolution = spec.convolution.as_ref();
        let convolution = convolution.map_or(0, |_| spec.width as usize);
        let mamba = spec.mamba.as_ref();
        Self {
            x: spec.width as usize,
            qkv: (widest(|layer| layer.q + 2 * layer.kv) + gates)
                .max(delta.map_or(0, Delta::row))
                .max(3 * convolution)
                .max(mamba.map_or(0, |mamba| mamba.row() as usize)),
            attn: q
                .max(delta.map_or(0, |delta| delta.values() as usize))
                .max(convolution)
                .max(mamba.map_or(0, |mamba| mamba.values() as usize)),
            latent: spec
                .attention
                .latent
                .map(|latent| LatentWidths::of(spec, &latent)),
            ffn: spec.experts.map_or(0, |_| spec.ffn as usize),
            dense: widest(|layer| match &layer.feed_forward {
                FeedForward::Dense { down, .. } => down.cols(),
                FeedForward::Experts { .. } | FeedForward::None => 0,
            }),
            per_layer: spec.per_layer.map_or(0, |p| p.width as usize),
            shared: spec
                .experts
                .and_then(|experts| experts.shared)
                .map_or(0, |shared| shared.ffn as usize),
            experts: spec.experts.map_or(0, |experts| experts.count as usize),
            used: spec.experts.map_or(0, |experts| experts.used as usize),
            split_ffn: context.layers.iter().any(split),
            branches: spec.post_norms
                || spec.scales.residual.is_some()
                || spec.attention.output_bias
                || spec.block_scale
                || spec.per_layer.is_some()
                || spec.encoder.is_some_and(|encoder| encoder.layer_norm),
        }
    }
}

/// Columns of a row of [`Buffers::latent`].
#[derive(Clone, Copy)]
pub(super) struct LatentWidths {
    pub(super) row: usize,
    /// Low-rank row of the queries; the queries themselves if there is none.
    first: usize,
    keys: usize,
    rotary: usize,
    /// Queries of all heads.
    queries: usize,
    has_rank: bool,
    /// Outputs of all heads; they replace the row after attention.
    pub(super) attended: usize,
    /// Heads with activations of their own.
    heads: usize,
}

impl LatentWidths {
    fn of(spec: &ModelSpec, latent: &LatentSpec) -> Self {
        let queries = (spec.heads * spec.head_dim) as usize;
        let first = latent.queries.map_or(queries, |rank| rank as usize);
        let (keys, rotary) = (latent.keys as usize, spec.rope.dims as usize);
        let up = latent.queries.map_or(0, |_| queries);
        let attended = (spec.heads * latent.values) as usize;
        Self {
            row: (first + keys + rotary + up).max(attended),
            first,
            keys,
            rotary,
            queries,
            has_rank: latent.queries.is_some(),
            attended,
            heads: if latent.absorbed {
                spec.heads as usize
            } else {
                1
            },
        }
    }

    /// Low-rank row of the queries, or the queries.
    pub(super) fn first(&self) -> Range<usize> {
        0..self.first
    }

    /// Low-rank row of keys and values.
    pub(super) fn keys(&self) -> Range<usize> {
        self.first..self.first + self.keys
    }

    /// Rotary part of the keys.
    pub(super) fn rotary(&self) -> Range<usize> {
        let start = self.keys().end;
        start..start + self.rotary
    }

    pub(super) fn queries(&self) -> Range<usize> {
        let start = if self.has_rank { self.rotary().end } else { 0 };
        start..start + self.queries
    }
}

/// Rows of a tile. The passes over the layers decide which thread may access what.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Index of the first row in the pass.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) segments: &'a [Segment],
    pub(super) x: SharedMut<'a, f32>,
    pub(super) qkv: SharedMut<'a, f32>,
}

/// Rows of a tile, and buffers for their intermediate values.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) buffers: Buffers<'a>,
}

/// Buffers of a [`TileBuffers`], shared between threads.
#[derive(Clone, Copy)]
pub(super) struct Buffers<'a> {
    pub(super) act: SharedMut<'a, Act>,
    /// Rows of latent attention: see [`LatentWidths`].
    pub(super) latent: SharedMut<'a, f32>,
    /// Normalised low-rank rows of keys and values. (Those of queries are in `act`.) If absorbed:
    /// input of the matrices of each head.
    pub(super) latent_acts: SharedMut<'a, Act>,
    pub(super) attn: SharedMut<'a, f32>,
    pub(super) h: SharedMut<'a, f32>,
    pub(super) up: SharedMut<'a, f32>,
    /// Branch output that is changed before it is added to the residual stream.
    pub(super) branch: SharedMut<'a, f32>,
    pub(super) scores: SharedMut<'a, f32>,
}

/// Buffers for the intermediate values of one tile.
#[derive(Default)]
pub(super) struct TileBuffers {
    act: Act,
    latent: Vec<f32>,
    latent_acts: Vec<Act>,
    attn: Vec<f32>,
    h: Vec<f32>,
    up: Vec<f32>,
    branch: Vec<f32>,
    scores: Vec<f32>,
}

impl TileBuffers {
    pub(super) fn buffers(&mut self, widths: &Widths, rows: usize) -> Buffers<'_> {
        let only = |wanted: bool, width: usize| if wanted { rows * width } else { 0 };
        let acts = widths.latent.map_or(0, |latent| latent.heads);
        if self.latent_acts.len() < acts {
            self.latent_acts.resize_with(acts, Act::default);
        }
        let branch = only(widths.branches || widths.experts > 0, widths.x);
        let h = widths.dense.max(widths.shared);
        Buffers {
            act: SharedMut::new(std::slice::from_mut(&mut self.act)),
            latent: shared(
                &mut self.latent,
                rows * widths.latent.map_or(0, |latent| latent.row),
            ),
            latent_acts: SharedMut::new(&mut self.latent_acts),
            attn: shared(&mut self.attn, rows * widths.attn),
            h: shared(&mut self.h, rows * h.max(widths.per_layer)),
            up: shared(&mut self.up, only(widths.split_ffn, h)),
            branch: shared(&mut self.branch, branch),
            scores: shared(&mut self.scores, rows * widths.experts),
        }
    }
}

/// Extends a buffer to at least `len` values, and shares it.
pub(super) fn shared<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> SharedMut<'_, T> {
    grow(buffer, len);
    SharedMut::new(buffer)
}

#[allow(unsafe_code)]
impl<'a> Buffers<'a> {
    /// # Safety
    /// No other unit of the phase uses the activations.
    pub(super) unsafe fn act(&self) -> &'a mut Act {
        // SAFETY: there is one element, and by the contract no other unit uses it.
        unsafe { &mut self.act.slice_mut(0..1)[0] }
    }

    /// # Safety
    /// No unit of the phase writes the activations.
    pub(super) unsafe fn read_act(&self) -> &'a Act {
        // SAFETY: there is one element, and by the contract no unit writes it.
        unsafe { &self.act.slice(0..1)[0] }
    }
}

/// Tiles of `size` rows of a pass, in order.
pub(super) fn tiles_of<'a>(
    widths: &Widths,
    tiles: &'a [Vec<Segment>],
    size: usize,
    x: &'a mut [f32],
    qkv: SharedMut<'a, f32>,
) -> Vec<Rows<'a>> {
    let tiles = tiles.iter().zip(x.chunks_mut(size * widths.x));
    let tiles = tiles.enumerate();
    tiles
        .map(|(index, (segments, x))| {
            let (first, count) = (index * size, x.len() / widths.x);
            Rows {
                first,
                count,
                segments,
                x: SharedMut::new(x),
                qkv: qkv.part(first * widths.qkv..(first + count) * widths.qkv),
            }
        })
        .collect()
}
