//! Who may come in: with the key, or from this machine under one of its own names.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::routing::MethodRouter;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::error::ApiError;

/// The shortest key that is accepted: 16 characters of a random one are 80 bits or more.
pub const MIN_KEY_BYTES: usize = 16;

/// A secret that clients must send.
#[derive(Clone)]
pub struct ApiKey([u8; 32]);

impl ApiKey {
    /// A key from its text; white space around it is not part of it. `None` if it is shorter than
    /// [`MIN_KEY_BYTES`], or has characters that no header can carry.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let fits = text.len() >= MIN_KEY_BYTES && text.bytes().all(|b| b.is_ascii_graphic());
        fits.then(|| Self(Sha256::digest(text).into()))
    }

    /// Takes the same time for every guess: what is compared are digests, all of their bytes.
    fn is(&self, guess: &[u8]) -> bool {
        let guess: [u8; 32] = Sha256::digest(guess).into();
        self.0.ct_eq(&guess).into()
    }
}

/// Leaves the secret out.
impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey")
    }
}

/// Where a request came from.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Client {
    /// The address of whoever asks.
    pub ip: IpAddr,
    /// The connection, for as long as it lasts.
    pub connection: Arc<()>,
}

/// The paths of `inner` for those who may come in, and `/healthz` for everybody: whether it is
/// well, a machine may be asked by anyone who reaches it.
pub(super) fn guarded(inner: Router, key: Option<ApiKey>, health: MethodRouter) -> Router {
    inner
        .method_not_allowed_fallback(no_method)
        .fallback(no_path)
        .layer(middleware::from_fn_with_state(key, guard))
        .route("/healthz", health)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn(count))
}

async fn no_path() -> Response<Body> {
    let text =
        "there is nothing at this path; see /v1/models, /v1/chat/completions, /v1/completions";
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", text).response()
}

async fn no_method() -> Response<Body> {
    let text = "this path does not take that method";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", text).response()
}

/// Lets in who may come in.
async fn guard(State(key): State<Option<ApiKey>>, request: Request, next: Next) -> Response<Body> {
    let (status, code, text) = match &key {
        Some(key) if !bearer(request.headers()).is_some_and(|guess| key.is(guess)) => (
            StatusCode::UNAUTHORIZED,
            "invalid_api_key",
            "this server asks for its key: send it as `Authorization: Bearer KEY`",
        ),
        // A web page whose own name leads to this machine must not pass for this machine.
        None if !names_this_machine(&request) => (
            StatusCode::FORBIDDEN,
            "forbidden_host",
            "without a key this server answers as localhost only; ask http://127.0.0.1 or http://localhost",
        ),
        _ => return next.run(request).await,
    };
    ApiError::new(status, code, text).response()
}

async fn count(request: Request, next: Next) -> Response<Body> {
    let response = next.run(request).await;
    let status = response.status().as_u16().to_string();
    ::metrics::counter!("hearthnet_http_responses_total", "status" => status).increment(1);
    response
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
}

fn names_this_machine(request: &Request) -> bool {
    let header = request.headers().get(header::HOST);
    let header = header.and_then(|host| host.to_str().ok());
    // A request line that names a host means that one (RFC 9112, section 3.2.2).
    let named = request.uri().authority().map(Authority::as_str);
    let Some(host) = named.or(header) else {
        return false;
    };
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((v6, _)) => v6,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    let loopback = name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    loopback || name.eq_ignore_ascii_case("localhost")
}
