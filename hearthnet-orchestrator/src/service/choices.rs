//! Answers of one chat on the step loop: one, or several to one prompt.
//!
//! The prompt is run once. Every further answer continues a fork of its conversation, as a chat of its
//! own on the loop, so that hosts and output matrix compute the tokens of all in one batch. Answers
//! for which there is no room run one after the other, in the conversation of the first answer: it is
//! cut back to the prompt.
//!
//! ```text
//! prompt ──┬── answer 0 ──── answers without a fork, one after the other
//!          ├── fork: answer 1
//!          └── fork: answer 2
//! ```
//!
//! An answer does not depend on the way in which it runs.
//!
//! Vectors of several texts are made one after the other in one conversation, which is cut back to
//! its beginning for each: so hosts open one stream for all.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::{join, join_all};

use super::answer::FrameOutput;
use super::{Inner, ServedModel};
use crate::Cancel;
use crate::chat::{Begun, Call, Conversation, Done, Prepared};
use crate::error::ChatError;

/// State that all answers of a chat share.
pub(super) struct Chat {
    pub(super) inner: Arc<Inner>,
    pub(super) model: Arc<ServedModel>,
    /// Time of the request.
    pub(super) started: Instant,
}

/// Conversation after some work, and the sender of its frames.
type Ended<T> = (Conversation, FrameOutput, Result<T, ChatError>);

/// Answers with their numbers, before their prompt was run.
pub(super) type Numbered = VecDeque<(u32, Prepared)>;

/// A forked answer.
type Forked = (Conversation, FrameOutput, Begun);

impl Chat {
    /// Gives one answer. `None` if the chat panics.
    pub(super) async fn one(
        &self,
        mut conversation: Conversation,
        mut output: FrameOutput,
        asked: Prepared,
    ) -> Option<Ended<Done>> {
        let (model, started) = (Arc::clone(&self.model), self.started);
        let chat = async move || {
            let cancel = output.cancel.clone();
            let mut call = call(&model, started, &cancel, &mut output);
            let result = conversation.answer_to(asked, &mut call).await;
            (conversation, output, result)
        };
        self.inner.chat_loop.run(chat).await
    }

    /// Gives several answers. The result is that of the first one, with the counts of all. `None` if
    /// one of them panics.
    pub(super) async fn several(
        &self,
        conversation: Conversation,
        output: FrameOutput,
        first: Prepared,
        others: Numbered,
    ) -> Option<Ended<Done>> {
        let begun = self.begin(conversation, output, first, others).await?;
        let (conversation, output, begun) = begun;
        let (begun, forks, rest) = match begun {
            Ok(begun) => begun,
            Err(error) => return Some((conversation, output, Err(error))),
        };
        let forks = forks
            .into_iter()
            .map(|(conversation, output, begun)| async move {
                let (conversation, _, result) = self.go_on(conversation, output, begun).await?;
                // Its streams are free for other chats at once.
                self.inner.discard(vec![conversation]);
                Some(result)
            });
        let first = async {
            let ended = self.go_on(conversation, output, begun).await?;
            self.one_by_one(ended, rest).await
        };
        let (first, forks) = join(first, join_all(forks)).await;
        let (conversation, output, mut results) = first?;
        for result in forks {
            results.push(result?);
        }
        Some((conversation, output, sum(results)))
    }

    /// Embeds several texts. The result is that of the first one, with the counts of all. `None` if
    /// one of them panics.
    pub(super) async fn in_turn(
        &self,
        conversation: Conversation,
        output: FrameOutput,
        first: Prepared,
        others: Numbered,
    ) -> Option<Ended<Done>> {
        let ended = self.one(conversation, output, first).await?;
        let ended = end(ended).await;
        let (conversation, output, results) = self.one_by_one(ended, others).await?;
        let prompts = results
            .iter()
            .flatten()
            .map(|done| done.usage.prompt_tokens);
        let prompts = prompts.sum();
        let result = sum(results).map(|mut done| {
            (done.usage.prompt_tokens, done.usage.total_tokens) = (prompts, prompts);
            done
        });
        Some((conversation, output, result))
    }

    /// Runs the prompt, and forks its conversation for the other answers. Returns those for which
    /// there is no room, too.
    async fn begin(
        &self,
        mut conversation: Conversation,
        mut output: FrameOutput,
        first: Prepared,
        mut others: Numbered,
    ) -> Option<Ended<(Begun, Vec<Forked>, Numbered)>> {
        let (model, started) = (Arc::clone(&self.model), self.started);
        let slow_reader = self.inner.settings.slow_reader;
        let chat = async move || {
            let cancel = output.cancel.clone();
            let mut call = call(&model, started, &cancel, &mut output);
            let begun = match conversation.begin(first, &mut call).await {
                Ok(begun) => begun,
                Err(error) => return (conversation, output, Err(error)),
            };
            let mut forks = Vec::new();
            while !others.is_empty()
                && let Some(fork) = conversation.fork().await
                && let Some((choice, asked)) = others.pop_front()
            {
                let begun = begun.again(asked, &fork, &model.text);
                forks.push((fork, output.beside(slow_reader, choice), begun));
            }
            (conversation, output, Ok((begun, forks, others)))
        };
        self.inner.chat_loop.run(chat).await
    }

    /// Gives an answer whose prompt was run.
    async fn go_on(
        &self,
        mut conversation: Conversation,
        mut output: FrameOutput,
        begun: Begun,
    ) -> Option<Ended<Done>> {
        let (model, started) = (Arc::clone(&self.model), self.started);
        let chat = async move || {
            let cancel = output.cancel.clone();
            let mut call = call(&model, started, &cancel, &mut output);
            let result = conversation.go_on(begun, &mut call).await;
            (conversation, output, result)
        };
        let ended = self.inner.chat_loop.run(chat).await?;
        Some(end(ended).await)
    }

    /// Gives further answers in the conversation of the first one.
    async fn one_by_one(
        &self,
        (mut conversation, mut output, result): Ended<Done>,
        rest: Numbered,
    ) -> Option<(Conversation, FrameOutput, Vec<Result<Done, ChatError>>)> {
        let mut results = vec![result];
        for (choice, asked) in rest {
            if results.iter().any(Result::is_err) {
                break;
            }
            output.choice = choice;
            let ended = self.one(conversation, output, asked).await?;
            let result;
            (conversation, output, result) = end(ended).await;
            results.push(result);
        }
        Some((conversation, output, results))
    }
}

fn call<'a>(
    model: &'a ServedModel,
    started: Instant,
    cancel: &'a Cancel,
    output: &'a mut FrameOutput,
) -> Call<'a> {
    Call {
        model: &model.text,
        started,
        cancel,
        listener: output,
    }
}

/// Sends the end of one of several answers. If it has failed, the others are cancelled.
async fn end((conversation, mut output, mut result): Ended<Done>) -> Ended<Done> {
    match &mut result {
        Ok(done) => {
            output.end_choice(done.clone()).await;
            // Only the counts are needed now.
            done.embedding = None;
        }
        Err(_) => output.cancel.cancel(),
    }
    (conversation, output, result)
}

/// The first answer, with the counts of all, or the error that cancelled the others.
fn sum(results: Vec<Result<Done, ChatError>>) -> Result<Done, ChatError> {
    let mut sum: Option<Done> = None;
    let mut failed: Option<ChatError> = None;
    for result in results {
        match result {
            Ok(done) => match &mut sum {
                None => sum = Some(done),
                Some(sum) => {
                    sum.usage.completion_tokens += done.usage.completion_tokens;
                    sum.usage.reasoning_tokens += done.usage.reasoning_tokens;
                    sum.usage.total_tokens += done.usage.completion_tokens;
                    sum.arithmetic.extend(done.arithmetic);
                }
            },
            Err(error) if matches!(failed, None | Some(ChatError::Cancelled)) => {
                failed = Some(error);
            }
            Err(_) => {}
        }
    }
    match failed {
        Some(error) => Err(error),
        None => sum.ok_or(ChatError::Cancelled),
    }
}
