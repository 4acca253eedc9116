//! An answer from the service that runs on this machine: `hearthnet chat` as its client.
//!
//! What the user sees is what this process would have shown, to the byte. A service that goes
//! away costs time only: how much of the answer was heard is told, and this process can say the
//! rest, since the same request has the same answer wherever it is computed.

use hearthnet_bus::Capability;
use hearthnet_bus::calls::{CallError, CallStream, Client, Code};
use hearthnet_orchestrator::Cancel;
use hearthnet_orchestrator::bus::{Frames, params};
use hearthnet_orchestrator::chat::{ChatRequest, Done, Frame};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::failure::{Failure, Kind};

/// Frames that may wait to be printed: more than an answer has. However slowly its output is
/// read, the service has been heard to the end, and serves the next one.
const FRAMES_AHEAD: usize = 40_000;

/// Why there is no answer.
pub(crate) enum Unanswered {
    /// The service cannot be asked this, or is gone. So many tokens were heard.
    Gone(usize),
    /// The answer is this failure, whoever is asked.
    Failed(Failure),
}

/// Asks for an answer, and calls `emit` for every frame of it. Blocks.
pub(crate) fn answer(
    runtime: &Handle,
    service: &Client,
    model: &str,
    request: &ChatRequest,
    cancel: &Cancel,
    emit: &mut dyn FnMut(&Frame),
) -> Result<Done, Unanswered> {
    let params = params(model, request).ok_or(Unanswered::Gone(0))?;
    let call = service.call(&Capability::chat(), &params);
    let call = call.map_err(|_| Unanswered::Gone(0))?;
    let (frames, mut heard) = mpsc::channel(FRAMES_AHEAD);
    let hearing = runtime.spawn(hear(call, frames, cancel.clone()));
    let (mut tokens, mut done) = (0, None);
    while let Some(frame) = heard.blocking_recv() {
        if cancel.is_cancelled() {
            break;
        }
        emit(&frame);
        match frame {
            Frame::TokenDelta { .. } => tokens += 1,
            Frame::Done(all) => done = Some(*all),
            _ => {}
        }
    }
    let end = runtime.block_on(hearing).map_err(Failure::internal);
    match (end.map_err(Unanswered::Failed)?, done) {
        (Ok(()), Some(done)) => Ok(done),
        (Err(error), _) => match kind(error.code(), cancel.is_cancelled()) {
            Some(kind) => Err(Unanswered::Failed(
                Failure::new(kind, error.message()).hint(error.hint()),
            )),
            None => Err(Unanswered::Gone(tokens)),
        },
        (Ok(()), None) => Err(Unanswered::Gone(tokens)),
    }
}

/// Takes what comes, until the end or until the user gives up: the call is then cancelled.
async fn hear(
    mut call: CallStream,
    out: mpsc::Sender<Frame>,
    cancel: Cancel,
) -> Result<(), CallError> {
    let mut frames = Frames::default();
    loop {
        let event = tokio::select! {
            event = call.next() => event?,
            () = cancel.cancelled() => {
                return Err(CallError::new(Code::CANCELLED, "cancelled").with_hint("ask again"));
            }
        };
        let Some(event) = event else { return Ok(()) };
        if let Some(frame) = frames.read(&event.name, event.data)? {
            // Whoever prints listens until this ends.
            let _ = out.send(frame).await;
        }
    }
}

/// Failures that are the answer. Others are about the call, or about a service that is about to
/// stop: this process may do better.
fn kind(code: &Code, cancelled_here: bool) -> Option<Kind> {
    Kind::of_answer(code).filter(|kind| cancelled_here || *kind != Kind::Interrupted)
}
