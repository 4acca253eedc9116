//! Table of pieces: their numbers, places in the file and hashes.

use std::ops::Range;

use super::error::PartError;
use super::{MAX_PIECES, PIECE_BYTES};
use crate::gguf::TensorInfo;
use crate::manifest::{Digest, Manifest, TensorEntry};
use crate::model_file::ModelFile;

/// Bytes of a piece's entry in the piece list.
pub(super) const ENTRY_BYTES: u64 = 32;

/// A range of a tensor with a hash of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub index: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Range: 1 to [`PIECE_BYTES`].
    pub len: u32,
    pub sha256: Digest,
}

/// Pieces of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct PieceTable {
    layout: Layout,
    /// Piece list: SHA-256 of all pieces, in order.
    list: Vec<u8>,
}

/// Numbers and places of a model's pieces.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Layout {
    /// In order of their pieces.
    tensors: Vec<Tensor>,
    count: u32,
    /// Pieces of each block.
    layers: Vec<Vec<Range<u32>>>,
    shared: Vec<Range<u32>>,
    head: Vec<Range<u32>>,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    offset: u64,
    bytes: u64,
    pub(super) pieces: Range<u32>,
    pub(super) sha256: Digest,
}

/// Number of pieces of a model, at most [`MAX_PIECES`], in a file of `file_bytes` bytes. `None` if
/// there are more than such a file can have.
pub fn piece_count(manifest: &Manifest, file_bytes: u64) -> Option<u32> {
    let count = manifest
        .tensors()
        .iter()
        .try_fold(0u32, |count, entry| more_pieces(count, bytes_of(entry)?))?;
    // Every piece but the last of each tensor has the full length.
    let most = file_bytes / u64::from(PIECE_BYTES) + manifest.tensors().len() as u64;
    (u64::from(count) <= most).then_some(count)
}

/// Tensor that a piece belongs to, and the piece's offset in the tensor.
pub fn tensor_at(manifest: &Manifest, piece: u32) -> Option<(&TensorEntry, u64)> {
    let mut first = 0;
    for entry in manifest.tensors() {
        let end = more_pieces(first, bytes_of(entry)?)?;
        if piece < end {
            let before = u64::from(piece.checked_sub(first)?);
            return Some((entry, before * u64::from(PIECE_BYTES)));
        }
        first = end;
    }
    None
}

fn bytes_of(entry: &TensorEntry) -> Option<u64> {
    let (cols, rows) = entry.dims.split_first()?;
    let row = entry.dtype.row_bytes(*cols)?;
    rows.iter().try_fold(row, |n, dim| n.checked_mul(*dim))
}

/// `count`, and the pieces of `bytes` bytes; at most [`MAX_PIECES`].
fn more_pieces(count: u32, bytes: u64) -> Option<u32> {
    let all = count.checked_add(pieces_in(bytes)?)?;
    (all <= MAX_PIECES).then_some(all)
}

fn pieces_in(bytes: u64) -> Option<u32> {
    u32::try_from(bytes.div_ceil(u64::from(PIECE_BYTES))).ok()
}

/// Sorts ranges and joins those that touch or overlap.
fn joined(mut ranges: Vec<Range<u32>>) -> Vec<Range<u32>> {
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Range<u32>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

impl Layout {
    /// Lays out the pieces of `manifest` in a file. Of `model`, only the head is read.
    pub(super) fn new(manifest: &Manifest, model: &ModelFile) -> Result<Self, PartError> {
        let fail = |what: String| Err(PartError::Disagrees(what));
        if let Some(what) = different_spec(manifest, model) {
            return fail(what);
        }
        let gguf = model.gguf();
        let mut tensors = Vec::with_capacity(manifest.tensors().len());
        let mut count = 0u32;
        for entry in manifest.tensors() {
            let name = &entry.name;
            let Some(info) = gguf.tensor(name) else {
                return fail(format!(
                    "the manifest lists {name}, which the file's head lacks"
                ));
            };
            let (listed, found) = ((entry.dtype, &entry.dims[..]), (info.dtype, &info.dims[..]));
            if listed.0 != found.0 {
                return fail(format!(
                    "the manifest lists {name} as {}, the file's head as {}",
                    listed.0, found.0
                ));
            }
            if listed.1 != found.1 {
                return fail(format!(
                    "the manifest lists {name} with shape {:?}, the file's head with {:?}",
                    listed.1, found.1
                ));
            }
            let Some(end) = more_pieces(count, info.bytes) else {
                return fail(format!("it has more than {MAX_PIECES} pieces"));
            };
            tensors.push(Tensor {
                name: name.clone(),
                offset: info.offset,
                bytes: info.bytes,
                pieces: count..end,
                sha256: entry.sha256,
            });
            count = end;
        }
        if gguf.tensors().len() != tensors.len() {
            return fail("the file's head has tensors that the manifest does not list".to_owned());
        }
        let mut layout = Self {
            tensors,
            count,
            layers: Vec::new(),
            shared: Vec::new(),
            head: Vec::new(),
        };
        layout.layers = (0..model.spec().layers)
            .map(|layer| layout.pieces_of(model.layer_tensors(layer)))
            .collect();
        layout.shared = layout.pieces_of(model.shared_tensors());
        layout.head = layout.pieces_of(model.head_tensors());
        Ok(layout)
    }

    fn pieces_of<'a>(&self, tensors: impl Iterator<Item = &'a TensorInfo>) -> Vec<Range<u32>> {
        let found = tensors.filter_map(|info| self.tensor(&info.name));
        joined(found.map(|tensor| tensor.pieces.clone()).collect())
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&Tensor> {
        let by_name = |tensor: &Tensor| tensor.name.as_str().cmp(name);
        self.tensors
            .get(self.tensors.binary_search_by(by_name).ok()?)
    }

    /// Tensor that a piece belongs to.
    pub(super) fn tensor_of(&self, piece: u32) -> Option<&Tensor> {
        let at = self.tensors.partition_point(|t| t.pieces.end <= piece);
        self.tensors.get(at).filter(|t| t.pieces.contains(&piece))
    }

    /// Offset in the file, and length, of a piece.
    fn place(&self, piece: u32) -> Option<(u64, u32)> {
        let tensor = self.tensor_of(piece)?;
        let within = u64::from(piece - tensor.pieces.start) * u64::from(PIECE_BYTES);
        let len = (tensor.bytes - within).min(u64::from(PIECE_BYTES));
        Some((tensor.offset + within, u32::try_from(len).ok()?))
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Names of the tensors, in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }
}

impl PieceTable {
    pub(super) fn new(layout: Layout, list: Vec<u8>) -> Result<Self, PartError> {
        let wanted = u64::from(layout.count) * ENTRY_BYTES;
        match list.len() as u64 == wanted {
            true => Ok(Self { layout, list }),
            false => Err(PartError::Disagrees(format!(
                "its piece list has {} bytes, where the manifest implies {wanted}",
                list.len()
            ))),
        }
    }

    /// Number of pieces.
    #[allow(clippy::len_without_is_empty)] // a model has tensors
    pub fn len(&self) -> u32 {
        self.layout.count
    }

    pub fn piece(&self, index: u32) -> Option<Piece> {
        let (offset, len) = self.layout.place(index)?;
        let (entries, _) = self.list.as_chunks::<32>();
        Some(Piece {
            index,
            offset,
            len,
            sha256: Digest(*entries.get(index as usize)?),
        })
    }

    /// Name of the tensor that a piece belongs to.
    pub fn tensor_of(&self, index: u32) -> Option<&str> {
        Some(self.layout.tensor_of(index)?.name.as_str())
    }

    /// Pieces of blocks `lo..=hi` as far as the model has them, with those that all blocks share.
    /// Sorted.
    pub fn of_layers(&self, lo: u32, hi: u32) -> Vec<Range<u32>> {
        let end = (hi as usize)
            .saturating_add(1)
            .min(self.layout.layers.len());
        let layers = self.layout.layers.get(lo as usize..end).unwrap_or_default();
        match layers.is_empty() {
            true => Vec::new(),
            false => joined(
                layers
                    .iter()
                    .flatten()
                    .chain(&self.layout.shared)
                    .cloned()
                    .collect(),
            ),
        }
    }

    /// Pieces of the tensors that a caller needs: embedding, last norm, output matrix. Sorted.
    pub fn of_head(&self) -> Vec<Range<u32>> {
        self.layout.head.clone()
    }

    pub fn all(&self) -> Range<u32> {
        0..self.layout.count
    }

    /// Bytes of some pieces.
    pub fn bytes(&self, pieces: &[Range<u32>]) -> u64 {
        let each = pieces.iter().cloned().flatten();
        each.filter_map(|piece| self.layout.place(piece))
            .map(|(_, len)| u64::from(len))
            .sum()
    }

    /// SHA-256 of all pieces, in order.
    pub fn list(&self) -> &[u8] {
        &self.list
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }
}

/// Names the first hyperparameter that differs. The format of keys and values is the adoption's.
fn different_spec(manifest: &Manifest, model: &ModelFile) -> Option<String> {
    let mut head = model.stored_spec();
    head.attention.cache = manifest.spec().attention.cache;
    if *manifest.spec() == head {
        return None;
    }
    let fields = |spec| match serde_json::to_value(spec) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let (listed, found) = (fields(manifest.spec()), fields(&head));
    let differing = listed
        .iter()
        .chain(&found)
        .map(|(key, _)| key)
        .find(|key| listed.get(*key) != found.get(*key));
    let Some(key) = differing else {
        return Some("the manifest and the file's head have other hyperparameters".to_owned());
    };
    let shown = |value: Option<&serde_json::Value>| {
        value.map_or_else(|| "nothing".to_owned(), serde_json::Value::to_string)
    };
    let (listed, found) = (shown(listed.get(key)), shown(found.get(key)));
    Some(format!(
        "the manifest has {listed} as {key}, the file's head {found}"
    ))
}
