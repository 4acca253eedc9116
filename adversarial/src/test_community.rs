//! The community of a victim that is in one.
//!
//! | who | level | what for |
//! |---|---|---|
//! | the root | | signs the beginning |
//! | the anchor | anchor | a real node beside the victim: it hears what the victim passes on |
//! | the victim | trusted | serves layers |
//! | the attacker | trusted | attacks |
//! | the honest caller, the guest | member | must not notice |

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::Registry;
use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, EventLog, Lane, Level};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::testing::{Home, ROOT, hear, key};
use hearthnet_bus::{CommunityId, NodeId, NodeKey, now_ms};
use tokio::time::{interval, timeout};

use crate::raw::{
    self,
    event::{Author, Event},
};
use crate::victim::{KEY_FILE, Victim};
use crate::{Findings, HarnessError};

/// How long gossip may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A community with a victim in it.
pub(crate) struct TestCommunity {
    pub(crate) community: [u8; 32],
    anchor: Home,
    /// Until the victim is there, and the anchor's node can have a link to it.
    node: Option<Node>,
    folder: PathBuf,
    /// The attacker, as it writes into the log.
    pub(crate) attacker: Author,
    /// The guest, as it does.
    pub(crate) guest: Author,
}

impl std::fmt::Debug for TestCommunity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestCommunity").finish_non_exhaustive()
    }
}

impl TestCommunity {
    /// Founds a community of these; nodes have their homes in `folder`. The first is the attacker, the
    /// second the guest, both with the right to write; the others are members.
    pub(crate) fn found(
        folder: &Path,
        attacker: &NodeKey,
        guest: &NodeKey,
        members: &[NodeId],
    ) -> Result<TestCommunity, HarnessError> {
        let anchor = Home::founded(NodeKey::generate()?, true);
        anchor.admit(attacker.id(), Level::Trusted);
        for member in members.iter().chain([&guest.id()]) {
            anchor.admit(*member, Level::Member);
        }
        let community = *anchor.log.community().as_bytes();
        Ok(TestCommunity {
            community,
            attacker: Author::new(community, attacker),
            guest: Author::new(community, guest),
            anchor,
            node: None,
            folder: folder.to_owned(),
        })
    }

    /// The anchor writes something.
    pub(crate) fn append(&self, body: Body) {
        self.anchor.append(body);
    }

    /// The root key writes something.
    pub(crate) fn append_as_root(&self, body: Body) -> Result<(), HarnessError> {
        self.anchor.log.append(&key(ROOT), body, now_ms())?;
        Ok(())
    }

    /// An invite by the anchor.
    pub(crate) fn invite(&self, level: Level, uses: u32) -> Invite {
        self.anchor.invite(level, uses)
    }

    /// The greatest Lamport time in the anchor's log.
    pub(crate) fn lamport(&self) -> Result<u64, HarnessError> {
        let mut latest = 0;
        self.anchor.log.records(|record| {
            latest = latest.max(record.event.lamport);
            Ok(true)
        })?;
        Ok(latest)
    }

    /// How far ahead of `now` the anchor's latest event is dated; and for how long what anybody says of
    /// itself still holds, at the most. In ms.
    pub(crate) fn ahead(&self, now: u64) -> Result<(u64, u64), HarnessError> {
        let mut latest = 0;
        self.anchor.log.records(|record| {
            if record.event.author == self.anchor.key.id() {
                latest = latest.max(record.event.time_ms);
            }
            Ok(true)
        })?;
        let state = self.anchor.log.state();
        let until = state.nodes(now).map(|seen| seen.expires_ms).max();
        Ok((
            latest.saturating_sub(now),
            until.unwrap_or(0).saturating_sub(now),
        ))
    }

    /// The hash of what the anchor's log says of the community.
    pub(crate) fn state(&self) -> String {
        hex::encode(self.anchor.log.state().state_hash())
    }

    /// Which community it is.
    pub(crate) fn id(&self) -> CommunityId {
        self.anchor.log.community()
    }

    /// Who the anchor is.
    pub(crate) fn anchor(&self) -> NodeId {
        self.anchor.key.id()
    }

    /// What the anchor could write next: all that there is of it but its signature.
    pub(crate) fn next_of_anchor(&self, kind: &str, body: Vec<u8>) -> Result<Event, HarnessError> {
        let mut last = None;
        self.anchor.log.records(|record| {
            if record.event.author == self.anchor.key.id()
                && matches!(record.event.lane, Lane::Durable { .. })
            {
                last = Some((record.event.seq, record.event.lamport, record.hash));
            }
            Ok(true)
        })?;
        let (seq, lamport, hash) =
            last.ok_or_else(|| HarnessError::victim("the anchor has written nothing"))?;
        Ok(Event {
            author: *self.anchor.key.id().as_bytes(),
            seq: seq + 1,
            lamport: lamport + 1,
            lane: raw::event::Lane::Durable(hash.0),
            ..self.attacker.draft(kind, body)
        })
    }

    /// An event with the anchor's signature, over this domain: what only the anchor can make.
    pub(crate) fn signed_by_anchor(&self, event: &Event, domain: &[u8]) -> Vec<u8> {
        event.signed_for(&self.anchor.key, domain)
    }

    /// Authors of whom the anchor's log has anything.
    pub(crate) fn authors(&self) -> usize {
        self.anchor.log.heads().authors.len()
    }

    /// Waits until the anchor has so many events of an author.
    pub(crate) async fn hears(&self, author: &NodeId, events: u64) -> bool {
        self.comes_to(|| self.events_of(author) >= events).await
    }

    /// Waits until the anchor knows that an author's history parts.
    pub(crate) async fn hears_of_fork(&self, author: &NodeId) -> bool {
        let state = || self.anchor.log.state();
        self.comes_to(|| state().is_frozen(author)).await
    }

    /// Waits until something is so with the anchor's log.
    async fn comes_to(&self, so: impl Fn() -> bool) -> bool {
        let mut changes = self.anchor.log.changes();
        let heard = async {
            while !so() {
                // It lives as long as the log.
                let _ = changes.changed().await;
            }
        };
        timeout(PATIENCE, heard).await.is_ok()
    }

    /// What the anchor's log has of an author.
    pub(crate) fn events_of(&self, author: &NodeId) -> u64 {
        let heads = self.anchor.log.heads();
        heads.authors.get(author).map_or(0, |head| head.seq)
    }

    /// The folder of a new trusted node, with its key and all that the community knows.
    pub(crate) fn home(&self, name: &str) -> Result<PathBuf, HarnessError> {
        let home = self.folder.join(name);
        std::fs::create_dir_all(&home)?;
        let key = NodeKey::load_or_create(&home.join(KEY_FILE))?;
        self.anchor.admit(key.id(), Level::Trusted);
        self.copy(name)?;
        Ok(home)
    }

    /// The log of a node that knows all of this and hears no more of it but what it is told.
    pub(crate) fn copy(&self, name: &str) -> Result<EventLog, HarnessError> {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder)?;
        let log = EventLog::prepare(&folder, self.anchor.log.community())?;
        self.tell(&log);
        Ok(log)
    }

    /// The log of a new node that is told all that the anchor knows, and takes of it what it does.
    pub(crate) fn reader(&self, name: &str) -> Result<EventLog, HarnessError> {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder)?;
        let log = EventLog::prepare(&folder, self.id())?;
        let all = self.anchor.log.missing(&log.heads(), 1024, 1 << 20)?;
        log.receive(&all.events, self.anchor(), now_ms())?;
        Ok(log)
    }

    /// Tells a log all that the anchor knows.
    pub(crate) fn tell(&self, log: &EventLog) {
        hear(log, &self.anchor.log);
    }

    /// The key of a node whose folder [`home`](Self::home) made.
    pub(crate) fn key_of(&self, name: &str) -> Result<NodeKey, HarnessError> {
        NodeKey::load_or_create(&self.folder.join(name).join(KEY_FILE))
            .map_err(HarnessError::victim)
    }

    /// Lets the anchor's node link with the victim.
    pub(crate) async fn link(&mut self, victim: &Victim) -> Result<(), HarnessError> {
        let mut settings = NodeSettings::new("anchor");
        settings.discovery.mdns = false;
        settings.discovery.static_peers = vec![StaticPeer::new(victim.addr, Some(victim.node))];
        settings.research = true;
        let registry = Arc::new(Registry::new());
        let node = Node::start(
            Arc::clone(&self.anchor.key),
            self.anchor.log.clone(),
            settings,
            registry,
        );
        self.node = Some(node.await?);
        Ok(())
    }

    /// The community goes on: what the anchor writes reaches the victim, and both then agree on
    /// what all of it means.
    pub(crate) async fn goes_on(
        &self,
        victim: &mut Victim,
        found: &mut Findings,
    ) -> Result<(), HarnessError> {
        self.anchor.invite(Level::Member, 1);
        let (begin, mut asking) = (Instant::now(), interval(Duration::from_millis(5)));
        loop {
            asking.tick().await;
            let own = self.state();
            let gauges = victim.gauges().await?;
            let same = gauges.state() == own
                && gauges.events_of(&self.anchor.key.id()) == self.events_of(&self.anchor.key.id());
            if same || begin.elapsed() >= PATIENCE {
                let what = "what an anchor writes reaches the host, and means the same there";
                found.check_or(what, "it does", same, || "they disagree".to_owned());
                let healthy = gauges.log.is_some_and(|log| log.is_healthy);
                found.holds("the host's log can be written", "true", healthy);
                return Ok(());
            }
        }
    }
}
