//! Latent attention: low-rank rows, and the matrices that expand or absorb them. The steps are those
//! of `hearthnet-engine`'s `forward::latent`.
//!
//! Rows of heads lie one after another, so that a launch takes the heads of all rows as rows.

use hearthnet_engine::EngineError;
use hearthnet_engine::kernels::Packed;
use hearthnet_engine::layer::{Latent, LatentUp};
use hearthnet_files::spec::{LatentSpec, ModelSpec};

use super::pass::{Pass, device_error};
use super::weights::{Attention, GpuLoadError};
use crate::{Buffer, Gpu, GpuError, Input, Matrix, View};

/// Norms and up-projections of a layer.
pub(super) struct CardLatent {
    /// Norm and up-projection of the low-rank rows of queries, if there are any.
    queries: Option<(Buffer, Matrix)>,
    kv_norm: Buffer,
    up: Up,
}

enum Up {
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
struct Widths {
    heads: u32,
    /// Head of a query: the part without RoPE, then the rotated part.
    head: u32,
    nope: u32,
    rotary: u32,
    /// Low-rank rows of queries, and of keys and values.
    queries: u32,
    keys: u32,
    values: u32,
    /// A key in the cache.
    key: u32,
    kv_heads: u32,
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
    fn low(&self) -> u32 {
        self.queries + self.keys + self.rotary
    }
}

/// Buffers for the rows of a pass.
pub(super) struct LatentBuffers {
    widths: Widths,
    /// Low-rank rows of queries, if there are any, and of keys and values; rotary part of the key.
    low: Buffer,
    normed: Buffer,
    act: Buffer,
    /// Queries of all heads, as the matrix returns them; `both` has keys and values.
    queries: Buffer,
    both: Buffer,
    /// Queries in the layout that attention reads, like `keys` and `values`.
    wide: Buffer,
    keys: Buffer,
    values: Buffer,
    /// Outputs of all heads.
    out: Buffer,
    zeros: Buffer,
}

impl LatentBuffers {
    pub(super) fn new(
        gpu: &Gpu,
        spec: &ModelSpec,
        latent: &LatentSpec,
        rows: u32,
    ) -> Result<Self, GpuError> {
        let w = Widths::of(spec, latent);
        let of = |width: u32| gpu.buffer(u64::from(rows) * u64::from(width.max(1)));
        let of_head = w.nope.max(w.keys).max(w.values);
        Ok(Self {
            widths: w,
            low: of(w.low())?,
            normed: of(w.queries.max(w.keys))?,
            act: gpu.act(rows * w.heads, of_head.next_multiple_of(32))?,
            // Heads begin at the rotated part for RoPE, which so ends behind the last row.
            queries: gpu
                .buffer(u64::from(rows) * u64::from(w.heads * w.head) + u64::from(w.head))?,
            both: of(w.heads * (w.nope + w.values))?,
            wide: of(w.heads * w.key)?,
            keys: of(w.kv_heads * w.key)?,
            values: of(w.kv_heads * w.key)?,
            out: of(w.heads * w.values)?,
            zeros: gpu.buffer(u64::from(w.key))?,
        })
    }

    /// Buffers that depend on the rows.
    pub(super) fn of_rows(&self) -> [&Buffer; 9] {
        [
            &self.low,
            &self.normed,
            &self.act,
            &self.queries,
            &self.both,
            &self.wide,
            &self.keys,
            &self.values,
            &self.out,
        ]
    }
}

impl<'a> Pass<'a> {
    /// Queries, keys and values of the rows, of which `input` is the normalised stream.
    pub(super) fn latent_rows(
        &mut self,
        attention: &Attention,
        of: &CardLatent,
        input: View<'a>,
    ) -> Result<[View<'a>; 3], EngineError> {
        let (rows, spec) = (self.rows, self.spec);
        let (Some(b), Some(latent)) = (&self.buffers.latent, &spec.attention.latent) else {
            return Err(EngineError::Device(
                "no buffers for latent attention".to_owned(),
            ));
        };
        let (w, eps) = (b.widths, latent.norm_eps);
        let low = |column: u32| b.low.rows_at(column, w.low());
        let [low_keys, rotary] = [w.queries, w.queries + w.keys].map(low);
        let all_queries = b.queries.rows(w.heads * w.head);

        // The first matrix gives the low-rank rows of queries, or the queries.
        self.prepare(input, &attention.qkv);
        let outputs = match of.queries {
            Some(_) => [low(0), low_keys],
            None => [all_queries, low_keys],
        };
        for (matrix, out) in attention.qkv.iter().zip(outputs) {
            self.multiply(matrix, input, out)?;
        }
        if let Some((norm, up)) = &of.queries {
            let normed = b.normed.rows(w.queries);
            self.step
                .rms_norm(low(0), normed, rows, 1, w.queries, Some(norm), eps);
            self.prepare(normed, [up]);
            self.multiply(up, normed, all_queries)?;
        }
        if let Some((angles, pairs)) = self.angles.table(attention.rotation) {
            let (info, kind) = (self.info.view(attention.window), spec.rope.kind);
            self.step
                .rope(rotary, rows, 1, w.rotary, kind, angles, pairs, info);
            let rotated = b.queries.rows_at(w.nope, w.heads * w.head);
            let (heads, head) = (w.heads, w.head);
            self.step
                .rope(rotated, rows, heads, head, kind, angles, pairs, info);
        }
        let keys = b.keys.rows(w.kv_heads * w.key);
        let values = b.values.rows(w.kv_heads * w.key);
        let of_heads = rows * w.heads;
        match &of.up {
            Up::Expanded(up) => {
                let normed = b.normed.rows(w.keys);
                let norm = Some(&of.kv_norm);
                self.step
                    .rms_norm(low_keys, normed, rows, 1, w.keys, norm, eps);
                self.prepare(normed, [up]);
                let each = w.nope + w.values;
                self.multiply(up, normed, b.both.rows(w.heads * each))?;
                let (to_keys, from) = (b.keys.rows(w.key), b.both.rows(each));
                self.step.copy(from, to_keys, of_heads, w.nope);
                self.repeat_rotary(rotary, &b.keys, w);
                let (to, from) = (b.values.rows(w.key), b.both.rows_at(w.nope, each));
                self.step.copy(from, to, of_heads, w.values);
                self.pad(b, of_heads, w.values);
                Ok([all_queries, keys, values])
            }
            Up::Absorbed {
                keys: (up, panels), ..
            } => {
                let norm = Some(&of.kv_norm);
                self.step
                    .rms_norm(low_keys, low_keys, rows, 1, w.keys, norm, eps);
                let from = b.queries.rows(w.head);
                let wide = b.wide.rows(w.key);
                self.heads((up, *panels), w.keys, (from, w.nope), wide)?;
                let (from, to) = (
                    b.queries.rows_at(w.nope, w.head),
                    b.wide.rows_at(w.keys, w.key),
                );
                self.step.copy(from, to, of_heads, w.rotary);
                for to in [&b.keys, &b.values] {
                    self.step.copy(low_keys, to.rows(w.key), rows, w.keys);
                }
                let to = b.keys.rows_at(w.keys, w.key);
                self.step.copy(rotary, to, rows, w.rotary);
                self.pad(b, rows, w.keys);
                Ok([b.wide.rows(w.heads * w.key), keys, values])
            }
        }
    }

    /// Fills up each value in the cache with zeros, from `from` on.
    fn pad(&mut self, b: &'a LatentBuffers, rows: u32, from: u32) {
        let key = b.widths.key;
        if from < key {
            let to = b.values.rows_at(from, key);
            self.step.copy(b.zeros.rows(0), to, rows, key - from);
        }
    }

    /// Copies the rotary part of each row behind the other part of the key of every head.
    fn repeat_rotary(&mut self, rotary: View<'a>, keys: &'a Buffer, w: Widths) {
        let row = w.heads * w.key;
        if self.rows < w.heads {
            for nth in 0..self.rows {
                let from = View {
                    offset: rotary.offset + nth * rotary.stride,
                    stride: 0,
                    ..rotary
                };
                let to = keys.rows_at(nth * row + w.nope, w.key);
                self.step.copy(from, to, w.heads, w.rotary);
            }
        } else {
            for head in 0..w.heads {
                let to = keys.rows_at(head * w.key + w.nope, row);
                self.step.copy(rotary, to, self.rows, w.rotary);
            }
        }
    }

    /// Multiplies the first `cols` values of each head of each row with the matrix of the head,
    /// which has `outputs` outputs.
    fn heads(
        &mut self,
        (matrix, panels): (&Matrix, u32),
        outputs: u32,
        (from, cols): (View<'a>, u32),
        out: View<'a>,
    ) -> Result<(), EngineError> {
        let Some(b) = &self.buffers.latent else {
            return Ok(());
        };
        let (heads, count) = (b.widths.heads, self.rows * b.widths.heads);
        let pairs = (0..count).flat_map(|pair| [pair, pair % heads * panels]);
        let pairs = self.gpu.upload(&pairs.collect::<Vec<_>>());
        let pairs = pairs.map_err(device_error)?;
        let input = match matrix.weight_type().quantised() {
            true => {
                self.step.quantise(from, &b.act, count, cols);
                Input::Quantised(&b.act)
            }
            false => Input::Plain(from),
        };
        self.make_room(matrix.bytes() * u64::from(self.rows))?;
        self.step
            .matmul_pairs(matrix, outputs, &pairs, input, count, out, count);
        Ok(())
    }

    /// Outputs of all heads, of which `attended` are the outputs of attention.
    pub(super) fn latent_outputs(
        &mut self,
        of: &CardLatent,
        attended: &'a Buffer,
    ) -> Result<View<'a>, EngineError> {
        let Some(b) = &self.buffers.latent else {
            return Ok(attended.rows(0));
        };
        let w = b.widths;
        let (from, to) = (attended.rows(w.key), b.out.rows(w.values));
        match &of.up {
            // Values are padded to the width of keys.
            Up::Expanded(_) => {
                self.step.copy(from, to, self.rows * w.heads, w.values);
            }
            Up::Absorbed {
                values: (up, panels),
                ..
            } => {
                self.heads((up, *panels), w.values, (from, w.keys), to)?;
            }
        }
        Ok(b.out.rows(w.heads * w.values))
    }
}
