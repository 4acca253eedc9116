//! Nodes and hosts in the test's own process, for what the program never does.

use std::net::TcpListener;
use std::sync::Arc;

use hearthnet_bus::NodeKey;
use hearthnet_bus::calls::{Registry, Served, register_shards};
use hearthnet_bus::log::{Body, EventLog};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::now_ms;
use hearthnet_files::ModelFile;
use hearthnet_shard::{RunningHost, ServeConfig, ShardHost};
use hearthnet_testkit::{Tamper, TamperedSource};
use tokio::runtime::Runtime;

use super::community::address;
use super::{Home, Server, model, text};

/// Model id that the program derives from the file name.
pub(crate) fn model_id() -> String {
    let stem = std::path::Path::new(model()).file_stem();
    text(stem.expect("a file's name").as_encoded_bytes())
}

/// Free port of the loopback interface.
pub(crate) fn free_address() -> String {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    free.local_addr().expect("an address").to_string()
}

/// Key and log of a home that no other process uses.
pub(crate) fn key_and_log(home: &Home) -> (NodeKey, EventLog) {
    let data = home.path().join("data");
    let key = NodeKey::load(&data.join("node.key")).expect("its key");
    (key, EventLog::open(&data).expect("its log"))
}

/// Node of a home.
pub(crate) struct OwnNode {
    runtime: Runtime,
    pub(crate) node: Node,
    key: Arc<NodeKey>,
    log: EventLog,
    registry: Arc<Registry>,
}

impl OwnNode {
    /// Starts it with a link to the founder's running node. `at`: where it listens, and where it
    /// says that it does.
    pub(crate) fn start(home: &Home, founder: &Server, at: (&str, &str)) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let (key, log) = key_and_log(home);
        let (key, registry) = (Arc::new(key), Arc::new(Registry::new()));
        let mut settings = NodeSettings::new("own");
        settings.listen = Some(at.0.to_owned());
        settings.endpoints = vec![at.1.to_owned()];
        settings.research = true;
        settings.discovery.mdns = false;
        settings.discovery.static_peers =
            vec![address(founder).parse().expect("a founder's address")];
        let node = Node::start(
            Arc::clone(&key),
            log.clone(),
            settings,
            Arc::clone(&registry),
        );
        let node = runtime.block_on(node).expect("a node");
        Self {
            runtime,
            node,
            key,
            log,
            registry,
        }
    }

    pub(crate) fn log(&self) -> &EventLog {
        &self.log
    }

    pub(crate) fn append(&self, body: Body) {
        self.log
            .append(&self.key, body, now_ms())
            .expect("an event");
    }

    /// Makes it a host, which `start` starts.
    pub(crate) fn host(self, start: impl AsyncFnOnce(&Node) -> RunningHost) -> OwnHost {
        let served = Arc::new(Served::default());
        let key = Arc::clone(&self.key);
        register_shards(&self.registry, key, self.log.clone(), Arc::clone(&served))
            .expect("a registry");
        let host = self.runtime.block_on(start(&self.node));
        served.set(host.descriptor());
        self.append(Body::ShardAdvertised(Box::new(host.descriptor())));
        OwnHost { own: self, host }
    }
}

/// Such a node with layers.
pub(crate) struct OwnHost {
    own: OwnNode,
    pub(crate) host: RunningHost,
}

impl OwnHost {
    /// Starts a host of these layers that computes exactly and then lets `tamper` change its rows.
    pub(crate) fn tampered(
        home: &Home,
        founder: &Server,
        (lo, hi): (u32, u32),
        tamper: Tamper,
    ) -> Self {
        let file = Arc::new(ModelFile::open(model().as_ref()).expect("the real model"));
        let weights = file.manifest(&mut |_, _| {}).weights_id();
        let source = TamperedSource::new(&file, lo..hi + 1, tamper);
        let served = source.served(&model_id(), weights);
        let listen = free_address();
        OwnNode::start(home, founder, (&listen, &listen)).host(async |node: &Node| {
            let config = ServeConfig::new(&listen);
            ShardHost::start_on(config, node, served, source, &mut |_| {})
                .await
                .expect("a host")
        })
    }

    pub(crate) fn id(&self) -> String {
        self.own.node.id().to_string()
    }

    pub(crate) fn short(&self) -> String {
        self.own.node.id().short()
    }

    pub(crate) fn steps(&self) -> u64 {
        self.host.stats().steps
    }
}
