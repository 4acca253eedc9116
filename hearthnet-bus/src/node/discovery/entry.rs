//! Entry of the address book for one node: its endpoints, their classes, and the order in which
//! they are dialled. Pure.

use std::cmp::Reverse;
use std::net::SocketAddr;

use hearthnet_transport::{Time, TokenBucket};

use super::announcement::CommunityTag;
use super::local::Local;
use crate::NodeId;

/// Upper bound of a node's endpoints per class, except proved ones: enough for a host with two
/// networks, IPv4 and IPv6 on each, and two programs.
pub const MAX_PER_CLASS: usize = 8;
/// Upper bound of a node's proved endpoints.
pub const MAX_PROVED: usize = 4;

/// Validity of an mDNS hint: more than two query intervals.
const MDNS_LIFE_MS: u64 = 10 * 60 * 1000;
/// Remaining validity of an mDNS endpoint after the node announced others instead: the lifetime of
/// an mDNS address record, so that one forged announcement does not evict it.
pub(super) const SUPERSEDED_MS: u64 = 120 * 1000;
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
pub(super) struct Record {
    pub(super) endpoint: SocketAddr,
    /// Configured by a person: never expires.
    written: bool,
    /// End of the signed statement's validity; 0: none.
    log_until: u64,
    /// End of the mDNS announcement's validity; 0: none.
    pub(super) mdns_until: u64,
    /// Last mention by any source.
    pub(super) seen_ms: u64,
    /// Last time that the node answered there.
    pub(super) proved_ms: Option<u64>,
    /// Failed dials since it was last proved, or appeared anew.
    pub(super) failures: u32,
    /// Last dial.
    pub(super) tried_ms: u64,
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
    pub(super) fn rests(&self, now_ms: u64) -> bool {
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
    pub(super) fn see(&mut self, source: Source, now_ms: u64) {
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
pub(super) struct Entry {
    pub(super) community: Option<CommunityTag>,
    pub(super) caps: Vec<String>,
    pub(super) records: Vec<Record>,
    /// Endpoints that the node signed recently, dialled for that reason or not.
    pub(super) signed: Vec<SocketAddr>,
    /// Budget of the node's new claims.
    claims: Option<TokenBucket>,
}

impl Entry {
    /// Takes one new claim from the budget. Returns false if it is used up.
    pub(super) fn may_claim(&mut self, now_ms: u64) -> bool {
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
    pub(super) fn see(&mut self, endpoint: SocketAddr, source: Source, now_ms: u64) -> bool {
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
    pub(super) fn trim(&mut self, now_ms: u64) {
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
    pub(super) fn expendable(&self, now_ms: u64) -> bool {
        self.records.iter().all(|r| match r.class(now_ms) {
            None => true,
            Some(class) => class == Source::Mdns && r.failures > 0,
        })
    }

    pub(super) fn only_mdns(&self, now_ms: u64) -> bool {
        self.records
            .iter()
            .all(|r| r.class(now_ms).is_none_or(|class| class == Source::Mdns))
    }

    pub(super) fn hint(&self, node: NodeId, local: &Local, now_ms: u64) -> Option<Hint> {
        let ranked = ranked(&self.records, local, now_ms);
        let live = self.records.iter().filter(|r| r.class(now_ms).is_some());
        Some(Hint {
            node: Some(node),
            community: self.community,
            caps: self.caps.clone(),
            source: ranked.iter().map(|(source, _)| *source).min()?,
            last_seen_ms: live.map(|r| r.seen_ms).max()?,
            endpoints: ranked.into_iter().map(|(_, at)| at).collect(),
        })
    }

    /// Current endpoints in a fixed order, to detect changes.
    pub(super) fn hint_set(&self, now_ms: u64) -> Vec<SocketAddr> {
        let live = self.records.iter().filter(|r| r.class(now_ms).is_some());
        let mut endpoints: Vec<_> = live.map(|r| r.endpoint).collect();
        endpoints.sort();
        endpoints
    }
}

/// Current endpoints, best first, each with its best source.
pub(super) fn ranked(records: &[Record], local: &Local, now_ms: u64) -> Vec<(Source, SocketAddr)> {
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
