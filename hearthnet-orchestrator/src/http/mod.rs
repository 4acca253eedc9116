//! OpenAI's API over [`Service`]. `specs/http-api.md` is the normative text.
//!
//! | concept | where |
//! |---|---|
//! | requests, field by field | `request.rs` (pure) |
//! | answers, whole and in chunks | `reply.rs` (pure) |
//! | bodies of requests, and the memory that they take | `body.rs` |
//! | how many requests at once, and of one caller | `places.rs` |
//! | paths, streams, what a failed chat is called | here |
//! | listener, keys, numbers | `hearthnet-http` |
//!
//! A client that goes away cancels what it asked for: dropping a response drops its
//! [`Answer`].

mod body;
mod places;
mod reply;
mod request;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::IntoResponse as _;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use futures_util::stream;
use hearthnet_bus::now_ms;
use hearthnet_http::{
    Admitted, ApiError, Client, HttpError, HttpServer, HttpSettings, Metrics, held, json_response,
    metrics_route,
};
use hearthnet_transport::Code;
use serde_json::{Value, json};

use self::body::{Bodies, Collected, NotRead};
use self::places::Places;
use self::reply::{Header, Reply, Shape};
use self::request::ApiRequest;
use crate::chat::Frame;
use crate::error::ChatError;
use crate::service::fair_queue::OWNER;
use crate::service::retries::Mark;
use crate::service::{Answer, Caller, ServedModel, Service};

/// After so much silence a stream says that it is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How long a service that stops may take to be back, at a guess: it ends what runs (20 s at most),
/// and loads a model.
const BACK_AFTER: Duration = Duration::from_secs(30);

/// When to ask again where the listener itself is crowded.
const CROWDED: Duration = Duration::from_secs(2);

/// What handlers share.
struct Api {
    service: Service,
    bodies: Bodies,
    client_deadline: Duration,
    /// Whether whoever asks has proved that it may.
    has_key: bool,
    /// When the models were put on offer, Unix seconds.
    since: u64,
}

/// Opens the interface to a service, and to the numbers of this process. Must be called within a Tokio
/// runtime. Before it is closed, [`Service::drain`] makes what is being answered end.
///
/// # Errors
/// [`HttpError`].
pub async fn serve(
    service: Service,
    metrics: Option<Metrics>,
    settings: &HttpSettings,
) -> Result<HttpServer, HttpError> {
    let shared = Arc::new(Api {
        service,
        bodies: Bodies::new(settings.max_body_bytes),
        client_deadline: settings.client_deadline,
        has_key: settings.api_key.is_some(),
        since: now_ms() / 1000,
    });
    let (places, has_key) = (Places::new(settings.max_connections, 1), shared.has_key);
    let api = Router::new()
        .route("/v1/chat/completions", answers(Shape::Chat))
        .route("/v1/completions", answers(Shape::Text))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route_layer(middleware::from_fn(
            move |Extension(client): Extension<Client>, request: Request, next: Next| {
                let place = places.take(who(&client, has_key));
                async move {
                    match place {
                        Ok(place) => held(next.run(request).await, place),
                        Err(why) => failed(&ChatError::Busy(why), Some(CROWDED)).response(),
                    }
                }
            },
        ))
        .with_state(Arc::clone(&shared));
    let api = match metrics {
        Some(metrics) => api.route("/metrics", metrics_route(metrics)),
        None => api,
    };
    HttpServer::open(api, get(health).with_state(shared), settings).await
}

async fn models(State(api): State<Arc<Api>>) -> Response<Body> {
    let models = api.service.models().iter();
    let data: Vec<Value> = models.map(|model| api.describe(model)).collect();
    json_response(StatusCode::OK, &json!({"object": "list", "data": data}))
}

async fn model(
    State(api): State<Arc<Api>>,
    id: Result<Path<String>, PathRejection>,
) -> Response<Body> {
    // What is no text is no model's name.
    let id = id.map_or_else(|_| "\u{fffd}".to_owned(), |Path(id)| id);
    match api.service.model(&id) {
        Some(model) => json_response(StatusCode::OK, &api.describe(model)),
        None => no_model(&id).response(),
    }
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

/// Answers requests of one of the two endpoints.
fn answers(shape: Shape) -> MethodRouter<Arc<Api>> {
    post(
        async move |State(api): State<Arc<Api>>,
                    Extension(client): Extension<Client>,
                    request: Request| {
            let answer = api.answer(shape, client, request).await;
            answer.unwrap_or_else(|error| error.response())
        },
    )
}

/// Who asks, as far as the system tells: a user of this machine, or an address, of IPv6 its network. Who has
/// the key and is here is its owner. Nothing that a client chooses is in it.
fn who(client: &Client, has_key: bool) -> String {
    match client.user {
        Some(user) if user.is_owner => OWNER.to_owned(),
        Some(user) => format!("user {}", user.id),
        None if has_key && client.ip.is_loopback() => OWNER.to_owned(),
        None => format!("address {}", client.subscriber),
    }
}

/// Who asks, for whom it says that it does.
fn caller(client: &Client, has_key: bool, user: &str) -> Caller {
    let who = who(client, has_key);
    // Which one of its IPv6 network it is a client chooses as well.
    let whom_for = match client.user.is_some() || who == OWNER {
        true => user.to_owned(),
        false => format!("{}\0{user}", client.ip),
    };
    // How much of a prompt was held already tells what was asked before. Without a key anybody on
    // this machine may ask: of whom nothing is known but the address, the connection is.
    let held_by = match has_key || client.user.is_some() {
        true => format!("{who}\0{whom_for}"),
        false => format!("connection {}\0{user}", client.number),
    };
    Caller {
        name: format!("{who}\0{whom_for}"),
        held_by,
    }
}

/// 404 for a model, quoted as far as anybody would read it.
fn no_model(id: &str) -> ApiError {
    let id: String = id.chars().take(100).collect();
    let text = format!("there is no model {id:?} here; GET /v1/models lists those that are");
    ApiError::new(StatusCode::NOT_FOUND, "model_not_found", text).about("model")
}

/// A failed chat as a client hears of it, and after what time to ask again where that could help.
fn failed(error: &ChatError, after: Option<Duration>) -> ApiError {
    let status = StatusCode::from_u16(error.http_status());
    let code = match error {
        // What OpenAI calls it: programs that shorten their conversations wait for it.
        ChatError::TooLong { .. } => Code::new("context_length_exceeded"),
        _ => error.code(),
    };
    let text = format!("{error}; {}", error.hint());
    ApiError::new(
        status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        code,
        text,
    )
    .retry_after(match error {
        ChatError::Busy(_) | ChatError::HostsFull(_) => after,
        ChatError::ShuttingDown => Some(BACK_AFTER),
        _ => None,
    })
}

impl Api {
    fn describe(&self, model: &ServedModel) -> Value {
        json!({
            "id": model.id, "object": "model", "created": self.since, "owned_by": "hearthnet",
            "weights_sha256": model.weights.to_string(), "context_length": model.text.context,
        })
    }

    async fn answer(
        &self,
        shape: Shape,
        client: Client,
        request: Request,
    ) -> Result<Response<Body>, ApiError> {
        let body = self.body(request, &who(&client, self.has_key)).await?;
        let mark = Mark {
            request: self.service.digest(&body),
            connection: Some(Arc::clone(&client.connection)),
        };
        let random = random()?;
        // 53 bits survive every JSON reader.
        let seed = (random as u64) >> 11;
        let asked = match shape {
            Shape::Chat => request::chat(&body, seed)?,
            Shape::Text => request::completion(&body, seed)?,
        };
        drop(body);
        let ApiRequest {
            model,
            mut chat,
            chosen,
            stream,
            include_usage,
            user,
        } = asked;
        let Some(served) = self.service.model(&model).cloned() else {
            return Err(no_model(&model));
        };
        chat.sampling = chosen.or_models(&served.text.sampling).over(chat.sampling);
        let wants_logprobs = chat.sampling.logprobs.is_some();
        let caller = caller(&client, self.has_key, &user.unwrap_or_default());
        let ended = |error: &ChatError| failed(error, Some(self.service.retry_after()));
        let asked = self.service.ask_as(&caller, &mark, &model, chat);
        let mut answer = asked.map_err(|refusal| failed(&refusal.error, refusal.retry_after))?;
        // The first frame comes when the request has been understood and hosts have been found:
        // what fails before has a status of its own.
        let mut frame = match next(&mut answer).await {
            Ok(frame) => frame,
            // Hosts that stay full refuse as a full queue does: who comes back is next.
            Err(error @ ChatError::HostsFull(_)) => {
                let after = self.service.remember(&caller.name, &mark);
                return Err(failed(&error, Some(after)));
            }
            Err(error) => return Err(ended(&error)),
        };
        let header = Header {
            shape,
            id: random,
            created: now_ms() / 1000,
            model,
            weights: served.weights,
        };
        let tokenizer = served.text.tokenizer.clone();
        let mut reply = Reply::new(header, tokenizer, include_usage, wants_logprobs);
        if stream {
            return Ok(Events::response(answer, &frame, reply));
        }
        let mut alone = false;
        let whole = loop {
            alone |= answers_alone(&frame);
            if let Some(whole) = reply.whole(&frame) {
                break whole;
            }
            frame = next(&mut answer).await.map_err(|error| ended(&error))?;
        };
        let mut response = json_response(StatusCode::OK, &whole);
        if alone {
            let here = HeaderValue::from_static("this-machine");
            response.headers_mut().insert(ANSWERED_BY, here);
        }
        Ok(response)
    }

    /// The body of a request of `who`, within the limits of type, size and time.
    async fn body(&self, request: Request, who: &str) -> Result<Collected, ApiError> {
        // A form that a web page may send without asking has another type.
        let kind = request.headers().get(header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()?.split(';').next());
        if !kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "unsupported_media_type",
                "send the request as JSON, with the header `Content-Type: application/json`",
            ));
        }
        let limit = self.bodies.limit();
        let large = || {
            let text = format!("the request is larger than {limit} bytes, which is the limit here");
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
            Ok(Err(NotRead::Full)) => {
                let why = "the requests that arrive now fill the memory that is kept for them";
                Err(failed(&ChatError::Busy(why.to_owned()), Some(CROWDED)))
            }
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

/// Says that no host could be had for an answer, or for the rest of it: a comment, which clients pass
/// over.
const ALONE: &str = "no host can be had for this: this machine answers alone";

/// The same of an answer in one piece.
const ANSWERED_BY: HeaderName = HeaderName::from_static("x-hearthnet-answered-by");

/// The next frame of an answer whose last one has not come.
async fn next(answer: &mut Answer) -> Result<Frame, ChatError> {
    answer.next().await.unwrap_or(Err(ChatError::Cancelled))
}

/// Whether a frame says that this machine takes over.
fn answers_alone(frame: &Frame) -> bool {
    matches!(frame, Frame::ShardFailover { host: None, .. })
}

/// An answer on its way as server-sent events.
struct Events {
    answer: Answer,
    reply: Reply,
    /// What is to be sent before anything else is waited for.
    ready: VecDeque<Event>,
    over: bool,
}

impl Events {
    fn response(answer: Answer, first: &Frame, reply: Reply) -> Response<Body> {
        let mut events = Self {
            ready: VecDeque::new(),
            answer,
            reply,
            over: false,
        };
        events.hear(first);
        let stream = stream::unfold(events, async |mut events| {
            Some((Ok::<_, Infallible>(events.next().await?), events))
        });
        let alive = KeepAlive::new().interval(KEEP_ALIVE).text("still at it");
        Sse::new(stream).keep_alive(alive).into_response()
    }

    /// The next event; `None` at the end. Nothing is lost when the future is dropped.
    async fn next(&mut self) -> Option<Event> {
        while self.ready.is_empty() && !self.over {
            match next(&mut self.answer).await {
                Ok(frame) => self.hear(&frame),
                // A stream that cannot be finished ends with an error event, and without `[DONE]`.
                Err(error) => {
                    self.over = true;
                    self.ready.push_back(event(&failed(&error, None).body()));
                }
            }
        }
        self.ready.pop_front()
    }

    /// What else becomes of hosts has no place in this API.
    fn hear(&mut self, frame: &Frame) {
        if answers_alone(frame) {
            self.ready.push_back(Event::default().comment(ALONE));
        }
        self.ready
            .extend(self.reply.chunks(frame).iter().map(event));
        if let Frame::Done(_) = frame {
            self.over = true;
            self.ready.push_back(Event::default().data("[DONE]"));
        }
    }
}

/// JSON has no bare line ends, so one value is one line.
fn event(value: &Value) -> Event {
    Event::default().data(value.to_string())
}

fn random() -> Result<u128, ApiError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|e| failed(&ChatError::Engine(format!("no randomness: {e}")), None))?;
    Ok(u128::from_le_bytes(bytes))
}
