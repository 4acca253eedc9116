//! Text messages of `/bus/v1`: JSON objects with `call`, `seq`, `event` and `data`.

use hearthnet_transport::{CloseCode, Code, Violation, is_name};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::CallError;
use crate::Capability;

/// Path of calls, on a node's listener and on the local API.
pub const BUS_PATH: &str = "/bus/v1";

/// Longest message, in bytes. It holds a conversation that fills the context of the supported
/// models (32,768 tokens of about four bytes), with room to spare.
pub const MAX_MESSAGE_BYTES: usize = 256 * 1024;

/// Upper bound of open calls per socket.
pub const MAX_OPEN_CALLS: usize = 16;

/// Upper bound of unacknowledged events per call.
pub const WINDOW_FRAMES: u64 = 64;

/// Upper bound of the bytes of messages with unacknowledged events, per call.
pub const WINDOW_BYTES: usize = 256 * 1024;

/// Longest message with an event, in bytes.
pub const MAX_EVENT_BYTES: usize = WINDOW_BYTES / 2;

/// Events after which a caller acknowledges at the latest. Together with [`ACK_BYTES`] this keeps
/// the window from closing for good while events are taken: a full window holds 64 events, or more
/// than half of its bytes.
pub const ACK_FRAMES: u64 = 16;

/// Received bytes after which a caller acknowledges at the latest.
pub const ACK_BYTES: usize = WINDOW_BYTES / 4;

/// Upper bound of a message's bytes beside its event name and data: braces, keys and two numbers of
/// up to 20 digits.
pub(crate) const FRAME_OVERHEAD: usize = 96;

/// Violation for a message that is not a frame, or whose data do not fit its event.
pub(super) fn malformed(what: &str) -> Violation {
    CloseCode::FrameUnknown.violation(format!("a message is not a frame: {what}"))
}

/// A decoded message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Frame {
    /// Number of the call, chosen by the caller.
    pub(crate) call: u32,
    /// Number of the frame within the call and direction, from 1.
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
            .map_err(|_| malformed("it is not an object with call, seq, event and data"))?;
        if !is_name(&frame.event) {
            return Err(malformed("its event name is not valid"));
        }
        Ok(frame)
    }

    /// Encodes a message. `data` is JSON already; `event` needs no escaping.
    pub(crate) fn encode(call: u32, seq: u64, event: &str, data: &str) -> String {
        format!(r#"{{"call":{call},"seq":{seq},"event":"{event}","data":{data}}}"#)
    }
}

/// True for the event names of the protocol itself.
pub(crate) fn is_reserved(event: &str) -> bool {
    matches!(event, "call" | "ack" | "cancel" | "end" | "error")
}

/// Data of a `call` frame.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
#[non_exhaustive]
pub enum Request {
    /// Between nodes: `{"envelope": base64url, "params": JSON as text}`.
    Signed {
        envelope: String,
        /// The parameters as text; the envelope holds the hash of its exact bytes.
        params: String,
    },
    /// From an app on this machine: `{"capability": name@version, "params": object}`.
    Plain {
        capability: Capability,
        params: Value,
    },
}

impl Request {
    /// Decodes the data of a `call` frame. Bad data fail only this call, not the connection: a
    /// mistake of an app should not end its other calls.
    pub(crate) fn from_data(data: Value) -> Result<Self, CallError> {
        let problem = match data.get("envelope") {
            Some(_) => "must be {envelope, params}, both text",
            None => "must be {capability: \"name@1.0\", params: {...}}",
        };
        serde_json::from_value(data).map_err(|_| CallError::bad_request("data", problem))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AckData {
    pub(crate) seq: u64,
}

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
        .map_err(|_| malformed("its data are not {code, message, hint}"))?;
    let code = Code::parse(&data.code).ok_or_else(|| malformed("its error code is not valid"))?;
    Ok(CallError::new(code, data.message).with_hint(data.hint))
}
