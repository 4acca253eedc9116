//! Conversation: text in, tokens out, over any [`Backend`].
//!
//! The prompt, the token ids, the embedding and the sampler stay on the caller's node; a backend
//! only gets rows of activations. A [`Conversation`] holds one sequence and remembers the tokens
//! already run, so that the next turn only runs new ones.
//!
//! `grammar_thread.rs` has the grammar of an answer. Its state follows from the sampled tokens, which
//! stay on the caller, so it survives every change of hosts. `turn.rs` separates the text of the
//! answer into reasoning, text and calls of tools; for its state the same holds. `prompt_rows.rs`
//! makes log probabilities of the outputs of a whole prompt, or the vector of a text, with the
//! arithmetic of `embedding.rs` (pure).

mod embedding;
mod grammar_thread;
mod prompt_rows;
mod turn;

use std::fmt::Display;
use std::future::ready;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::Event;
use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_tokens::grammar::Allowed;
use hearthnet_tokens::sampler::Sampler;
use hearthnet_tokens::template::Chat;
use hearthnet_tokens::tools::{Tool, ToolChoice};
use hearthnet_tokens::{ChatMessage, ChatTemplate, Grammar, Role, Special, Tokenizer};

pub use self::embedding::{EmbedRequest, POOLING};
use self::grammar_thread::GrammarThread;
pub use self::turn::TurnOptions;
use self::turn::{Said, Turn};
use crate::Cancel;
use crate::backend::events::report_event;
use crate::backend::{Backend, Rows, Run};
use crate::error::ChatError;
use crate::exact::{Arithmetics, Exact};
use crate::frames::RouteHop;
pub use crate::frames::{Done, Embedding, FinishReason, Frame, PromptToken, Timings, Usage};
use crate::steps::batcher::AttendanceGuard;
use crate::steps::chat_loop;
use crate::steps::logits_batcher::LogitsBatcher;
use crate::times::whole_ms;

#[derive(Debug, Clone)]
pub enum Prompt {
    /// Conversation, rendered with the model's chat template.
    Messages(Vec<ChatMessage>),
    /// Text to continue as it is.
    Text(String),
    /// Token ids to continue as they are.
    Tokens(Vec<u32>),
}

/// Request for one answer.
#[derive(Debug, Clone)]
pub struct ChatRequest {
    pub prompt: Prompt,
    /// Sampling parameters. Reproducible answers need a seed.
    pub sampling: SamplerConfig,
    /// Maximum number of generated tokens; the context may end the answer earlier. 0: the prompt is
    /// run, and the answer is empty. `None`: up to the context.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Rule for the arithmetics; `None` for the configured one. It decides which hosts a
    /// conversation runs on and which idle one may be taken over.
    pub exact: Option<Exact>,
    /// Grammar that the answer follows. A stop text or a limit may end the answer earlier.
    pub grammar: Option<Grammar>,
    /// Tools and reasoning. Only a chat has them.
    pub turn: TurnOptions,
    pub options: AnswerOptions,
}

/// What a request wants of the prompt, and how many answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Built with `..AnswerOptions::default()`.
pub struct AnswerOptions {
    /// Answers to the prompt, 1 to [`MAX_CHOICES`]. Only a service gives more than one.
    pub choices: u32,
    /// Reports the log probabilities of the prompt's tokens ([`Frame::Prompt`]). The prompt is then
    /// not taken from a kept conversation.
    pub prompt_logprobs: bool,
    /// Leaves the oldest turns of a conversation out that is too long for the context.
    pub drop_oldest: bool,
}

impl Default for AnswerOptions {
    fn default() -> Self {
        Self {
            choices: 1,
            prompt_logprobs: false,
            drop_oldest: false,
        }
    }
}

/// Maximum number of answers to one prompt: as many as a host has streams, by default.
pub const MAX_CHOICES: u32 = 8;

impl ChatRequest {
    /// Request for one of its choices alone.
    pub(crate) fn choice(&self, index: u32) -> Self {
        let mut request = self.clone();
        request.options.choices = 1;
        if index > 0 {
            let seed = request.sampling.seed.unwrap_or_default();
            request.sampling.seed = Some(choice_seed(seed, index));
            request.options.prompt_logprobs = false;
        }
        request
    }
}

/// Seed of a choice, from that of the request: the step is that of SplitMix64. Part of the interface
/// (`specs/http-api.md` 3).
pub fn choice_seed(seed: u64, index: u32) -> u64 {
    seed.wrapping_add(u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

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

/// Caller's side of a model: everything except the blocks.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    /// Chat template, if the model file has one.
    pub template: Option<ChatTemplate>,
    /// Embedding, final norm and output matrix, shared by all chats with this model.
    pub head: LogitsBatcher,
    /// Longest sequence, in positions.
    pub context: u32,
    /// Sampling parameters of the model, for requests without their own.
    pub sampling: SamplingChoice,
}

/// Positions reserved for an answer that only the context limits. Its length is unknown; streams
/// grow on demand.
const UNLIMITED_ROOM: u32 = 64;

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
            // Nothing is sampled.
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

/// Validated request, prepared for sampling.
pub(crate) struct Prepared {
    pub(crate) prompt: Vec<u32>,
    /// Number of tokens that may still be generated.
    room: u32,
    seed: Option<u64>,
    sampler: Sampler,
    turn: Turn,
    grammar: Option<GrammarThread>,
    pub(crate) outputs: Outputs,
}

/// Outputs of a prompt that are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outputs {
    /// That of the last token, from which the answer is sampled.
    Last,
    /// Those of all tokens, for their log probabilities.
    Logprobs,
    /// Those of all tokens, for the vector of a text.
    Embedding,
}

impl Prepared {
    /// Blocks while a grammar is compiled.
    ///
    /// # Errors
    /// [`ChatError::BadRequest`], [`ChatError::TooLong`] and [`ChatError::Grammar`];
    /// [`ChatError::Busy`] if too many grammars are compiled.
    pub(crate) fn new(model: &TextModel, request: &ChatRequest) -> Result<Self, ChatError> {
        let (prompt, thinking) = encode(model, request)?;
        let room = room_for(&prompt, model.context, request.max_tokens)?;
        let vocab = model.head.spec().vocab;
        let mut biases = request.sampling.logit_bias.iter();
        if let Some((id, _)) = biases.find(|(id, _)| *id >= vocab) {
            let problem = format!("token {id} is not one of this model's {vocab} tokens");
            return Err(bad(format!("logit_bias: {problem}")));
        }
        let mut sampler = Sampler::new(request.sampling.clone()).map_err(bad)?;
        if request.sampling.penalise_prompt {
            sampler.observe(&prompt);
        }
        // The answer in a chat is a text of its own.
        let begins = matches!(request.prompt, Prompt::Messages(_));
        let template = model.template.as_ref().filter(|_| begins);
        let (turn, grammar) = Turn::new(
            &model.tokenizer,
            template.map(ChatTemplate::turn_format),
            &prompt,
            thinking,
            &request.turn,
            request.stop.clone(),
            request.grammar.clone(),
            request.sampling.seed,
        )?;
        let start = |grammar| GrammarThread::start(&model.tokenizer, grammar, begins);
        Ok(Self {
            room,
            seed: request.sampling.seed,
            sampler,
            turn,
            grammar: grammar.map(start).transpose()?,
            outputs: match request.options.prompt_logprobs {
                true => Outputs::Logprobs,
                false => Outputs::Last,
            },
            prompt,
        })
    }

    /// Text to embed, by its token ids.
    ///
    /// # Errors
    /// As from [`tokens_of`].
    pub(crate) fn embedding(model: &TextModel, ids: &[u32]) -> Result<Self, ChatError> {
        let prompt = tokens_of(model, &Prompt::Tokens(ids.to_vec()), false)?;
        let (no_options, no_stops) = (TurnOptions::default(), Vec::new());
        let turn = Turn::new(
            &model.tokenizer,
            None,
            &prompt,
            false,
            &no_options,
            no_stops,
            None,
            None,
        )?;
        Ok(Self {
            room: 0,
            seed: None,
            sampler: Sampler::new(SamplerConfig::default()).map_err(bad)?,
            turn: turn.0,
            grammar: None,
            outputs: Outputs::Embedding,
            prompt,
        })
    }

    /// Number of positions to reserve on hosts.
    fn positions(&self, context: u32) -> u32 {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        // The last sampled token needs no position.
        let all = prompt.saturating_add(self.room - self.room.min(1));
        match all < context {
            true => all,
            false => prompt.saturating_add(self.room.min(UNLIMITED_ROOM)),
        }
    }

    /// Adds a sampled token. Returns the text that it completes, and the finish reason if the
    /// answer ends.
    fn take(&mut self, model: &TextModel, id: u32) -> (Said, Option<FinishReason>) {
        self.room -= self.room.min(1);
        let (said, ended) = match model.tokenizer.is_end_of_generation(id) {
            true => (Said::default(), true),
            false => self.turn.push(id),
        };
        let finish_reason = match ended {
            true => Some(FinishReason::Stop),
            false => (self.room == 0).then_some(FinishReason::Length),
        };
        (said, finish_reason)
    }
}

/// Token ids of a request's prompt, if the request is valid for this model.
///
/// # Errors
/// [`ChatError`] as from [`Conversation::answer`], without needing a backend.
pub fn check(model: &TextModel, request: &ChatRequest) -> Result<Vec<u32>, ChatError> {
    Prepared::new(model, request).map(|prepared| prepared.prompt)
}

/// Token ids of a text to embed. `truncate`: if it is longer than the context, its end is left out.
///
/// # Errors
/// [`ChatError::BadRequest`] and [`ChatError::TooLong`].
pub fn tokens_of(model: &TextModel, text: &Prompt, truncate: bool) -> Result<Vec<u32>, ChatError> {
    let mut ids = plain_ids(model, text)?;
    if truncate {
        ids.truncate(model.context as usize);
    }
    if ids.is_empty() {
        return Err(bad("the text is empty"));
    }
    room_for(&ids, model.context, Some(0))?;
    Ok(ids)
}

/// Token ids of a prompt that is no conversation; of a conversation there are none.
fn plain_ids(model: &TextModel, prompt: &Prompt) -> Result<Vec<u32>, ChatError> {
    match prompt {
        Prompt::Tokens(ids) => {
            let vocab = model.head.spec().vocab;
            if let Some(id) = ids.iter().find(|id| **id >= vocab) {
                let problem = format!("token {id} is not one of this model's {vocab} tokens");
                return Err(bad(problem));
            }
            Ok(ids.clone())
        }
        Prompt::Text(text) => model
            .tokenizer
            .encode_document(text, Special::Plain)
            .map_err(bad),
        Prompt::Messages(_) => Ok(Vec::new()),
    }
}

/// Token ids of the prompt, and whether it ends within reasoning.
fn encode(model: &TextModel, request: &ChatRequest) -> Result<(Vec<u32>, bool), ChatError> {
    let mut thinking = false;
    let ids = match &request.prompt {
        plain @ (Prompt::Tokens(_) | Prompt::Text(_)) => plain_ids(model, plain)?,
        Prompt::Messages(messages) => {
            let template = model.template.as_ref().ok_or_else(|| {
                bad("this model file has no default chat template: use a model made for chat, or ask for a completion (`chat --raw`)")
            })?;
            let tools: &[Tool] = match request.turn.tools.choice {
                ToolChoice::None => &[],
                _ => &request.turn.tools.list,
            };
            let rendered = |messages: &[ChatMessage]| -> Result<(Vec<u32>, bool), ChatError> {
                let chat = Chat {
                    messages,
                    tools,
                    variables: &request.turn.variables,
                };
                let prompt = template.prompt(&model.tokenizer, &chat, true);
                let prompt = prompt.map_err(bad)?;
                Ok((prompt.ids, prompt.thinking))
            };
            let most = most_of_prompt(model.context, request.max_tokens);
            let (ids, thinks) = match request.options.drop_oldest {
                true => without_oldest(messages, most, rendered)?,
                false => rendered(messages)?,
            };
            thinking = thinks;
            ids
        }
    };
    if ids.is_empty() {
        return Err(bad("the prompt is empty"));
    }
    Ok((ids, thinking))
}

/// Tokens of a prompt from which turns are left out: a quarter of the context is for the answer,
/// unless it needs less.
fn most_of_prompt(context: u32, max_tokens: Option<u32>) -> usize {
    let answer = context / 4;
    let answer = max_tokens.map_or(answer, |most| most.min(answer));
    (context - answer) as usize
}

/// Tokens of a conversation without its oldest turns, as few as have to be left out for at most
/// `most` tokens. System messages at the beginning and the last turn stay. A turn begins with a
/// message of the user.
fn without_oldest(
    messages: &[ChatMessage],
    most: usize,
    rendered: impl Fn(&[ChatMessage]) -> Result<(Vec<u32>, bool), ChatError>,
) -> Result<(Vec<u32>, bool), ChatError> {
    let mut best = rendered(messages)?;
    if best.0.len() <= most {
        return Ok(best);
    }
    let system = messages.iter().take_while(|m| m.role == Role::System);
    let system = system.count();
    let (lead, rest) = messages.split_at(system);
    // Where a kept conversation may begin; at 0, nothing would be left out.
    let users = rest.iter().enumerate().skip(1);
    let users = users.filter(|(_, message)| message.role == Role::User);
    let begins: Vec<usize> = users.map(|(at, _)| at).collect();
    let (mut low, mut high) = (0, begins.len());
    while low < high {
        let middle = usize::midpoint(low, high);
        let kept = begins.get(middle).and_then(|at| rest.get(*at..));
        let prompt = rendered(&[lead, kept.unwrap_or_default()].concat())?;
        let fits = prompt.0.len() <= most;
        match fits {
            true => high = middle,
            false => low = middle + 1,
        }
        // Until one fits, the shortest.
        if fits || best.0.len() > most {
            best = prompt;
        }
    }
    Ok(best)
}

/// Number of tokens that may be generated after this prompt.
fn room_for(prompt: &[u32], context: u32, max_tokens: Option<u32>) -> Result<u32, ChatError> {
    // The last sampled token needs no position.
    let room = (context as usize + 1).saturating_sub(prompt.len());
    if room == 0 {
        return Err(ChatError::TooLong {
            tokens: prompt.len(),
            context,
        });
    }
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    Ok(max_tokens.map_or(room, |most| most.min(room)))
}

fn bad(error: impl Display) -> ChatError {
    ChatError::BadRequest(error.to_string())
}

fn engine(error: impl Display) -> ChatError {
    ChatError::Engine(error.to_string())
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests;
