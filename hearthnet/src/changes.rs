//! Changes of the community, written by the one process that may: the daemon of this home where it
//! runs, else the command itself. And word for commands beside a daemon that the log has changed.
//!
//! Only programs of this user reach the local API, and the daemon writes what it is asked to with
//! the keys of the same data directory: nobody gains a right by asking it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use hearthnet_bus::calls::{
    CallContext, CallError, CallLimits, CapabilityDescriptor, Code, FrameSink, Handler,
    Kind as ParamKind, Params, Registry, Trust,
};
use hearthnet_bus::log::{Body, Level, MAX_USES, Policy};
use hearthnet_bus::{Capability, NodeId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::community::{Home, log_failure, now_ms};
use crate::failure::{Failure, Kind};
use crate::local_api;
use crate::lock::Lock;
use crate::runtime::block_on;

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
    /// A member is promoted or demoted. What it said after `last_seq`, in a time before this, counts
    /// for no more than the new level allows.
    Level {
        node: NodeId,
        level: Level,
        last_seq: u64,
    },
    /// A member is put out; what it said after `last_seq` does not count.
    Revoke { node: NodeId, last_seq: u64 },
    /// The node goes on without asking others what its copy of the log lacks.
    Resume {},
}

/// A change, and with which key it is signed.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    /// The community's root key, which lies in this home, and not the node's own.
    by_root: bool,
    change: Change,
}

/// Writes one change: the daemon of this home does where one runs, else this command, and no daemon
/// starts meanwhile. When this returns it is stored, and a daemon has begun to pass it on.
pub(crate) fn write(home: &Home, by_root: bool, change: Change) -> Result<(), Failure> {
    let order = Order { by_root, change };
    loop {
        if let Some(_free) = Lock::keep_free(&home.dir)? {
            return store(home, &order);
        }
        if block_on(ask(home, &order))? {
            return home.log.update().map_err(|e| log_failure(&home.dir, &e));
        }
    }
}

/// Writes into the log of this process.
fn store(home: &Home, order: &Order) -> Result<(), Failure> {
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
        Change::Withdraw { invite } => Body::InviteWithdrawn { invite },
        Change::Level {
            node,
            level,
            last_seq,
        } => Body::LevelChanged {
            node,
            level,
            last_seq: Some(last_seq),
        },
        Change::Revoke { node, last_seq } => Body::Revoked { node, last_seq },
        Change::Resume {} => {
            let resumed = home.log.caught_up(now_ms());
            return resumed.map_err(|e| log_failure(&home.dir, &e));
        }
    };
    match order.by_root {
        false => home.append(&home.key, body),
        true => match home.root_key()? {
            Some(root) => home.append(&root, body),
            None => Err(Failure::internal("the root key is not in this home")),
        },
    }
}

/// Has the daemon write; `false` if it ended before it was asked.
async fn ask(home: &Home, order: &Order) -> Result<bool, Failure> {
    let params = serde_json::to_value(order).map_err(Failure::internal)?;
    let capability: Capability = NODE_CHANGE.parse().map_err(Failure::internal)?;
    let Ok(client) = local_api::connect(&home.dir).await else {
        return match Lock::is_held(&home.dir) {
            true => Err(local_api::silent(&home.dir)),
            false => Ok(false),
        };
    };
    let answer = match client.call(&capability, &params) {
        Ok(call) => {
            call.result_within(Duration::from_secs(WRITING_S.into()))
                .await
        }
        Err(error) => Err(error),
    };
    match answer {
        Ok(_) => Ok(true),
        Err(error) => Err(refusal(&error)),
    }
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

/// Keeps the log of this process as the daemon's is, until dropped or until the daemon ends.
pub(crate) struct Follower(tokio::task::JoinHandle<()>);

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Follows the daemon that runs on this home.
pub(crate) fn follow(home: &Home) -> Follower {
    let home = home.clone();
    Follower(tokio::spawn(async move {
        if let Err(why) = hear(&home).await {
            tracing::debug!("nothing is heard of the daemon's log any more: {why}");
        }
    }))
}

async fn hear(home: &Home) -> Result<(), CallError> {
    let capability: Capability = NODE_CHANGES
        .parse()
        .map_err(|e| CallError::bad_request("capability", e))?;
    let client = local_api::connect(&home.dir).await?;
    let mut changes = client.call(&capability, &json!({}))?;
    while changes.next().await?.is_some() {
        let log = home.log.clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || log.update()).await {
            tracing::warn!("the event log could not be read: {error}");
        }
    }
    Ok(())
}

/// The daemon's side.
struct Changes {
    home: Home,
}

/// Makes the daemon write for programs on this machine, and tell them of changes.
pub(crate) fn offer(registry: &Registry, home: &Home) -> Result<(), Failure> {
    let changes = Arc::new(Changes { home: home.clone() });
    let register = |name: &str, what: &str, params: Params, seconds: u32| {
        let descriptor = CapabilityDescriptor {
            params,
            streaming: name == NODE_CHANGES,
            limits: CallLimits {
                // As many as connections: all commands and chats are one caller's.
                concurrent: 32,
                concurrent_per_caller: 32,
                seconds,
            },
            ..CapabilityDescriptor::new(
                name.parse().map_err(Failure::internal)?,
                what,
                Trust::Member,
            )
        };
        registry
            .register(descriptor, Arc::clone(&changes) as _)
            .map_err(Failure::internal)
    };
    register(
        NODE_CHANGE,
        "Writes a change of the community into its log, for programs on the node's own machine.",
        params(),
        WRITING_S,
    )?;
    register(
        NODE_CHANGES,
        "Tells programs on the node's own machine whenever the log has changed.",
        Params::none(),
        // For as long as a chat lasts that answers by itself.
        u32::MAX,
    )
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
    let set_level = Params::none()
        .required("node", key())
        .required("level", level())
        .required("last_seq", count(i64::MAX));
    let revoke = Params::none()
        .required("node", key())
        .required("last_seq", count(i64::MAX));
    let change = Params::none()
        .optional("policy", one(policy))
        .optional("invite", one(invite))
        .optional("withdraw", one(Params::none().required("invite", key())))
        .optional("level", one(set_level))
        .optional("revoke", one(revoke))
        .optional("resume", one(Params::none()));
    Params::none()
        .required("by_root", ParamKind::Flag)
        .required("change", one(change))
}

impl Handler for Changes {
    fn call(
        &self,
        ctx: CallContext,
        params: Value,
        out: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        Box::pin(async move {
            ctx.require_local("change the community through it")?;
            if ctx.capability.to_string() == NODE_CHANGES {
                return self.tell(&out).await;
            }
            let order: Order =
                serde_json::from_value(params).map_err(|e| CallError::bad_request("params", e))?;
            let home = self.home.clone();
            // The disk may be slow.
            let stored = tokio::task::spawn_blocking(move || store(&home, &order)).await;
            stored
                .map_err(|e| CallError::new(Code::INTERNAL, e.to_string()))?
                .map_err(|why| CallError::from(&why))?;
            Ok(json!({}))
        })
    }
}

impl Changes {
    /// Says so at once, for what came before was perhaps not seen, and with every change.
    async fn tell(&self, out: &FrameSink) -> Result<Value, CallError> {
        let mut changes = self.home.log.changes();
        loop {
            out.send("changed", &json!({})).await?;
            if changes.changed().await.is_err() {
                return Ok(json!({}));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_bus::NodeKey;

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
            Change::Level {
                node,
                level,
                last_seq: 7,
            },
            Change::Revoke { node, last_seq: 7 },
            Change::Resume {},
        ] {
            let order = Order {
                by_root: true,
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
        serde_json::from_value::<Order>(two).unwrap_err();
    }
}
