//! Forward pass of a batch.
//!
//! The residual stream is fp32, rounded to the boundary dtype after every block, as in the exact
//! engine. Norms, rotations, softmax and the router of experts are fp32 too. Matrices, and keys and
//! values of attention, are in the engine's format.

mod attention;
mod choose;
mod experts;

use std::rc::Rc;

use hearthnet_engine::{RopeTables, Span};
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::{Activation, LatentSpec, ModelSpec, RopeKind, Rotation};
use tch::{Device, Kind, TchError, Tensor};

use crate::kv::Buffers;
use crate::weights::{FeedForward, Ffn, Latent, Layer};

type Result<T> = std::result::Result<T, TchError>;

/// Limit of the clamped gate and up values, and slope of the sigmoid (clamped SwiGLU of gpt-oss).
const CLAMPED_LIMIT: f64 = 7.0;
const CLAMPED_SLOPE: f64 = 1.702;

/// Rows of one sequence in a batch.
pub(crate) struct Segment {
    position: i64,
    rows: i64,
    buffers: Rc<Buffers>,
}

/// State of a batch that is the same for all blocks.
pub(crate) struct Pass<'a> {
    spec: &'a ModelSpec,
    kind: Kind,
    device: Device,
    segments: Vec<Segment>,
    /// Cosines and sines of all rows, `[rows, 1, pairs]`.
    global: Option<(Tensor, Tensor)>,
    local: Option<(Tensor, Tensor)>,
    /// Attention temperatures, `[rows, 1, 1]`.
    temperature: Option<Tensor>,
}

impl<'a> Pass<'a> {
    /// `ropes` must cover the positions of the spans.
    pub(crate) fn new(
        spec: &'a ModelSpec,
        kind: Kind,
        device: Device,
        ropes: &RopeTables,
        spans: impl Iterator<Item = (Span, Rc<Buffers>)>,
    ) -> Result<Self> {
        let (mut segments, mut positions) = (Vec::new(), Vec::new());
        for (span, buffers) in spans {
            positions.extend(span.position as usize..(span.position + span.rows) as usize);
            segments.push(Segment {
                position: span.position.into(),
                rows: span.rows.into(),
                buffers,
            });
        }
        let angles = |rotation| angles(ropes, rotation, &positions, device);
        let temperature = match &spec.attention.temperature {
            Some(temperature) => {
                let factors = positions.iter().map(|p| temperature.factor(*p));
                let factors: Vec<f32> = factors.collect();
                Some(upload(&factors, &[factors.len() as i64, 1, 1], device)?)
            }
            None => None,
        };
        Ok(Self {
            spec,
            kind,
            device,
            global: angles(Rotation::Global)?,
            local: match spec.rope.local_theta {
                Some(_) => angles(Rotation::Local)?,
                None => None,
            },
            temperature,
            segments,
        })
    }

    /// Runs fp32 rows through the engine's block number `index`, and appends their keys and values.
    pub(crate) fn block(&self, layer: &Layer, index: usize, x: &Tensor) -> Result<Tensor> {
        let spec = self.spec;
        let normed = norm(x, &layer.attn_norm, spec.norm_eps)?;
        let branch = self.attention(layer, index, &normed.f_to_kind(self.kind)?)?;
        let x = self.end_branch(x, &branch, layer.attn_post_norm.as_ref())?;
        let normed = norm(&x, &layer.ffn_norm, spec.norm_eps)?;
        let branch = match &layer.feed {
            FeedForward::Dense(ffn) => self.ffn(ffn, &normed.f_to_kind(self.kind)?)?,
            FeedForward::Experts { router, experts } => self.experts(router, experts, &normed)?,
        };
        let x = self.end_branch(&x, &branch, layer.ffn_post_norm.as_ref())?;
        match spec.boundary {
            BoundaryDtype::F16 => x.f_to_kind(Kind::Half)?.f_to_kind(Kind::Float),
            BoundaryDtype::Bf16 => x.f_to_kind(Kind::BFloat16)?.f_to_kind(Kind::Float),
            BoundaryDtype::F32 => Ok(x),
        }
    }

    /// Adds the output of attention or feed-forward to the residual stream.
    fn end_branch(
        &self,
        x: &Tensor,
        branch: &Tensor,
        post_norm: Option<&Tensor>,
    ) -> Result<Tensor> {
        let mut branch = branch.f_to_kind(Kind::Float)?;
        if let Some(weight) = post_norm {
            branch = norm(&branch, weight, self.spec.norm_eps)?;
        }
        if let Some(scale) = self.spec.scales.residual {
            branch = branch.f_mul_scalar(f64::from(scale))?;
        }
        x.f_add(&branch)
    }

    /// Attention of normalised rows, without the residual connection.
    fn attention(&self, layer: &Layer, index: usize, normed: &Tensor) -> Result<Tensor> {
        let spec = self.spec;
        let mixed = layer.qkv.apply(normed)?;
        let (mut q, k, v) = match (&layer.latent, &spec.attention.latent) {
            (Some(latent), Some(widths)) => self.latent(layer, latent, widths, &mixed)?,
            _ => self.heads(layer, &mixed)?,
        };
        if let Some(temperature) = &self.temperature {
            q = q.f_mul(temperature)?;
        }
        // Scaled in fp32, because unscaled scores may leave the range of fp16.
        let scale = match spec.attention.scale {
            Some(scale) => f64::from(scale),
            None => 1.0 / f64::from(spec.head_dim).sqrt(),
        };
        let q = q.f_mul_scalar(scale)?.f_to_kind(self.kind)?;
        let (k, v) = (k.f_to_kind(self.kind)?, v.f_to_kind(self.kind)?);
        let (mut first, mut attended) = (0, Vec::with_capacity(self.segments.len()));
        for segment in &self.segments {
            let rows = |x: &Tensor| x.f_narrow(0, first, segment.rows);
            let cache = segment.buffers.layer(index)?;
            for (cache, fresh) in [(&cache.0, &k), (&cache.1, &v)] {
                let mut slots = cache.f_narrow(1, segment.position, segment.rows)?;
                slots.f_copy_(&rows(fresh)?.f_transpose(0, 1)?)?;
            }
            attended.push(self.attend(layer, segment, &rows(&q)?, cache)?);
            first += segment.rows;
        }
        layer.attn_output.apply(&Tensor::f_cat(&attended, 0)?)
    }

    /// Queries, keys and values of the rows, all `[rows, heads, width]`, fp32, after RoPE.
    fn heads(&self, layer: &Layer, mixed: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let spec = self.spec;
        let block = spec.block(0);
        let (q, kv) = (i64::from(block.query_width()), i64::from(block.kv_width()));
        let part = |start, width| mixed.f_narrow(1, start, width)?.f_to_kind(Kind::Float);
        let (mut queries, mut keys, values) = (part(0, q)?, part(q, kv)?, part(q + kv, kv)?);
        let d = i64::from(spec.head_dim);
        let split = |x: &Tensor| x.f_reshape([x.size2()?.0, -1, d]);
        if let Some((q_norm, k_norm)) = &layer.qk_norm {
            // The norm's weight covers one head, or all heads together.
            let normed = |x: &Tensor, weight: &Tensor| {
                let width = weight.size1()?;
                let groups = x.f_reshape([-1, width])?;
                norm(&groups, weight, spec.norm_eps)?.f_view_as(x)
            };
            queries = normed(&queries.f_contiguous()?, q_norm)?;
            keys = normed(&keys.f_contiguous()?, k_norm)?;
        }
        let (mut queries, mut keys) = (split(&queries)?, split(&keys)?);
        if let Some((cos, sin)) = self.angles(layer.rotation) {
            queries = rotate(&queries, cos, sin, spec.rope.kind)?;
            keys = rotate(&keys, cos, sin, spec.rope.kind)?;
        }
        Ok((queries, keys, split(&values)?))
    }

    /// Same as `heads`, through the low-rank projections of latent attention.
    fn latent(
        &self,
        layer: &Layer,
        latent: &Latent,
        widths: &LatentSpec,
        low_rank: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let spec = self.spec;
        let [q, kv] = [widths.queries.unwrap_or(0), widths.keys].map(i64::from);
        let (heads, d) = (i64::from(spec.heads), i64::from(spec.head_dim));
        let (dims, values) = (i64::from(spec.rope.dims), i64::from(widths.values));
        let nope = d - dims;
        let normed = |start, width, weight| {
            let part = low_rank.f_narrow(1, start, width)?.f_to_kind(Kind::Float)?;
            norm(&part, weight, widths.norm_eps)?.f_to_kind(self.kind)
        };
        let queries = latent.q.apply(&normed(0, q, &latent.q_norm)?)?;
        let both = latent.kv.apply(&normed(q, kv, &latent.kv_norm)?)?;
        let queries = queries.f_reshape([-1, heads, d])?.f_to_kind(Kind::Float)?;
        let both = both.f_reshape([-1, heads, nope + values])?;
        let both = both.f_to_kind(Kind::Float)?;
        // All heads share the rotary part of the key.
        let rotated = low_rank.f_narrow(1, q + kv, dims)?.f_unsqueeze(1)?;
        let mut rotated = rotated.f_to_kind(Kind::Float)?;
        let (nope_queries, mut rotated_queries) = (
            queries.f_narrow(2, 0, nope)?,
            queries.f_narrow(2, nope, dims)?,
        );
        if let Some((cos, sin)) = self.angles(layer.rotation) {
            rotated = rotate(&rotated, cos, sin, spec.rope.kind)?;
            rotated_queries = rotate(&rotated_queries, cos, sin, spec.rope.kind)?;
        }
        let rotated = rotated.f_expand([-1, heads, dims], false)?;
        Ok((
            Tensor::f_cat(&[nope_queries, rotated_queries], 2)?,
            Tensor::f_cat(&[both.f_narrow(2, 0, nope)?, rotated], 2)?,
            both.f_narrow(2, nope, values)?,
        ))
    }

    fn angles(&self, rotation: Rotation) -> Option<(&Tensor, &Tensor)> {
        let table = match rotation {
            Rotation::None => &None,
            Rotation::Global => &self.global,
            Rotation::Local if self.local.is_none() => &self.global,
            Rotation::Local => &self.local,
        };
        table.as_ref().map(|(cos, sin)| (cos, sin))
    }

    fn ffn(&self, ffn: &Ffn, x: &Tensor) -> Result<Tensor> {
        let both = ffn.gate_up.apply(x)?;
        let width = i64::from(self.spec.ffn);
        let (gate, up) = (both.f_narrow(1, 0, width)?, both.f_narrow(1, width, width)?);
        let h = match self.spec.activation {
            Activation::Silu => gate.f_silu()?.f_mul(&up)?,
            Activation::Gelu => gate.f_gelu("tanh")?.f_mul(&up)?,
            // `check` refuses the families that have one of these.
            Activation::GeluErf => gate.f_gelu("none")?.f_mul(&up)?,
            Activation::SquaredRelu => gate.f_relu()?.f_square()?.f_mul(&up)?,
            Activation::Clamped => {
                let gate = gate.f_clamp_max(CLAMPED_LIMIT)?;
                let up = up.f_clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)?;
                let sigmoid = gate.f_mul_scalar(CLAMPED_SLOPE)?.f_sigmoid()?;
                up.f_add_scalar(1.0)?.f_mul(&gate.f_mul(&sigmoid)?)?
            }
        };
        ffn.down.apply(&h)
    }
}

/// RMSNorm of fp32 rows.
fn norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    x.f_rms_norm([weight.size1()?], Some(weight), f64::from(eps))
}

/// Applies RoPE to the first values of each head of `[rows, heads, width]`, two per pair of the
/// table.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, kind: RopeKind) -> Result<Tensor> {
    let (_, _, pairs) = cos.size3()?;
    let (_, _, width) = x.size3()?;
    let head = x.f_narrow(2, 0, 2 * pairs)?;
    let (a, b) = match kind {
        RopeKind::NeoX => (head.f_narrow(2, 0, pairs)?, head.f_narrow(2, pairs, pairs)?),
        RopeKind::Interleaved => (
            head.f_slice(2, 0, 2 * pairs, 2)?,
            head.f_slice(2, 1, 2 * pairs, 2)?,
        ),
    };
    let first = a.f_mul(cos)?.f_sub(&b.f_mul(sin)?)?;
    let second = a.f_mul(sin)?.f_add(&b.f_mul(cos)?)?;
    let mut rotated = match kind {
        RopeKind::NeoX => vec![first, second],
        RopeKind::Interleaved => vec![Tensor::f_stack(&[first, second], 3)?.f_flatten(2, 3)?],
    };
    if width > 2 * pairs {
        rotated.push(x.f_narrow(2, 2 * pairs, width - 2 * pairs)?);
    }
    Tensor::f_cat(&rotated, 2)
}

/// Cosines and sines of positions, for blocks with the given rotation.
fn angles(
    ropes: &RopeTables,
    rotation: Rotation,
    positions: &[usize],
    device: Device,
) -> Result<Option<(Tensor, Tensor)>> {
    let Some(table) = ropes.table(rotation) else {
        return Ok(None);
    };
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for position in positions {
        let beyond = || TchError::Shape(format!("position {position} beyond the rotations"));
        let (c, s) = table.angles(*position).ok_or_else(beyond)?;
        cos.extend_from_slice(c);
        sin.extend_from_slice(s);
    }
    let size = [positions.len() as i64, 1, (table.dims() / 2) as i64];
    Ok(Some((
        upload(&cos, &size, device)?,
        upload(&sin, &size, device)?,
    )))
}

pub(crate) fn upload<T: tch::kind::Element>(
    values: &[T],
    size: &[i64],
    device: Device,
) -> Result<Tensor> {
    Tensor::f_from_slice(values)?
        .f_view(size)?
        .f_to_device(device)
}

pub(crate) fn download<T: tch::kind::Element + Copy + Default>(tensor: &Tensor) -> Result<Vec<T>> {
    let len = tensor.numel();
    let mut values = vec![T::default(); len];
    let here = tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
    here.f_copy_data(&mut values, len)?;
    Ok(values)
}
