//! Rules of X08 (`specs/x08-tensor-transport.md`) that a caller can break, each with the code that
//! must end its session. Two tests use the table: the session alone
//! (`hearthnet-transport/tests/transport/violations.rs`), and attacks on a host behind TLS, beside an honest
//! caller (`adversarial/src/attacks/table.rs`). `hearthnet conformance` uses most of it.
//!
//! Sizes assume a host with default limits.

use ciborium::Value;
use hearthnet_transport::{CloseCode, Config};

use super::{Frame, Hello, Step, cbor, chunk, dtype, flag, kind, life, stream_open};

/// Chunk size in bytes.
const CHUNK: u32 = 1 << 20;
/// Largest window in chunks, however it is granted.
const CEILING: u32 = 1024;
/// Values per row. Any number will do: the session does not know the model's.
const WIDTH: u32 = 64;

/// Turns a valid HELLO into a frame.
pub type Change = fn(Hello) -> Frame;

/// State of the connection when the rule is broken.
#[derive(Clone, Copy, Debug)]
pub enum Reached {
    /// The WebSocket is open; no frame was sent.
    Upgrade,
    /// Same as `Upgrade`; the frame is this HELLO, made from a valid one.
    Hello(Change),
    /// The session is open, after this HELLO, made from a valid one.
    Session(fn(Hello) -> Hello),
    /// Stream 1 is open in epoch 1.
    Stream,
}

#[derive(Clone, Debug)]
pub struct Violation {
    /// Description for test output.
    pub what: String,
    pub reached: Reached,
    /// Frames that break the rule.
    pub sent: Vec<Frame>,
    /// Close code that the host must send.
    pub code: CloseCode,
}

/// Session with an unchanged HELLO.
const SESSION: Reached = Reached::Session(|hello| hello);

fn by(code: CloseCode, reached: Reached, what: impl Into<String>, sent: Vec<Frame>) -> Violation {
    Violation {
        what: what.into(),
        reached,
        sent,
        code,
    }
}

/// Violations, each with one of the frames.
fn each<S: Into<String>>(
    code: CloseCode,
    reached: Reached,
    tries: impl IntoIterator<Item = (S, Frame)>,
) -> Vec<Violation> {
    let broken = |(what, frame)| by(code, reached, what, vec![frame]);
    tries.into_iter().map(broken).collect()
}

/// Violations, each with one of the HELLOs.
fn hellos<const N: usize>(code: CloseCode, tries: [(&str, Change); N]) -> Vec<Violation> {
    let broken = |(what, hello)| by(code, Reached::Hello(hello), what, Vec::new());
    tries.map(broken).into()
}

/// Headers with a wrong payload length.
pub fn lengths() -> Vec<Violation> {
    let (code, truth) = (CloseCode::FrameLength, 8);
    let lies = [
        ("one byte more than there is", truth + 1),
        ("one byte less than there is", truth - 1),
        ("nothing, with a body", 0),
        ("4 GiB", u32::MAX),
    ];
    let lies = lies.map(|(what, length)| (what, Frame::ping().length(length)));
    let cut = [0, 1, 3, 15].map(|length| {
        let what = format!("a message of {length} bytes, less than a header");
        (what, Frame::ping().cut(length))
    });
    let hello = hellos(code, [("a HELLO", |hello| hello.frame().length(5000))]);
    [each(code, SESSION, lies), each(code, SESSION, cut), hello].concat()
}

/// Unknown versions, types, flags and reserved bits.
pub fn unknown() -> Vec<Violation> {
    let mut frames: Vec<(String, Frame)> = Vec::new();
    for version in [0, 2, 0xff] {
        frames.push((format!("version {version}"), Frame::ping().version(version)));
    }
    for kind in [0x00, 0x0a, 0x0f, 0x1c, 0x80, 0xff] {
        frames.push((format!("type {kind:#04x}"), Frame::new(kind, [0; 8])));
    }
    for reserved in [0x0001, 0x0100, 0xffff] {
        let what = format!("{reserved:#06x} in the reserved field");
        frames.push((what, Frame::ping().reserved(reserved)));
    }
    let unassigned = [flag::GRAD, flag::ENCRYPTED, 0x10, 0x8000_0000];
    for flags in [flag::COMPRESSED, flag::FINAL].iter().chain(&unassigned) {
        let what = format!("flags {flags:#x} on a PING");
        frames.push((what, Frame::ping().flags(*flags)));
    }
    for flags in unassigned {
        let body = chunk(1, dtype::I8, &[4], &[0; 4]);
        let frame = Frame::new(kind::TENSOR_DATA, body).flags(flag::FINAL | flags);
        frames.push((format!("flags {flags:#x} on a tensor"), frame));
    }
    let step = Step {
        reserved: [0, 0, 0, 0, 0, 1],
        ..Step::default()
    };
    frames.push(("a reserved byte in STEP".to_owned(), step.frame()));
    let mut all = each(CloseCode::FrameUnknown, Reached::Stream, frames);

    fn versions(hello: Hello, versions: &[u32]) -> Frame {
        let versions = versions.iter().map(|&version| version.into()).collect();
        hello.with("versions", Value::Array(versions)).frame()
    }
    all.extend(hellos(
        CloseCode::VersionUnsupported,
        [
            ("HELLO with later versions only", |hello| {
                versions(hello, &[2, 3])
            }),
            ("HELLO with version 0 only", |hello| versions(hello, &[0])),
            ("HELLO with no version at all", |hello| versions(hello, &[])),
        ],
    ));
    all
}

/// Frames that are not allowed in this state, or not from a caller.
pub fn states() -> Vec<Violation> {
    let code = CloseCode::ProtocolState;
    let one = ("stream", Value::from(1));
    let epoch = ("epoch", Value::from(1));
    let x = |key| (key, Value::from("x"));
    let data = || Frame::new(kind::TENSOR_DATA, chunk(1, dtype::I8, &[4], &[0; 4]));
    let pong = || Frame::new(kind::PONG, [0; 8]);
    let opened = || Frame::new(kind::STREAM_OPENED, life(1, 1));
    let tensor = ("tensor", Value::from(1));
    let body = |kind, fields: &[(&str, Value)]| Frame::new(kind, cbor(fields));
    let position = ("position", Value::from(0));
    let truncate = body(
        kind::TRUNCATE,
        &[one.clone(), epoch.clone(), position.clone()],
    );
    // Every type but HELLO and BYE, which may come first.
    let well_formed = [
        ("TENSOR_DATA", data().flags(flag::FINAL)),
        ("TENSOR_END", body(kind::TENSOR_END, &[tensor])),
        ("ACK", ack(1, 1, false)),
        ("NACK", nack(1)),
        ("FLOWCTL", body(kind::FLOWCTL, &[("grant", 1.into())])),
        ("PING", Frame::ping()),
        ("PONG", pong()),
        ("STREAM_OPEN", stream_open(1, &[0; 32], (0, 1), 16)),
        ("STREAM_CLOSE", Frame::new(kind::STREAM_CLOSE, life(1, 1))),
        ("STEP", Step::default().frame()),
        ("TRUNCATE", truncate),
        ("DESCRIBE", Frame::new(kind::DESCRIBE, [])),
        ("STREAM_OPENED", opened()),
    ];
    let of_a_host = [
        ("STREAM_OPENED", opened()),
        ("STEP_RESULT", Frame::new(kind::STEP_RESULT, [0; 42])),
        (
            "RECEIPT",
            body(kind::RECEIPT, &[one.clone(), epoch.clone()]),
        ),
        (
            "TRUNCATED",
            body(
                kind::TRUNCATED,
                &[one.clone(), epoch.clone(), position.clone()],
            ),
        ),
        (
            "STREAM_ERROR",
            body(kind::STREAM_ERROR, &[one, epoch, x("code"), x("message")]),
        ),
        ("DESCRIPTOR", Frame::new(kind::DESCRIPTOR, [0xa0])),
        ("LEAVING", body(kind::LEAVING, &[("within_ms", 1.into())])),
    ];
    let early = well_formed.map(|(name, frame)| (format!("{name} before HELLO"), frame));
    let foreign = of_a_host.map(|(name, frame)| (format!("{name} from a caller"), frame));
    let again = Hello::new("pipeline", Vec::new()).frame();
    let others = [("a second HELLO", again), ("a PONG without a PING", pong())];
    [
        each(code, Reached::Upgrade, early),
        each(code, Reached::Stream, foreign),
        each(code, Reached::Stream, others),
    ]
    .concat()
}

/// Frames whose sequence numbers do not increase by one from 1.
pub fn sequences() -> Vec<Violation> {
    let code = CloseCode::FrameSequence;
    let mut all = hellos(
        code,
        [
            ("HELLO numbered 0", |hello| hello.frame().sequence(0)),
            ("HELLO numbered 2", |hello| hello.frame().sequence(2)),
            ("HELLO with the last number", |hello| {
                hello.frame().sequence(u32::MAX)
            }),
        ],
    );
    // HELLO was 1, so 2 is due.
    let numbered = [
        ("a gap of one", 3),
        ("a jump to the last number", u32::MAX),
        ("a jump to the last but one", u32::MAX - 1),
        ("a duplicate", 1),
        ("a wrap to 0", 0),
    ];
    let numbered = numbered.map(|(what, number)| (what, Frame::ping().sequence(number)));
    all.extend(each(code, SESSION, numbered));
    let before = vec![Frame::ping(), Frame::ping(), Frame::ping().sequence(2)];
    all.push(by(code, SESSION, "a number from before", before));
    all
}

/// Grants beyond the ceiling, and numbers of chunks out of their range. The window begins at 16
/// chunks.
pub fn grants() -> Vec<Violation> {
    let session = Reached::Session(|hello| hello.with("window_chunks", 16));
    let grants = [
        ("u32::MAX, twice", vec![u32::MAX, u32::MAX]),
        ("one more than the ceiling", vec![CEILING - 16 + 1]),
        ("beyond the ceiling in two steps", vec![CEILING - 16, 1]),
        ("a sum that wraps to a small window", vec![u32::MAX - 15]),
    ];
    let grant = |chunks: u32| Frame::new(kind::FLOWCTL, cbor(&[("grant", chunks.into())]));
    let mut all: Vec<_> = grants
        .map(|(what, chunks)| {
            let sent = chunks.into_iter().map(grant).collect();
            by(CloseCode::CreditOverflow, session, what, sent)
        })
        .into();
    let (malformed, nothing) = (CloseCode::BodyMalformed, vec![grant(0)]);
    all.push(by(malformed, session, "a grant of nothing", nothing));
    // In HELLO the same number is a value out of its range.
    let hello = Reached::Hello(|hello| hello.with("window_chunks", u32::MAX).frame());
    let what = "a window of u32::MAX in HELLO";
    all.push(by(malformed, hello, what, Vec::new()));
    all
}

pub fn acks() -> Vec<Violation> {
    let never_sent = [
        ("an ACK of a tensor that never was", ack(7, 1, true)),
        ("an ACK of u32::MAX chunks", ack(7, u32::MAX, false)),
        ("an ACK of nothing", ack(7, 0, false)),
        ("a NACK of a tensor that never was", nack(7)),
    ];
    each(CloseCode::CreditAck, SESSION, never_sent)
}

/// Bodies that do not have the layout of their type.
pub fn bodies() -> Vec<Violation> {
    let one = Value::from(1);
    let close = |fields: &[(&str, Value)]| Frame::new(kind::STREAM_CLOSE, cbor(fields));
    let (stream, epoch) = (("stream", one.clone()), ("epoch", one.clone()));
    let with = |key, value: Value| close(&[stream.clone(), epoch.clone(), (key, value)]);
    let of = |value: Value| close(&[("stream", value), epoch.clone()]);
    let mut longer = life(1, 1);
    longer.push(0);
    let backwards = stream_open(1, &[0; 32], (1, 0), 16);
    let frames = [
        ("a key missing", close(std::slice::from_ref(&stream))),
        (
            "a key that the body does not define",
            with("more", one.clone()),
        ),
        ("a key twice", with("epoch", one)),
        ("a text in the place of a number", of("1".into())),
        ("a negative number", of((-1).into())),
        ("a number of more than 32 bits", of((1u64 << 32).into())),
        ("null in the place of a number", of(Value::Null)),
        ("a tagged number", of(Value::Tag(1, Box::new(1.into())))),
        (
            "a byte after the map",
            Frame::new(kind::STREAM_CLOSE, longer),
        ),
        (
            "a list in the place of the map",
            Frame::new(kind::STREAM_CLOSE, [0x80]),
        ),
        ("no body at all", Frame::new(kind::STREAM_CLOSE, [])),
        ("a body in DESCRIBE", Frame::new(kind::DESCRIBE, [0xa0])),
        ("a PING of 7 bytes", Frame::new(kind::PING, [0; 7])),
        ("a PING of 9 bytes", Frame::new(kind::PING, [0; 9])),
        ("weights of 31 bytes", stream_open(1, &[0; 31], (0, 1), 16)),
        ("layers that run backwards", backwards),
    ];
    each(CloseCode::BodyMalformed, SESSION, frames)
}

/// ACK of `chunks` chunks of a tensor.
pub fn ack(tensor: u16, chunks: u32, end: bool) -> Frame {
    let body = cbor(&[
        ("tensor", tensor.into()),
        ("chunks", chunks.into()),
        ("end", end.into()),
    ]);
    Frame::new(kind::ACK, body)
}

pub fn nack(tensor: u16) -> Frame {
    let body = cbor(&[("tensor", tensor.into()), ("code", "stream_closed".into())]);
    Frame::new(kind::NACK, body)
}

/// STEP whose rows come as a tensor.
fn announced(rows: u32, tensor: u16) -> Frame {
    let step = Step {
        rows,
        width: WIDTH,
        tensor: Some(tensor),
        data: Vec::new(),
        ..Step::default()
    };
    step.frame()
}

/// TENSOR_DATA of an int8 tensor.
fn data(dims: &[u32], bytes: usize) -> Frame {
    Frame::new(
        kind::TENSOR_DATA,
        chunk(1, dtype::I8, dims, &vec![0; bytes]),
    )
}

/// Frames and tensors over their size limits, and tensors that fit one by one but not together.
pub fn sizes() -> Vec<Violation> {
    let (code, config) = (CloseCode::FrameTooBig, Config::default());
    let (buffer, inline) = (config.recv_buffer_bytes, config.inline_max);
    let row = WIDTH * 2;
    let open = stream_open(1, &[0; 8192], (0, 1), 16);
    let rows = inline / row + 1;
    let step = Step {
        rows,
        width: WIDTH,
        data: vec![0; (rows * row) as usize],
        ..Step::default()
    };
    let control = |bytes: usize| Frame::new(kind::TRUNCATE, vec![0; bytes]);
    let (long, more) = (announced(buffer / row + 1, 1), data(&[buffer + 1], 1024));
    let chunk = data(&[2 * CHUNK], CHUNK as usize + 1);
    let frames = [
        ("a control frame of 8 KiB", control(8192)),
        ("a control frame of a byte too much", control(4081)),
        ("a STREAM_OPEN of 8 KiB", open),
        ("inline rows of one row too much", step.frame()),
        ("a step of one row more than the buffer", long),
        ("a step of 512 GiB", announced(u32::MAX, 1)),
        ("a chunk of a byte too much", chunk),
        ("a tensor of one byte more than the buffer", more),
        ("a tensor of 16 EiB", data(&[u32::MAX, u32::MAX], 1024)),
    ];
    let mut all = each(code, SESSION, frames);
    let hello = Reached::Hello(|_| Frame::new(kind::HELLO, [0; 4096]));
    all.push(by(code, hello, "a HELLO of more than 4 KiB", Vec::new()));
    let half = buffer / 2 / row;
    let together = (1..=3).map(|tensor| announced(half, tensor)).collect();
    let (code, what) = (CloseCode::BufferOverrun, "three steps of half the buffer");
    all.push(by(code, SESSION, what, together));
    all
}

/// Chunks below the negotiated size, and HELLOs with a size below the minimum.
pub fn small_chunks() -> Vec<Violation> {
    let code = CloseCode::ChunkTooSmall;
    let first = [0, 1, 4096, CHUNK as usize - 1].map(|length| {
        let what = format!("a first chunk of {length} bytes");
        (what, data(&[2 * CHUNK], length))
    });
    let mut all = each(code, SESSION, first);
    let last = data(&[1000], 999).flags(flag::FINAL);
    all.push(by(code, SESSION, "a last chunk that is short", vec![last]));
    let hello = Reached::Hello(|hello| hello.with("chunk_bytes", 1).frame());
    let what = "an agreed size of one byte";
    all.push(by(CloseCode::BodyMalformed, hello, what, Vec::new()));
    all
}

/// Sizes that are impossible, that change, or that differ from the announced ones.
pub fn shapes() -> Vec<Violation> {
    let (code, max) = (CloseCode::TensorShape, u32::MAX);
    let tensors = [
        ("a product that overflows 64 bits", dtype::F32, vec![max; 3]),
        ("one that overflows far", dtype::F32, vec![max; 8]),
        ("one that overflows to zero", dtype::I8, vec![1 << 16; 4]),
        ("one that overflows to one", dtype::I8, vec![max; 8]),
        ("a dimension of zero", dtype::F16, vec![4, 0]),
        ("a rank of zero", dtype::F16, vec![]),
        ("a rank of nine", dtype::F16, vec![1; 9]),
        ("a rank of 255", dtype::F16, vec![1; 255]),
        ("element type 0", 0, vec![4]),
        ("element type 5", 5, vec![4]),
        ("element type 255", 255, vec![4]),
    ];
    let tensors = tensors.map(|(what, dtype, dims)| {
        let frame = Frame::new(kind::TENSOR_DATA, chunk(1, dtype, &dims, &[0; 8]));
        (what, frame)
    });
    let mut all = each(code, SESSION, tensors);
    let steps = [
        ("a step of no rows", 0, WIDTH, dtype::F16),
        ("a step of no width", 1, 0, dtype::F16),
        ("a step of more rows than it has", 2, WIDTH, dtype::F16),
        ("a step of too wide a row", 1, WIDTH + 1, dtype::F16),
        ("a step of too narrow a row", 1, WIDTH - 1, dtype::F16),
        ("a step of 2^64 values", max, max, dtype::F16),
        ("a step whose size wraps around", 1 << 31, WIDTH, dtype::F32),
        ("a step of element type 9", 1, WIDTH, 9),
    ];
    all.extend(steps.map(|(what, rows, width, dtype)| {
        let step = Step {
            rows,
            width,
            dtype,
            data: vec![0; WIDTH as usize * 2],
            ..Step::default()
        };
        by(code, Reached::Stream, what, vec![step.frame()])
    }));
    let whole = CHUNK as usize;
    let first = || data(&[2 * CHUNK], whole);
    let (longer, ranked) = (data(&[2 * CHUNK + 1], whole), data(&[CHUNK, 2], whole));
    let (other, early) = (announced(CHUNK / WIDTH, 1), first().flags(flag::FINAL));
    let sequels = [
        ("a second chunk of another size", vec![first(), longer]),
        ("a second chunk of another rank", vec![first(), ranked]),
        ("a chunk unlike its step", vec![other, first()]),
        ("a last chunk too early", vec![early]),
        ("a last chunk that does not say so", vec![data(&[9], 9)]),
    ];
    all.extend(sequels.map(|(what, sent)| by(code, Reached::Stream, what, sent)));
    all
}

/// Chunks that do not decompress to the declared size, and a compressed chunk without negotiation.
///
/// # Panics
/// If zstd cannot compress.
#[allow(clippy::expect_used, reason = "for tests")]
pub fn compressed() -> Vec<Violation> {
    /// Bytes of the tensor: one chunk, which is the last one.
    const SIZE: usize = 100_000;
    /// Decompressed size of the bomb: more than the noise in the measured memory.
    const BOMB: usize = 256 << 20;
    let zstd = |data: &[u8]| zstd::bulk::compress(data, 1).expect("it compresses");
    let good = zstd(&[7; SIZE]);
    let half = zstd(&[7; SIZE / 2]);
    let skippable = [0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0];
    let unknown = |window| of_unknown_size(&[0; 1000], window);
    let wrong = [
        ("a bomb of 256 MiB", zstd(&vec![0; BOMB])),
        ("one byte more", zstd(&[7; SIZE + 1])),
        ("one byte less", zstd(&[7; SIZE - 1])),
        ("nothing at all", Vec::new()),
        ("what is not zstd", vec![0x55; 1000]),
        ("a frame cut short", good[..good.len() - 1].to_vec()),
        ("two frames", [&half[..], &half].concat()),
        ("a frame and a byte", [&good[..], &[0]].concat()),
        ("a skippable frame first", [&skippable, &good[..]].concat()),
        ("a window of 3.75 TiB", unknown(0xff)),
        ("a frame of unknown, wrong size", unknown(0x00)),
    ];
    let legacy = (0x1e..=0x27).map(|version: u8| {
        let mut legacy = good.clone();
        legacy[0] = version;
        (format!("legacy magic {version:#04x}"), legacy)
    });
    let wrong = wrong.map(|(what, data)| (what.to_owned(), data));
    let frame = |data: &[u8]| {
        let body = chunk(1, dtype::I8, &[SIZE as u32], data);
        vec![Frame::new(kind::TENSOR_DATA, body).flags(flag::COMPRESSED | flag::FINAL)]
    };
    let agreed = Reached::Session(Hello::with_zstd);
    let mut all: Vec<_> = wrong
        .into_iter()
        .chain(legacy)
        .map(|(what, data)| by(CloseCode::Decompression, agreed, what, frame(&data)))
        .collect();
    // Without negotiation, the flag itself is the violation.
    let (code, what) = (CloseCode::FrameUnknown, "compression not agreed on");
    all.push(by(code, SESSION, what, frame(&good)));
    all
}

/// Zstd frame of raw blocks without a declared size (RFC 8878 section 3.1.1), so that the size
/// shows only in decompression.
fn of_unknown_size(data: &[u8], declared_window: u8) -> Vec<u8> {
    // Magic number; a descriptor without a content size; the window; one last raw block.
    let mut out = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, declared_window];
    let header = (data.len() as u32) << 3 | 1;
    out.extend_from_slice(&header.to_le_bytes()[..3]);
    out.extend_from_slice(data);
    out
}
