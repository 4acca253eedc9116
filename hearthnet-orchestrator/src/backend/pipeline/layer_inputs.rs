//! Per-layer inputs of submitted rows (`specs/canonical-arithmetic.md` 14). Pure.
//!
//! The caller looks them up together with the embedding, and no host changes them. So the pipeline
//! moves the residual stream alone. Each host gets the inputs of its own layers with each row.
//!
//! ```text
//! submitted row    stream │ inputs of layers 2, 3, 4, 5, 6
//! to layers 2-3    stream │ inputs of 2, 3        ─► host returns the stream
//! to layers 4-6    stream │ inputs of 4, 5, 6
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

/// Per-layer inputs of the rows of a sequence, from position 0 on. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct LayerInputs {
    /// Layers of which submitted rows have inputs, half-open.
    layers: Range<u32>,
    /// Bytes of a row of the residual stream.
    stream: usize,
    /// Bytes of the input of one layer; 0 if the model has none.
    input: usize,
    /// Inputs of consecutive rows, by the position of the first one.
    pieces: BTreeMap<u32, Bytes>,
}

impl LayerInputs {
    /// `stream` and `input`: bytes of a row of the residual stream, and of the input of one layer.
    pub(crate) fn new(layers: Range<u32>, stream: usize, input: usize) -> Self {
        Self {
            layers,
            stream,
            input,
            pieces: BTreeMap::new(),
        }
    }

    /// Takes the inputs out of rows, the first of them at `position`; those of later positions are
    /// dropped. Returns the residual stream.
    pub(crate) fn take(&mut self, position: u32, rows: Bytes) -> Bytes {
        if self.input == 0 {
            return rows;
        }
        let inputs = self.row_bytes();
        self.pieces.split_off(&position);
        if let Some((at, piece)) = self.pieces.range_mut(..position).next_back() {
            piece.truncate((position - at) as usize * inputs);
        }
        let count = rows.len() / (self.stream + inputs);
        let mut streams = BytesMut::with_capacity(count * self.stream);
        let mut piece = BytesMut::with_capacity(count * inputs);
        for row in rows.chunks_exact(self.stream + inputs) {
            let (stream, inputs) = row.split_at(self.stream);
            streams.extend_from_slice(stream);
            piece.extend_from_slice(inputs);
        }
        self.pieces.insert(position, piece.freeze());
        streams.freeze()
    }

    /// Rows for a host of some layers, first and last inclusive: the residual stream, the first row
    /// at `position`, with the inputs of these layers.
    pub(crate) fn give(&self, position: u32, streams: &Bytes, (lo, hi): (u32, u32)) -> Bytes {
        if self.input == 0 {
            return streams.clone();
        }
        let behind = |layer: u32| layer.saturating_sub(self.layers.start) as usize * self.input;
        let (from, to) = (behind(lo), behind(hi.saturating_add(1)));
        let count = streams.len() / self.stream.max(1);
        let mut rows = BytesMut::with_capacity(streams.len() + count * to.saturating_sub(from));
        for (position, stream) in (position..).zip(streams.chunks_exact(self.stream.max(1))) {
            rows.extend_from_slice(stream);
            // A row without inputs has another length, which its host refuses.
            let inputs = self.of(position).and_then(|inputs| inputs.get(from..to));
            rows.extend_from_slice(inputs.unwrap_or_default());
        }
        rows.freeze()
    }

    /// As [`Self::give`], for rows in pieces, the first of them at position 0.
    pub(crate) fn give_all(&self, pieces: &[Bytes], layers: (u32, u32)) -> Vec<Bytes> {
        let mut position = 0;
        let give = pieces.iter().map(|streams| {
            let at = position;
            position += (streams.len() / self.stream.max(1)) as u32;
            self.give(at, streams, layers)
        });
        give.collect()
    }

    /// Inputs of one row, for all layers.
    fn of(&self, position: u32) -> Option<&[u8]> {
        let (at, piece) = self.pieces.range(..=position).next_back()?;
        let begin = (position - at) as usize * self.row_bytes();
        piece.get(begin..begin + self.row_bytes())
    }

    fn row_bytes(&self) -> usize {
        self.layers.len() * self.input
    }
}

// Activations are sensitive: shapes only.
impl std::fmt::Debug for LayerInputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerInputs")
            .field("layers", &self.layers)
            .field("stream", &self.stream)
            .field("input", &self.input)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LAYERS: Range<u32> = 2..6;
    const STREAM: usize = 3;

    /// Row of a position: the stream, then one byte for each layer.
    fn row(position: u8, version: u8) -> Vec<u8> {
        let mut row = vec![position; STREAM];
        row.extend(LAYERS.map(|layer| 100 + 10 * version + layer as u8 + position % 3));
        row
    }

    proptest! {
        /// Whatever is submitted, and from where on again, each host gets the latest inputs of its
        /// layers.
        #[test]
        fn every_host_gets_the_inputs_of_its_layers(
            submissions in prop::collection::vec((0_usize..30, 1_usize..8), 1..12),
            cut in 3_u32..6,
        ) {
            let mut inputs = LayerInputs::new(LAYERS, STREAM, 1);
            let (mut rows, mut streams) = (Vec::new(), Vec::new());
            for (version, (from, count)) in (0..).zip(submissions) {
                let from = from.min(rows.len());
                rows.truncate(from);
                streams.truncate(from);
                let new: Vec<_> = (from..from + count).map(|at| row(at as u8, version)).collect();
                let taken = inputs.take(from as u32, new.concat().into());
                streams.extend(taken.chunks_exact(STREAM).map(<[u8]>::to_vec));
                rows.extend(new);
            }
            prop_assert!(streams.iter().zip(&rows).all(|(stream, row)| row.starts_with(stream)));
            let pieces: Vec<Bytes> = streams.chunks(4).map(|some| some.concat().into()).collect();
            for (lo, hi) in [(2, cut - 1), (cut, 5), (2, 5)] {
                let given = inputs.give_all(&pieces, (lo, hi)).concat();
                let [lo, hi] = [lo, hi + 1].map(|layer| STREAM + layer as usize - 2);
                let wanted = rows.iter().map(|row| [&row[..STREAM], &row[lo..hi]].concat());
                prop_assert_eq!(given, wanted.collect::<Vec<_>>().concat());
            }
        }
    }

    #[test]
    fn a_model_without_inputs_shares_its_rows() {
        let mut inputs = LayerInputs::new(LAYERS, STREAM, 0);
        let rows = Bytes::from(vec![1; 4 * STREAM]);
        let streams = inputs.take(0, rows.clone());
        assert_eq!(streams.as_ptr(), rows.as_ptr());
        assert_eq!(inputs.give(0, &streams, (2, 3)).as_ptr(), rows.as_ptr());
    }
}
