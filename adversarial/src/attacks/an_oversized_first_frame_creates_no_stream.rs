//! The first frame of a stream, or of a tensor, says how large it is going to be. What is too
//! large must be refused before anything is kept of it.

use ciborium::Value;
use hearthnet_transport::CloseCode;

use crate::raw::{Frame, Step, cbor, chunk, dtype, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 12;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let code = CloseCode::FrameTooBig;
        let buffer = bench.limits().recv_buffer_bytes;

        let open = cbor(&[
            ("stream", 1.into()),
            ("epoch", 1.into()),
            ("weights", Value::Bytes(vec![0; 8192])),
        ]);
        let mut peer = bench.pipeline().await?;
        peer.send(Frame::new(kind::STREAM_OPEN, open)).await;
        found.ended("a STREAM_OPEN of 8 KiB", code, &peer.ending().await);

        let announce = |rows, width| {
            let step = Step {
                rows,
                width,
                tensor: Some(1),
                data: Vec::new(),
                ..Step::default()
            };
            step.frame()
        };
        for (what, rows) in [
            ("a step of one row more than the buffer", buffer / 128 + 1),
            ("a step of 512 GiB", u32::MAX),
        ] {
            let mut peer = bench.pipeline().await?;
            peer.send(announce(rows, 64)).await;
            found.ended(what, code, &peer.ending().await);
        }

        for (what, dims) in [
            (
                "a tensor of one byte more than the buffer",
                vec![buffer + 1],
            ),
            ("a tensor of 16 EiB", vec![u32::MAX, u32::MAX]),
        ] {
            let mut peer = bench.pipeline().await?;
            let body = chunk(1, dtype::I8, &dims, &[0; 1024]);
            peer.send(Frame::new(kind::TENSOR_DATA, body)).await;
            found.ended(what, code, &peer.ending().await);
        }

        // Many that fit one by one, and not together.
        let mut peer = bench.pipeline().await?;
        let half = buffer / 2 / 128;
        for tensor in 1..=3 {
            let step = Step {
                rows: half,
                width: 64,
                tensor: Some(tensor),
                data: Vec::new(),
                ..Step::default()
            };
            peer.send(step.frame()).await;
        }
        let what = "three steps of half the buffer each";
        found.ended(what, CloseCode::BufferOverrun, &peer.ending().await);
        Ok(found.verdict())
    }
}
