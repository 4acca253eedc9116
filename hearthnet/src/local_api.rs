//! Local API for programs on this machine, server and client side.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearthnet_bus::calls::{
    Answering, Authority, CallContext, CallError, CallLimits, CallServer, CallStream,
    CapabilityDescriptor, Client, Code, FrameSink, Handler, LocalApi, Params, Registry, Research,
    Trust,
};
use hearthnet_bus::flight::Readers;
use hearthnet_bus::{NodeId, NodeKey, whole_file};
use hearthnet_model::ModelFile;
use hearthnet_model::catalogue::Resolved;
use hearthnet_model::sampler::SamplingChoice;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::bus::{ChatHandler, descriptor};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::lock::Lock;
use crate::output::note;
use crate::paths::refuse_open_to_others;

/// Call that returns the status of the running node. Local only.
pub(crate) const NODE_STATUS: &str = "node.status@1.0";

/// Call that returns the flight record. Local only.
pub(crate) const NODE_FLIGHT: &str = "node.flight@1.0";

/// Call that returns the model files that chats use. Local only.
pub(crate) const NODE_MODELS: &str = "node.models@1.0";

/// Subfolder of the data directory for the local API of a standalone service, since a node of the
/// community may use the same directory.
pub(crate) const STANDALONE: &str = "service";

/// Timeout of a call to a local node.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

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
    Failure::new(
        Kind::Host,
        format!(
            "a node runs on {} ({process}), and does not answer{why}",
            dir.display()
        ),
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
        // The third field, after a name in parentheses, is the state (proc_pid_stat(5)).
        let stat = id.and_then(|id| std::fs::read_to_string(format!("/proc/{id}/stat")).ok());
        let state = stat.as_deref().and_then(|stat| stat.rsplit_once(") "));
        Self {
            id,
            is_stopped: state.is_some_and(|(_, rest)| rest.starts_with(['T', 't'])),
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

/// Calls a capability of the node that runs on `dir`. Returns `None` if no node runs, or if the
/// call fails. Prints a warning if the node does not respond.
pub(crate) async fn ask<T: DeserializeOwned>(
    dir: &Path,
    capability: &str,
    params: &Value,
) -> Option<T> {
    let asking =
        async { ask_over(&Client::connect_local(dir).await.ok()?, capability, params).await };
    match tokio::time::timeout(CALL_TIMEOUT, asking).await {
        Ok(answer) => answer,
        Err(_) => {
            note(format!("warning: {}", silent(dir)));
            None
        }
    }
}

async fn ask_over<T: DeserializeOwned>(
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
            ..CapabilityDescriptor::new(name, self.summary, Trust::Member)
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

/// Result of the search for a service.
pub(crate) enum Found {
    /// A service that answers with the model.
    Service(AskedService),
    /// A process holds the lock of this directory, but does not respond.
    Silent(PathBuf),
    Nothing,
}

/// Finds a running service of `data_dir`, in the community or standalone, that answers with the
/// model file `wanted`, or with any model if `None`. Requires a held lock, so that leftovers of a
/// killed service are ignored.
pub(crate) async fn find_service(data_dir: &Path, wanted: Option<&Resolved>) -> Found {
    let file = match wanted.map(|wanted| (&wanted.id, wanted.path.canonicalize())) {
        Some((id, Ok(path))) => Some((id, path)),
        Some((_, Err(_))) => return Found::Nothing,
        None => None,
    };
    let mut found = Found::Nothing;
    for dir in [data_dir.to_owned(), data_dir.join(STANDALONE)] {
        if !Lock::is_held(&dir) {
            continue;
        }
        let asking = async {
            let client = Client::connect_local(&dir).await.ok()?;
            let offer: Models = ask_over(&client, NODE_MODELS, &json!({})).await?;
            let suits = |model: &Offered| match &file {
                Some((id, path)) => model.id == **id && model.path == *path,
                None => true,
            };
            let model = offer.models.into_iter().find(suits)?;
            Some(AskedService {
                client,
                dir: dir.clone(),
                model: Resolved {
                    path: model.path,
                    id: model.id,
                },
                sampling: model.sampling,
                file_replaced: model.replaced,
            })
        };
        match tokio::time::timeout(CALL_TIMEOUT, asking).await {
            Ok(Some(service)) => return Found::Service(service),
            Ok(None) => {}
            Err(_) => found = Found::Silent(dir),
        }
    }
    found
}

/// Service that runs on this machine.
pub(crate) struct AskedService {
    pub(crate) client: Client,
    /// Directory whose lock it holds.
    pub(crate) dir: PathBuf,
    pub(crate) model: Resolved,
    /// Default sampling of the service. A process that takes over must use the same.
    pub(crate) sampling: SamplingChoice,
    /// The model file was replaced or changed after the service had opened it.
    pub(crate) file_replaced: bool,
}

/// Result of [`NODE_MODELS`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Models {
    models: Vec<Offered>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Offered {
    id: String,
    #[serde(serialize_with = "as_text")]
    path: PathBuf,
    /// Default sampling. Greedy if the service does not report it.
    #[serde(default = "greedy")]
    sampling: SamplingChoice,
    /// Whether the file at `path` changed after the service had opened it.
    #[serde(default)]
    replaced: bool,
}

/// Serializes a path, lossily, since JSON strings must be UTF-8. A file with another name is not
/// found by its path; the chat then answers in its own process.
fn as_text<S: serde::Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

fn greedy() -> SamplingChoice {
    SamplingChoice::GREEDY
}

/// Registers `experimental.distributed_llm.chat` and [`NODE_MODELS`] for a service.
pub(crate) fn offer_chats(
    registry: &Registry,
    service: &Service,
    file: &Arc<ModelFile>,
    config: &Config,
) -> Result<(), Failure> {
    let inference = &config.research.distributed_inference;
    let at_once = inference.max_concurrent_pipelines + inference.max_waiting_chats;
    let chats = descriptor(u32::try_from(at_once).unwrap_or(u32::MAX));
    registry
        .register(chats, Arc::new(ChatHandler(service.clone())))
        .map_err(Failure::internal)?;
    // A path that is not UTF-8 is not reported, so a chat does not find its model here.
    let path = file.path().and_then(|path| path.canonicalize().ok());
    let path = path.filter(|path| path.to_str().is_some());
    let models = path.into_iter().flat_map(|path| {
        let models = service.models().iter();
        models.map(move |model| Offered {
            id: model.id.clone(),
            path: path.clone(),
            sampling: model.text.sampling,
            replaced: false,
        })
    });
    let models: Vec<Offered> = models.collect();
    let (file, told) = (Arc::clone(file), AtomicBool::new(false));
    Offer::new(
        NODE_MODELS,
        "Lists the model files that chats use, for programs on the node's own machine.",
        move |_, _| {
            let mut models = models.clone();
            let replaced = file.is_replaced();
            models.iter_mut().for_each(|m| m.replaced = replaced);
            if replaced && !told.swap(true, Ordering::Relaxed) {
                note(
                    "warning: the model file was replaced or changed after this service had loaded it; \
                     answers are those of the earlier file until the service is restarted",
                );
            }
            std::future::ready(answer(&Models { models }))
        },
    )
    .register(registry)
}

/// Registers the flight record for local programs.
pub(crate) fn offer_record(registry: &Registry) -> Result<(), Failure> {
    let name = NODE_FLIGHT.parse().map_err(Failure::internal)?;
    Readers::Local(name)
        .register(registry)
        .map_err(Failure::internal)
}

/// Local API of a standalone service. Only programs of this user can connect; the command line has
/// already allowed all calls.
pub(crate) struct StandaloneApi {
    api: LocalApi,
    _lock: Lock,
}

struct ThisUser;

impl Authority for ThisUser {
    fn trust(&self, _: &NodeId) -> Trust {
        Trust::Member
    }

    fn research(&self) -> Research {
        Research::On
    }
}

impl StandaloneApi {
    /// Opens the local API. Returns an error if another standalone service uses this data
    /// directory, or if a file cannot be written.
    pub(crate) async fn open(
        data_dir: &Path,
        service: &Service,
        file: &Arc<ModelFile>,
        config: &Config,
    ) -> Result<Self, Failure> {
        refuse_open_to_others(data_dir)?;
        let dir = data_dir.join(STANDALONE);
        whole_file::make_folder(&dir, 0o700).map_err(|e| Failure::file("make", &dir, e))?;
        let lock = Lock::take(&dir)?;
        let registry = Arc::new(Registry::new());
        offer_chats(&registry, service, file, config)?;
        offer_record(&registry)?;
        // A random id is enough, because only this user calls here.
        let own = NodeKey::generate().map_err(Failure::internal)?.id();
        let server = CallServer::new(own, registry, Arc::new(ThisUser));
        let api = LocalApi::open(&dir, Arc::new(server)).await;
        Ok(Self {
            api: api.map_err(Failure::internal)?,
            _lock: lock,
        })
    }

    pub(crate) async fn close(self) {
        self.api.close().await;
    }
}
