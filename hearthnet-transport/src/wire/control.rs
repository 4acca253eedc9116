//! Control bodies: HELLO, BYE, ACK, NACK, FLOWCTL, TENSOR_END (CBOR maps), PING and PONG (8 bytes).

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Buf as _;
use ciborium::Value;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::cbor::{self, Map, bodies, malformed};
use super::{Flags, FrameBuf, FrameType, reader};
use crate::code::{CloseCode, Violation};
use crate::config::{
    Config, MAX_CHUNK_BYTES, MAX_RECEIPT_POSITIONS, MAX_WINDOW_CHUNKS, MIN_CHUNK_BYTES,
};
use crate::fields;
use crate::time::Time;

bodies!(TensorEnd, Ack, Nack, Bye, FlowCtl);

/// Protocol version that HELLO negotiates.
pub(crate) const PROTOCOL_VERSION: u32 = 1;
/// Longest session token, in bytes.
pub(crate) const MAX_TOKEN_BYTES: usize = 2048;
/// Longest purpose, in bytes.
pub(crate) const MAX_PURPOSE_BYTES: usize = 32;
/// Longest name of the software, in bytes.
pub(crate) const MAX_AGENT_BYTES: usize = 64;
/// Limit of the detail in a BYE, in bytes.
const MAX_DETAIL_BYTES: usize = 256;
/// Limit of the code in a NACK or BYE, in bytes.
const MAX_CODE_BYTES: usize = 64;

/// Contents of the caller's HELLO.
///
/// `Debug` does not print the token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Purpose of the session: `"pipeline"`, `"bench"`; 1 to 32 characters of `a-z0-9._-`.
    pub purpose: String,
    /// Session token, at most 2,048 bytes. Only the host's [`Admission`](crate::Admission)
    /// interprets it.
    #[serde(default, with = "serde_bytes")]
    pub token: Vec<u8>,
    /// Name and version of the caller's software, at most 64 bytes; for people.
    #[serde(default)]
    pub agent: String,
}

impl Hello {
    /// HELLO with this program's agent.
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

/// Limits announced in each HELLO. An absent field has the default value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default = "Limits::defaults")]
pub(crate) struct Limits {
    pub(crate) chunk_bytes: u32,
    pub(crate) window_chunks: u32,
    pub(crate) recv_buffer_bytes: u32,
    pub(crate) max_steps: u32,
    pub(crate) inline_max: u32,
    pub(crate) lifetime_ms: u64,
    #[serde(rename = "compression", with = "compression")]
    pub(crate) zstd: bool,
    pub(crate) stream_steps: u32,
    pub(crate) caller_steps: u32,
    pub(crate) unread_bytes: u32,
    pub(crate) receipts: u32,
}

impl Limits {
    pub(crate) fn of(config: &Config) -> Limits {
        Limits {
            chunk_bytes: config.chunk_bytes,
            window_chunks: config.window_chunks,
            recv_buffer_bytes: config.recv_buffer_bytes,
            max_steps: config.max_steps_in_flight,
            inline_max: config.inline_max,
            lifetime_ms: Time::from(config.session_lifetime).0 / 1000,
            zstd: config.compress_above.is_some(),
            stream_steps: config.stream_steps,
            caller_steps: config.caller_steps,
            unread_bytes: config.send_buffer_bytes,
            receipts: config.receipts,
        }
    }

    /// Defaults of a HELLO without limits.
    fn defaults() -> Limits {
        Limits {
            zstd: false,
            receipts: 0,
            ..Limits::of(&Config::default())
        }
    }

    fn read(map: &Map) -> Result<Limits, Violation> {
        let limits: Limits = map.fields()?;
        let in_range = (MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&limits.chunk_bytes)
            && (1..=MAX_WINDOW_CHUNKS).contains(&limits.window_chunks)
            && limits.recv_buffer_bytes >= limits.chunk_bytes
            && (1..=65_535).contains(&limits.max_steps)
            && (1024..=1024 * 1024).contains(&limits.inline_max)
            && limits.lifetime_ms >= 1
            && limits.stream_steps >= 1
            && limits.caller_steps >= 1
            && limits.receipts <= MAX_RECEIPT_POSITIONS;
        match in_range {
            true => Ok(limits),
            false => Err(malformed("a limit in HELLO is out of its range")),
        }
    }

    /// Positions between two receipts, as both sides want it; 0: none.
    pub(crate) fn receipts_with(&self, peer: &Limits) -> u32 {
        match self.receipts.min(peer.receipts) {
            0 => 0,
            _ => self.receipts.max(peer.receipts),
        }
    }

    pub(crate) fn lifetime(&self) -> Duration {
        Duration::from_millis(self.lifetime_ms)
    }
}

/// Supported decompression, as a list of names.
mod compression {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    const ZSTD: &str = "zstd";

    #[allow(clippy::trivially_copy_pass_by_ref)] // The signature is serde's.
    pub(super) fn serialize<S: Serializer>(zstd: &bool, to: S) -> Result<S::Ok, S::Error> {
        zstd.then_some(ZSTD).as_slice().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
        let names = Vec::<String>::deserialize(from)?;
        Ok(names.iter().any(|name| name == ZSTD))
    }
}

/// Fields before those of [`Hello`] in the caller's HELLO.
#[derive(Serialize, Deserialize)]
struct Versions {
    versions: Vec<u64>,
}

/// Fields of the host's HELLO besides its limits.
#[derive(Serialize, Deserialize)]
struct Answer {
    version: u32,
    #[serde(default, deserialize_with = "fields::text::<MAX_AGENT_BYTES, _>")]
    agent: String,
}

/// Builds a HELLO from the fields of several structs.
fn hello_of<const N: usize>(parts: [Result<Value, ciborium::value::Error>; N]) -> FrameBuf {
    let parts = parts.into_iter().map(|part| match part {
        Ok(Value::Map(fields)) => fields,
        _ => {
            debug_assert!(false, "a struct becomes a map");
            Vec::new()
        }
    });
    cbor::frame(FrameType::Hello, &Value::Map(parts.flatten().collect()))
}

pub(crate) fn client_hello(hello: &Hello, limits: Limits) -> FrameBuf {
    let versions = vec![PROTOCOL_VERSION.into()];
    hello_of([
        Value::serialized(&Versions { versions }),
        Value::serialized(hello),
        Value::serialized(&limits),
    ])
}

pub(crate) fn read_client_hello(body: &[u8]) -> Result<(Hello, Limits), Violation> {
    // Keys that a later version adds to HELLO are ignored.
    let map = Map::read(body)?;
    let Versions { versions } = map.fields()?;
    if !versions.contains(&PROTOCOL_VERSION.into()) {
        return Err(CloseCode::VersionUnsupported.violation("no version in common"));
    }
    let hello: Hello = map.fields()?;
    hello.check()?;
    Ok((hello, Limits::read(&map)?))
}

pub(crate) fn server_hello(agent: &str, limits: Limits) -> FrameBuf {
    let answer = Answer {
        version: PROTOCOL_VERSION,
        agent: agent.to_owned(),
    };
    hello_of([Value::serialized(&answer), Value::serialized(&limits)])
}

pub(crate) fn read_server_hello(body: &[u8]) -> Result<(String, Limits), Violation> {
    let map = Map::read(body)?;
    let Answer { version, agent } = map.fields()?;
    if version != PROTOCOL_VERSION {
        return Err(CloseCode::VersionUnsupported
            .violation("the host chose a version that was not offered"));
    }
    Ok((agent, Limits::read(&map)?))
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bye {
    #[serde(with = "close_code")]
    pub(crate) code: CloseCode,
    #[serde(
        default,
        serialize_with = "fields::write_cut::<MAX_DETAIL_BYTES, _>",
        deserialize_with = "fields::text::<MAX_DETAIL_BYTES, _>"
    )]
    pub(crate) detail: String,
}

/// A close code by its name. An unknown code, of a later version, ends the session too.
mod close_code {
    use super::{CloseCode, Deserializer, MAX_CODE_BYTES, Serializer, fields};

    #[allow(clippy::trivially_copy_pass_by_ref)] // The signature is serde's.
    pub(super) fn serialize<S: Serializer>(code: &CloseCode, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(code.as_str())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<CloseCode, D::Error> {
        let name = fields::text::<MAX_CODE_BYTES, _>(from)?;
        let code = name
            .parse::<CloseCode>()
            .ok()
            .filter(|code| code.is_sendable());
        Ok(code.unwrap_or(CloseCode::Unrecognised))
    }
}

/// Returns the credit of `chunks` chunks of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ack {
    pub(crate) tensor: u16,
    pub(crate) chunks: u32,
    /// The receiver has freed the tensor: its buffer is free, its id may be reused.
    #[serde(default)]
    pub(crate) end: bool,
}

/// Refuses a tensor: returns its credit; the sender stops and ends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nack {
    pub(crate) tensor: u16,
    #[serde(deserialize_with = "fields::text::<MAX_CODE_BYTES, _>")]
    pub(crate) code: String,
}

/// Widens the window by `grant` chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FlowCtl {
    /// A grant of 0 is out of the field's range, so it does not decode.
    pub(crate) grant: NonZeroU32,
}

/// The sender abandons a tensor before its last chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorEnd {
    pub(crate) tensor: u16,
}

/// PING or PONG with its 8 opaque bytes.
pub(crate) fn ping(kind: FrameType, token: u64) -> FrameBuf {
    let mut frame = FrameBuf::with_capacity(8);
    frame.body().extend_from_slice(&token.to_be_bytes());
    frame.finish(kind, Flags::NONE)
}

pub(crate) fn read_ping(mut body: &[u8]) -> Result<u64, Violation> {
    let token = body.try_get_u64()?;
    reader::end(body)?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use hearthnet_testkit::raw::cbor;

    use super::*;
    use crate::wire::HEADER_BYTES;
    use crate::wire::cbor::Body;

    /// A caller's HELLO with one version and additional fields.
    fn hello_with(version: u32, more: &[(&str, Value)]) -> Vec<u8> {
        let versions = Value::Array(vec![version.into()]);
        let needed = [("versions", versions), ("purpose", "bench".into())];
        cbor(&[&needed[..], more].concat())
    }

    fn body(frame: FrameBuf) -> Vec<u8> {
        frame.into_bytes(1).split_off(HEADER_BYTES)
    }

    fn survives<T: Body + PartialEq + fmt::Debug>(sent: T) {
        assert_eq!(T::read(&body(sent.frame())).unwrap(), sent);
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
        let (code, detail) = (CloseCode::CreditAck, "because".into());
        survives(Bye { code, detail });
        survives(Ack {
            tensor: 7,
            chunks: 3,
            end: true,
        });
        let (tensor, code) = (65_535, "stream_closed".into());
        survives(Nack { tensor, code });
        survives(FlowCtl {
            grant: NonZeroU32::MAX,
        });
        survives(TensorEnd { tensor: 0 });
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
        let later = [("added_in_version_9", 1.into())];
        let (hello, limits) = read_client_hello(&hello_with(1, &later)).unwrap();
        assert_eq!(hello.purpose, "bench");
        let mut defaults = Limits::of(&Config::default());
        (defaults.zstd, defaults.receipts) = (false, 0);
        assert_eq!(limits, defaults);
    }

    #[test]
    fn a_hello_without_a_version_in_common_is_refused_as_such() {
        let refused = read_client_hello(&hello_with(2, &[])).unwrap_err();
        assert_eq!(refused.code, CloseCode::VersionUnsupported);
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
            ("stream_steps", 0),
            ("caller_steps", 0),
            ("receipts", 65_537),
        ] {
            let body = hello_with(1, &[(key, value.into())]);
            let code = read_client_hello(&body).unwrap_err().code;
            assert_eq!(code, CloseCode::BodyMalformed, "{key} = {value}");
        }
    }

    #[test]
    fn the_larger_interval_of_receipts_holds_and_none_wins() {
        let limits = |receipts| Limits {
            receipts,
            ..Limits::defaults()
        };
        for (caller, host, both) in [(64, 16, 64), (1, 16, 16), (0, 16, 0), (64, 0, 0)] {
            assert_eq!(limits(caller).receipts_with(&limits(host)), both);
            assert_eq!(limits(host).receipts_with(&limits(caller)), both);
        }
    }

    #[test]
    fn a_bye_with_a_code_of_the_future_is_understood_as_a_bye() {
        let body = cbor(&[("code", "from_the_future".into())]);
        assert_eq!(Bye::read(&body).unwrap().code, CloseCode::Unrecognised);
    }
}
