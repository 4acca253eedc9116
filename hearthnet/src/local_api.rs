//! The local API for programs on this machine, from both sides: what is offered there beside what a
//! node offers others, and asking, as any program here could.

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

/// What the running node tells about itself, to programs on this machine only.
pub(crate) const NODE_STATUS: &str = "node.status@1.0";

/// What happened of late, told to programs on this machine only.
pub(crate) const NODE_FLIGHT: &str = "node.flight@1.0";

/// The model files that chats are answered with, told to programs on this machine only.
pub(crate) const NODE_MODELS: &str = "node.models@1.0";

/// Where in the data directory a service outside of any community has its local API: a node of the
/// community may run on the same directory.
pub(crate) const STANDALONE: &str = "service";

/// How long a node on this machine may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long a daemon that is starting may take until it answers.
const STARTING: Duration = Duration::from_secs(5);

/// How often it is tried meanwhile: opening the local API takes milliseconds.
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// Connects to the daemon that runs on `dir`. One that starts holds its lock before it opens its
/// local API: that is waited for.
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

/// The failure of a daemon that holds its lock and does not answer.
pub(crate) fn silent(dir: &Path) -> Failure {
    let process = Process::of(dir);
    let (why, hint) = match process.hint() {
        Some(hint) => ("", hint),
        None => (
            ": it is starting or stopping",
            "`hearthnet status` shows it; one data directory is one node, and --data-dir names another one".to_owned(),
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

/// The process that holds the lock of a data directory, as far as the system tells.
pub(crate) struct Process {
    id: Option<u32>,
    is_stopped: bool,
}

impl Process {
    pub(crate) fn of(dir: &Path) -> Self {
        let id = Lock::process(dir);
        // Its third field, behind a name in parentheses, is its state (proc_pid_stat(5)).
        let stat = id.and_then(|id| std::fs::read_to_string(format!("/proc/{id}/stat")).ok());
        let state = stat.as_deref().and_then(|stat| stat.rsplit_once(") "));
        Self {
            id,
            is_stopped: state.is_some_and(|(_, rest)| rest.starts_with(['T', 't'])),
        }
    }

    /// How it goes on, where it was stopped.
    pub(crate) fn hint(&self) -> Option<String> {
        let id = self.id.filter(|_| self.is_stopped)?;
        Some(format!("`kill -CONT {id}` lets it go on"))
    }
}

/// `process 1234, which is stopped`.
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

/// Calls a capability of the node that runs on `dir`; `None` if none runs, or it does not
/// answer as it should. One that is silent is named on standard error: what follows is said
/// without it.
pub(crate) async fn ask<T: DeserializeOwned>(
    dir: &Path,
    capability: &str,
    params: &Value,
) -> Option<T> {
    let asking =
        async { ask_over(&Client::connect_local(dir).await.ok()?, capability, params).await };
    match tokio::time::timeout(PATIENCE, asking).await {
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

/// Begins a call of the capability that has this name.
///
/// # Errors
/// As [`Client::call`].
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

/// A capability for programs on this machine only: how it is described, and what answers it.
pub(crate) struct Offer<F> {
    pub(crate) name: &'static str,
    /// What it does, in a sentence that ends "for programs on the node's own machine".
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
    /// One that takes nothing and is answered at once, with a value.
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

/// Answers programs on this machine, and nobody else.
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

/// What a call ends with, as JSON.
pub(crate) fn answer(value: &impl Serialize) -> Result<Value, CallError> {
    serde_json::to_value(value).map_err(internal)
}

/// A defect of this program, as whoever calls is told.
pub(crate) fn internal(error: impl std::fmt::Display) -> CallError {
    CallError::new(Code::INTERNAL, error.to_string())
}

/// What runs on a data directory, for a chat that could be asked there.
pub(crate) enum Found {
    /// A service that answers with the model.
    Service(AskedService),
    /// A process that holds the lock of this directory and does not answer.
    Silent(PathBuf),
    /// Nothing that could be asked.
    Nothing,
}

/// The service of `data_dir` that answers with this model file (or with any, if it does not
/// matter), if one runs, in the community or outside of it. What a service left behind that
/// was killed is not asked: the lock of one that runs is held, and nobody else can hold it.
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
        match tokio::time::timeout(PATIENCE, asking).await {
            Ok(Some(service)) => return Found::Service(service),
            Ok(None) => {}
            Err(_) => found = Found::Silent(dir),
        }
    }
    found
}

/// A service that runs on this machine.
pub(crate) struct AskedService {
    pub(crate) client: Client,
    /// The directory whose lock it holds.
    pub(crate) dir: PathBuf,
    pub(crate) model: Resolved,
    /// How it chooses tokens where nobody says: whoever goes on without it must do the same.
    pub(crate) sampling: SamplingChoice,
    /// The model file was replaced or written to after the service had opened it.
    pub(crate) file_replaced: bool,
}

/// What [`NODE_MODELS`] ends with.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Models {
    models: Vec<Offered>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Offered {
    id: String,
    #[serde(serialize_with = "as_text")]
    path: PathBuf,
    /// How its tokens are chosen where the caller does not say. A service of an earlier version
    /// chose the likeliest.
    #[serde(default = "greedy")]
    sampling: SamplingChoice,
    /// Whether the file at `path` is no longer the one that chats are answered with. A service of an
    /// earlier version does not look.
    #[serde(default)]
    replaced: bool,
}

/// A path in JSON, which has no place for bytes that are not UTF-8: a file of such a name is not found
/// again by its name, and is answered with in the program that asks.
fn as_text<S: serde::Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

fn greedy() -> SamplingChoice {
    SamplingChoice::GREEDY
}

/// Makes whoever has this registry answer `experimental.distributed_llm.chat` with a service, and
/// tell programs on this machine with which model file.
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
    // A path that is no text cannot be told; such a model is then not found here, and no more.
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
        "Tells programs on the node's own machine which model files chats are answered with.",
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

/// Makes whoever has this registry tell programs on this machine what happened of late.
pub(crate) fn offer_record(registry: &Registry) -> Result<(), Failure> {
    let name = NODE_FLIGHT.parse().map_err(Failure::internal)?;
    Readers::Local(name)
        .register(registry)
        .map_err(Failure::internal)
}

/// The local API of a service outside of any community. Only programs of this user on this machine
/// come in, and what it does was said when it was started.
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
    /// Opens it; an error if another such service runs on this data directory, or a file cannot
    /// be written.
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
        // Nobody but this user calls here, so it does not matter under which name.
        let own = NodeKey::generate().map_err(Failure::internal)?.id();
        let server = CallServer::new(own, registry, Arc::new(ThisUser));
        let api = LocalApi::open(&dir, Arc::new(server)).await;
        Ok(Self {
            api: api.map_err(Failure::internal)?,
            _lock: lock,
        })
    }

    /// Closes it.
    pub(crate) async fn close(self) {
        self.api.close().await;
    }
}
