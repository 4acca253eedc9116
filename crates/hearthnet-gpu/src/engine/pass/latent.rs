//! Steps of latent attention: those of `hearthnet-engine`'s `forward::latent`.
//!
//! Rows of heads lie one after another, so that a launch takes the heads of all rows as rows.

use hearthnet_engine::EngineError;

use super::Pass;
use crate::engine::latent::{CardLatent, LatentBuffers, Up, Widths};
use crate::engine::weights::Attention;
use crate::{Buffer, Matrix, View};

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
        let pairs = pairs?;
        let input = self
            .step
            .input(matrix.weight_type(), from, &b.act, (count, cols));
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
