//! OpenAI's API over [`Service`], and others. `specs/http-api.md` is the normative text.
//!
//! | concept | where |
//! |---|---|
//! | request parsing, field by field; messages | `request.rs`, `fields.rs`; `messages.rs` (pure) |
//! | answers to several prompts of a request | `prompts.rs` |
//! | responses, whole and in chunks | `reply.rs` (pure) |
//! | vectors of texts, for OpenAI's and Ollama's API | `embeddings.rs` (pure) |
//! | requests and responses of other APIs: Anthropic's, Ollama's, OpenAI's Responses | `translate/` (pure) |
//! | stored conversations of responses | `stored.rs` (pure) |
//! | names of models: ids and aliases | `names.rs` |
//! | models in Ollama's form | `ollama_models.rs` (pure) |
//! | an answer in the objects of its API, and their format | `output.rs` (pure) |
//! | description of all paths for programs | `openapi.json` |
//! | request bodies and their memory | `body.rs` |
//! | limits on concurrent requests, in total and per caller | `permits.rs` |
//! | paths, streams, errors | here |
//! | listener, keys, metrics | `hearthnet-http` |
//!
//! A client that disconnects cancels its request: dropping a response drops its answer.
//!
//! The handlers of all APIs are in this file: they share the identity of callers, bodies and errors.

mod body;
mod embeddings;
mod fields;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod messages;
mod names;
mod ollama_models;
mod output;
mod permits;
mod prompts;
mod reply;
mod request;
mod stored;
mod translate;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::IntoResponse as _;
use axum::response::sse::{KeepAlive, Sse};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use futures_util::{StreamExt as _, stream};
use hearthnet_bus::now_ms;
use hearthnet_http::{
    Admitted, ApiError, Client, HttpError, HttpServer, HttpSettings, Metrics, OverLimit,
    PresentedKey, hold_until_sent, json_response, metrics_route,
};
use hearthnet_tokens::grammar::GrammarError;
use hearthnet_transport::Code;
use parking_lot::Mutex;
use serde_json::{Value, json};

use self::body::{Bodies, NotRead, Room};
use self::embeddings::{VectorFormat, Vectors};
use self::fields::Rules;
use self::names::Names;
use self::output::{Format, OtherOutput, Output};
use self::permits::PermitPool;
use self::prompts::Answers;
use self::reply::{Header, Reply, Shape};
use self::request::ApiRequest;
use self::stored::StoredResponses;
use self::translate::anthropic::{self, Purpose};
use self::translate::ollama::{self, Asked};
use self::translate::{Part, Stamp, Translated, Translating, responses, vllm};
use crate::chat::{ChatRequest, Frame, Prompt, check};
use crate::error::ChatError;
use crate::service::fair_queue::{OWNER, Principal};
use crate::service::{Caller, ServedModel, Service};

/// Interval of keep-alive comments in a silent stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Estimated restart time of a stopping service: running chats end (20 s at most), and a model is
/// loaded.
const BACK_AFTER: Duration = Duration::from_secs(30);

/// Retry delay when the limit on concurrent requests is reached.
const CROWDED: Duration = Duration::from_secs(2);

/// State shared by the handlers.
struct Api {
    service: Service,
    names: Names,
    bodies: Bodies,
    client_deadline: Duration,
    /// True if clients must present a key.
    has_key: bool,
    /// True if fields without effect are refused.
    strict: bool,
    /// Start of the service, Unix seconds.
    since: u64,
    responses: Arc<Mutex<StoredResponses>>,
}

/// Starts the HTTP interface of a service and the metrics of this process, with `more` paths for
/// authorised clients. Must be called within a Tokio runtime. Before closing it, call [`Service::drain`], so that running answers end.
///
/// # Errors
/// Any [`HttpError`].
pub async fn serve(
    service: Service,
    metrics: Option<Metrics>,
    more: Router,
    settings: &HttpSettings,
) -> Result<HttpServer, HttpError> {
    let shared = Arc::new(Api {
        names: Names::new(service.clone(), settings.aliases.clone()),
        service,
        bodies: Bodies::new(settings.max_body_bytes),
        client_deadline: settings.client_deadline,
        has_key: settings.api_key.is_some(),
        strict: settings.strict,
        since: now_ms() / 1000,
        responses: Arc::new(Mutex::new(StoredResponses::new(stored::LIMITS))),
    });
    let (permits, has_key) = (PermitPool::new(settings.max_connections, 1), shared.has_key);
    let limited = shared.service.clone();
    let api = Router::new()
        .route("/v1/chat/completions", answers(Shape::Chat))
        .route("/v1/completions", answers(Shape::Text))
        .route("/v1/embeddings", vectors(VectorFormat::Floats))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/v1/messages", translated(Other::Messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/responses", translated(Other::Responses))
        .route(
            "/v1/responses/{id}",
            get(stored_response).delete(stored_response),
        )
        .route(
            "/api/chat",
            translated(Other::Ollama(ollama::Endpoint::Chat)),
        )
        .route(
            "/api/generate",
            translated(Other::Ollama(ollama::Endpoint::Generate)),
        )
        .route("/api/embed", vectors(VectorFormat::Ollama))
        .route("/api/embeddings", vectors(VectorFormat::OlderOllama))
        .route("/api/tags", get(ollama_tags))
        .route("/api/ps", get(ollama_ps))
        .route("/api/show", post(ollama_show))
        .route("/api/version", get(ollama_version))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/tokenize", tokens(vllm::tokenize))
        .route("/detokenize", tokens(vllm::detokenize))
        .route("/openapi.json", get(openapi))
        .with_state(Arc::clone(&shared))
        .merge(more)
        .route_layer(middleware::from_fn(
            move |Extension(client): Extension<Client>, request: Request, next: Next| {
                let begun = client.key.as_ref().map(PresentedKey::begin).transpose();
                let begun = begun.map_err(|over| over_limit(&over, &limited));
                let permit = begun.and_then(|begun| {
                    let permit = permits.take(who(&client, has_key));
                    let busy = |why| failed(&ChatError::Busy(why), Some(CROWDED));
                    Ok((permit.map_err(busy)?, begun))
                });
                async move {
                    match permit {
                        Ok(permit) => hold_until_sent(next.run(request).await, permit),
                        Err(error) => error.response(),
                    }
                }
            },
        ));
    let api = match metrics {
        Some(metrics) => api.route("/metrics", metrics_route(metrics)),
        None => api,
    };
    HttpServer::open(api, get(health).with_state(shared), settings).await
}

async fn models(State(api): State<Arc<Api>>) -> Response<Body> {
    let models = api.names.all();
    let data = models.iter().map(|(name, model)| api.describe(name, model));
    let data: Vec<Value> = data.collect();
    json_response(StatusCode::OK, &json!({"object": "list", "data": data}))
}

async fn model(
    State(api): State<Arc<Api>>,
    id: Result<Path<String>, PathRejection>,
) -> Response<Body> {
    // An id that is not UTF-8 matches no model.
    let id = id.map_or_else(|_| "\u{fffd}".to_owned(), |Path(id)| id);
    match api.names.find(&id) {
        Ok(model) => json_response(StatusCode::OK, &api.describe(&id, &model)),
        Err(error) => error.response(),
    }
}

/// Refuses to read or delete a response.
async fn stored_response() -> Response<Body> {
    responses::not_kept().response()
}

async fn health(
    State(api): State<Arc<Api>>,
    Extension(admitted): Extension<Admitted>,
) -> Response<Body> {
    let load = api.service.load();
    let (status, word) = match load.draining {
        false => (StatusCode::OK, "ok"),
        true => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
    };
    let body = match admitted.is() {
        true => json!({
            "status": word, "running": load.running, "waiting": load.waiting, "kept": load.kept,
        }),
        false => json!({"status": word}),
    };
    json_response(status, &body)
}

/// Handler of requests with a body.
fn handler<F>(
    answer: impl Fn(Arc<Api>, Client, Request) -> F + Clone + Send + Sync + 'static,
) -> MethodRouter<Arc<Api>>
where
    F: Future<Output = Result<Response<Body>, ApiError>> + Send,
{
    post(
        async move |State(api): State<Arc<Api>>,
                    Extension(client): Extension<Client>,
                    request: Request| {
            let answer = answer(api, client, request).await;
            answer.unwrap_or_else(|error| error.response())
        },
    )
}

/// Handler of one of the two completion endpoints.
fn answers(shape: Shape) -> MethodRouter<Arc<Api>> {
    handler(move |api, client, request| async move { api.answer(shape, client, request).await })
}

/// Handler of an endpoint for vectors of texts.
fn vectors(format: VectorFormat) -> MethodRouter<Arc<Api>> {
    handler(move |api, client, request| async move { api.embed(format, client, request).await })
}

/// API that is translated, with the endpoint for answers.
#[derive(Debug, Clone, Copy)]
enum Other {
    /// `/v1/messages` of Anthropic's.
    Messages,
    /// An endpoint of Ollama, such as `/api/chat`.
    Ollama(ollama::Endpoint),
    /// `/v1/responses` of OpenAI's.
    Responses,
}

/// Handler of an endpoint that is translated.
fn translated(other: Other) -> MethodRouter<Arc<Api>> {
    handler(move |api, client, request| async move { api.translated(other, client, request).await })
}

/// Number of tokens of the prompt of Anthropic's messages.
async fn count_tokens(
    State(api): State<Arc<Api>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Response<Body> {
    match api.count_tokens(client, request).await {
        Ok(count) => json_response(StatusCode::OK, &json!({"input_tokens": count})),
        Err(error) => error.response(),
    }
}

async fn ollama_tags(State(api): State<Arc<Api>>) -> Response<Body> {
    let models = api.names.all();
    let models = models.iter().map(|(name, m)| ollama_models::tag(name, m));
    let models: Vec<Value> = models.collect();
    json_response(StatusCode::OK, &json!({"models": models}))
}

async fn ollama_ps(State(api): State<Arc<Api>>) -> Response<Body> {
    let models = api.service.models();
    let models: Vec<Value> = models.iter().map(|m| ollama_models::running(m)).collect();
    json_response(StatusCode::OK, &json!({"models": models}))
}

async fn ollama_show(
    State(api): State<Arc<Api>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Response<Body> {
    let shown = async {
        let (body, _room) = api.body(request, &who(&client, api.has_key)).await?;
        let model = ollama::shown(&body, api.rules())?;
        let model = api.names.find(&model)?;
        Ok(json_response(StatusCode::OK, &ollama_models::show(&model)))
    };
    shown
        .await
        .unwrap_or_else(|error: ApiError| error.response())
}

async fn ollama_version() -> Response<Body> {
    let version = json!({
        "version": ollama_models::VERSION, "hearthnet_version": env!("CARGO_PKG_VERSION"),
    });
    json_response(StatusCode::OK, &version)
}

async fn tokenizer_info(State(api): State<Arc<Api>>) -> Response<Body> {
    match api.only_model() {
        Ok(model) => json_response(StatusCode::OK, &vllm::info(&model.text)),
        Err(error) => error.response(),
    }
}

/// Handler of an endpoint of vLLM's for the tokenizer.
fn tokens(read: fn(&[u8]) -> Result<vllm::Asked, ApiError>) -> MethodRouter<Arc<Api>> {
    handler(move |api, client, request| async move {
        let answer = api.tokens(read, client, request).await?;
        Ok(json_response(StatusCode::OK, &answer))
    })
}

/// Description of every path, for programs.
async fn openapi() -> Response<Body> {
    let mut response = Response::new(Body::from(include_str!("openapi.json")));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Verified identity of a client: a named key, a user of this machine, or an address (an IPv6
/// network). A local client with the owner's key is the owner. No part of it is chosen by the client.
fn who(client: &Client, has_key: bool) -> String {
    if let Some(key) = &client.key {
        return format!("key {}", key.name());
    }
    match client.user {
        Some(user) if user.is_owner => OWNER.to_owned(),
        Some(user) => format!("user {}", user.id),
        None if has_key && client.ip.is_loopback() => OWNER.to_owned(),
        None => format!("address {}", client.subscriber),
    }
}

/// Caller for the service: the verified identity, and the user that the client names.
fn caller(client: &Client, has_key: bool, user: &str) -> Caller {
    let identity = who(client, has_key);
    // A client chooses its address within its IPv6 network. A key is one caller everywhere.
    let user_there = match client.user.is_some() || client.key.is_some() || identity == OWNER {
        true => user.to_owned(),
        false => format!("{}\0{user}", client.ip),
    };
    // The number of cached tokens reveals earlier prompts. Without a key, any user of this machine
    // may connect over TCP, so the prefix cache is bound to the connection.
    let held_by = match has_key || client.user.is_some() {
        true => format!("{identity}\0{user_there}"),
        false => format!("connection {}\0{user}", client.number),
    };
    // Keys take turns, whatever users a program names behind one.
    let user = match client.key {
        Some(_) => String::new(),
        None => user_there,
    };
    Caller {
        principal: Principal { identity, user },
        held_by,
    }
}

/// API error of a request beyond a limit of its key.
fn over_limit(over: &OverLimit, service: &Service) -> ApiError {
    let code = "rate_limit_exceeded";
    metrics::counter!("hearthnet_refusals_total", "code" => code).increment(1);
    let after = match over {
        OverLimit::Tokens { after, .. } => *after,
        _ => service.retry_after(),
    };
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, code, over.to_string()).retry_after(Some(after))
}

/// API error of a failed chat. `after` is the retry delay, used if a retry can help.
fn failed(error: &ChatError, after: Option<Duration>) -> ApiError {
    let status = StatusCode::from_u16(error.http_status());
    let code = match error {
        // OpenAI's code: clients react to it by shortening the conversation.
        ChatError::TooLong { .. } => Code::new("context_length_exceeded"),
        ChatError::Grammar(GrammarError::Unsupported(_)) => Code::new("unsupported_parameter"),
        ChatError::Grammar(_) => Code::new("invalid_value"),
        _ => error.code(),
    };
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let made = match error {
        // The words of each API: clients look for them before they shorten a conversation. Among
        // those that look for OpenAI's are LangChain and LiteLLM.
        ChatError::TooLong { tokens, context } => {
            let text = format!(
                "This model's maximum context length is {context} tokens. However, the prompt is \
                 too long: it has {tokens} tokens. Please shorten it."
            );
            let anthropics = format!("prompt is too long: {tokens} tokens > {context} maximum");
            ApiError::new(status, code, text).in_anthropics_words(anthropics)
        }
        error => ApiError::new(status, code, format!("{error}; {}", error.hint())),
    };
    made.retry_after(match error {
        ChatError::Busy(_) | ChatError::HostsFull(_) => after,
        ChatError::ShuttingDown => Some(BACK_AFTER),
        _ => None,
    })
}

/// 429: other requests or responses use the memory for `what`.
fn full(what: &str) -> ApiError {
    let why = format!("the memory for {what} is full");
    failed(&ChatError::Busy(why), Some(CROWDED))
}

impl Api {
    /// Rules for requests of other APIs, whose translation sets the seed.
    fn rules(&self) -> Rules {
        Rules {
            seed: 0,
            strict: self.strict,
        }
    }

    /// Description of a model under one of its names.
    fn describe(&self, name: &str, model: &ServedModel) -> Value {
        let mut described = json!({
            "id": name, "object": "model", "created": self.since, "owned_by": "hearthnet",
            "weights_sha256": model.weights.to_string(), "context_length": model.text.context,
        });
        if name != model.id {
            described["alias_of"] = json!(model.id);
        }
        described
    }

    async fn answer(
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
    async fn translated(
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
                    return Ok(json_response(StatusCode::OK, &value));
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
    async fn count_tokens(&self, client: Client, request: Request) -> Result<usize, ApiError> {
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
        let counted = tokio::task::spawn_blocking(move || check(&served.text, &chat)).await;
        match counted {
            Ok(Ok(prompt)) => Ok(prompt.len()),
            Ok(Err(ChatError::TooLong { tokens, .. })) => Ok(tokens),
            Ok(Err(error)) => Err(failed(&error, None)),
            Err(error) => Err(failed(&ChatError::Engine(error.to_string()), None)),
        }
    }

    /// The model of a request that names none.
    fn only_model(&self) -> Result<Arc<ServedModel>, ApiError> {
        let models = self.service.models();
        match models.as_slice() {
            [model] => Ok(Arc::clone(model)),
            // Another model's tokens would be wrong without a sign of it.
            _ => {
                let text = "this server does not serve exactly one model: name one in `model`";
                let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", text);
                Err(error.about("model"))
            }
        }
    }

    /// Tokens of a text, or the text of tokens.
    async fn tokens(
        &self,
        read: fn(&[u8]) -> Result<vllm::Asked, ApiError>,
        client: Client,
        request: Request,
    ) -> Result<Value, ApiError> {
        let (body, _room) = self.body(request, &who(&client, self.has_key)).await?;
        let asked = read(&body)?;
        let served = match &asked.model {
            Some(id) => self.names.find(id)?,
            None => self.only_model()?,
        };
        let answer = tokio::task::spawn_blocking(move || asked.answer(&served.text)).await;
        answer.map_err(|error| failed(&ChatError::Engine(error.to_string()), None))?
    }

    /// Embeds the texts of a request. `format`: that of the endpoint, by default.
    async fn embed(
        &self,
        format: VectorFormat,
        client: Client,
        request: Request,
    ) -> Result<Response<Body>, ApiError> {
        let began = Instant::now();
        let identity = who(&client, self.has_key);
        let (body, room) = self.body(request, &identity).await?;
        let asked = match format {
            VectorFormat::Floats | VectorFormat::Base64 => embeddings::request(&body)?,
            VectorFormat::Ollama | VectorFormat::OlderOllama => {
                ollama::embed(&body, format, self.rules())?
            }
        };
        drop(body);
        let served = self.names.find(&asked.model)?;
        let bytes = asked.bytes(served.text.head.spec().width as usize)?;
        let reserved = self.bodies.reserve(bytes, &identity);
        let reserved = reserved.map_err(|_| full("responses"))?;
        let (format, exact) = (asked.format, asked.exact);
        let (model, caller) = (
            asked.model.clone(),
            caller(&client, self.has_key, &asked.user),
        );
        let text = Arc::clone(&served);
        let tokens = tokio::task::spawn_blocking(move || asked.tokens(&text.text)).await;
        let tokens = tokens.map_err(|e| failed(&ChatError::Engine(e.to_string()), None))?;
        let tokens = tokens.map_err(|(at, error)| failed(&error, None).about(at))?;
        let (mut vectors, requests) = Vectors::ask(tokens, exact);
        let mut alone = false;
        if !requests.is_empty() {
            let ended = |error: &ChatError| failed(error, Some(self.service.retry_after()));
            let requests = requests.into_iter().map(Into::into).collect();
            let key = client.key;
            let answers = Answers::ask(
                self.service.clone(),
                caller,
                &served.id,
                requests,
                room,
                key,
            );
            let mut answers = answers.map_err(|error| ended(&error))?;
            loop {
                let (group, frame) = answers.next().await.map_err(|error| ended(&error))?;
                alone |= answers_alone(&frame);
                if vectors.take(group, frame) {
                    break;
                }
            }
        }
        let total_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let origin = (served.weights, served.text.pooling);
        let response = vectors.response(format, &model, origin, total_ns);
        let missing = || failed(&ChatError::Engine("a vector is missing".into()), None);
        let mut response = response.ok_or_else(missing)?;
        if alone {
            let here = HeaderValue::from_static("this-machine");
            response.headers_mut().insert(ANSWERED_BY, here);
        }
        Ok(hold_until_sent(response, reserved))
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
        let mut response = json_response(StatusCode::OK, &whole);
        if alone {
            let here = HeaderValue::from_static("this-machine");
            response.headers_mut().insert(ANSWERED_BY, here);
        }
        Ok(response)
    }

    /// Reads the body of a request by `who`, within the limits of type, size and time.
    async fn body(&self, request: Request, who: &str) -> Result<(Vec<u8>, Room), ApiError> {
        // An HTML form, which needs no CORS preflight, cannot send this type, and always sends one.
        let kind = request.headers().get(header::CONTENT_TYPE);
        let is_json = |kind: &HeaderValue| {
            let kind = kind.to_str().ok().and_then(|kind| kind.split(';').next());
            kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
        };
        if !kind.is_none_or(is_json) {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "unsupported_media_type",
                "send the request as JSON, with the header `Content-Type: application/json`",
            ));
        }
        let coding = request.headers().get(header::CONTENT_ENCODING);
        if coding.is_some_and(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "unsupported_media_type",
                "compressed requests are not read; send the JSON without `Content-Encoding`",
            ));
        }
        let limit = self.bodies.limit();
        let large = || {
            let text = format!("the request is larger than the limit of {limit} bytes");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", text)
        };
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|bytes| bytes > limit as u64) {
            return Err(large());
        }
        let body = self.bodies.read(request.into_body(), who);
        match tokio::time::timeout(self.client_deadline, body).await {
            Ok(Ok(body)) => Ok(body),
            Ok(Err(NotRead::TooLarge)) => Err(large()),
            Ok(Err(NotRead::Full)) => Err(full("incoming requests")),
            Ok(Err(NotRead::Broken)) => Err(ApiError::new(
                StatusCode::BAD_REQUEST,
                "invalid_json",
                "the body ended before it was whole",
            )),
            Err(_) => Err(ApiError::new(
                StatusCode::REQUEST_TIMEOUT,
                "request_timeout",
                "the request did not arrive in time",
            )),
        }
    }
}

/// SSE comment for an answer that this machine continues or makes without hosts. Clients ignore
/// comments.
const ALONE: &str = "no host is available: this machine answers alone";

/// Header with the same meaning, for a response in one piece.
const ANSWERED_BY: HeaderName = HeaderName::from_static("x-hearthnet-answered-by");

/// Request header: a stream then has comments that tell which hosts answer.
const TRACE: HeaderName = HeaderName::from_static("x-hearthnet-trace");

/// Returns true if the frame reports that this machine takes over from the hosts.
fn answers_alone(frame: &Frame) -> bool {
    matches!(frame, Frame::ShardFailover { host: None, .. })
}

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

/// Answer as a stream.
struct Events {
    answers: Answers,
    output: Output,
    /// Whether comments tell which hosts answer.
    traced: bool,
    /// Parts to send before the next frame is awaited.
    ready: VecDeque<Part>,
    over: bool,
}

impl Events {
    fn response(
        answers: Answers,
        (prompt, first): (usize, &Frame),
        output: Output,
        traced: bool,
    ) -> Response<Body> {
        let format = output.format();
        let mut events = Self {
            ready: VecDeque::new(),
            answers,
            output,
            traced,
            over: false,
        };
        events.on_frame(prompt, first);
        let parts = stream::unfold(events, async |mut events| {
            Some((events.next().await?, events))
        });
        match format {
            Format::Events => {
                let events = parts.map(|part| Ok::<_, Infallible>(output::event(part)));
                let alive = KeepAlive::new().interval(KEEP_ALIVE).text("keep-alive");
                Sse::new(events).keep_alive(alive).into_response()
            }
            Format::Lines => {
                let lines = parts.filter_map(|part| ready(output::line(part)));
                let mut response = Response::new(Body::from_stream(lines));
                let kind = HeaderValue::from_static("application/x-ndjson");
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
                response
            }
        }
    }

    /// Next part; `None` at the end. Cancel-safe.
    async fn next(&mut self) -> Option<Part> {
        while self.ready.is_empty() && !self.over {
            match self.answers.next().await {
                Ok((prompt, frame)) => self.on_frame(prompt, &frame),
                // An unfinished stream ends with an error, and without the mark of its end.
                Err(error) => {
                    self.over = true;
                    let part = self.output.failed(&failed(&error, None));
                    self.ready.push_back(part);
                }
            }
        }
        self.ready.pop_front()
    }

    /// Queues the parts of a frame of a prompt's answers. Other host events have no place in these
    /// APIs.
    fn on_frame(&mut self, prompt: usize, frame: &Frame) {
        if answers_alone(frame) {
            self.ready.push_back(Part::Comment(ALONE.to_owned()));
        }
        if self.traced
            && let Some(trace) = reply::trace(frame)
        {
            self.ready
                .push_back(Part::Comment(format!("hearthnet {trace}")));
        }
        self.ready.extend(self.output.parts(prompt, frame));
        self.over |= self.output.reply.is_complete();
    }
}

fn random() -> Result<u128, ApiError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|e| failed(&ChatError::Engine(format!("no randomness: {e}")), None))?;
    Ok(u128::from_le_bytes(bytes))
}
