//! A few KiB of zstd can stand for many MiB. The size of a chunk is known before it is
//! decompressed, and that much room there is; whatever does not fill it exactly is refused.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, chunk, dtype, flag, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

/// Bytes of the tensor: one chunk, which is the last one.
const SIZE: u32 = 100_000;

/// What the bomb inflates to: more than the noise in the memory that is measured.
const BOMB: usize = 256 << 20;

pub(super) struct Attack;

fn zstd(data: &[u8]) -> Result<Vec<u8>, HarnessError> {
    Ok(zstd::bulk::compress(data, 1)?)
}

/// A zstd frame of raw blocks that declares no size (RFC 8878 section 3.1.1), so that only
/// decompressing tells how large it is.
fn of_unknown_size(data: &[u8], declared_window: u8) -> Vec<u8> {
    // Magic number; a descriptor without a content size; the window; one last raw block.
    let mut out = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, declared_window];
    let header = (data.len() as u32) << 3 | 1;
    out.extend_from_slice(&header.to_le_bytes()[..3]);
    out.extend_from_slice(data);
    out
}

impl crate::Attack for Attack {
    const CASE: u8 = 41;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let size = SIZE as usize;
        let good = zstd(&vec![7; size])?;
        let mut attacks = vec![
            ("a bomb of 256 MiB".to_owned(), zstd(&vec![0; BOMB])?),
            ("one byte more".to_owned(), zstd(&vec![7; size + 1])?),
            ("one byte less".to_owned(), zstd(&vec![7; size - 1])?),
            ("nothing at all".to_owned(), Vec::new()),
            ("what is not zstd".to_owned(), vec![0x55; 1000]),
            (
                "a frame cut short".to_owned(),
                good[..good.len() - 1].to_vec(),
            ),
            (
                "two frames".to_owned(),
                [zstd(&vec![7; size / 2])?, zstd(&vec![7; size / 2])?].concat(),
            ),
            ("a frame and a byte".to_owned(), [&good[..], &[0]].concat()),
            (
                "a skippable frame first".to_owned(),
                [&[0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0], &good[..]].concat(),
            ),
            (
                "a window of 3.75 TiB".to_owned(),
                of_unknown_size(&[0; 1000], 0xff),
            ),
            (
                "a frame of unknown, wrong size".to_owned(),
                of_unknown_size(&[0; 1000], 0x00),
            ),
        ];
        for version in 0x1e..=0x27 {
            let mut legacy = good.clone();
            if let Some(magic) = legacy.first_mut() {
                *magic = version;
            }
            attacks.push((format!("legacy magic {version:#04x}"), legacy));
        }
        let mut found = Findings::new();
        for (what, data) in attacks {
            let hello = bench.hello("pipeline")?.with_zstd();
            let mut peer = bench.session(&hello).await?;
            let body = chunk(1, dtype::I8, &[SIZE], &data);
            let flags = flag::COMPRESSED | flag::FINAL;
            peer.send(Frame::new(kind::TENSOR_DATA, body).flags(flags))
                .await;
            found.ended(what, CloseCode::Decompression, &peer.ending().await);
        }
        // Where nobody agreed to it, compression itself is what is wrong.
        let mut peer = bench.pipeline().await?;
        let body = chunk(1, dtype::I8, &[SIZE], &good);
        peer.send(Frame::new(kind::TENSOR_DATA, body).flags(flag::COMPRESSED | flag::FINAL))
            .await;
        let what = "compression that was not agreed on";
        found.ended(what, CloseCode::FrameUnknown, &peer.ending().await);
        Ok(found.verdict())
    }
}
