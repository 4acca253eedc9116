//! Community of a victim.
//!
//! | node | level | purpose |
//! |---|---|---|
//! | the root | | founds the community |
//! | the anchor | anchor | a real node that receives the events which the victim passes on |
//! | the victim | trusted | serves layers |
//! | the attacker | trusted | attacks |
//! | the honest caller, the guest | member | must not be affected |

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::Registry;
use hearthnet_bus::discovery::StaticPeer;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, EventLog, Lane, Level, Record};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::testing::{Home, ROOT, hear, key};
use hearthnet_bus::{CommunityId, NodeId, NodeKey, now_ms};
use tokio::time::{interval, timeout};

use crate::raw::{
    self,
    event::{Author, Event},
};
use crate::victim::{KEY_FILE, Victim};
use crate::{Findings, HarnessError, Result};

/// Time limit for gossip.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Body of an event that sets the level of `node`. Its author has the events of `node` up to
/// `last_seq`.
pub(crate) fn level_change(node: NodeId, level: Level, last_seq: u64) -> Body {
    let last_seq = Some(last_seq);
    Body::LevelChanged {
        node,
        level,
        last_seq,
    }
}

/// Appends events to a log, signed by `by`, and returns them as other nodes receive them.
pub(crate) fn appended(
    log: &EventLog,
    by: &NodeKey,
    bodies: impl IntoIterator<Item = Body>,
) -> Result<Vec<Vec<u8>>> {
    let before = log.heads();
    for body in bodies {
        log.append(by, body, now_ms())?;
    }
    Ok(log.missing(&before, 100, 1 << 20)?.events)
}

/// Community with a victim in it.
pub(crate) struct TestCommunity {
    pub(crate) community: [u8; 32],
    anchor: Home,
    /// Until the victim runs and the anchor's node can be linked with it.
    node: Option<Node>,
    folder: PathBuf,
    /// The attacker as an author of the log.
    pub(crate) attacker: Author,
    /// The guest as an author of the log.
    pub(crate) guest: Author,
}

impl std::fmt::Debug for TestCommunity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestCommunity").finish_non_exhaustive()
    }
}

impl TestCommunity {
    /// Founds a community of these nodes, with their homes in `folder`. The first two, attacker and
    /// guest, get a log author; the others are plain members.
    pub(crate) fn found(
        folder: &Path,
        attacker: &NodeKey,
        guest: &NodeKey,
        members: &[NodeId],
    ) -> Result<TestCommunity> {
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

    /// Appends an event of the anchor.
    pub(crate) fn append(&self, body: Body) {
        self.anchor.append(body);
    }

    /// Revokes a node and all its events.
    pub(crate) fn revoke(&self, node: NodeId) {
        self.anchor.revoke(node);
    }

    /// Appends an event of the root key.
    pub(crate) fn append_as_root(&self, body: Body) -> Result<()> {
        self.anchor.log.append(&key(ROOT), body, now_ms())?;
        Ok(())
    }

    /// Invite issued by the anchor.
    pub(crate) fn invite(&self, level: Level, uses: u32) -> Invite {
        self.anchor.invite(level, uses)
    }

    /// Events in the anchor's log.
    fn records(&self) -> Result<Vec<Record>> {
        let mut all = Vec::new();
        self.anchor.log.records(|record| {
            all.push(record);
            Ok(true)
        })?;
        Ok(all)
    }

    /// Greatest Lamport time in the anchor's log.
    pub(crate) fn lamport(&self) -> Result<u64> {
        let records = self.records()?;
        let times = records.iter().map(|record| record.event.lamport);
        Ok(times.max().unwrap_or(0))
    }

    /// Returns how far ahead of `now` the anchor's latest event is dated, and the longest remaining
    /// lifetime of an ephemeral event, in ms.
    pub(crate) fn ahead(&self, now: u64) -> Result<(u64, u64)> {
        let records = self.records()?;
        let own = records.iter().map(|record| &record.event);
        let own = own.filter(|event| event.author == self.anchor());
        let latest = own.map(|event| event.time_ms).max().unwrap_or(0);
        let state = self.anchor.log.state();
        let until = state.nodes(now).map(|seen| seen.expires_ms).max();
        let until = until.unwrap_or(0);
        Ok((latest.saturating_sub(now), until.saturating_sub(now)))
    }

    /// Hash of the community state in the anchor's log.
    pub(crate) fn state(&self) -> String {
        hex::encode(self.anchor.log.state().state_hash())
    }

    pub(crate) fn id(&self) -> CommunityId {
        self.anchor.log.community()
    }

    pub(crate) fn anchor(&self) -> NodeId {
        self.anchor.key.id()
    }

    /// Unsigned next event of the anchor.
    pub(crate) fn next_of_anchor(&self, kind: &str, body: Vec<u8>) -> Result<Event> {
        let (records, anchor) = (self.records()?, self.anchor());
        let last = records.iter().rfind(|record| {
            record.event.author == anchor && matches!(record.event.lane, Lane::Durable { .. })
        });
        let last = last.ok_or_else(|| HarnessError::victim("the anchor has written nothing"))?;
        Ok(Event {
            author: *self.anchor.key.id().as_bytes(),
            seq: last.event.seq + 1,
            lamport: last.event.lamport + 1,
            lane: raw::event::Lane::Durable(last.hash.0),
            ..self.attacker.draft(kind, body)
        })
    }

    /// Event with the anchor's signature over this domain, which only the anchor can make.
    pub(crate) fn signed_by_anchor(&self, event: &Event, domain: &[u8]) -> Vec<u8> {
        event.signed_for(&self.anchor.key, domain)
    }

    /// Number of authors in the anchor's log.
    pub(crate) fn authors(&self) -> usize {
        self.anchor.log.heads().authors.len()
    }

    /// Waits until the anchor has this many events of an author.
    pub(crate) async fn wait_for_events(&self, author: &NodeId, events: u64) -> bool {
        self.wait_until(|| self.events_of(author) >= events).await
    }

    /// Waits until the anchor has detected a fork of an author.
    pub(crate) async fn wait_for_fork(&self, author: &NodeId) -> bool {
        let is_frozen = || self.anchor.log.state().is_frozen(author);
        self.wait_until(is_frozen).await
    }

    /// Waits until the anchor's log satisfies a condition.
    async fn wait_until(&self, so: impl Fn() -> bool) -> bool {
        let mut changes = self.anchor.log.changes();
        let heard = async {
            while !so() {
                // The sender lives as long as the log.
                let _ = changes.changed().await;
            }
        };
        timeout(TIMEOUT, heard).await.is_ok()
    }

    /// Number of events of an author in the anchor's log.
    pub(crate) fn events_of(&self, author: &NodeId) -> u64 {
        let heads = self.anchor.log.heads();
        heads.authors.get(author).map_or(0, |head| head.seq)
    }

    /// Folder of a new trusted node, with its key and a full copy of the log.
    pub(crate) fn home(&self, name: &str) -> Result<PathBuf> {
        let home = self.folder.join(name);
        std::fs::create_dir_all(&home)?;
        let key = NodeKey::load_or_create(&home.join(KEY_FILE))?;
        self.anchor.admit(key.id(), Level::Trusted);
        self.copy(name)?;
        Ok(home)
    }

    /// Empty log of a node.
    fn empty(&self, name: &str) -> Result<EventLog> {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(EventLog::prepare(&folder, self.id())?)
    }

    /// Log of a node that knows all events so far and receives later ones only by hand.
    pub(crate) fn copy(&self, name: &str) -> Result<EventLog> {
        let log = self.empty(name)?;
        self.tell(&log);
        Ok(log)
    }

    /// Log of a new node, fed with all events of the anchor; it keeps those that it accepts.
    pub(crate) fn reader(&self, name: &str) -> Result<EventLog> {
        let log = self.empty(name)?;
        let all = self.anchor.log.missing(&log.heads(), 1024, 1 << 20)?;
        log.receive(&all.events, self.anchor(), now_ms())?;
        Ok(log)
    }

    /// Feeds a log with all events of the anchor.
    pub(crate) fn tell(&self, log: &EventLog) {
        hear(log, &self.anchor.log);
    }

    /// Key of a node whose folder [`home`](Self::home) made.
    pub(crate) fn key_of(&self, name: &str) -> Result<NodeKey> {
        NodeKey::load_or_create(&self.folder.join(name).join(KEY_FILE))
            .map_err(HarnessError::victim)
    }

    /// Links the anchor's node with the victim.
    pub(crate) async fn link(&mut self, victim: &Victim) -> Result<()> {
        let mut settings = NodeSettings::new("anchor");
        settings.discovery.mdns = false;
        settings.discovery.static_peers = vec![StaticPeer::new(victim.addr, Some(victim.node))];
        settings.research = true;
        let registry = Arc::new(Registry::new());
        let (key, log) = (Arc::clone(&self.anchor.key), self.anchor.log.clone());
        let node = Node::start(key, log, settings, registry);
        self.node = Some(node.await?);
        Ok(())
    }

    /// Checks that an event of the anchor reaches the victim, and that both then have the same
    /// state.
    pub(crate) async fn still_works(
        &self,
        victim: &mut Victim,
        found: &mut Findings,
    ) -> Result<()> {
        self.anchor.invite(Level::Member, 1);
        let (begin, mut asking) = (Instant::now(), interval(Duration::from_millis(5)));
        loop {
            asking.tick().await;
            let own = self.state();
            let gauges = victim.gauges().await?;
            let same = gauges.state() == own
                && gauges.events_of(&self.anchor.key.id()) == self.events_of(&self.anchor.key.id());
            if same || begin.elapsed() >= TIMEOUT {
                let what = "an event of the anchor reaches the host, with the same state there";
                found.check_or(what, "it does", same, || "the states differ".to_owned());
                let healthy = gauges.log.is_some_and(|log| log.is_healthy);
                found.holds("the host's log is writable", "true", healthy);
                return Ok(());
            }
        }
    }
}
