//! Body of TENSOR_DATA: tensor id, element type and dimensions, then the chunk's data.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 2 | tensor id |
//! | 2 | 1 | element type: 1 fp16, 2 fp32, 3 bf16, 4 int8 |
//! | 3 | 1 | rank, 1 to 8 |
//! | 4 | 4 x rank | dimensions of the whole tensor, outermost first |
//! | 4 + 4 x rank | rest | data |

use bytes::Buf as _;

use super::{Flags, FrameBuf, FrameType};
use crate::code::{CloseCode, Violation};
use crate::tensor::{DType, Dims, MAX_RANK};

/// Longest header of a chunk body.
pub(crate) const MAX_CHUNK_HEADER_BYTES: usize = 4 + 4 * MAX_RANK;

/// Header of a chunk's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkHead {
    pub(crate) tensor: u16,
    pub(crate) dtype: DType,
    pub(crate) dims: Dims,
}

impl ChunkHead {
    /// Frame of one chunk.
    pub(crate) fn frame(&self, data: &[u8], flags: Flags) -> FrameBuf {
        let dims = self.dims.as_slice();
        let mut frame = FrameBuf::with_capacity(4 + 4 * dims.len() + data.len());
        let body = frame.body();
        body.extend_from_slice(&self.tensor.to_be_bytes());
        body.push(self.dtype as u8);
        // A rank is at most 8.
        body.push(dims.len() as u8);
        for dim in dims {
            body.extend_from_slice(&dim.to_be_bytes());
        }
        body.extend_from_slice(data);
        frame.finish(FrameType::TensorData, flags)
    }

    /// Splits a chunk body into its header and data.
    ///
    /// # Errors
    /// `tensor_shape` for an invalid element type, rank or dimension, `body_malformed` if the body
    /// ends early.
    pub(crate) fn read(mut body: &[u8]) -> Result<(ChunkHead, &[u8]), Violation> {
        let tensor = body.try_get_u16()?;
        let dtype = DType::from_wire(body.try_get_u8()?)?;
        let rank = usize::from(body.try_get_u8()?);
        let mut dims = [0u32; MAX_RANK];
        let Some(sizes) = dims.get_mut(..rank) else {
            return Err(CloseCode::TensorShape.violation("the rank must be 1 to 8"));
        };
        for size in sizes.iter_mut() {
            *size = body.try_get_u32()?;
        }
        let dims = Dims::new(sizes)?;
        let head = ChunkHead {
            tensor,
            dtype,
            dims,
        };
        Ok((head, body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{HEADER_BYTES, Header};

    #[test]
    fn the_chunk_body_has_the_documented_layout_for_every_type_and_rank() {
        for dtype in DType::ALL {
            for rank in 1..=MAX_RANK {
                let sizes: Vec<u32> = (0..rank as u32).map(|i| 0x0102_0304 + i).collect();
                let head = ChunkHead {
                    tensor: 0xabcd,
                    dtype,
                    dims: Dims::new(&sizes).unwrap(),
                };
                let message = head.frame(&[7, 8, 9], Flags::FINAL).into_bytes(3);
                let (header, body) = Header::decode(&message).unwrap();
                assert_eq!(header.kind, FrameType::TensorData);
                assert_eq!(header.flags, Flags::FINAL);
                assert_eq!(message.len(), HEADER_BYTES + 4 + 4 * rank + 3);
                assert_eq!(body[..4], [0xab, 0xcd, dtype as u8, rank as u8]);
                for (i, size) in sizes.iter().enumerate() {
                    assert_eq!(body[4 + 4 * i..8 + 4 * i], size.to_be_bytes());
                }
                assert_eq!(ChunkHead::read(body).unwrap(), (head, &[7u8, 8, 9][..]));
            }
        }
    }

    #[test]
    fn shapes_that_do_not_exist_are_refused() {
        for (body, code) in [
            (&[0, 1, 0, 1, 0, 0, 0, 1][..], CloseCode::TensorShape), // element type 0
            (&[0, 1, 5, 1, 0, 0, 0, 1], CloseCode::TensorShape),     // element type 5
            (&[0, 1, 1, 0], CloseCode::TensorShape),                 // rank 0
            (&[0, 1, 1, 9], CloseCode::TensorShape),                 // rank 9
            (&[0, 1, 1, 255], CloseCode::TensorShape),               // rank 255
            (&[0, 1, 1, 1, 0, 0, 0, 0], CloseCode::TensorShape),     // dimension 0
            (&[0, 1, 1, 2, 0, 0, 0, 1], CloseCode::BodyMalformed),   // cut off
            (&[0], CloseCode::BodyMalformed),
        ] {
            assert_eq!(ChunkHead::read(body).unwrap_err().code, code, "{body:?}");
        }
    }

    #[test]
    fn a_product_of_dimensions_that_overflows_is_refused() {
        let dims = Dims::new(&[u32::MAX; 3]).unwrap();
        assert_eq!(
            dims.bytes(DType::F32).unwrap_err().code,
            CloseCode::TensorShape
        );
    }
}
