//! List of the checks. `specs/conformance.md` has it for people.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ciborium::Value;
use hearthnet_transport::CloseCode;

use crate::raw::violations::{self, Change, Reached, Violation};
use crate::raw::{
    Arrived, Frame, Hello, Message, Outgoing, Step, cbor, chunk, dtype, flag, kind, life, opcode,
    stream_open,
};
use crate::script::{
    Act, At, Attempt, Check, Expect, Host, POSITIONS, Shard, SignedStep, Test, Token,
};

/// Time for an answer: the longest deadline of an opening session, and a slow host's work.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Time for the end of an idle session. Its PING comes after 30 s, its end 30 s later.
const IDLE: Duration = Duration::from_secs(55);
/// Chunk size and buffer that the violations of tensors assume.
const DEFAULTS: (u64, u64) = (1 << 20, 64 << 20);
/// Sender's limit of tensors that are not gone.
const TENSORS: u64 = 1024;
/// Most steps that a check sends at once.
const STEPS: u64 = POSITIONS as u64;

/// Longest interval of receipts.
const RECEIPT_POSITIONS: u64 = 65_536;

/// Limit in HELLO: key, default, range.
type Limit = (&'static str, u64, RangeInclusive<u64>);

static LIMITS: [Limit; 10] = [
    ("chunk_bytes", DEFAULTS.0, 4096..=16 << 20),
    ("inline_max", 65_536, 1024..=1 << 20),
    ("lifetime_ms", 3_600_000, 1..=u64::MAX),
    ("window_chunks", 16, 1..=1024),
    ("recv_buffer_bytes", DEFAULTS.1, 4096..=u32::MAX as u64),
    ("max_steps", 64, 1..=65_535),
    ("stream_steps", 32, 1..=u32::MAX as u64),
    ("caller_steps", 128, 1..=u32::MAX as u64),
    ("unread_bytes", 64 << 20, 0..=u32::MAX as u64),
    ("receipts", 0, 0..=RECEIPT_POSITIONS),
];

/// Limits of the host's HELLO that the checks depend on.
pub(crate) struct Limits {
    chunk_bytes: u64,
    recv_buffer_bytes: u64,
    max_steps: u64,
    stream_steps: u64,
    caller_steps: u64,
    receipts: u64,
}

impl Limits {
    /// Limits in a HELLO. A value that cannot be read counts as absent: the check `hello` reports
    /// it.
    pub(crate) fn of(hello: &Arrived) -> Limits {
        let limit = |name: &str| {
            let given = hello.number(name).map(u64::from);
            let default = LIMITS.iter().find(|(key, ..)| *key == name);
            given
                .or(default.map(|(_, default, _)| *default))
                .unwrap_or(0)
        };
        Limits {
            chunk_bytes: limit("chunk_bytes"),
            recv_buffer_bytes: limit("recv_buffer_bytes"),
            max_steps: limit("max_steps"),
            stream_steps: limit("stream_steps"),
            caller_steps: limit("caller_steps"),
            receipts: limit("receipts"),
        }
    }

    fn are_defaults(&self) -> bool {
        (self.chunk_bytes, self.recv_buffer_bytes) == DEFAULTS
    }
}

fn check(name: &'static str, section: &'static str, attempts: Vec<Attempt>) -> Check {
    Check {
        name,
        section,
        patience: PATIENCE,
        attempts,
        without: "",
    }
}

fn attempt(what: impl Into<String>, at: At, script: Vec<Act>) -> Attempt {
    Attempt {
        what: what.into(),
        at,
        script,
    }
}

fn send(what: impl Into<Outgoing>) -> Act {
    Act::Send(what.into())
}

fn end(code: CloseCode) -> Act {
    Act::Expect(Expect::End(code))
}

fn fault(codes: &'static [&'static str]) -> Act {
    Act::Expect(Expect::Fault(codes))
}

fn frame(kind: u8, name: &'static str, test: Test) -> Act {
    Act::Expect(Expect::Frame(kind, name, test))
}

fn any_body() -> Test {
    Arc::new(|_: &[u8]| Ok(()))
}

/// Expects a frame of this body.
fn exactly(kind: u8, name: &'static str, expected: Vec<u8>) -> Act {
    let test: Test = Arc::new(move |body: &[u8]| match body == expected {
        true => Ok(()),
        false => Err(format!("{name} with another body")),
    });
    frame(kind, name, test)
}

fn session() -> At {
    At::Reached(Reached::Session(|hello| hello))
}

fn stream() -> At {
    At::Reached(Reached::Stream)
}

/// PING and its PONG: the session goes on.
fn goes_on() -> [Act; 2] {
    [
        send(Frame::ping()),
        exactly(kind::PONG, "PONG of the same bytes", vec![0; 8]),
    ]
}

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
        check(
            "frame-length",
            "x08-tensor-transport.md 2.1",
            broken(violations::lengths()),
        ),
        check(
            "frame-unknown",
            "x08-tensor-transport.md 2.1",
            broken(violations::unknown()),
        ),
        check(
            "frame-sequence",
            "x08-tensor-transport.md 2.1",
            broken(violations::sequences()),
        ),
        check(
            "frame-state",
            "x08-tensor-transport.md 2.2",
            broken(violations::states()),
        ),
        check(
            "body-malformed",
            "x08-tensor-transport.md 2.3",
            broken(violations::bodies()),
        ),
        check(
            "credit-grant",
            "x08-tensor-transport.md 5.3",
            broken(violations::grants()),
        ),
        check(
            "credit-ack",
            "x08-tensor-transport.md 5.3",
            broken(violations::acks()),
        ),
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

/// Tests the limits and the version in a HELLO of a host.
fn limits_in_range(body: &[u8]) -> Result<(), String> {
    let map: Value = ciborium::from_reader(body).map_err(|_| "HELLO is not CBOR".to_owned())?;
    let fields = map.as_map().ok_or("HELLO is not a map")?;
    let number = |name: &str, default: Option<u64>| {
        let named = fields.iter().find(|(key, _)| key.as_text() == Some(name));
        let given = match named {
            None => default,
            Some((_, value)) => value.as_integer().and_then(|number| number.try_into().ok()),
        };
        given.ok_or_else(|| format!("HELLO without a number `{name}`"))
    };
    let version = number("version", None)?;
    if version != 1 {
        return Err(format!("HELLO with version {version}"));
    }
    for (name, default, range) in &LIMITS {
        let value = number(name, Some(*default))?;
        if !range.contains(&value) {
            return Err(format!("HELLO with {name} {value}"));
        }
    }
    let [chunk, buffer] = ["chunk_bytes", "recv_buffer_bytes"];
    match number(chunk, Some(DEFAULTS.0))? <= number(buffer, Some(DEFAULTS.1))? {
        true => Ok(()),
        false => Err(format!("HELLO with a {buffer} smaller than {chunk}")),
    }
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

/// One step more than `max_steps`. The rows of the steps never come, so none is answered.
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

/// STREAM_OPEN of stream 1 in an epoch, for one position.
fn open(epoch: u32, layers: (u32, u32), weights: &[u8; 32]) -> Frame {
    let body = cbor(&[
        ("stream", 1.into()),
        ("epoch", epoch.into()),
        ("weights", Value::Bytes(weights.to_vec())),
        ("lo", layers.0.into()),
        ("hi", layers.1.into()),
        ("max_positions", 1.into()),
    ]);
    Frame::new(kind::STREAM_OPEN, body)
}

fn streams(shard: &Shard) -> Vec<Attempt> {
    let open = |epoch| send(open(epoch, shard.layers, &shard.weights));
    let close = |epoch| send(Frame::new(kind::STREAM_CLOSE, life(1, epoch)));
    let [ping, pong] = goes_on();
    vec![
        attempt(
            "a stream, closed, and opened again in the next epoch",
            session(),
            vec![open(1), opened(1), close(1), open(2), opened(2)],
        ),
        attempt(
            "an earlier epoch than the one that is open",
            session(),
            vec![open(2), opened(2), open(1), fault(&["stale_epoch"])],
        ),
        attempt(
            "STREAM_CLOSE of a stream that does not exist",
            session(),
            vec![close(7), ping, pong],
        ),
    ]
}

/// Expects STREAM_OPENED of stream 1 in an epoch, with its keys in any order.
fn opened(epoch: u32) -> Act {
    let test: Test = Arc::new(move |body: &[u8]| {
        let arrived = Arrived::Frame {
            kind: kind::STREAM_OPENED,
            body: body.to_vec(),
        };
        match (arrived.number("stream"), arrived.number("epoch")) {
            (Some(1), Some(found)) if found == epoch => Ok(()),
            _ => Err("STREAM_OPENED of another stream or epoch".to_owned()),
        }
    });
    frame(kind::STREAM_OPENED, "STREAM_OPENED", test)
}

/// Stream errors that need no rows of the model's width. The session goes on after each.
fn faults(shard: &Shard) -> Vec<Attempt> {
    let refused = |what: &str, at: At, sent: Frame, codes: &'static [&'static str]| {
        let mut script = vec![send(sent), fault(codes)];
        script.extend(goes_on());
        attempt(what, at, script)
    };
    let mut others = shard.weights;
    others.iter_mut().for_each(|byte| *byte ^= 0xff);
    let beyond = (shard.total_layers, shard.total_layers);
    let truncate = cbor(&[
        ("stream", 1.into()),
        ("epoch", 1.into()),
        ("position", 1.into()),
    ]);
    // No model has rows of one value.
    let narrow = Step::default().frame();
    let mut attempts = vec![
        refused(
            "a step of a stream that was never opened",
            session(),
            narrow.clone(),
            &["unknown_stream"],
        ),
        refused(
            "other weights",
            session(),
            open(1, shard.layers, &others),
            &["weights_mismatch"],
        ),
        refused(
            "a layer that the model does not have",
            session(),
            open(1, beyond, &shard.weights),
            &["bad_descriptor"],
        ),
        refused("rows of one value", stream(), narrow, &["tensor_shape"]),
        refused(
            "TRUNCATE beyond the end",
            stream(),
            Frame::new(kind::TRUNCATE, truncate),
            &["position_gap"],
        ),
    ];
    let (lo, hi) = shard.layers;
    if hi.saturating_sub(lo) + 1 < shard.total_layers {
        attempts.push(refused(
            "all layers of the model, of which the host serves some",
            session(),
            open(1, (0, shard.total_layers - 1), &shard.weights),
            &["layer_range"],
        ));
    }
    attempts
}

/// Fields of a STEP_RESULT with inline rows.
struct StepResult<'a> {
    position: u32,
    rows: u32,
    width: u32,
    data: &'a [u8],
}

fn result(body: &[u8]) -> Result<StepResult<'_>, String> {
    let word = |at: usize| {
        let bytes = body.get(at..)?.first_chunk::<4>()?;
        Some(u32::from_be_bytes(*bytes))
    };
    let read = || {
        Some(StepResult {
            position: word(8)?,
            rows: word(12)?,
            width: word(16)?,
            data: body.get(40..)?,
        })
    };
    read().ok_or_else(|| "a STEP_RESULT of less than 40 bytes".to_owned())
}

/// Why checks of steps are skipped.
const WITHOUT_WIDTH: &str =
    "the width of a row is not known: the descriptor's software has no width/, use --width";

/// Checks with zero rows of the model's width.
fn steps(shard: &Shard, limits: &Limits) -> [Check; 2] {
    let parts = [
        ("step-order", "x08-tensor-transport.md 4.3"),
        ("step-error", "shard-host.md 4"),
    ];
    let Some(width) = shard.width else {
        return parts.map(|(name, section)| Check {
            without: WITHOUT_WIDTH,
            ..check(name, section, Vec::new())
        });
    };
    let (dtype, value_bytes) = shard.dtype;
    let row = move |position: u32, byte: u8| {
        let step = Step {
            position,
            width,
            dtype,
            data: vec![byte; width as usize * value_bytes],
            ..Step::default()
        };
        send(step.frame())
    };
    let answered = move |position: u32| {
        let bytes = width as usize * value_bytes;
        let test: Test = Arc::new(move |body: &[u8]| {
            let answer = result(body)?;
            let at = answer.position;
            match (at == position, answer.rows, answer.width == width) {
                (true, 1, true) if answer.data.len() == bytes => Ok(()),
                (true, ..) => Err(format!("STEP_RESULT of another shape for position {at}")),
                (false, ..) => Err(format!("STEP_RESULT for position {at}, not {position}")),
            }
        });
        frame(
            kind::STEP_RESULT,
            "STEP_RESULT of each step, in order",
            test,
        )
    };
    // As many as the host says that it takes.
    let most = [limits.max_steps, limits.stream_steps, limits.caller_steps];
    let most = most.into_iter().fold(STEPS, u64::min);
    let positions = 0..u32::try_from(most).unwrap_or(1);
    let mut all: Vec<Act> = positions.clone().map(|position| row(position, 0)).collect();
    all.extend(positions.map(answered));
    let again = vec![row(0, 0), answered(0), row(0, 0), answered(0)];
    let gap = vec![row(1, 0), fault(&["position_gap"])];
    // All bits set are a NaN in fp16, bf16 and fp32.
    let nan = vec![row(0, 0xff), fault(&["tensor_nonfinite"])];
    let order = vec![
        attempt(format!("{most} steps at once"), stream(), all),
        attempt("a step, and the same step again", stream(), again),
    ];
    let errors = vec![
        attempt("a step beyond the end", stream(), gap),
        attempt("rows that are not numbers", stream(), nan),
    ];
    let [first, second] = parts;
    [
        check(first.0, first.1, order),
        check(second.0, second.1, errors),
    ]
}

/// A step, and the receipt at the end of its stream.
fn receipts(host: &Host, limits: &Limits) -> Check {
    let (name, section) = ("receipt", "receipts.md 2");
    let shard = &host.shard;
    let without = match (limits.receipts, shard.exact, shard.width) {
        (0, ..) => "the host announces no receipts",
        (_, false, _) => "the host's arithmetic is not exact",
        (.., None) => WITHOUT_WIDTH,
        _ => "",
    };
    let none = check(name, section, Vec::new());
    let Some(width) = shard.width.filter(|_| without.is_empty()) else {
        return Check { without, ..none };
    };
    let (dtype, value_bytes) = shard.dtype;
    let sent = vec![0; width as usize * value_bytes];
    let step = Step {
        width,
        dtype,
        data: sent.clone(),
        ..Step::default()
    };
    let returned = Arc::new(Mutex::new(Vec::new()));
    let (keeps, verify) = (Arc::clone(&returned), Arc::clone(&host.receipt));
    let keep: Test = Arc::new(move |body: &[u8]| {
        let mut kept = keeps.lock().map_err(|e| e.to_string())?;
        *kept = result(body)?.data.to_vec();
        Ok(())
    });
    let compare: Test = Arc::new(move |body: &[u8]| {
        let malformed = || "RECEIPT without a claim, a chain or a signature".to_owned();
        let map: Value = ciborium::from_reader(body).map_err(|_| malformed())?;
        let fields = map.as_map().ok_or_else(malformed)?;
        let field = |name: &str| {
            let mut named = fields.iter().filter(|(key, _)| key.as_text() == Some(name));
            named.next().map(|(_, value)| value)
        };
        let signed = || {
            Some(SignedStep {
                sent: sent.clone(),
                returned: returned.lock().ok()?.clone(),
                claims: field("claims")?.as_integer()?.try_into().ok()?,
                chain: field("chain")?.as_bytes()?.as_slice().try_into().ok()?,
                signature: field("signature")?.as_bytes()?.as_slice().try_into().ok()?,
            })
        };
        verify(&signed().ok_or_else(malformed)?)
    });
    let script = vec![
        send(open(1, shard.layers, &shard.weights)),
        opened(1),
        send(step.frame()),
        frame(kind::STEP_RESULT, "STEP_RESULT of the step", keep),
        send(Frame::new(kind::STREAM_CLOSE, life(1, 1))),
        frame(kind::RECEIPT, "RECEIPT of the step", compare),
    ];
    let what = "a step, and the end of its stream";
    // The interval is so long that only the end of the stream brings a receipt.
    let wants = |hello: Hello| hello.with("receipts", RECEIPT_POSITIONS);
    let at = At::Reached(Reached::Session(wants));
    check(name, section, vec![attempt(what, at, script)])
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
