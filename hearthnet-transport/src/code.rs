//! Stable codes of failures and of session ends.
//!
//! A [`Code`] is the name of a failure in messages, events, counters and logs. A [`CloseCode`] ends
//! a session: its snake_case name travels in BYE and in the WebSocket close reason, its number in
//! the WebSocket close frame. All are part of the wire format: never renumber, never rename.

use std::borrow::{Borrow, Cow};
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use strum::{Display, EnumString, FromRepr, IntoStaticStr, VariantArray};

/// Longest code or event name, in bytes.
pub const MAX_NAME: usize = 64;

/// Stable name of a failure: 1 to 64 characters of `a-z 0-9 _`, the first a letter.
///
/// The constants are the codes that several components share: those that every call may end with,
/// and those by which a caller decides how to continue a stream. Other codes are made by
/// [`Code::new`].
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Code(Cow<'static, str>);

macro_rules! shared_codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        impl Code {
            $($(#[$doc])* pub const $name: Self = Self::new($text);)*
        }
    };
}

shared_codes! {
    /// The caller's level is too low, or it is not the node that it claims to be.
    UNAUTHORIZED = "unauthorized";
    /// The key was revoked.
    REVOKED = "revoked";
    /// A verdict found that the host signed wrong rows.
    CONVICTED = "convicted";
    /// The signature does not match the signer and the bytes.
    INVALID_SIGNATURE = "invalid_signature";
    /// The envelope was made too long ago, or lies in the future.
    CALL_EXPIRED = "call_expired";
    /// The envelope was used before.
    CALL_REPLAYED = "call_replayed";
    /// The node has no capability of this name.
    NOT_FOUND = "not_found";
    /// The node has the capability in another version.
    VERSION_UNSUPPORTED = "version_unsupported";
    /// The caller makes more calls than its budget allows.
    RATE_LIMITED = "rate_limited";
    /// The limit of running calls of this capability is reached, or a host has earlier work.
    BUSY = "busy";
    /// The capability belongs to an experiment that is switched off.
    EXPERIMENTAL_DISABLED = "experimental_disabled";
    /// A parameter is missing, unknown, of the wrong type or out of its range.
    BAD_REQUEST = "bad_request";
    /// The caller gave up.
    CANCELLED = "cancelled";
    /// The call took too long, or its caller did not read its frames.
    TIMEOUT = "timeout";
    /// The node could not be reached, or the connection was lost.
    UNREACHABLE = "unreachable";
    /// The node failed by a defect or fault of its own.
    INTERNAL = "internal";
    /// The invite cannot be used.
    BAD_INVITE = "bad_invite";
    /// The host serves other weights.
    WEIGHTS_MISMATCH = "weights_mismatch";
    /// The host's limit of open streams is reached.
    STREAM_LIMIT = "stream_limit";
    /// The caller's limit of open streams is reached.
    STREAM_QUOTA = "stream_quota";
    /// The caller, or the session, opens streams faster than allowed.
    STREAM_CHURN = "stream_churn";
    /// More positions than the stream was opened for, or than the host allows.
    CONTEXT_FULL = "context_full";
    /// The stream is larger than the host's KV memory.
    KV_TOO_SMALL = "kv_too_small";
    /// The host has no free KV memory.
    KV_FULL = "kv_full";
    /// The caller holds its whole share of the KV memory.
    KV_QUOTA = "kv_quota";
    /// The host took the stream's memory back for others.
    PREEMPTED = "preempted";
    /// The stream's limit of waiting steps or rows is exceeded.
    QUEUE_FULL = "queue_full";
    /// The caller's limit of waiting steps is reached.
    STEP_QUOTA = "step_quota";
    /// The stream was idle for too long.
    IDLE_TIMEOUT = "idle_timeout";
    /// A block's output left the range of the boundary dtype.
    BOUNDARY_OVERFLOW = "boundary_overflow";
    /// The node is about to stop.
    SHUTTING_DOWN = "shutting_down";
    /// The host is leaving and its layers move elsewhere; not a failure.
    LEAVING = "leaving";
    /// The host sends nothing at all.
    SILENT = "silent";
    /// The host is much slower than expected.
    DEGRADED = "degraded";
    /// The host did not answer within the health timeout.
    PIPELINE_STALLED = "pipeline_stalled";
    /// The session with a host ended unexpectedly.
    CONNECTION_LOST = "connection_lost";
}

impl Code {
    /// Makes a code. A name with an invalid spelling is sent as `internal`.
    pub const fn new(name: &'static str) -> Self {
        Self(Cow::Borrowed(name))
    }

    /// Parses a peer's code; `None` if the spelling is invalid.
    pub fn parse(text: &str) -> Option<Self> {
        is_name(text).then(|| Self(Cow::Owned(text.to_owned())))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns whether a text is spelled like a code or an event name.
pub fn is_name(text: &str) -> bool {
    text.len() <= MAX_NAME
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&'static str> for Code {
    fn from(name: &'static str) -> Self {
        Self::new(name)
    }
}

/// Allows maps to be searched by text.
impl Borrow<str> for Code {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl PartialEq<str> for Code {
    fn eq(&self, text: &str) -> bool {
        self.0 == text
    }
}

impl PartialEq<&str> for Code {
    fn eq(&self, text: &&str) -> bool {
        self.0 == *text
    }
}

/// Label value of a metric.
impl From<Code> for metrics::SharedString {
    fn from(code: Code) -> Self {
        code.0.into()
    }
}

impl<'de> Deserialize<'de> for Code {
    /// A peer's code with an invalid spelling becomes `unrecognised`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(Self::parse(&text).unwrap_or(Self::new("unrecognised")))
    }
}

/// Why a session ended. Every violation has its own code.
///
/// The name on the wire is the variant's name in snake_case, unless an attribute states another.
/// Renaming a variant changes the wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
#[derive(Display, EnumString, FromRepr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[non_exhaustive]
pub enum CloseCode {
    /// The sender has finished.
    Normal = 4000,
    /// The process is shutting down.
    Shutdown = 4001,
    /// The negotiated session lifetime (or the sequence numbers) ran out; open a new session.
    SessionExpired = 4002,
    /// The peer sent nothing for two keep-alive intervals.
    KeepAlive = 4003,
    /// A defect or a resource failure of the sender.
    Internal = 4004,
    /// The connection ended without a BYE. Never sent.
    Lost = 4005,
    /// The peer sent a code that this version does not know. Never sent.
    Unrecognised = 4006,

    /// A text message, reserved bits, an unmasked client frame: the WebSocket rules are broken.
    #[strum(serialize = "websocket")]
    WebSocket = 4010,
    /// The payload length disagrees with the message.
    FrameLength = 4011,
    /// A message, body or tensor larger than what was negotiated.
    FrameTooBig = 4012,
    /// An unknown version, frame type or flag, or a reserved field that is not zero.
    FrameUnknown = 4013,
    /// A gap, duplicate or wrap in the sequence numbers.
    FrameSequence = 4014,
    /// Too many fragments, pings or control frames.
    FrameRate = 4015,
    /// A known frame in a state or direction where it makes no sense.
    ProtocolState = 4016,
    /// A body that does not have the layout of its type.
    BodyMalformed = 4017,
    /// No protocol version in common.
    VersionUnsupported = 4018,

    /// A chunk or step beyond the window.
    CreditOverrun = 4030,
    /// A grant that lifts the window above its ceiling.
    CreditOverflow = 4031,
    /// An ACK or NACK of unsent chunks.
    CreditAck = 4032,
    /// The peer withheld credit past the deadline.
    CreditStall = 4033,
    /// A chunk smaller than the negotiated chunk size that is not the last one.
    ChunkTooSmall = 4034,
    /// Tensors announced beyond the receiver's buffer.
    BufferOverrun = 4035,
    /// Streams opened and closed faster than the limit.
    StreamChurn = 4036,
    /// No progress, or progress below the minimum rate, within a phase's deadline.
    PipelineStalled = 4037,

    /// Dimensions of zero, overflowing, or disagreeing with the data or the announcement.
    TensorShape = 4050,
    /// A tensor id that is in use, or that names no tensor.
    TensorId = 4051,
    /// A chunk that does not decompress to exactly the expected length.
    Decompression = 4052,

    /// The peer's key is not admitted.
    Unauthorized = 4070,
    /// The session token cannot be read.
    TokenInvalid = 4071,
    /// The token's subject is not the TLS peer.
    TokenSubject = 4072,
    /// The token was made for another host.
    TokenAudience = 4073,
    /// The token does not cover this purpose.
    TokenScope = 4074,
    /// The token is not valid yet, or no longer.
    TokenExpired = 4075,
    /// The token was used before.
    TokenReplayed = 4076,
    /// A signature that does not verify strictly.
    InvalidSignature = 4077,
    /// The peer's key or token has been revoked.
    Revoked = 4078,
    /// The host does not serve the purpose that HELLO names.
    PurposeUnknown = 4079,
    /// The answering key is not the expected one.
    IdentityMismatch = 4080,

    /// The host's limit of sessions is reached.
    SessionLimit = 4090,
    /// Too many connections, from this address or in all.
    ConnectionLimit = 4091,
}

impl CloseCode {
    /// Every code, in numeric order.
    pub const ALL: &'static [CloseCode] = CloseCode::VARIANTS;

    /// Stable name, as in BYE and logs.
    pub const fn as_str(self) -> &'static str {
        self.into_str()
    }

    /// The WebSocket close code, 4000 to 4999.
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// A violation with this code and a fixed or formatted explanation.
    pub fn violation(self, detail: impl Into<Cow<'static, str>>) -> Violation {
        Violation {
            code: self,
            detail: detail.into(),
        }
    }

    /// Returns whether the code names a rule that the other side has broken, rather than the end of
    /// a connection, a deadline, or a missing permission.
    pub const fn is_violation(self) -> bool {
        match self {
            CloseCode::CreditStall | CloseCode::PipelineStalled => false,
            code => matches!(code.number(), 4010..=4069),
        }
    }

    /// Returns whether the code may appear on the wire. [`Lost`](Self::Lost) and
    /// [`Unrecognised`](Self::Unrecognised) only describe observations.
    pub(crate) const fn is_sendable(self) -> bool {
        !matches!(self, CloseCode::Lost | CloseCode::Unrecognised)
    }
}

impl From<CloseCode> for Code {
    fn from(code: CloseCode) -> Self {
        Self::new(code.as_str())
    }
}

/// A rule that a peer broke: the code that ends the session, and what exactly was wrong.
///
/// The detail is for this side's log. It never contains payload bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {detail}")]
pub struct Violation {
    pub code: CloseCode,
    pub detail: Cow<'static, str>,
}

/// Cause of the end of a session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the session was closed by {}: {code}{}", if *.by_us { "this side" } else { "the peer" },
    if .detail.is_empty() { String::new() } else { format!(" ({})", .detail) })]
#[non_exhaustive]
pub struct SessionClosed {
    pub code: CloseCode,
    /// True if this side closed the connection.
    pub by_us: bool,
    /// Details, if known: from this side's observation or from the peer's BYE.
    pub detail: String,
}

impl SessionClosed {
    /// Closed by this side.
    pub fn by_us(code: CloseCode, detail: impl Into<String>) -> Self {
        SessionClosed {
            code,
            by_us: true,
            detail: detail.into(),
        }
    }

    /// Closed by the peer, or lost.
    pub(crate) fn by_peer(code: CloseCode, detail: impl Into<String>) -> Self {
        SessionClosed {
            code,
            by_us: false,
            detail: detail.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn codes_have_one_spelling() {
        for good in ["a", "rate_limited", "m26_x", &"a".repeat(64)] {
            assert_eq!(Code::parse(good).unwrap().as_str(), good);
        }
        for bad in ["", "A", "_a", "1a", "a b", "a-b", "é", &"a".repeat(65)] {
            assert_eq!(Code::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn every_code_has_its_own_name_and_number() {
        let names: BTreeSet<_> = CloseCode::ALL.iter().map(|c| c.as_str()).collect();
        let numbers: BTreeSet<_> = CloseCode::ALL.iter().map(|c| c.number()).collect();
        assert_eq!(names.len(), CloseCode::ALL.len());
        assert_eq!(numbers.len(), CloseCode::ALL.len());
        for &code in CloseCode::ALL {
            assert!((4000..5000).contains(&code.number()));
            assert_eq!(code.as_str().parse(), Ok(code));
            assert_eq!(CloseCode::from_repr(code.number()), Some(code));
            // The reason of a WebSocket close frame holds at most 123 bytes.
            assert!(code.as_str().len() <= 123);
        }
    }
}
