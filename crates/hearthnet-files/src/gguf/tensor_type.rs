//! Storage types of tensors.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Defines the type and its table: ggml's name and number, values per block, bytes per block.
macro_rules! tensor_types {
    ($(#[$attribute:meta])* $($name:ident $number:literal $values:literal $bytes:literal,)*) => {
        $(#[$attribute])*
        pub enum TensorType {
            $($name,)*
        }

        /// Type, number, name, values and bytes per block, in the order of declaration.
        const TABLE: &[(TensorType, u32, &str, u32, u32)] = &[
            $((TensorType::$name, $number, stringify!($name), $values, $bytes),)*
        ];
    };
}

tensor_types! {
    /// Storage type of a tensor, as numbered by ggml's `enum ggml_type`.
    ///
    /// Values come in blocks: [`block_values`](Self::block_values) values share
    /// [`block_bytes`](Self::block_bytes) bytes, and blocks never cross the end of a row. All of
    /// ggml's current types are known by name and size, so that any file can be read and described.
    /// [`is_supported`](Self::is_supported) tells which of them the engine computes with.
    ///
    /// Layouts of the supported types, all little-endian (source: ggml's `ggml-common.h`):
    ///
    /// | type | block | layout | value |
    /// |---|---|---|---|
    /// | `F32`, `F16` | 1 | IEEE 754 | itself |
    /// | `Q4_0` | 32 | `d: f16`, 16 bytes of nibbles | `d * (q - 8)` |
    /// | `Q4_1` | 32 | `d: f16`, `m: f16`, 16 bytes of nibbles | `d * q + m` |
    /// | `Q8_0` | 32 | `d: f16`, 32 `i8` | `d * q` |
    ///
    /// Byte `j` of the nibbles holds value `j` in its low half and value `j + 16` in its high half.
    /// The layouts of the other supported types are in `specs/canonical-arithmetic.md`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
    #[allow(non_camel_case_types)] // ggml's own spelling
    #[non_exhaustive]
    // The missing numbers (4, 5, 31 to 33, 36 to 38) belonged to types that ggml has removed.
    F32 0 1 4,
    F16 1 1 2,
    Q4_0 2 32 18,
    Q4_1 3 32 20,
    Q5_0 6 32 22,
    Q5_1 7 32 24,
    Q8_0 8 32 34,
    Q8_1 9 32 36,
    Q2_K 10 256 84,
    Q3_K 11 256 110,
    Q4_K 12 256 144,
    Q5_K 13 256 176,
    Q6_K 14 256 210,
    Q8_K 15 256 292,
    IQ2_XXS 16 256 66,
    IQ2_XS 17 256 74,
    IQ3_XXS 18 256 98,
    IQ1_S 19 256 50,
    IQ4_NL 20 32 18,
    IQ3_S 21 256 110,
    IQ2_S 22 256 82,
    IQ4_XS 23 256 136,
    I8 24 1 1,
    I16 25 1 2,
    I32 26 1 4,
    I64 27 1 8,
    F64 28 1 8,
    IQ1_M 29 256 56,
    BF16 30 1 2,
    TQ1_0 34 256 54,
    TQ2_0 35 256 66,
    MXFP4 39 32 17,
    NVFP4 40 64 36,
    Q1_0 41 128 18,
    Q2_0 42 64 18,
}

impl TensorType {
    /// Types that [`encode`](crate::quantize::encode) writes, widest first.
    pub const WRITABLE: [Self; 7] = [
        Self::F32,
        Self::F16,
        Self::Q8_0,
        Self::Q6_K,
        Self::Q4_1,
        Self::Q4_K,
        Self::Q4_0,
    ];

    /// List of the names, for messages.
    pub fn names(types: impl IntoIterator<Item = Self>) -> String {
        let names: Vec<&str> = types.into_iter().map(Self::name).collect();
        names.join(", ")
    }

    /// The type with this number in a GGUF file, if ggml has one.
    pub fn from_ggml(id: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// The number of this type in a GGUF file.
    pub fn ggml(self) -> u32 {
        self.row().1
    }

    /// ggml's name for the type, for example `Q4_1`.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Values per block, at least 1.
    pub fn block_values(self) -> u32 {
        self.row().3
    }

    /// Bytes per block, at least 1.
    #[inline]
    pub const fn block_bytes(self) -> u32 {
        self.row().4
    }

    /// Bytes of a row of `values` values; `None` if they do not fill whole blocks, or on overflow.
    pub fn row_bytes(self, values: u64) -> Option<u64> {
        let per_block = u64::from(self.block_values());
        if !values.is_multiple_of(per_block) {
            return None;
        }
        (values / per_block).checked_mul(u64::from(self.block_bytes()))
    }

    const fn row(self) -> &'static (Self, u32, &'static str, u32, u32) {
        &TABLE[self as usize]
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for TensorType {
    type Err = String;

    /// Reads ggml's name, in upper or lower case.
    fn from_str(s: &str) -> Result<Self, String> {
        let found = TABLE.iter().find(|row| row.2.eq_ignore_ascii_case(s));
        found.map(|row| row.0).ok_or_else(|| {
            let known = Self::names(Self::supported());
            format!("{s:?} is no tensor type; the engine knows {known}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_declaration_order_and_round_trips() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, index, "{}", row.2);
            assert_eq!(TensorType::from_ggml(row.1), Some(row.0));
            assert_eq!(row.0.name().parse::<TensorType>().as_ref(), Ok(&row.0));
            assert_eq!(
                row.0.name().to_lowercase().parse::<TensorType>().as_ref(),
                Ok(&row.0)
            );
            assert!(row.3 > 0 && row.4 > 0);
        }
    }

    #[test]
    fn removed_and_future_numbers_are_unknown() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38, 43, 1000, u32::MAX] {
            assert_eq!(TensorType::from_ggml(id), None, "{id}");
        }
    }

    #[test]
    fn a_row_is_whole_blocks_or_nothing() {
        assert_eq!(TensorType::Q4_1.row_bytes(64), Some(40));
        assert_eq!(TensorType::Q4_1.row_bytes(33), None);
        assert_eq!(TensorType::F32.row_bytes(3), Some(12));
        assert_eq!(TensorType::F64.row_bytes(u64::MAX), None);
    }
}
