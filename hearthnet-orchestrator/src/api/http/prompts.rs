//! Answers to all prompts of a request, some of them at the same time.

use std::collections::VecDeque;

use futures_util::FutureExt as _;
use futures_util::future::select_all;

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
    asked: Vec<(usize, Answer)>,
    /// Memory of the request, until all of its prompts are at work.
    room: Option<Room>,
}

impl Answers {
    /// Asks for the first answers. `room`: memory of the requests.
    ///
    /// # Errors
    /// As [`Service::ask`].
    pub(super) fn ask(
        service: Service,
        caller: Caller,
        model: &str,
        requests: Vec<Request>,
        room: Room,
    ) -> Result<Self, ChatError> {
        let mut answers = Self {
            service,
            caller,
            model: model.to_owned(),
            waiting: requests.into_iter().enumerate().collect(),
            asked: Vec::new(),
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
                Ok(answer) => self.asked.push((*number, answer)),
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
            [(_, only)] => (only.next().await, 0),
            several => {
                let all = several.iter_mut().map(|(_, answer)| answer.next().boxed());
                let (next, at, _) = select_all(all).await;
                (next, at)
            }
        };
        let frame = next.unwrap_or(Err(ChatError::Cancelled))?;
        let number = self.asked.get(at).map_or(0, |(number, _)| *number);
        if matches!(frame, Frame::Done(_)) {
            self.asked.remove(at);
            self.ask_more()?;
        }
        if self.waiting.is_empty() {
            self.room = None;
        }
        Ok((number, frame))
    }
}
