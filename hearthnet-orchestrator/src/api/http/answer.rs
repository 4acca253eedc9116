//! Requests of all APIs that run chats: from their body to their response.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, Response};
use hearthnet_bus::now_ms;
use hearthnet_http::{ApiError, Client};

use super::body::Room;
use super::errors::{failed, internal, on_a_thread};
use super::events::{Events, answers_alone, mark_alone};
use super::fields::Rules;
use super::identity::{caller, who};
use super::output::{Format, OtherOutput, Output};
use super::prompts::Answers;
use super::reply::{Header, Reply, Shape};
use super::request::{self, ApiRequest};
use super::translate::anthropic::{self, Purpose};
use super::translate::ollama::{self, Asked};
use super::translate::{Stamp, Translated, Translating, responses};
use super::{Api, Other, ok};
use crate::chat::{ChatRequest, Prompt, check};
use crate::error::ChatError;

/// Request header: a stream then has comments that tell which hosts answer.
const TRACE: HeaderName = HeaderName::from_static("x-hearthnet-trace");

/// How the request of a body is run and answered.
struct Plan {
    shape: Shape,
    /// Whether comments tell which hosts answer.
    traced: bool,
    /// Random number of the answer.
    random: u128,
    /// Of another API than OpenAI's completions.
    other: Option<OtherOutput>,
}

impl Api {
    pub(super) async fn answer(
        &self,
        shape: Shape,
        client: Client,
        request: Request,
    ) -> Result<Response<Body>, ApiError> {
        let traced = request.headers().contains_key(TRACE);
        // The text of a chat that waits counts as that of a body that arrives.
        let (body, room) = self.body(request, &who(&client, self.has_key)).await?;
        let plan = Plan {
            shape,
            traced,
            random: random()?,
            other: None,
        };
        self.run(client, body, room, plan).await
    }

    /// Answers a request of another API: it becomes one of OpenAI's, and its answer is translated
    /// back.
    pub(super) async fn translated(
        &self,
        other: Other,
        client: Client,
        request: Request,
    ) -> Result<Response<Body>, ApiError> {
        let (began, traced) = (Instant::now(), request.headers().contains_key(TRACE));
        let identity = who(&client, self.has_key);
        let (body, room) = self.body(request, &identity).await?;
        let stamp = Stamp {
            random: random()?,
            created_ms: now_ms(),
        };
        let asked = match other {
            Other::Messages => anthropic::request(&body, Purpose::Answer, stamp, self.rules())?,
            Other::Responses => responses::request(&body, stamp, self.rules(), &|user, id| {
                let held_by = caller(&client, self.has_key, user).held_by;
                self.responses.lock().get(&held_by, id)
            })?,
            Other::Ollama(endpoint) => match ollama::request(&body, endpoint, stamp, self.rules())?
            {
                Asked::Answer(asked) => asked,
                Asked::Load(model, value) => {
                    self.names.find(&model)?;
                    return Ok(ok(&value));
                }
            },
        };
        let Translated {
            shape,
            request,
            stops,
            names,
            translation,
        } = asked;
        let user = request["user"].as_str().unwrap_or_default();
        let held_by = caller(&client, self.has_key, user).held_by;
        let format = match other {
            Other::Ollama(_) => Format::Lines,
            Other::Messages | Other::Responses => Format::Events,
        };
        let plan = Plan {
            shape,
            traced,
            random: stamp.random,
            other: Some(OtherOutput {
                translating: Translating::new(translation, stops, began),
                format,
                responses: Arc::clone(&self.responses),
                client: identity,
                held_by,
                id: responses::id(stamp.random),
            }),
        };
        let translated = request.to_string().into_bytes();
        drop((body, request));
        let answer = self.run(client, translated, room, plan).await;
        answer.map_err(|error| {
            let rename =
                |error: ApiError, (ours, theirs): &(&str, &str)| error.renamed(ours, theirs);
            names.iter().fold(error, rename)
        })
    }

    /// Counts the tokens of the prompt of Anthropic's messages.
    pub(super) async fn count_tokens(
        &self,
        client: Client,
        request: Request,
    ) -> Result<usize, ApiError> {
        let (body, _room) = self.body(request, &who(&client, self.has_key)).await?;
        let stamp = Stamp {
            random: 0,
            created_ms: 0,
        };
        let asked = anthropic::request(&body, Purpose::Count, stamp, self.rules())?;
        let ApiRequest {
            model, mut chat, ..
        } = request::chat(asked.request.to_string().as_bytes(), Rules::default())?;
        // A grammar adds nothing to the prompt.
        chat.grammar = None;
        let served = self.names.find(&model)?;
        match on_a_thread(move || check(&served.text, &chat)).await? {
            Ok(prompt) => Ok(prompt.len()),
            Err(ChatError::TooLong { tokens, .. }) => Ok(tokens),
            Err(error) => Err(failed(&error, None)),
        }
    }

    /// Runs the chat of a body in the form of OpenAI's.
    async fn run(
        &self,
        client: Client,
        body: Vec<u8>,
        room: Room,
        plan: Plan,
    ) -> Result<Response<Body>, ApiError> {
        let Plan {
            shape,
            traced,
            random,
            other,
        } = plan;
        let rules = Rules {
            // JSON readers represent integers exactly up to 53 bits.
            seed: (random as u64) >> 11,
            // A translation has read what it passes on.
            strict: self.strict && other.is_none(),
        };
        let ApiRequest {
            model,
            mut chat,
            more_prompts,
            echo,
            chosen,
            stream,
            include_usage,
            user,
            grammar_field,
        } = match shape {
            Shape::Chat => request::chat(&body, rules)?,
            Shape::Text => request::completion(&body, rules)?,
        };
        drop(body);
        let served = self.names.find(&model)?;
        chat.sampling = chosen.or_models(&served.text.sampling).over(chat.sampling);
        let wants_logprobs = chat.sampling.logprobs.is_some();
        let template = served.text.template.as_ref();
        let thinks = template.is_some_and(|template| template.turn_format().thinks());
        let has_parts = shape == Shape::Chat && (thinks || !chat.turn.tools.list.is_empty());
        let caller = caller(&client, self.has_key, &user.unwrap_or_default());
        let key = client.key;
        let ended = |error: &ChatError| {
            let failed = failed(error, Some(self.service.retry_after()));
            match (error, grammar_field) {
                (ChatError::Grammar(_), Some(field)) => failed.about(field),
                _ => failed,
            }
        };
        let each = chat.options.choices as usize;
        let more = more_prompts.into_iter().map(|prompt| ChatRequest {
            prompt,
            ..chat.clone()
        });
        let mut requests: Vec<ChatRequest> = more.collect();
        requests.insert(0, chat);
        let tokenizer = served.text.tokenizer.clone();
        let prompts = requests.len();
        let echoed = requests.iter().filter(|_| echo);
        let echoed = echoed.map(|request| match &request.prompt {
            Prompt::Text(text) => text.clone(),
            Prompt::Tokens(ids) => tokenizer.decode(ids),
            Prompt::Messages(_) => String::new(),
        });
        let echoed: Vec<String> = echoed.collect();
        let requests = requests.into_iter().map(Into::into).collect();
        let asked = Answers::ask(
            self.service.clone(),
            caller,
            &served.id,
            requests,
            room,
            key,
        );
        let mut answers = asked.map_err(|error| ended(&error))?;
        // The first frame follows the request check and the search for hosts: earlier failures get
        // a proper HTTP status.
        let (mut prompt, mut frame) = answers.next().await.map_err(|error| ended(&error))?;
        let header = Header {
            shape,
            id: random,
            created: now_ms() / 1000,
            model,
            weights: served.weights,
        };
        let mut reply = Reply::new(header, tokenizer.clone(), include_usage, wants_logprobs);
        reply.expect(prompts, each, echoed);
        if has_parts {
            reply.expect_parts();
        }
        let mut output = Output {
            reply,
            tokenizer,
            other,
        };
        if stream {
            return Ok(Events::response(answers, (prompt, &frame), output, traced));
        }
        let mut alone = false;
        let whole = loop {
            alone |= answers_alone(&frame);
            if let Some(whole) = output.whole(prompt, &frame) {
                break whole;
            }
            (prompt, frame) = answers.next().await.map_err(|error| ended(&error))?;
        };
        let mut response = ok(&whole);
        if alone {
            mark_alone(&mut response);
        }
        Ok(response)
    }
}

fn random() -> Result<u128, ApiError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| internal(format!("no randomness: {e}")))?;
    Ok(u128::from_le_bytes(bytes))
}
