//! Metadata values: small scalars, strings and arrays, read straight from the file.

use std::fmt;

/// Type of a metadata value, as numbered by `gguf_metadata_value_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

use ValueType as V;

/// Type, name in messages, and bytes of a value; `None` for strings and arrays, whose length is
/// stored.
const TABLE: [(ValueType, &str, Option<usize>); 13] = [
    (V::U8, "u8", Some(1)),
    (V::I8, "i8", Some(1)),
    (V::U16, "u16", Some(2)),
    (V::I16, "i16", Some(2)),
    (V::U32, "u32", Some(4)),
    (V::I32, "i32", Some(4)),
    (V::F32, "f32", Some(4)),
    (V::Bool, "bool", Some(1)),
    (V::String, "string", None),
    (V::Array, "array", None),
    (V::U64, "u64", Some(8)),
    (V::I64, "i64", Some(8)),
    (V::F64, "f64", Some(8)),
];

impl ValueType {
    /// The type with this number in a GGUF file.
    pub fn from_gguf(id: u32) -> Option<Self> {
        Some(TABLE.get(usize::try_from(id).ok()?)?.0)
    }

    /// The number of this type in a GGUF file.
    pub fn gguf(self) -> u32 {
        self as u32
    }

    /// Bytes of one value; `None` for strings and arrays, whose length is stored.
    pub fn fixed_bytes(self) -> Option<usize> {
        // The table is in the order of the numbers.
        TABLE[self as usize].2
    }

    /// Name in messages.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }
}

/// A metadata value. Strings and arrays borrow from the file.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// The value's type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The value as an integer, from any integer type. (Converters disagree about the widths.)
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value as a float, from either float type.
    pub fn as_float(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is a boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is a string.
    pub fn as_str(&self) -> Option<&'a str> {
        match *self {
            Self::String(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is an array.
    pub fn as_array(&self) -> Option<Array<'a>> {
        match *self {
            Self::Array(v) => Some(v),
            _ => None,
        }
    }
}

/// Type and, where short, content: for messages. Strings are quoted, escaped and cut.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.value_type().name();
        match self {
            Self::Bool(v) => write!(f, "{v} ({name})"),
            Self::F32(v) => write!(f, "{v} ({name})"),
            Self::F64(v) => write!(f, "{v} ({name})"),
            Self::String(v) => {
                let short: String = v.chars().take(60).collect();
                let dots = if short.len() < v.len() { "..." } else { "" };
                write!(f, "{short:?}{dots} ({name})")
            }
            Self::Array(v) => write!(f, "an array of {} {}", v.len(), v.element_type().name()),
            other => write!(f, "{} ({name})", other.as_integer().unwrap_or_default()),
        }
    }
}

/// Array in the file. Iteration decodes it in place, without a copy.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// `bytes` must be exactly the `len` encoded elements; the reader has checked them.
    pub(super) fn new(element: ValueType, len: usize, bytes: &'a [u8]) -> Self {
        Self {
            element,
            len,
            bytes,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Type of every element; never [`ValueType::Array`].
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// The elements, in order.
    pub fn iter(&self) -> ArrayIter<'a> {
        ArrayIter {
            element: self.element,
            left: self.len,
            bytes: self.bytes,
        }
    }

    /// The elements, if they are strings.
    pub fn strings(&self) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
        (self.element == ValueType::String)
            .then(|| self.iter().map(|value| value.as_str().unwrap_or_default()))
    }

    /// The elements, if they are integers of any width.
    pub fn integers(&self) -> Option<impl Iterator<Item = i128> + use<'a>> {
        matches!(
            self.element,
            V::U8 | V::I8 | V::U16 | V::I16 | V::U32 | V::I32 | V::U64 | V::I64
        )
        .then(|| {
            self.iter()
                .map(|value| value.as_integer().unwrap_or_default())
        })
    }

    /// The elements, if they are floats of either width.
    pub fn floats(&self) -> Option<impl Iterator<Item = f64> + use<'a>> {
        matches!(self.element, ValueType::F32 | ValueType::F64).then(|| {
            self.iter()
                .map(|value| value.as_float().unwrap_or_default())
        })
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}; {}]", self.element.name(), self.len)
    }
}

/// Iterator over the elements of an [`Array`].
#[derive(Clone, Debug)]
pub struct ArrayIter<'a> {
    element: ValueType,
    left: usize,
    bytes: &'a [u8],
}

impl<'a> Iterator for ArrayIter<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        // The reader has decoded the whole array once, so this cannot fail. If the file is changed
        // under the map, iteration ends early.
        let (value, rest) = decode(self.element, self.bytes)?;
        self.bytes = rest;
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

/// Decodes one scalar or string from the front of `bytes`; `None` if it is truncated or invalid.
pub(super) fn decode(value_type: ValueType, bytes: &[u8]) -> Option<(Value<'_>, &[u8])> {
    fn take<const N: usize>(bytes: &[u8]) -> Option<([u8; N], &[u8])> {
        bytes
            .split_first_chunk::<N>()
            .map(|(head, rest)| (*head, rest))
    }
    Some(match value_type {
        ValueType::U8 => take(bytes).map(|(b, r)| (Value::U8(u8::from_le_bytes(b)), r))?,
        ValueType::I8 => take(bytes).map(|(b, r)| (Value::I8(i8::from_le_bytes(b)), r))?,
        ValueType::U16 => take(bytes).map(|(b, r)| (Value::U16(u16::from_le_bytes(b)), r))?,
        ValueType::I16 => take(bytes).map(|(b, r)| (Value::I16(i16::from_le_bytes(b)), r))?,
        ValueType::U32 => take(bytes).map(|(b, r)| (Value::U32(u32::from_le_bytes(b)), r))?,
        ValueType::I32 => take(bytes).map(|(b, r)| (Value::I32(i32::from_le_bytes(b)), r))?,
        ValueType::F32 => take(bytes).map(|(b, r)| (Value::F32(f32::from_le_bytes(b)), r))?,
        ValueType::U64 => take(bytes).map(|(b, r)| (Value::U64(u64::from_le_bytes(b)), r))?,
        ValueType::I64 => take(bytes).map(|(b, r)| (Value::I64(i64::from_le_bytes(b)), r))?,
        ValueType::F64 => take(bytes).map(|(b, r)| (Value::F64(f64::from_le_bytes(b)), r))?,
        ValueType::Bool => match take::<1>(bytes)? {
            ([0], rest) => (Value::Bool(false), rest),
            ([1], rest) => (Value::Bool(true), rest),
            _ => return None,
        },
        ValueType::String => {
            let (len, rest) = take(bytes)?;
            let len = usize::try_from(u64::from_le_bytes(len)).ok()?;
            let (text, rest) = rest.split_at_checked(len)?;
            (Value::String(std::str::from_utf8(text).ok()?), rest)
        }
        ValueType::Array => return None,
    })
}
