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

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use hearthnet_transport::{Time, TokenBucket};

use super::announcement::{Announcement, CommunityTag, Instance};
use super::local::Local;
use crate::NodeId;

/// Upper bound of a node's endpoints per class, except proved ones: enough for a host with two
/// networks, IPv4 and IPv6 on each, and two programs.
pub const MAX_PER_CLASS: usize = 8;
/// Upper bound of a node's proved endpoints.
pub const MAX_PROVED: usize = 4;
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

/// Validity of an mDNS hint: more than two query intervals.
const MDNS_LIFE_MS: u64 = 10 * 60 * 1000;
/// Remaining validity of an mDNS endpoint after the node announced others instead: the lifetime of
/// an mDNS address record, so that one forged announcement does not evict it.
const SUPERSEDED_MS: u64 = 120 * 1000;
/// Validity of signed and proved endpoints: a node that was away for a week is still found.
const KEPT_MS: u64 = 8 * 24 * 60 * 60 * 1000;

/// Longest back-off of a failed claim, in ms. A node that is there after all can dial this one.
const LONGEST_REST_MS: u64 = 15 * 60 * 1000;
/// Burst of a member's new claims: eight restarts of a machine with four addresses, at new ports.
const CLAIMS: u64 = 32;
/// Seconds per further new claim.
const CLAIM_S: u64 = 120;

/// Source of a hint, most trusted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The node answered there and proved its key.
    Proved,
    /// Configured by a person: a static peer, or an endpoint of an invite code.
    Static,
    /// Signed by the node: a `node.seen` event or an advertisement in the log.
    Log,
    /// Received over mDNS, from any device.
    Mdns,
}

/// Known endpoints of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hint {
    /// The node; `None` for a static peer without a node id.
    pub node: Option<NodeId>,
    /// Announced community, if received over mDNS.
    pub community: Option<CommunityTag>,
    /// Announced capabilities; empty if not received over mDNS.
    pub caps: Vec<String>,
    /// Endpoints, best first; never empty.
    pub endpoints: Vec<SocketAddr>,
    /// Best source of the endpoints.
    pub source: Source,
    /// Time of the last mention of an endpoint by any source, in Unix milliseconds.
    pub last_seen_ms: u64,
}

/// An endpoint of a node.
#[derive(Debug, Clone)]
struct Record {
    endpoint: SocketAddr,
    /// Configured by a person: never expires.
    written: bool,
    /// End of the signed statement's validity; 0: none.
    log_until: u64,
    /// End of the mDNS announcement's validity; 0: none.
    mdns_until: u64,
    /// Last mention by any source.
    seen_ms: u64,
    /// Last time that the node answered there.
    proved_ms: Option<u64>,
    /// Failed dials since it was last proved, or appeared anew.
    failures: u32,
    /// Last dial.
    tried_ms: u64,
}

impl Record {
    fn new(endpoint: SocketAddr) -> Self {
        Self {
            endpoint,
            written: false,
            log_until: 0,
            mdns_until: 0,
            seen_ms: 0,
            proved_ms: None,
            failures: 0,
            tried_ms: 0,
        }
    }

    /// True if it is a failed claim whose back-off has not passed.
    fn rests(&self, now_ms: u64) -> bool {
        let rest = 1000u64 << self.failures.min(20);
        self.failures > 0
            && self.class(now_ms) == Some(Source::Log)
            && self.tried_ms.abs_diff(now_ms) < rest.min(LONGEST_REST_MS)
    }

    /// The best current class; `None` if it has expired.
    fn class(&self, now_ms: u64) -> Option<Source> {
        if self
            .proved_ms
            .is_some_and(|at| now_ms.saturating_sub(at) < KEPT_MS)
        {
            Some(Source::Proved)
        } else if self.written {
            Some(Source::Static)
        } else if now_ms < self.log_until {
            Some(Source::Log)
        } else if now_ms < self.mdns_until {
            Some(Source::Mdns)
        } else {
            None
        }
    }

    /// Records a mention by `source`.
    fn see(&mut self, source: Source, now_ms: u64) {
        if self.class(now_ms).is_none() {
            // It had expired: earlier failures say nothing about now.
            self.failures = 0;
        }
        self.seen_ms = self.seen_ms.max(now_ms);
        match source {
            Source::Proved => {
                self.proved_ms = Some(now_ms);
                self.failures = 0;
            }
            Source::Static => self.written = true,
            Source::Log => self.log_until = now_ms.saturating_add(KEPT_MS),
            Source::Mdns => self.mdns_until = now_ms.saturating_add(MDNS_LIFE_MS),
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Entry {
    community: Option<CommunityTag>,
    caps: Vec<String>,
    records: Vec<Record>,
    /// Endpoints that the node signed recently, dialled for that reason or not.
    signed: Vec<SocketAddr>,
    /// Budget of the node's new claims.
    claims: Option<TokenBucket>,
}

impl Entry {
    /// Takes one new claim from the budget. Returns false if it is used up.
    fn may_claim(&mut self, now_ms: u64) -> bool {
        let full = || TokenBucket::with_burst(1, CLAIMS * CLAIM_S, Time::ZERO);
        let claims = self.claims.get_or_insert_with(full);
        claims.refill(Time::from_millis(now_ms));
        let may = claims.has(CLAIM_S);
        if may {
            claims.spend(CLAIM_S);
        }
        may
    }

    /// Records a mention of `endpoint` by `source`. Returns false if its class is full.
    fn see(&mut self, endpoint: SocketAddr, source: Source, now_ms: u64) -> bool {
        if let Some(record) = self.records.iter_mut().find(|r| r.endpoint == endpoint) {
            record.see(source, now_ms);
        } else {
            // A signed mDNS endpoint uses a slot of the signed class.
            let source = match source {
                Source::Mdns if self.signed.contains(&endpoint) => Source::Log,
                source => source,
            };
            self.records.retain(|r| r.class(now_ms).is_some());
            let of_class = || {
                self.records
                    .iter()
                    .filter(|r| r.class(now_ms) == Some(source))
            };
            if source == Source::Mdns && of_class().count() >= MAX_PER_CLASS {
                // An endpoint that the node no longer announces has at most this much time left.
                let leaving = now_ms.saturating_add(SUPERSEDED_MS);
                let Some(victim) = of_class()
                    .filter(|r| r.failures > 0 || r.mdns_until <= leaving)
                    .max_by_key(|r| (r.failures, Reverse(r.seen_ms), r.endpoint))
                    .map(|r| r.endpoint)
                else {
                    return false;
                };
                self.records.retain(|r| r.endpoint != victim);
            }
            let mut record = Record::new(endpoint);
            record.see(source, now_ms);
            self.records.push(record);
        }
        self.trim(now_ms);
        true
    }

    /// Enforces the bounds of all classes. An endpoint may change into a full class, for example
    /// when it is proved: then the endpoint with the oldest mention is dropped.
    fn trim(&mut self, now_ms: u64) {
        self.records.retain(|r| r.class(now_ms).is_some());
        for (class, places) in [
            (Source::Proved, MAX_PROVED),
            (Source::Static, MAX_PER_CLASS),
            (Source::Log, MAX_PER_CLASS),
            (Source::Mdns, MAX_PER_CLASS),
        ] {
            let is_of = |r: &Record| r.class(now_ms) == Some(class);
            while self.records.iter().filter(|r| is_of(r)).count() > places {
                let of_class = self.records.iter_mut().filter(|r| is_of(r));
                let oldest = of_class.min_by_key(|r| (r.proved_ms, r.seen_ms, r.endpoint));
                let Some(oldest) = oldest else { break };
                // A proved endpoint falls back to its next class; others are dropped.
                let fallback = Record {
                    proved_ms: None,
                    ..oldest.clone()
                };
                if class == Source::Proved && fallback.class(now_ms).is_some() {
                    *oldest = fallback;
                } else {
                    let gone = oldest.endpoint;
                    self.records.retain(|r| r.endpoint != gone);
                }
            }
        }
    }

    /// True if this stranger may be replaced by another.
    fn expendable(&self, now_ms: u64) -> bool {
        self.records.iter().all(|r| match r.class(now_ms) {
            None => true,
            Some(class) => class == Source::Mdns && r.failures > 0,
        })
    }

    fn only_mdns(&self, now_ms: u64) -> bool {
        self.records
            .iter()
            .all(|r| r.class(now_ms).is_none_or(|class| class == Source::Mdns))
    }

    fn hint(&self, node: NodeId, local: &Local, now_ms: u64) -> Option<Hint> {
        let live = || self.records.iter().filter(|r| r.class(now_ms).is_some());
        Some(Hint {
            node: Some(node),
            community: self.community,
            caps: self.caps.clone(),
            endpoints: {
                let ranked = ranked(&self.records, local, now_ms).into_iter();
                ranked.map(|(_, endpoint)| endpoint).collect()
            },
            source: live().filter_map(|r| r.class(now_ms)).min()?,
            last_seen_ms: live().map(|r| r.seen_ms).max()?,
        })
    }
}

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

impl Entry {
    /// Current endpoints in a fixed order, to detect changes.
    fn hint_set(&self, now_ms: u64) -> Vec<SocketAddr> {
        let live = self.records.iter().filter(|r| r.class(now_ms).is_some());
        let mut endpoints: Vec<_> = live.map(|r| r.endpoint).collect();
        endpoints.sort();
        endpoints
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

/// Current endpoints, best first, each with its best source.
fn ranked(records: &[Record], local: &Local, now_ms: u64) -> Vec<(Source, SocketAddr)> {
    let mut live: Vec<_> = records
        .iter()
        .filter_map(|r| Some((r, r.class(now_ms)?)))
        .collect();
    live.sort_by_key(|(r, class)| {
        (
            *class == Source::Mdns,
            r.failures > 0,
            *class != Source::Proved,
            local.distance(&r.endpoint),
            *class,
            r.endpoint.is_ipv6(),
            Reverse(r.seen_ms),
            r.endpoint,
        )
    });
    let ranked = live.into_iter().map(|(r, class)| (class, r.endpoint));
    ranked.collect()
}

#[cfg(test)]
#[path = "book_tests.rs"]
mod tests;
