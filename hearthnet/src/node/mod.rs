//! This node at work, as the program sets it up: the listener for other members, the API
//! for programs on this machine, and what it tells them about itself.
//!
//! | part | file |
//! |---|---|
//! | a node that stays: the daemon's | this file |
//! | a node for as long as one command needs it | `transient.rs` |
//! | waiting until it knows what others know | `settle.rs` |
//! | what others say of its key and its clock | `neighbours.rs` |
//! | what it tells programs on this machine | `status.rs` |

mod neighbours;
pub(crate) mod settle;
pub(crate) mod status;
pub(crate) mod transient;

use std::sync::Arc;

use hearthnet_bus::NodeId;
use hearthnet_bus::calls::{LocalApi, Registry};
use hearthnet_bus::discovery::{CommunityTag, DiscoverySettings, StaticPeer};
use hearthnet_bus::flight::Readers;
use hearthnet_bus::joining::JoinHandler;
use hearthnet_bus::node::{Node, NodeError, NodeSettings};
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_transport::BindError;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::settle::{settle_in, until_even};
use self::status::{Serving, Told};
use crate::addresses::{listen_address, reachable};
use crate::changes;
use crate::community::{Home, display_name, now_ms};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::local_api::offer_record;
use crate::lock::Lock;
use crate::membership::Membership;

/// How the configuration says to look for others of one community.
pub(crate) fn discovery_settings(
    config: &Config,
    own: NodeId,
    community: CommunityTag,
) -> Result<DiscoverySettings, Failure> {
    let peers = config.discovery.static_peers.iter();
    let static_peers = peers
        .map(|text| text.parse())
        .collect::<Result<Vec<StaticPeer>, _>>()
        .map_err(|e| {
            Failure::new(
                Kind::Config,
                format!("the setting discovery.static_peers: {e}"),
            )
            .hint("for example: static_peers = [\"192.168.1.20:7600\"]")
        })?;
    Ok(DiscoverySettings {
        own: Some(own),
        community: Some(community),
        mdns: config.discovery.mdns,
        static_peers,
        ..DiscoverySettings::default()
    })
}

/// The settings of a node without a listener, of this home.
fn settings(home: &Home, config: &Config) -> Result<NodeSettings, Failure> {
    let tag = CommunityTag::of(home.log.community().as_bytes());
    let mut settings = NodeSettings::new(display_name(None, config));
    settings.discovery = discovery_settings(config, home.key.id(), tag)?;
    if !home.state().is_created() || home.log.is_in_doubt() {
        // The log may not say where anybody is; it was noted beside it.
        let noted = Membership::read(&home.dir).map_or_else(Vec::new, |noted| noted.peers());
        let known = noted.iter().filter_map(|peer| peer.parse().ok());
        settings.discovery.static_peers.extend(known);
    }
    settings.research = config.policy.research.enable;
    let transport = config.transport()?;
    // A neighbour whose cable was pulled is missed after two of these: no later than the
    // node's own default, whatever suits long sessions with tensors.
    let keep_alive = transport.keep_alive.min(settings.transport.keep_alive);
    settings.transport = hearthnet_transport::Config {
        keep_alive,
        ..transport
    };
    Ok(settings)
}

/// What kind of failure it is that an address cannot be listened on.
pub(crate) fn bind_kind(error: &BindError) -> Kind {
    match error {
        BindError::Address { source, .. } => Kind::of_io(source),
        BindError::Config(_) => Kind::Config,
        _ => Kind::Host,
    }
}

fn failure(error: &NodeError) -> Failure {
    let hint = match error {
        NodeError::Listen(_) => {
            "is another program using the address? node.listen = \"auto\" takes a free one"
        }
        _ => "`hearthnet config show` lists every setting",
    };
    let kind = match error {
        NodeError::Listen(error) => bind_kind(error),
        _ => Kind::Host,
    };
    Failure::new(kind, error.to_string())
        .code(error.code())
        .hint(hint)
}

/// A node that stays.
pub(crate) struct DaemonNode {
    /// The node.
    pub(crate) node: Node,
    /// What its chats have seen of hosts.
    pub(crate) health: SharedHealth,
    /// What it says of itself in `node.status`.
    told: Arc<Told>,
    local_api: Mutex<Option<LocalApi>>,
    /// Looks after this node's standing, and ends with this.
    _watch: JoinSet<()>,
    _lock: Lock,
}

impl DaemonNode {
    /// Starts it: listens at `listen` (or as configured), admits joiners, opens the API for
    /// programs on this machine. `registry` may hold more that it can be asked to do, whose
    /// names `caps` announces.
    ///
    /// # Errors
    /// If a node runs here already, or an address or a file cannot be used.
    pub(crate) async fn start(
        home: &Home,
        config: &Config,
        listen: Option<&str>,
        registry: Arc<Registry>,
        caps: Vec<String>,
    ) -> Result<Self, Failure> {
        let lock = Lock::take(&home.dir)?;
        // From here on nobody else writes.
        home.log.update()?;
        let mut settings = settings(home, config)?;
        let listen = listen_address(listen.unwrap_or(&config.node.listen));
        settings.listen = Some(listen.to_string());
        settings.caps = caps;
        let join = hearthnet_bus::joining::descriptor();
        let handler = JoinHandler::new(home.log.clone(), Arc::clone(&home.key), now_ms);
        let health = SharedHealth::default();
        let told = status::offer(&registry, &health)?;
        offer_record(&registry)?;
        Readers::Nodes
            .register(&registry)
            .map_err(Failure::internal)?;
        let capabilities = Arc::clone(&registry);
        let caught_up = watch::Sender::new(false);
        changes::offer(&registry, home, caught_up.subscribe())?;
        let node = Node::start(Arc::clone(&home.key), home.log.clone(), settings, registry)
            .await
            .map_err(|e| failure(&e))?;
        told.set_node(node.downgrade());
        let (watched, at) = (node.clone(), home.clone());
        let mut watching = JoinSet::new();
        watching.spawn(async move {
            // Before its first word, be it that somebody is admitted, it looks whether others know
            // later ones of it, as after an old copy of the data was put back.
            settle_in(&watched).await;
            until_even(&watched).await;
            caught_up.send_replace(true);
            if let Err(error) = capabilities.register(join, Arc::new(handler)) {
                tracing::error!(%error, "nobody can join through this node");
            }
            let weak = watched.downgrade();
            drop(watched);
            neighbours::watch(weak, at, true).await;
        });
        let local_api = LocalApi::open(&home.dir, Arc::clone(node.call_server()))
            .await
            .map_err(|e| {
                Failure::new(Kind::Host, e.to_string()).hint("--data-dir names another directory")
            })?;
        Ok(Self {
            node,
            health,
            told,
            local_api: Mutex::new(Some(local_api)),
            _watch: watching,
            _lock: lock,
        })
    }

    /// Where others reach it.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.node.listen_addr().map_or_else(Vec::new, |listen| {
            reachable(listen).iter().map(ToString::to_string).collect()
        })
    }

    /// Says in `node.status` which shard it serves, or why it serves none that it should.
    pub(crate) fn set_serving(&self, serving: Serving) {
        self.told.state.lock().serving = serving;
    }

    /// Says in `node.status` where its OpenAI API is.
    pub(crate) fn set_url(&self, url: Option<String>) {
        self.told.state.lock().url = url;
    }

    /// Says goodbye and stops.
    pub(crate) async fn stop(&self) {
        let local_api = self.local_api.lock().take();
        if let Some(local_api) = local_api {
            local_api.close().await;
        }
        self.node.shutdown().await;
    }
}
