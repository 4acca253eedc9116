//! One text message of `/bus/v1`: a JSON object with `call`, `seq`, `event` and `data`.

use hearthnet_transport::{CloseCode, Code, is_name};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::CallError;
use crate::Capability;

/// Where calls are made on a node's listener, and at the local door.
pub const BUS_PATH: &str = "/bus/v1";

/// Longest message, in bytes: a conversation that fills the context of the models this
/// network is for (32,768 tokens of some four bytes), with room.
pub const MAX_MESSAGE_BYTES: usize = 256 * 1024;

/// Calls that are open at once on one socket.
pub const MAX_OPEN_CALLS: usize = 16;

/// Events that the caller has not acknowledged yet, per call.
pub const WINDOW_FRAMES: u64 = 64;

/// Bytes of messages with such events, per call.
pub const WINDOW_BYTES: usize = 256 * 1024;

/// Longest message with an event, in bytes.
pub const MAX_EVENT_BYTES: usize = WINDOW_BYTES / 2;

/// A caller acknowledges at the latest when it has taken this many events. With
/// [`ACK_BYTES`] no window closes for good while events are taken: a closed one holds
/// 64 events, or more than half of its bytes.
pub const ACK_FRAMES: u64 = 16;

/// The same in bytes of their messages.
pub const ACK_BYTES: usize = WINDOW_BYTES / 4;

/// What a message takes beside its event's name and data, at most: braces, keys and
/// two numbers of up to 20 digits.
pub(crate) const FRAME_OVERHEAD: usize = 96;

/// Which rule of the protocol the other side broke. It ends the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A message exceeds [`MAX_MESSAGE_BYTES`].
    #[error("a message has {0} bytes, more than allowed")]
    TooBig(usize),
    /// A message is not a frame, or its data are not what its event needs.
    #[error("a message is not a frame: {0}")]
    Malformed(&'static str),
    /// The frames of a call are not numbered 1, 2, 3, ...
    #[error("frame {found} of a call came where {expected} was due")]
    Sequence {
        /// The number that was due.
        expected: u64,
        /// The number that came.
        found: u64,
    },
    /// A call's number is not higher than all before it, or belongs to no call.
    #[error("call {0} cannot be meant here")]
    CallNumber(u32),
    /// More than [`MAX_OPEN_CALLS`] are open.
    #[error("more than {MAX_OPEN_CALLS} calls are open")]
    TooManyCalls,
    /// An acknowledgement of what was not sent, or was acknowledged before.
    #[error("an acknowledgement of {0} is out of range")]
    AckRange(u64),
    /// More events than the window allows.
    #[error("more events came than were acknowledged")]
    Window,
    /// More frames about calls that have ended than there can be on their way.
    #[error("too many frames about calls that have ended")]
    Late,
}

impl Violation {
    /// The stable name of the rule.
    pub fn code(&self) -> CloseCode {
        match self {
            Self::TooBig(_) => CloseCode::FrameTooBig,
            Self::Malformed(_) => CloseCode::FrameUnknown,
            Self::Sequence { .. } => CloseCode::FrameSequence,
            Self::CallNumber(_) => CloseCode::ProtocolState,
            Self::TooManyCalls => CloseCode::SessionLimit,
            Self::AckRange(_) => CloseCode::CreditAck,
            Self::Window => CloseCode::CreditOverrun,
            Self::Late => CloseCode::FrameRate,
        }
    }
}

/// A message as it stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Frame {
    /// The call, numbered by the caller.
    pub(crate) call: u32,
    /// Number of the frame among those of the call in this direction, from 1.
    pub(crate) seq: u64,
    pub(crate) event: String,
    pub(crate) data: Value,
}

impl Frame {
    pub(crate) fn decode(text: &str) -> Result<Self, Violation> {
        if text.len() > MAX_MESSAGE_BYTES {
            return Err(Violation::TooBig(text.len()));
        }
        let frame: Self = serde_json::from_str(text)
            .map_err(|_| Violation::Malformed("it is no object with call, seq, event and data"))?;
        if !is_name(&frame.event) {
            return Err(Violation::Malformed("its event has no name"));
        }
        Ok(frame)
    }

    /// A message around data that are JSON already. `event` needs no escaping.
    pub(crate) fn encode(call: u32, seq: u64, event: &str, data: &str) -> String {
        format!(r#"{{"call":{call},"seq":{seq},"event":"{event}","data":{data}}}"#)
    }
}

/// Names that the protocol itself uses.
pub(crate) fn is_reserved(event: &str) -> bool {
    matches!(event, "call" | "ack" | "cancel" | "end" | "error")
}

/// What a caller asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
#[non_exhaustive]
pub enum Request {
    /// Between nodes: `{"envelope": base64url, "params": JSON as text}`.
    Signed {
        /// The envelope, base64url without padding.
        envelope: String,
        /// The parameters, whose exact bytes the envelope's hash is about.
        params: String,
    },
    /// From an app on this machine: `{"capability": name@version, "params": object}`.
    Plain {
        /// What is called.
        capability: Capability,
        /// The parameters.
        params: Value,
    },
}

impl Request {
    /// A request that cannot be read is refused with an error, not with the end of the
    /// connection: an app's typing error should not cost its other calls.
    pub(crate) fn from_data(data: Value) -> Result<Self, CallError> {
        let problem = match data.get("envelope") {
            Some(_) => "must be {envelope, params}, both text",
            None => "must be {capability: \"name@1.0\", params: {...}}",
        };
        serde_json::from_value(data).map_err(|_| CallError::bad_request("data", problem))
    }
}

/// The data of `ack`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AckData {
    pub(crate) seq: u64,
}

/// The data of `error`, as a peer wrote them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ErrorData {
    code: String,
    message: String,
    #[serde(default)]
    hint: String,
}

pub(crate) fn error_data(error: &CallError) -> String {
    serde_json::to_string(error).unwrap_or_else(|_| r#"{"code":"internal","message":""}"#.into())
}

pub(crate) fn read_error(data: Value) -> Result<CallError, Violation> {
    let data: ErrorData = serde_json::from_value(data)
        .map_err(|_| Violation::Malformed("its data are no {code, message, hint}"))?;
    let code = Code::parse(&data.code).ok_or(Violation::Malformed("its code is none"))?;
    Ok(CallError::new(code, data.message).with_hint(data.hint))
}
