//! `community.join`: admission of a stranger with an invite code.
//!
//! The joiner calls any trusted member with its [`JoinRequest`]. If the invite allows it, the
//! member appends the admission and sends the joiner the community's log:
//!
//! ```text
//!  joiner                               a trusted member
//!    community.join {request}  ------>  proof? invite? uses? expiry?  append member.admitted
//!                              <------  events ["...", "..."]         the log, as signed bytes
//!                              <------  end {level}
//!    takes the events: every signature is checked against the
//!    community's key, which the code carried
//! ```
//!
//! The joiner need not trust the member that answers: every event is verified, and the request
//! admits only the joiner. To detect events that the member keeps back, the joiner asks others
//! (`second_opinion.rs`).

mod second_opinion;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::community::invite::{JoinError, JoinRequest, MAX_NAME_BYTES, is_name};
use crate::community::log::{Body, Community, EventLog, Heads, Level, LogError, OpenInvite};
use crate::node::calls::{
    Answering, CallContext, CallError, CallLimits, CapabilityDescriptor, Client, Code, FrameSink,
    Handler, Kind, MAX_EVENT_BYTES, Params,
};
use crate::{Capability, NodeId, NodeKey, now_ms};

pub use second_opinion::{SecondOpinion, second_opinion};

/// Name of the event that carries a part of the log.
const EVENTS: &str = "events";
/// Bytes of signed events in one message. Base64 makes four bytes of three; the rest is reserve.
const MAX_BATCH_BYTES: usize = MAX_EVENT_BYTES / 2;
const MAX_BATCH_EVENTS: usize = 1000;
/// Upper bound of messages with events; gossip delivers the rest.
const MAX_BATCHES: usize = 256;
/// Upper bound of joins in [`JOINS_MS`] with one code, at all nodes together: enough for a family
/// with all its machines, too few for a flood of made-up members.
pub const JOINS_PER_CODE: usize = 12;
/// Upper bound of joins in [`JOINS_MS`] with all codes together.
pub const JOINS: usize = 48;
/// Window of the two limits above, in milliseconds.
pub const JOINS_MS: u64 = 10 * 60 * 1000;
/// Longest text of a key, an id or a signature: 64 bytes in base64, with reserve.
const MAX_ID_TEXT: usize = 96;

/// Descriptor of `Capability::community_join`.
pub fn descriptor() -> CapabilityDescriptor {
    let id = || Kind::text(MAX_ID_TEXT);
    CapabilityDescriptor {
        streaming: true,
        params: Params::none()
            .required("community", id())
            .required("node", id())
            .required("name", Kind::text(MAX_NAME_BYTES))
            .required("invite", id())
            .required("proof", id()),
        limits: CallLimits {
            concurrent: 4,
            concurrent_per_caller: 1,
            seconds: 60,
        },
        ..CapabilityDescriptor::new(
            Capability::community_join(),
            "Admits the holder of an invite to the community, and sends its log.",
            None,
        )
    }
}

/// Handler of `community.join`.
pub struct JoinHandler {
    log: EventLog,
    key: Arc<NodeKey>,
}

impl JoinHandler {
    /// Admits to the community of `log`, signing with `key`.
    pub fn new(log: EventLog, key: Arc<NodeKey>) -> Self {
        Self { log, key }
    }
}

impl Handler for JoinHandler {
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            let request: JoinRequest =
                serde_json::from_value(params).map_err(|e| CallError::bad_request("params", e))?;
            let (log, key) = (self.log.clone(), Arc::clone(&self.key));
            let level = blocking(move || admit(&log, &key, ctx.caller, &request, now_ms())).await?;
            let mut theirs = Heads::empty(self.log.community());
            for _ in 0..MAX_BATCHES {
                let log = self.log.clone();
                let batch = blocking(move || {
                    Ok(log.missing(&theirs, MAX_BATCH_EVENTS, MAX_BATCH_BYTES)?)
                })
                .await?;
                let texts = batch.events.iter().map(|raw| URL_SAFE_NO_PAD.encode(raw));
                out.send(EVENTS, &texts.collect()).await?;
                if !batch.more {
                    break;
                }
                theirs = batch.then;
            }
            Ok(json!({ "level": level }))
        })
    }

    fn authorize_stranger(
        &self,
        caller: &NodeId,
        params: &Value,
    ) -> Result<Option<NodeId>, CallError> {
        let request =
            JoinRequest::deserialize(params).map_err(|e| CallError::bad_request("params", e))?;
        check_proof(&self.log, *caller, &request)?;
        let state = self.log.state();
        let open = named(&state, &request)?.is_open(now_ms());
        Ok(open.then_some(request.invite))
    }
}

/// Runs blocking disk work on tokio's blocking pool.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CallError> + Send + 'static,
) -> Result<T, CallError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(CallError::internal)?
}

/// Verifies the request of `caller` and appends the admission. A caller that is a member already,
/// because an earlier answer was lost, gets its level.
///
/// # Errors
/// `wrong_community`, `unauthorized` if the request is not the caller's own, `bad_request` for an
/// invalid name, `invalid_signature`, `unknown_invite`, `busy` above [`JOINS_PER_CODE`] or
/// [`JOINS`], or the code of the log's refusal: `bad_invite` if the invite has expired or is used
/// up.
pub fn admit(
    log: &EventLog,
    key: &NodeKey,
    caller: NodeId,
    request: &JoinRequest,
    now_ms: u64,
) -> Result<Level, CallError> {
    check_proof(log, caller, request)?;
    let state = log.state();
    if let Some(level) = state.level(&caller) {
        return Ok(level);
    }
    let invite = named(&state, request)?;
    let level = invite.level;
    // Counted in the log, so that admissions by other nodes and before a restart count too.
    let since_ms = now_ms.saturating_sub(JOINS_MS);
    let (all, with_code) = state.joined_since(since_ms, &request.invite);
    if all >= JOINS || with_code >= JOINS_PER_CODE {
        let message = format!(
            "{with_code} joined with this code in the last 10 min, {all} with all codes; at most \
             {JOINS_PER_CODE} and {JOINS} are admitted in that time"
        );
        let busy = CallError::new(Code::BUSY, message);
        return Err(busy.with_hint("try again in 10 minutes"));
    }
    let body = Body::Admitted {
        request: request.clone(),
        level,
    };
    log.append(key, body, now_ms)?;
    Ok(level)
}

/// Checks that a request is for this community, and the caller's own.
fn check_proof(log: &EventLog, caller: NodeId, request: &JoinRequest) -> Result<(), CallError> {
    if request.community != log.community() {
        let message = "the invite is for another community than this node's";
        return Err(CallError::new(Code::new("wrong_community"), message));
    }
    if request.node != caller {
        let message = "the request to join names another node than the one that brings it";
        return Err(CallError::new(Code::UNAUTHORIZED, message));
    }
    // The log accepts more names than a node admits.
    let proof = request
        .verify()
        .and_then(|()| match is_name(&request.name) {
            true => Ok(()),
            false => Err(JoinError::Name),
        });
    proof.map_err(|e| CallError::new(e.code(), e.to_string()))
}

/// The invite that a request names.
fn named<'a>(state: &'a Community, request: &JoinRequest) -> Result<&'a OpenInvite, CallError> {
    state.invite(&request.invite).ok_or_else(|| {
        CallError::new(
            Code::new("unknown_invite"),
            "this node does not know the invite; it may not have heard of it yet",
        )
        .with_hint("try again in a moment, or ask for a new code")
    })
}

/// Converts a refusal of the log for the caller.
impl From<LogError> for CallError {
    fn from(error: LogError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

/// Why joining through a node failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinFailure {
    #[error(transparent)]
    Refused(#[from] CallError),
    /// The received events cannot be stored.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The received log does not make this node a member.
    #[error("the node that answered sent no log in which this node is a member")]
    NotAdmitted,
}

impl JoinFailure {
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(error) => error.code().clone(),
            Self::Log(error) => error.code(),
            Self::NotAdmitted => Code::UNAUTHORIZED,
        }
    }

    /// True if a retry, at this or another member, cannot help: for example, an expired invite is
    /// expired everywhere.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Refused(error) => [
                Code::BAD_INVITE,
                Code::INVALID_SIGNATURE,
                Code::REVOKED,
                Code::BAD_REQUEST,
            ]
            .contains(error.code()),
            Self::Log(_) => true,
            Self::NotAdmitted => false,
        }
    }
}

/// Asks the node `from` behind `client` to admit this node, and stores the received events in
/// `log`, which must belong to the community of the invite code. `received` is called with the
/// number of events so far.
///
/// # Errors
/// [`JoinFailure`].
pub async fn join_through(
    client: &Client,
    from: NodeId,
    request: &JoinRequest,
    log: &EventLog,
    mut received: impl FnMut(usize),
) -> Result<Level, JoinFailure> {
    let params = serde_json::to_value(request).map_err(CallError::internal)?;
    let mut call = client.call(&Capability::community_join(), &params)?;
    let mut count = 0;
    while let Some(event) = call.next().await? {
        let Value::Array(texts) = event.data else {
            continue;
        };
        let raw: Vec<Vec<u8>> = texts
            .iter()
            .filter_map(|text| URL_SAFE_NO_PAD.decode(text.as_str()?).ok())
            .collect();
        count += raw.len();
        let log = log.clone();
        tokio::task::spawn_blocking(move || log.receive(&raw, from, now_ms()))
            .await
            .map_err(CallError::internal)??;
        received(count);
    }
    log.state()
        .level(&request.node)
        .ok_or(JoinFailure::NotAdmitted)
}

#[cfg(test)]
mod tests;
