//! Weights of a directory: one safetensors file, or several with an index.
//!
//! A safetensors file consists of the header's length (u64), the header (JSON: type, shape and
//! offset of each tensor) and the tensors' data without gaps. The `safetensors` crate checks the
//! header, and this module compares it with the file's length, before any of it is used. Data is
//! read on demand, piece by piece.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::directory::{self, Files, OpenFile};
use super::error::ImportError;
use crate::error::FileError;
use crate::gguf::TensorType;

/// Bytes of a tensor that are read at a time.
pub(super) const PART_BYTES: usize = 1 << 20;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The largest known headers have some 100 bytes for each of 50,000 tensors.
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Bytes of all headers together. A directory may lie on a server that is not trusted.
const MAX_HEADERS_BYTES: u64 = 64 << 20;
const MAX_INDEX_BYTES: u64 = 16 << 20;
/// The largest known models have some 200 files.
const MAX_SHARDS: usize = 1 << 12;

/// Tensor in a directory.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// Index of the file.
    file: usize,
    /// Offset of the data in the file.
    offset: u64,
    pub(super) dtype: Dtype,
    /// Lengths, row length last.
    pub(super) shape: Vec<u64>,
}

impl Stored {
    /// Part of the data, from `from` bytes on.
    pub(super) fn part(&self, from: u64, shape: Vec<u64>) -> Self {
        Self {
            offset: self.offset + from,
            shape,
            ..self.clone()
        }
    }

    /// Number of values.
    pub(super) fn values(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of data stored as `dtype`.
    pub(super) fn bytes(&self, dtype: TensorType) -> u64 {
        let bytes = u64::from(dtype.block_bytes());
        self.values().saturating_mul(bytes)
    }

    /// Tensor type, if it is supported.
    pub(super) fn dtype(&self, tensor: &str) -> Result<TensorType, ImportError> {
        match self.dtype {
            Dtype::F32 => Ok(TensorType::F32),
            Dtype::F16 => Ok(TensorType::F16),
            Dtype::BF16 => Ok(TensorType::BF16),
            other => Err(wrong_type(tensor, other)),
        }
    }
}

pub(super) fn wrong_type(tensor: &str, dtype: Dtype) -> ImportError {
    ImportError::Dtype {
        tensor: tensor.to_owned(),
        dtype: dtype.to_string(),
    }
}

/// All tensors of a directory.
#[derive(Debug)]
pub(super) struct Shards {
    files: Vec<Box<dyn OpenFile>>,
    /// Bytes of their headers.
    header_bytes: u64,
    tensors: BTreeMap<String, Stored>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads the index of a directory; `None` if it has none.
    fn read(directory: &(impl Files + ?Sized)) -> Result<Option<Self>, ImportError> {
        let Some(text) = directory::read(directory, INDEX, MAX_INDEX_BYTES)? else {
            return Ok(None);
        };
        let index: Self =
            serde_json::from_slice(&text).map_err(|e| ImportError::Index(e.to_string()))?;
        // Every file in the index is opened, so their number is limited.
        let files: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
        if files.len() > MAX_SHARDS {
            let reason = format!("names {} files; at most {MAX_SHARDS} are read", files.len());
            return Err(ImportError::Index(reason));
        }
        Ok(Some(index))
    }
}

impl Shards {
    /// Opens the files of a directory and reads their headers.
    pub(super) fn open(directory: &(impl Files + ?Sized)) -> Result<Self, ImportError> {
        let mut shards = Self {
            files: Vec::new(),
            header_bytes: 0,
            tensors: BTreeMap::new(),
        };
        match Index::read(directory)? {
            Some(index) => shards.open_all(directory, &index.weight_map)?,
            None => {
                let tensors = shards.add(directory, SINGLE)?;
                shards.tensors =
                    tensors.ok_or_else(|| ImportError::NoWeights(directory.path().to_owned()))?;
            }
        }
        Ok(shards)
    }

    /// Names of the files with weights, without opening them.
    pub(super) fn names(directory: &Path) -> Result<Vec<String>, ImportError> {
        let Some(index) = Index::read(directory)? else {
            return Ok(vec![SINGLE.to_owned()]);
        };
        let mut names: Vec<String> = index.weight_map.into_values().collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    fn open_all(
        &mut self,
        directory: &(impl Files + ?Sized),
        map: &BTreeMap<String, String>,
    ) -> Result<(), ImportError> {
        let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in map {
            by_file.entry(file).or_default().push(tensor);
        }
        for (file, named) in by_file {
            // Only a plain name is accepted: the index must not lead out of its directory.
            let plain = Path::new(file).file_name().is_some_and(|name| name == file);
            if !plain {
                let reason = format!("{file:?} is not a file name in this directory");
                return Err(ImportError::Index(reason));
            }
            let missing = || ImportError::MissingShard(file.to_owned());
            let mut found = self.add(directory, file)?.ok_or_else(missing)?;
            for tensor in named {
                let Some(stored) = found.remove(tensor) else {
                    return Err(ImportError::Unsound(format!(
                        "tensor {tensor:?} is not in {file:?}, to which {INDEX} assigns it"
                    )));
                };
                self.tensors.insert(tensor.to_owned(), stored);
            }
            if let Some((tensor, _)) = found.pop_first() {
                return Err(ImportError::Unsound(format!(
                    "{file:?} holds tensor {tensor:?}, which {INDEX} does not assign to it"
                )));
            }
        }
        Ok(())
    }

    /// Opens a file, if it exists, and adds its tensors.
    fn add(
        &mut self,
        directory: &(impl Files + ?Sized),
        name: &str,
    ) -> Result<Option<BTreeMap<String, Stored>>, ImportError> {
        let Some(file) = directory.open(name)? else {
            return Ok(None);
        };
        let read = |out: &mut [u8], from| read_file(&*file, out, from);
        let (header_bytes, tensors) = header(&read, file.bytes(), name, self.files.len())?;
        self.header_bytes += header_bytes;
        if self.header_bytes > MAX_HEADERS_BYTES {
            return Err(ImportError::Unsound(format!(
                "the headers of the weights have more than {MAX_HEADERS_BYTES} bytes"
            )));
        }
        self.files.push(file);
        Ok(Some(tensors))
    }

    /// Adds the tensors of a file in a folder, with the folder's name and a slash before theirs.
    pub(super) fn add_folder(
        &mut self,
        directory: &(impl Files + ?Sized),
        folder: &str,
        file: &str,
    ) -> Result<(), ImportError> {
        let name = format!("{folder}/{file}");
        let found = self.add(directory, &name)?;
        let missing =
            || ImportError::Unsound(format!("{name} is missing: modules.json names its folder"));
        let found = found.ok_or_else(missing)?;
        let named = found
            .into_iter()
            .map(|(tensor, stored)| (format!("{folder}/{tensor}"), stored));
        self.tensors.extend(named);
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> Option<&Stored> {
        self.tensors.get(name)
    }

    /// Names of all tensors, sorted by bytes.
    pub(super) fn names_of_tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Fills `out` with a tensor's data from byte `from` on.
    pub(super) fn read(
        &self,
        stored: &Stored,
        from: u64,
        out: &mut [u8],
    ) -> Result<(), ImportError> {
        match self.files.get(stored.file) {
            Some(file) => read_file(&**file, out, stored.offset.saturating_add(from)),
            None => Ok(()),
        }
    }
}

fn read_file(file: &dyn OpenFile, out: &mut [u8], from: u64) -> Result<(), ImportError> {
    file.read_at(out, from)
        .map_err(|source| FileError::new("read", file.path(), source).into())
}

/// Reads and checks the header of a safetensors file of `bytes` bytes. Returns the header's length,
/// and the tensors. `read` fills a buffer with the bytes from a position on.
fn header(
    read: &dyn Fn(&mut [u8], u64) -> Result<(), ImportError>,
    bytes: u64,
    name: &str,
    index: usize,
) -> Result<(u64, BTreeMap<String, Stored>), ImportError> {
    let unsound = |problem: String| ImportError::Unsound(format!("{name:?} {problem}"));
    let truncated = |expected: u64| {
        unsound(format!(
            "is cut off: it should have {expected} bytes and has {bytes}"
        ))
    };
    let mut length = [0; 8];
    if bytes < 8 {
        return Err(truncated(8));
    }
    read(&mut length, 0)?;
    let header = u64::from_le_bytes(length);
    if length == directory::LFS_POINTER[..8] {
        return Err(ImportError::Pointer(name.to_owned()));
    }
    if header > (bytes - 8).min(MAX_HEADER_BYTES) {
        return Err(unsound(format!(
            "says that its header has {header} bytes; the file has {bytes}"
        )));
    }
    let mut text = vec![0; header as usize];
    read(&mut text, 8)?;
    let metadata: Metadata = serde_json::from_slice(&text)
        .map_err(|error| unsound(format!("is not a valid safetensors file: {error}")))?;
    let data = 8 + header;
    let expected = data.saturating_add(metadata.data_len() as u64);
    if expected > bytes {
        return Err(truncated(expected));
    }
    if expected < bytes {
        return Err(unsound(format!(
            "should have {expected} bytes and has {bytes}: there are unexpected bytes after its tensors"
        )));
    }
    let tensors = metadata.tensors().into_iter().map(|(name, info)| {
        let stored = Stored {
            file: index,
            offset: data + info.data_offsets.0 as u64,
            dtype: info.dtype,
            shape: info.shape.iter().map(|&n| n as u64).collect(),
        };
        (name, stored)
    });
    Ok((header, tensors.collect()))
}

/// Fuzzing: reads bytes as a safetensors file. Returns whether accepted tensors lie in the file.
#[cfg(feature = "fuzzing")]
pub(super) fn check(bytes: &[u8]) -> bool {
    use std::io::Read as _;

    let len = bytes.len() as u64;
    let read = |out: &mut [u8], from: u64| -> Result<(), ImportError> {
        let rest = usize::try_from(from).ok();
        let mut rest = rest.and_then(|from| bytes.get(from..)).unwrap_or_default();
        rest.read_exact(out)
            .map_err(|source| FileError::new("read", Path::new(SINGLE), source).into())
    };
    let lies_within = |stored: &Stored| {
        let mut lengths = stored.shape.iter();
        let values = lengths.try_fold(1u64, |values, length| values.checked_mul(*length));
        let bits = values.and_then(|values| values.checked_mul(stored.dtype.bitsize() as u64));
        let end = bits.and_then(|bits| stored.offset.checked_add(bits.div_ceil(8)));
        end.is_some_and(|end| end <= len)
    };
    match header(&read, len, SINGLE, 0) {
        Ok((_, tensors)) => tensors.values().all(lies_within),
        Err(_) => true,
    }
}
