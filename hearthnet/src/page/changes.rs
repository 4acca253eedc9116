//! Calls with which the page changes something: invites, members, the pause and the quiet hours.
//! They are for the owner and, except for members, for clients with the key.

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

use super::node::{MayChange, Page, PageNode, Pause};
use crate::cli::qr::Qr;
use crate::cli::{Failure, blocking};
use crate::config::parse_quiet_hours;
use crate::home::rights::{authority, is_anchor};
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

/// Members are changed only by the user who runs this node, on its machine: a phone in the network
/// has the key as well, and a member that is removed stays removed.
fn may_change_members<'a>(page: &'a Page, client: &Client) -> Result<&'a PageNode, ApiError> {
    if client.is_owner() {
        return member(page);
    }
    let text = "members are changed only on this node's own machine, by the user who runs it: open the page there with `hearthnet page --open`, or use `hearthnet community`";
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
    let (by_root, passphrase) = (false, None);
    it.node
        .write(&it.home, by_root, passphrase, new.change)
        .await?;
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
    passphrase: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RevokeRequest {
    node: NodeId,
    passphrase: Option<String>,
}

pub(super) async fn level(
    State(page): SharedPage,
    Extension(client): Extension<Client>,
    request: Request,
) -> Answer {
    let it = may_change_members(&page, &client)?;
    let LevelRequest {
        node,
        level,
        passphrase,
    } = body(request).await?;
    let now = other_member(it, &node)?;
    let signer = signer(it, now.max(level), "change the level of").await?;
    if now != level {
        let change = Change::Level { node, level };
        change_member(it, signer, passphrase, change).await?;
    }
    answer(&json!({"node": node.to_string(), "level": level}))
}

pub(super) async fn revoke(
    State(page): SharedPage,
    Extension(client): Extension<Client>,
    request: Request,
) -> Answer {
    let it = may_change_members(&page, &client)?;
    let RevokeRequest { node, passphrase } = body(request).await?;
    let now = other_member(it, &node)?;
    let signer = signer(it, now, "revoke").await?;
    change_member(it, signer, passphrase, Change::Revoke { node }).await?;
    answer(&json!({"node": node.to_string(), "revoked": true}))
}

/// Level of another member, if this node is an anchor. So an anchor always remains, and the page
/// removes no access of its own node.
fn other_member(it: &PageNode, node: &NodeId) -> Result<Level, ApiError> {
    if !is_anchor(&it.home) {
        let text =
            "members are changed on the page of an anchor, and this node is none; ask an anchor";
        return Err(forbidden("unauthorized", text));
    }
    if *node == it.home.key.id() {
        let text = "this page changes other members only; `hearthnet community` changes this node";
        return Err(forbidden("unauthorized", text));
    }
    let level = it.home.state().member(node).map(|member| member.level);
    level.ok_or_else(|| {
        let text = format!(
            "{} is no member of this community; it may have left",
            node.short()
        );
        ApiError::new(StatusCode::NOT_FOUND, "unknown_node", text).about("node")
    })
}

/// Key that signs the change of a member.
#[derive(Clone, Copy)]
struct Signer {
    /// The root key, instead of the node's own key.
    is_root: bool,
    is_sealed: bool,
}

/// Key that signs a change of a member of this level, as for `hearthnet community`.
async fn signer(it: &PageNode, level: Level, what: &'static str) -> Result<Signer, Failure> {
    let home = it.home.clone();
    blocking(move || {
        let is_root = authority(&home, level, what)?;
        let is_sealed = is_root && home.root_key()?.is_some_and(|key| key.is_sealed());
        Ok(Signer { is_root, is_sealed })
    })
    .await
}

async fn change_member(
    it: &PageNode,
    signer: Signer,
    passphrase: Option<String>,
    change: Change,
) -> Result<(), ApiError> {
    if signer.is_sealed && passphrase.is_none() {
        let text = "the root key changes anchors, and it is sealed: send its `passphrase` as well";
        return Err(forbidden("wrong_passphrase", text).about("passphrase"));
    }
    let written = it
        .node
        .write(&it.home, signer.is_root, passphrase, change)
        .await;
    written.map_err(|why| match why.has_code("wrong_passphrase") {
        true => forbidden("wrong_passphrase", why.with_hint()).about("passphrase"),
        false => why.into(),
    })
}

/// Changes of members that a client may make.
pub(super) async fn may_change(it: &PageNode, client: &Client) -> MayChange {
    let mut may = MayChange::default();
    if !is_anchor(&it.home) || !client.is_owner() {
        return may;
    }
    for level in [Level::Member, Level::Trusted, Level::Anchor] {
        if let Ok(signer) = signer(it, level, "change").await {
            may.levels.push(level);
            may.needs_passphrase |= signer.is_sealed;
        }
    }
    may
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
    answer(&blocking(move || change(&*pause)).await?)
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
