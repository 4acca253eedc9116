//! Parses the header of a GGUF file. Every length is compared with the rest of the file before use,
//! so the file's size bounds the work and memory that it can cause.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use super::error::GgufError;
use super::tensor_type::TensorType;
use super::value::{self, ValueType};

pub(super) const MAGIC: &[u8] = b"GGUF";
/// From the specification, for files that do not set one.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
/// The specification requires a multiple of 8.
pub(super) const MIN_ALIGNMENT: u64 = 8;
/// Far beyond any page or sector, and small enough that padding never matters.
pub(super) const MAX_ALIGNMENT: u64 = 1 << 16;
/// `GGML_MAX_DIMS`.
pub(super) const MAX_DIMENSIONS: u32 = 4;
/// Limit of the specification.
pub(super) const MAX_KEY_BYTES: u64 = (1 << 16) - 1;
/// From the specification (`GGML_MAX_NAME`).
pub(super) const MAX_NAME_BYTES: u64 = 64;
/// The largest known files have some 30,000 tensors (experts stored one by one).
pub(super) const MAX_TENSORS: u64 = 1 << 17;
/// Known files have fewer than 100 keys.
pub(super) const MAX_METADATA: u64 = 1 << 16;

/// Tensor of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorInfo {
    /// At most 64 bytes, not empty, unique in the file.
    pub name: String,
    /// Lengths, one to four, none zero; the first is that of a row, which is contiguous.
    pub dims: Vec<u64>,
    pub dtype: TensorType,
    /// Offset of the data from the start of the file, in bytes.
    pub offset: u64,
    /// Length of the data in bytes.
    pub bytes: u64,
}

/// Positions of a file's values and tensors.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) alignment: u64,
    /// Encoded values by key.
    pub(super) metadata: BTreeMap<String, Slot>,
    /// In file order, with offsets from the start of the file.
    pub(super) tensors: Vec<TensorInfo>,
    /// Index into `tensors`.
    pub(super) by_name: BTreeMap<String, usize>,
}

/// Type and encoded bytes of a metadata value; of an array, only the elements.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) kind: SlotKind,
    pub(super) bytes: Range<usize>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum SlotKind {
    One(ValueType),
    Array { element: ValueType, len: usize },
}

/// Names a field in an error message.
#[derive(Clone, Copy)]
enum Field<'a> {
    Header(&'static str),
    Metadata(u64, &'static str),
    Value(&'a str),
    Element(&'a str, u64),
    TensorInfo(u64, &'static str),
    Tensor(&'a str, &'static str),
}

impl fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => f.write_str(name),
            Self::Metadata(index, part) => write!(f, "metadata_kv[{index}].{part}"),
            Self::Value(key) => write!(f, "metadata_kv {key:?}"),
            Self::Element(key, index) => write!(f, "metadata_kv {key:?}[{index}]"),
            Self::TensorInfo(index, part) => write!(f, "tensor_infos[{index}].{part}"),
            Self::Tensor(name, part) => write!(f, "tensor_infos {name:?}.{part}"),
        }
    }
}

impl Field<'_> {
    /// Error for an invalid value of this field.
    fn bad(self, problem: impl fmt::Display) -> GgufError {
        GgufError::Malformed(format!("{self}: {problem}"))
    }
}

const DIMENSIONS: &str = "a tensor has one to four dimensions, none of them zero";
const OVERFLOW: &str = "the tensor's size overflows";
/// The format allows nested arrays, but no known key uses them, and ggml refuses them.
const NESTED: &str = "arrays of arrays are not supported";

/// Error for a count, length or size beyond its limit or beyond the rest of the file.
fn too_large(field: Field<'_>, value: u64, limit: u64) -> GgufError {
    field.bad(format_args!(
        "{value} is too large, at most {limit} is possible here: the file is truncated or damaged"
    ))
}

/// Read position in the file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        self.bytes.len().saturating_sub(self.at) as u64
    }

    fn take(&mut self, len: u64, field: Field<'_>) -> Result<&'a [u8], GgufError> {
        let taken = usize::try_from(len)
            .ok()
            .and_then(|len| self.at.checked_add(len))
            .and_then(|end| Some((end, self.bytes.get(self.at..end)?)));
        match taken {
            Some((end, bytes)) => {
                self.at = end;
                Ok(bytes)
            }
            None => Err(field.bad(format_args!(
                "needs {len} bytes where the file has {} left: it is truncated or damaged",
                self.left()
            ))),
        }
    }

    fn array<const N: usize>(&mut self, field: Field<'_>) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, field)?);
        Ok(out)
    }

    fn u32(&mut self, field: Field<'_>) -> Result<u32, GgufError> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: Field<'_>) -> Result<u64, GgufError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// Reads a count of items that take at least `least` bytes each: at most `limit`, and no more
    /// than fit into the rest of the file.
    fn count(&mut self, limit: u64, least: u64, field: Field<'_>) -> Result<u64, GgufError> {
        let value = self.u64(field)?;
        let limit = limit.min(self.left() / least);
        if value > limit {
            return Err(too_large(field, value, limit));
        }
        Ok(value)
    }

    fn string(&mut self, limit: u64, field: Field<'_>) -> Result<&'a str, GgufError> {
        let len = self.u64(field)?;
        if len > limit {
            return Err(too_large(field, len, limit));
        }
        let bytes = self.take(len, field)?;
        std::str::from_utf8(bytes).map_err(|_| field.bad("the string is not valid UTF-8"))
    }

    fn name(&mut self, limit: u64, field: Field<'_>) -> Result<&'a str, GgufError> {
        match self.string(limit, field)? {
            "" => Err(field.bad("must not be empty")),
            name => Ok(name),
        }
    }
}

/// `bytes` holds at least the head of a file of `file_len` bytes.
pub(super) fn parse(bytes: &[u8], file_len: u64) -> Result<Header, GgufError> {
    let mut cursor = Cursor { bytes, at: 0 };
    let magic = bytes.get(..4).unwrap_or(bytes);
    if magic != MAGIC {
        return Err(GgufError::Magic(magic.to_vec()));
    }
    cursor.at = 4;
    let field = Field::Header("version");
    let version = cursor.u32(field)?;
    if matches!(version.swap_bytes(), 1..=3) {
        return Err(field.bad("this is a big-endian GGUF file; convert it to little-endian first"));
    }
    if !matches!(version, 2 | 3) {
        return Err(field.bad(format_args!(
            "GGUF version {version} is not supported, only 2 and 3 are"
        )));
    }
    // Name length, dimension count, one dimension, type and offset; key length, key, type, value.
    let tensor_count = cursor.count(
        MAX_TENSORS,
        8 + 1 + 4 + 8 + 4 + 8,
        Field::Header("tensor_count"),
    )?;
    let metadata_count = cursor.count(
        MAX_METADATA,
        8 + 1 + 4 + 1,
        Field::Header("metadata_kv_count"),
    )?;

    let metadata = metadata(&mut cursor, metadata_count)?;
    let alignment = alignment(bytes, &metadata)?;
    let (mut tensors, by_name) = tensor_infos(&mut cursor, tensor_count, alignment)?;
    place(&mut tensors, cursor.at as u64, alignment, file_len)?;
    Ok(Header {
        version,
        alignment,
        metadata,
        tensors,
        by_name,
    })
}

fn metadata(cursor: &mut Cursor<'_>, count: u64) -> Result<BTreeMap<String, Slot>, GgufError> {
    let mut metadata = BTreeMap::new();
    for index in 0..count {
        let field = Field::Metadata(index, "key");
        let key = cursor.name(MAX_KEY_BYTES, field)?;
        let slot = slot(cursor, key, index)?;
        if metadata.insert(key.to_owned(), slot).is_some() {
            return Err(field.bad(format_args!("{key:?} occurs twice")));
        }
    }
    Ok(metadata)
}

fn value_type(cursor: &mut Cursor<'_>, field: Field<'_>) -> Result<ValueType, GgufError> {
    let id = cursor.u32(field)?;
    ValueType::from_gguf(id)
        .ok_or_else(|| field.bad(format_args!("{id} is no metadata value type")))
}

fn slot(cursor: &mut Cursor<'_>, key: &str, index: u64) -> Result<Slot, GgufError> {
    let value_type_of = value_type(cursor, Field::Metadata(index, "value_type"))?;
    if value_type_of != ValueType::Array {
        let start = cursor.at;
        scalar(cursor, value_type_of, Field::Value(key))?;
        return Ok(Slot {
            kind: SlotKind::One(value_type_of),
            bytes: start..cursor.at,
        });
    }
    let element = value_type(cursor, Field::Metadata(index, "value.type"))?;
    if element == ValueType::Array {
        return Err(Field::Value(key).bad(NESTED));
    }
    // A string takes at least its length field.
    let least = element.fixed_bytes().unwrap_or(8) as u64;
    let len = cursor.count(u64::MAX, least, Field::Metadata(index, "value.len"))?;
    let start = cursor.at;
    match element.fixed_bytes() {
        Some(size) if element != ValueType::Bool => {
            cursor.take(len.saturating_mul(size as u64), Field::Value(key))?;
        }
        _ => {
            for i in 0..len {
                scalar(cursor, element, Field::Element(key, i))?;
            }
        }
    }
    // `len` is at most the file's length, which is a usize.
    let kind = SlotKind::Array {
        element,
        len: len as usize,
    };
    Ok(Slot {
        kind,
        bytes: start..cursor.at,
    })
}

/// Skips one scalar or string after checking it.
fn scalar(cursor: &mut Cursor<'_>, kind: ValueType, field: Field<'_>) -> Result<(), GgufError> {
    match kind {
        ValueType::String => {
            cursor.string(u64::MAX, field)?;
        }
        ValueType::Bool => {
            let [value] = cursor.array(field)?;
            if value > 1 {
                return Err(field.bad(format_args!("{value} is no boolean, it must be 0 or 1")));
            }
        }
        ValueType::Array => return Err(field.bad(NESTED)),
        other => {
            cursor.take(other.fixed_bytes().unwrap_or(0) as u64, field)?;
        }
    }
    Ok(())
}

fn alignment(bytes: &[u8], metadata: &BTreeMap<String, Slot>) -> Result<u64, GgufError> {
    let Some(slot) = metadata.get("general.alignment") else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let bad = || {
        Field::Header("general.alignment")
            .bad("must be a power of two between 8 and 65536, stored as u32")
    };
    let SlotKind::One(ValueType::U32) = slot.kind else {
        return Err(bad());
    };
    let bytes = bytes.get(slot.bytes.clone());
    let value = bytes.and_then(|bytes| value::decode(ValueType::U32, bytes)?.0.as_integer());
    let value = value.and_then(|value| u64::try_from(value).ok());
    let possible = |a: &u64| a.is_power_of_two() && (MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(a);
    value.filter(possible).ok_or_else(bad)
}

type Tensors = (Vec<TensorInfo>, BTreeMap<String, usize>);

fn tensor_infos(cursor: &mut Cursor<'_>, count: u64, alignment: u64) -> Result<Tensors, GgufError> {
    let mut tensors = Vec::new();
    let mut by_name = BTreeMap::new();
    for index in 0..count {
        let field = Field::TensorInfo(index, "name");
        let name = cursor.name(MAX_NAME_BYTES, field)?;
        let info = tensor_info(cursor, name, alignment)?;
        if by_name.insert(name.to_owned(), tensors.len()).is_some() {
            return Err(field.bad(format_args!("{name:?} occurs twice")));
        }
        tensors.push(info);
    }
    Ok((tensors, by_name))
}

fn tensor_info(
    cursor: &mut Cursor<'_>,
    name: &str,
    alignment: u64,
) -> Result<TensorInfo, GgufError> {
    let field = Field::Tensor(name, "n_dimensions");
    let count = cursor.u32(field)?;
    if count == 0 || count > MAX_DIMENSIONS {
        return Err(field.bad(DIMENSIONS));
    }
    let field = Field::Tensor(name, "dimensions");
    let mut dims = Vec::with_capacity(count as usize);
    for _ in 0..count {
        match cursor.u64(field)? {
            0 => return Err(field.bad(DIMENSIONS)),
            dim => dims.push(dim),
        }
    }
    let (columns, rest) = dims
        .split_first()
        .map_or((0, &[][..]), |(first, rest)| (*first, rest));
    let overflow = || field.bad(OVERFLOW);
    let rows = rest
        .iter()
        .try_fold(1u64, |n, dim| n.checked_mul(*dim))
        .ok_or_else(overflow)?;
    columns
        .checked_mul(rows)
        .filter(|n| i64::try_from(*n).is_ok())
        .ok_or_else(overflow)?;

    let type_field = Field::Tensor(name, "type");
    let id = cursor.u32(type_field)?;
    let unknown = || {
        type_field.bad(format_args!(
            "ggml has no tensor type {id}; the file may be newer than this program"
        ))
    };
    let dtype = TensorType::from_ggml(id).ok_or_else(unknown)?;
    if !columns.is_multiple_of(u64::from(dtype.block_values())) {
        return Err(field.bad(format_args!(
            "rows of {columns} values do not fill whole blocks of {dtype}"
        )));
    }
    let bytes = dtype
        .row_bytes(columns)
        .and_then(|row| row.checked_mul(rows))
        .ok_or_else(overflow)?;

    let field = Field::Tensor(name, "offset");
    let offset = cursor.u64(field)?;
    if !offset.is_multiple_of(alignment) {
        return Err(field.bad(format_args!(
            "offset {offset} is not a multiple of the alignment {alignment}"
        )));
    }
    Ok(TensorInfo {
        name: name.to_owned(),
        dims,
        dtype,
        offset,
        bytes,
    })
}

/// Turns offsets in the data section into offsets in the file. Checks that the tensors lie inside
/// the file, do not overlap, and that no bytes follow the last.
fn place(
    tensors: &mut [TensorInfo],
    header_end: u64,
    alignment: u64,
    file_len: u64,
) -> Result<(), GgufError> {
    let data_start = header_end
        .checked_next_multiple_of(alignment)
        .unwrap_or(u64::MAX);
    for info in tensors.iter_mut() {
        let end = data_start
            .checked_add(info.offset)
            .and_then(|at| at.checked_add(info.bytes));
        let field = Field::Tensor(&info.name, "offset");
        let end = end.ok_or_else(|| field.bad(OVERFLOW))?;
        if end > file_len {
            return Err(field.bad(format_args!(
                "the data of tensor {:?} ends {} bytes beyond the end of the file: it is truncated \
                 or damaged",
                info.name,
                end - file_len
            )));
        }
        info.offset = end - info.bytes;
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|info| info.offset);
    for pair in order.windows(2) {
        if let [first, second] = pair
            && first.offset + first.bytes > second.offset
        {
            return Err(Field::Header("tensor_infos.offset").bad(format_args!(
                "the data of tensors {:?} and {:?} overlap",
                first.name, second.name
            )));
        }
    }
    let last = order
        .last()
        .map_or(header_end, |info| info.offset + info.bytes);
    let padded = last.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    if file_len > padded {
        return Err(Field::Header("tensor_data").bad(format_args!(
            "{} unexpected bytes after the last tensor: the file is damaged",
            file_len - padded
        )));
    }
    Ok(())
}
