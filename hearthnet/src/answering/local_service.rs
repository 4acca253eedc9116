//! Chats for programs on this machine: the calls of a service, and the search for a running one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_bus::NodeKey;
use hearthnet_bus::calls::{CallServer, Client, LocalApi, OneLevel, Registry};
use hearthnet_bus::log::Level;
use hearthnet_files::sampling::SamplingChoice;
use hearthnet_hub::catalogue::Resolved;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::bus::{ChatHandler, descriptor};
use hearthnet_orchestrator::service::ServedModel;
use hearthnet_platform::whole_file::{self, Access};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::cli::{Failure, note};
use crate::config::Config;
use crate::home::{Lock, refuse_open_to_others};
use crate::node::local_api::{CALL_TIMEOUT, Offer, answer, ask_over, offer_record};
use crate::node::{NODE_STATUS, Running, SharedStatus};

/// Call that returns the model files that chats use. Local only.
const NODE_MODELS: &str = "node.models@1.0";

/// Subfolder of the data directory for the local API of a standalone service, since a node of the
/// community may use the same directory.
const STANDALONE: &str = "service";

/// Directories of the nodes and services that run on this data directory. A lock is held there, so
/// that leftovers of a killed process are ignored.
pub(crate) fn running_in(data_dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let all = [data_dir.to_owned(), data_dir.join(STANDALONE)];
    all.into_iter().filter(|dir| Lock::is_held(dir))
}

/// Status of the standalone service of a data directory, if one runs.
pub(crate) async fn standalone_status(data_dir: &Path) -> Option<Running> {
    let dir = data_dir.join(STANDALONE);
    match Lock::is_held(&dir) {
        true => Running::ask(&dir, &json!({})).await,
        false => None,
    }
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
/// model file `wanted`, or with any model if `None`.
pub(crate) async fn find_service(data_dir: &Path, wanted: Option<&Resolved>) -> Found {
    let file = match wanted.map(|wanted| (&wanted.id, wanted.path.canonicalize())) {
        Some((id, Ok(path))) => Some((id, path)),
        Some((_, Err(_))) => return Found::Nothing,
        None => None,
    };
    let mut found = Found::Nothing;
    for dir in running_in(data_dir) {
        let asking = async {
            let client = Client::connect_local(&dir).await.ok()?;
            let offer: Models = ask_over(&client, NODE_MODELS, &json!({})).await?;
            let suits = |model: &Offered| match &file {
                Some((id, path)) => model.id == **id && model.path == *path,
                None => true,
            };
            let model = offer.models.into_iter().find(suits)?;
            let dir = dir.clone();
            Some(AskedService { client, dir, model })
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
    pub(crate) model: Offered,
}

/// Result of [`NODE_MODELS`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Models {
    models: Vec<Offered>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Offered {
    pub(crate) id: String,
    #[serde(serialize_with = "as_text")]
    pub(crate) path: PathBuf,
    /// Default sampling; greedy if the service does not report it. A process that takes over must
    /// use the same.
    #[serde(default = "greedy")]
    pub(crate) sampling: SamplingChoice,
    /// Whether the file at `path` was replaced or changed after the service had opened it.
    #[serde(default)]
    pub(crate) replaced: bool,
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
    config: &Config,
) -> Result<(), Failure> {
    let inference = &config.research.distributed_inference;
    let at_once = inference.max_concurrent_pipelines.0 + inference.max_waiting_chats.0;
    let chats = descriptor(u32::try_from(at_once).unwrap_or(u32::MAX));
    registry
        .register(chats, Arc::new(ChatHandler(service.clone())))
        .map_err(Failure::internal)?;
    let (service, told) = (service.clone(), AtomicBool::new(false));
    Offer::new(
        NODE_MODELS,
        "Lists the model files that chats use, for programs on the node's own machine.",
        move |_, _| {
            let models: Vec<Offered> = service.models().iter().filter_map(|m| offered(m)).collect();
            if models.iter().any(|model| model.replaced) && !told.swap(true, Ordering::Relaxed) {
                note(
                    "warning: a model file was replaced or changed after this service had loaded it; \
                     answers are those of the earlier file until the service is restarted",
                );
            }
            std::future::ready(answer(&Models { models }))
        },
    )
    .register(registry)
}

/// A model as other programs see it; `None` if its path is not UTF-8: then a chat does not find it
/// here.
fn offered(model: &ServedModel) -> Option<Offered> {
    let path = model.file.path()?.canonicalize().ok()?;
    path.to_str()?;
    Some(Offered {
        id: model.id.clone(),
        path,
        sampling: model.text.sampling,
        replaced: model.file.is_replaced(),
    })
}

/// Local API of a standalone service. Only programs of this user can connect; the command line has
/// already allowed all calls.
pub(crate) struct StandaloneApi {
    api: LocalApi,
    /// The status that the service reports.
    pub(crate) told: Arc<SharedStatus>,
    _lock: Lock,
}

impl StandaloneApi {
    /// Opens the local API. Returns an error if another standalone service uses this data
    /// directory, or if a file cannot be written.
    pub(crate) async fn open(
        data_dir: &Path,
        service: &Service,
        config: &Config,
    ) -> Result<Self, Failure> {
        refuse_open_to_others(data_dir)?;
        let dir = data_dir.join(STANDALONE);
        whole_file::make_folder(&dir, Access::Owner).map_err(|e| Failure::file("make", &dir, e))?;
        let lock = Lock::take(&dir)?;
        let registry = Arc::new(Registry::new());
        offer_chats(&registry, service, config)?;
        offer_record(&registry)?;
        let told = Arc::new(SharedStatus::default());
        let asked = Arc::clone(&told);
        Offer::new(
            NODE_STATUS,
            "Returns the service's address and the use of its keys, for programs on the node's own machine.",
            move |_, _| std::future::ready(answer(&asked.without_node())),
        )
        .register(&registry)?;
        // A random id is enough, because only this user calls here.
        let own = NodeKey::generate().map_err(Failure::internal)?.id();
        let this_user = OneLevel(Some(Level::Member));
        let server = CallServer::new(own, registry, Arc::new(this_user));
        let api = LocalApi::open(&dir, Arc::new(server)).await;
        Ok(Self {
            api: api.map_err(Failure::internal)?,
            told,
            _lock: lock,
        })
    }

    pub(crate) async fn close(self) {
        self.api.close().await;
    }
}
