//! Element types, dimensions, and standalone tensors.

use std::fmt;

use bytes::Bytes;
use serde::Serialize;

use crate::code::{CloseCode, Violation};

/// Type of the elements of a tensor on the wire. All are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, strum::FromRepr)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary16.
    F16 = 1,
    /// IEEE 754 binary32.
    F32 = 2,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 3,
    /// Signed 8-bit integer.
    I8 = 4,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 4] = [DType::F16, DType::F32, DType::Bf16, DType::I8];

    /// Element type for a descriptor's `boundary_dtype`; `None` for unknown names.
    pub fn of_rows(boundary_dtype: &str) -> Option<DType> {
        match boundary_dtype {
            "fp16" => Some(DType::F16),
            "bf16" => Some(DType::Bf16),
            "fp32" => Some(DType::F32),
            _ => None,
        }
    }

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
            DType::I8 => 1,
        }
    }

    pub(crate) fn from_wire(byte: u8) -> Result<DType, Violation> {
        DType::from_repr(byte).ok_or_else(|| {
            CloseCode::TensorShape.violation(format!("element type {byte} does not exist"))
        })
    }
}

/// Limit of a tensor's dimensions.
pub const MAX_RANK: usize = 8;

/// Dimensions of a tensor: rank 1 to 8, none of them zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    rank: u8,
    sizes: [u32; MAX_RANK],
}

impl Dims {
    /// Dimensions from a slice, outermost first.
    ///
    /// # Errors
    /// `tensor_shape` when the rank is not 1 to 8 or a dimension is zero.
    pub fn new(dims: &[u32]) -> Result<Dims, Violation> {
        let shape = |detail| Err(CloseCode::TensorShape.violation(detail));
        let rank = match u8::try_from(dims.len()) {
            Ok(rank @ 1..=8) => rank,
            _ => return shape("the rank must be 1 to 8"),
        };
        if dims.contains(&0) {
            return shape("no dimension may be zero");
        }
        let mut sizes = [0; MAX_RANK];
        for (to, from) in sizes.iter_mut().zip(dims) {
            *to = *from;
        }
        Ok(Dims { rank, sizes })
    }

    /// The dimensions, outermost first.
    pub fn as_slice(&self) -> &[u32] {
        self.sizes.get(..usize::from(self.rank)).unwrap_or(&[])
    }

    /// Bytes of a dense tensor of these dimensions.
    ///
    /// # Errors
    /// `tensor_shape` when the product does not fit 64 bits.
    pub fn bytes(&self, dtype: DType) -> Result<u64, Violation> {
        self.as_slice()
            .iter()
            .try_fold(dtype.size() as u64, |bytes, &dim| {
                bytes.checked_mul(u64::from(dim))
            })
            .ok_or_else(|| {
                CloseCode::TensorShape.violation("the product of the dimensions overflows")
            })
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

/// A dense tensor that belongs to no step, such as an exported KV prefix.
///
/// Its `Debug` output names the shape, never the data.
#[derive(Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub dims: Dims,
    /// The elements, row-major, little-endian: exactly `dims.bytes(dtype)` bytes.
    pub data: Bytes,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("dtype", &self.dtype)
            .field("dims", &self.dims)
            .finish_non_exhaustive()
    }
}
