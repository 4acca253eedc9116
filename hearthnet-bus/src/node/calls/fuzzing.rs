//! Body of the fuzz target `bus_frames`, so that tests can replay a fuzzer's findings. Not a public
//! interface.

use hearthnet_transport::Code;
use serde_json::Value;

use super::error::CallError;
use super::frame::{MAX_EVENT_BYTES, MAX_MESSAGE_BYTES, MAX_OPEN_CALLS, Request};
use super::session::{CallingSession, ClientEvent, NotTaken, ServerEvent, ServingSession};

/// Drives a serving and a calling session with a script. Each line is one step:
///
/// | first character | step |
/// |---|---|
/// | `{` | the line is a message to the serving session |
/// | `<` | the rest is a message to the calling session |
/// | `+` | open a call |
/// | `!N` | event of call N |
/// | `.N` | call N ends; `?N`: it fails |
/// | `*N` | take the received messages of call N; `-N`: cancel it |
///
/// After a protocol violation a session receives no more messages.
///
/// # Panics
/// If an invariant does not hold.
pub fn frames(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let (mut server, mut caller) = (ServingSession::default(), CallingSession::default());
    let (mut serves, mut calls) = (true, true);
    for line in text.lines().take(2000) {
        let Some(first) = line.chars().next() else {
            continue;
        };
        let rest = line.get(first.len_utf8()..).unwrap_or_default();
        let call: u32 = rest.parse().unwrap_or(1);
        match first {
            '<' if calls => calls = caller.receive(rest).is_ok(),
            '+' => {
                let params = Value::String(rest.into());
                if let Ok(capability) = "a@1.0".parse() {
                    let _ = caller.call(&Request::Plain { capability, params });
                }
            }
            '!' => match server.event(call, "tick", &Value::String(rest.into())) {
                Ok(()) | Err(NotTaken::Full | NotTaken::Ended) => {}
                Err(NotTaken::TooBig) => assert!(rest.len() * 6 > MAX_EVENT_BYTES / 2),
                Err(other) => unreachable!("{other}"),
            },
            '.' => server.finish(call, Ok(&Value::Null)),
            '?' => server.finish(call, Err(&CallError::new(Code::INTERNAL, rest))),
            '*' => {
                while let Some(heard) = caller.take(call) {
                    if !matches!(heard, ClientEvent::Event { .. }) {
                        assert_eq!(caller.take(call), None, "a message followed the end");
                    }
                }
            }
            '-' => {
                caller.cancel(call);
                assert_eq!(caller.take(call), None, "a message followed the cancel");
            }
            '{' if serves => match server.receive(line) {
                Ok(ServerEvent::Open { call, .. } | ServerEvent::Room { call }) => {
                    // An open call accepts an event unless its window is full.
                    let taken = server.event(call, "tick", &Value::Null);
                    assert!(matches!(taken, Ok(()) | Err(NotTaken::Full)), "{taken:?}");
                }
                Ok(ServerEvent::Cancelled { call }) => {
                    let taken = server.event(call, "tick", &Value::Null);
                    assert_eq!(taken, Err(NotTaken::Ended));
                }
                Ok(ServerEvent::Nothing) => {}
                Err(_) => serves = false,
            },
            _ => {}
        }
        assert!(server.open_calls() <= MAX_OPEN_CALLS);
    }
    // Every sent message is valid JSON of bounded size.
    for text in std::iter::from_fn(|| server.poll_transmit().or_else(|| caller.poll_transmit())) {
        assert!(text.len() <= MAX_MESSAGE_BYTES);
        let message: Value = serde_json::from_str(&text).unwrap_or_default();
        assert!(message.is_object(), "{text}");
    }
}

#[cfg(test)]
mod tests {
    proptest::proptest! {
        #[test]
        fn any_script_is_survived(input in "([{<+!.?*-][ -~]{0,60}\n){0,40}") {
            super::frames(input.as_bytes());
        }
    }
}
