//! Checks of streams, steps and receipts: those that need the shard of the host.

use std::sync::{Arc, Mutex};

use ciborium::Value;

use crate::limits::{Limits, RECEIPT_POSITIONS};
use crate::raw::violations::Reached;
use crate::raw::{Arrived, Frame, Hello, Step, cbor, kind, life, stream_open_in};
use crate::script::{
    Act, At, Attempt, Check, Host, POSITIONS, Shard, SignedStep, Test, attempt, check, fault,
    frame, goes_on, send, session, stream,
};

/// Most steps that a check sends at once.
const STEPS: u64 = POSITIONS as u64;

/// STREAM_OPEN of stream 1 in an epoch, for one position.
fn open(epoch: u32, layers: (u32, u32), weights: &[u8; 32]) -> Frame {
    stream_open_in(epoch, 1, weights, layers, 1)
}

pub(crate) fn streams(shard: &Shard) -> Vec<Attempt> {
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
pub(crate) fn opened(epoch: u32) -> Act {
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
pub(crate) fn faults(shard: &Shard) -> Vec<Attempt> {
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
pub(crate) struct StepResult<'a> {
    position: u32,
    pub(crate) rows: u32,
    width: u32,
    pub(crate) data: &'a [u8],
}

pub(crate) fn result(body: &[u8]) -> Result<StepResult<'_>, String> {
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
pub(crate) fn steps(shard: &Shard, limits: &Limits) -> [Check; 2] {
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
pub(crate) fn receipts(host: &Host, limits: &Limits) -> Check {
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
