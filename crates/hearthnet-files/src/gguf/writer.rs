//! Writer of GGUF files, version 3, for `model convert` and for small models in tests.
//!
//! ```
//! use hearthnet_files::gguf::writer::{WriteError, Writer};
//! use hearthnet_files::gguf::{Gguf, TensorType, Value};
//!
//! let mut writer = Writer::new();
//! writer.set("general.architecture", Value::String("example"))?;
//! writer.tensor("ones", &[4], TensorType::F32)?;
//! let mut file = Vec::new();
//! writer.write(&mut file, |_, out| {
//!     out.write_all(&1f32.to_le_bytes().repeat(4)).map_err(WriteError::Io)
//! })?;
//! assert_eq!(Gguf::from_bytes(file).unwrap().tensors().len(), 1);
//! # Ok::<(), WriteError>(())
//! ```

use std::collections::BTreeSet;
use std::io::{self, Write};

use super::reader::{
    DEFAULT_ALIGNMENT, MAGIC, MAX_ALIGNMENT, MAX_DIMENSIONS, MAX_KEY_BYTES, MAX_NAME_BYTES,
    MIN_ALIGNMENT,
};
use super::tensor_type::TensorType;
use super::value::{Value, ValueType, encode};

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    #[error("cannot write: {0}")]
    Io(#[from] io::Error),
    /// A key or tensor name is empty, too long, or used twice.
    #[error("invalid name {0:?}: it is empty, too long or already used")]
    Name(String),
    /// The shape has no dimensions, more than four, a zero, rows that do not fill the blocks of the
    /// type, or a size that overflows.
    #[error("tensor {name:?} of type {dtype} cannot have shape {dims:?}")]
    Shape {
        name: String,
        dtype: TensorType,
        /// Shape, row length first.
        dims: Vec<u64>,
    },
    /// The data of a tensor has another length than its shape and type imply.
    #[error("tensor {name:?} takes {expected} bytes, {found} were given")]
    DataLength {
        name: String,
        /// Expected bytes.
        expected: u64,
        /// Bytes that the caller supplied.
        found: u64,
    },
}

/// Plan of a file: metadata and tensors in insertion order.
#[derive(Clone, Debug)]
pub struct Writer {
    metadata: Vec<u8>,
    keys: BTreeSet<String>,
    tensors: Vec<Planned>,
    names: BTreeSet<String>,
    alignment: u64,
}

#[derive(Clone, Debug)]
struct Planned {
    name: String,
    dims: Vec<u64>,
    dtype: TensorType,
    bytes: u64,
}

impl Default for Writer {
    fn default() -> Self {
        Self::new()
    }
}

impl Writer {
    /// Empty file, aligned to 32 bytes.
    pub fn new() -> Self {
        Self {
            metadata: Vec::new(),
            keys: BTreeSet::new(),
            tensors: Vec::new(),
            names: BTreeSet::new(),
            alignment: DEFAULT_ALIGNMENT,
        }
    }

    /// Aligns tensors to `alignment` bytes and records it as `general.alignment`.
    ///
    /// # Errors
    /// If `alignment` is no power of two from 8 to 65,536, or was set before.
    pub fn align(&mut self, alignment: u32) -> Result<(), WriteError> {
        let name = "general.alignment";
        let wide = u64::from(alignment);
        if !alignment.is_power_of_two() || !(MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&wide) {
            return Err(WriteError::Name(format!("{name} = {alignment}")));
        }
        self.set(name, Value::U32(alignment))?;
        self.alignment = wide;
        Ok(())
    }

    /// Adds a metadata value. Arrays must come from another file.
    ///
    /// # Errors
    /// If the key is empty, longer than 65,535 bytes or already set.
    pub fn set(&mut self, key: &str, value: Value<'_>) -> Result<(), WriteError> {
        match value {
            Value::Array(array) => {
                let mut bytes = Vec::new();
                array.iter().for_each(|element| encode(element, &mut bytes));
                self.set_array(key, array.element_type(), array.len(), &bytes)
            }
            scalar => {
                self.key(key, scalar.value_type())?;
                encode(scalar, &mut self.metadata);
                Ok(())
            }
        }
    }

    /// Adds an array of strings.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_strings<'a>(
        &mut self,
        key: &str,
        values: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), WriteError> {
        let (mut count, mut bytes) = (0, Vec::new());
        for value in values {
            encode(Value::String(value), &mut bytes);
            count += 1;
        }
        self.set_array(key, ValueType::String, count, &bytes)
    }

    /// Adds an array of `i32`.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_i32s(&mut self, key: &str, values: &[i32]) -> Result<(), WriteError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.set_array(key, ValueType::I32, values.len(), &bytes)
    }

    /// Adds an array of `f32`.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_f32s(&mut self, key: &str, values: &[f32]) -> Result<(), WriteError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.set_array(key, ValueType::F32, values.len(), &bytes)
    }

    /// Adds an array of truth values.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_bools(
        &mut self,
        key: &str,
        values: impl IntoIterator<Item = bool>,
    ) -> Result<(), WriteError> {
        let bytes: Vec<u8> = values.into_iter().map(u8::from).collect();
        self.set_array(key, ValueType::Bool, bytes.len(), &bytes)
    }

    fn set_array(
        &mut self,
        key: &str,
        element: ValueType,
        len: usize,
        bytes: &[u8],
    ) -> Result<(), WriteError> {
        self.key(key, ValueType::Array)?;
        self.metadata.extend(element.gguf().to_le_bytes());
        self.metadata.extend((len as u64).to_le_bytes());
        self.metadata.extend(bytes);
        Ok(())
    }

    fn key(&mut self, key: &str, value_type: ValueType) -> Result<(), WriteError> {
        if key.is_empty() || key.len() as u64 > MAX_KEY_BYTES || !self.keys.insert(key.to_owned()) {
            return Err(WriteError::Name(key.to_owned()));
        }
        encode(Value::String(key), &mut self.metadata);
        self.metadata.extend(value_type.gguf().to_le_bytes());
        Ok(())
    }

    /// Adds a tensor; `dims` has the row length first. [`Self::write`] requests its data.
    ///
    /// # Errors
    /// If the name is empty, longer than 64 bytes or already used, or the shape is invalid.
    pub fn tensor(
        &mut self,
        name: &str,
        dims: &[u64],
        dtype: TensorType,
    ) -> Result<(), WriteError> {
        if name.is_empty() || name.len() as u64 > MAX_NAME_BYTES || self.names.contains(name) {
            return Err(WriteError::Name(name.to_owned()));
        }
        let bytes = dims.split_first().and_then(|(&columns, rest)| {
            let possible = dims.len() <= MAX_DIMENSIONS as usize && !dims.contains(&0);
            let row = dtype.row_bytes(columns).filter(|_| possible)?;
            rest.iter()
                .try_fold(row, |bytes, &dim| bytes.checked_mul(dim))
        });
        let Some(bytes) = bytes.filter(|bytes| *bytes <= i64::MAX as u64) else {
            return Err(WriteError::Shape {
                name: name.to_owned(),
                dtype,
                dims: dims.to_vec(),
            });
        };
        self.names.insert(name.to_owned());
        self.tensors.push(Planned {
            name: name.to_owned(),
            dims: dims.to_vec(),
            dtype,
            bytes,
        });
        Ok(())
    }

    /// Writes the file. Calls `data` for each tensor's bytes, with the tensor's index in insertion
    /// order.
    ///
    /// # Errors
    /// Errors of `data` and of the writer, and [`WriteError::DataLength`] for data of the wrong
    /// length.
    pub fn write<E: From<WriteError>>(
        &self,
        out: &mut dyn Write,
        mut data: impl FnMut(usize, &mut dyn Write) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut out = Counting { out, count: 0 };
        out.write_all(&self.header()).map_err(WriteError::Io)?;
        for (index, planned) in self.tensors.iter().enumerate() {
            self.pad(&mut out).map_err(WriteError::Io)?;
            let start = out.count;
            data(index, &mut out)?;
            let found = out.count - start;
            if found != planned.bytes {
                let (name, expected) = (planned.name.clone(), planned.bytes);
                return Err(WriteError::DataLength {
                    name,
                    expected,
                    found,
                }
                .into());
            }
        }
        // ggml pads the last tensor too.
        self.pad(&mut out)
            .and_then(|()| out.flush())
            .map_err(WriteError::Io)?;
        Ok(())
    }

    /// Everything before the first tensor's data, with the padding.
    pub(super) fn head(&self) -> Vec<u8> {
        let mut head = self.header();
        // Bounded by the metadata, which is in memory.
        head.resize(
            (head.len() as u64).next_multiple_of(self.alignment) as usize,
            0,
        );
        head
    }

    fn header(&self) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        header.extend(3u32.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.keys.len() as u64).to_le_bytes());
        header.extend(&self.metadata);
        let mut offset = 0u64;
        for planned in &self.tensors {
            encode(Value::String(&planned.name), &mut header);
            header.extend((planned.dims.len() as u32).to_le_bytes());
            header.extend(planned.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            header.extend(planned.dtype.ggml().to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset = offset
                .saturating_add(planned.bytes)
                .next_multiple_of(self.alignment);
        }
        header
    }

    fn pad(&self, out: &mut Counting<'_>) -> io::Result<()> {
        let padding = out.count.next_multiple_of(self.alignment) - out.count;
        io::copy(&mut io::Read::take(io::repeat(0), padding), out)?;
        Ok(())
    }
}

/// Counts written bytes.
struct Counting<'a> {
    out: &'a mut dyn Write,
    count: u64,
}

impl Write for Counting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.count += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
