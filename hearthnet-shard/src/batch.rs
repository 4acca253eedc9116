//! Rows of several streams, run through the engine together.

use bytes::Bytes;
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::RowShape;
use zeroize::Zeroize as _;

use crate::engine::{LayerEngine, Span};
use crate::fault::StreamFault;

/// Rows of one stream in a batch.
pub(crate) struct Part<Q> {
    pub(crate) stream: u64,
    /// First and last layer to run, both inclusive.
    pub(crate) layers: (u32, u32),
    pub(crate) span: Span<Q>,
    /// Rows in wire encoding.
    pub(crate) data: Bytes,
}

impl<Q> Part<Q> {
    /// Values of one of its rows, as received.
    pub(crate) fn row_values(&self, shape: RowShape) -> usize {
        values_before(self.layers, shape)
    }

    /// Values of all its rows, as received.
    pub(crate) fn values(&self, shape: RowShape) -> usize {
        self.span.rows as usize * self.row_values(shape)
    }
}

/// Values of a row before some layers, first and last inclusive.
pub(crate) fn values_before((lo, hi): (u32, u32), shape: RowShape) -> usize {
    shape.before((lo..=hi).count())
}

/// Values of the rows of all parts, as received.
fn values_of<Q>(parts: &[Part<Q>], shape: RowShape) -> usize {
    parts.iter().map(|part| part.values(shape)).sum()
}

pub(crate) fn rows_of<Q>(parts: &[Part<Q>]) -> u32 {
    parts.iter().map(|part| part.span.rows).sum()
}

/// Runs the parts, which are sorted by their layers: all with the same layers in one engine batch.
/// Leaves their rows in `x`, in order; rows of a failed part are undefined.
///
/// If an engine batch fails, each of its parts is run again by itself. Results do not depend on the
/// rest of a batch, so only the part at fault is lost.
pub(crate) fn compute<E: LayerEngine>(
    engine: &mut E,
    parts: &[Part<E::Seq>],
    x: &mut Vec<f32>,
    boundary: BoundaryDtype,
    shape: RowShape,
) -> Vec<Result<(), StreamFault>> {
    decode(parts, x, boundary, shape);
    let mut results = Vec::with_capacity(parts.len());
    let mut rest = x.as_mut_slice();
    for batch in parts.chunk_by(|a, b| a.layers == b.layers) {
        let (rows, after) = rest.split_at_mut(values_of(batch, shape));
        rest = after;
        let Some(layers) = batch.first().map(|part| part.layers) else {
            continue;
        };
        let spans: Vec<_> = batch.iter().map(|part| part.span).collect();
        match engine.forward(layers, &spans, rows) {
            Ok(()) => results.extend(batch.iter().map(|_| Ok(()))),
            Err(fault) if batch.len() == 1 => results.push(Err(fault)),
            Err(_) => {
                let mut rest = rows;
                for part in batch {
                    let (rows, after) = rest.split_at_mut(part.values(shape));
                    rest = after;
                    results.push(alone(engine, part, rows, boundary, shape));
                }
            }
        }
    }
    results
}

/// Runs one part again, after a failed attempt that may have changed the sequence and the rows.
fn alone<E: LayerEngine>(
    engine: &mut E,
    part: &Part<E::Seq>,
    rows: &mut [f32],
    boundary: BoundaryDtype,
    shape: RowShape,
) -> Result<(), StreamFault> {
    let Span { seq, position, .. } = part.span;
    if engine.len(seq) > position {
        engine.truncate_to(seq, position)?;
    }
    let mut fresh = Vec::new();
    decode(std::slice::from_ref(part), &mut fresh, boundary, shape);
    rows.copy_from_slice(&fresh);
    fresh.as_mut_slice().zeroize();
    engine.forward(part.layers, &[part.span], rows)
}

/// Decodes the rows of every part into `x`.
fn decode<Q>(parts: &[Part<Q>], x: &mut Vec<f32>, boundary: BoundaryDtype, shape: RowShape) {
    x.clear();
    // Reserved at once while empty: a reallocation would leave unwiped copies of rows behind.
    x.reserve(values_of(parts, shape));
    for part in parts {
        let wanted = x.len() + part.values(shape);
        // The length was checked when the step arrived: the decoding neither fails nor is cut short
        // here.
        let _ = boundary.decode(&part.data, x);
        x.resize(wanted, 0.0);
    }
}

/// Returns whether every value of the encoded rows is finite.
pub(crate) fn all_finite(dtype: BoundaryDtype, bytes: &[u8]) -> bool {
    // An exponent of all ones is NaN or an infinity.
    let (pairs, quads) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
    match dtype {
        BoundaryDtype::F16 => each(pairs, |b| u16::from_le_bytes(b) & 0x7c00 != 0x7c00),
        BoundaryDtype::Bf16 => each(pairs, |b| u16::from_le_bytes(b) & 0x7f80 != 0x7f80),
        BoundaryDtype::F32 => each(quads, |b| f32::from_le_bytes(b).is_finite()),
    }
}

/// Returns whether `holds` for every value. No early exit, so that the loop vectorises.
fn each<T: Copy>(values: &[T], holds: impl Fn(T) -> bool) -> bool {
    values.iter().fold(true, |all, &value| all & holds(value))
}

/// Zeroes the rows if this is the last reference to the buffer.
pub(crate) fn wipe(data: Bytes) {
    if let Ok(mut data) = data.try_into_mut() {
        data.as_mut().zeroize();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn finiteness_of_encoded_rows_is_that_of_their_values(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            for dtype in BoundaryDtype::ALL {
                let whole = bytes.len() / dtype.bytes_per_value() * dtype.bytes_per_value();
                let (bytes, mut values) = (&bytes[..whole], Vec::new());
                dtype.decode(bytes, &mut values).unwrap();
                prop_assert_eq!(all_finite(dtype, bytes), values.iter().all(|v| v.is_finite()));
            }
        }
    }
}
