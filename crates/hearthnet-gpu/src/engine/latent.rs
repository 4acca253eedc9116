//! Latent attention: low-rank rows, and the matrices that expand or absorb them.

use hearthnet_engine::kernels::Packed;
use hearthnet_engine::layer::{Latent, LatentUp};
use hearthnet_files::spec::{LatentSpec, ModelSpec};

use super::row_buffers::RowBuffers;
use crate::{Buffer, Gpu, GpuError, GpuLoadError, Matrix};

/// Norms and up-projections of a layer.
pub(super) struct CardLatent {
    /// Norm and up-projection of the low-rank rows of queries, if there are any.
    pub(super) queries: Option<(Buffer, Matrix)>,
    pub(super) kv_norm: Buffer,
    pub(super) up: Up,
}

pub(super) enum Up {
    Expanded(Matrix),
    /// Matrices of all heads, one below the other, and the panels of each.
    Absorbed {
        keys: (Matrix, u32),
        values: (Matrix, u32),
    },
}

impl CardLatent {
    pub(super) fn upload(gpu: &Gpu, latent: &Latent) -> Result<Self, GpuLoadError> {
        let stack = |heads: &[Packed]| {
            let panels = heads.first().map_or(0, |head| head.panels() as u32);
            let heads: Vec<&Packed> = heads.iter().collect();
            Ok::<_, GpuError>((gpu.stack(&heads)?, panels))
        };
        Ok(Self {
            queries: match &latent.queries {
                Some((norm, up)) => Some((gpu.upload_f32(norm)?, gpu.matrix(up)?)),
                None => None,
            },
            kv_norm: gpu.upload_f32(&latent.kv_norm)?,
            up: match &latent.up {
                LatentUp::Expanded(up) => Up::Expanded(gpu.matrix(up)?),
                LatentUp::Absorbed { keys, values } => Up::Absorbed {
                    keys: stack(keys)?,
                    values: stack(values)?,
                },
            },
        })
    }
}

/// Widths of the parts of rows, in values.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub(super) heads: u32,
    /// Head of a query: the part without RoPE, then the rotated part.
    pub(super) head: u32,
    pub(super) nope: u32,
    pub(super) rotary: u32,
    /// Low-rank rows of queries, and of keys and values.
    pub(super) queries: u32,
    pub(super) keys: u32,
    pub(super) values: u32,
    /// A key in the cache.
    pub(super) key: u32,
    pub(super) kv_heads: u32,
}

impl Widths {
    fn of(spec: &ModelSpec, latent: &LatentSpec) -> Self {
        let block = spec.block(0);
        let (head, rotary) = (spec.head_dim, spec.rope.dims);
        Self {
            heads: spec.heads,
            head,
            nope: head - rotary,
            rotary,
            queries: latent.queries.unwrap_or(0),
            keys: latent.keys,
            values: latent.values,
            key: block.key_width(),
            kv_heads: block.kv_heads,
        }
    }

    /// Low-rank rows and rotary part.
    pub(super) fn low(&self) -> u32 {
        self.queries + self.keys + self.rotary
    }
}

/// Buffers for the rows of a pass.
pub(super) struct LatentBuffers {
    pub(super) widths: Widths,
    /// Low-rank rows of queries, if there are any, and of keys and values; rotary part of the key.
    pub(super) low: Buffer,
    pub(super) normed: Buffer,
    pub(super) act: Buffer,
    /// Queries of all heads, as the matrix returns them; `both` has keys and values.
    pub(super) queries: Buffer,
    pub(super) both: Buffer,
    /// Queries in the layout that attention reads, like `keys` and `values`.
    pub(super) wide: Buffer,
    pub(super) keys: Buffer,
    pub(super) values: Buffer,
    /// Outputs of all heads.
    pub(super) out: Buffer,
    pub(super) zeros: Buffer,
}

impl LatentBuffers {
    pub(super) fn new(
        buffers: &mut RowBuffers<'_>,
        spec: &ModelSpec,
        latent: &LatentSpec,
    ) -> Result<Self, GpuError> {
        let w = Widths::of(spec, latent);
        let of_head = w.nope.max(w.keys).max(w.values);
        // Heads begin at the rotated part for RoPE, which so ends behind the last row.
        let queries = u64::from(buffers.rows) * u64::from(w.heads * w.head) + u64::from(w.head);
        Ok(Self {
            widths: w,
            low: buffers.of(w.low())?,
            normed: buffers.of(w.queries.max(w.keys))?,
            act: buffers.act(w.heads, of_head)?,
            queries: buffers.words(queries)?,
            both: buffers.of(w.heads * (w.nope + w.values))?,
            wide: buffers.of(w.heads * w.key)?,
            keys: buffers.of(w.kv_heads * w.key)?,
            values: buffers.of(w.kv_heads * w.key)?,
            out: buffers.of(w.heads * w.values)?,
            zeros: buffers.gpu.buffer(u64::from(w.key))?,
        })
    }
}
