//! Conversation: text in, tokens out, over any [`Backend`].
//!
//! The prompt, the token ids, the embedding and the sampler stay on the caller's node; a backend
//! only gets rows of activations. A [`Conversation`] holds one sequence and remembers the tokens
//! already run, so that the next turn only runs new ones.
//!
//! `request.rs` has the requests, and `prepared.rs` validates them: token ids and state of the sampling.
//! `grammar_thread.rs` has the grammar of an answer. Its state follows from the sampled tokens, which
//! stay on the caller, so it survives every change of hosts. `turn.rs` separates the text of the
//! answer into reasoning, text and calls of tools; for its state the same holds. `prompt_rows.rs`
//! makes log probabilities of the outputs of a whole prompt, or the vector of a text.

mod embedding;
mod grammar_thread;
mod prepared;
mod prompt_rows;
mod request;
mod turn;

use std::fmt::Display;
use std::future::ready;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::Event;
use hearthnet_tokens::grammar::Allowed;

pub use self::embedding::EmbedRequest;
pub(crate) use self::prepared::{Outputs, Prepared};
pub use self::prepared::{check, tokens_of};
pub use self::request::{AnswerOptions, ChatRequest, MAX_CHOICES, Prompt, TextModel, choice_seed};
pub use self::turn::TurnOptions;
use crate::Cancel;
use crate::backend::events::report_event;
use crate::backend::{Backend, Rows, Run};
use crate::error::ChatError;
use crate::exact::Arithmetics;
use crate::frames::RouteHop;
pub use crate::frames::{Done, Embedding, FinishReason, Frame, PromptToken, Timings, Usage};
use crate::steps::batcher::AttendanceGuard;
use crate::steps::chat_loop;
use crate::times::whole_ms;

/// Receiver of an answer's frames.
pub(crate) trait Listener {
    /// Takes a frame. Must not block.
    fn on_frame(&mut self, frame: &Frame);

    /// Waits until the receiver has room for more.
    fn caught_up(&mut self) -> LocalBoxFuture<'_, ()>;
}

/// Listener that processes a frame at once.
struct AtOnce<'a>(&'a mut dyn FnMut(&Frame));

impl Listener for AtOnce<'_> {
    fn on_frame(&mut self, frame: &Frame) {
        (self.0)(frame);
    }

    fn caught_up(&mut self) -> LocalBoxFuture<'_, ()> {
        ready(()).boxed_local()
    }
}

/// Parameters of one answer.
pub(crate) struct Call<'a> {
    pub(crate) model: &'a TextModel,
    /// When the caller sent the request.
    pub(crate) started: Instant,
    pub(crate) cancel: &'a Cancel,
    pub(crate) listener: &'a mut dyn Listener,
}

/// Sequence: a backend and the tokens that it holds.
pub struct Conversation {
    pub(crate) backend: Box<dyn Backend>,
    /// Tokens of the sequence that its backend holds, in order.
    pub(crate) held: Vec<u32>,
    /// Arithmetics that computed the held tokens and the answer so far.
    arithmetic: Arithmetics,
}

impl Conversation {
    pub fn new(backend: Box<dyn Backend>) -> Self {
        Self {
            backend,
            held: Vec::new(),
            arithmetic: Arithmetics::default(),
        }
    }

    /// Hops in layer order.
    pub fn route(&self) -> Vec<RouteHop> {
        self.backend.route()
    }

    /// Returns true if it could take another request, judged by local state only.
    pub fn is_alive(&self) -> bool {
        self.backend.is_alive()
    }

    /// Answers one request on this thread. Calls `emit` for every frame, including `done`.
    ///
    /// `started` is the time of the request, from which `construct_ms` and `first_token_ms` count.
    ///
    /// # Errors
    /// Any [`ChatError`]. The conversation must then be dropped.
    pub fn answer(
        &mut self,
        model: &TextModel,
        request: &ChatRequest,
        started: Instant,
        cancel: &Cancel,
        emit: &mut dyn FnMut(&Frame),
    ) -> Result<Done, ChatError> {
        let asked = Prepared::new(model, request)?;
        let mut call = Call {
            model,
            started,
            cancel,
            listener: &mut AtOnce(emit),
        };
        chat_loop::block_on(self.answer_to(asked, &mut call))
    }

    /// As [`Self::answer`], on the current step loop (`chat_loop.rs`).
    ///
    /// # Errors
    /// Any [`ChatError`]. The conversation must then be dropped.
    pub(crate) async fn answer_to(
        &mut self,
        asked: Prepared,
        call: &mut Call<'_>,
    ) -> Result<Done, ChatError> {
        let begun = self.begin(asked, call).await?;
        self.go_on(begun, call).await
    }

    /// Runs the prompt.
    ///
    /// # Errors
    /// As [`Self::answer_to`].
    pub(crate) async fn begin(
        &mut self,
        asked: Prepared,
        call: &mut Call<'_>,
    ) -> Result<Begun, ChatError> {
        let begun = self.run_prompt(asked, call).await;
        if let Err(error) = &begun {
            self.report_failure(error);
        }
        begun
    }

    /// Answers, once the prompt was run.
    ///
    /// # Errors
    /// As [`Self::answer_to`].
    pub(crate) async fn go_on(
        &mut self,
        begun: Begun,
        call: &mut Call<'_>,
    ) -> Result<Done, ChatError> {
        let answer = self.decode(begun, call).await;
        match (&answer, self.backend.pipeline()) {
            (Ok(done), Some(pipeline)) => report_event(Event::Answered {
                pipeline,
                prompt_tokens: done.usage.prompt_tokens,
                cached_tokens: done.usage.cached_tokens,
                completion_tokens: done.usage.completion_tokens,
                ms: whole_ms(call.started.elapsed()),
            }),
            (Err(error), _) => self.report_failure(error),
            (Ok(_), None) => {}
        }
        answer
    }

    fn report_failure(&self, error: &ChatError) {
        if let Some(pipeline) = self.backend.pipeline() {
            report_event(match error {
                ChatError::Cancelled => Event::Cancelled { pipeline },
                error => Event::Aborted {
                    pipeline,
                    code: error.code(),
                },
            });
        }
    }

    /// Copy for another answer to the same prompt, between [`Self::begin`] and [`Self::go_on`].
    /// `None` if there is no room for it.
    pub(crate) async fn fork(&mut self) -> Option<Self> {
        Some(Self {
            backend: self.backend.fork().await?,
            held: self.held.clone(),
            arithmetic: self.arithmetic.clone(),
        })
    }

    fn is_hosted(&self) -> bool {
        self.backend.route().iter().any(|hop| hop.host.is_some())
    }

    async fn run_prompt(
        &mut self,
        mut asked: Prepared,
        call: &mut Call<'_>,
    ) -> Result<Begun, ChatError> {
        let model = call.model;
        let construct_ms = ms(call.started);
        metrics::histogram!("distributed_inference_pipeline_construct_seconds")
            .record(construct_ms / 1e3);
        for hop in self.backend.route() {
            call.listener.on_frame(&Frame::ShardStatus {
                shard_id: hop.shard_id,
                host: hop.host,
                status: "ready".into(),
                code: None,
                arithmetic: Some(hop.arithmetic),
            });
        }
        let present = model.head.attend(self.is_hosted());
        self.backend.begin_call(asked.positions(model.context));

        // At least one row must run: the first token is sampled from its output.
        let held = self.held.iter().zip(&asked.prompt);
        let cached = held.take_while(|(a, b)| a == b).count();
        let cached = match asked.outputs {
            Outputs::Last => cached.min(asked.prompt.len() - 1),
            Outputs::Logprobs | Outputs::Embedding => 0,
        };
        let cached = match cached < self.held.len() {
            true => self.backend.rewind(cached as u32).await? as usize,
            false => cached,
        };
        self.held.truncate(cached);
        if cached == 0 {
            self.arithmetic = Arithmetics::default();
        }
        let prefill = Instant::now();
        let news = asked.prompt.split_off(cached);
        let (mut row, mut embedding) = (Vec::new(), None);
        match asked.outputs {
            Outputs::Last => {
                self.submit(&news, false, call).await?;
                row = self.output(&news, call).await?;
            }
            Outputs::Logprobs => row = self.score(&news, &mut asked.sampler, call).await?,
            // A vector needs no last row, because no token is sampled.
            Outputs::Embedding => embedding = Some(self.embed(&news, call).await?),
        }
        self.arithmetic
            .extend(Arithmetics::of(&self.backend.route()));
        Ok(Begun {
            asked,
            row,
            embedding,
            prompt: (cached + news.len()) as u32,
            cached: cached as u32,
            construct_ms,
            prefill_s: prefill.elapsed().as_secs_f64(),
            _present: present,
        })
    }

    /// Samples the answer.
    async fn decode(&mut self, begun: Begun, call: &mut Call<'_>) -> Result<Done, ChatError> {
        let Begun {
            mut asked,
            mut row,
            embedding,
            prompt,
            cached,
            construct_ms,
            prefill_s,
            _present,
        } = begun;
        let model = call.model;
        let (mut memory, mut text, mut token_ids) = (Vec::new(), String::new(), Vec::new());
        let (mut first_token_ms, mut head_ms) = (0.0, 0.0);
        let mut decode = Instant::now();
        let finish_reason = loop {
            if call.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            // Only a request for no tokens.
            if asked.room == 0 {
                break FinishReason::Length;
            }
            let head = Instant::now();
            let logits = model.head.logits(row, memory).await.map_err(engine)?;
            let allowed = match &mut asked.grammar {
                Some(grammar) => Some(grammar.allowed().await?),
                None => None,
            };
            let allowed = asked.turn.allowed(&model.tokenizer, allowed);
            if allowed.as_ref().is_some_and(Allowed::is_none) {
                break FinishReason::Stop;
            }
            let sampled = asked
                .sampler
                .sample_allowed(logits.values(), allowed.as_ref());
            let sampled = sampled.map_err(engine)?;
            memory = logits.into_memory();
            head_ms += ms(head);
            if token_ids.is_empty() {
                first_token_ms = ms(call.started);
                metrics::histogram!("distributed_inference_first_token_seconds")
                    .record(first_token_ms / 1e3);
                decode = Instant::now();
            }
            token_ids.push(sampled.id);
            let (said, finish_reason) = asked.take(model, sampled.id);
            // The hosts compute the next row while the text is delivered.
            let mut submitted = Ok(());
            if finish_reason.is_none() {
                if let Some(grammar) = &asked.grammar {
                    grammar.accept(sampled.id);
                }
                submitted = self.submit(&[sampled.id], false, call).await;
                chat_loop::boundary().await;
            }
            text.push_str(&said.text);
            call.listener.on_frame(&Frame::TokenDelta {
                choice: 0,
                text: said.text,
                reasoning: said.reasoning,
                tool_calls: said.calls,
                token_id: sampled.id,
                logprob: sampled.logprob,
                top_logprobs: sampled.top,
            });
            call.listener.caught_up().await;
            if let Some(finish_reason) = finish_reason {
                break finish_reason;
            }
            submitted?;
            row = self.output(&[sampled.id], call).await?;
        };
        self.backend.end_call();
        let decode_s = decode.elapsed().as_secs_f64();
        let rest = asked.turn.finish(finish_reason == FinishReason::Stop);
        if !rest.is_empty() {
            text.push_str(&rest.text);
            call.listener.on_frame(&Frame::TokenDelta {
                choice: 0,
                text: rest.text,
                reasoning: rest.reasoning,
                tool_calls: rest.calls,
                token_id: token_ids.last().copied().unwrap_or_default(),
                logprob: None,
                top_logprobs: Vec::new(),
            });
        }
        let tool_calls = asked.turn.calls().to_vec();
        let finish_reason = match finish_reason {
            FinishReason::Stop if !tool_calls.is_empty() => FinishReason::ToolCalls,
            reason => reason,
        };

        let generated = token_ids.len() as u32;
        let after_first = f64::from(generated.saturating_sub(1));
        let tokens_per_second = match decode_s > 0.0 {
            true => after_first / decode_s,
            false => 0.0,
        };
        if generated > 0 {
            metrics::histogram!("distributed_inference_tokens_per_second")
                .record(tokens_per_second);
        }
        let done = Done {
            text,
            reasoning: asked.turn.reasoning().to_owned(),
            tool_calls,
            token_ids,
            embedding,
            finish_reason,
            usage: Usage {
                prompt_tokens: prompt,
                completion_tokens: generated,
                total_tokens: prompt + generated,
                cached_tokens: cached,
                reasoning_tokens: asked.turn.thought(),
            },
            seed: asked.seed,
            route: self.backend.route(),
            arithmetic: self.arithmetic.clone(),
            timings: Timings {
                construct_ms,
                first_token_ms,
                prefill_ms: prefill_s * 1e3,
                decode_ms: decode_s * 1e3,
                prefill_tokens_per_second: f64::from(prompt - cached)
                    / prefill_s.max(f64::MIN_POSITIVE),
                tokens_per_second,
                head_ms_per_token: head_ms / f64::from(generated.max(1)),
                hops: self.backend.times(),
            },
        };
        call.listener.on_frame(&Frame::Done(Box::new(done.clone())));
        Ok(done)
    }

    /// Embeds tokens and submits their rows behind the held ones. `all`: the output has a row for
    /// each.
    async fn submit(&mut self, ids: &[u32], all: bool, call: &Call<'_>) -> Result<(), ChatError> {
        let mut rows = Vec::new();
        call.model.head.embed(ids, &mut rows).map_err(engine)?;
        let rows = Rows {
            all,
            ..Rows::at(self.held.len() as u32, &rows)
        };
        self.backend.submit(rows, call.cancel).await;
        Ok(())
    }

    /// Waits for the output of the submitted tokens and adds them to the held ones.
    async fn output(&mut self, ids: &[u32], call: &mut Call<'_>) -> Result<Vec<f32>, ChatError> {
        let arithmetic = &mut self.arithmetic;
        let mut told = Instant::now();
        let mut run = Run {
            cancel: call.cancel,
            notify: &mut |frame| match frame {
                Frame::PromptProgress { .. } if !is_due(&mut told, Instant::now()) => {}
                frame => {
                    arithmetic.on_frame(&frame);
                    call.listener.on_frame(&frame);
                }
            },
        };
        let result = self.backend.output(&mut run).await;
        match &result {
            Ok(_) => self.held.extend_from_slice(ids),
            Err(error) if error.blames_host() => {
                call.listener.on_frame(&Frame::PipelineAborted {
                    code: error.code(),
                    message: error.to_string(),
                });
            }
            Err(_) => {}
        }
        result
    }
}

/// Answer whose prompt was run.
pub(crate) struct Begun {
    asked: Prepared,
    /// Output of the last token of the prompt; empty for a text that is embedded.
    row: Vec<f32>,
    embedding: Option<Embedding>,
    /// Number of tokens of the prompt, and how many of them were cached.
    prompt: u32,
    cached: u32,
    construct_ms: f64,
    prefill_s: f64,
    _present: AttendanceGuard,
}

impl Begun {
    /// Another answer to the same prompt, for a fork of its conversation.
    pub(crate) fn again(&self, asked: Prepared, fork: &Conversation, model: &TextModel) -> Self {
        Self {
            asked,
            row: self.row.clone(),
            embedding: None,
            prompt: self.prompt,
            cached: self.cached,
            construct_ms: self.construct_ms,
            prefill_s: self.prefill_s,
            _present: model.head.attend(fork.is_hosted()),
        }
    }
}

/// Minimum interval between progress frames.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Returns true, and updates `last`, if a progress frame is due. A prompt that takes less than one
/// interval has no progress frames.
fn is_due(last: &mut Instant, now: Instant) -> bool {
    let due = now.saturating_duration_since(*last) >= PROGRESS_EVERY;
    if due {
        *last = now;
    }
    due
}

fn engine(error: impl Display) -> ChatError {
    ChatError::Engine(error.to_string())
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests;
