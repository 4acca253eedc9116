//! Layers of one model continued by those of another give fluent nonsense, or worse. A stream
//! names the weights that it is for; the host serves exactly those or nothing, and for those only
//! layers that it has.

use ciborium::Value;
use hearthnet_transport::CloseCode;

use crate::raw::{Frame, cbor, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

fn open(stream: u32, weights: [u8; 32], (lo, hi): (u32, u32)) -> Frame {
    let body = cbor(&[
        ("stream", stream.into()),
        ("epoch", 1.into()),
        ("weights", Value::Bytes(weights.to_vec())),
        ("lo", lo.into()),
        ("hi", hi.into()),
        ("max_positions", 16.into()),
    ]);
    Frame::new(kind::STREAM_OPEN, body)
}

impl crate::Attack for Attack {
    const CASE: u8 = 29;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let target = *bench.target();
        let mut flipped = target.weights;
        flipped[31] ^= 1;
        let mut peer = bench.pipeline().await?;
        for (what, weights) in [
            ("weights that differ in one bit", flipped),
            ("weights of zeros", [0; 32]),
        ] {
            peer.send(open(1, weights, target.layers)).await;
            found.refused(what, "weights_mismatch", &peer.receive().await);
        }
        let (lo, hi) = target.layers;
        for (what, layers) in [
            ("one layer too many", (lo, hi + 1)),
            ("the last layer there can be", (u32::MAX, u32::MAX)),
            ("every layer there can be", (0, u32::MAX)),
        ] {
            peer.send(open(1, target.weights, layers)).await;
            found.refused(what, "bad_descriptor", &peer.receive().await);
        }
        peer.send(open(1, target.weights, (hi, lo))).await;
        let what = "layers that run backwards";
        found.ended(what, CloseCode::BodyMalformed, &peer.ending().await);
        Ok(found.verdict())
    }
}
