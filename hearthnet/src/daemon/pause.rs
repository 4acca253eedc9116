//! Pause by the owner: `hearthnet pause` and `resume`, with the calls of the local API by which they
//! reach a running daemon, on both sides; and the pause and the quiet hours of the page.

use std::sync::Arc;

use hearthnet_bus::calls::{CallError, Kind as ParamKind, Params};
use serde_json::{Value, json};

use super::manners::{Give, Why};
use super::watch::{Watch, reason};
use crate::cli::{Failure, Kind, block_on};
use crate::home::{Home, Lock, OwnHours, Paused, now_ms};
use crate::node::DaemonNode;
use crate::node::local_api::{self, Offer, answer};
use crate::page::{Pause, PauseState, QuietState};

/// Local API calls that pause serving layers, and end that.
const NODE_PAUSE: &str = "node.pause@1.0";
const NODE_RESUME: &str = "node.resume@1.0";

/// Sets or ends the request of the owner: by the daemon if it runs, else in the data directory,
/// for the next start.
pub(crate) fn request(home: &Home, paused: Option<Paused>) -> Result<(), Failure> {
    if !Lock::is_held(&home.dir) {
        return Paused::write(paused, &home.dir);
    }
    let (name, params) = match &paused {
        Some(paused) => (NODE_PAUSE, serde_json::to_value(paused)),
        None => (NODE_RESUME, Ok(json!({}))),
    };
    let params = params.map_err(Failure::internal)?;
    block_on(async {
        let asking = async {
            let client = local_api::connect(&home.dir).await?;
            local_api::call(&client, name, &params)?.result().await
        };
        match tokio::time::timeout(local_api::CALL_TIMEOUT, asking).await {
            Ok(answer) => answer
                .map(drop)
                .map_err(|error| Failure::new(Kind::Host, error.message()).hint(error.hint())),
            Err(_) => Err(local_api::silent(&home.dir)),
        }
    })
}

/// The owner's pause and quiet hours of a running daemon.
impl Pause for Watch {
    fn state(&self) -> PauseState {
        let request = *self.shared.paused.lock();
        let request = request.filter(|request| request.holds_at(now_ms()));
        let give = *self.give().borrow();
        PauseState {
            paused: request.is_some(),
            pause_reason: match (request, give) {
                (Some(paused), _) => Some(paused.to_string()),
                // The next reading ends that.
                (None, Give::Serve | Give::Pause(Why::Paused(_))) => None,
                (None, Give::Pause(why)) => Some(reason(&why).to_string()),
            },
        }
    }

    fn set(&self, request: Option<Paused>) -> Result<(), Failure> {
        // In force even if the disk is full.
        *self.shared.paused.lock() = request;
        Paused::write(request, &self.dir)
    }

    fn quiet_hours(&self) -> QuietState {
        let own = *self.shared.own_hours.lock();
        let configured = OwnHours(self.configured_hours);
        QuietState {
            hours: own.unwrap_or(configured).to_string(),
            configured: configured.to_string(),
            is_own: own.is_some(),
        }
    }

    fn set_quiet_hours(&self, own: Option<OwnHours>) -> Result<(), Failure> {
        // In force even if the disk is full.
        *self.shared.own_hours.lock() = own;
        OwnHours::write(own, &self.dir)
    }
}

/// Registers the calls.
pub(super) fn offer(daemon_node: &DaemonNode, watch: &Arc<Watch>) -> Result<(), Failure> {
    let registry = daemon_node.node.call_server().registry();
    let pausing = Arc::clone(watch);
    Offer {
        params: Params::none().optional(
            "until_ms",
            ParamKind::Integer {
                min: 0,
                max: i64::MAX,
            },
        ),
        ..Offer::new(
            NODE_PAUSE,
            "Serves no layers to others until a time or `node.resume`, for programs on the node's own machine.",
            move |params, _| set(Arc::clone(&pausing), Some(params)),
        )
    }
    .register(registry)?;
    let resuming = Arc::clone(watch);
    Offer::new(
        NODE_RESUME,
        "Serves layers to others again after `node.pause`, for programs on the node's own machine.",
        move |_, _| set(Arc::clone(&resuming), None),
    )
    .register(registry)
}

async fn set(watch: Arc<Watch>, params: Option<Value>) -> Result<Value, CallError> {
    let paused: Option<Paused> = match params {
        Some(params) => serde_json::from_value(params)
            .map(Some)
            .map_err(|e| CallError::bad_request("params", e))?,
        None => None,
    };
    let written = tokio::task::spawn_blocking(move || watch.set(paused)).await;
    written.map_err(local_api::internal)??;
    answer(&json!({}))
}
