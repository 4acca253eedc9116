//! This node at work, as the program sets it up: the listener for other members, the API
//! for programs on this machine, and what it tells them about itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use hearthnet_bus::calls::{
    CallContext, CallError, CapabilityDescriptor, Code, FrameSink, Handler, Kind as ParamKind,
    LocalApi, Params, Registry, Trust,
};
use hearthnet_bus::discovery::{CommunityTag, DiscoverySettings, MdnsHealth, Source, StaticPeer};
use hearthnet_bus::flight::Readers;
use hearthnet_bus::joining::JoinHandler;
use hearthnet_bus::log::Level;
use hearthnet_bus::node::{Node, NodeError, NodeSettings, WeakNode};
use hearthnet_bus::{Capability, NodeId};
use hearthnet_orchestrator::health::{ShardHealth, SharedHealth};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::addresses::{listen_address, reachable};
use crate::community::{Home, display_name, log_failure, now_ms};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::local_api::{self, NODE_STATUS, offer_record};
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

fn failure(error: &NodeError) -> Failure {
    let hint = match error {
        NodeError::Listen(_) => {
            "is another program using the address? node.listen = \"auto\" takes a free one"
        }
        _ => "`hearthnet config show` lists every setting",
    };
    Failure::new(Kind::Host, error.to_string())
        .code(error.code())
        .hint(hint)
}

/// A node that keeps this home's log even with the others while a command runs, and goes.
pub(crate) async fn transient(home: &Home, config: &Config) -> Result<Node, Failure> {
    let settings = settings(home, config)?;
    let registry = Arc::new(Registry::new());
    let node = Node::start(Arc::clone(&home.key), home.log.clone(), settings, registry)
        .await
        .map_err(|e| failure(&e))?;
    tokio::spawn(watch_transient(
        node.downgrade(),
        node.changes(),
        home.clone(),
    ));
    Ok(node)
}

/// Notes what members say about a visiting node's key, until nobody holds the node. The command
/// says it when it ends.
async fn watch_transient(node: WeakNode, mut changes: watch::Receiver<u64>, home: Home) {
    while let Some(node) = node.upgrade() {
        if hear_refusals(&node, &home) {
            crate::standing::remember(&home);
        }
        crate::standing::note_clock(&home.dir, &home.log);
        drop(node);
        if let Ok(Err(_)) = tokio::time::timeout(LOOK_AT_VISIT, changes.changed()).await {
            return;
        }
    }
}

/// How often the clock is looked at meanwhile.
const LOOK_AT_VISIT: Duration = Duration::from_millis(500);

/// Asks the others what they know, for a few seconds at most, unless a node that runs here does.
pub(crate) fn ask_around(home: &Home, config: &Config) -> Result<(), Failure> {
    if Lock::is_held(&home.dir) || home.state().members().count() < 2 {
        return Ok(());
    }
    crate::runtime::block_on(async {
        let node = transient(home, config).await?;
        learn(&node, home).await;
        node.shutdown().await;
        Ok(())
    })
}

/// A node that stays.
pub(crate) struct DaemonNode {
    /// The node.
    pub(crate) node: Node,
    /// What its chats have seen of hosts.
    pub(crate) health: SharedHealth,
    status: Arc<StatusHandler>,
    local_api: Mutex<Option<LocalApi>>,
    /// Looks after this node's standing.
    watch: AbortOnDrop,
    _lock: Lock,
}

/// A task that ends with whoever started it.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
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
        let read = home.log.update();
        read.map_err(|e| log_failure(&home.dir, &e))?;
        let mut settings = settings(home, config)?;
        let listen = listen_address(listen.unwrap_or(&config.node.listen));
        settings.listen = Some(listen.to_string());
        settings.caps = caps;
        let join = hearthnet_bus::joining::descriptor();
        let handler = JoinHandler::new(home.log.clone(), Arc::clone(&home.key), now_ms);
        let status = Arc::new(StatusHandler::default());
        registry
            .register(status_descriptor()?, Arc::clone(&status) as _)
            .map_err(Failure::internal)?;
        offer_record(&registry)?;
        Readers::Nodes
            .register(&registry)
            .map_err(Failure::internal)?;
        let capabilities = Arc::clone(&registry);
        let node = Node::start(Arc::clone(&home.key), home.log.clone(), settings, registry)
            .await
            .map_err(|e| failure(&e))?;
        status.set(Some(node.clone()));
        let (watched, at) = (node.clone(), home.clone());
        let watch = AbortOnDrop(tokio::spawn(async move {
            // Admitting somebody is an event of this node's chain: first it looks whether others
            // know later ones of it, as after an old copy of the data was put back.
            settle_in(&watched).await;
            if let Err(error) = capabilities.register(join, Arc::new(handler)) {
                tracing::error!(%error, "nobody can join through this node");
            }
            watch_standing(&watched, &at).await;
        }));
        let local_api = LocalApi::open(&home.dir, Arc::clone(node.call_server()))
            .await
            .map_err(|e| {
                Failure::new(Kind::Host, e.to_string()).hint("--data-dir names another directory")
            })?;
        Ok(Self {
            node,
            health: status.health.clone(),
            status,
            local_api: Mutex::new(Some(local_api)),
            watch,
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
        self.status.told.lock().serving = serving;
    }

    /// Says in `node.status` where its OpenAI API is.
    pub(crate) fn set_url(&self, url: Option<String>) {
        self.status.told.lock().url = url;
    }

    /// Says goodbye and stops.
    pub(crate) async fn stop(&self) {
        // The node holds its capabilities, and this one the node.
        self.status.set(None);
        self.watch.0.abort();
        let local_api = self.local_api.lock().take();
        if let Some(local_api) = local_api {
            local_api.close().await;
        }
        self.node.shutdown().await;
    }
}

/// How long a node that has just started waits for what others know, at most.
const FIRST_SYNC: Duration = Duration::from_secs(4);

/// Waits until this node knows what its neighbours know, or that an anchor tells it nothing more;
/// a few seconds at most: where nobody is, nobody can be waited for.
pub(crate) async fn settle_in(node: &Node) {
    let alone = node.log().state().members().count() < 2;
    if !alone {
        let settled = async {
            tokio::select! {
                () = node.until_in_sync() => {}
                () = until_refused(node) => {}
            }
        };
        let _ = tokio::time::timeout(FIRST_SYNC, settled).await;
        if let Some(dir) = node.log().path().parent() {
            crate::standing::note_clock(dir, node.log());
        }
    }
}

/// [`settle_in`] of a visiting node, whose home then knows what was said of its key.
pub(crate) async fn learn(node: &Node, home: &Home) {
    settle_in(node).await;
    if hear_refusals(node, home) {
        crate::standing::remember(home);
    }
}

/// Resolves once an anchor has said that this node's key counts no more.
async fn until_refused(node: &Node) {
    let mut changes = node.changes();
    loop {
        let state = node.log().state();
        let anchor = |node: &NodeId| state.level(node) == Some(Level::Anchor);
        if node.refused_by().iter().any(anchor) {
            return;
        }
        // The sender lives as long as this node.
        let _ = changes.changed().await;
    }
}

/// Acts on what members say about this node's key. What an anchor says ends what runs here. What
/// others say binds nobody; where nobody else is heard (or this node is the only anchor, whose two
/// histories only others can see), it is noted, and commands say it. `true` if there is something
/// new to say.
fn hear_refusals(node: &Node, home: &Home) -> bool {
    let (state, own) = (home.state(), home.key.id());
    let anchor = |node: &NodeId| state.level(node) == Some(Level::Anchor);
    let alone = !state
        .members()
        .any(|(node, _)| *node != own && anchor(node));
    let linked: Vec<NodeId> = node
        .peers()
        .iter()
        .filter(|peer| peer.link.is_some())
        .map(|peer| peer.node)
        .collect();
    let said = node.refused_by();
    if let Some(by) = said.iter().find(|by| anchor(by)) {
        return home.refused_by(by);
    }
    if linked.iter().any(|node| alone || anchor(node)) {
        Membership::note_put_out(&home.dir, None);
    } else if let Some(by) = said.first().filter(|_| alone || linked.is_empty()) {
        return Membership::note_put_out(&home.dir, Some(crate::standing::by(home, by)));
    }
    false
}

/// How often the clock is compared with what neighbours said, and the membership noted.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Notes what other commands and later days should know, and ends what runs for this node when
/// an anchor says that its key counts no more.
async fn watch_standing(node: &Node, home: &Home) {
    let (mut links, mut changes) = (node.changes(), home.log.changes());
    loop {
        if hear_refusals(node, home) && home.level().is_ok() {
            // Nothing ends by it; who looks at the terminal should know.
            crate::standing::warn(home);
        }
        if crate::standing::note_clock(&home.dir, &home.log) {
            crate::standing::say_clock(&home.dir);
        }
        Membership::note(&home.dir, &home.state(), &home.key.id());
        tokio::select! {
            _ = links.changed() => {}
            () = async {
                let _ = changes.changed().await;
                // Heartbeats come in bursts.
                tokio::time::sleep(Duration::from_secs(1)).await;
            } => {}
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
    }
}

/// Whether a node that has run for `since` knows what its neighbours know, or has had the time to.
pub(crate) fn in_sync(node: &Node, since: Duration) -> bool {
    since >= FIRST_SYNC || links_are_even(node)
}

/// Whether there is a neighbour, and each one's log is even with this node's.
fn links_are_even(node: &Node) -> bool {
    let peers = node.peers().into_iter();
    let mut links = peers.filter_map(|peer| peer.link).peekable();
    links.peek().is_some() && links.all(|link| link.progress.in_sync)
}

/// The same where the daemon of this home runs in another process, which has just been started perhaps:
/// waits until `is` holds, or that node knows what its neighbours know, or for a few seconds. Somebody
/// [follows](crate::changes::follow) its log meanwhile.
pub(crate) async fn settle_beside(home: &Home, is: impl Fn() -> bool) {
    let mut changes = home.log.changes();
    let becomes = async {
        while !is() {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let settled = async {
        let status: Capability = NODE_STATUS
            .parse()
            .map_err(|e| CallError::bad_request("capability", e))?;
        let client = local_api::connect(&home.dir).await?;
        let call = client.call(&status, &json!({ "settled": true }))?;
        call.result_within(FIRST_SYNC + PROBE).await
    };
    tokio::select! {
        () = becomes => {}
        _ = settled => {}
    }
    if let Err(error) = home.log.update() {
        tracing::warn!("the event log could not be read: {error}");
    }
}

/// Tells programs on this machine about the node.
#[derive(Default)]
struct StatusHandler {
    node: Mutex<Option<Node>>,
    told: Mutex<Told>,
    health: SharedHealth,
}

/// What the program says of itself.
#[derive(Default)]
struct Told {
    serving: Serving,
    url: Option<String>,
}

/// Whether a node serves layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Serving {
    /// Nobody has asked for it.
    #[default]
    No,
    /// This shard.
    Shard(String),
    /// It would, and cannot now, for this reason.
    Suspended(String),
}

/// What a running node tells of itself through its local API.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Running {
    /// Where it listens.
    pub(crate) listen: Option<String>,
    /// How mDNS does: `running`, `off`, or why not.
    pub(crate) mdns: String,
    /// The peers it has a link with or knows of.
    pub(crate) peers: Vec<Peer>,
    /// The shard that it serves, if it does.
    pub(crate) serving: Option<String>,
    /// Why it serves none now, although it is to.
    #[serde(default)]
    pub(crate) suspended: Option<String>,
    /// URL of its OpenAI-compatible interface, if it is open.
    #[serde(default)]
    pub(crate) url: Option<String>,
    /// Whether each host that advertises layers answers, by node id.
    #[serde(default)]
    pub(crate) hosts: BTreeMap<String, bool>,
    /// What its chats have seen of hosts.
    #[serde(default)]
    pub(crate) host_health: Vec<ShardHealth>,
}

/// A peer of a running node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Node id.
    pub(crate) node: String,
    /// Where it is, or was looked for.
    pub(crate) endpoint: String,
    /// Whether there is a link with it now.
    pub(crate) connected: bool,
    /// How it was found: `mdns`, `static`, `log`, or `incoming`.
    pub(crate) found: String,
}

fn status_descriptor() -> Result<CapabilityDescriptor, Failure> {
    let name = NODE_STATUS.parse().map_err(Failure::internal)?;
    Ok(CapabilityDescriptor {
        params: Params::none()
            .optional("hosts", ParamKind::Flag)
            .optional("settled", ParamKind::Flag),
        ..CapabilityDescriptor::new(
            name,
            "Tells programs on the node's own machine where it listens and whom it is linked with.",
            Trust::Member,
        )
    })
}

/// How long a host may take to answer before it is called unreachable: many times what a busy one
/// takes on a LAN, and soon enough for somebody who looks.
const PROBE: Duration = Duration::from_millis(1500);

/// Whether each host that advertises layers answers now.
async fn hosts_that_answer(node: &Node) -> BTreeMap<String, bool> {
    let state = node.log().state();
    let hosts: BTreeSet<NodeId> = state.shards(now_ms()).map(|a| a.author).collect();
    let asked = hosts.into_iter().map(|host| async move {
        let answers = host == node.id() || answers(node, host).await;
        (host.to_string(), answers)
    });
    join_all(asked).await.into_iter().collect()
}

async fn answers(node: &Node, host: NodeId) -> bool {
    let describe = Capability::bus_describe();
    let params = json!({});
    let asked = async {
        let answer = match node.call(host, &describe, &params).await {
            Ok(stream) => stream.result().await,
            Err(error) => Err(error),
        };
        // Who refuses is there.
        !matches!(answer, Err(error) if *error.code() == Code::UNREACHABLE)
    };
    tokio::time::timeout(PROBE, asked).await.unwrap_or(false)
}

impl Handler for StatusHandler {
    fn call(
        &self,
        ctx: CallContext,
        params: Value,
        _: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        Box::pin(async move {
            ctx.require_local("are told about its peers")?;
            let node = self.node.lock().clone();
            let node =
                node.ok_or_else(|| CallError::new(Code::BUSY, "the node is starting or stopping"))?;
            if params["settled"] == true {
                settle_in(&node).await;
            }
            let mut running = self.running(&node);
            if params["hosts"] == true {
                running.hosts = hosts_that_answer(&node).await;
            }
            serde_json::to_value(running).map_err(|e| CallError::new(Code::INTERNAL, e.to_string()))
        })
    }
}

impl StatusHandler {
    fn set(&self, node: Option<Node>) {
        *self.node.lock() = node;
    }

    fn running(&self, node: &Node) -> Running {
        let hints = node.discovery().found();
        let found = |peer: &NodeId| {
            let of_peer = hints.iter().filter(|h| h.node.as_ref() == Some(peer));
            let how: BTreeSet<&str> = of_peer.map(|h| source_name(h.source)).collect();
            Vec::from_iter(how).join(", ")
        };
        let peers = node.peers().into_iter().map(|peer| Peer {
            node: peer.node.to_string(),
            endpoint: peer
                .endpoints
                .first()
                .map_or_else(String::new, ToString::to_string),
            connected: peer.link.is_some(),
            found: found(&peer.node),
        });
        let told = self.told.lock();
        let (serving, suspended) = match told.serving.clone() {
            Serving::No => (None, None),
            Serving::Shard(shard) => (Some(shard), None),
            Serving::Suspended(why) => (None, Some(why)),
        };
        Running {
            listen: node.listen_addr().map(|a| a.to_string()),
            mdns: mdns_name(node.discovery().health()).to_owned(),
            peers: peers.collect(),
            serving,
            suspended,
            url: told.url.clone(),
            hosts: BTreeMap::new(),
            host_health: self.health.all(),
        }
    }
}

fn source_name(source: Source) -> &'static str {
    match source {
        Source::Proved => "earlier",
        Source::Static => "static peer",
        Source::Log => "log",
        Source::Mdns => "mDNS",
    }
}

fn mdns_name(health: MdnsHealth) -> &'static str {
    match health {
        MdnsHealth::Off => "off",
        MdnsHealth::Running => "running",
        MdnsHealth::Flooded => "resting: the network is flooded",
        MdnsHealth::Silent => "silent: it does not answer",
        MdnsHealth::Failed => "failed to start",
        #[allow(unreachable_patterns, reason = "more may come")]
        _ => "unknown",
    }
}
