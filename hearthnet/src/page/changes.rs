//! Calls with which the page changes something: invites, levels of members, the pause and the quiet
//! hours. They are for the owner and for clients with the key.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode, header};
use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Level, MAX_USES};
use hearthnet_http::{ApiError, Client, json_response};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::node::{Page, PageNode, Pause};
use crate::cli::Failure;
use crate::cli::qr::Qr;
use crate::config::parse_quiet_hours;
use crate::home::{OwnHours, Paused, now_ms};
use crate::node::{Change, NewInvite};

/// Validity of an invite that the page makes.
const INVITE_TIME: Duration = Duration::from_secs(24 * 3600);
/// Time limit and size limit of a request's body.
const BODY: (Duration, usize) = (Duration::from_secs(10), 4096);

type SharedPage = State<Arc<Page>>;
type Answer = Result<Response<Body>, ApiError>;

fn answer(made: &impl Serialize) -> Answer {
    Ok(json_response(StatusCode::OK, &json!(made)))
}

fn forbidden(code: &'static str, text: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, code, text)
}

fn invalid_value(field: &str, text: String) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", text).about(field)
}

/// Without a key, any user of this machine may chat here, but only the owner may change anything.
fn require_owner(page: &Page, client: &Client, what: &str) -> Result<(), ApiError> {
    if page.has_key || client.user.is_some_and(|user| user.is_owner) {
        return Ok(());
    }
    let text = format!(
        "only the user who runs this node may {what}; with http.api_key_file, so may clients with the key"
    );
    Err(forbidden("unauthorized", text))
}

fn member(page: &Page) -> Result<&PageNode, ApiError> {
    let text = "this program answers without a community; `hearthnet up` founds or joins one";
    page.node
        .as_ref()
        .ok_or_else(|| forbidden("not_a_member", text))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InviteRequest {
    level: Level,
    uses: u32,
}

pub(super) async fn invite(
    State(page): SharedPage,
    Extension(client): Extension<Client>,
    request: Request,
) -> Answer {
    require_owner(&page, &client, "invite")?;
    let it = member(&page)?;
    let InviteRequest { level, uses } = body(request).await?;
    if !(1..=MAX_USES).contains(&uses) {
        let text = format!("`uses` must be a number from 1 to {MAX_USES}");
        return Err(invalid_value("uses", text));
    }
    // The page never uses the root key: that takes the command line.
    if !it.home.state().may_invite(&it.home.key.id(), level) {
        let text = format!("this node may not invite a node as {level}; ask an anchor");
        return Err(forbidden("unauthorized", text));
    }
    let new = NewInvite::generate(&it.home, &it.config, level, uses, INVITE_TIME)?;
    let code = new.code.to_string();
    let expires_ms = new.code.expires().saturating_mul(1000);
    it.node.write(&it.home, new.change).await?;
    let qr = Qr::of(&code).ok_or_else(|| Failure::internal("the code fits no QR code"))?;
    answer(&json!({
        "code": code, "level": level, "uses": uses, "expires_ms": expires_ms,
        "qr": {"side": qr.side(), "path": qr.svg_path()},
    }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LevelRequest {
    node: NodeId,
    level: Level,
}

pub(super) async fn level(
    State(page): SharedPage,
    Extension(client): Extension<Client>,
    request: Request,
) -> Answer {
    require_owner(&page, &client, "change the level of members")?;
    let it = member(&page)?;
    let LevelRequest { node, level } = body(request).await?;
    let state = it.home.state();
    let Some(now) = state.member(&node).map(|member| member.level) else {
        let text = format!("{} is no member of this community", node.short());
        return Err(ApiError::new(StatusCode::NOT_FOUND, "unknown_node", text).about("node"));
    };
    if state.level(&it.home.key.id()) != Some(Level::Anchor) {
        let text = "only anchors may change the level of others, and this node is none";
        return Err(forbidden("unauthorized", text));
    }
    // That takes the root key, which the page never uses.
    if now.max(level) == Level::Anchor {
        let text = "anchors are made and changed with `hearthnet community promote` and `demote` where the root key is";
        return Err(forbidden("unauthorized", text));
    }
    if now != level {
        it.node
            .write(&it.home, Change::Level { node, level })
            .await?;
    }
    answer(&json!({"node": node.to_string(), "level": level}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PauseRequest {
    until_ms: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResumeRequest {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HoursRequest {
    hours: Option<String>,
}

pub(super) async fn pause(
    State(page): SharedPage,
    Extension(client): Extension<Client>,
    request: Request,
) -> Answer {
    let it = may_pause(&page, &client, "pause it")?;
    let PauseRequest { until_ms } = body(request).await?;
    if until_ms.is_some_and(|until| until <= now_ms()) {
        let text = "`until_ms` must be a time to come, in ms since 1970".to_owned();
        return Err(invalid_value("until_ms", text));
    }
    set_pause(it, Some(Paused { until_ms })).await
}

pub(super) async fn resume(
    State(page): SharedPage,
    Extension(client): Extension<Client>,
    request: Request,
) -> Answer {
    let it = may_pause(&page, &client, "pause it")?;
    let ResumeRequest {} = body(request).await?;
    set_pause(it, None).await
}

pub(super) async fn quiet_hours(
    State(page): SharedPage,
    Extension(client): Extension<Client>,
    request: Request,
) -> Answer {
    let it = may_pause(&page, &client, "set its quiet hours")?;
    let HoursRequest { hours } = body(request).await?;
    let own = match hours {
        Some(hours) => {
            let parsed = parse_quiet_hours(&hours);
            let invalid = |why: String| invalid_value("hours", format!("`hours` {why}"));
            Some(OwnHours(parsed.map_err(invalid)?))
        }
        None => None,
    };
    set(it, move |pause| {
        pause.set_quiet_hours(own)?;
        Ok(pause.quiet_hours())
    })
    .await
}

fn may_pause<'a>(page: &'a Page, client: &Client, what: &str) -> Result<&'a PageNode, ApiError> {
    require_owner(page, client, what)?;
    let text = "this program serves no layers to others, so there is nothing to pause";
    page.node
        .as_ref()
        .ok_or_else(|| ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_available", text))
}

async fn set_pause(it: &PageNode, request: Option<Paused>) -> Answer {
    set(it, move |pause| {
        pause.set(request)?;
        Ok(pause.state())
    })
    .await
}

/// Makes a change, which blocks on the disk, and answers with the state after it.
async fn set<T: Serialize + Send + 'static>(
    it: &PageNode,
    change: impl FnOnce(&dyn Pause) -> Result<T, Failure> + Send + 'static,
) -> Answer {
    let pause = Arc::clone(&it.pause);
    let set = tokio::task::spawn_blocking(move || change(&*pause));
    let state = set.await.map_err(Failure::internal).flatten()?;
    answer(&state)
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
