//! A conversation: text in, tokens out, whatever runs the layers.
//!
//! The prompt text, the token ids, the embedding and the sampler stay on the
//! caller's node; a [`Backend`] sees rows of numbers only. One [`Conversation`]
//! holds one sequence and keeps what it has already run, so that the next turn
//! only runs what is new.

use std::borrow::Cow;
use std::future::ready;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::{self, Event};
use hearthnet_model::sampler::{Sampler, SamplerConfig, SamplingChoice};
use hearthnet_model::stop::StopMatcher;
use hearthnet_model::{ChatMessage, ChatTemplate, Detokenizer, Special, Tokenizer};
use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};

use crate::backend::{Backend, HopTimes, RouteHop, Run, whole_ms};
use crate::error::{Blame, ChatError};
use crate::logits_batcher::LogitsBatcher;
use crate::{Cancel, steps};

/// What the caller asks.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// A conversation, rendered with the model's own chat template.
    Messages(Vec<ChatMessage>),
    /// Text to continue as it stands.
    Text(String),
    /// The same as token ids of the model's vocabulary.
    Tokens(Vec<u32>),
}

/// A request for one answer.
#[derive(Debug, Clone)]
pub struct ChatRequest {
    /// What to answer.
    pub prompt: Prompt,
    /// How to choose tokens. The seed must be set for the answer to be reproducible.
    pub sampling: SamplerConfig,
    /// Most tokens to generate, at least 1; the model's context may end it earlier. `None`: as
    /// many as the context leaves.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn, or a stop text appeared.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
}

/// Tokens counted as the OpenAI interface does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, the one that ended the turn included.
    pub completion_tokens: u32,
    /// Both.
    pub total_tokens: u32,
    /// Tokens of the prompt that did not have to be run again.
    pub cached_tokens: u32,
}

/// Where the time went. Milliseconds unless said otherwise.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Timings {
    /// From the request to a pipeline that is ready to take rows.
    pub construct_ms: f64,
    /// From the request to the first token.
    pub first_token_ms: f64,
    /// Running the prompt.
    pub prefill_ms: f64,
    /// All tokens after the first.
    pub decode_ms: f64,
    /// Prompt tokens per second of prefill.
    pub prefill_tokens_per_second: f64,
    /// Generated tokens per second after the first one.
    pub tokens_per_second: f64,
    /// Embedding, output matrix and sampling on this machine, per generated token.
    pub head_ms_per_token: f64,
    /// Per hop of the route.
    pub hops: Vec<HopTimes>,
}

/// The end of an answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Done {
    /// The whole text.
    #[serde(default)]
    pub text: String,
    /// The tokens it was made of.
    #[serde(default)]
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// Seed that reproduces this answer; absent when none was needed or given.
    pub seed: Option<u64>,
    /// Who ran which layers.
    pub route: Vec<RouteHop>,
    /// Where the time went.
    pub timings: Timings,
}

/// What a caller hears while an answer is made (M26 section 4.3).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", content = "data", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Frame {
    /// A piece of text. It never ends inside a character.
    TokenDelta {
        /// New text; may be empty while a character or a stop text is incomplete.
        text: String,
        /// The token that was sampled.
        token_id: u32,
        /// Natural logarithm of its probability, when asked for.
        #[serde(skip_serializing_if = "Option::is_none")]
        logprob: Option<f32>,
        /// The likeliest tokens and their log-probabilities, when asked for.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        top_logprobs: Vec<(u32, f32)>,
    },
    /// How much of a prompt has been run, where that takes long: at most five times a second.
    PromptProgress {
        /// Tokens that are through, those included that did not have to be run again.
        done: u32,
        /// Tokens of the prompt.
        total: u32,
    },
    /// What became of a host.
    ShardStatus {
        /// `<model_id>:<lo>-<hi>`.
        shard_id: String,
        /// Node id; absent for this machine.
        #[serde(skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        /// `ready`, `waiting` or `degraded`.
        status: Cow<'static, str>,
        /// Stable code of what went wrong, when it is degraded; `silent` or `busy` when it is
        /// waited for.
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<Code>,
    },
    /// The layers of a host that failed or leaves run elsewhere; the text goes on where it was.
    ShardFailover {
        /// `<model_id>:<lo>-<hi>`.
        shard_id: String,
        /// Node id of the host that failed; absent when this machine took over all layers.
        #[serde(skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        /// Stable code of what went wrong; `leaving` when nothing did.
        code: Code,
        /// Node ids of the hosts that took over; empty when this machine did.
        replacements: Vec<String>,
        /// Positions that were computed again.
        replayed: u32,
        /// From noticing the failure to the next row, in milliseconds.
        recovery_ms: f64,
    },
    /// The answer ends here, unfinished: no host can take over, nor may this machine.
    PipelineAborted {
        /// Stable code of the error that follows.
        code: Code,
        /// A sentence for people.
        message: String,
    },
    /// The answer is complete.
    Done(Box<Done>),
}

/// Who hears an answer's frames.
pub(crate) trait Listener {
    /// Takes a frame, in no time.
    fn hear(&mut self, frame: &Frame);

    /// Waits until it has room for more.
    fn caught_up(&mut self) -> LocalBoxFuture<'_, ()>;
}

/// One that is done with a frame as soon as it has heard it.
struct AtOnce<'a>(&'a mut dyn FnMut(&Frame));

impl Listener for AtOnce<'_> {
    fn hear(&mut self, frame: &Frame) {
        (self.0)(frame);
    }

    fn caught_up(&mut self) -> LocalBoxFuture<'_, ()> {
        ready(()).boxed_local()
    }
}

/// The caller's side of a model: everything except the blocks.
pub struct TextModel {
    /// Text to token ids and back.
    pub tokenizer: Tokenizer,
    /// How a conversation becomes text.
    pub template: Option<ChatTemplate>,
    /// Embedding, final norm and output matrix, for all chats with this model.
    pub head: LogitsBatcher,
    /// Longest sequence, in positions.
    pub context: u32,
    /// How tokens are chosen where the caller does not say: the model's own way.
    pub sampling: SamplingChoice,
}

/// Tokens of an answer that room is asked for at its beginning where only the context limits it: it
/// ends by itself, who knows when, and grows until then.
const UNLIMITED_ROOM: u32 = 64;

/// One sequence: a backend and what it already holds.
pub struct Conversation {
    backend: Box<dyn Backend>,
    held: Vec<u32>,
}

impl Conversation {
    /// A conversation that has not begun.
    pub fn new(backend: Box<dyn Backend>) -> Self {
        Self {
            backend,
            held: Vec::new(),
        }
    }

    /// The hosts in order of layers.
    pub fn route(&self) -> Vec<RouteHop> {
        self.backend.route()
    }

    /// The tokens that need not be run again when a prompt begins with them.
    pub fn held(&self) -> &[u32] {
        &self.held
    }

    /// Whether it is still there for another request, as far as is known here.
    pub fn is_alive(&self) -> bool {
        self.backend.is_alive()
    }

    /// Answers one request on this thread, calling `emit` for every frame, `done` included.
    ///
    /// `started` is when the caller asked; it dates `construct_ms` and
    /// `first_token_ms`.
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
        steps::block_on(self.answer_to(model, request, started, cancel, &mut AtOnce(emit)))
    }

    /// As [`Self::answer`], on the loop (`steps.rs`) of whoever polls it.
    ///
    /// # Errors
    /// Any [`ChatError`]. The conversation must then be dropped.
    pub(crate) async fn answer_to(
        &mut self,
        model: &TextModel,
        request: &ChatRequest,
        started: Instant,
        cancel: &Cancel,
        listener: &mut dyn Listener,
    ) -> Result<Done, ChatError> {
        let answer = self.work(model, request, started, cancel, listener).await;
        let Some(pipeline) = self.backend.pipeline() else {
            return answer;
        };
        flight::record(match &answer {
            Ok(done) => Event::Answered {
                pipeline,
                prompt_tokens: done.usage.prompt_tokens,
                cached_tokens: done.usage.cached_tokens,
                completion_tokens: done.usage.completion_tokens,
                ms: whole_ms(started.elapsed()),
            },
            Err(ChatError::Cancelled) => Event::Cancelled { pipeline },
            Err(error) => Event::Aborted {
                pipeline,
                code: error.code(),
            },
        });
        answer
    }

    async fn work(
        &mut self,
        model: &TextModel,
        request: &ChatRequest,
        started: Instant,
        cancel: &Cancel,
        listener: &mut dyn Listener,
    ) -> Result<Done, ChatError> {
        let Prepared {
            prompt,
            room,
            mut sampler,
            mut stop,
        } = prepare(model, request)?;

        let construct_ms = ms(started);
        metrics::histogram!("distributed_inference_pipeline_construct_ms").record(construct_ms);
        let mut hosted = false;
        for hop in self.backend.route() {
            let RouteHop { shard_id, host, .. } = hop;
            hosted |= host.is_some();
            listener.hear(&Frame::ShardStatus {
                shard_id,
                host,
                status: "ready".into(),
                code: None,
            });
        }

        let _present = model.head.attend(hosted);
        self.backend.begin_call();
        let positions = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        // The last token sampled needs no position of its own.
        let all = positions.saturating_add(room - room.min(1));
        let expected = match all < model.context {
            true => all,
            false => positions.saturating_add(room.min(UNLIMITED_ROOM)),
        };
        self.backend.expect(expected);
        // At least one row must run: its output is what the first token is sampled from.
        let cached = self
            .held
            .iter()
            .zip(&prompt)
            .take_while(|(a, b)| a == b)
            .count();
        let cached = cached.min(prompt.len() - 1);
        self.held.truncate(cached);
        let prefill = Instant::now();
        let mut row = Vec::new();
        let news = prompt.get(cached..).unwrap_or_default();
        self.submit(model, news, cancel).await?;
        self.output(news, &mut row, cancel, listener).await?;
        let prefill_s = prefill.elapsed().as_secs_f64();

        let mut detokenizer = match request.prompt {
            Prompt::Messages(_) => Detokenizer::new(&model.tokenizer),
            Prompt::Text(_) | Prompt::Tokens(_) => Detokenizer::continuing(&model.tokenizer),
        };
        let mut memory = Vec::new();
        let mut text = String::new();
        let mut token_ids = Vec::new();
        let mut first_token_ms = 0.0;
        let mut head_s = 0.0;
        let mut decode = Instant::now();
        let finish_reason = loop {
            if cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let head = Instant::now();
            let logits = model.head.logits(std::mem::take(&mut row), memory).await;
            let logits = logits.map_err(|e| ChatError::Engine(e.to_string()))?;
            let sampled = sampler
                .sample(logits.values())
                .map_err(|e| ChatError::Engine(e.to_string()))?;
            memory = logits.into_memory();
            head_s += head.elapsed().as_secs_f64();
            if token_ids.is_empty() {
                first_token_ms = ms(started);
                metrics::histogram!("distributed_inference_first_token_ms").record(first_token_ms);
                decode = Instant::now();
            }
            token_ids.push(sampled.id);
            let ended = model.tokenizer.is_end_of_generation(sampled.id);
            let piece = if ended {
                String::new()
            } else {
                detokenizer.push(sampled.id)
            };
            let out = stop.push(&piece);
            let finish_reason = if ended || out.stopped {
                Some(FinishReason::Stop)
            } else {
                (token_ids.len() as u32 >= room).then_some(FinishReason::Length)
            };
            // The hosts work on the next row while this one's text finds its reader.
            let mut submitted = Ok(());
            if finish_reason.is_none() {
                submitted = self.submit(model, &[sampled.id], cancel).await;
                steps::boundary().await;
            }
            text.push_str(&out.emit);
            listener.hear(&Frame::TokenDelta {
                text: out.emit,
                token_id: sampled.id,
                logprob: sampled.logprob,
                top_logprobs: sampled.top,
            });
            listener.caught_up().await;
            if let Some(finish_reason) = finish_reason {
                break finish_reason;
            }
            submitted?;
            self.output(&[sampled.id], &mut row, cancel, listener)
                .await?;
        };
        self.backend.end_call();
        let decode_s = decode.elapsed().as_secs_f64();
        if stop.matched().is_none() {
            // A limit that cut a character in two leaves nothing of it; a model that ended its
            // turn there has said a broken one.
            let broken = match finish_reason {
                FinishReason::Stop => detokenizer.finish(),
                FinishReason::Length => String::new(),
            };
            let rest = stop.push(&broken).emit + &stop.finish();
            if !rest.is_empty() {
                text.push_str(&rest);
                let token_id = token_ids.last().copied().unwrap_or_default();
                listener.hear(&Frame::TokenDelta {
                    text: rest,
                    token_id,
                    logprob: None,
                    top_logprobs: Vec::new(),
                });
            }
        }

        let generated = token_ids.len() as u32;
        let after_first = f64::from(generated.saturating_sub(1));
        let tokens_per_second = if decode_s > 0.0 {
            after_first / decode_s
        } else {
            0.0
        };
        metrics::histogram!("distributed_inference_tokens_per_second").record(tokens_per_second);
        let done = Done {
            text,
            token_ids,
            finish_reason,
            usage: Usage {
                prompt_tokens: prompt.len() as u32,
                completion_tokens: generated,
                total_tokens: prompt.len() as u32 + generated,
                cached_tokens: cached as u32,
            },
            seed: request.sampling.seed,
            route: self.backend.route(),
            timings: Timings {
                construct_ms,
                first_token_ms,
                prefill_ms: prefill_s * 1e3,
                decode_ms: decode_s * 1e3,
                prefill_tokens_per_second: (prompt.len() - cached) as f64
                    / prefill_s.max(f64::MIN_POSITIVE),
                tokens_per_second,
                head_ms_per_token: head_s * 1e3 / f64::from(generated.max(1)),
                hops: self.backend.times(),
            },
        };
        listener.hear(&Frame::Done(Box::new(done.clone())));
        Ok(done)
    }

    /// Embeds tokens and sends them on their way, behind what is held.
    async fn submit(
        &mut self,
        model: &TextModel,
        ids: &[u32],
        cancel: &Cancel,
    ) -> Result<(), ChatError> {
        let mut rows = Vec::new();
        model
            .head
            .embed(ids, &mut rows)
            .map_err(|e| ChatError::Engine(e.to_string()))?;
        let position = self.held.len() as u32;
        self.backend.submit(position, &rows, cancel).await;
        Ok(())
    }

    /// Waits for what became of the tokens sent, and remembers them.
    async fn output(
        &mut self,
        ids: &[u32],
        row: &mut Vec<f32>,
        cancel: &Cancel,
        listener: &mut dyn Listener,
    ) -> Result<(), ChatError> {
        let mut progress = Progress::since(Instant::now());
        let mut run = Run {
            cancel,
            notify: &mut |frame| match frame {
                Frame::PromptProgress { .. } if !progress.is_due(Instant::now()) => {}
                frame => listener.hear(&frame),
            },
        };
        let result = self.backend.output(row, &mut run).await;
        if let Err(error) = &result
            && error.blame() == Blame::Peer
        {
            listener.hear(&Frame::PipelineAborted {
                code: error.code(),
                message: error.to_string(),
            });
        }
        result?;
        self.held.extend_from_slice(ids);
        Ok(())
    }
}

/// How often the progress of a prompt is told.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// When the progress of a prompt was told last. Pure.
struct Progress(Instant);

impl Progress {
    /// Nothing need be told of what takes no longer than that.
    fn since(start: Instant) -> Self {
        Self(start)
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let due = now.saturating_duration_since(self.0) >= PROGRESS_EVERY;
        if due {
            self.0 = now;
        }
        due
    }
}

/// A request that makes sense, as it is worked on.
struct Prepared {
    prompt: Vec<u32>,
    room: u32,
    sampler: Sampler,
    stop: StopMatcher,
}

fn prepare(model: &TextModel, request: &ChatRequest) -> Result<Prepared, ChatError> {
    let prompt = encode(model, &request.prompt)?;
    let room = room_for(&prompt, model.context, request.max_tokens)?;
    let mut sampler =
        Sampler::new(request.sampling.clone()).map_err(|e| ChatError::BadRequest(e.to_string()))?;
    let stop =
        StopMatcher::new(request.stop.clone()).map_err(|e| ChatError::BadRequest(e.to_string()))?;
    if request.sampling.penalise_prompt {
        sampler.observe(&prompt);
    }
    Ok(Prepared {
        prompt,
        room,
        sampler,
        stop,
    })
}

/// The tokens of a request's prompt, when the request makes sense for this model.
///
/// # Errors
/// [`ChatError::BadRequest`]: what [`Conversation::answer`] would say, without a backend.
pub fn check(model: &TextModel, request: &ChatRequest) -> Result<Vec<u32>, ChatError> {
    prepare(model, request).map(|prepared| prepared.prompt)
}

fn encode(model: &TextModel, prompt: &Prompt) -> Result<Vec<u32>, ChatError> {
    let bad = |e: String| ChatError::BadRequest(e);
    let ids = match prompt {
        Prompt::Tokens(ids) => {
            let vocab = model.head.spec().vocab;
            if let Some(id) = ids.iter().find(|id| **id >= vocab) {
                return Err(bad(format!(
                    "token {id} is not one of this model's {vocab} tokens"
                )));
            }
            ids.clone()
        }
        Prompt::Text(text) => model
            .tokenizer
            .encode_document(text, Special::Plain)
            .map_err(|e| bad(e.to_string()))?,
        Prompt::Messages(messages) => {
            let template = model.template.as_ref().ok_or_else(|| {
                bad("this model file carries no chat template: use a model made for chat, or ask for a completion (`chat --raw`)".into())
            })?;
            template
                .prompt_ids(&model.tokenizer, messages, true)
                .map_err(|e| bad(e.to_string()))?
        }
    };
    if ids.is_empty() {
        return Err(bad("the prompt is empty".into()));
    }
    Ok(ids)
}

/// Tokens that may be generated behind this prompt.
fn room_for(prompt: &[u32], context: u32, max_tokens: Option<u32>) -> Result<u32, ChatError> {
    if max_tokens == Some(0) {
        return Err(ChatError::BadRequest(
            "max_tokens must be at least 1".into(),
        ));
    }
    // The last token sampled needs no position of its own.
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

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests;
