//! Where nodes may be reached: what was heard, from whom, how long ago, and what came of
//! trying.
//!
//! Pure: time is an argument. Everything in here is a hint, because whoever is on the
//! network can claim to be any node at any address. What the book promises is that such
//! claims stay few and never displace better knowledge:
//!
//! - Each endpoint of a node counts in one *class*, the best that it has: proved (that node
//!   answered there, its key checked), written by a person, signed by the node in the
//!   community's log, heard over mDNS. Each class has its own places, so mDNS can only ever
//!   push out mDNS.
//! - In the order in which endpoints are tried, and where that order is cut, what was only heard over
//!   mDNS comes behind all else ([`vouched_first`]).
//! - An endpoint that is heard over mDNS and that the node has signed counts as signed, also where what
//!   is signed alone is not tried (this machine's own addresses).
//! - Within mDNS, who came first stays, until dialing it failed, it went stale, or the node's
//!   announcement left it out. A newcomer cannot clear the table.
//! - What only the node itself says in the log is a *claim*: one that did not answer rests, longer
//!   each time, and of new ones there are few in an hour: nobody can make others try one port of
//!   somebody after the other.
//! - Members have entries by right. All others together have [`MAX_STRANGERS`] entries.
//!
//! What it does not promise: someone who floods the LAN with a member's own id, before that
//! member was reached for the first time, can delay finding it at addresses that it has not signed.
//! The log's addresses, static peers and the member's own dialing still work.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use hearthnet_transport::{Time, TokenBucket};

use super::announcement::{Announcement, CommunityTag, Instance};
use super::local::Local;
use crate::NodeId;

/// Endpoints of one node per class, except for the proved ones: a host with two networks,
/// IPv4 and IPv6 on each, two programs.
pub const MAX_PER_CLASS: usize = 8;
/// Proved endpoints of one node.
pub const MAX_PROVED: usize = 4;
/// Endpoints of one node that are dialled together, of those that are vouched for; and as many others.
const MAX_DIALLED: usize = 8;
/// Nodes that are not known members: another large community, while a join is under way.
pub const MAX_STRANGERS: usize = 256;
/// Static peers without a node id.
pub const MAX_UNNAMED: usize = 64;
/// Members. The log bounds its own community; this bounds a caller's mistake.
pub const MAX_MEMBERS: usize = 4096;

/// How long an mDNS hint counts without being confirmed: more than two rounds of asking.
const MDNS_LIFE_MS: u64 = 10 * 60 * 1000;
/// How long an endpoint still counts after the node announced others instead: the lifetime
/// of an mDNS address record, so that one forged announcement is not an eviction.
const SUPERSEDED_MS: u64 = 120 * 1000;
/// How long signed and proved endpoints count: someone back from a week away should not have
/// to be discovered anew.
const KEPT_MS: u64 = 8 * 24 * 60 * 60 * 1000;

/// Longest rest of a claim that does not answer, in ms. Whoever is there after all dials this node.
const LONGEST_REST_MS: u64 = 15 * 60 * 1000;
/// New claims of one member at once: eight restarts of a machine with four addresses at other ports.
const CLAIMS: u64 = 32;
/// And one more in so many seconds.
const CLAIM_S: u64 = 120;

/// Where a hint comes from, the most trusted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The node answered there, and proved its key.
    Proved,
    /// A person wrote it: a static peer, or the endpoints in an invite code.
    Static,
    /// The node signed it: a `node.seen` event or an advertisement in the community's log.
    Log,
    /// Heard over mDNS: anyone may have said it.
    Mdns,
}

/// What is known about where one node may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hint {
    /// The node; `None` for a static peer of which only the address is known.
    pub node: Option<NodeId>,
    /// The community that it announced, if it was heard over mDNS.
    pub community: Option<CommunityTag>,
    /// What it announced that it offers; empty if it was not heard over mDNS.
    pub caps: Vec<String>,
    /// Where to try, best first; never empty.
    pub endpoints: Vec<SocketAddr>,
    /// The best source among those of the endpoints.
    pub source: Source,
    /// When any source last named one of the endpoints, in Unix milliseconds.
    pub last_seen_ms: u64,
}

/// One endpoint of one node.
#[derive(Debug, Clone)]
struct Record {
    endpoint: SocketAddr,
    /// A person wrote it down: it stays.
    written: bool,
    /// Until when a signed statement counts; 0: there is none.
    log_until: u64,
    /// Until when an mDNS announcement counts; 0: there is none.
    mdns_until: u64,
    /// When any source last named it.
    seen_ms: u64,
    /// When the node last answered there.
    proved_ms: Option<u64>,
    /// Failed attempts since it was proved or came anew.
    failures: u32,
    /// When it was tried last.
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

    /// Whether it may not be tried yet: a claim, which has failed.
    fn rests(&self, now_ms: u64) -> bool {
        let rest = 1000u64 << self.failures.min(20);
        self.failures > 0
            && self.class(now_ms) == Some(Source::Log)
            && self.tried_ms.abs_diff(now_ms) < rest.min(LONGEST_REST_MS)
    }

    /// The best class it has now; `None`: it is of no use any more.
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

    /// Takes note that a source names it.
    fn see(&mut self, source: Source, now_ms: u64) {
        if self.class(now_ms).is_none() {
            // It was gone and is back: what failed before says nothing about now.
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

/// What is known of one node.
#[derive(Debug, Clone, Default)]
struct Entry {
    community: Option<CommunityTag>,
    caps: Vec<String>,
    records: Vec<Record>,
    /// What the node has signed of late, tried for that alone or not.
    signed: Vec<SocketAddr>,
    /// What the node may yet claim anew.
    claims: Option<TokenBucket>,
}

impl Entry {
    /// Whether the node may name one more place at which it was not said to be.
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

    /// Notes that `source` names `endpoint`; `false` if there was no place for it.
    fn see(&mut self, endpoint: SocketAddr, source: Source, now_ms: u64) -> bool {
        if let Some(record) = self.records.iter_mut().find(|r| r.endpoint == endpoint) {
            record.see(source, now_ms);
        } else {
            // What is heard and signed has the place of what is signed.
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
                // What the node no longer announces has no more than this left.
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

    /// Holds every class within its places. An endpoint that changes class (proved now, or
    /// no longer signed) may find the new one full: the one heard of longest ago goes.
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
                // A proved one falls back to what else is said for it; the others end.
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

    /// Whether this stranger may make place for another.
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

/// The address book. See the module's text for what it promises.
#[derive(Debug, Clone, Default)]
pub struct AddressBook {
    own: Option<NodeId>,
    local: Local,
    members: BTreeMap<NodeId, Entry>,
    strangers: BTreeMap<NodeId, Entry>,
    /// Static peers without a node id: who last proved to be there, and since when it is
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

    /// This machine's addresses now, by which distance is judged.
    pub(crate) fn set_local(&mut self, local: Local) {
        self.local = local;
    }

    /// The addresses that `AddressBook::set_local` set.
    pub fn local(&self) -> &Local {
        &self.local
    }

    /// The members of the community now: exactly these (at most [`MAX_MEMBERS`]) cannot be
    /// pushed out. Who is a member no longer becomes a stranger.
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

    /// An mDNS announcement, and those of its addresses that [`Local::admit`] let pass, best first;
    /// beyond [`MAX_PER_CLASS`] they are ignored. Endpoints of the same node and port that it does
    /// not name any more count for two more minutes. Returns whether it said anything new.
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

    /// An mDNS goodbye, or that its records ran out: what this instance announced counts no
    /// more. Returns whether that changed anything.
    ///
    /// Proved, static and signed endpoints stay: anyone can send a goodbye in another's name.
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

    /// Endpoints from a source that is not mDNS: what a person wrote ([`Source::Static`]) or
    /// the node signed ([`Source::Log`]). The newest win. Returns whether anything was new.
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

    /// All endpoints that a node has signed of late, also those that [`Self::told`] is not told: heard
    /// over mDNS as well, they count as signed.
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

    /// The endpoints that static peers without a node id have now; beyond [`MAX_UNNAMED`]
    /// they are ignored. Returns whether anything changed.
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

    /// `node` answered at `endpoint` and proved its key.
    pub fn proved(&mut self, node: NodeId, endpoint: SocketAddr, now_ms: u64) {
        for (known, who, _) in &mut self.unnamed {
            if *known == endpoint {
                *who = Some(node);
            }
        }
        // Whoever else was thought to be there is not.
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

    /// Dialing `endpoint` for `node` came to nothing: nobody, or somebody else, answered.
    /// `None`: it was a static peer without a node id.
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

    /// Where to try for `node`, best first: what is more than heard, what has not failed since it last
    /// worked, what has worked, the nearest network, the most trusted source, IPv4, the latest heard.
    pub fn endpoints(&self, node: &NodeId, now_ms: u64) -> Vec<SocketAddr> {
        let all = self.endpoints_by_source(node, now_ms).into_iter();
        all.map(|(_, endpoint)| endpoint).collect()
    }

    /// The same, each with the best source that it has.
    pub fn endpoints_by_source(&self, node: &NodeId, now_ms: u64) -> Vec<(Source, SocketAddr)> {
        self.members
            .get(node)
            .or_else(|| self.strangers.get(node))
            .map(|entry| ranked(&entry.records, &self.local, now_ms))
            .unwrap_or_default()
    }

    /// The same of those that do not rest, few enough to be tried together ([`vouched_first`]); they
    /// count as tried now.
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

    /// Everything that counts now, by node id; static peers whose node is unknown come last.
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

    /// Drops what no longer counts. Returns whether there was any.
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

    /// The entry of `node`, made if there is a place for it.
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

    /// Whether one more stranger fits, after at most one left.
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

    /// A stranger of whom nothing could be kept has no entry.
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
    /// The endpoints that count, in no order that means anything: to see a change.
    fn hint_set(&self, now_ms: u64) -> Vec<SocketAddr> {
        let live = self.records.iter().filter(|r| r.class(now_ms).is_some());
        let mut endpoints: Vec<_> = live.map(|r| r.endpoint).collect();
        endpoints.sort();
        endpoints
    }
}

/// The first endpoints of a list, best first: `most` of those that the node proved or signed or a person
/// wrote, and behind them as many of those that were only heard. So no number of announcements takes the
/// place of what is known better, and a node that has moved is found where it is heard.
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

/// The endpoints that count now, best first, each with the best source that it has.
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
