//! GGUF files: llama.cpp's container for models.
//!
//! [`Gguf`] reads versions 2 and 3, little-endian, over a memory map. The file is treated as
//! hostile: every offset, length, count, type and alignment is checked before use, and a violation
//! returns a [`GgufError`] that names the field. [`writer`] writes such files.
//!
//! Source of the format: the GGUF specification (`docs/gguf.md` of the ggml project), and, where
//! the two differ, what ggml's own reader accepts.
//!
//! ```text
//! "GGUF" | version u32 | tensor_count u64 | metadata_kv_count u64
//! metadata_kv:  key string, value_type u32, value        string = length u64, bytes
//! tensor_infos: name string, n_dimensions u32, dimensions u64 each, type u32, offset u64
//! padding to general.alignment (default 32)
//! tensor_data:  each tensor at its offset, counted from here, a multiple of the alignment
//! ```
//!
//! A model that is split into several files is read as the one file that they become when they are
//! joined (`split.rs`, `join.rs`).
//!
//! Stricter than the specification: no arrays of arrays, no tensors without dimensions or with a
//! zero dimension, no overlap, and nothing behind the last tensor but its padding.

mod error;
mod join;
mod reader;
mod split;
mod tensor_type;
mod type_use;
mod value;
pub mod writer;

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

pub use error::{GgufError, MetadataError};
pub(crate) use join::SPLIT_COUNT;
pub use reader::TensorInfo;
pub use split::{Joined, Piece, SplitName, files_of};
pub use tensor_type::TensorType;
pub use type_use::{TypeUse, type_uses};
pub use value::{Array, Value, ValueType};

use reader::{Header, SlotKind};

/// Checked GGUF file: its metadata and its tensors.
///
/// Beside the map it holds only an index of the header: keys, names and shapes, a small multiple of
/// the header's size. Values, token lists and weights stay in the map.
#[derive(Debug)]
pub struct Gguf {
    data: Data,
    header: Header,
}

#[derive(Debug)]
enum Data {
    Map(memmap2::Mmap),
    Bytes(Vec<u8>),
    /// Several files of one model. The header is that of the joined file.
    Joined(Joined, Vec<Gguf>),
}

impl Data {
    /// The file; of several, the head of the joined one.
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Map(map) => map,
            Self::Bytes(bytes) => bytes,
            Self::Joined(joined, _) => joined.head(),
        }
    }
}

impl Gguf {
    fn map_one(file: &File, path: &Path) -> Result<Self, GgufError> {
        let io = |source| GgufError::Io {
            path: path.to_owned(),
            source,
        };
        let info = file.metadata().map_err(io)?;
        if info.len() == 0 {
            return Err(GgufError::Magic(Vec::new()));
        }
        // SAFETY: the map is read-only and private to this process. Its contents are only read as
        // bytes and decoded with bounds checks each time, so a file that is changed underneath
        // gives wrong numbers but no invalid memory access. The one assumption is that no process
        // changes or truncates the file while it is open. Models are replaced by renaming a new
        // file into place, which leaves this map unchanged. Parts of models are written in place,
        // but only pieces that are not held, which are not read through a map.
        #[allow(unsafe_code)]
        let map = unsafe { memmap2::Mmap::map(file) }.map_err(io)?;
        Self::from_data(Data::Map(map))
    }

    /// Checks a file in memory.
    ///
    /// # Errors
    /// Any variant but [`GgufError::Io`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        Self::from_data(Data::Bytes(bytes))
    }

    /// Checks the head of a file of `file_bytes` bytes. The data of its tensors is missing:
    /// [`Self::data`] is empty, and [`Self::bytes`] is the head.
    ///
    /// # Errors
    /// Any variant but [`GgufError::Io`].
    pub fn from_head(head: Vec<u8>, file_bytes: u64) -> Result<Self, GgufError> {
        let header = reader::parse(&head, file_bytes)?;
        Ok(Self {
            data: Data::Bytes(head),
            header,
        })
    }

    fn from_data(data: Data) -> Result<Self, GgufError> {
        let bytes = data.bytes();
        let header = reader::parse(bytes, bytes.len() as u64)?;
        Ok(Self { data, header })
    }

    /// Version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Alignment of tensor data in bytes, a power of two.
    pub fn alignment(&self) -> u64 {
        self.header.alignment
    }

    /// Length in bytes of the file; of a split model, of the joined one.
    pub fn file_bytes(&self) -> u64 {
        match &self.data {
            Data::Joined(joined, _) => joined.file_bytes(),
            data => data.bytes().len() as u64,
        }
    }

    /// The whole file; of a split model, the head of the joined one.
    pub fn bytes(&self) -> &[u8] {
        self.data.bytes()
    }

    /// Contents of the file, or of all files of a split model, in order.
    pub fn files(&self) -> Vec<&[u8]> {
        match &self.data {
            Data::Joined(_, files) => files.iter().map(Self::bytes).collect(),
            data => vec![data.bytes()],
        }
    }

    /// Length in bytes of the file, or of all files of a split model together.
    pub fn stored_bytes(&self) -> u64 {
        self.files().iter().map(|file| file.len() as u64).sum()
    }

    /// Whether the model is split into several files.
    pub fn is_split(&self) -> bool {
        matches!(self.data, Data::Joined(..))
    }

    /// Writes the file; of a split model, the joined one.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_joined(&self, out: &mut dyn Write) -> io::Result<()> {
        let Data::Joined(joined, files) = &self.data else {
            return out.write_all(self.bytes());
        };
        for piece in joined.pieces(0, joined.file_bytes()) {
            match piece {
                Piece::Head { .. } => out.write_all(joined.head())?,
                // Less than an alignment.
                Piece::Padding { bytes } => out.write_all(&vec![0; bytes as usize])?,
                Piece::File {
                    file,
                    offset,
                    bytes,
                } => {
                    let data = files.get(file).map(|file| file.range(offset, bytes));
                    out.write_all(data.unwrap_or_default())?;
                }
            }
        }
        Ok(())
    }

    /// Bytes before the first tensor's data: metadata and the list of tensors.
    pub fn head(&self) -> &[u8] {
        let bytes = self.data.bytes();
        let first = self.header.tensors.iter().map(|info| info.offset).min();
        let end = first
            .and_then(|at| usize::try_from(at).ok())
            .unwrap_or(bytes.len());
        bytes.get(..end).unwrap_or(bytes)
    }

    /// All metadata, sorted by key.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.header
            .metadata
            .keys()
            .filter_map(|key| Some((key.as_str(), self.get(key)?)))
    }

    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let slot = self.header.metadata.get(key)?;
        let bytes = self.data.bytes().get(slot.bytes.clone())?;
        match slot.kind {
            SlotKind::One(value_type) => value::decode(value_type, bytes).map(|(value, _)| value),
            SlotKind::Array { element, len } => Some(Value::Array(Array::new(element, len, bytes))),
        }
    }

    /// Integer of any stored width that fits `u32`; `None` if the key is missing.
    ///
    /// # Errors
    /// [`MetadataError::Mismatch`] if the value is no such integer.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, MetadataError> {
        self.typed(key, "an integer from 0 to 4294967295", |value| {
            value.as_integer().and_then(|v| u32::try_from(v).ok())
        })
    }

    /// Finite float of either stored width, as stored; `None` if the key is missing.
    ///
    /// # Errors
    /// [`MetadataError::Mismatch`] if the value is no float, infinite or NaN.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, MetadataError> {
        self.typed(key, "a finite float", |value| {
            value.as_float().filter(|v| v.is_finite())
        })
    }

    /// Boolean; `None` if the key is missing.
    ///
    /// # Errors
    /// [`MetadataError::Mismatch`] if the value is no boolean.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, MetadataError> {
        self.typed(key, "a boolean", |value| value.as_bool())
    }

    /// String; `None` if the key is missing.
    ///
    /// # Errors
    /// [`MetadataError::Mismatch`] if the value is no string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, MetadataError> {
        self.typed(key, "a string", |value| value.as_str())
    }

    /// Array; `None` if the key is missing.
    ///
    /// # Errors
    /// [`MetadataError::Mismatch`] if the value is no array.
    pub fn array(&self, key: &str) -> Result<Option<Array<'_>>, MetadataError> {
        self.typed(key, "an array", |value| value.as_array())
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, MetadataError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        read(value)
            .map(Some)
            .ok_or_else(|| MetadataError::Mismatch {
                key: key.to_owned(),
                expected,
                found: value.to_string(),
            })
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.header.tensors.get(*self.header.by_name.get(name)?)
    }

    /// Advises the system that `data`, a part of a tensor's data, is not needed soon, so that its
    /// pages can leave this process's memory. A later read fetches them from the file.
    pub fn release(&self, data: &[u8]) {
        if let Data::Joined(_, files) = &self.data {
            files.iter().for_each(|file| file.release(data));
        }
        if let Data::Map(map) = &self.data
            && let Some(offset) = data.as_ptr().addr().checked_sub(map.as_ptr().addr())
            && offset
                .checked_add(data.len())
                .is_some_and(|end| end <= map.len())
        {
            // SAFETY: the map is read-only and backed by the file, so a dropped page returns with
            // the same content when it is read: borrowed data does not change. Refused advice has
            // no effect.
            #[allow(unsafe_code)]
            let _ = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, data.len())
            };
        }
    }

    /// Data of a tensor of this file: `info.bytes` bytes. Empty for a tensor of another file that
    /// does not fit into this one.
    pub fn data(&self, info: &TensorInfo) -> &[u8] {
        let Data::Joined(joined, files) = &self.data else {
            return self.range(info.offset, info.bytes);
        };
        match joined.pieces(info.offset, info.bytes)[..] {
            [
                Piece::File {
                    file,
                    offset,
                    bytes,
                },
            ] => {
                let file = files.get(file);
                file.map_or(&[], |file| file.range(offset, bytes))
            }
            _ => &[],
        }
    }

    /// Bytes of the file; empty if it does not have them.
    fn range(&self, offset: u64, bytes: u64) -> &[u8] {
        let range = usize::try_from(offset)
            .ok()
            .zip(usize::try_from(bytes).ok())
            .and_then(|(start, len)| Some(start..start.checked_add(len)?));
        range
            .and_then(|range| self.data.bytes().get(range))
            .unwrap_or_default()
    }
}
