//! Buffers on the card that batches reuse.

use hearthnet_engine::RopeTables;
use hearthnet_files::spec::{ModelSpec, Rotation};

use super::experts::PairBuffers;
use super::latent::LatentBuffers;
use super::recurrence::RecurrenceBuffers;
use super::row_buffers::RowBuffers;
use super::weights::{CardLayer, Feed};
use crate::{Buffer, Gpu, GpuError, Step};

/// Widths of the intermediate values, in values per row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Widths {
    pub(super) x: u32,
    /// Queries, keys, values and gates.
    pub(super) qkv: u32,
    pub(super) attn: u32,
    /// Widest feed-forward layer or per-layer input.
    pub(super) h: u32,
    /// Width of an expert, or 0.
    pub(super) experts: u32,
    pub(super) layers: u32,
    /// Channels of a convolution, and factors of a recurrence.
    pub(super) channels: u32,
    pub(super) factors: u32,
}

impl Widths {
    /// Rows of which each buffer still can be bound.
    pub(super) fn most_rows(&self, spec: &ModelSpec, words: u64) -> u32 {
        let used = spec.experts.map_or(0, |experts| experts.used);
        let of_pairs = used.saturating_mul(self.x.max(self.experts));
        let recurrent = self.channels.max(self.factors);
        let rows = [self.qkv, self.attn, self.h, self.x + self.layers];
        let widest = rows.into_iter().chain([of_pairs, recurrent]);
        let widest = widest.max().unwrap_or(1).max(1);
        u32::try_from(words / u64::from(widest)).unwrap_or(u32::MAX)
    }

    pub(super) fn of<'a>(
        spec: &ModelSpec,
        layers: impl ExactSizeIterator<Item = &'a CardLayer> + Clone,
    ) -> Self {
        let attention = || layers.clone().filter_map(|layer| layer.attention.as_ref());
        let qkv = attention().map(|of| {
            let outputs = of.qkv.iter().map(|matrix| matrix.rows()).sum::<u32>();
            // The values of a layer may be its keys.
            outputs.max(of.q + 2 * of.kv)
        });
        let recurrences = || layers.clone().filter_map(|layer| layer.recurrence.as_ref());
        let attn = attention().map(|of| of.q);
        let attn = attn.chain(recurrences().map(|of| of.output.cols()));
        let h = layers.clone().map(|layer| {
            let dense = match &layer.feed {
                Feed::Dense { down, .. } => down.cols(),
                Feed::Experts { experts, .. } => experts
                    .shared
                    .as_ref()
                    .map_or(0, |shared| shared.down.cols()),
                Feed::None => 0,
            };
            dense.max(layer.per_layer.as_ref().map_or(0, |own| own.gate.rows()))
        });
        Self {
            x: spec.width,
            qkv: qkv
                .chain(recurrences().map(|of| of.row()))
                .max()
                .unwrap_or(0),
            attn: attn.max().unwrap_or(0),
            h: h.max().unwrap_or(0),
            experts: layers
                .clone()
                .map(|layer| match &layer.feed {
                    Feed::Experts { experts, .. } => experts.ffn,
                    Feed::Dense { .. } | Feed::None => 0,
                })
                .max()
                .unwrap_or(0),
            layers: layers.len() as u32,
            channels: recurrences().map(|of| of.channels()).max().unwrap_or(0),
            factors: recurrences()
                .map(|of| of.scores().max(of.factors()))
                .max()
                .unwrap_or(0),
        }
    }
}

/// Buffers for the intermediate values of so many rows.
pub(super) struct Buffers {
    pub(super) widths: Widths,
    rows: u32,
    /// Buffers to wipe. `scores` is not among them, because it is replaced by itself when it is too
    /// small. Nor is the constant [`LatentBuffers::zeros`].
    all: Vec<Buffer>,
    pub(super) x: Buffer,
    pub(super) normed: Buffer,
    pub(super) act: Buffer,
    pub(super) qkv: Buffer,
    pub(super) attn: Buffer,
    pub(super) h: Buffer,
    pub(super) up: Buffer,
    pub(super) branch: Buffer,
    pub(super) scores: Buffer,
    pub(super) pairs: Option<PairBuffers>,
    pub(super) latent: Option<LatentBuffers>,
    pub(super) recurrence: Option<RecurrenceBuffers>,
    /// For each layer and row, whether the output is not finite.
    pub(super) flags: Buffer,
    /// Copy of `x` and then of `flags`, which the processor reads.
    pub(super) out: Buffer,
}

impl Buffers {
    /// Records that all contents are overwritten: they are of conversations.
    pub(super) fn wipe(&self, step: &mut Step) {
        for buffer in self.all.iter().chain([&self.scores]) {
            step.clear(buffer, 0..buffer.words());
        }
    }

    /// Buffers for `rows` rows; `old` if they are large enough.
    pub(super) fn at_least(
        gpu: &Gpu,
        (spec, widths): (&ModelSpec, Widths),
        old: Option<Self>,
        (rows, most): (u32, u32),
        scores: u64,
    ) -> Result<Self, GpuError> {
        if let Some(mut old) = old
            && old.rows >= rows
        {
            if old.scores.words() < scores {
                old.scores = gpu.buffer(scores)?;
            }
            return Ok(old);
        }
        // Whole steps, so that batches of growing sizes do not each allocate anew.
        let rows = match rows {
            0..=16 => 16,
            17..=64 => 64,
            _ => rows.next_multiple_of(256).min(most.max(rows)),
        };
        let mut buffers = RowBuffers {
            gpu,
            rows,
            all: Vec::new(),
        };
        let latent = spec.attention.latent.as_ref();
        let latent = latent.map_or(0, |of| of.keys.max(of.queries.unwrap_or(0)));
        let widest = widths.x.max(widths.attn).max(widths.h).max(latent);
        Ok(Self {
            widths,
            rows,
            x: buffers.of(widths.x)?,
            normed: buffers.of(widths.x)?,
            act: buffers.act(1, widest)?,
            qkv: buffers.of(widths.qkv)?,
            attn: buffers.of(widths.attn)?,
            h: buffers.of(widths.h)?,
            up: buffers.of(widths.h)?,
            branch: buffers.of(widths.x)?,
            scores: gpu.buffer(scores.max(1))?,
            latent: match &spec.attention.latent {
                Some(latent) => Some(LatentBuffers::new(&mut buffers, spec, latent)?),
                None => None,
            },
            pairs: match &spec.experts {
                Some(experts) if widths.experts > 0 => {
                    let shape = (widths.x, widths.experts);
                    Some(PairBuffers::new(&mut buffers, experts, shape)?)
                }
                _ => None,
            },
            recurrence: match widths.channels {
                0 => None,
                channels => {
                    let shape = (channels, widths.factors);
                    Some(RecurrenceBuffers::new(&mut buffers, shape)?)
                }
            },
            flags: buffers.of(widths.layers)?,
            out: buffers.of(widths.x + widths.layers)?,
            all: buffers.all,
        })
    }
}

/// RoPE angles on the card.
#[derive(Default)]
pub(super) struct Angles {
    /// For [`Rotation::Global`] and [`Rotation::Local`]: angles, pairs of a head, positions.
    tables: [Option<(Buffer, u32, u32)>; 2],
}

impl Angles {
    fn index(rotation: Rotation) -> Option<usize> {
        match rotation {
            Rotation::None => None,
            Rotation::Global => Some(0),
            Rotation::Local => Some(1),
        }
    }

    /// Angles, and the number of rotated pairs of a head; `None` without a rotation.
    pub(super) fn table(&self, rotation: Rotation) -> Option<(&Buffer, u32)> {
        let (buffer, pairs, _) = self.tables[Self::index(rotation)?].as_ref()?;
        Some((buffer, *pairs))
    }

    /// Sends the angles of at least `positions` positions, which `ropes` covers.
    pub(super) fn cover(
        &mut self,
        gpu: &Gpu,
        ropes: &RopeTables,
        rotations: impl Iterator<Item = Rotation>,
        positions: u32,
    ) -> Result<(), GpuError> {
        for rotation in rotations {
            let Some((index, table)) = Self::index(rotation).zip(ropes.table(rotation)) else {
                continue;
            };
            let known = self.tables[index].as_ref();
            if known.is_some_and(|(.., covered)| *covered >= positions) {
                continue;
            }
            let covered = table.positions();
            let mut words = Vec::with_capacity(covered * table.dims());
            for position in 0..covered {
                if let Some((cos, sin)) = table.angles(position) {
                    let both = cos.iter().zip(sin);
                    words.extend(both.flat_map(|(cos, sin)| [cos.to_bits(), sin.to_bits()]));
                }
            }
            let buffer = gpu.upload(&words)?;
            self.tables[index] = Some((buffer, table.dims() as u32 / 2, covered as u32));
        }
        Ok(())
    }
}
