//! Panels of weights in the order in which the card's kernel reads them.

use std::borrow::Cow;
use std::ops::Range;

use hearthnet_engine::kernels::{LANES, Packed};
use hearthnet_files::blocks::{Bits, Code, Layout, SubScale};

/// Bits of a byte of quants that are inverted on the card. In two's complement, 8 bits are then the
/// weight, and the high 4 bits are the quant less 8.
pub(crate) fn sign_bits(layout: &Layout) -> u8 {
    match (layout.bits, layout.code) {
        (Bits::Eight, _) | (Bits::Four, Code::Offset(_)) => 0x80,
        _ => 0,
    }
}

/// How the panels of a matrix are stored on the card.
pub(crate) struct Order {
    /// Bytes of a panel of the processor.
    panel: usize,
    /// `None` if the type is not quantised: the card stores the panels of the processor then.
    records: Option<Records>,
}

struct Records {
    layout: Layout,
    /// Bytes of a record of the processor, and how many of them become one of the card.
    bytes: usize,
    together: usize,
    /// Records of the card in a panel.
    count: usize,
}

impl Order {
    pub(crate) fn of(packed: &Packed) -> Self {
        let (weight_type, panel) = (packed.weight_type(), packed.panel_bytes());
        let records = weight_type.quantised().then(|| {
            let layout = Layout::of(weight_type);
            let together = if layout.blocks == 1 { 4 } else { 1 };
            let records = packed.cols() / weight_type.inputs();
            Records {
                layout,
                bytes: panel / records.max(1),
                together,
                count: records.div_ceil(together),
            }
        });
        Self { panel, records }
    }

    /// Bytes of a panel on the card.
    pub(crate) fn panel_bytes(&self) -> usize {
        let of_card = |records: &Records| records.count * records.together * records.bytes;
        self.records.as_ref().map_or(self.panel, of_card)
    }

    /// Some panels, about `most` bytes at a time.
    pub(crate) fn parts<'a>(
        &'a self,
        packed: &'a Packed,
        panels: Range<usize>,
        most: usize,
    ) -> impl Iterator<Item = Cow<'a, [u8]>> {
        let data = &packed.data()[panels.start * self.panel..panels.end * self.panel];
        let parts = data.chunks((most / self.panel).max(1) * self.panel);
        parts.map(|part| match &self.records {
            None => Cow::Borrowed(part),
            Some(records) => {
                let mut out = Vec::with_capacity(part.len() / self.panel * self.panel_bytes());
                for panel in part.chunks_exact(self.panel) {
                    for group in panel.chunks(records.together * records.bytes) {
                        records.reorder(group, &mut out);
                    }
                }
                Cow::Owned(out)
            }
        })
    }
}

impl Records {
    /// Appends a record of the card: the fields of each row, the sub-scales of each row, and the
    /// quants of each block, 16 bytes of a row at a time. Blocks that are missing are zeros.
    fn reorder(&self, group: &[u8], out: &mut Vec<u8>) {
        let layout = &self.layout;
        let (bytes, end) = (
            layout.sub_scale.bytes(),
            out.len() + self.together * self.bytes,
        );
        let (head, block) = (
            2 * LANES * layout.fields,
            LANES * (bytes + layout.bits.bytes()),
        );
        let records = group.chunks_exact(self.bytes);
        for lane in 0..LANES {
            let start = out.len();
            for record in records.clone() {
                for field in record[..head].chunks_exact(2 * LANES) {
                    out.extend_from_slice(&field[2 * lane..][..2]);
                }
            }
            // Minima with sub-scales are subtracted.
            if matches!(layout.sub_scale, SubScale::ScaleMin | SubScale::ScaleMin16) {
                out[start + 3] ^= 0x80;
            }
            out.resize(start + 2 * layout.fields * self.together, 0);
        }
        let blocks = records.flat_map(|record| record[head..].chunks_exact(block));
        for lane in 0..LANES {
            for block in blocks.clone() {
                out.extend_from_slice(&block[bytes * lane..][..bytes]);
            }
        }
        let sign = sign_bits(layout);
        for block in blocks {
            let (runs, _) = block[LANES * bytes..].as_chunks::<{ 4 * LANES }>();
            let (fours, rest) = runs.as_chunks::<4>();
            let start = out.len();
            for four in fours {
                for lane in 0..LANES {
                    for run in four {
                        out.extend_from_slice(&run[4 * lane..][..4]);
                    }
                }
            }
            out.extend_from_slice(rest.as_flattened());
            for quants in &mut out[start..] {
                *quants ^= sign;
            }
        }
        out.resize(end, 0);
    }
}
