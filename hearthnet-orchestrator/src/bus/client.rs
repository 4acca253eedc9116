//! The caller's side: asking a service, and its events as frames.

use std::time::Duration;

use hearthnet_bus::Capability;
use hearthnet_bus::calls::{CallError, CallStream, Client, Code};
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::request::params;
use crate::Cancel;
use crate::chat::{ChatRequest, Done, Frame};
use crate::exact::Arithmetics;

/// Frames that may wait to be printed: more than an answer has. However slowly its output is
/// read, the service has been heard to the end, and serves the next one.
const FRAMES_AHEAD: usize = 40_000;

/// Without news for so long, the service is asked whether it is there.
const TICK: Duration = Duration::from_secs(1);

/// Ticks without a sign of life after which the user is told.
const SILENT_TICKS: u64 = 3;

/// News of an answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum News<'a> {
    /// A frame of it.
    Frame(&'a Frame),
    /// The service, which is asked whether it is there, has given no sign of life for 3 s.
    Silent,
}

/// Why a service gave no whole answer.
#[derive(Debug)]
#[non_exhaustive]
pub struct Unanswered {
    /// Tokens that were heard of it: whoever goes on without the service need not say them again,
    /// since the same request has the same answer wherever it is computed exactly.
    pub heard: usize,
    /// What those were computed with.
    pub arithmetic: Arithmetics,
    /// How the call ended; `None`: the service cannot be asked this, or went away without a word.
    /// `unreachable`: the connection is lost, or the service gave no sign of life.
    pub error: Option<CallError>,
}

/// Asks a service for an answer, and calls `emit` for every frame of it. Blocks. A service that gives no
/// sign of life for `stall`, as one that was stopped, is not waited for any longer.
///
/// # Errors
/// [`Unanswered`].
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
    let hearing = Hearing {
        service: service.clone(),
        call,
        out: frames,
        cancel: cancel.clone(),
        stall,
    };
    let hearing = runtime.spawn(hearing.run());
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
        arithmetic.hear(&frame);
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

/// The task that takes what comes of a call.
struct Hearing {
    service: Client,
    call: CallStream,
    /// Frames; `None` is silence.
    out: mpsc::Sender<Option<Frame>>,
    cancel: Cancel,
    stall: Duration,
}

impl Hearing {
    /// Runs until the end, or until the user gives up or the service gives no sign of life: the call is
    /// then cancelled.
    async fn run(mut self) -> Result<(), CallError> {
        let mut frames = Frames::default();
        let stalled = self.stall.div_duration_f64(TICK).ceil() as u64;
        let (mut ticks, mut probe) = (0, None);
        loop {
            let event = tokio::select! {
                event = self.cancel.or(self.call.next()) => event,
                () = ended(&mut probe) => {
                    (ticks, probe) = (0, None);
                    continue;
                }
                // Counted one by one: after a stop of this process itself, the time that has passed
                // says nothing about the service.
                () = sleep(TICK) => {
                    ticks += 1;
                    if ticks >= stalled {
                        let why = format!("the service gave no sign of life for {} s", self.stall.as_secs());
                        return Err(CallError::new(Code::UNREACHABLE, why));
                    }
                    if ticks == SILENT_TICKS {
                        let _ = self.out.send(None).await;
                    }
                    // Any call does: the process answers it beside whatever it computes.
                    let ask = || self.service.call(&Capability::bus_describe(), &json!({})).ok();
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
                // Whoever prints listens until this ends.
                let _ = self.out.send(Some(frame)).await;
            }
        }
    }
}

/// Waits until a call, if there is one, has been answered.
async fn ended(call: &mut Option<CallStream>) {
    match call {
        Some(call) => while let Ok(Some(_)) = call.next().await {},
        None => std::future::pending().await,
    }
}

/// Puts the events of one call together again into the frames of an answer. What the last event
/// leaves out because it was sent before, the text and its tokens, is added to it.
#[derive(Debug, Default)]
pub struct Frames {
    text: String,
    token_ids: Vec<u32>,
}

impl Frames {
    /// The frame of an event; `None` for one of a later version.
    ///
    /// # Errors
    /// If it is the last one and cannot be read: there would be no answer.
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
            Frame::TokenDelta { text, token_id, .. } => {
                self.text.push_str(text);
                self.token_ids.push(*token_id);
            }
            Frame::Done(done) => {
                done.text = std::mem::take(&mut self.text);
                done.token_ids = std::mem::take(&mut self.token_ids);
                // Text that was held back to the end came with the last token once more.
                done.token_ids
                    .truncate(done.usage.completion_tokens as usize);
            }
            _ => {}
        }
        Ok(Some(frame))
    }
}
