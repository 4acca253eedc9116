//! Every frame has states in which it may come, and a side that may send it. Before HELLO nobody
//! is known to be allowed anything, so nothing but HELLO may come, however well formed.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, Step, cbor, chunk, dtype, flag, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

/// Well-formed frames of every type but HELLO and BYE, which may come first.
fn well_formed(bench: &Bench) -> Vec<(&'static str, Frame)> {
    let life = || cbor(&[("stream", 1.into()), ("epoch", 1.into())]);
    let tensor = cbor(&[("tensor", 1.into())]);
    let ack = cbor(&[("tensor", 1.into()), ("chunks", 1.into())]);
    let nack = cbor(&[("tensor", 1.into()), ("code", "x".into())]);
    let cut = cbor(&[
        ("stream", 1.into()),
        ("epoch", 1.into()),
        ("position", 0.into()),
    ]);
    let data = chunk(1, dtype::I8, &[4], &[0; 4]);
    vec![
        (
            "TENSOR_DATA",
            Frame::new(kind::TENSOR_DATA, data).flags(flag::FINAL),
        ),
        ("TENSOR_END", Frame::new(kind::TENSOR_END, tensor)),
        ("ACK", Frame::new(kind::ACK, ack)),
        ("NACK", Frame::new(kind::NACK, nack)),
        (
            "FLOWCTL",
            Frame::new(kind::FLOWCTL, cbor(&[("grant", 1.into())])),
        ),
        ("PING", Frame::ping()),
        ("PONG", Frame::new(kind::PONG, [0; 8])),
        ("STREAM_OPEN", bench.stream_open(1)),
        ("STREAM_CLOSE", Frame::new(kind::STREAM_CLOSE, life())),
        ("STEP", Step::default().frame()),
        ("TRUNCATE", Frame::new(kind::TRUNCATE, cut)),
        ("DESCRIBE", Frame::new(kind::DESCRIBE, [])),
        ("STREAM_OPENED", Frame::new(kind::STREAM_OPENED, life())),
    ]
}

/// What only a host may say.
fn of_a_host() -> Vec<(&'static str, Frame)> {
    let life = [("stream", 1.into()), ("epoch", 1.into())];
    let error = cbor(&[
        ("stream", 1.into()),
        ("epoch", 1.into()),
        ("code", "x".into()),
        ("message", "x".into()),
    ]);
    vec![
        (
            "STREAM_OPENED",
            Frame::new(kind::STREAM_OPENED, cbor(&life)),
        ),
        ("STEP_RESULT", Frame::new(kind::STEP_RESULT, [0; 42])),
        ("STREAM_ERROR", Frame::new(kind::STREAM_ERROR, error)),
        ("DESCRIPTOR", Frame::new(kind::DESCRIPTOR, [0xa0])),
        (
            "LEAVING",
            Frame::new(kind::LEAVING, cbor(&[("within_ms", 1.into())])),
        ),
    ]
}

impl crate::Attack for Attack {
    const CASE: u8 = 4;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let wrong = CloseCode::ProtocolState;
        for (name, frame) in well_formed(bench) {
            let mut peer = bench.upgraded().await?;
            peer.send(frame).await;
            found.ended(format!("{name} before HELLO"), wrong, &peer.ending().await);
        }
        for (name, frame) in of_a_host() {
            let mut peer = bench.stream().await?;
            peer.send(frame).await;
            found.ended(format!("{name} from a caller"), wrong, &peer.ending().await);
        }
        let mut peer = bench.stream().await?;
        peer.send(bench.hello("pipeline")?.frame()).await;
        found.ended("a second HELLO", wrong, &peer.ending().await);
        let mut peer = bench.stream().await?;
        peer.send(Frame::new(kind::PONG, [0; 8])).await;
        found.ended("a PONG without a PING", wrong, &peer.ending().await);
        let mut peer = bench.stream().await?;
        let tensor = chunk(1, dtype::I8, &[4], &[0; 4]);
        peer.send(Frame::new(kind::TENSOR_DATA, tensor).flags(flag::FINAL))
            .await;
        found.ended("a tensor of no step", wrong, &peer.ending().await);

        // On a stream that was never opened only the stream is refused.
        let mut peer = bench.pipeline().await?;
        let step = Step {
            width: bench.target().width,
            data: vec![0; bench.target().width as usize * 2],
            ..Step::default()
        };
        peer.send(step.frame()).await;
        let answer = peer.receive().await;
        found.refused("a step of no stream", "unknown_stream", &answer);
        Ok(found.verdict())
    }
}
