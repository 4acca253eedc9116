//! A batch of rows through the blocks of a model.
//!
//! The residual stream is fp32 and is rounded to the boundary dtype after every block, as in the
//! exact engine; so are norms, rotations, softmax and the router of experts. Matrices, and the keys
//! and values of attention, are in the engine's format.

mod attention;
mod experts;

use std::rc::Rc;

use hearthnet_model::BoundaryDtype;
use hearthnet_model::engine::{RopeTables, Span};
use hearthnet_model::spec::{Activation, LatentSpec, ModelSpec, RopeKind, Rotation};
use tch::{Device, Kind, TchError, Tensor};

use crate::kv::{Buffers, Seq};
use crate::weights::{Feed, Ffn, Latent, Layer};

type Result<T> = std::result::Result<T, TchError>;

/// At what clamped gates and their partners are cut, and the slope of their sigmoid.
const CLAMPED_LIMIT: f64 = 7.0;
const CLAMPED_SLOPE: f64 = 1.702;

/// Rows of one sequence in a batch.
pub(crate) struct Piece {
    /// Position of the first row.
    position: i64,
    rows: i64,
    buffers: Rc<Buffers>,
}

/// What does not change from block to block.
pub(crate) struct Pass<'a> {
    spec: &'a ModelSpec,
    kind: Kind,
    device: Device,
    pieces: Vec<Piece>,
    /// Cosines and sines of all rows, `[rows, 1, pairs]`.
    global: Option<(Tensor, Tensor)>,
    local: Option<(Tensor, Tensor)>,
    /// Factors of the queries, `[rows, 1, 1]`.
    temperature: Option<Tensor>,
}

impl<'a> Pass<'a> {
    /// For rows at the positions of some spans, which `ropes` covers.
    pub(crate) fn new(
        spec: &'a ModelSpec,
        kind: Kind,
        device: Device,
        ropes: &RopeTables,
        spans: impl Iterator<Item = (Span<Seq>, Rc<Buffers>)>,
    ) -> Result<Self> {
        let (mut pieces, mut positions) = (Vec::new(), Vec::new());
        for (span, buffers) in spans {
            positions.extend(span.position as usize..(span.position + span.rows) as usize);
            pieces.push(Piece {
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
            pieces,
        })
    }

    /// Runs fp32 rows through a block, number `index` of the engine's, and appends to keys and
    /// values.
    pub(crate) fn block(&self, layer: &Layer, index: usize, x: &Tensor) -> Result<Tensor> {
        let spec = self.spec;
        let normed = norm(x, &layer.attn_norm, spec.norm_eps)?;
        let branch = self.attention(layer, index, &normed.f_to_kind(self.kind)?)?;
        let x = self.end_branch(x, &branch, layer.attn_post_norm.as_ref())?;
        let normed = norm(&x, &layer.ffn_norm, spec.norm_eps)?;
        let branch = match &layer.feed {
            Feed::Dense(ffn) => self.ffn(ffn, &normed.f_to_kind(self.kind)?)?,
            Feed::Experts { router, experts } => self.experts(router, experts, &normed)?,
        };
        let x = self.end_branch(&x, &branch, layer.ffn_post_norm.as_ref())?;
        match spec.boundary {
            BoundaryDtype::F16 => x.f_to_kind(Kind::Half)?.f_to_kind(Kind::Float),
            BoundaryDtype::Bf16 => x.f_to_kind(Kind::BFloat16)?.f_to_kind(Kind::Float),
            BoundaryDtype::F32 => Ok(x),
        }
    }

    /// Adds what a part of the block gives to the residual stream.
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

    /// Attention of normalised rows, without the residual stream.
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
        // In fp32, lest scores leave the range of fp16.
        let scale = match spec.attention.scale {
            Some(scale) => f64::from(scale),
            None => 1.0 / f64::from(spec.head_dim).sqrt(),
        };
        let q = q.f_mul_scalar(scale)?.f_to_kind(self.kind)?;
        let (k, v) = (k.f_to_kind(self.kind)?, v.f_to_kind(self.kind)?);
        let (mut first, mut attended) = (0, Vec::with_capacity(self.pieces.len()));
        for piece in &self.pieces {
            let rows = |x: &Tensor| x.f_narrow(0, first, piece.rows);
            let cache = piece.buffers.layer(index)?;
            for (cache, fresh) in [(&cache.0, &k), (&cache.1, &v)] {
                let mut slots = cache.f_narrow(1, piece.position, piece.rows)?;
                slots.f_copy_(&rows(fresh)?.f_transpose(0, 1)?)?;
            }
            attended.push(self.attend(layer, piece, &rows(&q)?, cache)?);
            first += piece.rows;
        }
        layer.attn_output.apply(&Tensor::f_cat(&attended, 0)?)
    }

    /// Queries, keys and values of a row, all `[rows, heads, width]` and fp32, turned.
    fn heads(&self, layer: &Layer, mixed: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let spec = self.spec;
        let (q, kv) = (i64::from(spec.query_width()), i64::from(spec.kv_width()));
        let part = |start, width| mixed.f_narrow(1, start, width)?.f_to_kind(Kind::Float);
        let (mut queries, mut keys, values) = (part(0, q)?, part(q, kv)?, part(q + kv, kv)?);
        let d = i64::from(spec.head_dim);
        let split = |x: &Tensor| x.f_reshape([x.size2()?.0, -1, d]);
        if let Some((q_norm, k_norm)) = &layer.qk_norm {
            // As wide as a head, or as all of them.
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
            queries = turn(&queries, cos, sin, spec.rope.kind)?;
            keys = turn(&keys, cos, sin, spec.rope.kind)?;
        }
        Ok((queries, keys, split(&values)?))
    }

    /// The same by way of narrow rows.
    fn latent(
        &self,
        layer: &Layer,
        latent: &Latent,
        widths: &LatentSpec,
        narrow: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let spec = self.spec;
        let [q, kv] = [widths.queries, widths.keys].map(i64::from);
        let (heads, d) = (i64::from(spec.heads), i64::from(spec.head_dim));
        let (dims, values) = (i64::from(spec.rope.dims), i64::from(widths.values));
        let still = d - dims;
        let normed = |start, width, weight| {
            let part = narrow.f_narrow(1, start, width)?.f_to_kind(Kind::Float)?;
            norm(&part, weight, widths.norm_eps)?.f_to_kind(self.kind)
        };
        let queries = latent.q.apply(&normed(0, q, &latent.q_norm)?)?;
        let both = latent.kv.apply(&normed(q, kv, &latent.kv_norm)?)?;
        let queries = queries.f_reshape([-1, heads, d])?.f_to_kind(Kind::Float)?;
        let both = both.f_reshape([-1, heads, still + values])?;
        let both = both.f_to_kind(Kind::Float)?;
        // The same for all heads.
        let turned = narrow.f_narrow(1, q + kv, dims)?.f_unsqueeze(1)?;
        let mut turned = turned.f_to_kind(Kind::Float)?;
        let (unturned, mut turned_queries) = (
            queries.f_narrow(2, 0, still)?,
            queries.f_narrow(2, still, dims)?,
        );
        if let Some((cos, sin)) = self.angles(layer.rotation) {
            turned = turn(&turned, cos, sin, spec.rope.kind)?;
            turned_queries = turn(&turned_queries, cos, sin, spec.rope.kind)?;
        }
        let turned = turned.f_expand([-1, heads, dims], false)?;
        Ok((
            Tensor::f_cat(&[unturned, turned_queries], 2)?,
            Tensor::f_cat(&[both.f_narrow(2, 0, still)?, turned], 2)?,
            both.f_narrow(2, still, values)?,
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

/// Turns the first values of each head of `[rows, heads, width]`, two for each pair of the table.
fn turn(x: &Tensor, cos: &Tensor, sin: &Tensor, kind: RopeKind) -> Result<Tensor> {
    let (_, _, pairs) = cos.size3()?;
    let (_, _, width) = x.size3()?;
    let head = x.f_narrow(2, 0, 2 * pairs)?;
    let (a, b) = match kind {
        RopeKind::Halves => (head.f_narrow(2, 0, pairs)?, head.f_narrow(2, pairs, pairs)?),
        RopeKind::Interleaved => (
            head.f_slice(2, 0, 2 * pairs, 2)?,
            head.f_slice(2, 1, 2 * pairs, 2)?,
        ),
    };
    let first = a.f_mul(cos)?.f_sub(&b.f_mul(sin)?)?;
    let second = a.f_mul(sin)?.f_add(&b.f_mul(cos)?)?;
    let mut turned = match kind {
        RopeKind::Halves => vec![first, second],
        RopeKind::Interleaved => vec![Tensor::f_stack(&[first, second], 3)?.f_flatten(2, 3)?],
    };
    if width > 2 * pairs {
        turned.push(x.f_narrow(2, 2 * pairs, width - 2 * pairs)?);
    }
    Tensor::f_cat(&turned, 2)
}

/// Cosines and sines of some positions, for blocks of a rotation.
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

/// Values as a tensor on a device.
pub(crate) fn upload<T: tch::kind::Element>(
    values: &[T],
    size: &[i64],
    device: Device,
) -> Result<Tensor> {
    Tensor::f_from_slice(values)?
        .f_view(size)?
        .f_to_device(device)
}

/// A tensor's values.
pub(crate) fn download<T: tch::kind::Element + Copy + Default>(tensor: &Tensor) -> Result<Vec<T>> {
    let len = tensor.numel();
    let mut values = vec![T::default(); len];
    let here = tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
    here.f_copy_data(&mut values, len)?;
    Ok(values)
}
