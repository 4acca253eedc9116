//! The caller's side: asking a service, and its events as frames.

use hearthnet_bus::Capability;
use hearthnet_bus::calls::{CallError, CallStream, Client, Code};
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::request::params;
use crate::Cancel;
use crate::chat::{ChatRequest, Done, Frame};
use crate::exact::Arithmetics;

/// Frames that may wait to be printed: more than an answer has. However slowly its output is
/// read, the service has been heard to the end, and serves the next one.
const FRAMES_AHEAD: usize = 40_000;

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
    pub error: Option<CallError>,
}

/// Asks a service for an answer, and calls `emit` for every frame of it. Blocks.
///
/// # Errors
/// [`Unanswered`].
pub fn answer(
    runtime: &Handle,
    service: &Client,
    model: &str,
    request: &ChatRequest,
    cancel: &Cancel,
    emit: &mut dyn FnMut(&Frame),
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
    let hearing = runtime.spawn(hear(call, frames, cancel.clone()));
    let (mut heard, mut done) = (0, None);
    while let Some(frame) = incoming.blocking_recv() {
        if cancel.is_cancelled() {
            break;
        }
        emit(&frame);
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

/// Takes what comes, until the end or until the user gives up: the call is then cancelled.
async fn hear(
    mut call: CallStream,
    out: mpsc::Sender<Frame>,
    cancel: Cancel,
) -> Result<(), CallError> {
    let mut frames = Frames::default();
    loop {
        let Some(event) = cancel.or(call.next()).await else {
            return Err(CallError::new(Code::CANCELLED, "cancelled").with_hint("ask again"));
        };
        let Some(event) = event? else { return Ok(()) };
        if let Some(frame) = frames.read(&event.name, event.data)? {
            // Whoever prints listens until this ends.
            let _ = out.send(frame).await;
        }
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
