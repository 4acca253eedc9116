//! `community.join`: how a stranger with an invite code becomes a member.
//!
//! The joiner calls any trusted member with its [`JoinRequest`]. That member appends the
//! admission, if the invite allows it, and sends the log along, so that the joiner leaves
//! as somebody who knows the community:
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
//! The member that answers need not be trusted by the joiner: what it sends either verifies
//! or is refused, and the request admits nobody else. What it may have kept back, others are asked for
//! (`second_opinion.rs`).

mod second_opinion;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::community::invite::{JoinError, JoinRequest, MAX_NAME_BYTES, is_name};
use crate::community::log::{Body, Community, EventLog, Heads, Level, LogError, OpenInvite};
use crate::node::access::is_open;
use crate::node::calls::{
    Answering, CallContext, CallError, CallLimits, CapabilityDescriptor, Client, Code, FrameSink,
    Handler, Kind, MAX_EVENT_BYTES, Params, Trust,
};
use crate::{Capability, NodeId, NodeKey};

pub use second_opinion::{SecondOpinion, second_opinion};

/// The event that carries a part of the log.
const EVENTS: &str = "events";
/// Bytes of signed events in one message: base64 makes four of three, and the rest is room.
const MAX_BATCH_BYTES: usize = MAX_EVENT_BYTES / 2;
/// Events in one message.
const MAX_BATCH_EVENTS: usize = 1000;
/// Most messages of log that are sent along; what is left comes by gossip.
const MAX_BATCHES: usize = 256;
/// How many may join in [`JOINS_MS`] with one code, through whichever node: a family with all its
/// machines, and not the crowd that somebody makes up while nobody looks. Who comes after them
/// waits.
pub const JOINS_PER_CODE: usize = 12;
/// How many may join in that time with all codes together.
pub const JOINS: usize = 48;
/// The time that is looked back, in milliseconds.
pub const JOINS_MS: u64 = 10 * 60 * 1000;
/// Longest text of a key, an id or a signature in a request: 64 bytes in base64, and room.
const MAX_ID_TEXT: usize = 96;

/// What `Capability::community_join` is.
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
            "Admits whoever holds an invite to the community, and sends its log.",
            Trust::Anyone,
        )
    }
}

/// Admits joiners.
pub struct JoinHandler {
    log: EventLog,
    key: Arc<NodeKey>,
    now_ms: fn() -> u64,
}

impl JoinHandler {
    /// Admits to the community of `log`, in the name of `key`. `now_ms` tells the Unix time.
    pub fn new(log: EventLog, key: Arc<NodeKey>, now_ms: fn() -> u64) -> Self {
        Self { log, key, now_ms }
    }
}

impl Handler for JoinHandler {
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            let request: JoinRequest =
                serde_json::from_value(params).map_err(|e| CallError::bad_request("params", e))?;
            let (log, key, now_ms) = (self.log.clone(), Arc::clone(&self.key), (self.now_ms)());
            let level = blocking(move || admit(&log, &key, ctx.caller, &request, now_ms)).await?;
            let mut theirs = Heads::empty(self.log.community());
            for _ in 0..MAX_BATCHES {
                let log = self.log.clone();
                let batch = blocking(move || {
                    log.missing(&theirs, MAX_BATCH_EVENTS, MAX_BATCH_BYTES)
                        .map_err(|e| log_error(&e))
                })
                .await?;
                let texts: Vec<String> = batch
                    .events
                    .iter()
                    .map(|raw| URL_SAFE_NO_PAD.encode(raw))
                    .collect();
                out.send(EVENTS, &json!(texts)).await?;
                if !batch.more {
                    break;
                }
                theirs = batch.then;
            }
            Ok(json!({ "level": level }))
        })
    }

    fn vouches(&self, caller: &NodeId, params: &Value) -> Result<Option<NodeId>, CallError> {
        let request =
            JoinRequest::deserialize(params).map_err(|e| CallError::bad_request("params", e))?;
        check_proof(&self.log, *caller, &request)?;
        let state = self.log.state();
        let open = is_open(named(&state, &request)?, (self.now_ms)());
        Ok(open.then_some(request.invite))
    }
}

/// Runs what waits for the disk beside the tasks that must not.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CallError> + Send + 'static,
) -> Result<T, CallError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(CallError::internal)?
}

/// Checks a request that `caller` brings, and appends the admission. A member that asks
/// again, because the answer was lost, gets the same answer.
///
/// # Errors
/// `wrong_community`, `unauthorized` if the request is not the caller's own, `bad_request` for
/// an impossible name, `invalid_signature`, `unknown_invite`, `busy` while more join than
/// [`JOINS_PER_CODE`] and [`JOINS`], or the code that the log refuses with: `bad_invite` for one that
/// expired or is used up.
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
    // By the log, and so also what other nodes admitted, and this one before it was started.
    let since_ms = now_ms.saturating_sub(JOINS_MS);
    let (all, with_code) = state.joined_since(since_ms, &request.invite);
    if all >= JOINS || with_code >= JOINS_PER_CODE {
        let message = format!(
            "{with_code} joined with this code in the last 10 min, {all} with all codes: more than \
             {JOINS_PER_CODE} and {JOINS} at a time are not let in"
        );
        let busy = CallError::new(Code::BUSY, message);
        return Err(busy.with_hint("try again in 10 minutes"));
    }
    let body = Body::Admitted {
        request: request.clone(),
        level,
    };
    log.append(key, body, now_ms).map_err(|e| log_error(&e))?;
    Ok(level)
}

/// Whether a request is for this community, and the caller's own.
fn check_proof(log: &EventLog, caller: NodeId, request: &JoinRequest) -> Result<(), CallError> {
    if request.community != log.community() {
        let message = "the invite is for another community than this node's";
        return Err(CallError::new(Code::new("wrong_community"), message));
    }
    if request.node != caller {
        let message = "the request to join names another node than the one that brings it";
        return Err(CallError::new(Code::UNAUTHORIZED, message));
    }
    // A log takes more names than a node lets in.
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

/// A refusal of the log as the caller hears it.
fn log_error(error: &LogError) -> CallError {
    CallError::new(error.code(), error.to_string())
}

/// Why joining through a node did not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinFailure {
    /// The node refused, or the call failed.
    #[error("{0}")]
    Refused(CallError),
    /// What the node sent cannot be stored here.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The node sent no log that makes this node a member.
    #[error("the node that answered sent no log in which this node is a member")]
    NotAdmitted,
}

impl JoinFailure {
    /// The stable code.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(error) => error.code().clone(),
            Self::Log(error) => error.code(),
            Self::NotAdmitted => Code::UNAUTHORIZED,
        }
    }

    /// Whether an honest node of the community would not refuse in this way and another one
    /// or the same one later admit: an invite that expired or was used up is so everywhere.
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

/// Asks the node behind `client`, which is `from`, to admit this one, and takes the log that
/// it sends into `log`, whose community is that of the code. `received` hears how many
/// events have come.
///
/// # Errors
/// [`JoinFailure`].
pub async fn join_through(
    client: &Client,
    from: NodeId,
    request: &JoinRequest,
    log: &EventLog,
    now_ms: fn() -> u64,
    mut received: impl FnMut(usize),
) -> Result<Level, JoinFailure> {
    let internal = |e: &dyn std::fmt::Display| JoinFailure::Refused(CallError::internal(e));
    let params = serde_json::to_value(request).map_err(|e| internal(&e))?;
    let mut call = client
        .call(&Capability::community_join(), &params)
        .map_err(JoinFailure::Refused)?;
    let mut count = 0;
    while let Some(event) = call.next().await.map_err(JoinFailure::Refused)? {
        let Value::Array(texts) = event.data else {
            continue;
        };
        let raw: Vec<Vec<u8>> = texts
            .iter()
            .filter_map(|text| URL_SAFE_NO_PAD.decode(text.as_str()?).ok())
            .collect();
        count += raw.len();
        let log = log.clone();
        let now = now_ms();
        tokio::task::spawn_blocking(move || log.receive(&raw, from, now))
            .await
            .map_err(|e| internal(&e))??;
        received(count);
    }
    log.state()
        .level(&request.node)
        .ok_or(JoinFailure::NotAdmitted)
}

#[cfg(test)]
mod tests;
