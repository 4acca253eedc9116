//! Changes of the community, written by the one process that may: the daemon of this home where it
//! runs, else the command itself. And word for commands beside a daemon that the log has changed.
//!
//! Only programs of this user reach the local API, and the daemon writes what it is asked to with
//! the keys of the same data directory: nobody gains a right by asking it.

use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::calls::{
    CallError, CallLimits, Code, FrameSink, Kind as ParamKind, Params, Registry,
};
use hearthnet_bus::log::{Body, Level, MAX_USES, Policy};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use zeroize::Zeroize as _;

use crate::community::{Home, now_ms};
use crate::failure::{Failure, Kind};
use crate::local_api::{self, Offer, internal};
use crate::lock::Lock;
use crate::runtime::block_on;
use crate::secret::MAX_BYTES;

/// Writes into the community's log, for programs on this machine only.
const NODE_CHANGE: &str = "node.change@1.0";

/// Says whenever the log has changed, for as long as the call lasts; for programs on this machine only.
const NODE_CHANGES: &str = "node.changes@1.0";

/// How long it may take to write, in seconds: a disk that is slow, behind others that write.
const WRITING_S: u32 = 30;

/// What may be changed: each but the last is one event of the log.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    /// What the community has agreed on.
    Policy(Policy),
    /// Whoever can sign with `invite` may join.
    Invite {
        invite: NodeId,
        level: Level,
        uses: u32,
        expires_ms: u64,
    },
    /// Nobody joins with it any more.
    Withdraw { invite: NodeId },
    /// A member is promoted or demoted. What it said after what is here of it, in a time before this,
    /// counts for no more than the new level allows.
    Level { node: NodeId, level: Level },
    /// A member is put out; what it said after what is here of it does not count.
    Revoke { node: NodeId },
    /// The node goes on without asking others what its copy of the log lacks.
    Resume {},
}

/// A change, and with which key it is signed.
#[derive(Serialize, Deserialize)]
struct Order {
    /// The community's root key, which lies in this home, and not the node's own.
    by_root: bool,
    /// What opens it, if it is sealed. The daemon forgets it with the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    passphrase: Option<String>,
    change: Change,
}

impl Drop for Order {
    fn drop(&mut self) {
        self.passphrase.zeroize();
    }
}

/// Writes one change: the daemon of this home does where one runs, else this command, and no daemon
/// starts meanwhile. When this returns it is stored, and a daemon has begun to pass it on.
pub(crate) fn write(home: &Home, by_root: bool, change: Change) -> Result<(), Failure> {
    let mut order = Order {
        by_root,
        passphrase: None,
        change,
    };
    if by_root && let Some(passphrase) = home.passphrase()? {
        order.passphrase = Some(passphrase.to_string());
    }
    loop {
        if let Some(_free) = Lock::keep_free(&home.dir)? {
            return store(home, &order);
        }
        if block_on(ask(home, &order))? {
            return Ok(home.log.update()?);
        }
    }
}

/// Writes into the log of this process.
fn store(home: &Home, order: &Order) -> Result<(), Failure> {
    // The last event that is here of a member: this process is the one that receives and writes, so
    // nobody who asks it has seen a later one.
    let seen = |node| {
        home.log
            .heads()
            .authors
            .get(&node)
            .map_or(0, |head| head.seq)
    };
    let body = match order.change {
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
            last_seq: Some(seen(node)),
        },
        Change::Revoke { node } => Body::Revoked {
            node,
            last_seq: seen(node),
        },
        Change::Resume {} => return Ok(home.log.caught_up(now_ms())?),
    };
    match order.by_root {
        false => home.append(&home.key, body),
        true => match home.root_key()? {
            Some(root) => home.append(&root.open(order.passphrase.as_deref())?, body),
            None => Err(Failure::internal("the root key is not in this home")),
        },
    }
}

/// Has the daemon write; `false` if it ended before it was asked.
async fn ask(home: &Home, order: &Order) -> Result<bool, Failure> {
    let params = serde_json::to_value(order).map_err(Failure::internal)?;
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

/// Why the daemon did not write, or did not say that it has.
fn refusal(error: &CallError) -> Failure {
    let code = error.code().as_str();
    let known = |kind, message: &str, hint: &str| Failure::new(kind, message).hint(hint);
    let failure = match code {
        "not_found" | "version_unsupported" => known(
            Kind::Host,
            "the node that runs here is of another version of hearthnet, and takes no changes from this one",
            "stop it and start it again (`hearthnet serve`), then repeat the command",
        ),
        "unreachable" | "timeout" | "cancelled" => known(
            Kind::Host,
            "the node that runs here did not say whether it has written the change",
            "`hearthnet log show` shows whether it has; if not, repeat the command",
        ),
        // What the log does not take, whoever asks.
        "unauthorized" | "revoked" | "bad_invite" | "bad_request" | "log_behind" => {
            known(Kind::Community, error.message(), error.hint())
        }
        _ => known(Kind::Host, error.message(), error.hint()),
    };
    failure.code(match code {
        "not_found" => Code::VERSION_UNSUPPORTED,
        _ => error.code().clone(),
    })
}

/// Keeps the log of this process as that of the daemon of this home is, until dropped or until the
/// daemon ends.
pub(crate) fn follow(home: &Home) -> JoinSet<()> {
    let home = home.clone();
    let mut following = JoinSet::new();
    following.spawn(async move {
        if let Err(why) = hear(&home).await {
            tracing::debug!("nothing is heard of the daemon's log any more: {why}");
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

/// Makes the daemon write for programs on this machine, once it has `caught_up` with what others know
/// when it starts, and tell them of changes.
pub(crate) fn offer(
    registry: &Registry,
    home: &Home,
    caught_up: watch::Receiver<bool>,
) -> Result<(), Failure> {
    let limits = |seconds| CallLimits {
        // As many as connections: all commands and chats are one caller's.
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
            move |order, _| written(writer.clone(), caught_up.clone(), order),
        )
    }
    .register(registry)?;
    Offer {
        streaming: true,
        // For as long as a chat lasts that answers by itself.
        limits: limits(u32::MAX),
        ..Offer::new(
            NODE_CHANGES,
            "Tells programs on the node's own machine whenever the log has changed.",
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
    let change = Params::none()
        .optional("policy", one(policy))
        .optional("invite", one(invite))
        .optional("withdraw", one(Params::none().required("invite", key())))
        .optional("level", one(node.clone().required("level", level())))
        .optional("revoke", one(node))
        .optional("resume", one(Params::none()));
    Params::none()
        .required("by_root", ParamKind::Flag)
        .optional("passphrase", ParamKind::text(MAX_BYTES))
        .required("change", one(change))
}

/// Writes what a program here asks for.
async fn written(
    home: Home,
    mut caught_up: watch::Receiver<bool>,
    order: Value,
) -> Result<Value, CallError> {
    let order: Order =
        serde_json::from_value(order).map_err(|e| CallError::bad_request("params", e))?;
    // It ends with the node.
    let _ = caught_up.wait_for(|it| *it).await;
    // The disk may be slow.
    let stored = tokio::task::spawn_blocking(move || store(&home, &order)).await;
    stored.map_err(internal)??;
    Ok(json!({}))
}

/// Says so at once, for what came before was perhaps not seen, and with every change.
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
    use std::sync::Arc;

    use hearthnet_bus::NodeKey;
    use hearthnet_bus::log::{EventLog, Record};

    use super::*;
    use crate::community::ROOT_KEY;

    #[test]
    fn what_a_member_had_said_when_the_change_is_written_still_counts() {
        let dir = tempfile::tempdir().unwrap();
        let (root, own) = (NodeKey::generate().unwrap(), NodeKey::generate().unwrap());
        let node = own.id();
        root.write_new(&dir.path().join(ROOT_KEY)).unwrap();
        let policy = Policy::default();
        let log = EventLog::create(dir.path(), &root, node, "Elm", policy, now_ms()).unwrap();
        let home = Home::new(dir.path().to_owned(), Arc::new(own), log);
        let change = Change::Revoke { node };
        // Ordered before this, written after it.
        for name in ["attic", "cellar"] {
            let name = name.to_owned();
            home.append(&home.key, Body::Named { name }).unwrap();
        }
        let by_root = true;
        let passphrase = None;
        let order = Order {
            by_root,
            passphrase,
            change,
        };
        store(&home, &order).unwrap();
        let mut last = None;
        let read = |record: Record| {
            last = Some(record.event.body);
            Ok(true)
        };
        home.log.records(read).unwrap();
        assert_eq!(last, Some(Body::Revoked { node, last_seq: 2 }));
    }

    #[test]
    fn every_change_is_one_that_the_local_api_takes_and_reads_as_it_was_written() {
        let node = NodeKey::generate().unwrap().id();
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
            Change::Resume {},
        ] {
            let order = Order {
                by_root: true,
                passphrase: Some("correct horse".to_owned()),
                change,
            };
            let asked = serde_json::to_value(&order).unwrap();
            params().check(&asked).unwrap();
            let read: Order = serde_json::from_value(asked.clone()).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), asked);
        }
        let two = json!({ "by_root": false, "change": {
            "resume": {}, "withdraw": { "invite": node },
        } });
        params().check(&two).unwrap();
        assert!(serde_json::from_value::<Order>(two).is_err());
    }
}
