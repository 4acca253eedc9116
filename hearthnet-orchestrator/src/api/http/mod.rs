//! OpenAI's API over [`Service`], and others. `specs/http-api.md` is the normative text.
//!
//! | concept | where |
//! |---|---|
//! | request parsing; its body and how strictly it is read; messages | `request.rs`; `fields.rs`; `messages.rs` (pure) |
//! | fields of a request, each by its name | `../fields.rs` (pure) |
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
//! | requests that run chats, of all APIs | `answer.rs` |
//! | answers as streams | `events.rs` |
//! | identity of clients, verified | `identity.rs` (pure) |
//! | errors of failed chats | `errors.rs` |
//! | paths, and all other requests | here |
//! | listener, keys, metrics | `hearthnet-http` |
//!
//! A client that disconnects cancels its request: dropping a response drops its answer.

mod answer;
mod body;
mod embeddings;
mod errors;
mod events;
mod fields;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod identity;
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

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use hearthnet_bus::now_ms;
use hearthnet_http::{
    Admitted, ApiError, Client, HttpError, HttpServer, HttpSettings, Metrics, PresentedKey,
    hold_until_sent, json_response, metrics_route,
};
use parking_lot::Mutex;
use serde_json::{Value, json};

use self::body::{Bodies, NotRead, Room};
use self::embeddings::{VectorFormat, Vectors};
use self::errors::{CROWDED, failed, full, internal, on_a_thread, over_limit};
use self::events::{answers_alone, mark_alone};
use self::fields::Rules;
use self::identity::{caller, who};
use self::names::Names;
use self::permits::PermitPool;
use self::prompts::Answers;
use self::reply::Shape;
use self::stored::StoredResponses;
use self::translate::{ollama, responses, vllm};
use crate::error::ChatError;
use crate::service::{ServedModel, Service};

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
/// authorised clients. Must be called within a Tokio runtime. Before closing it, call
/// [`Service::drain`], so that running answers end.
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
                    let permit = permit?;
                    let response = next.run(request).await;
                    Ok::<_, ApiError>(hold_until_sent(response, permit))
                }
            },
        ));
    let api = match metrics {
        Some(metrics) => api.route("/metrics", metrics_route(metrics)),
        None => api,
    };
    HttpServer::open(api, get(health).with_state(shared), settings).await
}

fn ok(value: &Value) -> Response<Body> {
    json_response(StatusCode::OK, value)
}

async fn models(State(api): State<Arc<Api>>) -> Response<Body> {
    let models = api.names.all();
    let data = models.iter().map(|(name, model)| api.describe(name, model));
    let data: Vec<Value> = data.collect();
    ok(&json!({"object": "list", "data": data}))
}

async fn model(
    State(api): State<Arc<Api>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response<Body>, ApiError> {
    // An id that is not UTF-8 matches no model.
    let id = id.map_or_else(|_| "\u{fffd}".to_owned(), |Path(id)| id);
    let model = api.names.find(&id)?;
    Ok(ok(&api.describe(&id, &model)))
}

/// Refuses to read or delete a response.
async fn stored_response() -> ApiError {
    responses::not_kept()
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
        move |State(api): State<Arc<Api>>,
              Extension(client): Extension<Client>,
              request: Request| { answer(api, client, request) },
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
) -> Result<Response<Body>, ApiError> {
    let count = api.count_tokens(client, request).await?;
    Ok(ok(&json!({"input_tokens": count})))
}

async fn ollama_tags(State(api): State<Arc<Api>>) -> Response<Body> {
    let models = api.names.all();
    let models = models.iter().map(|(name, m)| ollama_models::tag(name, m));
    let models: Vec<Value> = models.collect();
    ok(&json!({"models": models}))
}

async fn ollama_ps(State(api): State<Arc<Api>>) -> Response<Body> {
    let models = api.service.models();
    let models: Vec<Value> = models.iter().map(|m| ollama_models::running(m)).collect();
    ok(&json!({"models": models}))
}

async fn ollama_show(
    State(api): State<Arc<Api>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let (body, _room) = api.body(request, &who(&client, api.has_key)).await?;
    let model = ollama::shown(&body, api.rules())?;
    let model = api.names.find(&model)?;
    Ok(ok(&ollama_models::show(&model)))
}

async fn ollama_version() -> Response<Body> {
    let version = json!({
        "version": ollama_models::VERSION, "hearthnet_version": env!("CARGO_PKG_VERSION"),
    });
    ok(&version)
}

async fn tokenizer_info(State(api): State<Arc<Api>>) -> Result<Response<Body>, ApiError> {
    let model = api.only_model()?;
    Ok(ok(&vllm::info(&model.text)))
}

/// Handler of an endpoint of vLLM's for the tokenizer.
fn tokens(read: fn(&[u8]) -> Result<vllm::Asked, ApiError>) -> MethodRouter<Arc<Api>> {
    handler(move |api, client, request| async move {
        let answer = api.tokens(read, client, request).await?;
        Ok(ok(&answer))
    })
}

/// Description of every path, for programs.
async fn openapi() -> impl IntoResponse {
    let kind = (header::CONTENT_TYPE, "application/json");
    ([kind], include_str!("openapi.json"))
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
        on_a_thread(move || asked.answer(&served.text)).await?
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
        let tokens = on_a_thread(move || asked.tokens(&text.text)).await?;
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
        let mut response = response.ok_or_else(|| internal("a vector is missing"))?;
        if alone {
            mark_alone(&mut response);
        }
        Ok(hold_until_sent(response, reserved))
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
