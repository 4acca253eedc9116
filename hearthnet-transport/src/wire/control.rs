//! Control bodies: HELLO, BYE, ACK, NACK, FLOWCTL, TENSOR_END (CBOR maps), PING and PONG (8 bytes).

use std::fmt;
use std::time::Duration;

use ciborium::Value;

use super::cbor::{self, MapReader, MapWriter, malformed};
use super::reader::Reader;
use super::{Flags, FrameBuf, FrameType};
use crate::code::{CloseCode, Violation};
use crate::config::{Config, MAX_CHUNK_BYTES, MAX_WINDOW_CHUNKS, MIN_CHUNK_BYTES};
use crate::time::Time;

/// Protocol version that HELLO negotiates.
pub(crate) const PROTOCOL_VERSION: u32 = 1;
/// Longest session token, in bytes.
pub(crate) const MAX_TOKEN_BYTES: usize = 2048;
/// Longest purpose, in bytes.
pub(crate) const MAX_PURPOSE_BYTES: usize = 32;
/// Longest name of the software, in bytes.
pub(crate) const MAX_AGENT_BYTES: usize = 64;
/// Longest explanation in a BYE, in bytes.
const MAX_DETAIL_BYTES: usize = 256;
/// Longest code in a NACK or BYE, in bytes.
const MAX_CODE_BYTES: usize = 64;

/// What the caller says about itself when it opens a session.
///
/// `Debug` does not print the token.
#[derive(Clone, PartialEq, Eq)]
pub struct Hello {
    /// What the session is for: `"pipeline"`, `"bench"`; 1 to 32 characters of `a-z0-9._-`.
    pub purpose: String,
    /// The session token, at most 2,048 bytes. Its format is the admission's business.
    pub token: Vec<u8>,
    /// Name and version of the caller's software, at most 64 bytes; for people.
    pub agent: String,
}

impl Hello {
    /// A HELLO of this software.
    pub fn new(purpose: impl Into<String>, token: impl Into<Vec<u8>>) -> Hello {
        Hello {
            purpose: purpose.into(),
            token: token.into(),
            agent: concat!("hearthnet/", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }

    /// Checks the lengths and the alphabet of the purpose.
    ///
    /// # Errors
    /// `body_malformed`.
    pub fn check(&self) -> Result<(), Violation> {
        let letters =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
        if self.purpose.is_empty()
            || self.purpose.len() > MAX_PURPOSE_BYTES
            || !self.purpose.bytes().all(letters)
        {
            return Err(CloseCode::BodyMalformed
                .violation("`purpose` must be 1 to 32 characters of a-z, 0-9, `.`, `_` and `-`"));
        }
        if self.token.len() > MAX_TOKEN_BYTES || self.agent.len() > MAX_AGENT_BYTES {
            return Err(malformed("`token` or `agent` is too long"));
        }
        Ok(())
    }
}

impl fmt::Debug for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hello")
            .field("purpose", &self.purpose)
            .field("token_bytes", &self.token.len())
            .field("agent", &self.agent)
            .finish()
    }
}

/// The limits that each HELLO announces. A field that is absent has the default value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) chunk_bytes: u32,
    pub(crate) window_chunks: u32,
    pub(crate) recv_buffer_bytes: u32,
    pub(crate) max_steps: u32,
    pub(crate) inline_max: u32,
    pub(crate) zstd: bool,
    pub(crate) lifetime_ms: u64,
}

impl Limits {
    pub(crate) fn of(config: &Config) -> Limits {
        Limits {
            chunk_bytes: config.chunk_bytes,
            window_chunks: config.window_chunks,
            recv_buffer_bytes: config.recv_buffer_bytes,
            max_steps: config.max_steps_in_flight,
            inline_max: config.inline_max,
            zstd: config.compress_above.is_some(),
            lifetime_ms: Time::from(config.session_lifetime).0 / 1000,
        }
    }

    fn write(self, map: MapWriter) -> MapWriter {
        let zstd = self.zstd.then(|| Value::Text("zstd".to_owned()));
        map.uint("chunk_bytes", self.chunk_bytes)
            .uint("window_chunks", self.window_chunks)
            .uint("recv_buffer_bytes", self.recv_buffer_bytes)
            .uint("max_steps", self.max_steps)
            .uint("inline_max", self.inline_max)
            .uint("lifetime_ms", self.lifetime_ms)
            .value("compression", Value::Array(zstd.into_iter().collect()))
    }

    fn read(map: &mut MapReader) -> Result<Limits, Violation> {
        let defaults = Limits::of(&Config::default());
        let zstd = match map.take("compression") {
            None => false,
            Some(Value::Array(list)) => list.iter().any(|name| name.as_text() == Some("zstd")),
            Some(_) => {
                return Err(malformed("`compression` is no list"));
            }
        };
        let limits = Limits {
            chunk_bytes: map.opt_uint("chunk_bytes")?.unwrap_or(defaults.chunk_bytes),
            window_chunks: map
                .opt_uint("window_chunks")?
                .unwrap_or(defaults.window_chunks),
            recv_buffer_bytes: map
                .opt_uint("recv_buffer_bytes")?
                .unwrap_or(defaults.recv_buffer_bytes),
            max_steps: map.opt_uint("max_steps")?.unwrap_or(defaults.max_steps),
            inline_max: map.opt_uint("inline_max")?.unwrap_or(defaults.inline_max),
            zstd,
            lifetime_ms: map.opt_u64("lifetime_ms")?.unwrap_or(defaults.lifetime_ms),
        };
        let in_range = (MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&limits.chunk_bytes)
            && (1..=MAX_WINDOW_CHUNKS).contains(&limits.window_chunks)
            && limits.recv_buffer_bytes >= limits.chunk_bytes
            && (1..=65_535).contains(&limits.max_steps)
            && (1024..=1024 * 1024).contains(&limits.inline_max)
            && limits.lifetime_ms >= 1;
        if in_range {
            Ok(limits)
        } else {
            Err(malformed("a limit in HELLO is out of its range"))
        }
    }

    pub(crate) fn lifetime(&self) -> Duration {
        Duration::from_millis(self.lifetime_ms)
    }
}

/// The caller's HELLO.
pub(crate) fn client_hello(hello: &Hello, limits: Limits) -> FrameBuf {
    let versions = Value::Array(vec![Value::Integer(PROTOCOL_VERSION.into())]);
    let map = MapWriter::new()
        .value("versions", versions)
        .text("purpose", &hello.purpose)
        .bytes("token", &hello.token)
        .text("agent", &hello.agent);
    limits.write(map).frame(FrameType::Hello)
}

pub(crate) fn read_client_hello(body: &[u8]) -> Result<(Hello, Limits), Violation> {
    let mut map = MapReader::new(body)?;
    let speaks = |list: &[Value]| {
        list.iter().any(|version| {
            version.as_integer().and_then(|v| u32::try_from(v).ok()) == Some(PROTOCOL_VERSION)
        })
    };
    match map.take("versions") {
        Some(Value::Array(list)) if speaks(&list) => {}
        Some(Value::Array(_)) => {
            return Err(CloseCode::VersionUnsupported.violation("no version in common"));
        }
        _ => {
            return Err(malformed("`versions` is missing or no list"));
        }
    }
    let hello = Hello {
        purpose: map.text("purpose", MAX_PURPOSE_BYTES)?,
        token: map.opt_bytes("token", MAX_TOKEN_BYTES)?.unwrap_or_default(),
        agent: map.opt_text("agent", MAX_AGENT_BYTES)?.unwrap_or_default(),
    };
    hello.check()?;
    // Keys that a later version adds to HELLO are ignored.
    Ok((hello, Limits::read(&mut map)?))
}

/// The host's HELLO.
pub(crate) fn server_hello(agent: &str, limits: Limits) -> FrameBuf {
    let map = MapWriter::new()
        .uint("version", PROTOCOL_VERSION)
        .text("agent", agent);
    limits.write(map).frame(FrameType::Hello)
}

pub(crate) fn read_server_hello(body: &[u8]) -> Result<(String, Limits), Violation> {
    let mut map = MapReader::new(body)?;
    if map.uint::<u32>("version")? != PROTOCOL_VERSION {
        return Err(CloseCode::VersionUnsupported
            .violation("the host chose a version that was not offered"));
    }
    let agent = map.opt_text("agent", MAX_AGENT_BYTES)?.unwrap_or_default();
    Ok((agent, Limits::read(&mut map)?))
}

/// The end of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bye {
    pub(crate) code: CloseCode,
    pub(crate) detail: String,
}

/// The longest prefix of at most `max` bytes that does not split a character.
pub(crate) fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len()))
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0);
    text.get(..end).unwrap_or_default()
}

impl Bye {
    pub(crate) fn frame(&self) -> FrameBuf {
        MapWriter::new()
            .text("code", self.code.as_str())
            .text("detail", cut(&self.detail, MAX_DETAIL_BYTES))
            .frame(FrameType::Bye)
    }

    pub(crate) fn read(body: &[u8]) -> Result<Bye, Violation> {
        let (code, detail) = cbor::read(body, |map| {
            let code = map.text("code", MAX_CODE_BYTES)?;
            Ok((code, map.opt_text("detail", MAX_DETAIL_BYTES)?))
        })?;
        let code = CloseCode::from_name(&code)
            .filter(|code| code.is_sendable())
            .unwrap_or(CloseCode::Unrecognised);
        let detail = detail.unwrap_or_default();
        Ok(Bye { code, detail })
    }
}

/// Returns the credit of `chunks` chunks of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) tensor: u16,
    pub(crate) chunks: u32,
    /// The receiver has let go of the tensor: its buffer is free, its id may be used again.
    pub(crate) end: bool,
}

impl Ack {
    pub(crate) fn frame(&self) -> FrameBuf {
        MapWriter::new()
            .uint("tensor", self.tensor)
            .uint("chunks", self.chunks)
            .bool("end", self.end)
            .frame(FrameType::Ack)
    }

    pub(crate) fn read(body: &[u8]) -> Result<Ack, Violation> {
        cbor::read(body, |map| {
            Ok(Ack {
                tensor: map.uint("tensor")?,
                chunks: map.uint("chunks")?,
                end: map.opt_bool("end")?.unwrap_or(false),
            })
        })
    }
}

/// Refuses a tensor: its credit is returned, the sender stops and ends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Nack {
    pub(crate) tensor: u16,
    pub(crate) code: String,
}

impl Nack {
    pub(crate) fn frame(&self) -> FrameBuf {
        MapWriter::new()
            .uint("tensor", self.tensor)
            .text("code", cut(&self.code, MAX_CODE_BYTES))
            .frame(FrameType::Nack)
    }

    pub(crate) fn read(body: &[u8]) -> Result<Nack, Violation> {
        cbor::read(body, |map| {
            Ok(Nack {
                tensor: map.uint("tensor")?,
                code: map.text("code", MAX_CODE_BYTES)?,
            })
        })
    }
}

/// Widens the window by `grant` chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowCtl {
    pub(crate) grant: u32,
}

impl FlowCtl {
    pub(crate) fn frame(&self) -> FrameBuf {
        let map = MapWriter::new().uint("grant", self.grant);
        map.frame(FrameType::FlowCtl)
    }

    pub(crate) fn read(body: &[u8]) -> Result<FlowCtl, Violation> {
        let grant = cbor::read(body, |map| map.uint("grant"))?;
        Ok(FlowCtl { grant })
    }
}

/// The sender gives a tensor up before its last chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorEnd {
    pub(crate) tensor: u16,
}

impl TensorEnd {
    pub(crate) fn frame(&self) -> FrameBuf {
        let map = MapWriter::new().uint("tensor", self.tensor);
        map.frame(FrameType::TensorEnd)
    }

    pub(crate) fn read(body: &[u8]) -> Result<TensorEnd, Violation> {
        let tensor = cbor::read(body, |map| map.uint("tensor"))?;
        Ok(TensorEnd { tensor })
    }
}

/// PING or PONG with its 8 opaque bytes.
pub(crate) fn ping(kind: FrameType, token: u64) -> FrameBuf {
    let mut frame = FrameBuf::with_capacity(8);
    frame.body().extend_from_slice(&token.to_be_bytes());
    frame.finish(kind, Flags::NONE)
}

pub(crate) fn read_ping(body: &[u8]) -> Result<u64, Violation> {
    let mut reader = Reader::new(body);
    let token = reader.u64()?;
    reader.end()?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::HEADER_BYTES;

    fn body(frame: FrameBuf) -> Vec<u8> {
        frame.into_bytes(1).split_off(HEADER_BYTES)
    }

    #[test]
    fn control_bodies_survive_a_round_trip() {
        let limits = Limits::of(&Config::default());
        let hello = Hello::new("pipeline", vec![1, 2, 3]);
        assert_eq!(
            read_client_hello(&body(client_hello(&hello, limits))).unwrap(),
            (hello, limits)
        );
        assert_eq!(
            read_server_hello(&body(server_hello("x/1", limits))).unwrap(),
            ("x/1".to_owned(), limits)
        );
        let bye = Bye {
            code: CloseCode::CreditAck,
            detail: "because".into(),
        };
        assert_eq!(Bye::read(&body(bye.frame())).unwrap(), bye);
        let ack = Ack {
            tensor: 7,
            chunks: 3,
            end: true,
        };
        assert_eq!(Ack::read(&body(ack.frame())).unwrap(), ack);
        let nack = Nack {
            tensor: 65_535,
            code: "stream_closed".into(),
        };
        assert_eq!(Nack::read(&body(nack.frame())).unwrap(), nack);
        let flow = FlowCtl { grant: u32::MAX };
        assert_eq!(FlowCtl::read(&body(flow.frame())).unwrap(), flow);
        let end = TensorEnd { tensor: 0 };
        assert_eq!(TensorEnd::read(&body(end.frame())).unwrap(), end);
        assert_eq!(read_ping(&body(ping(FrameType::Ping, 5))).unwrap(), 5);
    }

    #[test]
    fn a_hello_with_the_longest_fields_fits_the_limit_before_hello() {
        let hello = Hello {
            purpose: "p".repeat(MAX_PURPOSE_BYTES),
            token: vec![0xff; MAX_TOKEN_BYTES],
            agent: "a".repeat(MAX_AGENT_BYTES),
        };
        let frame = client_hello(&hello, Limits::of(&Config::default()));
        assert!(frame.len() <= crate::config::CONTROL_MESSAGE_BYTES);
    }

    #[test]
    fn absent_limits_have_the_defaults_and_unknown_keys_of_hello_are_ignored() {
        let map = MapWriter::new()
            .value("versions", Value::Array(vec![Value::Integer(1.into())]))
            .text("purpose", "bench")
            .uint("added_in_version_9", 1u32);
        let mut out = Vec::new();
        map.write_to(&mut out);
        let (hello, limits) = read_client_hello(&out).unwrap();
        assert_eq!(hello.purpose, "bench");
        assert_eq!(
            limits,
            Limits {
                zstd: false,
                ..Limits::of(&Config::default())
            }
        );
    }

    #[test]
    fn a_hello_without_a_version_in_common_is_refused_as_such() {
        let mut out = Vec::new();
        MapWriter::new()
            .value("versions", Value::Array(vec![Value::Integer(2.into())]))
            .text("purpose", "bench")
            .write_to(&mut out);
        assert_eq!(
            read_client_hello(&out).unwrap_err().code,
            CloseCode::VersionUnsupported
        );
    }

    #[test]
    fn limits_out_of_range_are_refused() {
        for (key, value) in [
            ("chunk_bytes", 4095u32),
            ("chunk_bytes", u32::MAX),
            ("window_chunks", 0),
            ("window_chunks", 1025),
            ("recv_buffer_bytes", 1),
            ("max_steps", 0),
            ("max_steps", 65_536),
            ("inline_max", 1023),
            ("inline_max", 2 * 1024 * 1024),
            ("lifetime_ms", 0),
        ] {
            let mut out = Vec::new();
            MapWriter::new()
                .value("versions", Value::Array(vec![Value::Integer(1.into())]))
                .text("purpose", "bench")
                .uint(key, value)
                .write_to(&mut out);
            let code = read_client_hello(&out).unwrap_err().code;
            assert_eq!(code, CloseCode::BodyMalformed, "{key} = {value}");
        }
    }

    #[test]
    fn a_bye_with_a_code_of_the_future_is_understood_as_a_bye() {
        let mut out = Vec::new();
        MapWriter::new()
            .text("code", "from_the_future")
            .write_to(&mut out);
        assert_eq!(Bye::read(&out).unwrap().code, CloseCode::Unrecognised);
    }

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(cut("grün", 3), "gr");
        assert_eq!(cut("grün", 4), "grü");
        assert_eq!(cut("grün", 400), "grün");
    }
}
