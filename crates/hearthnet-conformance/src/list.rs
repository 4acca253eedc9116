//! List of the checks. `specs/conformance.md` has it for people.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::CloseCode;

use crate::limits::{Limits, limits_in_range};
use crate::raw::violations::{self, Change, Reached, Violation};
use crate::raw::{Frame, Message, Step, cbor, chunk, dtype, flag, kind, opcode, stream_open};
use crate::script::{
    Act, At, Attempt, Check, Expect, Host, Test, Token, any_body, attempt, check, end, exactly,
    frame, send, session, stream,
};
use crate::streams::{faults, opened, receipts, result, steps, streams};

/// Sections about headers, types, bodies and credit.
const HEADER: &str = "x08-tensor-transport.md 2.1";
const TYPES: &str = "x08-tensor-transport.md 2.2";
const BODIES: &str = "x08-tensor-transport.md 2.3";
const CREDIT: &str = "x08-tensor-transport.md 5.3";
/// Time for the end of an idle session. Its PING comes after 30 s, its end 30 s later.
const IDLE: Duration = Duration::from_secs(55);
/// Sender's limit of tensors that are not gone.
const TENSORS: u64 = 1024;

fn broken(violations: Vec<Violation>) -> Vec<Attempt> {
    let attempts = violations.into_iter().map(|violation| {
        let Violation {
            what,
            reached,
            sent,
            code,
        } = violation;
        let mut script: Vec<Act> = sent.into_iter().map(send).collect();
        script.push(end(code));
        attempt(what, At::Reached(reached), script)
    });
    attempts.collect()
}

/// Checks of an open host, in order.
pub(crate) fn checks(host: &Host, limits: &Limits) -> Vec<Check> {
    let mut checks = vec![
        check("authentication", "x08-tensor-transport.md 1.1", strangers()),
        check("upgrade", "x08-tensor-transport.md 1.2", upgrades()),
        check("hello", "x08-tensor-transport.md 3", hellos()),
        check("token", "session-grant.md 4", tokens()),
        check("frame-length", HEADER, broken(violations::lengths())),
        check("frame-unknown", HEADER, broken(violations::unknown())),
        check("frame-sequence", HEADER, broken(violations::sequences())),
        check("frame-state", TYPES, broken(violations::states())),
        check("body-malformed", BODIES, broken(violations::bodies())),
        check("credit-grant", CREDIT, broken(violations::grants())),
        check("credit-ack", CREDIT, broken(violations::acks())),
        credit_steps(limits),
        tensors(limits),
        check("ping", "x08-tensor-transport.md 6", vec![ping()]),
        check("bye", "x08-tensor-transport.md 7", vec![bye()]),
        check("bench", "x08-tensor-transport.md 3", vec![bench()]),
        check("descriptor", "shard-host.md 5", vec![describe(host)]),
        check("stream", "shard-host.md 2", streams(&host.shard)),
        check("stream-error", "shard-host.md 4", faults(&host.shard)),
    ];
    checks.extend(steps(&host.shard, limits));
    checks.push(receipts(host, limits));
    checks.push(check("bus-binary", "capability-bus.md 2.3", vec![bus()]));
    checks
}

fn strangers() -> Vec<Attempt> {
    let refused = |unknown_key| At::Refused { unknown_key };
    vec![
        attempt("no certificate", refused(false), Vec::new()),
        attempt("a key that is not admitted", refused(true), Vec::new()),
    ]
}

fn upgrades() -> Vec<Attempt> {
    let websocket = |what: &str, message: Message| {
        let script = vec![send(message), end(CloseCode::WebSocket)];
        attempt(what, session(), script)
    };
    let ping = || Frame::ping().encode(2);
    vec![
        attempt(
            "a path that is not served",
            At::NotFound("/conformance/none"),
            Vec::new(),
        ),
        websocket("a text message", Message::of(opcode::TEXT, ping())),
        websocket("an unmasked frame", Message::binary(ping()).unmasked()),
        websocket("a reserved bit", Message::binary(ping()).reserved(0x40)),
    ]
}

fn hellos() -> Vec<Attempt> {
    let hello = |what: &str, change: Change, act| {
        attempt(what, At::Reached(Reached::Hello(change)), vec![act])
    };
    vec![
        hello(
            "HELLO with the default limits",
            |hello| hello.frame(),
            frame(
                kind::HELLO,
                "HELLO with limits in their ranges",
                Arc::new(limits_in_range),
            ),
        ),
        hello(
            "a key that the version does not define",
            |hello| hello.with("added_later", 1).frame(),
            frame(kind::HELLO, "HELLO", any_body()),
        ),
        hello(
            "an unknown purpose",
            |hello| hello.with("purpose", "conformance").frame(),
            end(CloseCode::PurposeUnknown),
        ),
        hello(
            "no purpose",
            |hello| hello.without("purpose").frame(),
            end(CloseCode::BodyMalformed),
        ),
        hello(
            "a chunk size of one byte",
            |hello| hello.with("chunk_bytes", 1).frame(),
            end(CloseCode::BodyMalformed),
        ),
    ]
}

fn tokens() -> Vec<Attempt> {
    let refused = |what: &str, token, code| attempt(what, At::Token(token), vec![end(code)]);
    vec![
        refused("no token", Token::Empty, CloseCode::TokenInvalid),
        refused(
            "a token of another subject",
            Token::OtherSubject,
            CloseCode::TokenSubject,
        ),
        refused(
            "a token for another host",
            Token::OtherAudience,
            CloseCode::TokenAudience,
        ),
        refused("an expired token", Token::Expired, CloseCode::TokenExpired),
        refused(
            "a changed signature",
            Token::Altered,
            CloseCode::InvalidSignature,
        ),
        attempt(
            "a token for the second time",
            At::TokenAgain,
            vec![end(CloseCode::TokenReplayed)],
        ),
    ]
}

/// STEP whose row comes as a tensor.
fn announced(tensor: u16) -> Frame {
    let step = Step {
        width: 8,
        tensor: Some(tensor),
        data: Vec::new(),
        ..Step::default()
    };
    step.frame()
}

/// Sends one step more than `max_steps`. The rows of the steps never come, so none is answered.
fn credit_steps(limits: &Limits) -> Check {
    let (name, section) = ("credit-steps", "x08-tensor-transport.md 4.2");
    if limits.max_steps >= TENSORS {
        return Check {
            without: "max_steps is not below the 1,024 tensors that a sender may have",
            ..check(name, section, Vec::new())
        };
    }
    // Below 1,024, so it fits.
    let last = u16::try_from(limits.max_steps).unwrap_or(0);
    let mut script: Vec<Act> = (0..=last).map(|id| send(announced(id))).collect();
    script.push(end(CloseCode::CreditOverrun));
    let what = format!("{} steps that wait for their rows", limits.max_steps + 1);
    check(name, section, vec![attempt(what, session(), script)])
}

fn tensors(limits: &Limits) -> Check {
    let (name, section) = ("tensor", "x08-tensor-transport.md 5.1");
    if !limits.are_defaults() {
        return Check {
            without: "the host's chunk_bytes or recv_buffer_bytes is not the default",
            ..check(name, section, Vec::new())
        };
    }
    let whole = chunk(1, dtype::I8, &[4], &[0; 4]);
    let whole = Frame::new(kind::TENSOR_DATA, whole).flags(flag::FINAL);
    let unasked = vec![send(whole), end(CloseCode::ProtocolState)];
    let mut attempts = broken(violations::shapes());
    attempts.extend(broken(violations::small_chunks()));
    attempts.push(attempt("a tensor without a step", stream(), unasked));
    check(name, section, attempts)
}

fn ping() -> Attempt {
    let bytes = vec![1, 2, 3, 4, 5, 6, 7, 8];
    let script = vec![
        send(Frame::new(kind::PING, bytes.clone())),
        exactly(kind::PONG, "PONG of the same bytes", bytes),
    ];
    attempt("PING", session(), script)
}

fn bye() -> Attempt {
    let body = cbor(&[("code", "normal".into())]);
    let script = vec![
        send(Frame::new(kind::BYE, body)),
        Act::Expect(Expect::Close(CloseCode::Normal)),
    ];
    attempt("BYE", session(), script)
}

/// Step of a bench session: no model runs.
fn bench() -> Attempt {
    let step = Step {
        width: 2,
        data: vec![1, 2, 3, 4],
        ..Step::default()
    };
    let echo: Test = Arc::new(|body: &[u8]| match result(body)? {
        answer if answer.rows == 1 && answer.data == [1, 2, 3, 4] => Ok(()),
        answer => Err(format!("STEP_RESULT of {} other rows", answer.rows)),
    });
    let script = vec![
        send(stream_open(1, &[0; 32], (0, 0), 1)),
        opened(1),
        send(step.frame()),
        frame(kind::STEP_RESULT, "STEP_RESULT with the step's rows", echo),
    ];
    attempt("a step of a bench session", At::Bench, script)
}

fn describe(host: &Host) -> Attempt {
    let test = Arc::clone(&host.descriptor);
    let script = vec![
        send(Frame::new(kind::DESCRIBE, [])),
        frame(kind::DESCRIPTOR, "DESCRIPTOR of this key", test),
    ];
    attempt("DESCRIBE", session(), script)
}

fn bus() -> Attempt {
    let script = vec![
        send(Message::binary(vec![0])),
        Act::Expect(Expect::Close(CloseCode::FrameUnknown)),
    ];
    attempt("a binary message on /bus/v1", At::Path("/bus/v1"), script)
}

/// Deadline of a caller that says nothing.
pub(crate) fn silence_before_hello() -> Check {
    let silent = attempt(
        "silence before HELLO",
        At::Reached(Reached::Upgrade),
        vec![end(CloseCode::PipelineStalled)],
    );
    Check {
        patience: IDLE,
        ..check("idle-hello", "x08-tensor-transport.md 6", vec![silent])
    }
}

/// Keep-alive of a session whose caller says nothing.
pub(crate) fn silence() -> Check {
    let script = vec![
        frame(kind::PING, "PING", any_body()),
        end(CloseCode::KeepAlive),
    ];
    Check {
        patience: IDLE,
        ..check(
            "idle-session",
            "x08-tensor-transport.md 6",
            vec![attempt("silence in a session", session(), script)],
        )
    }
}
