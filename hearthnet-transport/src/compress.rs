//! zstd for tensor chunks: one frame per chunk, into and out of buffers of a known size.

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe;

use crate::code::{CloseCode, Violation};

/// First bytes of a zstd frame (RFC 8878); legacy formats and skippable frames begin otherwise.
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Level 1: the wire is a LAN; a slower level would cost more than the bytes it saves.
const LEVEL: i32 = 1;

/// Size of the sample that is tried first. Activations often do not compress at all.
const SAMPLE_BYTES: usize = 32 * 1024;

pub(crate) struct ChunkCompressor(Compressor<'static>);

impl ChunkCompressor {
    /// Returns a compressor for `tensor`, or `None` if a sample of it does not compress.
    pub(crate) fn for_tensor(tensor: &[u8]) -> Option<ChunkCompressor> {
        let mut compressor = ChunkCompressor(Compressor::new(LEVEL).ok()?);
        let sample = tensor.get(..SAMPLE_BYTES).unwrap_or(tensor);
        compressor.chunk(sample).map(|_| compressor)
    }

    /// The chunk as one zstd frame, or `None` if that is not at least a sixteenth smaller: it would
    /// not be worth the peer's time.
    pub(crate) fn chunk(&mut self, chunk: &[u8]) -> Option<Vec<u8>> {
        let compressed = self.0.compress(chunk).ok()?;
        (compressed.len() <= chunk.len() - chunk.len() / 16).then_some(compressed)
    }
}

/// Decompresses chunks into space of a known size.
#[derive(Default)]
pub(crate) struct ChunkDecompressor(Option<Decompressor<'static>>);

impl ChunkDecompressor {
    /// Appends exactly `expected` bytes to `out`.
    ///
    /// # Errors
    /// `decompression` unless `chunk` is one zstd frame (RFC 8878, no dictionary) of exactly
    /// `expected` bytes. Nothing is allocated beyond `expected`, whatever the frame declares.
    pub(crate) fn append(
        &mut self,
        chunk: &[u8],
        expected: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let fail = |detail: &'static str| CloseCode::Decompression.violation(detail);
        if !chunk.starts_with(&MAGIC) {
            return Err(fail("the chunk is not a zstd frame"));
        }
        // The library would also decode further frames after the first.
        if zstd_safe::find_frame_compressed_size(chunk) != Ok(chunk.len()) {
            return Err(fail("the chunk is not exactly one zstd frame"));
        }
        let decompressor = match &mut self.0 {
            Some(decompressor) => decompressor,
            none => {
                none.insert(Decompressor::new().map_err(|_| fail("no memory for a decompressor"))?)
            }
        };
        let begin = out.len();
        out.resize(begin + expected, 0);
        let target = out.get_mut(begin..).unwrap_or_default();
        match decompressor.decompress_to_buffer(chunk, target) {
            Ok(written) if written == expected => Ok(()),
            Ok(_) => Err(fail("the chunk decompresses to less than expected")),
            Err(_) => Err(fail(
                "the chunk is damaged or decompresses to more than expected",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decompress(chunk: &[u8], expected: usize) -> Result<Vec<u8>, CloseCode> {
        let mut out = vec![1, 2, 3];
        ChunkDecompressor::default()
            .append(chunk, expected, &mut out)
            .map(|()| out.split_off(3))
            .map_err(|violation| violation.code)
    }

    fn zstd_frame(data: &[u8]) -> Vec<u8> {
        Compressor::new(LEVEL).unwrap().compress(data).unwrap()
    }

    #[test]
    fn only_compressible_tensors_are_compressed() {
        let zeros = vec![0u8; 100_000];
        let mut compressor = ChunkCompressor::for_tensor(&zeros).unwrap();
        let chunk = compressor.chunk(&zeros).unwrap();
        assert!(chunk.len() < 1000);
        assert_eq!(decompress(&chunk, zeros.len()), Ok(zeros));

        let mut noise = vec![0u8; 100_000];
        getrandom::fill(&mut noise).unwrap();
        assert!(ChunkCompressor::for_tensor(&noise).is_none());
    }

    #[test]
    fn a_bomb_is_refused_without_inflating_it() {
        // 64 MiB of zeros in a few KiB, declared as a chunk of 1,000 bytes.
        let bomb = zstd_frame(&vec![0u8; 64 << 20]);
        assert!(bomb.len() < 16 << 10);
        assert_eq!(decompress(&bomb, 1000), Err(CloseCode::Decompression));
    }

    #[test]
    fn a_wrong_size_is_refused() {
        let chunk = zstd_frame(&[7; 1000]);
        assert_eq!(decompress(&chunk, 999), Err(CloseCode::Decompression));
        assert_eq!(decompress(&chunk, 1001), Err(CloseCode::Decompression));
        assert!(decompress(&chunk, 1000).is_ok());
    }

    #[test]
    fn other_formats_and_trailing_frames_are_refused() {
        let chunk = zstd_frame(&[7; 1000]);
        for version in 0x22..=0x27u8 {
            let mut legacy = chunk.clone();
            legacy[0] = version; // magic numbers of zstd 0.2 to 0.7
            assert_eq!(decompress(&legacy, 1000), Err(CloseCode::Decompression));
        }
        let mut skippable = vec![0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0];
        skippable.extend_from_slice(&chunk);
        assert_eq!(decompress(&skippable, 1000), Err(CloseCode::Decompression));
        let twice = [zstd_frame(&[7; 500]), zstd_frame(&[7; 500])].concat();
        assert_eq!(decompress(&twice, 1000), Err(CloseCode::Decompression));
        let mut trailing = chunk.clone();
        trailing.push(0);
        assert_eq!(decompress(&trailing, 1000), Err(CloseCode::Decompression));
        assert_eq!(
            decompress(&chunk[..chunk.len() - 1], 1000),
            Err(CloseCode::Decompression)
        );
        assert_eq!(decompress(&[], 1000), Err(CloseCode::Decompression));
    }

    proptest! {
        #[test]
        fn damaged_frames_never_panic(
            data in prop::collection::vec(0u8..4, 1..4000),
            at in any::<prop::sample::Index>(),
            flip in 1u8..=255,
        ) {
            let mut chunk = zstd_frame(&data);
            let at = at.index(chunk.len());
            chunk[at] ^= flip;
            // Without a checksum a flip may also yield other data of the right length.
            let _ = decompress(&chunk, data.len());
        }
    }
}
