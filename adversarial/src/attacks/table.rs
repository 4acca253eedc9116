//! Attacks of one pattern: get to a state, send some data, and be ended or refused with a given
//! code. One function per attack, named after its claim. Attacks on the session alone come from
//! [`violations`], which the transport's own tests use too.

use std::iter::{once, repeat_n};

use hearthnet_testkit::raw::violations::{self, Reached, Violation};

use super::prelude::*;

/// Messages of a flood without any limit.
const MILLION: usize = 1_000_000;

/// Default chunk size in bytes.
const CHUNK: u32 = 1 << 20;

/// Single attempt.
pub(super) struct Try {
    what: String,
    at: At,
    sent: Sent,
    must: Must,
}

/// State that the attacker reaches before it sends the attack.
enum At {
    Tls,
    Upgrade,
    Session(Hello),
    Stream,
}

enum Sent {
    Bytes(Vec<u8>),
    Pieces(Vec<Outgoing>),
    /// Sent until the host ends the session; answers are read meanwhile.
    Flood(Box<dyn Iterator<Item = Outgoing> + Send>),
}

/// Expected result.
enum Must {
    /// The session ends with this code.
    End(CloseCode),
    /// The session ends with this code before the whole flood was sent.
    Stop(CloseCode),
    /// The session ends with this code; a peer that did not read may miss it.
    CutOff(CloseCode),
    /// The stream is refused with this code, and the session stays open.
    Refuse(&'static str),
    /// No session is created, so there is no code.
    NoSession,
}

/// Attempts of an attack, in order.
pub(super) type Tries = Result<Vec<Try>>;

fn tried(what: impl Into<String>, at: At, sent: impl Into<Sent>, must: Must) -> Try {
    let (what, sent) = (what.into(), sent.into());
    Try {
        what,
        at,
        sent,
        must,
    }
}

impl<T: Into<Outgoing>> From<Vec<T>> for Sent {
    fn from(pieces: Vec<T>) -> Sent {
        Sent::Pieces(pieces.into_iter().map(Into::into).collect())
    }
}

impl From<Frame> for Sent {
    fn from(frame: Frame) -> Sent {
        vec![frame].into()
    }
}

impl Sent {
    fn flood<T: Into<Outgoing> + 'static>(
        pieces: impl Iterator<Item = T> + Send + 'static,
    ) -> Sent {
        Sent::Flood(Box::new(pieces.map(Into::into)))
    }
}

/// Violations of the wire protocol, each in a session of its own.
pub(super) fn breaking(bench: &Bench, violations: Vec<Violation>) -> Tries {
    let tries = violations.into_iter().map(|violation| {
        let Violation {
            what,
            reached,
            mut sent,
            code,
        } = violation;
        let hello = bench.hello("pipeline")?;
        let at = match reached {
            Reached::Upgrade => At::Upgrade,
            Reached::Hello(frame) => {
                sent.insert(0, frame(hello));
                At::Upgrade
            }
            Reached::Session(change) => At::Session(change(hello)),
            Reached::Stream => At::Stream,
        };
        Ok(tried(what, at, sent, Must::End(code)))
    });
    tries.collect()
}

/// Carries out all attempts.
pub(super) async fn carry_out(bench: &Bench, tries: Tries, found: &mut Findings) -> Result<()> {
    for Try {
        what,
        at,
        sent,
        must,
    } in tries?
    {
        found.attempt();
        let mut peer: Peer = match at {
            At::Tls => bench.secured().await?,
            At::Upgrade => bench.upgraded().await?,
            At::Session(hello) => bench.session(&hello).await?,
            At::Stream => bench.stream().await?,
        };
        let mut flood = None;
        match sent {
            Sent::Bytes(bytes) => peer.write(&bytes).await,
            Sent::Pieces(pieces) => {
                for piece in pieces {
                    peer.send(piece).await;
                }
            }
            Sent::Flood(pieces) => flood = Some(peer.flood(pieces).await),
        }
        if let Must::Refuse(code) = must {
            found.refused(&what, code, &peer.receive().await);
            let pong = peer.ask(Frame::ping()).await.is(kind::PONG);
            found.holds(format!("{what}: the session"), "goes on", pong);
            continue;
        }
        let (written, ending) = match flood {
            Some(flood) => (flood.written, flood.ending),
            None => (0, peer.ending().await),
        };
        match must {
            Must::End(code) => found.ended(what, code, &ending),
            Must::CutOff(code) => found.cut_off(what, code, &ending),
            Must::Stop(code) => {
                found.ended(what, code, &ending);
                let (seen, stopped) = (format!("{written} written"), written < MILLION as u64);
                found.check("the flood", "stopped before its end", seen, stopped);
            }
            Must::Refuse(_) | Must::NoSession => {
                found.check(what, "no session", &ending, !ending.hung);
            }
        }
    }
    Ok(())
}

/// A header whose payload length differs from the message misplaces the next field. A message holds
/// exactly one frame, so the lengths must match exactly.
pub(super) fn payload_length_mismatch_closes_the_session(bench: &Bench) -> Tries {
    breaking(bench, violations::lengths())
}

/// A host never guesses: it skips no frame, ignores no flag and falls back to no older version.
/// Otherwise two implementations could interpret the same bytes differently, and later versions
/// could not rely on new fields.
pub(super) fn an_unknown_version_type_flag_or_reserved_bit_closes_the_session(
    bench: &Bench,
) -> Tries {
    breaking(bench, violations::unknown())
}

/// Every frame has states in which it is valid and a side that may send it. Before HELLO the peer
/// has no rights, so even a well-formed frame other than HELLO is invalid.
pub(super) fn a_known_frame_in_the_wrong_state_closes_the_session(bench: &Bench) -> Tries {
    let mut tries = breaking(bench, violations::states())?;
    let tensor = chunk(1, dtype::I8, &[4], &[0; 4]);
    let tensor = Frame::new(kind::TENSOR_DATA, tensor).flags(flag::FINAL);
    let must = Must::End(CloseCode::ProtocolState);
    tries.push(tried("a tensor without a step", At::Stream, tensor, must));
    // A step on a stream that was never opened ends only that stream.
    let (at, must) = (pipeline(bench)?, Must::Refuse("unknown_stream"));
    let what = "a step without a stream";
    tries.push(tried(what, at, row(bench).frame(), must));
    Ok(tries)
}

/// Frames are numbered from 1 without gaps. TLS delivers in order, so any other number is a defect
/// or an attempt to have a frame counted twice or not at all.
pub(super) fn a_gap_duplicate_or_wrap_in_the_sequence_closes_the_session(bench: &Bench) -> Tries {
    breaking(bench, violations::sequences())
}

/// Small messages that cost the host more than the attacker: fragments to join, pings to answer,
/// control frames that change state. Each kind has a rate limit; above it the session ends, and
/// nothing accumulates meanwhile.
pub(super) fn a_flood_of_fragments_or_control_frames_is_cut_off(bench: &Bench) -> Tries {
    let fragments = |payload: &[u8]| {
        let first = Message::binary(payload).unfinished();
        let next = Message::of(opcode::CONTINUATION, payload).unfinished();
        Sent::flood(once(first).chain(repeat_n(next, MILLION)))
    };
    let frames = |frame| Sent::flood(repeat_n::<Frame>(frame, MILLION));
    let pings = Sent::flood(repeat_n(Message::of(opcode::PING, [0; 125]), MILLION));
    let close = Frame::new(kind::STREAM_CLOSE, life(9, 9));
    let code = CloseCode::FrameRate;
    let (all, early) = (fragments(&[1]), fragments(&[1]));
    let mut tries = vec![
        tried(
            "a million fragments",
            pipeline(bench)?,
            all,
            Must::Stop(code),
        ),
        tried(
            "fragments before HELLO",
            At::Upgrade,
            early,
            Must::End(code),
        ),
    ];
    for (what, sent) in [
        ("a million empty fragments", fragments(&[])),
        ("WebSocket pings", pings),
        ("PINGs", frames(Frame::ping())),
        ("closes without a stream", frames(close)),
        ("DESCRIBEs", frames(Frame::new(kind::DESCRIBE, []))),
    ] {
        tries.push(tried(what, pipeline(bench)?, sent, Must::End(code)));
    }
    Ok(tries)
}

/// X08 uses binary messages only. Anything that RFC 6455 forbids to a client, or that X08 does not
/// use, ends the session.
pub(super) fn a_message_that_is_not_masked_binary_closes_the_session(bench: &Bench) -> Tries {
    // Valid frame, sent in invalid WebSocket messages.
    let ping = Frame::ping().encode(2);
    let binary = || Message::binary(ping.clone());
    let of = |opcode| vec![Message::of(opcode, ping.clone())];
    let text = Message::of(opcode::TEXT, [1]);
    let open = || binary().unfinished();
    let pings = |bytes: usize| Message::of(opcode::PING, vec![0; bytes]);
    let close = Message::of(opcode::CLOSE, [0x0f; 126]);
    let mut tries = Vec::new();
    for (what, messages) in [
        ("a text message", of(opcode::TEXT)),
        ("an empty text message", vec![Message::of(opcode::TEXT, [])]),
        ("the first reserved bit", vec![binary().reserved(0x40)]),
        ("the second reserved bit", vec![binary().reserved(0x20)]),
        ("the third reserved bit", vec![binary().reserved(0x10)]),
        ("a frame without a mask", vec![binary().unmasked()]),
        ("an opcode for data that does not exist", of(0x3)),
        ("an opcode for control that does not exist", of(0xb)),
        ("a continuation without a message", of(opcode::CONTINUATION)),
        ("a message within a message", vec![open(), binary()]),
        ("a text message within a message", vec![open(), text]),
        ("a ping in fragments", vec![pings(8).unfinished()]),
        ("a ping of more than 125 bytes", vec![pings(126)]),
        ("a close of more than 125 bytes", vec![close]),
    ] {
        let must = Must::End(CloseCode::WebSocket);
        tries.push(tried(what, pipeline(bench)?, messages, must));
    }
    let hello = vec![Message::of(opcode::TEXT, *b"{}")];
    let (what, must) = ("text instead of HELLO", Must::End(CloseCode::WebSocket));
    tries.push(tried(what, At::Upgrade, hello, must));
    // Not a WebSocket at all.
    let elsewhere = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    for (what, request) in [
        ("an HTTP head that never ends", vec![b'a'; 64 * 1024]),
        ("bytes that are not HTTP", vec![0xff; 100]),
        ("another path", elsewhere.to_vec()),
    ] {
        tries.push(tried(what, At::Tls, Sent::Bytes(request), Must::NoSession));
    }
    Ok(tries)
}

/// Credit bounds the data that a peer can leave with the host. The host returns credit by ACKs; if
/// the peer does not read them, the host keeps it, and one chunk beyond the window ends the
/// session.
pub(super) fn a_chunk_beyond_the_window_closes_the_session(bench: &Bench) -> Tries {
    /// Maximum chunks that the attacker sends without reading an ACK. Sockets and the host's write
    /// buffer take about 8 MiB of echoes before the ACKs behind them are stuck; then the window of
    /// 16 is used up. (Loopback sockets hold up to 10 MiB.)
    const CHUNKS: u16 = 48;
    // A `bench` session echoes its tensors, which fills the return direction.
    let hello = bench
        .hello("bench")?
        .with("window_chunks", 1024)
        .with("recv_buffer_bytes", u32::MAX);
    let data = vec![0x55; CHUNK as usize];
    let chunk = |tensor| {
        let body = chunk(tensor, dtype::I8, &[CHUNK], &data);
        Frame::new(kind::TENSOR_DATA, body).flags(flag::FINAL)
    };
    let chunks: Vec<_> = (1..=CHUNKS).map(chunk).collect();
    let what = format!("{CHUNKS} chunks without reading an ACK");
    let must = Must::CutOff(CloseCode::CreditOverrun);
    Ok(vec![tried(what, At::Session(hello), chunks, must)])
}

/// A grant widens the window in which the host may send. Without a limit it would overflow a
/// counter or make the host queue data that a peer never reads. The limit is 1,024 chunks.
pub(super) fn a_grant_above_the_ceiling_closes_the_session(bench: &Bench) -> Tries {
    breaking(bench, violations::grants())
}

/// A peer that asks for data and never returns its credit would keep that data in the host's memory
/// for ever. A deadline ends the session.
pub(super) fn credit_withheld_past_the_deadline_closes_the_session(bench: &Bench) -> Tries {
    /// Smallest chunk size that can be negotiated.
    const CHUNK: u32 = 4096;
    let hello = bench
        .hello("bench")?
        .with("chunk_bytes", CHUNK)
        .with("window_chunks", 1);
    // Two chunks come back, and the window has room for one.
    let body = chunk(1, dtype::I8, &[2 * CHUNK], &vec![0x55; CHUNK as usize]);
    let data = [0, flag::FINAL].map(|flags| Frame::new(kind::TENSOR_DATA, &body[..]).flags(flags));
    let what = "an echo of two chunks, no credit for the first";
    let must = Must::End(CloseCode::CreditStall);
    Ok(vec![tried(what, At::Session(hello), data.to_vec(), must)])
}

/// The first frame of a stream or tensor announces its size. If it is too large, the host refuses
/// it before it keeps anything.
pub(super) fn an_oversized_first_frame_creates_no_stream(bench: &Bench) -> Tries {
    breaking(bench, violations::sizes())
}

/// Opening a stream makes the host work, and an immediate cancel makes that work useless (the
/// "rapid reset" of HTTP/2). Opened streams count even if they are cancelled.
pub(super) fn streams_opened_and_cancelled_too_fast_close_the_session(bench: &Bench) -> Tries {
    /// Streams that the attacker tries to open. The limit is 64 per second, with a burst of four
    /// seconds.
    const STREAMS: u32 = 10_000;
    let target = bench.target;
    let churn = (1..=STREAMS).flat_map(move |stream| {
        let open = stream_open(stream, &target.weights, target.layers, 16);
        [open, Frame::new(kind::STREAM_CLOSE, life(stream, 1))]
    });
    let what = "streams opened and cancelled at once";
    let (at, must) = (pipeline(bench)?, Must::End(CloseCode::StreamChurn));
    Ok(vec![tried(what, at, Sent::flood(churn), must)])
}

/// A chunk of one byte costs the host as much work as one of a MiB. Every chunk but the last has
/// exactly the agreed size, which has a minimum.
pub(super) fn a_chunk_below_the_agreed_size_closes_the_session(bench: &Bench) -> Tries {
    let mut tries = breaking(bench, violations::small_chunks())?;
    let byte = Frame::new(kind::TENSOR_DATA, chunk(1, dtype::I8, &[2 * CHUNK], &[0]));
    let flood = Sent::flood(repeat_n(byte, 10_000));
    let what = "ten thousand chunks of a byte";
    let must = Must::End(CloseCode::ChunkTooSmall);
    tries.push(tried(what, pipeline(bench)?, flood, must));
    Ok(tries)
}

/// Layers of different models do not fit together and give wrong text. A stream names the weights
/// that it is for; the host serves only those weights, and only layers that it has.
pub(super) fn a_stream_for_other_weights_is_refused(bench: &Bench) -> Tries {
    let target = bench.target;
    let mut flipped = target.weights;
    flipped[31] ^= 1;
    let ((lo, hi), own) = (target.layers, target.weights);
    let (other, beyond) = (Some("weights_mismatch"), Some("bad_descriptor"));
    let mut tries = Vec::new();
    for (what, weights, range, code) in [
        ("weights that differ in one bit", flipped, (lo, hi), other),
        ("weights of zeros", [0; 32], (lo, hi), other),
        ("one layer too many", own, (lo, hi + 1), beyond),
        (
            "the largest layer number",
            own,
            (u32::MAX, u32::MAX),
            beyond,
        ),
        ("all possible layers", own, (0, u32::MAX), beyond),
        ("an inverted layer range", own, (hi, lo), None),
    ] {
        let must = code.map_or(Must::End(CloseCode::BodyMalformed), Must::Refuse);
        let open = stream_open(1, &weights, range, 16);
        tries.push(tried(what, pipeline(bench)?, open, must));
    }
    Ok(tries)
}

/// Sizes are products of numbers that the peer chose. They are multiplied with overflow checks, and
/// compared with the data received and with the model.
pub(super) fn an_impossible_shape_is_refused(bench: &Bench) -> Tries {
    let mut tries = breaking(bench, violations::shapes())?;
    // Valid by itself, but not for this model: only the stream is refused.
    let (row, code) = (row(bench), CloseCode::TensorShape.as_str());
    let narrow = Step {
        width: row.width / 2,
        data: vec![0; row.width as usize],
        ..row.clone()
    };
    let wide = Step {
        dtype: dtype::F32,
        data: vec![0; row.width as usize * 4],
        ..row
    };
    for (what, step) in [("rows of half the width", narrow), ("rows of fp32", wide)] {
        tries.push(tried(what, At::Stream, step.frame(), Must::Refuse(code)));
    }
    Ok(tries)
}

/// A few KiB of zstd can expand to many MiB. The chunk size is known before decompression and
/// exactly that much is reserved; a chunk that does not fill it exactly is refused.
pub(super) fn a_chunk_that_does_not_decompress_to_its_size_closes_the_session(
    bench: &Bench,
) -> Tries {
    breaking(bench, violations::compressed())
}

fn pipeline(bench: &Bench) -> Result<At> {
    Ok(At::Session(bench.hello("pipeline")?))
}

/// Valid step of one row.
fn row(bench: &Bench) -> Step {
    bench.zeros(1, 1)
}
