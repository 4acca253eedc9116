//! A community for the tests of this crate and of the crates above it: keys by seed, members, logs
//! in temporary folders. Every function panics if it fails.

#![allow(clippy::unwrap_used, reason = "a test that needs it cannot go on")]

use std::path::Path;
use std::sync::Arc;

use hearthnet_transport::{Admission, Arrival, CloseCode, Config, Hello, Listener, PathRule};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::community::invite::Invite;
use crate::community::log::{
    Body, Dispute, Event, EventLog, Finding, Heads, Lane, Level, LogError, Policy,
};
use crate::node::calls::{
    Answering, CallContext, CallError, CallServer, FrameSink, Handler, OneLevel, Registry,
};
use crate::node::flight::Readers;
use crate::node::joining::JoinHandler;
use crate::node::weights::{Held, MAX_DATA_BYTES, Object, WeightsStore};
use crate::{CommunityId, Descriptor, NodeId, NodeKey, now_ms};

/// Seed of the root key of every community here, unless the caller names another.
pub const ROOT: u8 = 200;

/// Lifetime of invites.
const HOUR_MS: u64 = 3_600_000;

/// The key whose secret is `seed` repeated.
pub fn key(seed: u8) -> NodeKey {
    NodeKey::from_secret(&[seed; 32])
}

pub fn id(seed: u8) -> NodeId {
    key(seed).id()
}

/// Descriptor of an idle host of the layers 0 to 7 of 16.
pub fn descriptor(host: NodeId) -> Descriptor {
    Descriptor {
        shard_id: "m:0-7".into(),
        model_id: "m".into(),
        weights_sha256: "0a".repeat(32),
        layer_range: (0, 7),
        total_layers: 16,
        vram_required_mb: 10,
        weights_mb: 0,
        kv_mb: 0,
        max_concurrent_streams: 4,
        host,
        endpoint: "127.0.0.1:1".into(),
        advertised_at: 1,
        boundary_dtype: "fp16".into(),
        arithmetic: "canonical-1".into(),
        ms_per_token: 1.5,
        queue_depth: 0,
        software: "hearthnet/0.1.0".into(),
    }
}

/// Dispute about rows of a host, without a witness. There is no such evidence.
pub fn dispute(accused: NodeId) -> Dispute {
    Dispute {
        layers: (0, 7),
        accused,
        weights: [10; 32],
        witness: None,
        evidence: [8; 32],
        receipts: vec![[7; 32]],
        evidence_bytes: 100,
    }
}

/// A node with its log in a temporary folder, which is removed with it.
#[derive(Debug)]
pub struct Home {
    pub log: EventLog,
    pub key: Arc<NodeKey>,
    dir: TempDir,
}

impl Home {
    /// The home of the node that founds a community, with research on or off.
    pub fn founded(founder: NodeKey, research: bool) -> Self {
        Self::founded_as(ROOT, founder, research)
    }

    /// [`Self::founded`], with the root key of seed `root`.
    pub fn founded_as(root: u8, founder: NodeKey, research: bool) -> Self {
        let policy = Policy {
            research,
            ..Policy::default()
        };
        let (dir, node, name) = (TempDir::new().unwrap(), founder.id(), "Elm Street");
        let log = EventLog::create(dir.path(), &key(root), node, name, policy, now_ms());
        Self::of(log, founder, dir)
    }

    /// The home of a node that knows only the id of its community.
    pub fn joining(node: NodeKey) -> Self {
        let dir = TempDir::new().unwrap();
        let log = EventLog::prepare(dir.path(), CommunityId::from(id(ROOT)));
        Self::of(log, node, dir)
    }

    /// Opens an existing home, even if its files were damaged.
    pub fn opened(dir: TempDir, node: NodeKey) -> Self {
        Self::of(EventLog::open(dir.path()), node, dir)
    }

    fn of(log: Result<EventLog, LogError>, node: NodeKey, dir: TempDir) -> Self {
        let (log, key) = (log.unwrap(), Arc::new(node));
        Self { log, key, dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Appends an event signed by this home's node.
    pub fn append(&self, body: Body) {
        self.log.append(&self.key, body, now_ms()).unwrap();
    }

    /// Writes an invite that is valid for an hour.
    pub fn invite(&self, level: Level, uses: u32) -> Invite {
        let expires_ms = now_ms() + HOUR_MS;
        let community = self.log.community();
        let invite = Invite::generate(community, expires_ms / 1000, Vec::new()).unwrap();
        self.append(Body::Invited {
            invite: invite.key().id(),
            level,
            uses,
            expires_ms,
        });
        invite
    }

    /// Admits `node` with a new invite.
    pub fn admit(&self, node: NodeId, level: Level) {
        let request = self.invite(level, 1).request(node, "neighbour").unwrap();
        self.append(Body::Admitted { request, level });
    }

    /// Revokes `node` and all its events.
    pub fn revoke(&self, node: NodeId) {
        self.append(Body::Revoked { node, last_seq: 0 });
    }

    /// Lets a member accuse `host`, and this home's anchor find it guilty.
    pub fn convict(&self, accuser: &NodeKey, host: NodeId) {
        self.judge(accuser, host, Finding::Accused);
    }

    /// Lets a member accuse `host`, and this home's anchor judge that.
    pub fn judge(&self, accuser: &NodeKey, host: NodeId, finding: Finding) {
        let body = dispute(host);
        let dispute = body.id(&accuser.id());
        let announced = self.log.append(accuser, Body::Disputed(body), now_ms());
        announced.unwrap();
        self.append(Body::Judged { dispute, finding });
    }
}

/// Copies every event that `other` has and `log` lacks.
pub fn hear(log: &EventLog, other: &EventLog) {
    let known = other.missing(&log.heads(), 1024, 1 << 20).unwrap().events;
    let from = key(ROOT).id();
    let taken = log.receive(&known, from, now_ms()).unwrap();
    assert_eq!(taken.accepted.len(), known.len(), "every event is accepted");
}

/// Admits every peer, and refuses every session.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)] // A rule, which has no parts.
pub struct Open;

impl Admission for Open {
    fn admit_peer(&self, _: &NodeId) -> bool {
        true
    }

    fn admit_path(&self, _: &NodeId, _: &str) -> Result<(), CloseCode> {
        Ok(())
    }

    fn admit_hello(&self, _: &NodeId, _: &Hello, _: u64) -> Result<(), CloseCode> {
        Err(CloseCode::PurposeUnknown)
    }
}

/// A host that answers every `diagnose` call with fixed pages or a fixed error.
#[derive(Debug)]
pub struct DiagnoseHost {
    /// Address in the form of the command line: `ADDR:PORT#NODEID`.
    pub at: String,
    task: JoinHandle<()>,
}

impl DiagnoseHost {
    /// Starts the host. With empty `rules` it has no path for calls, as a node without the
    /// capability.
    pub async fn start(pages: Result<Vec<Value>, CallError>, rules: &[PathRule]) -> Self {
        let key = NodeKey::generate().unwrap();
        let registry = Registry::new();
        let diagnose = Readers::Callers(key.id()).descriptor();
        registry.register(diagnose, Arc::new(Pages(pages))).unwrap();
        let member = OneLevel(Some(Level::Member));
        let server = CallServer::new(key.id(), Arc::new(registry), Arc::new(member));
        let (server, identity) = (Arc::new(server), key.identity().unwrap());
        let (here, config) = ("127.0.0.1:0", Config::default());
        let listening = Listener::bind(here, &identity, Arc::new(Open), config, rules);
        let mut listener = listening.await.unwrap();
        let at = format!("{}#{}", listener.local_addr(), key.id());
        let task = tokio::spawn(async move {
            loop {
                if let Arrival::Peer(socket) = listener.accept().await {
                    let server = Arc::clone(&server);
                    tokio::spawn(async move { server.serve(socket).await });
                }
            }
        });
        Self { at, task }
    }
}

impl Drop for DiagnoseHost {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Pages(Result<Vec<Value>, CallError>);

impl Handler for Pages {
    fn call(&self, _: CallContext, _: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            for page in self.0.as_ref().map_err(Clone::clone)? {
                out.send("page", page).await?;
            }
            Ok(json!({}))
        })
    }
}

/// A member that admits joiners and serves them an outdated log: it knows later events, but keeps
/// them back. The events it writes itself go on to `others`, so that its joiners are members there.
pub struct TruncatingMember {
    admits: JoinHandler,
    kept: EventLog,
    others: EventLog,
}

impl TruncatingMember {
    /// Admits with `key`, from the outdated log `kept`; copies its new events to `others`.
    pub fn new(key: Arc<NodeKey>, kept: EventLog, others: EventLog) -> Self {
        Self {
            admits: JoinHandler::new(kept.clone(), key),
            kept,
            others,
        }
    }
}

impl Handler for TruncatingMember {
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            let answer = self.admits.call(ctx, params, out).await?;
            hear(&self.others, &self.kept);
            Ok(answer)
        })
    }

    fn authorize_stranger(
        &self,
        caller: &NodeId,
        params: &Value,
    ) -> Result<Option<NodeId>, CallError> {
        self.admits.authorize_stranger(caller, params)
    }
}

/// A copy of a log's durable events in its own folder, without the events that carry addresses.
pub fn durable_copy(dir: &Path, log: &EventLog) -> EventLog {
    let copy = EventLog::prepare(dir, log.community()).unwrap();
    let all = log.missing(&Heads::empty(log.community()), 1024, 1 << 20);
    let mut all = all.unwrap().events;
    all.retain(|raw| matches!(Event::verify(raw).unwrap().lane, Lane::Durable { .. }));
    copy.receive(&all, key(ROOT).id(), now_ms()).unwrap();
    copy
}

/// A store in memory: every piece of one model, and objects of 1,000 bytes each. The last piece has
/// 1,000 bytes, and the others the maximum.
#[derive(Debug, Clone)]
pub struct Shelf {
    weights: [u8; 32],
    pieces: u32,
}

impl Shelf {
    /// A store of `pieces` pieces.
    pub fn of(weights: [u8; 32], pieces: u32) -> Self {
        Self { weights, pieces }
    }
}

impl WeightsStore for Shelf {
    fn held(&self, weights: &[u8; 32]) -> Option<Held> {
        let held = Held {
            head_bytes: 1000,
            manifest_bytes: 1000,
            piece_list_bytes: 1000,
            pieces: std::iter::once(0..self.pieces).collect(),
        };
        (*weights == self.weights).then_some(held)
    }

    fn piece(&self, weights: &[u8; 32], index: u32) -> Option<Vec<u8>> {
        let is_held = *weights == self.weights && index < self.pieces;
        let len = match index + 1 == self.pieces {
            true => 1000,
            false => MAX_DATA_BYTES,
        };
        is_held.then(|| (0..len).map(|at| (at as u32 ^ index) as u8).collect())
    }

    fn read(&self, weights: &[u8; 32], object: Object, offset: u64, len: u32) -> Option<Vec<u8>> {
        let end = offset.checked_add(u64::from(len))?;
        let is_held = *weights == self.weights && end <= 1000;
        is_held.then(|| (offset..end).map(|at| at as u8 ^ object as u8).collect())
    }
}
