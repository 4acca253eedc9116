//! Asking the node that runs on this machine, as any program here could.

use std::path::Path;
use std::time::Duration;

use hearthnet_bus::calls::Client;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// What the running node tells about itself, to programs on this machine only.
pub(crate) const NODE_STATUS: &str = "node.status@1.0";

/// How long a node on this machine may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// Calls a capability of the node that runs on `dir`; `None` if none runs, or it does not
/// answer as it should.
pub(crate) async fn ask<T: DeserializeOwned>(
    dir: &Path,
    capability: &str,
    params: &Value,
) -> Option<T> {
    let capability = capability.parse().ok()?;
    let asking = async {
        let client = Client::connect_local(dir).await.ok()?;
        let answer = client.call(&capability, params).ok()?.result().await.ok()?;
        serde_json::from_value(answer).ok()
    };
    tokio::time::timeout(PATIENCE, asking).await.ok()?
}
