//! Steps of attention: queries, keys and values; scores and sums.

use std::ops::Range;

use hearthnet_files::BoundaryDtype;

use super::stages::{LayerRun, Part};
use super::tiles::{EngineContext, Tile};
use super::tiling::Segment;
use crate::kernels::{ActForm, Attention, AttentionScratch, PAGE};
use crate::layer::{LatentUp, Layer, Qkv};

/// With the safety contract of all steps (see `stages`).
#[allow(unsafe_code)]
impl LayerRun<'_> {
    /// Reads `act`, writes the columns of `panels` in `qkv`, or in `latent` with latent attention.
    /// Panels are counted over all parts.
    pub(super) unsafe fn qkv(&self, layer: &Layer, panels: Range<usize>, tile: Tile<'_>) {
        let (out, width) = match self.widths.latent {
            Some(latent) if layer.latent.is_some() => (tile.buffers.latent, latent.row),
            _ => (tile.rows.qkv, self.widths.qkv),
        };
        // SAFETY: no unit of the phase writes `act`.
        let act = unsafe { tile.buffers.read_act() };
        let mut end = 0;
        let parts = layer.qkv.parts.iter().map(|matrix| {
            let column = end;
            end += matrix.rows();
            Part {
                matrix,
                act,
                out,
                width,
                column,
            }
        });
        // SAFETY: the columns of `panels` are the unit's.
        unsafe { self.side_by_side(parts, panels, tile.rows.count) };
    }

    /// Completes queries, keys and values in `qkv` (biases, norms, RoPE; for latent attention
    /// everything after its matrices), and writes keys and values to the pages.
    pub(super) unsafe fn store_kv(&self, layer: usize, tile: Tile<'_>) {
        let EngineContext {
            spec,
            kernels,
            ropes,
            layers,
            ..
        } = *self.context;
        let layer = &layers[layer];
        let Layer {
            qkv: Qkv { bias, .. },
            place,
            ..
        } = layer;
        let table = ropes.table(layer.rotation);
        let (q, kv, qkv) = (layer.q, layer.kv, self.widths.qkv);
        let d = place.head_dim;
        for segment in tile.rows.segments {
            for i in 0..segment.rows {
                let (row, position) = (segment.row + i, segment.position + i);
                let values = row * qkv..row * qkv + q + 2 * kv;
                // SAFETY: the unit owns the row of `qkv`.
                let values = unsafe { tile.rows.qkv.slice_mut(values) };
                if let Some(bias) = bias {
                    kernels.add_round(values, bias, BoundaryDtype::F32);
                }
                if layer.keys_as_values {
                    values.copy_within(q..q + kv, q + kv);
                }
                let parts = [
                    (0..q, &layer.q_norm),
                    (q..q + kv, &layer.k_norm),
                    (q + kv..q + 2 * kv, &layer.v_norm),
                ];
                for (columns, norm) in parts {
                    if let Some(norm) = norm {
                        kernels.rms_norm_in_place(&mut values[columns], norm, spec.norm_eps);
                    }
                }
                if let Some(latent) = self.widths.latent {
                    // SAFETY: the unit owns the row of `latent`.
                    let low_rank = unsafe {
                        let columns = row * latent.row..(row + 1) * latent.row;
                        tile.buffers.latent.slice_mut(columns)
                    };
                    self.finish_latent_row(layer, table, position, values, low_rank);
                } else if let Some(table) = table {
                    kernels.rope(table, position, &mut values[..q + kv], d);
                }
                if let Some(temperature) = &spec.attention.temperature {
                    let factor = temperature.factor(position);
                    values[..q].iter_mut().for_each(|value| *value *= factor);
                }
                let (keys, values) = values[q..].split_at(kv);
                let page = &self.pages[segment.span][position / PAGE];
                // A layer that uses those of another one has none.
                for head in 0..kv / d {
                    let slab = place.slab(head);
                    let cells = head * d..(head + 1) * d;
                    // SAFETY: a slot belongs to one row, and the unit owns the row.
                    unsafe {
                        kernels.store_kv(
                            page.part(slab),
                            place.cache,
                            position % PAGE,
                            &keys[cells.clone()],
                            &values[cells],
                        );
                    }
                }
            }
        }
    }

    /// Reads queries and pages, writes `act`, for all rows and heads of a tile. After a recurrence,
    /// only writes `act`. In a layer with a feed-forward layer only, begins that.
    pub(super) unsafe fn attention(
        &self,
        layer: usize,
        tile: Tile<'_>,
        scratch: &mut AttentionScratch,
    ) {
        let layer_of = &self.context.layers[layer];
        if !layer_of.has_mixer() {
            // SAFETY: by the contract of all steps.
            return unsafe { self.begin_feed_forward(layer_of, tile) };
        }
        let segments = match layer_of.recurrence {
            Some(_) => &[],
            None => tile.rows.segments,
        };
        // SAFETY: the unit owns the tile and its buffers; no unit writes keys and values of this
        // layer.
        unsafe {
            for segment in segments {
                for kv_head in 0..layer_of.place.kv_heads {
                    let heads = (kv_head, 0..self.context.group(layer_of));
                    self.attend(layer, tile, segment, heads, scratch);
                }
            }
            self.quantise_attn(layer, tile);
        }
    }

    /// Reads queries and pages, writes the columns of `heads` for the rows of a segment in `attn`.
    pub(super) unsafe fn attend(
        &self,
        layer: usize,
        tile: Tile<'_>,
        segment: &Segment,
        (kv_head, heads): (usize, Range<usize>),
        scratch: &mut AttentionScratch,
    ) {
        let EngineContext {
            spec,
            kernels,
            layers,
            ..
        } = *self.context;
        let (q, qkv) = (layers[layer].q, self.widths.qkv);
        let place = layers[layer].place;
        let (d, slab) = (place.head_dim, place.slab(kv_head));
        // All rows of the text are in the pass.
        let text = spec.encoder.and_then(|_| {
            let mut texts = self.segments.iter();
            texts.find(|text| text.span == segment.span)
        });
        let both_sides = text.map(|text| text.position + text.rows);
        let end = both_sides.unwrap_or(segment.position + segment.rows);
        let end = end.div_ceil(PAGE);
        // SAFETY: no unit of the phase writes keys and values of this layer.
        let pages: Vec<&[u16]> = self.pages[segment.span][..end]
            .iter()
            .map(|page| unsafe { page.slice(slab.clone()) })
            .collect();
        let group = self.context.group(&layers[layer]);
        let heads = kv_head * group + heads.start..kv_head * group + heads.end;
        let columns = heads.start * d..heads.end * d;
        let sinks = layers[layer].sinks.as_ref();
        let attention = Attention {
            head_dim: d,
            cache: place.cache,
            heads: heads.len(),
            scale: match spec.attention.scale {
                Some(scale) => scale,
                // Absorbed keys are wider than heads.
                None => match spec.attention.latent {
                    Some(_) => 1.0 / (spec.head_dim as f32).sqrt(),
                    None => 1.0 / (d as f32).sqrt(),
                },
            },
            softcap: spec.attention.softcap,
            sinks: sinks.map(|sinks| &sinks[heads]),
            position: segment.position,
            window: layers[layer].window,
            both_sides,
            pages: &pages,
        };
        // SAFETY: no unit writes queries; the columns of these heads in `attn` are the unit's.
        unsafe {
            let queries = tile
                .rows
                .qkv
                .slice(segment.row * qkv + columns.start..tile.rows.count * qkv);
            let out = tile
                .buffers
                .attn
                .part(segment.row * q..tile.rows.count * q)
                .tile_mut(segment.rows, q, columns);
            kernels.attention(&attention, queries, qkv, scratch, out);
        }
    }

    /// Reads `attn`, or the outputs of a recurrence, writes `act`.
    pub(super) unsafe fn quantise_attn(&self, layer: usize, tile: Tile<'_>) {
        let layer = &self.context.layers[layer];
        if let Some(recurrence) = &layer.recurrence {
            // SAFETY: by the contract of all steps.
            unsafe { self.quantise_recurrence(layer, recurrence, tile) };
            return;
        }
        if let Some(LatentUp::Absorbed { values, .. }) = layer.latent.as_ref().map(|l| &l.up) {
            // SAFETY: by the contract of all steps.
            unsafe { self.quantise_latent(layer, values, tile) };
            return;
        }
        let mut width = layer.q;
        let values = 0..tile.rows.count * width;
        // SAFETY: the unit owns the tile's `attn` and `act`.
        let (mut attn, act) = unsafe { (tile.buffers.attn.slice_mut(values), tile.buffers.act()) };
        if let Some(latent) = &self.context.spec.attention.latent {
            // Removes the padding of values to the width of keys.
            let (d, values) = (layer.place.head_dim, latent.values as usize);
            for head in 0..attn.len() / d {
                attn.copy_within(head * d..head * d + values, head * values);
            }
            let len = attn.len() / d * values;
            attn = &mut attn[..len];
            width = width / d * values;
        }
        let kernels = self.context.kernels;
        if self.context.spec.attention.output_gate {
            let (q, kv, qkv) = (layer.q, layer.kv, self.widths.qkv);
            for (row, attn) in attn.chunks_exact_mut(q).enumerate() {
                let gates = row * qkv + q + 2 * kv..row * qkv + q + 2 * kv + q;
                // SAFETY: the unit owns the row of `qkv`.
                let gates = unsafe { tile.rows.qkv.slice_mut(gates) };
                kernels.sigmoid(gates);
                attn.iter_mut().zip(gates).for_each(|(x, gate)| *x *= *gate);
            }
        }
        let form = ActForm::of(&layer.attn_output);
        kernels.prepare(attn, width, form, act);
    }
}
