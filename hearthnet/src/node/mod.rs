//! The running node: listener for other members, local API, and status.
//!
//! | part | file |
//! |---|---|
//! | long-lived node of the daemon | this file |
//! | node for the duration of one command | `transient.rs` |
//! | waiting for the first sync | `sync.rs` |
//! | refusals by other members, and the clock offset | `neighbours.rs` |
//! | status for local programs | `status.rs` |
//! | layers on the disks of members | `holdings.rs` |
//! | addresses | `addresses.rs` |
//! | bandwidth of links | `link_rates.rs` |
//! | calls of local programs | `local_api.rs` |
//! | only writer of the log | `log_writer.rs` |
//! | new invites | `invite.rs` |
//! | opening the community for a command; restoring a lost log | `restore_log.rs` |

pub(crate) mod addresses;
mod evidence;
mod holdings;
mod invite;
pub(crate) mod link_rates;
pub(crate) mod local_api;
pub(crate) mod log_writer;
mod neighbours;
pub(crate) mod restore_log;
pub(crate) mod status;
pub(crate) mod sync;
pub(crate) mod transient;

use std::ops::Range;
use std::sync::Arc;

use hearthnet_bus::calls::{LocalApi, Registry};
use hearthnet_bus::discovery::{CommunityTag, DiscoverySettings};
use hearthnet_bus::flight::Readers;
use hearthnet_bus::joining::JoinHandler;
use hearthnet_bus::log::{Adoption, Body};
use hearthnet_bus::node::{Node, NodeError, NodeSettings};
use hearthnet_bus::{CommunityId, NodeId};
use hearthnet_orchestrator::health::SharedHealth;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::addresses::reachable;
use self::link_rates::LinkRates;
use self::local_api::offer_record;
use self::log_writer::ChangeRequest;
use crate::cli::{Failure, Kind};
use crate::config::Config;
use crate::home::{Home, Lock, Membership, display_name};

pub(crate) use self::addresses::{listen_address, local_endpoints};
pub(crate) use self::evidence::{Came, EvidenceFetch, may_judge, to_judge};
pub(crate) use self::holdings::Holdings;
pub(crate) use self::invite::NewInvite;
pub(crate) use self::local_api::{NODE_FLIGHT, NODE_STATUS, Process};
pub(crate) use self::log_writer::Change;
pub(crate) use self::restore_log::{find_home, no_community, open_home};
pub(crate) use self::status::{Download, Running, SharedStatus, ShownDownload, ShownWait, SoFar};
pub(crate) use self::sync::{wait_for_neighbours, wait_until_synced};
pub(crate) use self::transient::{
    TransientNode, in_sync, sync_log, sync_or_note, with_synced_node,
};

/// Discovery settings from the configuration, for one community.
pub(crate) fn discovery_settings(
    config: &Config,
    own: NodeId,
    community: CommunityId,
) -> DiscoverySettings {
    DiscoverySettings {
        own: Some(own),
        community: Some(CommunityTag::of(community.as_bytes())),
        mdns: config.discovery.mdns,
        static_peers: config.discovery.static_peers.clone(),
        ..DiscoverySettings::default()
    }
}

/// Settings of a node without a listener.
fn settings(home: &Home, config: &Config) -> NodeSettings {
    let mut settings = NodeSettings::new(display_name(None, config));
    settings.discovery = discovery_settings(config, home.key.id(), home.log.community());
    if !home.state().is_created() || home.log.is_in_doubt() {
        // The log may lack addresses of members; the membership file keeps them.
        let noted = Membership::read(&home.dir).map_or_else(Vec::new, |noted| noted.peers());
        let known = noted.iter().filter_map(|peer| peer.parse().ok());
        settings.discovery.static_peers.extend(known);
    }
    settings.research = config.policy.research.enable;
    let mut transport = config.transport();
    // A lost neighbour is noticed after two keep-alives. Never longer than the node's own default,
    // whatever suits long tensor sessions.
    transport.keep_alive = transport.keep_alive.min(settings.transport.keep_alive);
    settings.transport = transport;
    settings
}

fn failure(error: &NodeError) -> Failure {
    let (kind, hint) = match error {
        NodeError::Listen(error) => (
            Kind::of_bind(error),
            "is another program using the address? node.listen = \"auto\" takes a free one",
        ),
        _ => (Kind::Host, "`hearthnet config show` lists every setting"),
    };
    Failure::new(kind, error.to_string())
        .code(error.code())
        .hint(hint)
}

/// Long-lived node.
pub(crate) struct DaemonNode {
    pub(crate) node: Node,
    /// Health of hosts as measured by its chats.
    pub(crate) health: SharedHealth,
    /// Bandwidth of links, as measured by its transfers.
    pub(crate) link_rates: LinkRates,
    /// State that `node.status` reports.
    pub(crate) told: Arc<SharedStatus>,
    /// True once the log has been synced, so that this node may write.
    caught_up: watch::Receiver<bool>,
    local_api: Mutex<Option<LocalApi>>,
    /// Task that watches this node's membership status and clock; ends when dropped.
    _watch: JoinSet<()>,
    _lock: Lock,
}

impl DaemonNode {
    /// Starts the node: listens at `listen` (or as configured), admits joiners, and opens the local
    /// API. `registry` may hold further capabilities; `caps` are their names in discovery.
    /// `isolation` describes the sandbox of this process.
    ///
    /// # Errors
    /// Returns an error if a node already runs here, or if an address or a file cannot be used.
    pub(crate) async fn start(
        home: &Home,
        config: &Config,
        listen: Option<&str>,
        registry: Arc<Registry>,
        caps: Vec<String>,
        isolation: &'static str,
    ) -> Result<Self, Failure> {
        let lock = Lock::take(&home.dir)?;
        // From here on this process is the only writer.
        home.log.update()?;
        let mut settings = settings(home, config);
        let listen = listen_address(listen.unwrap_or(&config.node.listen));
        settings.listen = Some(listen.to_string());
        settings.caps = caps;
        let join = hearthnet_bus::joining::descriptor();
        let handler = JoinHandler::new(home.log.clone(), Arc::clone(&home.key));
        let health = SharedHealth::default();
        let told = status::offer(&registry, &health, isolation)?;
        offer_record(&registry)?;
        Readers::Nodes
            .register(&registry)
            .map_err(Failure::internal)?;
        let capabilities = Arc::clone(&registry);
        let caught_up = watch::Sender::new(false);
        let synced = caught_up.subscribe();
        log_writer::offer(&registry, home, synced.clone())?;
        let node = Node::start(Arc::clone(&home.key), home.log.clone(), settings, registry)
            .await
            .map_err(|e| failure(&e))?;
        let _ = told.node.set(node.downgrade());
        let (watched, at) = (node.clone(), home.clone());
        let mut watching = JoinSet::new();
        watching.spawn(async move {
            // Sync before the first event, such as an admission: other members may know later
            // events of this node, as after an old copy of the data was restored.
            wait_until_synced(&watched).await;
            wait_for_neighbours(&watched).await;
            caught_up.send_replace(true);
            if let Err(error) = capabilities.register(join, Arc::new(handler)) {
                tracing::error!(%error, "no node can join through this one");
            }
            let weak = watched.downgrade();
            drop(watched);
            neighbours::watch(weak, at, true).await;
        });
        let local_api = LocalApi::open(&home.dir, Arc::clone(node.call_server()))
            .await
            .map_err(|e| {
                Failure::new(Kind::Host, e.to_string())
                    .hint("choose another directory with --data-dir")
            })?;
        Ok(Self {
            node,
            health,
            link_rates: LinkRates::default(),
            told,
            caught_up: synced,
            local_api: Mutex::new(Some(local_api)),
            _watch: watching,
            _lock: lock,
        })
    }

    /// Addresses for other nodes.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.node.listen_addr().map_or_else(Vec::new, |listen| {
            reachable(listen).iter().map(ToString::to_string).collect()
        })
    }

    /// State of the node now.
    pub(crate) fn running(&self) -> Running {
        self.told.running_now(&self.node, &self.health)
    }

    /// Writes a change once the log has been synced, signed by this node's key, or with `by_root` by
    /// the root key of this home. A sealed root key needs its passphrase.
    pub(crate) async fn write(
        &self,
        home: &Home,
        by_root: bool,
        passphrase: Option<String>,
        change: Change,
    ) -> Result<(), Failure> {
        let request = ChangeRequest {
            by_root,
            passphrase,
            change,
        };
        log_writer::store_when_synced(home.clone(), self.caught_up.clone(), request).await
    }

    /// Appends a durable event of this node's own, once the log has been synced.
    pub(crate) async fn append(&self, home: &Home, body: Body) -> Result<(), Failure> {
        // An error means that the node is ending.
        let _ = self.caught_up.clone().wait_for(|it| *it).await;
        home.append_own(body).await
    }

    /// Sets the served shards, if any, and the reason why requested layers are not served, for
    /// `node.status`.
    pub(crate) fn set_serving(&self, serving: Option<String>, suspended: Option<String>) {
        let mut running = self.told.running.lock();
        (running.serving, running.suspended) = (serving, suspended);
    }

    /// Returns true while a download is shown.
    pub(crate) fn is_downloading(&self) -> bool {
        !self.told.running.lock().downloads.is_empty()
    }

    /// Shows a download in `node.status`, until the returned value is dropped.
    pub(crate) fn download(&self, download: Download) -> ShownDownload {
        let name = download.name.clone();
        self.told.running.lock().downloads.push(download);
        ShownDownload {
            told: Arc::clone(&self.told),
            name,
        }
    }

    /// Shows in `node.status` why a model cannot be fetched at present, until the returned value is
    /// dropped. At first nothing is shown.
    pub(crate) fn wait(&self, model: &str) -> ShownWait {
        ShownWait {
            told: Arc::clone(&self.told),
            model: model.to_owned(),
        }
    }

    /// Shows what this node has given up to this moment in `node.status`.
    pub(crate) fn show_gave(&self, so_far: impl Fn() -> Option<SoFar> + Send + Sync + 'static) {
        // Set once: a daemon counts once.
        let _ = self.told.gave.set(Box::new(so_far));
    }

    /// Lets `node.status` say which layers of adopted models members hold: `layers_in` returns the whole
    /// layers in some pieces of a model, if its pieces are known here.
    pub(crate) fn show_holdings(
        &self,
        layers_in: impl Fn(&Adoption, &[Range<u32>]) -> Option<Vec<(u32, u32)>> + Send + Sync + 'static,
    ) {
        // Set once: a daemon has one set of parts.
        let _ = self.told.layers_in.set(Box::new(layers_in));
    }

    /// Closes links in order and stops the node.
    pub(crate) async fn stop(&self) {
        let local_api = self.local_api.lock().take();
        if let Some(local_api) = local_api {
            local_api.close().await;
        }
        self.node.shutdown().await;
    }
}
