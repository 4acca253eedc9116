//! Address book: known endpoints of nodes, with source, age and dial results.
//!
//! Pure: time is an argument. Every entry is a hint, because any device on the network can claim to
//! be any node at any address. The book keeps false claims few, and they never displace better
//! knowledge:
//!
//! - An endpoint of a node belongs to one *class*, the best that applies: proved (the node answered
//!   there with its key), configured by a person, signed by the node in the community's log,
//!   received over mDNS. Each class has its own bound, so mDNS only displaces mDNS.
//! - Endpoints known only from mDNS are dialled after all others ([`vouched_first`]).
//! - An mDNS endpoint that the node has signed counts as signed, even if the signature alone would
//!   not make it dialled (this machine's own addresses).
//! - Within mDNS, earlier endpoints stay until a dial fails, they expire, or the node's
//!   announcement leaves them out. New announcements cannot clear the table.
//! - An endpoint that only the node itself signs is a *claim*. A failed claim is not dialled for a
//!   time that grows with each failure, and new claims are rate-limited, so that no member can make
//!   others scan the ports of a machine.
//! - Each member has an entry. All other nodes share [`MAX_STRANGERS`] entries.
//!
//! Limit: a device that floods the LAN with a member's id before that member was first reached can
//! delay finding it at addresses that it has not signed. The log's addresses, static peers and the
//! member's own dials still work.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::announcement::{Announcement, Instance};
use super::entry::{Entry, Hint, MAX_PER_CLASS, Record, SUPERSEDED_MS, Source, ranked};
use super::local::Local;
use crate::NodeId;

/// Upper bound of a node's endpoints dialled together: this many vouched ones, and as many from
/// mDNS.
const MAX_DIALLED: usize = 8;
/// Upper bound of nodes that are not known members: another large community, while a join is under
/// way.
pub const MAX_STRANGERS: usize = 256;
/// Upper bound of static peers without a node id.
pub const MAX_UNNAMED: usize = 64;
/// Upper bound of members. The log bounds its own community; this bounds a caller's mistake.
pub const MAX_MEMBERS: usize = 4096;

/// The address book; its guarantees are in the module's documentation.
#[derive(Debug, Clone, Default)]
pub struct AddressBook {
    own: Option<NodeId>,
    local: Local,
    members: BTreeMap<NodeId, Entry>,
    strangers: BTreeMap<NodeId, Entry>,
    /// Static peers without a node id: the node last proved there, and the time since which it is
    /// listed.
    unnamed: Vec<(SocketAddr, Option<NodeId>, u64)>,
}

impl AddressBook {
    /// An empty book of the node `own`, which never lists itself.
    pub fn new(own: Option<NodeId>) -> Self {
        Self {
            own,
            ..Self::default()
        }
    }

    /// Sets this machine's addresses, from which distances follow.
    pub(crate) fn set_local(&mut self, local: Local) {
        self.local = local;
    }

    /// The addresses set by `AddressBook::set_local`.
    pub fn local(&self) -> &Local {
        &self.local
    }

    /// Sets the members of the community (at most [`MAX_MEMBERS`]), which cannot be displaced. A
    /// former member becomes a stranger.
    pub(crate) fn set_members(&mut self, members: impl IntoIterator<Item = NodeId>, now_ms: u64) {
        let mut before = std::mem::take(&mut self.members);
        for node in members.into_iter().take(MAX_MEMBERS) {
            if Some(node) == self.own {
                continue;
            }
            let entry = before
                .remove(&node)
                .or_else(|| self.strangers.remove(&node))
                .unwrap_or_default();
            self.members.insert(node, entry);
        }
        for (node, entry) in before {
            if !entry.records.is_empty() && self.make_place(Source::Log, now_ms) {
                self.strangers.insert(node, entry);
            }
        }
    }

    /// Records an mDNS announcement with the endpoints that passed [`Local::admit`], best first;
    /// those beyond [`MAX_PER_CLASS`] are ignored. Other endpoints of the same node and port expire
    /// within two minutes. Returns true if anything changed.
    pub fn heard(&mut self, said: &Announcement, endpoints: &[SocketAddr], now_ms: u64) -> bool {
        let Some(entry) = self.entry(said.node, Source::Mdns, now_ms) else {
            return false;
        };
        let before = entry.hint_set(now_ms);
        for record in &mut entry.records {
            if record.endpoint.port() == said.port && !endpoints.contains(&record.endpoint) {
                let until = now_ms.saturating_add(SUPERSEDED_MS);
                record.mdns_until = record.mdns_until.min(until);
            }
        }
        for endpoint in endpoints.iter().take(MAX_PER_CLASS) {
            entry.see(*endpoint, Source::Mdns, now_ms);
        }
        let same = entry.community == Some(said.community) && entry.caps == said.caps;
        if !same {
            entry.community = Some(said.community);
            entry.caps.clone_from(&said.caps);
        }
        let changed = !same || entry.hint_set(now_ms) != before;
        self.forget_empty(&said.node);
        changed
    }

    /// Records an mDNS goodbye or expiry: removes what this instance announced. Returns true if
    /// anything changed.
    ///
    /// Proved, static and signed endpoints stay, since anyone can send a goodbye in another's name.
    pub fn gone(&mut self, instance: &Instance) -> bool {
        let mut changed = false;
        for (_, entry) in self
            .members
            .iter_mut()
            .chain(&mut self.strangers)
            .filter(|(node, _)| instance.may_be(node))
        {
            for record in &mut entry.records {
                if record.endpoint.port() == instance.port && record.mdns_until != 0 {
                    record.mdns_until = 0;
                    changed = true;
                }
            }
        }
        changed
    }

    /// Records endpoints configured by a person ([`Source::Static`]) or signed by the node
    /// ([`Source::Log`]). In a full class the newest stay. Returns true if anything changed.
    pub fn told(
        &mut self,
        source: Source,
        node: NodeId,
        endpoints: &[SocketAddr],
        now_ms: u64,
    ) -> bool {
        if !matches!(source, Source::Static | Source::Log) {
            return false;
        }
        let Some(entry) = self.entry(node, source, now_ms) else {
            return false;
        };
        let before = entry.hint_set(now_ms);
        for endpoint in endpoints.iter().take(MAX_PER_CLASS) {
            let known = entry.records.iter().any(|one| one.endpoint == *endpoint);
            if known || source != Source::Log || entry.may_claim(now_ms) {
                entry.see(*endpoint, source, now_ms);
            }
        }
        let changed = entry.hint_set(now_ms) != before;
        self.forget_empty(&node);
        changed
    }

    /// Records all endpoints that a node signed recently, including those not passed to
    /// [`Self::told`]. If also received over mDNS, they count as signed.
    pub(crate) fn signed(&mut self, node: &NodeId, endpoints: &[SocketAddr], now_ms: u64) {
        let member = self.members.get_mut(node);
        let Some(entry) = member.or_else(|| self.strangers.get_mut(node)) else {
            return;
        };
        entry.signed = endpoints.iter().copied().take(MAX_PER_CLASS).collect();
        let Entry {
            records, signed, ..
        } = entry;
        for record in records {
            if now_ms < record.mdns_until && signed.contains(&record.endpoint) {
                record.see(Source::Log, now_ms);
            }
        }
        entry.trim(now_ms);
    }

    /// Sets the endpoints of static peers without a node id; those beyond [`MAX_UNNAMED`] are
    /// ignored. Returns true if anything changed.
    pub(crate) fn set_unnamed(
        &mut self,
        endpoints: impl IntoIterator<Item = SocketAddr>,
        now_ms: u64,
    ) -> bool {
        let mut now: Vec<(SocketAddr, Option<NodeId>, u64)> = Vec::new();
        for endpoint in endpoints {
            if now.len() >= MAX_UNNAMED {
                break;
            }
            if now.iter().all(|(known, ..)| *known != endpoint) {
                let before = self.unnamed.iter().find(|(known, ..)| *known == endpoint);
                now.push(before.copied().unwrap_or((endpoint, None, now_ms)));
            }
        }
        let changed = now != self.unnamed;
        self.unnamed = now;
        changed
    }

    /// Records that `node` answered at `endpoint` and proved its key.
    pub fn proved(&mut self, node: NodeId, endpoint: SocketAddr, now_ms: u64) {
        for (known, who, _) in &mut self.unnamed {
            if *known == endpoint {
                *who = Some(node);
            }
        }
        // No other node is at this endpoint.
        for (other, entry) in self.members.iter_mut().chain(&mut self.strangers) {
            if *other != node {
                for record in entry.records.iter_mut().filter(|r| r.endpoint == endpoint) {
                    record.failures = record.failures.saturating_add(1);
                    record.proved_ms = None;
                }
            }
        }
        if let Some(entry) = self.entry(node, Source::Proved, now_ms) {
            entry.see(endpoint, Source::Proved, now_ms);
        }
    }

    /// Records a failed dial of `endpoint` for `node`: no answer, or another node's. `None`: a
    /// static peer without a node id.
    pub fn failed(&mut self, node: Option<&NodeId>, endpoint: SocketAddr) {
        let Some(node) = node else {
            for (known, who, _) in &mut self.unnamed {
                if *known == endpoint {
                    *who = None;
                }
            }
            return;
        };
        let mut records = self.records(node);
        if let Some(record) = records.find(|r| r.endpoint == endpoint) {
            record.failures = record.failures.saturating_add(1);
        }
    }

    /// Endpoints of `node`, best first. The order is: vouched before mDNS, not failed since the
    /// last success, proved, nearest network, most trusted source, IPv4, latest mention.
    pub fn endpoints(&self, node: &NodeId, now_ms: u64) -> Vec<SocketAddr> {
        let all = self.endpoints_by_source(node, now_ms).into_iter();
        all.map(|(_, endpoint)| endpoint).collect()
    }

    /// [`AddressBook::endpoints`], each with its best source.
    pub fn endpoints_by_source(&self, node: &NodeId, now_ms: u64) -> Vec<(Source, SocketAddr)> {
        self.members
            .get(node)
            .or_else(|| self.strangers.get(node))
            .map(|entry| ranked(&entry.records, &self.local, now_ms))
            .unwrap_or_default()
    }

    /// Endpoints to dial now: those without a back-off, cut by [`vouched_first`]. They count as
    /// dialled.
    pub(crate) fn dialable(&mut self, node: &NodeId, now_ms: u64) -> Vec<SocketAddr> {
        let mut endpoints = self.endpoints_by_source(node, now_ms);
        for record in self.records(node).filter(|r| r.rests(now_ms)) {
            endpoints.retain(|(_, at)| *at != record.endpoint);
        }
        let endpoints = vouched_first(endpoints, MAX_DIALLED);
        for record in self.records(node) {
            if endpoints.contains(&record.endpoint) {
                record.tried_ms = now_ms;
            }
        }
        endpoints
    }

    /// All current hints by node id; static peers of unknown nodes come last.
    pub fn hints(&self, now_ms: u64) -> Vec<Hint> {
        let mut hints: Vec<_> = self
            .members
            .iter()
            .chain(&self.strangers)
            .filter_map(|(node, entry)| entry.hint(*node, &self.local, now_ms))
            .collect();
        hints.sort_by_key(|hint| hint.node);
        let unnamed = self.unnamed.iter().filter(|(_, node, _)| node.is_none());
        hints.extend(unnamed.map(|(endpoint, _, since_ms)| Hint {
            node: None,
            community: None,
            caps: Vec::new(),
            endpoints: vec![*endpoint],
            source: Source::Static,
            last_seen_ms: *since_ms,
        }));
        hints
    }

    /// Drops expired endpoints. Returns true if there were any.
    pub fn expire(&mut self, now_ms: u64) -> bool {
        let mut changed = false;
        for entry in self.members.values_mut().chain(self.strangers.values_mut()) {
            let before = entry.records.len();
            entry.trim(now_ms);
            changed |= entry.records.len() != before;
        }
        self.strangers.retain(|_, entry| !entry.records.is_empty());
        changed
    }

    fn records(&mut self, node: &NodeId) -> impl Iterator<Item = &mut Record> {
        let member = self.members.get_mut(node);
        let entry = member.or_else(|| self.strangers.get_mut(node));
        entry.into_iter().flat_map(|entry| &mut entry.records)
    }

    /// The entry of `node`, created if there is room for it.
    fn entry(&mut self, node: NodeId, source: Source, now_ms: u64) -> Option<&mut Entry> {
        if Some(node) == self.own {
            return None;
        }
        if self.members.contains_key(&node) {
            return self.members.get_mut(&node);
        }
        if !self.strangers.contains_key(&node) && !self.make_place(source, now_ms) {
            return None;
        }
        Some(self.strangers.entry(node).or_default())
    }

    /// Makes room for one more stranger, by removing at most one. Returns false if none may go.
    fn make_place(&mut self, source: Source, now_ms: u64) -> bool {
        if self.strangers.len() < MAX_STRANGERS {
            return true;
        }
        let leaves = |entry: &Entry| {
            entry.expendable(now_ms) || (source != Source::Mdns && entry.only_mdns(now_ms))
        };
        let seen = |entry: &Entry| entry.records.iter().map(|r| r.seen_ms).max();
        let victim = self
            .strangers
            .iter()
            .filter(|(_, entry)| leaves(entry))
            .min_by_key(|(node, entry)| (!entry.expendable(now_ms), seen(entry), **node))
            .map(|(node, _)| *node);
        match victim {
            Some(node) => self.strangers.remove(&node).is_some(),
            None => false,
        }
    }

    /// Removes a stranger without endpoints.
    fn forget_empty(&mut self, node: &NodeId) {
        if self
            .strangers
            .get(node)
            .is_some_and(|entry| entry.records.is_empty())
        {
            self.strangers.remove(node);
        }
    }
}

/// The first endpoints of a list, best first: `most` vouched ones (proved, configured or signed),
/// then `most` mDNS ones. So announcements never displace better knowledge, and a node that has
/// moved is found by mDNS.
pub fn vouched_first(
    endpoints: impl IntoIterator<Item = (Source, SocketAddr)>,
    most: usize,
) -> Vec<SocketAddr> {
    let is_heard = |(source, _): &(Source, SocketAddr)| *source == Source::Mdns;
    let (heard, vouched): (Vec<_>, Vec<_>) = endpoints.into_iter().partition(is_heard);
    let both = vouched
        .into_iter()
        .take(most)
        .chain(heard.into_iter().take(most));
    both.map(|(_, endpoint)| endpoint).collect()
}

#[cfg(test)]
#[path = "book_tests.rs"]
mod tests;
