//! Client: calls a service and restores the frames of its answer.

use std::time::Duration;

use hearthnet_bus::Capability;
use hearthnet_bus::calls::{CallError, CallStream, Client, Code};
use hearthnet_tokens::tools::ToolCall;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::request::params;
use crate::Cancel;
use crate::chat::{ChatRequest, Done, Frame};
use crate::exact::Arithmetics;

/// Frames that may wait to be printed, more than any answer has. The service can thus finish its
/// answer, and serve the next caller, even if the output is read slowly.
const FRAMES_AHEAD: usize = 40_000;

/// Interval of probes while the service is silent.
const TICK: Duration = Duration::from_secs(1);

/// Silent ticks after which the user is notified.
const SILENT_TICKS: u64 = 3;

/// Event of an answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum News<'a> {
    Frame(&'a Frame),
    /// The service has not answered probes for 3 s.
    Silent,
}

/// Failure of a call.
#[derive(Debug)]
#[non_exhaustive]
pub struct Unanswered {
    /// Number of tokens received. If the caller continues without the service, it can skip these,
    /// since exact hosts give the same answer to the same request.
    pub heard: usize,
    /// Arithmetics of these tokens.
    pub arithmetic: Arithmetics,
    /// Error of the call; `None` if the service does not accept this request, or ended the call
    /// without an answer. The code is `unreachable` if the connection was lost or the service fell
    /// silent.
    pub error: Option<CallError>,
}

/// Calls a service and passes every frame to `emit`. Blocks. Gives up after `stall` without a sign
/// of life, for example if the service was suspended.
///
/// # Errors
/// Any [`Unanswered`].
pub fn answer(
    runtime: &Handle,
    service: &Client,
    model: &str,
    request: &ChatRequest,
    cancel: &Cancel,
    stall: Duration,
    emit: &mut dyn FnMut(News<'_>),
) -> Result<Done, Unanswered> {
    let mut arithmetic = Arithmetics::default();
    let call = params(model, request).map(|params| service.call(&Capability::chat(), &params));
    let Some(Ok(call)) = call else {
        return Err(Unanswered {
            heard: 0,
            arithmetic,
            error: None,
        });
    };
    let (frames, mut incoming) = mpsc::channel(FRAMES_AHEAD);
    let hearing = hear(service.clone(), call, frames, cancel.clone(), stall);
    let hearing = runtime.spawn(hearing);
    let (mut heard, mut done) = (0, None);
    while let Some(frame) = incoming.blocking_recv() {
        if cancel.is_cancelled() {
            break;
        }
        let Some(frame) = frame else {
            emit(News::Silent);
            continue;
        };
        emit(News::Frame(&frame));
        arithmetic.on_frame(&frame);
        match frame {
            Frame::TokenDelta { .. } => heard += 1,
            Frame::Done(all) => done = Some(*all),
            _ => {}
        }
    }
    let ended = runtime.block_on(hearing).unwrap_or_else(|ended| {
        let why = format!("the task that heard it failed: {ended}");
        Err(CallError::internal(why))
    });
    match (ended, done) {
        (Ok(()), Some(done)) => Ok(done),
        (ended, _) => Err(Unanswered {
            heard,
            arithmetic,
            error: ended.err(),
        }),
    }
}

/// Sends the frames of a call to `out`, and `None` to report silence. Runs until the call ends, the
/// user cancels or the service stalls; the latter two cancel the call.
async fn hear(
    service: Client,
    mut call: CallStream,
    out: mpsc::Sender<Option<Frame>>,
    cancel: Cancel,
    stall: Duration,
) -> Result<(), CallError> {
    let mut frames = Frames::default();
    let stalled = stall.div_duration_f64(TICK).ceil() as u64;
    let (mut ticks, mut probe) = (0, None);
    loop {
        let event = tokio::select! {
            event = cancel.run_until_cancelled(call.next()) => event,
            () = ended(&mut probe) => {
                (ticks, probe) = (0, None);
                continue;
            }
            // Ticks are counted one by one: if this process was suspended, the elapsed time
            // says nothing about the service.
            () = sleep(TICK) => {
                ticks += 1;
                if ticks >= stalled {
                    let why = format!("the service gave no sign of life for {} s", stall.as_secs());
                    return Err(CallError::new(Code::UNREACHABLE, why));
                }
                if ticks == SILENT_TICKS {
                    let _ = out.send(None).await;
                }
                // Any call serves as a probe: the node answers it while the engine computes.
                let ask = || service.call(&Capability::bus_describe(), &json!({})).ok();
                probe = probe.or_else(ask);
                continue;
            }
        };
        ticks = 0;
        let Some(event) = event else {
            return Err(CallError::new(Code::CANCELLED, "cancelled").with_hint("ask again"));
        };
        let Some(event) = event? else { return Ok(()) };
        if let Some(frame) = frames.read(&event.name, event.data)? {
            // The receiver exists until this task ends.
            let _ = out.send(Some(frame)).await;
        }
    }
}

/// Waits until a call has been answered; forever if there is none.
async fn ended(call: &mut Option<CallStream>) {
    match call {
        Some(call) => while let Ok(Some(_)) = call.next().await {},
        None => std::future::pending().await,
    }
}

/// Restores the frames of an answer from the events of one call. The text and tokens that the last
/// event omits are added from the earlier ones.
#[derive(Debug, Default)]
pub struct Frames {
    text: String,
    reasoning: String,
    tool_calls: Vec<ToolCall>,
    token_ids: Vec<u32>,
}

impl Frames {
    /// Frame of an event; `None` for an unknown event.
    ///
    /// # Errors
    /// If the last event cannot be parsed, since there would be no answer.
    pub fn read(&mut self, event: &str, data: Value) -> Result<Option<Frame>, CallError> {
        let frame = serde_json::from_value(json!({ "event": event, "data": data }));
        let mut frame = match frame {
            Ok(frame) => frame,
            Err(error) if event == "done" => {
                return Err(CallError::internal(error));
            }
            Err(_) => return Ok(None),
        };
        match &mut frame {
            // Of several answers, `done` describes the first one.
            Frame::TokenDelta {
                choice: 0,
                text,
                reasoning,
                tool_calls,
                token_id,
                ..
            } => {
                self.text.push_str(text);
                self.reasoning.push_str(reasoning);
                for piece in tool_calls {
                    piece.add_to(&mut self.tool_calls);
                }
                self.token_ids.push(*token_id);
            }
            Frame::Done(done) => {
                done.text = std::mem::take(&mut self.text);
                done.reasoning = std::mem::take(&mut self.reasoning);
                done.tool_calls = std::mem::take(&mut self.tool_calls);
                done.token_ids = std::mem::take(&mut self.token_ids);
                // The frame with the held-back text repeats the last token.
                done.token_ids
                    .truncate(done.usage.completion_tokens as usize);
            }
            _ => {}
        }
        Ok(Some(frame))
    }
}
