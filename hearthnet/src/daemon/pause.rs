//! `hearthnet pause` and `resume`: the calls of the local API with which a command reaches a
//! running daemon, on both sides.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_bus::calls::{CallError, Kind as ParamKind, Params};
use serde_json::{Value, json};

use super::watch::Watch;
use crate::cli::{Failure, Kind, block_on};
use crate::home::{Home, Lock, Paused};
use crate::node::DaemonNode;
use crate::node::local_api::{self, Offer, answer};

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

/// Registers the calls.
pub(super) fn offer(
    daemon_node: &DaemonNode,
    watch: &Arc<Watch>,
    dir: &Path,
) -> Result<(), Failure> {
    let registry = daemon_node.node.call_server().registry();
    let (pausing, at) = (Arc::clone(watch), dir.to_owned());
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
            move |params, _| set(Arc::clone(&pausing), at.clone(), Some(params)),
        )
    }
    .register(registry)?;
    let (resuming, at) = (Arc::clone(watch), dir.to_owned());
    Offer::new(
        NODE_RESUME,
        "Serves layers to others again after `node.pause`, for programs on the node's own machine.",
        move |_, _| set(Arc::clone(&resuming), at.clone(), None),
    )
    .register(registry)
}

async fn set(watch: Arc<Watch>, dir: PathBuf, params: Option<Value>) -> Result<Value, CallError> {
    let paused: Option<Paused> = match params {
        Some(params) => serde_json::from_value(params)
            .map(Some)
            .map_err(|e| CallError::bad_request("params", e))?,
        None => None,
    };
    // In force even if the disk is full.
    watch.set_paused(paused);
    let written = tokio::task::spawn_blocking(move || Paused::write(paused, &dir)).await;
    written.map_err(local_api::internal)??;
    answer(&json!({}))
}
