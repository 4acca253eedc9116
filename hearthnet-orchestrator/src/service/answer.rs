//! Both ends of the channel between a chat and its reader.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use tokio::sync::{mpsc, oneshot};

use super::slow_reader::SlowReaderLimit;
use crate::Cancel;
use crate::chat::{Done, Frame, Listener};
use crate::error::ChatError;

/// Frames of an answer. Dropping it cancels the chat.
pub struct Answer {
    pub(super) cancel: Cancel,
    /// Of a chat that waits, or has waited, for its turn.
    pub(super) wait: Option<Wait>,
    pub(super) frames: mpsc::Receiver<Frame>,
    /// `None` once the end was returned.
    pub(super) end: Option<oneshot::Receiver<Result<(), ChatError>>>,
}

/// Bounded wait of a chat for its turn.
pub(super) struct Wait {
    pub(super) until: Instant,
    /// Takes the chat out of the queue. Returns the error for its caller if it still waited.
    pub(super) leave: Box<dyn FnOnce() -> Option<ChatError> + Send + Sync>,
}

impl Answer {
    /// Next frame. A complete answer ends with [`Frame::Done`], an incomplete one with an error;
    /// then `None` follows. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Frame, ChatError>> {
        if let Some(until) = self.wait.as_ref().map(|wait| wait.until) {
            let waited = tokio::select! {
                biased;
                frame = self.frames.recv() => Some(frame),
                () = tokio::time::sleep_until(until.into()) => None,
            };
            match waited {
                Some(Some(frame)) => {
                    self.wait = None;
                    return Some(Ok(frame));
                }
                Some(None) => {}
                None => {
                    let wait = self.wait.take();
                    if let Some(error) = wait.and_then(|wait| (wait.leave)()) {
                        self.end = None;
                        return Some(Err(error));
                    }
                }
            }
        }
        if let Some(frame) = self.frames.recv().await {
            return Some(Ok(frame));
        }
        let result = self.end.as_mut()?.await;
        self.end = None;
        match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Err(error)),
            // The task that answered has panicked.
            Err(_) => Some(Err(ChatError::Engine("the chat ended unexpectedly".into()))),
        }
    }

    /// Cancels the chat; the answer ends with [`ChatError::Cancelled`].
    pub fn cancel(&self) {
        self.cancel.cancel();
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(wait) = self.wait.take() {
            (wait.leave)();
        }
    }
}

/// Sender of a chat's frames.
pub(super) struct FrameOutput {
    pub(super) frames: mpsc::Sender<Frame>,
    /// Frames for which the channel had no room.
    pub(super) backlog: VecDeque<Frame>,
    /// Number of the answer whose tokens it sends.
    pub(super) choice: u32,
    pub(super) cancel: Cancel,
    pub(super) limit: SlowReaderLimit,
}

impl Listener for FrameOutput {
    fn on_frame(&mut self, frame: &Frame) {
        // The last frame follows once the conversation is stored.
        if matches!(frame, Frame::Done(_)) {
            return;
        }
        let mut frame = frame.clone();
        if let Frame::TokenDelta { choice, .. } = &mut frame {
            *choice = self.choice;
        }
        self.backlog.push_back(frame);
        self.fill();
    }

    fn caught_up(&mut self) -> LocalBoxFuture<'_, ()> {
        self.empty().boxed_local()
    }
}

impl FrameOutput {
    pub(super) fn new(
        frames: mpsc::Sender<Frame>,
        cancel: Cancel,
        slow_reader: Duration,
        choice: u32,
    ) -> Self {
        Self {
            frames,
            backlog: VecDeque::new(),
            choice,
            cancel,
            limit: SlowReaderLimit::new(slow_reader),
        }
    }

    /// Sender for another answer of the same request.
    pub(super) fn beside(&self, slow_reader: Duration, choice: u32) -> Self {
        Self::new(
            self.frames.clone(),
            self.cancel.clone(),
            slow_reader,
            choice,
        )
    }

    /// Sends the end of one of several answers.
    pub(super) async fn end_choice(&mut self, done: Done) {
        let (choice, done) = (self.choice, Box::new(done));
        self.backlog.push_back(Frame::ChoiceDone { choice, done });
        self.empty().await;
    }

    /// Sends as many frames as the channel has room for.
    fn fill(&mut self) {
        while !self.backlog.is_empty()
            && let Ok(room) = self.frames.try_reserve()
        {
            if let Some(frame) = self.backlog.pop_front() {
                room.send(frame);
            }
            self.limit.taken_after(Duration::ZERO);
        }
    }

    /// Sends all frames and waits for a slow reader. Cancels the chat if the reader is gone or
    /// takes nothing.
    pub(super) async fn empty(&mut self) {
        loop {
            self.fill();
            if self.backlog.is_empty() || self.cancel.is_cancelled() {
                return;
            }
            let since = Instant::now();
            let room = tokio::select! {
                room = self.frames.reserve() => room.ok().map(drop),
                () = self.cancel.cancelled() => None,
                () = tokio::time::sleep(self.limit.left()) => {
                    tracing::warn!("a reader takes almost nothing: its chat is cancelled");
                    None
                }
            };
            self.limit.taken_after(since.elapsed());
            // The reserved slot was released, so that `fill` can use it.
            if room.is_none() {
                self.cancel.cancel();
            }
        }
    }
}
