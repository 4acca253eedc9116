//! Checks the WebSocket headers before tungstenite parses them.
//!
//! tungstenite reserves the memory that a header declares, joins fragments without counting them,
//! and has one size limit for the whole connection. The limiter reads the headers first: a
//! message's length is checked before memory is reserved, fragments and control frames are counted,
//! and the limit is 4 KiB until HELLO. It knows where messages begin and end, so a message that
//! trickles in is noticed too. Payloads are skipped.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;
use tokio_tungstenite::WebSocketStream;

use crate::background::give_way;
use crate::code::{CloseCode, Violation};
use crate::session::rate::TokenBucket;
use crate::time::Time;

/// Limit of the HTTP head of the upgrade, in bytes.
const MAX_HTTP_HEAD_BYTES: usize = 8 * 1024;
/// Limit of fragments per message: some libraries cut a 1 MiB message into fragments of 4 KiB.
const MAX_FRAGMENTS: u32 = 512;
/// WebSocket PINGs and PONGs per second; the tensor path does not use them.
const CONTROLS_PER_SECOND: u32 = 4;

/// A byte stream below TLS: a TCP socket, or a pipe in tests.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

pub(super) type BoxIo = Box<dyn Io>;

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// In the HTTP head: matched part of CR LF CR LF, and number of bytes.
    Head { matched: usize, bytes: usize },
    /// In a frame header.
    Header { buffer: [u8; 14], have: usize },
    /// In a payload.
    Payload {
        left: u64,
        control: bool,
        last: bool,
    },
}

const NEW_HEADER: Phase = Phase::Header {
    buffer: [0; 14],
    have: 0,
};

/// State machine of the limiter: takes bytes, returns violations.
#[derive(Debug)]
pub(crate) struct FrameLimiter {
    phase: Phase,
    /// Whether the peer's frames must be masked (it is the client).
    masked: bool,
    /// True if text messages may come.
    pub(crate) text: bool,
    /// Size limit of a message.
    pub(crate) limit: usize,
    /// Fragments of the message in progress; 0 between messages.
    fragments: u32,
    declared: u64,
    /// Bytes received of an incomplete message; 0 between messages.
    pub(crate) partial: u64,
    controls: TokenBucket,
}

fn websocket(detail: &'static str) -> Violation {
    CloseCode::WebSocket.violation(detail)
}

impl FrameLimiter {
    /// Limiter for a connection that begins with an HTTP head.
    pub(crate) fn new(peer_is_client: bool, limit: usize, now: Time) -> FrameLimiter {
        FrameLimiter {
            phase: Phase::Head {
                matched: 0,
                bytes: 0,
            },
            masked: peer_is_client,
            text: false,
            limit,
            fragments: 0,
            declared: 0,
            partial: 0,
            controls: TokenBucket::new(CONTROLS_PER_SECOND, 4, now),
        }
    }

    /// Limiter for a connection after the upgrade.
    pub(crate) fn upgraded(peer_is_client: bool, limit: usize, text: bool) -> FrameLimiter {
        FrameLimiter {
            phase: NEW_HEADER,
            text,
            ..FrameLimiter::new(peer_is_client, limit, Time::ZERO)
        }
    }

    /// Checks the next bytes of the stream.
    pub(crate) fn feed(&mut self, now: Time, mut bytes: &[u8]) -> Result<(), Violation> {
        while let Some((&byte, rest)) = bytes.split_first() {
            match &mut self.phase {
                Phase::Head {
                    matched,
                    bytes: seen,
                } => {
                    *seen += 1;
                    *matched = match (byte, *matched) {
                        (b'\r', 0 | 2) => *matched + 1,
                        (b'\n', 1 | 3) => *matched + 1,
                        (b'\r', _) => 1,
                        _ => 0,
                    };
                    if *matched == 4 {
                        self.phase = NEW_HEADER;
                    } else if *seen >= MAX_HTTP_HEAD_BYTES {
                        return Err(websocket("the HTTP head is longer than 8 KiB"));
                    }
                    bytes = rest;
                }
                Phase::Header { buffer, have } => {
                    if let Some(to) = buffer.get_mut(*have) {
                        *to = byte;
                    }
                    *have += 1;
                    self.partial += 1;
                    bytes = rest;
                    let (buffer, have) = (*buffer, *have);
                    self.header(now, &buffer, have)?;
                }
                Phase::Payload {
                    left,
                    control,
                    last,
                } => {
                    let step = (*left).min(bytes.len() as u64);
                    *left -= step;
                    // `step` is at most the length of the slice.
                    bytes = bytes.get(step as usize..).unwrap_or_default();
                    self.partial += step;
                    let (done, control, last) = (*left == 0, *control, *last);
                    if done {
                        self.frame_done(control, last);
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks a header once it is complete, and its first two bytes before that.
    fn header(&mut self, now: Time, header: &[u8; 14], have: usize) -> Result<(), Violation> {
        let [first, second, lengths @ ..] = header;
        if have < 2 {
            return Ok(());
        }
        let masked = second & 0x80 != 0;
        let short = second & 0x7f;
        let length_bytes = match short {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        if have == 2 {
            self.first_bytes(*first, masked)?;
        }
        let total = 2 + length_bytes + if masked { 4 } else { 0 };
        if have < total {
            return Ok(());
        }
        let length = match length_bytes {
            0 => u64::from(short),
            n => lengths
                .iter()
                .take(n)
                .fold(0, |sum, &byte| (sum << 8) | u64::from(byte)),
        };
        let last = first & 0x80 != 0;
        let control = first & 0x08 != 0;
        if control {
            if length > 125 {
                return Err(websocket("a control frame of more than 125 bytes"));
            }
            // A close frame ends the connection anyway.
            if first & 0x0f != 0x8 && !self.controls.take(now) {
                return Err(CloseCode::FrameRate.violation("too many WebSocket pings"));
            }
        } else {
            self.fragments += 1;
            self.declared = self.declared.saturating_add(length);
            if self.declared > self.limit as u64 {
                return Err(CloseCode::FrameTooBig.violation(format!(
                    "a message of {} bytes, where the limit is {}",
                    self.declared, self.limit
                )));
            }
            if self.fragments > MAX_FRAGMENTS || (length == 0 && !(last && self.fragments == 1)) {
                return Err(CloseCode::FrameRate.violation("too many fragments, or an empty one"));
            }
        }
        if length == 0 {
            self.frame_done(control, last);
        } else {
            self.phase = Phase::Payload {
                left: length,
                control,
                last,
            };
        }
        Ok(())
    }

    fn first_bytes(&self, first: u8, masked: bool) -> Result<(), Violation> {
        if first & 0x70 != 0 {
            return Err(websocket("reserved bits are set"));
        }
        if masked != self.masked {
            return Err(websocket(if self.masked {
                "a frame from the client is not masked"
            } else {
                "a frame from the server is masked"
            }));
        }
        let last = first & 0x80 != 0;
        match (first & 0x0f, self.fragments) {
            (0x0, 0) => Err(websocket("a continuation without a message")),
            (0x0, _) => Ok(()),
            (0x1, _) if !self.text => Err(websocket("a text message")),
            (0x1 | 0x2, 0) => Ok(()),
            (0x1 | 0x2, _) => Err(websocket("a new message before the last one ended")),
            (0x8..=0xa, _) if last => Ok(()),
            (0x8..=0xa, _) => Err(websocket("a control frame in fragments")),
            _ => Err(websocket("an opcode that does not exist")),
        }
    }

    fn frame_done(&mut self, control: bool, last: bool) {
        self.phase = NEW_HEADER;
        if last && !control {
            self.fragments = 0;
            self.declared = 0;
        }
        if self.fragments == 0 {
            self.partial = 0;
        }
    }
}

/// A WebSocket over a limited byte stream.
pub(crate) type Socket = WebSocketStream<LimitedStream>;

/// Byte stream with a limiter.
pub(crate) struct LimitedStream {
    inner: BoxIo,
    pub(crate) limiter: FrameLimiter,
    start: Instant,
    pub(crate) received: u64,
    /// Bytes accepted by the layer below.
    pub(crate) written: u64,
    /// Time of the last received bytes.
    pub(crate) heard: Time,
}

impl LimitedStream {
    pub(crate) fn new(inner: BoxIo, limiter: FrameLimiter, start: Instant) -> LimitedStream {
        LimitedStream {
            inner,
            limiter,
            start,
            received: 0,
            written: 0,
            heard: Time::ZERO,
        }
    }

    /// Reads once and drops the bytes without checking them. `true`: the stream has ended.
    pub(crate) fn poll_drop(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let mut scratch = [0; 4096];
        let mut buf = ReadBuf::new(&mut scratch);
        let read = std::task::ready!(Pin::new(&mut self.inner).poll_read(cx, &mut buf));
        Poll::Ready(read.is_err() || buf.filled().is_empty())
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // A long message takes many reads.
        give_way();
        let before = buf.filled().len();
        std::task::ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        let now = Time::from(this.start.elapsed());
        let fresh = buf.filled().get(before..).unwrap_or_default();
        if !fresh.is_empty() {
            this.heard = now;
            this.received += fresh.len() as u64;
        }
        Poll::Ready(this.limiter.feed(now, fresh).map_err(io::Error::other))
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = std::task::ready!(Pin::new(&mut this.inner).poll_write(cx, buf))?;
        this.written += written as u64;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

/// For the fuzzer: verdict on these pieces of a stream, and bytes of the incomplete message.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz_frame_limiter<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Result<u64, Violation> {
    let mut limiter = FrameLimiter::new(true, 4096, Time::ZERO);
    for piece in pieces {
        limiter.feed(Time::ZERO, piece)?;
    }
    Ok(limiter.partial)
}

/// The limiter's violation inside an error of tungstenite, if there is one.
pub(crate) fn violation_in(error: &io::Error) -> Option<Violation> {
    error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<Violation>())
        .cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: usize = 1000;

    fn after_head() -> FrameLimiter {
        let mut limiter = FrameLimiter::new(true, LIMIT, Time::ZERO);
        limiter
            .feed(Time::ZERO, b"GET /tensor/v1 HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        limiter
    }

    /// A masked frame.
    fn frame(first: u8, length: usize) -> Vec<u8> {
        let mut out = vec![first];
        match length {
            0..=125 => out.push(0x80 | length as u8),
            126..=65_535 => {
                out.push(0x80 | 126);
                out.extend_from_slice(&(length as u16).to_be_bytes());
            }
            _ => {
                out.push(0x80 | 127);
                out.extend_from_slice(&(length as u64).to_be_bytes());
            }
        }
        out.extend_from_slice(&[1, 2, 3, 4]);
        out.resize(out.len() + length.min(70_000), 0xaa);
        out
    }

    fn code(bytes: &[u8]) -> Option<CloseCode> {
        let fed = after_head().feed(Time::ZERO, bytes);
        fed.err().map(|violation| violation.code)
    }

    #[test]
    fn messages_within_the_limit_pass() {
        for length in [0, 1, 125, 126, 999, 1000] {
            assert_eq!(code(&frame(0x82, length)), None, "{length}");
        }
        let fragments = [frame(0x02, 300), frame(0x00, 300), frame(0x80, 400)].concat();
        assert_eq!(code(&[fragments.clone(), fragments].concat()), None);
        let with_a_ping = [frame(0x02, 9), frame(0x89, 5), frame(0x80, 9)];
        assert_eq!(code(&with_a_ping.concat()), None);
    }

    #[test]
    fn messages_above_the_limit_are_refused_at_their_header() {
        for header in [
            &frame(0x82, 1001)[..8],
            &[0x82, 0xff, 0, 0, 0, 0, 1, 0, 0, 0, 1, 2, 3, 4],
            &[&[0x82][..], &[0xff; 9], &[1, 2, 3, 4]].concat()[..],
        ] {
            assert_eq!(code(header), Some(CloseCode::FrameTooBig));
        }
        let fragments = [frame(0x02, 600), frame(0x80, 401)].concat();
        assert_eq!(code(&fragments), Some(CloseCode::FrameTooBig));
    }

    #[test]
    fn fragment_floods_are_refused() {
        let flood = [frame(0x02, 1), frame(0x00, 1).repeat(1000)].concat();
        let empty = [frame(0x02, 1), frame(0x00, 0)].concat();
        for bytes in [flood, empty, frame(0x02, 0)] {
            assert_eq!(code(&bytes), Some(CloseCode::FrameRate));
        }
    }

    #[test]
    fn ping_floods_are_refused() {
        let flood: Vec<u8> = (0..100).flat_map(|_| frame(0x89, 0)).collect();
        assert_eq!(code(&flood), Some(CloseCode::FrameRate));
    }

    #[test]
    fn only_binary_messages_are_accepted() {
        for bytes in [
            frame(0x81, 5),                            // text
            frame(0xc2, 5),                            // a reserved bit
            frame(0xa2, 5),                            // another
            frame(0x83, 5),                            // an opcode that does not exist
            frame(0x8b, 5),                            // a control opcode that does not exist
            frame(0x80, 5),                            // a continuation without a message
            frame(0x09, 5),                            // a ping in fragments
            [frame(0x02, 5), frame(0x82, 5)].concat(), // a message within a message
            vec![0x82, 0x05, 1, 2, 3, 4, 5],           // not masked
            frame(0x89, 126),                          // a long ping
        ] {
            let begin = &bytes[..2];
            assert_eq!(code(&bytes), Some(CloseCode::WebSocket), "{begin:02x?}");
        }
    }

    #[test]
    fn text_passes_where_it_is_allowed_and_nowhere_else() {
        let code = |text, bytes: &[u8]| {
            let fed = FrameLimiter::upgraded(true, LIMIT, text).feed(Time::ZERO, bytes);
            fed.err().map(|violation| violation.code)
        };
        let fragments = [frame(0x01, 5), frame(0x80, 5)].concat();
        for bytes in [frame(0x81, 5), fragments] {
            assert_eq!(code(true, &bytes), None);
            assert_eq!(code(false, &bytes), Some(CloseCode::WebSocket));
        }
        let within = [frame(0x02, 5), frame(0x81, 5)].concat();
        assert_eq!(code(true, &within), Some(CloseCode::WebSocket));
        let above = frame(0x81, LIMIT + 1);
        assert_eq!(code(true, &above), Some(CloseCode::FrameTooBig));
    }

    #[test]
    fn an_endless_http_head_is_refused() {
        let mut limiter = FrameLimiter::new(true, LIMIT, Time::ZERO);
        let refused = limiter.feed(Time::ZERO, &[b'a'; 9000]).unwrap_err();
        assert_eq!(refused.code, CloseCode::WebSocket);
    }

    proptest! {
        #[test]
        fn how_the_bytes_are_cut_makes_no_difference(
            lengths in prop::collection::vec((0usize..1200, 0u8..5), 1..20),
            cuts in prop::collection::vec(1usize..50, 1..50),
        ) {
            let opcodes = [0x82, 0x02, 0x00, 0x80, 0x89];
            let bytes: Vec<u8> = lengths
                .iter()
                .flat_map(|(length, op)| frame(opcodes[*op as usize], *length))
                .collect();
            let mut whole = after_head();
            let expected = whole.feed(Time::ZERO, &bytes);
            let mut limiter = after_head();
            let mut result = Ok(());
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() || result.is_err() {
                    break;
                }
                let (head, tail) = rest.split_at((*cut).min(rest.len()));
                result = limiter.feed(Time::ZERO, head);
                rest = tail;
            }
            prop_assert_eq!(&result, &expected);
            if result.is_ok() {
                prop_assert_eq!(limiter.partial, whole.partial);
            }
        }

        #[test]
        fn metering_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = after_head().feed(Time::ZERO, &bytes);
        }
    }
}
