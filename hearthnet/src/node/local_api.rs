//! Local API for programs on this machine, server and client side.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::{
    Answering, CallContext, CallError, CallLimits, CallStream, CapabilityDescriptor, Client, Code,
    FrameSink, Handler, Params, Registry,
};
use hearthnet_bus::flight::Readers;
use hearthnet_bus::log::Level;
use hearthnet_platform::process::is_stopped;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;

use crate::cli::{Failure, failure};
use crate::home::Lock;

/// Call that returns the status of the running node. Local only.
pub(crate) const NODE_STATUS: &str = "node.status@1.0";

/// Call that returns the flight record. Local only.
pub(crate) const NODE_FLIGHT: &str = "node.flight@1.0";

/// Timeout of a call to a local node.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Time limit for a starting daemon to answer.
const STARTING: Duration = Duration::from_secs(5);

/// Poll interval meanwhile; opening the local API takes milliseconds.
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// Connects to the daemon of `dir`. Waits for a starting daemon, which takes its lock before it
/// opens its local API.
pub(crate) async fn connect(dir: &Path) -> Result<Client, CallError> {
    let deadline = Instant::now() + STARTING;
    loop {
        match Client::connect_local(dir).await {
            Err(_) if Instant::now() < deadline && Lock::is_held(dir) => {
                tokio::time::sleep(TRY_AGAIN).await;
            }
            connected => return connected,
        }
    }
}

/// Error for a daemon that holds its lock but does not respond.
pub(crate) fn silent(dir: &Path) -> Failure {
    let process = Process::of(dir);
    let (why, hint) = match process.hint() {
        Some(hint) => ("", hint),
        None => (
            ": it is starting or stopping",
            "`hearthnet status` shows it; for another node, choose another directory with --data-dir".to_owned(),
        ),
    };
    let dir = dir.display();
    failure!(
        Host,
        "a node runs on {dir} ({process}), and does not answer{why}"
    )
    .code("node_runs")
    .hint(hint)
}

/// Process that holds the lock of a data directory.
pub(crate) struct Process {
    id: Option<u32>,
    is_stopped: bool,
}

impl Process {
    pub(crate) fn of(dir: &Path) -> Self {
        let id = Lock::process(dir);
        Self {
            id,
            is_stopped: id.is_some_and(is_stopped),
        }
    }

    /// Command that resumes a stopped process.
    pub(crate) fn hint(&self) -> Option<String> {
        let id = self.id.filter(|_| self.is_stopped)?;
        Some(format!("`kill -CONT {id}` resumes it"))
    }
}

/// Formats as `process 1234, which is stopped`.
impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.id {
            Some(id) => write!(f, "process {id}")?,
            None => f.write_str("an unknown process")?,
        }
        match self.is_stopped {
            true => f.write_str(", which is stopped"),
            false => Ok(()),
        }
    }
}

/// Calls a capability. Returns `None` if the call fails.
pub(crate) async fn ask_over<T: DeserializeOwned>(
    client: &Client,
    capability: &str,
    params: &Value,
) -> Option<T> {
    let answer = call(client, capability, params).ok()?.result().await.ok()?;
    serde_json::from_value(answer).ok()
}

/// Starts a call of the named capability.
///
/// # Errors
/// Same as [`Client::call`].
pub(crate) fn call(
    client: &Client,
    capability: &str,
    params: &Value,
) -> Result<CallStream, CallError> {
    let capability = capability.parse();
    client.call(
        &capability.map_err(|e| CallError::bad_request("capability", e))?,
        params,
    )
}

/// Capability for local programs: its description and its handler.
pub(crate) struct Offer<F> {
    pub(crate) name: &'static str,
    /// One sentence that ends "for programs on the node's own machine".
    pub(crate) summary: &'static str,
    pub(crate) params: Params,
    pub(crate) streaming: bool,
    pub(crate) limits: CallLimits,
    pub(crate) answer: F,
}

impl<F, A> Offer<F>
where
    F: Fn(Value, FrameSink) -> A + Send + Sync + 'static,
    A: Future<Output = Result<Value, CallError>> + Send + 'static,
{
    /// Capability without parameters that returns a single value.
    pub(crate) fn new(name: &'static str, summary: &'static str, answer: F) -> Self {
        Self {
            name,
            summary,
            params: Params::none(),
            streaming: false,
            limits: CallLimits::default(),
            answer,
        }
    }

    pub(crate) fn register(self, registry: &Registry) -> Result<(), Failure> {
        let name = self.name.parse().map_err(Failure::internal)?;
        let descriptor = CapabilityDescriptor {
            params: self.params,
            streaming: self.streaming,
            limits: self.limits,
            ..CapabilityDescriptor::new(name, self.summary, Some(Level::Member))
        };
        registry
            .register(descriptor, Arc::new(OnThisMachine(self.answer)))
            .map_err(Failure::internal)
    }
}

/// Handler that refuses callers on other machines.
struct OnThisMachine<F>(F);

impl<F, A> Handler for OnThisMachine<F>
where
    F: Fn(Value, FrameSink) -> A + Send + Sync,
    A: Future<Output = Result<Value, CallError>> + Send + 'static,
{
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_> {
        match ctx.require_local("may ask this") {
            Ok(()) => Box::pin((self.0)(params, out)),
            Err(refused) => Box::pin(std::future::ready(Err(refused))),
        }
    }
}

/// Converts a result to JSON.
pub(crate) fn answer(value: &impl Serialize) -> Result<Value, CallError> {
    serde_json::to_value(value).map_err(internal)
}

/// Error for a defect of this program.
pub(crate) fn internal(error: impl std::fmt::Display) -> CallError {
    CallError::new(Code::INTERNAL, error.to_string())
}

/// Registers the flight record for local programs.
pub(crate) fn offer_record(registry: &Registry) -> Result<(), Failure> {
    let name = NODE_FLIGHT.parse().map_err(Failure::internal)?;
    Readers::Local(name)
        .register(registry)
        .map_err(Failure::internal)
}
