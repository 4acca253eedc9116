//! Export and import of a sequence's beginning, as bytes that describe themselves.
//!
//! The layout is that of the exact engine's snapshots (`hearthnet-model`), with another magic and
//! format: keys and values that were computed by another arithmetic must never be taken for exact ones.
//!
//! All numbers little-endian; the header has 64 bytes:
//!
//! | offset | type | field |
//! |---|---|---|
//! | 0 | 4 bytes | `HNKT` |
//! | 4 | u16 | version, 1 |
//! | 6 | u8 | format of the values: 1 = binary16, 2 = bfloat16, 3 = binary32 |
//! | 7 | u8 | zero |
//! | 8 | 32 bytes | identity of the weights |
//! | 40 | u32 | first layer that the sequence ran through |
//! | 44 | u32 | number of layers |
//! | 48 | u32 | KV heads |
//! | 52 | u32 | values of a head's key |
//! | 56 | u32 | values of a head's value |
//! | 60 | u32 | positions |
//!
//! Then, for each layer: the keys of all heads (already turned by RoPE), then the values of all
//! heads; of each head position by position. Nothing follows.

use std::fmt;
use std::ops::Range;

use hearthnet_model::manifest::WeightsId;
use tch::{Device, TchError, Tensor};

use crate::error::TorchError;
use crate::kv::{Buffers, Cache, Geometry, Seq};
use crate::options::Dtype;
use crate::weights::all_finite;

const MAGIC: &[u8; 4] = b"HNKT";
const VERSION: u16 = 1;
const HEADER: usize = 64;

/// Keys and values of the first positions of a sequence, for another engine of the same weights,
/// format and layers. They can be read back into text by whoever has the model: as private as the
/// text itself.
#[derive(Clone, PartialEq, Eq)]
pub struct TorchSnapshot(Vec<u8>);

impl TorchSnapshot {
    /// Bytes that claim to be a snapshot; importing checks them.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The snapshot's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for TorchSnapshot {
    /// Without the content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TorchSnapshot({} bytes)", self.0.len())
    }
}

/// Why a snapshot was refused. The engine is as before.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The bytes are not what an engine of these weights, format and shape writes.
    #[error("this is no KV snapshot for this engine: {0}")]
    Foreign(&'static str),
    /// The snapshot has layers that the engine does not have.
    #[error(
        "the KV snapshot has layers {}..{}, this engine {}..{}",
        found.start, found.end, engine.start, engine.end
    )]
    Layers {
        /// In the snapshot, half-open.
        found: Range<u32>,
        /// In the engine, half-open.
        engine: Range<u32>,
    },
    /// The snapshot's length is not what its header says.
    #[error("the KV snapshot has {found} bytes where its header says {expected}")]
    Length {
        /// From the header.
        expected: u64,
        /// What there is.
        found: u64,
    },
    /// It holds an infinity or a NaN.
    #[error("the KV snapshot holds a value that is not finite")]
    NotFinite,
    /// There is no room for it, or the device failed.
    #[error(transparent)]
    Engine(#[from] TorchError),
}

impl From<TchError> for SnapshotError {
    fn from(error: TchError) -> Self {
        Self::Engine(error.into())
    }
}

pub(crate) fn export(
    cache: &Cache,
    weights: &WeightsId,
    seq: Seq,
    len: u32,
) -> Result<TorchSnapshot, TorchError> {
    let has = cache.len(seq)?;
    if len > has {
        return Err(TorchError::PositionGap {
            seq,
            position: len,
            len: has,
        });
    }
    let (geometry, layers) = (cache.geometry(), cache.layers(seq)?);
    let mut out = header(geometry, weights, &layers, len);
    let buffers = cache.buffers(seq)?;
    for tensor in tensors(geometry, &buffers, &layers)? {
        let part = tensor.f_narrow(1, 0, len.into())?;
        let part = part.f_to_device(Device::Cpu)?.f_contiguous()?;
        let (start, count) = (out.len(), part.numel());
        out.resize(start + count * geometry.dtype.bytes(), 0);
        if let Some(bytes) = out.get_mut(start..) {
            part.f_copy_data_u8(bytes, count)?;
        }
    }
    Ok(TorchSnapshot(out))
}

pub(crate) fn import(
    cache: &mut Cache,
    weights: &WeightsId,
    snapshot: &TorchSnapshot,
) -> Result<Seq, SnapshotError> {
    let geometry = *cache.geometry();
    let (layers, len, mut data) = check(&geometry, weights, cache.context(), &snapshot.0)?;
    cache.insert_filled(layers.clone(), len, |buffers| {
        for tensor in tensors(&geometry, buffers, &layers)? {
            let (heads, _, width) = tensor.size3()?;
            let size = [heads, len.into(), width];
            let bytes = size.iter().product::<i64>() as usize * geometry.dtype.bytes();
            let (part, rest) = data
                .split_at_checked(bytes)
                .ok_or(SnapshotError::Foreign("it is too short"))?;
            data = rest;
            if part.is_empty() {
                continue;
            }
            let part = Tensor::f_from_data_size(part, &size, geometry.dtype.kind())?;
            if !all_finite(&part)? {
                return Err(SnapshotError::NotFinite);
            }
            tensor.f_narrow(1, 0, len.into())?.f_copy_(&part)?;
        }
        Ok(())
    })
}

/// The tensors of some layers in the order of a snapshot.
fn tensors<'a>(
    geometry: &Geometry,
    buffers: &'a Buffers,
    layers: &Range<u32>,
) -> Result<Vec<&'a Tensor>, TchError> {
    let mut all = Vec::new();
    for layer in layers.clone() {
        let (keys, values) = buffers.layer((layer - geometry.first_layer) as usize)?;
        all.extend([keys, values]);
    }
    Ok(all)
}

fn header(geometry: &Geometry, weights: &WeightsId, layers: &Range<u32>, len: u32) -> Vec<u8> {
    let format = match geometry.dtype {
        Dtype::Fp16 => 1,
        Dtype::Bf16 => 2,
        Dtype::Fp32 => 3,
    };
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend([format, 0]);
    out.extend(weights.0);
    let Geometry {
        heads, key, value, ..
    } = *geometry;
    for number in [
        layers.start,
        layers.end - layers.start,
        heads,
        key,
        value,
        len,
    ] {
        out.extend(number.to_le_bytes());
    }
    out
}

/// Layers, positions and data of a sound snapshot.
fn check<'a>(
    geometry: &Geometry,
    weights: &WeightsId,
    context: u32,
    bytes: &'a [u8],
) -> Result<(Range<u32>, u32, &'a [u8]), SnapshotError> {
    let (head, data) = bytes
        .split_first_chunk::<HEADER>()
        .ok_or(SnapshotError::Foreign("it is too short"))?;
    let number = |at: usize| {
        let field = head.get(at..).and_then(|rest| rest.first_chunk::<4>());
        field.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    };
    let (first, count, len) = (number(40), number(44), number(60));
    let layers = first..first.saturating_add(count);
    let engine = geometry.layer_range();
    // The rest of a header is what this engine would have written itself.
    let expected = header(geometry, weights, &layers, len);
    let parts = [
        (0..8, "its version or format is another one"),
        (8..40, "it belongs to other weights"),
        (48..60, "its heads have another shape"),
    ];
    for (part, what) in parts {
        if head.get(part.clone()) != expected.get(part) {
            return Err(SnapshotError::Foreign(what));
        }
    }
    if layers.is_empty() || layers.start < engine.start || layers.end > engine.end {
        return Err(SnapshotError::Layers {
            found: layers,
            engine,
        });
    }
    let layer_bytes = geometry.position_bytes() / u64::from(geometry.layers.max(1));
    // No overflow: the layers are the engine's, and have keys and values of 32-bit widths.
    let expected = HEADER as u64 + u64::from(count) * layer_bytes * u64::from(len);
    if bytes.len() as u64 != expected {
        let found = bytes.len() as u64;
        return Err(SnapshotError::Length { expected, found });
    }
    if len > context {
        return Err(SnapshotError::Engine(TorchError::ContextFull {
            wanted: len.into(),
            limit: context,
        }));
    }
    Ok((layers, len, data))
}
