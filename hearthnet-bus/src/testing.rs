//! A community for tests of this crate and of those above it: keys by their numbers, logs in
//! folders of their own, members. Everything here panics when it cannot deliver.

#![allow(clippy::unwrap_used, reason = "a test that needs it cannot go on")]

use std::path::Path;
use std::sync::Arc;

use hearthnet_transport::{Admission, Arrival, CloseCode, Config, Hello, Listener, PathRule};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::community::invite::Invite;
use crate::community::log::{Body, EventLog, Heads, Lane, Level, Policy};
use crate::node::calls::{
    Answering, Authority, CallContext, CallError, CallServer, FrameSink, Handler, Registry,
    Research, Trust,
};
use crate::node::flight::Readers;
use crate::node::joining::JoinHandler;
use crate::{CommunityId, NodeId, NodeKey, now_ms};

/// The number of the key that founds every community here, unless another one is named.
pub const ROOT: u8 = 200;

/// How long invites hold.
const HOUR_MS: u64 = 3_600_000;

/// The key with a number.
pub fn key(seed: u8) -> NodeKey {
    NodeKey::from_secret(&[seed; 32])
}

/// Whose key that is.
pub fn id(seed: u8) -> NodeId {
    key(seed).id()
}

/// A node's log, in a folder that goes with it.
#[derive(Debug)]
pub struct Home {
    /// The log.
    pub log: EventLog,
    /// Its node.
    pub key: Arc<NodeKey>,
    dir: TempDir,
}

impl Home {
    /// The home of who has founded a community, with research on or off.
    pub fn founded(founder: NodeKey, research: bool) -> Self {
        Self::founded_as(ROOT, founder, research)
    }

    /// The same of a community with another root.
    pub fn founded_as(root: u8, founder: NodeKey, research: bool) -> Self {
        let policy = Policy {
            research,
            ..Policy::default()
        };
        let (dir, node, name) = (TempDir::new().unwrap(), founder.id(), "Elm Street");
        let log = EventLog::create(dir.path(), &key(root), node, name, policy, now_ms()).unwrap();
        Self {
            log,
            key: Arc::new(founder),
            dir,
        }
    }

    /// The home of a node that knows which community it is in, and nothing else yet.
    pub fn joining(node: NodeKey) -> Self {
        let dir = TempDir::new().unwrap();
        let log = EventLog::prepare(dir.path(), CommunityId::from(id(ROOT))).unwrap();
        Self {
            log,
            key: Arc::new(node),
            dir,
        }
    }

    /// A home that is there already, whatever became of its files.
    pub fn opened(dir: TempDir, node: NodeKey) -> Self {
        Self {
            log: EventLog::open(dir.path()).unwrap(),
            key: Arc::new(node),
            dir,
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Its node writes something.
    pub fn append(&self, body: Body) {
        self.log.append(&self.key, body, now_ms()).unwrap();
    }

    /// An invite by its node, which holds for an hour.
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

    /// Its node makes somebody a member, with an invite of its own.
    pub fn admit(&self, node: NodeId, level: Level) {
        let request = self.invite(level, 1).request(node, "neighbour").unwrap();
        self.append(Body::Admitted { request, level });
    }

    /// Its node puts somebody out, with all that it has written.
    pub fn revoke(&self, node: NodeId) {
        self.append(Body::Revoked { node, last_seq: 0 });
    }
}

/// A log hears all that another one has.
pub fn hear(log: &EventLog, other: &EventLog) {
    let known = other.missing(&log.heads(), 1024, 1 << 20).unwrap().events;
    let from = key(ROOT).id();
    let taken = log.receive(&known, from, now_ms()).unwrap();
    assert_eq!(
        taken.accepted.len(),
        known.len(),
        "it takes all that there is"
    );
}

/// Everyone may connect, and call; nobody gets a session.
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

impl Authority for Open {
    fn trust(&self, _: &NodeId) -> Trust {
        Trust::Member
    }

    fn research(&self) -> Research {
        Research::On
    }
}

/// A host that answers whoever asks it what happened with these pages, or this error, whatever they say.
#[derive(Debug)]
pub struct Told {
    /// Where it is, as a command line names it: `ADDR:PORT#NODEID`.
    pub at: String,
    task: JoinHandle<()>,
}

impl Told {
    /// Starts it; without a rule for calls it is of a version that does not know the question.
    pub async fn start(pages: Result<Vec<Value>, CallError>, rules: &[PathRule]) -> Self {
        let key = NodeKey::generate().unwrap();
        let registry = Registry::new();
        let diagnose = Readers::Callers(key.id()).descriptor();
        registry.register(diagnose, Arc::new(Pages(pages))).unwrap();
        let server = CallServer::new(key.id(), Arc::new(registry), Arc::new(Open));
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

impl Drop for Told {
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

/// A member that lets joiners in, and gives them a log that ends where its own was kept: what others
/// wrote since then it knows, and does not say. Its own word goes on to others, so that whom it lets
/// in is a member to them.
pub struct KeepsBack {
    admits: JoinHandler,
    kept: EventLog,
    others: EventLog,
}

impl std::fmt::Debug for KeepsBack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeepsBack").finish_non_exhaustive()
    }
}

impl KeepsBack {
    /// Admits in the name of `key`, by the log that was `kept`; what it writes goes on into that of `others`.
    pub fn new(key: Arc<NodeKey>, kept: EventLog, others: EventLog) -> Self {
        Self {
            admits: JoinHandler::new(kept.clone(), key, now_ms),
            kept,
            others,
        }
    }
}

impl Handler for KeepsBack {
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            let answer = self.admits.call(ctx, params, out).await?;
            hear(&self.others, &self.kept);
            Ok(answer)
        })
    }

    fn vouches(&self, caller: &NodeId, params: &Value) -> Result<Option<NodeId>, CallError> {
        self.admits.vouches(caller, params)
    }
}

/// A copy of what lasts in a log, in a folder of its own: without what says where anybody is.
pub fn lasting(dir: &Path, log: &EventLog) -> EventLog {
    let copy = EventLog::prepare(dir, log.community()).unwrap();
    let all = log.missing(&Heads::empty(log.community()), 1024, 1 << 20);
    let mut all = all.unwrap().events;
    all.retain(|raw| {
        let event = crate::community::log::Event::verify(raw).unwrap();
        matches!(event.lane, Lane::Durable { .. })
    });
    copy.receive(&all, key(ROOT).id(), now_ms()).unwrap();
    copy
}
