//! Metadata values: small scalars, strings and arrays, read straight from the file.

use std::fmt;

/// Defines [`ValueType`] and [`Value`]: of each number the number in a GGUF file, the variant and
/// the type, first of integers, then of floats.
macro_rules! values {
    (
        $($int_id:literal $int:ident $int_type:ident,)* ;
        $($float_id:literal $float:ident $float_type:ident,)*
    ) => {
        /// Type of a metadata value, as numbered by `gguf_metadata_value_type`.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum ValueType {
            $($int = $int_id,)*
            $($float = $float_id,)*
            Bool = 7,
            String = 8,
            Array = 9,
        }

        impl ValueType {
            const ALL: &[Self] = &[
                $(Self::$int,)* $(Self::$float,)* Self::Bool, Self::String, Self::Array,
            ];

            /// Bytes of one value; `None` for strings and arrays, whose length is stored.
            pub fn fixed_bytes(self) -> Option<usize> {
                match self {
                    $(Self::$int => Some(size_of::<$int_type>()),)*
                    $(Self::$float => Some(size_of::<$float_type>()),)*
                    Self::Bool => Some(1),
                    Self::String | Self::Array => None,
                }
            }

            fn is_integer(self) -> bool {
                matches!(self, $(Self::$int)|*)
            }

            fn is_float(self) -> bool {
                matches!(self, $(Self::$float)|*)
            }

            /// Name in messages.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$int => stringify!($int_type),)*
                    $(Self::$float => stringify!($float_type),)*
                    Self::Bool => "bool",
                    Self::String => "string",
                    Self::Array => "array",
                }
            }
        }

        /// A metadata value. Strings and arrays borrow from the file.
        #[derive(Clone, Copy, PartialEq, Debug)]
        pub enum Value<'a> {
            $($int($int_type),)*
            $($float($float_type),)*
            Bool(bool),
            String(&'a str),
            Array(Array<'a>),
        }

        impl Value<'_> {
            /// The value's type.
            pub fn value_type(&self) -> ValueType {
                match self {
                    $(Self::$int(_) => ValueType::$int,)*
                    $(Self::$float(_) => ValueType::$float,)*
                    Self::Bool(_) => ValueType::Bool,
                    Self::String(_) => ValueType::String,
                    Self::Array(_) => ValueType::Array,
                }
            }

            /// The value as an integer, from any integer type. (Converters disagree about the
            /// widths.)
            pub fn as_integer(&self) -> Option<i128> {
                match *self {
                    $(Self::$int(value) => Some(value.into()),)*
                    _ => None,
                }
            }

            /// The value as a float, from either float type.
            pub fn as_float(&self) -> Option<f64> {
                match *self {
                    $(Self::$float(value) => Some(value.into()),)*
                    _ => None,
                }
            }
        }

        /// Decodes one scalar or string from the front of `bytes`; `None` if it is truncated or
        /// invalid.
        pub(super) fn decode(value_type: ValueType, bytes: &[u8]) -> Option<(Value<'_>, &[u8])> {
            Some(match value_type {
                $(ValueType::$int => {
                    let (value, rest) = bytes.split_first_chunk()?;
                    (Value::$int($int_type::from_le_bytes(*value)), rest)
                })*
                $(ValueType::$float => {
                    let (value, rest) = bytes.split_first_chunk()?;
                    (Value::$float($float_type::from_le_bytes(*value)), rest)
                })*
                ValueType::Bool => match bytes.split_first()? {
                    (0, rest) => (Value::Bool(false), rest),
                    (1, rest) => (Value::Bool(true), rest),
                    _ => return None,
                },
                ValueType::String => {
                    let (len, rest) = bytes.split_first_chunk()?;
                    let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
                    let (text, rest) = rest.split_at_checked(len)?;
                    (Value::String(std::str::from_utf8(text).ok()?), rest)
                }
                ValueType::Array => return None,
            })
        }

        /// Appends a scalar or string; the writer has its own code for arrays.
        pub(super) fn encode(value: Value<'_>, out: &mut Vec<u8>) {
            match value {
                $(Value::$int(value) => out.extend(value.to_le_bytes()),)*
                $(Value::$float(value) => out.extend(value.to_le_bytes()),)*
                Value::Bool(value) => out.push(u8::from(value)),
                Value::String(text) => {
                    out.extend((text.len() as u64).to_le_bytes());
                    out.extend(text.as_bytes());
                }
                Value::Array(_) => {}
            }
        }
    };
}

values! {
    0 U8 u8,
    1 I8 i8,
    2 U16 u16,
    3 I16 i16,
    4 U32 u32,
    5 I32 i32,
    10 U64 u64,
    11 I64 i64,
    ;
    6 F32 f32,
    12 F64 f64,
}

impl ValueType {
    /// The type with this number in a GGUF file.
    pub fn from_gguf(id: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|known| known.gguf() == id)
    }

    /// The number of this type in a GGUF file.
    pub fn gguf(self) -> u32 {
        self as u32
    }
}

impl<'a> Value<'a> {
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
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (element, mut rest) = (self.element, self.bytes);
        // The reader has decoded the whole array once, so this cannot fail. If the file is changed
        // under the map, iteration ends early.
        (0..self.len).map_while(move |_| {
            let (value, after) = decode(element, rest)?;
            rest = after;
            Some(value)
        })
    }

    /// The elements, if they are strings.
    pub fn strings(&self) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
        let strings = self.iter().filter_map(|value| value.as_str());
        (self.element == ValueType::String).then_some(strings)
    }

    /// The elements, if they are integers of any width.
    pub fn integers(&self) -> Option<impl Iterator<Item = i128> + use<'a>> {
        let integers = self.iter().filter_map(|value| value.as_integer());
        self.element.is_integer().then_some(integers)
    }

    /// The elements, if they are floats of either width.
    pub fn floats(&self) -> Option<impl Iterator<Item = f64> + use<'a>> {
        let floats = self.iter().filter_map(|value| value.as_float());
        self.element.is_float().then_some(floats)
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}; {}]", self.element.name(), self.len)
    }
}
