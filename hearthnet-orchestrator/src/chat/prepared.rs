//! A validated request: token ids of its prompt, and the state of its sampling. No backend is needed.

use hearthnet_files::sampling::SamplerConfig;
use hearthnet_tokens::sampler::Sampler;
use hearthnet_tokens::template::Chat;
use hearthnet_tokens::tools::{Tool, ToolChoice};
use hearthnet_tokens::{ChatMessage, ChatTemplate, Role, Special};

use super::grammar_thread::GrammarThread;
use super::request::{ChatRequest, Prompt, TextModel};
use super::turn::{NewText, Turn, TurnOptions, bad};
use crate::error::ChatError;
use crate::frames::FinishReason;

/// Positions reserved for an answer that only the context limits. Its length is unknown; streams
/// grow on demand.
const UNLIMITED_ROOM: u32 = 64;

/// Validated request, prepared for sampling.
pub(crate) struct Prepared {
    pub(crate) prompt: Vec<u32>,
    /// Number of tokens that may still be generated.
    pub(super) room: u32,
    pub(super) seed: Option<u64>,
    pub(super) sampler: Sampler,
    pub(super) turn: Turn,
    pub(super) grammar: Option<GrammarThread>,
    pub(crate) outputs: Outputs,
}

/// Outputs of a prompt that are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outputs {
    /// Output of the last token, from which the answer is sampled.
    Last,
    /// Outputs of all tokens, for the tokens' log probabilities.
    Logprobs,
    /// Outputs of all tokens, for the vector of the text.
    Embedding,
}

impl Prepared {
    /// Blocks while a grammar is compiled.
    ///
    /// # Errors
    /// [`ChatError::BadRequest`], [`ChatError::TooLong`] and [`ChatError::Grammar`];
    /// [`ChatError::Busy`] if too many grammars are compiled.
    pub(crate) fn new(model: &TextModel, request: &ChatRequest) -> Result<Self, ChatError> {
        if model.head.spec().encoder.is_some() {
            return Err(bad(
                "this model makes vectors of texts, and cannot continue a text: ask `/v1/embeddings`, or choose another model",
            ));
        }
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
    pub(super) fn positions(&self, context: u32) -> u32 {
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
    pub(super) fn take(&mut self, model: &TextModel, id: u32) -> (NewText, Option<FinishReason>) {
        self.room -= self.room.min(1);
        let (said, ended) = match model.tokenizer.is_end_of_generation(id) {
            true => (NewText::default(), true),
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
/// [`ChatError`] as from [`Conversation::answer`](super::Conversation::answer), without needing a backend.
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
pub(super) fn room_for(
    prompt: &[u32],
    context: u32,
    max_tokens: Option<u32>,
) -> Result<u32, ChatError> {
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
