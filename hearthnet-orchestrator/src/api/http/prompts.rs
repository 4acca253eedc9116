//! Answers to all prompts of a request, some of them at the same time.

use std::collections::VecDeque;

use futures_util::FutureExt as _;
use futures_util::future::select_all;

use hearthnet_http::PresentedKey;

use super::body::Room;
use crate::chat::Frame;
use crate::error::ChatError;
use crate::service::{Answer, Caller, Request, Service};

/// Prompts of one request that are answered at the same time: as many as chats run, by default.
const AT_ONCE: usize = 4;

/// Answers of a service to the prompts of one request. Dropping it cancels them.
pub(super) struct Answers {
    service: Service,
    caller: Caller,
    model: String,
    /// Prompts that were not asked yet, by number.
    waiting: VecDeque<(usize, Request)>,
    asked: Vec<Asked>,
    /// Named key that pays for the tokens.
    key: Option<PresentedKey>,
    /// Memory of the request, until all of its prompts are at work.
    room: Option<Room>,
}

/// Answers to one prompt, of which at least one has not ended.
struct Asked {
    number: usize,
    answer: Answer,
    /// Tokens so far.
    tokens: u64,
}

impl Answers {
    /// Asks for the first answers. `room`: memory of the requests; `key`: named key of the caller.
    ///
    /// # Errors
    /// As [`Service::ask`].
    pub(super) fn ask(
        service: Service,
        caller: Caller,
        model: &str,
        requests: Vec<Request>,
        room: Room,
        key: Option<PresentedKey>,
    ) -> Result<Self, ChatError> {
        let mut answers = Self {
            service,
            caller,
            model: model.to_owned(),
            waiting: requests.into_iter().enumerate().collect(),
            asked: Vec::new(),
            key,
            room: Some(room),
        };
        answers.ask_more()?;
        Ok(answers)
    }

    fn ask_more(&mut self) -> Result<(), ChatError> {
        while self.asked.len() < AT_ONCE
            && let Some((number, request)) = self.waiting.front()
        {
            let asked = self
                .service
                .ask(self.caller.clone(), &self.model, request.clone());
            match asked {
                Ok(answer) => self.asked.push(Asked {
                    number: *number,
                    answer,
                    tokens: 0,
                }),
                // Asked again when another one of this request has ended.
                Err(ChatError::Busy(_)) if !self.asked.is_empty() => break,
                Err(error) => return Err(error),
            }
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Next frame of an answer that has not ended, with the number of its prompt. The last one of
    /// each is [`Frame::Done`]. Cancel-safe.
    ///
    /// # Errors
    /// The error of any of the answers.
    pub(super) async fn next(&mut self) -> Result<(usize, Frame), ChatError> {
        let (next, at) = match self.asked.as_mut_slice() {
            [] => (None, 0),
            [only] => (only.answer.next().await, 0),
            several => {
                let all = several.iter_mut().map(|asked| asked.answer.next().boxed());
                let (next, at, _) = select_all(all).await;
                (next, at)
            }
        };
        let frame = next.unwrap_or(Err(ChatError::Cancelled))?;
        let number = self.asked.get(at).map_or(0, |asked| asked.number);
        match &frame {
            Frame::Done(done) => {
                self.asked.remove(at);
                self.spend(done.usage.total_tokens.into());
                self.ask_more()?;
            }
            Frame::TokenDelta { .. } => {
                if let Some(asked) = self.asked.get_mut(at) {
                    asked.tokens += 1;
                }
            }
            _ => {}
        }
        if self.waiting.is_empty() {
            self.room = None;
        }
        Ok((number, frame))
    }

    fn spend(&self, tokens: u64) {
        if let Some(key) = &self.key {
            key.spend(tokens);
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        // Of answers that did not end, the prompt is not counted.
        self.spend(self.asked.iter().map(|asked| asked.tokens).sum());
    }
}
