//! The HTTP door: OpenAI's API over [`Service`]. `specs/http-api.md` is the normative text.
//!
//! | concept | where |
//! |---|---|
//! | requests, field by field | `request.rs` (pure) |
//! | answers, whole and in chunks | `reply.rs` (pure) |
//! | errors and their statuses | `error.rs` |
//! | paths, streams | here |
//! | who may come in | `auth.rs` |
//! | connections, deadlines, shutdown | `server.rs` |
//! | which connection goes when there are too many | `connections.rs` |
//! | numbers, for processes without a service as well | `metrics/`, `metrics_endpoint.rs` |
//!
//! A client that goes away cancels what it asked for: dropping a response drops its
//! [`Answer`].

mod auth;
mod connections;
mod error;
mod metrics;
mod metrics_endpoint;
mod reply;
mod request;
mod server;

#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::routing::{get, post};
use axum::{Extension, Router};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use self::auth::Client;
use self::connections::held;
use self::error::ApiError;
use self::reply::{Header, Reply, Shape};
use self::request::ApiRequest;
use crate::chat::Frame;
use crate::error::ChatError;
use crate::service::retries::Mark;
use crate::service::{Answer, ServedModel, Service};

pub use self::auth::{ApiKey, MIN_KEY_BYTES};
pub use self::metrics::{Metrics, OtherRecorder, Part};
pub use self::metrics_endpoint::Health;
pub use self::server::{HttpError, HttpServer};

/// After so much silence a stream says that it is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How the door is opened.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // Built with `..HttpSettings::default()`.
pub struct HttpSettings {
    /// `ADDRESS:PORT`; port 0 takes a free one.
    pub listen: String,
    /// What clients must send; without one, only this machine is served.
    pub api_key: Option<ApiKey>,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
    /// How long a request's head, and then its body, may take to arrive; how long a connection may
    /// be idle, and how long a client may take nothing of what is sent to it.
    pub client_deadline: Duration,
    /// Requests that are answered at once; one more is refused. As many connections may be idle: for
    /// one more the one that has been idle for longest is closed.
    pub max_connections: usize,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7602".into(),
            api_key: None,
            max_body_bytes: 1 << 20,
            client_deadline: Duration::from_secs(30),
            max_connections: 256,
        }
    }
}

/// What handlers share.
struct Door {
    service: Service,
    max_body_bytes: usize,
    client_deadline: Duration,
    /// When the models were put on offer, Unix seconds.
    since: u64,
}

fn router(service: Service, metrics: Option<Metrics>, settings: &HttpSettings) -> Router {
    let door = Arc::new(Door {
        service,
        max_body_bytes: settings.max_body_bytes,
        client_deadline: settings.client_deadline,
        since: unix_seconds(),
    });
    let most = settings.max_connections.max(1);
    let places = Arc::new(Semaphore::new(most));
    let api = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route_layer(middleware::from_fn(move |request: Request, next: Next| {
            let place = Arc::clone(&places).try_acquire_owned();
            async move {
                match place {
                    Ok(place) => held(next.run(request).await, place),
                    Err(_) => ApiError::crowded(most).response(),
                }
            }
        }))
        .with_state(Arc::clone(&door));
    let api = match metrics {
        Some(metrics) => api.merge(metrics_endpoint::router(metrics)),
        None => api,
    };
    auth::guarded(api, settings.api_key.clone(), get(health).with_state(door))
}

async fn models(State(door): State<Arc<Door>>) -> Response<Body> {
    let data: Vec<Value> = door
        .service
        .models()
        .iter()
        .map(|model| door.describe(model))
        .collect();
    json_response(StatusCode::OK, &json!({"object": "list", "data": data}))
}

async fn model(
    State(door): State<Arc<Door>>,
    id: Result<Path<String>, PathRejection>,
) -> Response<Body> {
    // What is no text is no model's name.
    let id = id.map_or_else(|_| "\u{fffd}".to_owned(), |Path(id)| id);
    match door.service.model(&id) {
        Some(model) => json_response(StatusCode::OK, &door.describe(model)),
        None => ApiError::model(&id).response(),
    }
}

async fn health(State(door): State<Arc<Door>>) -> Response<Body> {
    let load = door.service.load();
    let (status, word) = match load.draining {
        false => (StatusCode::OK, "ok"),
        true => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
    };
    let body = json!({
        "status": word, "running": load.running, "waiting": load.waiting, "kept": load.kept,
    });
    json_response(status, &body)
}

async fn chat(
    State(door): State<Arc<Door>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Response<Body> {
    let answer = door.answer(Shape::Chat, client, request).await;
    answer.unwrap_or_else(|error| error.response())
}

async fn completion(
    State(door): State<Arc<Door>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Response<Body> {
    let answer = door.answer(Shape::Text, client, request).await;
    answer.unwrap_or_else(|error| error.response())
}

impl Door {
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
        let body = self.body(request).await?;
        let mark = Mark {
            request: self.service.digest(&body),
            connection: Some(client.connection),
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
            return Err(ApiError::model(&model));
        };
        chat.sampling = chosen.or_models(&served.text.sampling).over(chat.sampling);
        let wants_logprobs = chat.sampling.logprobs.is_some();
        // Not a proof of anything: it only shares fairly, and keeps conversations apart.
        let caller = format!("{} {}", client.ip, user.unwrap_or_default());
        let failed =
            |error: ChatError| ApiError::chat(&error).retry_after(self.service.retry_after());
        let asked = self.service.ask_as(&caller, &mark, &model, chat);
        let mut answer = asked.map_err(|refusal| {
            let after = refusal.retry_after.unwrap_or_default();
            ApiError::chat(&refusal.error).retry_after(after)
        })?;
        // The first frame comes when the request has been understood and hosts have been found:
        // what fails before has a status of its own.
        let first = match answer.next().await {
            Some(Ok(frame)) => frame,
            // Hosts that stay full refuse as a full queue does: who comes back is next.
            Some(Err(error @ ChatError::HostsFull(_))) => {
                let after = self.service.remember(&caller, &mark);
                return Err(ApiError::chat(&error).retry_after(after));
            }
            Some(Err(error)) => return Err(failed(error)),
            None => return Err(failed(ChatError::Cancelled)),
        };
        let header = Header {
            shape,
            id: random,
            created: unix_seconds(),
            model,
            // The weights decide, and nothing about the machines that compute with them.
            fingerprint: format!("fp_{:.16}", served.weights.to_string()),
        };
        let tokenizer = served.text.tokenizer.clone();
        let mut reply = Reply::new(header, tokenizer, include_usage, wants_logprobs);
        if stream {
            return Ok(Events::response(answer, first, reply));
        }
        let mut next = Some(Ok(first));
        let mut alone = false;
        loop {
            match next {
                Some(Ok(Frame::TokenDelta {
                    text,
                    token_id,
                    logprob,
                    top_logprobs,
                })) => reply.collect(&text, token_id, logprob, &top_logprobs),
                Some(Ok(Frame::Done(done))) => {
                    let mut response = json_response(StatusCode::OK, &reply.whole(&done));
                    if alone {
                        let here = HeaderValue::from_static("this-machine");
                        response.headers_mut().insert(ANSWERED_BY, here);
                    }
                    return Ok(response);
                }
                Some(Ok(Frame::ShardFailover { host: None, .. })) => alone = true,
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(failed(error)),
                None => return Err(failed(ChatError::Cancelled)),
            }
            next = answer.next().await;
        }
    }

    /// The body of a request, within its limits of kind, size and time.
    async fn body(&self, request: Request) -> Result<Bytes, ApiError> {
        // A form that a web page may send without asking has another type.
        let kind = request.headers().get(header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let essence = kind.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(ApiError::media_type());
        }
        let limit = self.max_body_bytes;
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|bytes| bytes > limit as u64) {
            return Err(ApiError::large(limit));
        }
        let body = axum::body::to_bytes(request.into_body(), limit);
        match tokio::time::timeout(self.client_deadline, body).await {
            Ok(Ok(body)) => Ok(body),
            // One that is broken off is nobody's to read about.
            Ok(Err(_)) => Err(ApiError::large(limit)),
            Err(_) => Err(ApiError::late()),
        }
    }
}

/// Says that no host could be had for an answer, or for the rest of it: a comment, which clients pass
/// over.
const ALONE: &str = ": no host can be had for this: this machine answers alone\n\n";

/// The same of an answer in one piece.
const ANSWERED_BY: HeaderName = HeaderName::from_static("x-hearthnet-answered-by");

/// An answer on its way as server-sent events.
struct Events {
    answer: Answer,
    reply: Reply,
    /// A frame that has come already.
    first: Option<Frame>,
    over: bool,
}

impl Events {
    fn response(answer: Answer, first: Frame, reply: Reply) -> Response<Body> {
        let opening = reply.opening().map(|chunk| event(&chunk));
        let events = Self {
            answer,
            reply,
            first: Some(first),
            over: false,
        };
        let stream = stream::unfold((opening, events), async |(opening, mut events)| {
            let text = match opening {
                Some(opening) => opening,
                None => events.next().await?,
            };
            Some((Ok::<_, Infallible>(Bytes::from(text)), (None, events)))
        });
        let mut response = Response::new(Body::from_stream(stream));
        let headers = response.headers_mut();
        for (name, value) in [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        response
    }

    /// The next events as text; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        if self.over {
            return None;
        }
        loop {
            let next = match self.first.take() {
                Some(frame) => Some(Ok(frame)),
                None => match tokio::time::timeout(KEEP_ALIVE, self.answer.next()).await {
                    Ok(next) => next,
                    Err(_) => return Some(": still at it\n\n".to_owned()),
                },
            };
            match next {
                Some(Ok(Frame::TokenDelta {
                    text,
                    token_id,
                    logprob,
                    top_logprobs,
                })) => {
                    let chunk = self.reply.delta(&text, token_id, logprob, &top_logprobs);
                    if let Some(chunk) = chunk {
                        return Some(event(&chunk));
                    }
                }
                Some(Ok(Frame::Done(done))) => {
                    self.over = true;
                    let mut text: String = self.reply.ending(&done).iter().map(event).collect();
                    text.push_str("data: [DONE]\n\n");
                    return Some(text);
                }
                Some(Ok(Frame::ShardFailover { host: None, .. })) => {
                    return Some(ALONE.to_owned());
                }
                // What else becomes of hosts has no place in this API.
                Some(Ok(_)) => {}
                Some(Err(error)) => return Some(self.fail(&error)),
                None => return Some(self.fail(&ChatError::Cancelled)),
            }
        }
    }

    /// A stream that cannot be finished ends with an error event, and without `[DONE]`.
    fn fail(&mut self, error: &ChatError) -> String {
        self.over = true;
        event(&ApiError::chat(error).body())
    }
}

/// JSON has no bare line ends, so one value is one line.
fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

fn json_response(status: StatusCode, value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn random() -> Result<u128, ApiError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|e| ApiError::chat(&ChatError::Engine(format!("no randomness: {e}"))))?;
    Ok(u128::from_le_bytes(bytes))
}

fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}
