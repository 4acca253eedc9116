//! Bodies of the fuzz targets, so that tests can replay a fuzzer's findings. Not a public API.

use std::time::Duration;

use bytes::Bytes;

use crate::code::Violation;
use crate::compress::ChunkDecompressor;
use crate::message::{Message, StreamClose, StreamError, Truncate};
use crate::net::fuzz_frame_limiter;
use crate::pair::Pair;
use crate::session::{SendRefused, Session};
use crate::tensor::{DType, Dims, Tensor};
use crate::time::Time;
use crate::wire::cbor::Body;
use crate::wire::chunk::ChunkHead;
use crate::wire::control::{self, Ack, Bye, FlowCtl, Limits, Nack, TensorEnd};
use crate::wire::pipeline;
use crate::wire::{FrameBuf, FrameType, HEADER_BYTES, Header};
use crate::{Code, NodeId};
use crate::{Config, Step, Want};

/// Decodes one message. If it is accepted, it must survive another encoding and decoding.
///
/// # Panics
/// If an invariant is broken.
pub fn frame(message: &[u8]) {
    fn again<T: PartialEq + std::fmt::Debug>(
        body: &[u8],
        decode: impl Fn(&[u8]) -> Result<T, Violation>,
        encode: impl FnOnce(&T) -> Result<FrameBuf, Violation>,
    ) {
        let Ok(decoded) = decode(body) else { return };
        let encoded = encode(&decoded).map(|frame| frame.into_bytes(1));
        let body = |message: Vec<u8>| decode(message.get(HEADER_BYTES..).unwrap_or_default());
        assert_eq!(encoded.map(body), Ok(Ok(decoded)));
    }
    fn map<T: Body + PartialEq + std::fmt::Debug>(body: &[u8]) {
        again(body, T::read, |value| Ok(value.frame()));
    }
    let Ok((header, body)) = Header::decode(message) else {
        return;
    };
    assert_eq!(header.encode()[..], message[..HEADER_BYTES]);
    match header.kind {
        FrameType::Hello => {
            again(body, control::read_client_hello, |(hello, limits)| {
                Ok(control::client_hello(hello, *limits))
            });
            let _: Result<(String, Limits), _> = control::read_server_hello(body);
        }
        FrameType::Bye => map::<Bye>(body),
        FrameType::Ack => map::<Ack>(body),
        FrameType::Nack => map::<Nack>(body),
        FrameType::FlowCtl => map::<FlowCtl>(body),
        FrameType::TensorEnd => map::<TensorEnd>(body),
        FrameType::Ping | FrameType::Pong => {
            let _ = control::read_ping(body);
        }
        FrameType::TensorData => {
            if let Ok((head, data)) = ChunkHead::read(body) {
                let encoded = head.frame(data, header.flags).into_bytes(header.sequence);
                assert_eq!(encoded, message);
            }
        }
        FrameType::Step | FrameType::StepResult => {
            if let Ok((rows, place)) = pipeline::read_rows(header.kind, body) {
                let encoded = pipeline::rows_frame(&rows, place);
                let encoded = encoded.map(|frame| frame.into_bytes(header.sequence));
                assert_eq!(encoded.as_deref(), Ok(message));
            }
        }
        kind => again(body, |body| pipeline::read(kind, body), pipeline::frame),
    }
}

/// Rest of a fuzzer's input; reads as zeros when it is used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((byte, rest)) => {
                self.0 = rest;
                *byte
            }
            None => 0,
        }
    }

    fn word(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head
    }
}

/// Drives an open session through a sequence of frames, application calls and timeouts.
///
/// The input is a byte for the setting, then operations:
///
/// | byte, modulo 8 | followed by | |
/// |---|---|---|
/// | 0 | type, flags, length (2), body | a frame with the right header and sequence number |
/// | 1 | length (1), bytes | a message of any bytes |
/// | 2 | quarters of a second (1) | time passes |
/// | 3 | count (1) | the application takes events |
/// | 4 | count (1) | messages are transmitted |
/// | 5 | stream (1), rows (1) | the application sends a step, or answers one |
/// | 6 | bytes (2) | the application sends a tensor |
/// | 7 | stream (1) | the application ends or truncates a stream, or announces that it leaves |
///
/// # Panics
/// If an invariant is broken.
pub fn session(input: &[u8]) {
    let mut input = Input(input);
    let setting = input.byte();
    let config = Config {
        chunk_bytes: 4096,
        window_chunks: 4,
        recv_buffer_bytes: 32 * 1024,
        inline_max: 1024,
        compress_above: (setting & 2 != 0).then_some(2048),
        max_steps_in_flight: 4,
        ..Config::default()
    };
    let pair = Pair::open(&config, &config);
    let mut now = pair.now();
    let caller = setting & 1 != 0;
    let (mut session, peer) = if caller {
        (pair.caller, pair.host)
    } else {
        (pair.host, pair.caller)
    };
    let mut sequence = u32::try_from(peer.stats().frames_sent).unwrap_or(0);

    while !input.0.is_empty() {
        match input.byte() % 8 {
            0 => {
                let (kind, flags, len) = (input.byte(), input.byte(), input.word());
                let body = input.bytes(usize::from(len));
                sequence = sequence.wrapping_add(1);
                let mut message = vec![1, kind, 0, 0];
                message.extend_from_slice(&sequence.to_be_bytes());
                message.extend_from_slice(&(body.len() as u32).to_be_bytes());
                message.extend_from_slice(&[0, 0, 0, flags]);
                message.extend_from_slice(body);
                session.handle_message(now, &Bytes::from(message));
            }
            1 => {
                let len = usize::from(input.byte());
                session.handle_message(now, &Bytes::copy_from_slice(input.bytes(len)));
            }
            2 => {
                now = now + Duration::from_millis(250 * u64::from(input.byte()));
                session.handle_timeout(now);
            }
            3 => {
                for _ in 0..input.byte() {
                    let _ = session.poll_event();
                }
            }
            4 => {
                for _ in 0..input.byte() {
                    if let Some(frame) = session.poll_transmit(now) {
                        assert!(frame.len() <= 16 * 1024 && Header::decode(&frame).is_ok());
                    }
                }
            }
            5 => {
                let (stream, rows) = (u32::from(input.byte() % 4), u32::from(input.byte()) + 1);
                let data = Bytes::from(vec![0x33; rows as usize * 64]);
                let (dtype, want) = (DType::F16, Want::All);
                let step = Step {
                    stream,
                    epoch: 0,
                    position: 0,
                    rows,
                    width: 32,
                    dtype,
                    want,
                    data,
                };
                let message = match caller {
                    true => Message::Step(step),
                    false => Message::StepResult(step.echo()),
                };
                send(&mut session, &message);
            }
            6 => {
                let len = u32::from(input.word()) + 1;
                if let Ok(dims) = Dims::new(&[len]) {
                    let (dtype, data) = (DType::I8, Bytes::from(vec![0x44; len as usize]));
                    let tensor = Tensor { dtype, dims, data };
                    send(&mut session, &Message::Tensor(tensor));
                }
            }
            _ => {
                let byte = input.byte();
                let (stream, epoch) = (u32::from(byte % 4), 0);
                let message = match (caller, byte & 0x80 != 0) {
                    (true, false) => Message::StreamClose(StreamClose { stream, epoch }),
                    (true, true) => Message::Truncate(Truncate {
                        stream,
                        epoch,
                        position: 0,
                        answer: byte & 0x40 != 0,
                    }),
                    (false, true) if byte & 0x40 != 0 => Message::Leaving {
                        within_ms: u32::from(byte),
                    },
                    (false, _) => Message::StreamError(StreamError {
                        stream,
                        epoch,
                        position: None,
                        code: Code::INTERNAL,
                        message: String::new(),
                    }),
                };
                send(&mut session, &message);
            }
        }
        check_invariants(&session, &config);
    }
    // The session can be closed in any state, and sends BYE once.
    session.close(crate::CloseCode::Normal, "");
    let mut frames = 0;
    while session.poll_transmit(now).is_some() {
        frames += 1;
    }
    assert!(frames <= 1);
    check_invariants(&session, &config);
}

fn send(session: &mut Session, message: &Message) {
    match session.send_message(message) {
        Ok(()) | Err(SendRefused::Blocked | SendRefused::NotOpen) => {}
        // A tensor may be larger than the peer's buffer; no other error is possible here.
        Err(SendRefused::Impossible(violation)) => {
            assert_eq!(violation.code, crate::CloseCode::FrameTooBig);
        }
    }
}

fn check_invariants(session: &Session, config: &Config) {
    let stats = session.stats();
    assert!(stats.buffered_bytes <= u64::from(config.recv_buffer_bytes));
    assert!(stats.credit_available <= stats.credit_granted && stats.credit_granted <= 1024);
    assert!(stats.steps_in_flight <= config.max_steps_in_flight);
    if session.closed().is_some() {
        assert_eq!(session.poll_timeout(), Time::NEVER);
        assert_eq!((stats.buffered_bytes, stats.queued_bytes), (0, 0));
        assert_eq!(stats.steps_in_flight, 0);
    }
}

/// Runs the frame limiter over a byte stream, whole and in pieces: the verdicts must be equal.
///
/// # Panics
/// If an invariant is broken.
pub fn websocket(input: &[u8]) {
    let mut input = Input(input);
    let cut = usize::from(input.byte()) + 1;
    let mut stream = b"GET / HTTP/1.1\r\n\r\n".to_vec();
    stream.extend_from_slice(input.0);
    let whole = fuzz_frame_limiter(stream.chunks(stream.len()));
    let pieces = fuzz_frame_limiter(stream.chunks(cut));
    assert_eq!(whole, pieces);
}

/// Decompresses a chunk into a buffer whose size the input chooses.
///
/// # Panics
/// If an invariant is broken.
pub fn decompress(input: &[u8]) {
    let mut input = Input(input);
    let expected = usize::from(input.word());
    let mut out = Vec::with_capacity(expected);
    let result = ChunkDecompressor::default().append(input.0, expected, &mut out);
    assert!(
        out.capacity() <= expected.max(8),
        "grew beyond the expected size"
    );
    if result.is_ok() {
        assert_eq!(out.len(), expected);
    }
}

/// Reads a certificate, and checks that its key is canonical.
///
/// # Panics
/// If an invariant is broken.
pub fn certificate(input: &[u8]) {
    if let Ok(key) = NodeId::from_certificate(input) {
        assert_eq!(NodeId::from_bytes(key.as_bytes()), Ok(key));
    }
}
