//! Checks the worked examples of `specs/x08-tensor-transport.md` against the codec.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use bytes::Bytes;

use super::cbor::Body as _;
use super::chunk::ChunkHead;
use super::control::{self, Ack, Bye, FlowCtl, Hello, Limits, Nack, TensorEnd};
use super::pipeline::{self, Place, rows_frame};
use super::{Flags, FrameBuf, FrameType, HEADER_BYTES, Header};
use crate::code::CloseCode;
use crate::config::Config;
use crate::message::{
    Fork, Message, Receipt, Step, StepResult, StreamClose, StreamError, StreamOpen, StreamOpened,
    Truncate, Truncated, Want,
};
use crate::tensor::{DType, Dims};

const SPEC: &str = include_str!("../../../specs/x08-tensor-transport.md");

/// Examples of the specification: name and bytes.
fn examples() -> Vec<(&'static str, Vec<u8>)> {
    SPEC.split("```hex ")
        .skip(1)
        .map(|block| {
            let (name, rest) = block.split_once('\n').unwrap();
            let (text, _) = rest.split_once("```").unwrap();
            let digits: String = text.split_whitespace().collect();
            (name, hex::decode(digits).unwrap())
        })
        .collect()
}

/// A step whose rows are elsewhere.
fn step(position: u32, rows: u32, width: u32, want: Want) -> Step {
    Step {
        stream: 7,
        epoch: 0,
        position,
        rows,
        width,
        dtype: DType::F16,
        want,
        data: Bytes::new(),
    }
}

fn message(message: Message) -> FrameBuf {
    pipeline::frame(&message).unwrap()
}

fn f16(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| half::f16::from_f32(value).to_le_bytes())
        .collect()
}

/// Sequence number and codec output for an example.
fn encoded(name: &str) -> Option<(u32, FrameBuf)> {
    let limits = Limits::of(&Config::default());
    let hello = Hello {
        purpose: "pipeline".into(),
        token: vec![0xaa; 4],
        agent: "example/1".into(),
    };
    let (stream, epoch) = (7, 0);
    let open = StreamOpen {
        stream,
        epoch,
        weights: std::array::from_fn(|i| i as u8),
        lo: 0,
        hi: 14,
        max_positions: 512,
        fork: None,
    };
    let truncate = |position, answer| {
        message(Message::Truncate(Truncate {
            stream,
            epoch,
            position,
            answer,
        }))
    };
    let frame = match name {
        "hello-caller" => (1, control::client_hello(&hello, limits)),
        "hello-host" => (1, control::server_hello("example/1", limits)),
        "ping" => (2, control::ping(FrameType::Ping, 1)),
        "pong" => (2, control::ping(FrameType::Pong, 1)),
        "stream-open" => (3, message(Message::StreamOpen(open))),
        "stream-fork" => {
            let open = StreamOpen {
                stream: 8,
                fork: Some(Fork {
                    stream,
                    epoch,
                    position: 65,
                }),
                ..open
            };
            (6, message(Message::StreamOpen(open)))
        }
        "stream-opened" => {
            let opened = StreamOpened { stream, epoch };
            (3, message(Message::StreamOpened(opened)))
        }
        "step-inline" => {
            let data = f16(&[1.0, -2.0, 0.5, 65504.0]);
            let step = Step {
                data: data.into(),
                ..step(0, 1, 4, Want::All)
            };
            (4, message(Message::Step(step)))
        }
        "step-result-inline" => {
            let data = f16(&[0.25, 3.0, -1.0, 0.0]);
            let result = StepResult {
                compute_us: 1234,
                queue_us: 56,
                data: data.into(),
                ..step(0, 1, 4, Want::All).echo()
            };
            (4, message(Message::StepResult(result)))
        }
        "step-tensor" => {
            let step = Message::Step(step(1, 64, 576, Want::Last));
            (5, rows_frame(&step, Place::Tensor(1)).unwrap())
        }
        "tensor-data" => {
            let (tensor, dtype) = (9, DType::F32);
            let dims = Dims::new(&[1, 2]).unwrap();
            let head = ChunkHead {
                tensor,
                dtype,
                dims,
            };
            let data = [1.0f32, -1.5].map(f32::to_le_bytes).concat();
            (6, head.frame(&data, Flags::FINAL))
        }
        "ack" => {
            let ack = Ack {
                tensor: 9,
                chunks: 1,
                end: true,
            };
            (5, ack.frame())
        }
        "nack" => {
            let (tensor, code) = (1, "stream_closed".into());
            (6, Nack { tensor, code }.frame())
        }
        "tensor-end" => (7, TensorEnd { tensor: 1 }.frame()),
        "flowctl" => {
            let grant = NonZeroU32::new(16).unwrap();
            (7, FlowCtl { grant }.frame())
        }
        "stream-error" => {
            let error = StreamError {
                stream,
                epoch,
                position: Some(9),
                code: "position_gap".into(),
                message: "the stream has 1 position".into(),
            };
            (8, message(Message::StreamError(error)))
        }
        "truncate" => (8, truncate(1, false)),
        "truncate-answer" => (9, truncate(300, true)),
        "truncated" => {
            let truncated = Truncated {
                stream,
                epoch,
                position: 256,
            };
            (9, message(Message::Truncated(truncated)))
        }
        "stream-close" => {
            let close = StreamClose { stream, epoch };
            (9, message(Message::StreamClose(close)))
        }
        "describe" => (3, message(Message::Describe)),
        // The body is the host's; the tests of hearthnet-bus hold it to the descriptor's codec.
        "descriptor" => {
            let examples = examples();
            let (_, bytes) = examples.iter().find(|(name, _)| *name == "descriptor")?;
            let body = bytes[HEADER_BYTES..].to_vec();
            (3, message(Message::Descriptor(body.into())))
        }
        "receipt" => {
            let receipt = Receipt {
                stream,
                epoch,
                claims: NonZeroU32::new(64)?,
                chain: [0xcc; 32],
                signature: [0xdd; 64],
            };
            (9, message(Message::Receipt(receipt)))
        }
        "leaving" => (9, message(Message::Leaving { within_ms: 10_000 })),
        "bye" => {
            let (code, detail) = (CloseCode::Normal, String::new());
            (10, Bye { code, detail }.frame())
        }
        _ => return None,
    };
    Some(frame)
}

#[test]
fn the_specification_and_the_codec_agree_to_the_byte() {
    let examples = examples();
    assert_eq!(examples.len(), 25);
    // Every type has an example.
    let kinds: BTreeSet<u8> = examples.iter().map(|(_, bytes)| bytes[1]).collect();
    let all: BTreeSet<u8> = FrameType::ALL.iter().map(|kind| *kind as u8).collect();
    assert_eq!(kinds, all);
    for (name, bytes) in examples {
        let (sequence, frame) = encoded(name).unwrap_or_else(|| panic!("`{name}` is not known"));
        assert_eq!(
            Bytes::from(frame.into_bytes(sequence)),
            Bytes::from(bytes.clone()),
            "{name}"
        );
        assert!(Header::decode(&bytes).is_ok(), "{name}");
    }
}

#[test]
fn the_specification_lists_every_frame_type_and_close_code() {
    for &kind in FrameType::ALL {
        let row = format!("| {:#04x} | ", kind as u8);
        assert_eq!(SPEC.matches(&row).count(), 1, "{kind:?}");
    }
    for code in CloseCode::ALL {
        let row = format!("| {} | `{}` | ", code.number(), code.as_str());
        assert_eq!(SPEC.matches(&row).count(), 1, "{code}");
    }
}

#[test]
fn the_defaults_are_those_of_the_specification() {
    let limits = Limits::of(&Config::default());
    for (key, value) in [
        ("chunk_bytes", u64::from(limits.chunk_bytes)),
        ("inline_max", u64::from(limits.inline_max)),
        ("lifetime_ms", limits.lifetime_ms),
        ("window_chunks", u64::from(limits.window_chunks)),
        ("recv_buffer_bytes", u64::from(limits.recv_buffer_bytes)),
        ("max_steps", u64::from(limits.max_steps)),
        ("stream_steps", u64::from(limits.stream_steps)),
        ("caller_steps", u64::from(limits.caller_steps)),
        ("unread_bytes", u64::from(limits.unread_bytes)),
    ] {
        let row = SPEC
            .lines()
            .find(|line| line.starts_with(&format!("| `{key}` | uint")))
            .unwrap();
        let default = row.split('|').nth(3).unwrap().trim().replace(',', "");
        assert_eq!(default, value.to_string(), "{key}");
    }
}
