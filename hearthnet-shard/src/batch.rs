//! Rows of several streams, run through the engine together.

use bytes::Bytes;
use hearthnet_model::BoundaryDtype;
use zeroize::Zeroize as _;

use crate::engine::{LayerEngine, Span};
use crate::fault::StreamFault;

/// One stream's rows in a turn.
pub(crate) struct Part<Q> {
    pub(crate) stream: u64,
    /// First and last layer that they run through.
    pub(crate) layers: (u32, u32),
    pub(crate) span: Span<Q>,
    /// The rows, as they came over the wire.
    pub(crate) data: Bytes,
}

/// Rows of all parts.
pub(crate) fn rows_of<Q>(parts: &[Part<Q>]) -> u32 {
    parts.iter().map(|part| part.span.rows).sum()
}

/// Runs the parts of a turn, which are sorted by their layers: those with the same layers in
/// one batch. Their rows are left in `x`, in order; those of a failed part mean nothing.
///
/// If a batch fails as a whole, each of its parts is run by itself: results do not depend on
/// what else is in a batch, so that only the part at fault is lost.
pub(crate) fn compute<E: LayerEngine>(
    engine: &mut E,
    parts: &[Part<E::Seq>],
    x: &mut Vec<f32>,
    boundary: BoundaryDtype,
    width: usize,
) -> Vec<Result<(), StreamFault>> {
    decode(parts, x, boundary, width);
    let mut results = Vec::with_capacity(parts.len());
    let mut rest = x.as_mut_slice();
    for batch in parts.chunk_by(|a, b| a.layers == b.layers) {
        let (rows, after) = rest.split_at_mut(rows_of(batch) as usize * width);
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
                    let (rows, after) = rest.split_at_mut(part.span.rows as usize * width);
                    rest = after;
                    results.push(alone(engine, part, rows, boundary, width));
                }
            }
        }
    }
    results
}

/// Runs one part again, after a failed attempt that may have left its marks in the sequence
/// and in the rows.
fn alone<E: LayerEngine>(
    engine: &mut E,
    part: &Part<E::Seq>,
    rows: &mut [f32],
    boundary: BoundaryDtype,
    width: usize,
) -> Result<(), StreamFault> {
    let Span { seq, position, .. } = part.span;
    if engine.len(seq) > position {
        engine.truncate(seq, position)?;
    }
    let mut fresh = Vec::new();
    decode(std::slice::from_ref(part), &mut fresh, boundary, width);
    rows.copy_from_slice(&fresh);
    fresh.as_mut_slice().zeroize();
    engine.forward(part.layers, &[part.span], rows)
}

/// Decodes the rows of every part into `x`, `width` values each.
fn decode<Q>(parts: &[Part<Q>], x: &mut Vec<f32>, boundary: BoundaryDtype, width: usize) {
    x.clear();
    // All at once, while it is empty: growing would leave copies of rows behind.
    x.reserve(rows_of(parts) as usize * width);
    for part in parts {
        let wanted = x.len() + part.span.rows as usize * width;
        // The length was checked when the step came in: nothing fails or is cut short here.
        let _ = boundary.decode(&part.data, x);
        x.resize(wanted, 0.0);
    }
}

/// Whether every value of rows on the wire is finite.
pub(crate) fn all_finite(dtype: BoundaryDtype, bytes: &[u8]) -> bool {
    // An exponent of all ones is NaN or an infinity.
    let (pairs, quads) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
    match dtype {
        BoundaryDtype::F16 => each(pairs, |b| u16::from_le_bytes(b) & 0x7c00 != 0x7c00),
        BoundaryDtype::Bf16 => each(pairs, |b| u16::from_le_bytes(b) & 0x7f80 != 0x7f80),
        BoundaryDtype::F32 => each(quads, |b| f32::from_le_bytes(b).is_finite()),
    }
}

/// Whether `holds` for every value. All are looked at, which makes many of them one instruction.
fn each<T: Copy>(values: &[T], holds: impl Fn(T) -> bool) -> bool {
    values.iter().fold(true, |all, &value| all & holds(value))
}

/// Overwrites rows that are no longer needed, where nobody else holds them.
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
