//! Caller in a process of its own, for attacks on the dialling side.
//!
//! It opens a session with the real client, prints the result as one line of JSON, and ends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use hearthnet_bus::NodeKey;
use hearthnet_http::{Metrics, Part};
use hearthnet_orchestrator::link::{HostAddr, HostLink};
use hearthnet_transport::Config;
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::time::timeout;

use crate::HarnessError;
use crate::victim::raised;

/// Time limit of a caller process.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Result of a caller process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Called {
    /// Error if the session could not be opened.
    pub refused: Option<String>,
    /// Number of times the caller counted each code.
    pub raised: BTreeMap<String, u64>,
}

/// Runs the caller process: opens a session with a host and returns the result.
///
/// # Errors
/// If there is no key.
pub async fn call(key: &Path, host: &HostAddr) -> Result<Called, HarnessError> {
    let key = NodeKey::load_or_create(key)?;
    let numbers = Metrics::install(Part::Caller)?;
    let link = HostLink::connect(host, &key, Config::default()).await;
    Ok(Called {
        refused: link.err().map(|error| error.to_string()),
        raised: raised(&numbers.render()),
    })
}

/// Starts `program` as a caller and returns its result.
pub(crate) async fn start(
    program: &Path,
    key: &PathBuf,
    host: &HostAddr,
) -> Result<Called, HarnessError> {
    let calling = Command::new(program)
        .arg("caller")
        .arg(key)
        .arg(host.to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(TIMEOUT, calling).await??;
    serde_json::from_slice(&output.stdout).map_err(|error| {
        let said = String::from_utf8_lossy(&output.stderr);
        HarnessError::Honest(format!("no caller: {error}: {said}"))
    })
}
