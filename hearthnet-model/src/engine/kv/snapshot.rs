//! Export and import of a sequence's beginning, as bytes that describe themselves.
//!
//! No program calls this yet, nor [`Engine::fork`](crate::engine::Engine::fork): they are what
//! handing a prefix over from host to host, and sharing one between conversations, will build on.
//!
//! All numbers little-endian; the header has 64 bytes:
//!
//! | offset | type | field |
//! |---|---|---|
//! | 0 | 4 bytes | `HNKV` |
//! | 4 | u16 | version, 1 |
//! | 6 | u8 | format of the values, 1 = IEEE binary16 |
//! | 7 | u8 | zero |
//! | 8 | 32 bytes | identity of the weights |
//! | 40 | u32 | first layer that the sequence ran through |
//! | 44 | u32 | number of layers |
//! | 48 | u32 | KV heads |
//! | 52 | u32 | values per head |
//! | 56 | u32 | positions |
//! | 60 | u32 | zero |
//!
//! Then, for each layer and each head: the keys of all positions (already turned by RoPE), then
//! the values of all positions; `positions * values per head` binary16 numbers each, position by
//! position. Nothing follows.
//!
//! An importer takes nothing on trust: the layers must be among its own, every other field must be
//! what the engine would have written itself, the length must be exact, every number finite.

use std::fmt;
use std::ops::Range;

use super::super::error::{EngineError, ImportError};
use super::page::Geometry;
use super::{KvCache, Sequence, pages_for};
use crate::engine::sequence::SeqId;
use crate::kernels::{PAGE, key_cell, value_cell};

const MAGIC: &[u8; 4] = b"HNKV";
const VERSION: u16 = 1;
const BINARY16: u8 = 1;
const HEADER: usize = 64;
/// All ones in a binary16's exponent: an infinity or a NaN.
const NOT_FINITE: u16 = 0x7c00;

/// Keys and values of the first positions of a sequence, for another engine that has the same
/// layers of the same weights. They can be read back into text by whoever has the model: as private as the
/// text itself.
#[derive(Clone, PartialEq, Eq)]
pub struct KvSnapshot(Vec<u8>);

impl KvSnapshot {
    /// Bytes that claim to be a snapshot; importing checks them.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The snapshot's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The snapshot's bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

impl fmt::Debug for KvSnapshot {
    /// Without the content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvSnapshot({} bytes)", self.0.len())
    }
}

impl KvCache {
    /// The first `len` positions of a sequence.
    pub(crate) fn export(
        &self,
        weights: &[u8; 32],
        seq: SeqId,
        len: u32,
    ) -> Result<KvSnapshot, EngineError> {
        let sequence = self.get(seq)?;
        if len > sequence.len {
            return Err(sequence.gap(seq, len));
        }
        let geometry = self.geometry();
        let bytes = length(geometry, sequence.layers.len() as u64, len);
        let mut out = Vec::new();
        usize::try_from(bytes)
            .ok()
            .and_then(|bytes| out.try_reserve_exact(bytes).ok())
            .ok_or(EngineError::OutOfMemory(bytes))?;
        header(weights, geometry, sequence, len, &mut out);
        for (strip, cell_of) in runs(geometry, &sequence.layers) {
            for (page, positions) in pages_of(&sequence.pages, len as usize) {
                let cells = self.pages.strip(page, strip);
                for slot in 0..positions {
                    for i in 0..geometry.head_dim {
                        let cell = cells[cell_of(geometry.head_dim, slot, i)];
                        out.extend_from_slice(&cell.to_le_bytes());
                    }
                }
            }
        }
        Ok(KvSnapshot(out))
    }

    /// A new sequence with the positions of a snapshot.
    pub(crate) fn import(
        &mut self,
        weights: &[u8; 32],
        snapshot: &KvSnapshot,
    ) -> Result<SeqId, ImportError> {
        let geometry = *self.geometry();
        let Checked { layers, len, data } =
            check(weights, &geometry, self.limits.context, &snapshot.0)?;
        self.check_room_for_sequence()?;
        let count = pages_for(len);
        self.check_budget(count)?;
        self.pages.prepare(count)?;
        let mut pages = Vec::with_capacity(count);
        for _ in 0..count {
            pages.push(self.pages.take()?);
        }
        let (cells, _) = data.as_chunks::<2>();
        let mut cells = cells.iter().map(|bytes| u16::from_le_bytes(*bytes));
        for (strip, cell_of) in runs(&geometry, &layers) {
            for (page, positions) in pages_of(&pages, len as usize) {
                let target = self.pages.strip_mut(page, strip);
                for slot in 0..positions {
                    for i in 0..geometry.head_dim {
                        // There are as many values as cells: `check` has compared the lengths.
                        let cell = cells.next().unwrap_or(0);
                        target[cell_of(geometry.head_dim, slot, i)] = cell;
                    }
                }
            }
        }
        Ok(self.insert(Sequence { len, layers, pages })?)
    }
}

/// Where a component of a position lies in a strip.
type CellOf = fn(head_dim: usize, slot: usize, i: usize) -> usize;

/// The runs of a snapshot: layer by layer, head by head, first the keys, then the values.
fn runs(geometry: &Geometry, layers: &Range<u32>) -> impl Iterator<Item = (usize, CellOf)> {
    let cells: [CellOf; 2] = [key_cell, value_cell];
    let first = (layers.start - geometry.first_layer) as usize;
    let strips = geometry.strip_of(first, 0)..geometry.strip_of(first + layers.len(), 0);
    strips.flat_map(move |strip| cells.map(|cell_of| (strip, cell_of)))
}

/// Bytes of a snapshot. (2^32 positions of 2^32 layers do not fit u64, but do not occur either.)
fn length(geometry: &Geometry, layers: u64, len: u32) -> u64 {
    let position = layers.saturating_mul(geometry.position_bytes());
    u64::from(len)
        .saturating_mul(position)
        .saturating_add(HEADER as u64)
}

/// The pages of a table that hold `len` positions, and how many each.
fn pages_of(table: &[usize], len: usize) -> impl Iterator<Item = (usize, usize)> {
    table
        .iter()
        .zip((0..len).step_by(PAGE))
        .map(move |(&page, begin)| (page, PAGE.min(len - begin)))
}

fn header(
    weights: &[u8; 32],
    geometry: &Geometry,
    sequence: &Sequence,
    len: u32,
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&[BINARY16, 0]);
    out.extend_from_slice(weights);
    let layers = &sequence.layers;
    let shape = shape(geometry).map(|(_, number)| number);
    for number in [layers.start, layers.end - layers.start]
        .iter()
        .chain(&shape)
        .chain(&[len, 0])
    {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

/// Offsets 48 to 56. The geometry comes from 32-bit numbers.
fn shape(geometry: &Geometry) -> [(&'static str, u32); 2] {
    [
        ("KV heads", geometry.kv_heads as u32),
        ("values per head", geometry.head_dim as u32),
    ]
}

/// What is in a sound snapshot.
struct Checked<'a> {
    layers: Range<u32>,
    len: u32,
    data: &'a [u8],
}

fn check<'a>(
    weights: &[u8; 32],
    geometry: &Geometry,
    context: u32,
    bytes: &'a [u8],
) -> Result<Checked<'a>, ImportError> {
    let (head, data) = bytes
        .split_first_chunk::<HEADER>()
        .ok_or(ImportError::Malformed("it is too short"))?;
    let mut head = Reader(head);
    if head.take() != *MAGIC {
        return Err(ImportError::Malformed("it does not begin with HNKV"));
    }
    let version = u16::from_le_bytes(head.take());
    if version != VERSION {
        return Err(ImportError::Version {
            found: version,
            expected: VERSION,
        });
    }
    if head.take() != [BINARY16, 0] {
        return Err(ImportError::Malformed(
            "its values are of an unknown format",
        ));
    }
    if head.take() != *weights {
        return Err(ImportError::Weights);
    }
    let (first, count) = (head.number(), head.number());
    let layers = first..first.saturating_add(count);
    let engine = geometry.layer_range();
    if layers.is_empty() || layers.start < engine.start || layers.end > engine.end {
        return Err(ImportError::Layers {
            found: layers,
            engine,
        });
    }
    for (field, expected) in shape(geometry) {
        let found = head.number();
        if found != expected {
            return Err(ImportError::Geometry {
                field,
                found,
                expected,
            });
        }
    }
    let len = head.number();
    if head.number() != 0 {
        return Err(ImportError::Malformed("a reserved field is not zero"));
    }
    let expected = length(geometry, u64::from(count), len);
    if bytes.len() as u64 != expected {
        return Err(ImportError::Length {
            expected,
            found: bytes.len() as u64,
        });
    }
    if len > context {
        return Err(EngineError::ContextFull {
            wanted: u64::from(len),
            limit: context,
        }
        .into());
    }
    let (cells, _) = data.as_chunks::<2>();
    match cells
        .iter()
        .position(|cell| u16::from_le_bytes(*cell) & NOT_FINITE == NOT_FINITE)
    {
        Some(index) => Err(ImportError::NotFinite(HEADER + 2 * index)),
        None => Ok(Checked { layers, len, data }),
    }
}

/// Reads fixed-size fields; beyond the end there are zeros, but the header is as long as all its
/// fields.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk() {
            Some((field, rest)) => {
                self.0 = rest;
                *field
            }
            None => [0; N],
        }
    }
}
