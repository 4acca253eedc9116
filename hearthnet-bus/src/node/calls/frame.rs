//! One text message of `/bus/v1`: a JSON object with `call`, `seq`, `event` and `data`.

use hearthnet_transport::{CloseCode, Code, Violation, is_name};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::CallError;
use crate::Capability;

/// Where calls are made on a node's listener, and at the local API.
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

/// A message is not a frame, or its data are not what its event needs.
pub(super) fn malformed(what: &str) -> Violation {
    CloseCode::FrameUnknown.violation(format!("a message is not a frame: {what}"))
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
            let length = text.len();
            let detail = format!("a message has {length} bytes, more than allowed");
            return Err(CloseCode::FrameTooBig.violation(detail));
        }
        let frame: Self = serde_json::from_str(text)
            .map_err(|_| malformed("it is no object with call, seq, event and data"))?;
        if !is_name(&frame.event) {
            return Err(malformed("its event has no name"));
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
        .map_err(|_| malformed("its data are no {code, message, hint}"))?;
    let code = Code::parse(&data.code).ok_or_else(|| malformed("its code is none"))?;
    Ok(CallError::new(code, data.message).with_hint(data.hint))
}
