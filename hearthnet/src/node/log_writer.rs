//! Writes changes of the community to its log. The daemon of this home writes if it runs, else the
//! command itself. Also notifies commands beside a daemon of changes of the log.
//!
//! Only programs of this user reach the local API, and the daemon signs with the keys of the same
//! data directory. A request to the daemon therefore grants no additional right.

use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::calls::{
    CallError, CallLimits, Code, FrameSink, Kind as ParamKind, Params, Registry,
};
use hearthnet_bus::log::{
    Adoption, Body, Finding, Level, MAX_LINE_BYTES, MAX_NUMBER, MAX_SOURCE_BYTES, MAX_SOURCES,
    MAX_USES, Policy,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use zeroize::Zeroize as _;

use super::local_api::{self, Offer};
use crate::cli::secret::MAX_BYTES;
use crate::cli::{Failure, Kind, block_on, blocking};
use crate::home::{Home, Lock, now_ms};

/// Local API call that writes into the community's log.
const NODE_CHANGE: &str = "node.change@1.0";

/// Local API stream that reports every change of the log.
const NODE_CHANGES: &str = "node.changes@1.0";

/// Timeout of a write in seconds. Covers a slow disk and other writers ahead.
const WRITING_S: u32 = 30;

/// Change of the community. Every variant except `Resume` becomes one event of the log.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    Policy(Policy),
    /// Admits nodes that can sign with `invite`.
    Invite {
        invite: NodeId,
        level: Level,
        uses: u32,
        expires_ms: u64,
    },
    /// Ends an invite.
    Withdraw {
        invite: NodeId,
    },
    /// Promotes or demotes a member. Its later events that are dated before this change count only
    /// as far as the new level allows.
    Level {
        node: NodeId,
        level: Level,
    },
    /// Revokes a member. Its events after the last one that is known here do not count.
    Revoke {
        node: NodeId,
    },
    /// Adopts a model, or replaces what the community knows of one.
    Adopt(Adoption),
    /// Drops an adopted model.
    DropModel {
        /// Weights id.
        #[serde(with = "hex::serde")]
        weights: [u8; 32],
    },
    /// Publishes a verdict on a dispute.
    Judge {
        #[serde(with = "hex::serde")]
        dispute: [u8; 32],
        finding: Finding,
    },
    /// Lets the node write again without a sync with another member.
    Resume {},
}

/// Request to write a change.
#[derive(Serialize, Deserialize)]
pub(super) struct ChangeRequest {
    /// Signs with the community's root key, which is stored in this home, instead of the node's
    /// key.
    pub(super) by_root: bool,
    /// Passphrase of a sealed root key. The daemon wipes it after the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) passphrase: Option<String>,
    pub(super) change: Change,
}

impl Drop for ChangeRequest {
    fn drop(&mut self) {
        self.passphrase.zeroize();
    }
}

/// Writes one change: through the daemon of this home if it runs, else in this process, while a
/// lock keeps a daemon from starting. On return the change is stored, and a running daemon has
/// begun to send it.
pub(crate) fn write(home: &Home, by_root: bool, change: Change) -> Result<(), Failure> {
    let mut request = ChangeRequest {
        by_root,
        passphrase: None,
        change,
    };
    if by_root && let Some(passphrase) = home.passphrase()? {
        request.passphrase = Some(passphrase.to_string());
    }
    loop {
        if let Some(_free) = Lock::keep_free(&home.dir)? {
            return store(home, &request);
        }
        if block_on(ask(home, &request))? {
            return Ok(home.log.update()?);
        }
    }
}

fn store(home: &Home, request: &ChangeRequest) -> Result<(), Failure> {
    // This process is the only receiver and writer, so no client of it has seen a later event of a
    // member than the last one that is stored here.
    let body = match request.change.clone() {
        Change::Policy(policy) => Body::PolicyChanged(policy),
        Change::Invite {
            invite,
            level,
            uses,
            expires_ms,
        } => Body::Invited {
            invite,
            level,
            uses,
            expires_ms,
        },
        Change::Withdraw { invite } => Body::InviteWithdrawn {
            invite,
            members: None,
        },
        Change::Level { node, level } => Body::LevelChanged {
            node,
            level,
            last_seq: Some(home.last_seq(&node)),
        },
        Change::Revoke { node } => Body::Revoked {
            node,
            last_seq: home.last_seq(&node),
        },
        Change::Adopt(adoption) => Body::ModelAdopted(adoption),
        Change::DropModel { weights } => Body::ModelDropped { weights },
        Change::Judge { dispute, finding } => Body::Judged { dispute, finding },
        Change::Resume {} => return Ok(home.log.caught_up(now_ms())?),
    };
    match request.by_root {
        false => home.append(&home.key, body),
        true => match home.root_key()? {
            Some(root) => home.append(&root.open(request.passphrase.as_deref())?, body),
            None => Err(Failure::internal("the root key is not in this home")),
        },
    }
}

/// Asks the daemon to write. Returns `false` if it ended before the request.
async fn ask(home: &Home, request: &ChangeRequest) -> Result<bool, Failure> {
    let params = serde_json::to_value(request).map_err(Failure::internal)?;
    let Ok(client) = local_api::connect(&home.dir).await else {
        return match Lock::is_held(&home.dir) {
            true => Err(local_api::silent(&home.dir)),
            false => Ok(false),
        };
    };
    let written = async {
        let call = local_api::call(&client, NODE_CHANGE, &params)?;
        let within = Duration::from_secs(WRITING_S.into());
        call.result_within(within).await
    };
    written.await.map(|_| true).map_err(|error| refusal(&error))
}

/// Maps an error of the daemon to a failure.
fn refusal(error: &CallError) -> Failure {
    let code = error.code().as_str();
    let (kind, message, hint) = match code {
        "not_found" | "version_unsupported" => (
            Kind::Host,
            "the node running here is another version of hearthnet and does not accept changes from this one",
            "stop it and start it again (`hearthnet up`), then repeat the command",
        ),
        "unreachable" | "timeout" | "cancelled" => (
            Kind::Host,
            "the node running here did not confirm the change",
            "`hearthnet log show` shows whether it was written; if not, repeat the command",
        ),
        // The log itself rejects these, whichever process writes.
        "unauthorized" | "revoked" | "bad_invite" | "bad_request" | "log_behind"
        | "model_limit" | "model_not_adopted" | "dispute_limit" | "no_dispute" => {
            (Kind::Community, error.message(), error.hint())
        }
        _ => (Kind::Host, error.message(), error.hint()),
    };
    Failure::new(kind, message).hint(hint).code(match code {
        "not_found" => Code::VERSION_UNSUPPORTED,
        _ => error.code().clone(),
    })
}

/// Keeps the log of this process in sync with the daemon's log, until dropped or until the daemon
/// ends.
pub(crate) fn follow(home: &Home) -> JoinSet<()> {
    let home = home.clone();
    let mut following = JoinSet::new();
    following.spawn(async move {
        if let Err(why) = hear(&home).await {
            tracing::debug!("the daemon's log is no longer followed: {why}");
        }
    });
    following
}

async fn hear(home: &Home) -> Result<(), CallError> {
    let client = local_api::connect(&home.dir).await?;
    let mut changes = local_api::call(&client, NODE_CHANGES, &json!({}))?;
    while changes.next().await?.is_some() {
        let log = home.log.clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || log.update()).await {
            tracing::warn!("the event log could not be read: {error}");
        }
    }
    Ok(())
}

/// Registers the calls for programs on this machine: writing a change, which waits for the first
/// sync (`caught_up`), and the stream of changes.
pub(crate) fn offer(
    registry: &Registry,
    home: &Home,
    caught_up: watch::Receiver<bool>,
) -> Result<(), Failure> {
    let limits = |seconds| CallLimits {
        // As many as connections: all commands and chats of this user count as one caller.
        concurrent: 32,
        concurrent_per_caller: 32,
        seconds,
    };
    let (writer, teller) = (home.clone(), home.clone());
    Offer {
        params: params(),
        limits: limits(WRITING_S),
        ..Offer::new(
            NODE_CHANGE,
            "Writes a change of the community into its log, for programs on the node's own machine.",
            move |request, _| written(writer.clone(), caught_up.clone(), request),
        )
    }
    .register(registry)?;
    Offer {
        streaming: true,
        // A chat that answers by itself keeps the stream open for as long as it lasts.
        limits: limits(u32::MAX),
        ..Offer::new(
            NODE_CHANGES,
            "Reports every change of the log, for programs on the node's own machine.",
            move |_, out| tell(teller.clone(), out),
        )
    }
    .register(registry)
}

fn params() -> Params {
    let key = || ParamKind::text(hearthnet_bus::MAX_TEXT);
    let level = || ParamKind::one_of(&["member", "trusted", "anchor"]);
    let count = |max: i64| ParamKind::Integer { min: 0, max };
    let one = |fields: Params| ParamKind::Object { fields };
    let policy = Params::none()
        .required("invite", level())
        .required("research", ParamKind::Flag);
    let invite = Params::none()
        .required("invite", key())
        .required("level", level())
        .required("uses", count(i64::from(MAX_USES)))
        .required("expires_ms", count(i64::MAX));
    let node = Params::none().required("node", key());
    let hash = || ParamKind::text(64);
    let number = || count(i64::try_from(MAX_NUMBER).unwrap_or(i64::MAX));
    let source = ParamKind::text(MAX_SOURCE_BYTES);
    let adoption = Params::none()
        .required("weights", hash())
        .required("name", ParamKind::text(MAX_LINE_BYTES))
        .required("layers", number())
        .required("file_bytes", number())
        .required("head", hash())
        .required("head_bytes", number())
        .required("manifest_bytes", number())
        .required("pieces", hash())
        .required("sources", ParamKind::list(MAX_SOURCES, source));
    let verdict = Params::none().required("dispute", hash()).required(
        "finding",
        ParamKind::one_of(&["accused", "witness", "both", "none", "withdrawn"]),
    );
    let change = Params::none()
        .optional("policy", one(policy))
        .optional("invite", one(invite))
        .optional("withdraw", one(Params::none().required("invite", key())))
        .optional("level", one(node.clone().required("level", level())))
        .optional("revoke", one(node))
        .optional("adopt", one(adoption))
        .optional(
            "drop_model",
            one(Params::none().required("weights", hash())),
        )
        .optional("judge", one(verdict))
        .optional("resume", one(Params::none()));
    Params::none()
        .required("by_root", ParamKind::Flag)
        .optional("passphrase", ParamKind::text(MAX_BYTES))
        .required("change", one(change))
}

async fn written(
    home: Home,
    caught_up: watch::Receiver<bool>,
    request: Value,
) -> Result<Value, CallError> {
    let request: ChangeRequest =
        serde_json::from_value(request).map_err(|e| CallError::bad_request("params", e))?;
    store_when_synced(home, caught_up, request).await?;
    Ok(json!({}))
}

/// Writes a change in the daemon itself, once its log has been synced.
pub(super) async fn store_when_synced(
    home: Home,
    mut caught_up: watch::Receiver<bool>,
    request: ChangeRequest,
) -> Result<(), Failure> {
    // An error means that the node is ending.
    let _ = caught_up.wait_for(|it| *it).await;
    blocking(move || store(&home, &request)).await
}

/// Reports once at the start, since earlier changes may have been missed, and then after every
/// change.
async fn tell(home: Home, out: FrameSink) -> Result<Value, CallError> {
    let mut changes = home.log.changes();
    loop {
        out.send("changed", &json!({})).await?;
        if changes.changed().await.is_err() {
            return Ok(json!({}));
        }
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::log::Record;
    use hearthnet_bus::testing;

    use super::*;
    use crate::home::community::ROOT_KEY;
    use crate::models::adopted::adoption_for_test;

    #[test]
    fn a_refusal_of_the_daemon_ends_the_command_as_the_log_itself_would() {
        for (code, kind, told) in [
            ("unauthorized", Kind::Community, "unauthorized"),
            ("revoked", Kind::Community, "revoked"),
            ("bad_invite", Kind::Community, "bad_invite"),
            ("bad_request", Kind::Community, "bad_request"),
            ("log_behind", Kind::Community, "log_behind"),
            ("model_limit", Kind::Community, "model_limit"),
            ("model_not_adopted", Kind::Community, "model_not_adopted"),
            ("dispute_limit", Kind::Community, "dispute_limit"),
            ("no_dispute", Kind::Community, "no_dispute"),
            ("unreachable", Kind::Host, "unreachable"),
            ("timeout", Kind::Host, "timeout"),
            ("cancelled", Kind::Host, "cancelled"),
            ("version_unsupported", Kind::Host, "version_unsupported"),
            ("not_found", Kind::Host, "version_unsupported"),
            ("log_busy", Kind::Host, "log_busy"),
        ] {
            let failure = refusal(&CallError::new(code.into(), "no").with_hint("do this"));
            assert_eq!(failure.kind, kind, "{code}");
            assert!(failure.has_code(told), "{code}: {failure:?}");
            assert!(failure.hint_text().is_some(), "{code}");
        }
    }

    #[test]
    fn events_written_before_a_revocation_still_count() {
        let founded = testing::Home::founded(testing::key(1), true);
        let (home, node) = (Home::for_test(&founded), testing::id(1));
        let root = testing::key(testing::ROOT);
        root.write_new(&home.dir.join(ROOT_KEY)).unwrap();
        // Ordered before the change by Lamport time, but written after it.
        for name in ["attic", "cellar"] {
            let name = name.to_owned();
            home.append(&home.key, Body::Named { name }).unwrap();
        }
        let request = ChangeRequest {
            by_root: true,
            passphrase: None,
            change: Change::Revoke { node },
        };
        store(&home, &request).unwrap();
        let mut last = None;
        let read = |record: Record| {
            last = Some(record.event.body);
            Ok(true)
        };
        home.log.records(read).unwrap();
        assert_eq!(last, Some(Body::Revoked { node, last_seq: 2 }));
    }

    #[test]
    fn every_change_passes_the_local_api_unchanged() {
        let node = testing::id(1);
        let level = Level::Trusted;
        for change in [
            Change::Policy(Policy::default()),
            Change::Invite {
                invite: node,
                level,
                uses: 3,
                expires_ms: 1_800_000_000_000,
            },
            Change::Withdraw { invite: node },
            Change::Level { node, level },
            Change::Revoke { node },
            Change::Adopt(Adoption {
                sources: vec!["hf:owner/repository/tiny.gguf".to_owned()],
                ..adoption_for_test("tiny", 3)
            }),
            Change::DropModel { weights: [3; 32] },
            Change::Resume {},
        ] {
            let request = ChangeRequest {
                by_root: true,
                passphrase: Some("correct horse".to_owned()),
                change,
            };
            let asked = serde_json::to_value(&request).unwrap();
            params().check(&asked).unwrap();
            let read: ChangeRequest = serde_json::from_value(asked.clone()).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), asked);
        }
        let two = json!({ "by_root": false, "change": {
            "resume": {}, "withdraw": { "invite": node },
        } });
        params().check(&two).unwrap();
        assert!(serde_json::from_value::<ChangeRequest>(two).is_err());
    }
}
