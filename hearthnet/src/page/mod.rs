//! Page of a node for browsers: its files, and its calls beside OpenAI's interface
//! (`specs/http-api.md` section 8).
//!
//! | part | file |
//! |---|---|
//! | HTML, styles and scripts | `hearthnet/page/` |
//! | list of these files | `files.rs` |
//! | state that the page shows | `state.rs` (pure) |
//! | calls | this file |

mod files;
mod state;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode, header};
use axum::routing::{get, post};
use axum::{Extension, Router};
use hearthnet_bus::log::{Level, MAX_USES};
use hearthnet_http::{ApiError, Client, json_response};
use hearthnet_orchestrator::Service;
use serde::Deserialize;
use serde_json::json;

pub(crate) use self::files::FILES;
use crate::cli::Failure;
use crate::cli::qr::Qr;
use crate::config::Config;
use crate::home::{Home, now_ms};
use crate::node::{DaemonNode, NewInvite};

/// Validity of an invite that the page makes.
const INVITE_TIME: Duration = Duration::from_secs(24 * 3600);
/// Time limit and size limit of a request's body.
const BODY: (Duration, usize) = (Duration::from_secs(10), 4096);

/// Node that the page is of.
pub(crate) struct PageNode {
    pub(crate) home: Home,
    pub(crate) config: Config,
    pub(crate) node: Arc<DaemonNode>,
}

struct Page {
    service: Service,
    /// `None` if this process answers without a community.
    node: Option<PageNode>,
    has_key: bool,
}

/// Calls of the page. With a key (`has_key`), all clients that reach them have shown it.
pub(crate) fn calls(service: Service, node: Option<PageNode>, has_key: bool) -> Router {
    let page = Page {
        service,
        node,
        has_key,
    };
    Router::new()
        .route("/hearthnet/v1/state", get(state))
        .route("/hearthnet/v1/invite", post(invite))
        .route("/hearthnet/v1/pause", post(cannot_pause))
        .route("/hearthnet/v1/resume", post(cannot_pause))
        .with_state(Arc::new(page))
}

async fn state(State(page): State<Arc<Page>>) -> Response<Body> {
    let mut state = state::service(&page.service);
    if let Some(it) = &page.node {
        let (own, running) = (it.home.key.id(), it.node.running());
        state::add_node(&mut state, &it.home.state(), &own, &running, now_ms());
    }
    let mut response = json_response(StatusCode::OK, &state);
    let no_store = header::HeaderValue::from_static("no-store");
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, no_store);
    response
}

async fn cannot_pause() -> Response<Body> {
    let text = "this node cannot be paused from the page";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_available", text).response()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InviteRequest {
    level: Level,
    uses: u32,
}

async fn invite(
    State(page): State<Arc<Page>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Response<Body> {
    let made = make_invite(&page, &client, request).await;
    made.unwrap_or_else(|error| error.response())
}

async fn make_invite(
    page: &Page,
    client: &Client,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let forbidden =
        |code: &'static str, text: &str| ApiError::new(StatusCode::FORBIDDEN, code, text);
    // Without a key, any user of this machine may chat here, but only the owner may invite.
    if !page.has_key && !client.user.is_some_and(|user| user.is_owner) {
        let text = "only the user who runs this node may invite; with http.api_key_file, so may clients with the key";
        return Err(forbidden("unauthorized", text));
    }
    let Some(it) = &page.node else {
        let text =
            "this program answers without a community; `hearthnet community create` founds one";
        return Err(forbidden("not_a_member", text));
    };
    let InviteRequest { level, uses } = body(request).await?;
    if !(1..=MAX_USES).contains(&uses) {
        let text = format!("`uses` must be a number from 1 to {MAX_USES}");
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", text);
        return Err(error.about("uses"));
    }
    // The page never uses the root key: that takes the command line.
    if !it.home.state().may_invite(&it.home.key.id(), level) {
        let text = format!("this node may not invite a node as {level}; ask an anchor");
        return Err(forbidden("unauthorized", &text));
    }
    let new = NewInvite::generate(&it.home, &it.config, level, uses, INVITE_TIME)?;
    let code = new.code.to_string();
    let expires_ms = new.code.expires().saturating_mul(1000);
    it.node.write(&it.home, new.change).await?;
    let qr = Qr::of(&code).ok_or_else(|| Failure::internal("the code fits no QR code"))?;
    Ok(json_response(
        StatusCode::OK,
        &json!({
            "code": code, "level": level, "uses": uses, "expires_ms": expires_ms,
            "qr": {"side": qr.side(), "path": qr.svg_path()},
        }),
    ))
}

/// Reads a body of JSON. An HTML form, which needs no CORS preflight, cannot send this type.
async fn body<T: serde::de::DeserializeOwned>(request: Request) -> Result<T, ApiError> {
    let bad = |status, code: &'static str, text: &str| ApiError::new(status, code, text);
    let kind = request.headers().get(header::CONTENT_TYPE);
    if kind.is_none_or(|kind| kind.as_bytes() != b"application/json") {
        let text = "send the request as JSON, with the header `Content-Type: application/json`";
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(bad(status, "unsupported_media_type", text));
    }
    let (within, most) = BODY;
    let read = tokio::time::timeout(within, to_bytes(request.into_body(), most)).await;
    let read = read.map_err(|_| {
        let text = "the request did not arrive in time";
        bad(StatusCode::REQUEST_TIMEOUT, "request_timeout", text)
    })?;
    let invalid = |why: &dyn std::fmt::Display| {
        bad(
            StatusCode::BAD_REQUEST,
            "invalid_json",
            &format!("the request: {why}"),
        )
    };
    let bytes = read.map_err(|e| invalid(&e))?;
    serde_json::from_slice(&bytes).map_err(|e| invalid(&e))
}
