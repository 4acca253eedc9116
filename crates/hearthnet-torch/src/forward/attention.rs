//! Attention of the rows of one sequence.

use tch::{Kind, Tensor};

use super::{Pass, Result, Segment};
use crate::weights::Layer;

/// Limit of scores at a time: 256 MiB of fp32.
const MAX_SCORES: i64 = 1 << 26;

impl Pass<'_> {
    /// Attention of scaled queries, `[rows, heads, width]`, over the keys and values of their
    /// sequence, which include these rows. Returns `[rows, heads * width]`.
    pub(super) fn attend(
        &self,
        layer: &Layer,
        segment: &Segment,
        q: &Tensor,
        (keys, values): &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let end = segment.position + segment.rows;
        let at_once = (MAX_SCORES / (i64::from(self.spec.heads) * end)).max(1);
        let mut all = Vec::new();
        let mut done = 0;
        while done < segment.rows {
            let rows = at_once.min(segment.rows - done);
            let position = segment.position + done;
            // The first row's window begins first.
            let start = match layer.window {
                Some(window) => (position + 1 - i64::from(window)).max(0),
                None => 0,
            };
            let seen = |x: &Tensor| x.f_narrow(1, start, position + rows - start);
            let q = q.f_narrow(0, done, rows)?;
            all.push(self.attend_rows(layer, position, start, &q, &seen(keys)?, &seen(values)?)?);
            done += rows;
        }
        Tensor::f_cat(&all, 0)
    }

    /// Attention of rows from `position` on. Keys and values span `start` to the last row's
    /// position.
    fn attend_rows(
        &self,
        layer: &Layer,
        position: i64,
        start: i64,
        q: &Tensor,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<Tensor> {
        let spec = self.spec;
        let (rows, heads, d) = q.size3()?;
        let (kv_heads, seen, width) = values.size3()?;
        let group = heads / kv_heads.max(1);
        // [kv_heads, group * rows, d]: heads that share keys share a matrix multiplication.
        let q = q
            .f_reshape([rows, kv_heads, group, d])?
            .f_permute([1, 2, 0, 3])?;
        let q = q.f_reshape([kv_heads, group * rows, d])?;
        let scores = q
            .f_matmul(&keys.f_transpose(1, 2)?)?
            .f_to_kind(Kind::Float)?;
        let mut scores = scores.f_view([kv_heads, group, rows, seen])?;
        if let Some(cap) = spec.attention.softcap {
            let cap = f64::from(cap);
            scores = scores.f_div_scalar(cap)?.f_tanh()?.f_mul_scalar(cap)?;
        }
        // A single row needs no mask.
        if rows > 1 {
            let options = (Kind::Int64, self.device);
            let of_keys = Tensor::f_arange_start(start, start + seen, options)?;
            let of_rows = Tensor::f_arange_start(position, position + rows, options)?;
            let of_rows = of_rows.f_unsqueeze(1)?;
            let mut hidden = of_keys.f_gt_tensor(&of_rows)?;
            if let Some(window) = layer.window {
                let before = of_rows.f_sub_scalar(i64::from(window))?;
                hidden = hidden.f_logical_or(&of_keys.f_le_tensor(&before)?)?;
            }
            let _ = scores.f_masked_fill_(&hidden, f64::NEG_INFINITY)?;
        }
        let weights = match &layer.sinks {
            None => scores.f_softmax(-1, Kind::Float)?,
            Some(sinks) => {
                let sinks = sinks.f_view([kv_heads, group, 1, 1])?;
                let sinks = sinks.f_expand([kv_heads, group, rows, 1], false)?;
                let weights = Tensor::f_cat(&[&scores, &sinks], -1)?;
                weights.f_softmax(-1, Kind::Float)?.f_narrow(3, 0, seen)?
            }
        };
        let weights = weights.f_to_kind(self.kind)?;
        let weights = weights.f_reshape([kv_heads, group * rows, seen])?;
        let out = weights.f_matmul(values)?;
        let out = out.f_view([kv_heads, group, rows, width])?;
        out.f_permute([2, 0, 1, 3])?
            .f_reshape([rows, heads * width])
    }
}
