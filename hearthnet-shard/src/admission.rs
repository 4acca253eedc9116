//! Admission of peers, and check of session tokens.
//!
//! A standalone host admits the keys that its operator named. These keys may issue tokens and ask
//! for their part of the flight record. In a community, the node's listener admits members and
//! watches them (`hearthnet_bus::node`), and the host accepts the tokens that it has issued itself.

use std::collections::HashSet;
use std::sync::Arc;

use hearthnet_bus::calls::{Authority, BUS_PATH, CallServer, Registry, Research};
use hearthnet_bus::flight::{self, Readers};
use hearthnet_bus::log::Level;
use hearthnet_bus::node::TensorAcceptor;
use hearthnet_bus::{Capability, Expectation, Grant, NodeId, ReplayCache};
use hearthnet_transport::{Admission, CloseCode, Hello, PATH, RefusedConnection, SessionClosed};
use parking_lot::Mutex;

use crate::events::HostEvents;
use crate::stream_table::Parties;

/// Purpose of sessions that run rows through the layers.
pub const PIPELINE: &str = "pipeline";
/// Purpose of sessions that echo what they receive, to benchmark the transport.
pub const BENCH: &str = "bench";

/// Shared capacity for remembered session tokens (replay check). Community tokens are valid for 90
/// s by default, so it lasts for 22 sessions a second of one party, or nine of each of four.
const REMEMBERED_TOKENS: usize = 4096;

/// Admits nodes, and checks that each session has its own grant for this host.
pub(crate) struct SessionAuthorizer {
    host: NodeId,
    /// Keys that may issue tokens and, on a standalone host, connect.
    admitted: HashSet<NodeId>,
    scope: Capability,
    skew: u64,
    seen: Mutex<ReplayCache>,
    parties: Parties,
    events: Arc<HostEvents>,
}

impl SessionAuthorizer {
    pub(crate) fn new(
        host: NodeId,
        admitted: &[NodeId],
        skew: u64,
        parties: Parties,
        events: Arc<HostEvents>,
    ) -> Self {
        Self {
            host,
            admitted: admitted.iter().copied().chain([host]).collect(),
            scope: Capability::shard_serve(),
            skew,
            seen: Mutex::new(ReplayCache::new(REMEMBERED_TOKENS)),
            parties,
            events,
        }
    }

    /// Checks the purpose and the token of a session for an admitted peer.
    fn check(&self, peer: NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode> {
        if hello.purpose != PIPELINE && hello.purpose != BENCH {
            return Err(CloseCode::PurposeUnknown);
        }
        let expected = Expectation {
            peer,
            party: (self.parties)(&peer),
            audience: self.host,
            scope: &self.scope,
        };
        let may_issue = |issuer: &NodeId| self.admitted.contains(issuer);
        let seen = &mut self.seen.lock();
        match Grant::admit(
            &hello.token,
            &expected,
            may_issue,
            seen,
            now_unix,
            self.skew,
        ) {
            Ok(_) => Ok(()),
            Err(refusal) => {
                tracing::info!(peer = %peer.short(), code = %refusal.code(), "session refused: {refusal}");
                Err(refusal.code())
            }
        }
    }

    /// Call server of a standalone host: it serves the flight record only.
    pub(crate) fn answers(self: &Arc<Self>) -> CallServer {
        let registry = Registry::new();
        // Cannot fail: the registry is new, so it has room.
        let _ = Readers::Callers(self.host).register(&registry);
        CallServer::new(self.host, Arc::new(registry), Arc::clone(self) as _)
    }

    fn is_admitted(&self, peer: &NodeId) -> bool {
        self.admitted.contains(peer)
    }
}

impl Admission for SessionAuthorizer {
    fn admit_peer(&self, peer: &NodeId) -> bool {
        let is_admitted = self.is_admitted(peer);
        if !is_admitted {
            self.events.stranger_refused(*peer);
        }
        is_admitted
    }

    fn admit_path(&self, peer: &NodeId, path: &str) -> Result<(), CloseCode> {
        match (self.is_admitted(peer), path) {
            (true, PATH | BUS_PATH) => Ok(()),
            _ => Err(CloseCode::Unauthorized),
        }
    }

    fn admit_hello(&self, peer: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode> {
        if !self.is_admitted(peer) {
            return Err(CloseCode::Unauthorized);
        }
        self.check(*peer, hello, now_unix)
            .inspect_err(|code| self.events.peer_refused(*peer, *code))
    }

    fn session_ended(&self, peer: &NodeId, closed: &SessionClosed) {
        self.events.connection_closed(peer, closed);
    }

    fn connection_refused(&self, why: &RefusedConnection) {
        flight::connection_refused(why);
    }
}

/// A standalone host has no levels: admitted keys may ask, and see only their own events.
impl Authority for SessionAuthorizer {
    fn level(&self, node: &NodeId) -> Option<Level> {
        self.admitted.contains(node).then_some(Level::Member)
    }

    fn research(&self) -> Research {
        // Serving layers implies this consent.
        Research::On
    }
}

/// In a community, the node has already checked that the peer is a member.
impl TensorAcceptor for SessionAuthorizer {
    fn admit_hello(&self, peer: &NodeId, hello: &Hello, now_unix: u64) -> Result<(), CloseCode> {
        self.check(*peer, hello, now_unix)
    }

    fn session_ended(&self, peer: &NodeId, closed: &SessionClosed) {
        self.events.connection_closed(peer, closed);
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::NodeKey;

    use super::*;

    const NOW: u64 = 1_750_000_000;

    fn key(seed: u8) -> NodeKey {
        NodeKey::from_secret(&[seed; 32])
    }

    fn peer(seed: u8) -> NodeId {
        key(seed).id()
    }

    /// Host 1 admits node 2.
    fn authorizer() -> SessionAuthorizer {
        let parties = Arc::new(|peer: &NodeId| *peer);
        SessionAuthorizer::new(key(1).id(), &[key(2).id()], 30, parties, Arc::default())
    }

    fn grant(issuer: u8) -> Grant {
        Grant {
            issuer: key(issuer).id(),
            subject: key(issuer).id(),
            audience: key(1).id(),
            scope: Capability::shard_serve(),
            not_before: NOW,
            expires: NOW + 60,
            id: [7; 16],
        }
    }

    fn hello(purpose: &str, token: Vec<u8>) -> Hello {
        Hello {
            purpose: purpose.into(),
            token,
            agent: "test".into(),
        }
    }

    /// In a community the host itself issues all tokens.
    #[test]
    fn a_partys_many_sessions_keep_no_other_party_out() {
        // 3 has let in 4.
        let parties = |peer: &NodeId| match *peer == key(4).id() {
            true => key(3).id(),
            false => *peer,
        };
        let events = Arc::default();
        let authorizer = SessionAuthorizer::new(key(1).id(), &[], 30, Arc::new(parties), events);
        let check = |peer: u8, number: u32| {
            let mut id = [peer; 16];
            id[..4].copy_from_slice(&number.to_be_bytes());
            let grant = Grant {
                subject: key(peer).id(),
                id,
                ..grant(1)
            };
            let hello = hello(PIPELINE, grant.sign(&key(1)).unwrap());
            authorizer.check(key(peer).id(), &hello, NOW)
        };
        let until_refused = |peer| (0..).find_map(|number| check(peer, number).err());
        assert_eq!(until_refused(3), Some(CloseCode::SessionLimit));
        assert_eq!(check(4, 0), Err(CloseCode::SessionLimit));
        assert_eq!(check(5, 0), Ok(()));
        // Nor do as many parties as a community may have inviting members.
        (6..40).for_each(|peer| assert!(until_refused(peer).is_some()));
        (100..110).for_each(|peer| assert_eq!(check(peer, 0), Ok(())));
    }

    #[test]
    fn only_admitted_keys_and_the_hosts_own_may_connect() {
        let authorizer = authorizer();
        assert!(authorizer.admit_peer(&peer(1)));
        assert!(authorizer.admit_peer(&peer(2)));
        assert!(!authorizer.admit_peer(&peer(3)));
        assert!(!authorizer.admit_peer(&NodeId::from_checked([0; 32])));
    }

    #[test]
    fn every_session_needs_a_token_of_its_own() {
        let authorizer = authorizer();
        let token = grant(2).sign(&key(2)).unwrap();
        for purpose in [PIPELINE, BENCH] {
            let grant = Grant {
                id: [purpose.len() as u8; 16],
                ..grant(2)
            };
            let token = grant.sign(&key(2)).unwrap();
            assert_eq!(
                Admission::admit_hello(&authorizer, &peer(2), &hello(purpose, token), NOW),
                Ok(())
            );
        }
        assert_eq!(
            Admission::admit_hello(&authorizer, &peer(2), &hello(PIPELINE, token.clone()), NOW),
            Ok(())
        );
        let again = Admission::admit_hello(&authorizer, &peer(2), &hello(PIPELINE, token), NOW);
        assert_eq!(again, Err(CloseCode::TokenReplayed));
    }

    #[test]
    fn each_flaw_closes_with_its_own_code() {
        let with = |change: &dyn Fn(&mut Grant), signer: u8| {
            let mut grant = grant(signer);
            change(&mut grant);
            grant.sign(&key(signer)).unwrap()
        };
        let good = with(&|_| {}, 2);
        let mut forged = good.clone();
        *forged.last_mut().unwrap() ^= 1;
        let cases = [
            (2, "other", good.clone(), CloseCode::PurposeUnknown),
            (3, PIPELINE, with(&|_| {}, 3), CloseCode::Unauthorized),
            (1, PIPELINE, good, CloseCode::TokenSubject),
            (2, PIPELINE, Vec::new(), CloseCode::TokenInvalid),
            (2, PIPELINE, vec![0xa0; 600], CloseCode::TokenInvalid),
            (2, PIPELINE, forged, CloseCode::InvalidSignature),
            (
                2,
                PIPELINE,
                with(&|g| g.audience = key(2).id(), 2),
                CloseCode::TokenAudience,
            ),
            (
                2,
                PIPELINE,
                with(&|g| g.scope = "a@1.0".parse().unwrap(), 2),
                CloseCode::TokenScope,
            ),
            (
                2,
                PIPELINE,
                with(&|g| (g.not_before, g.expires) = (NOW - 90, NOW - 30), 2),
                CloseCode::TokenExpired,
            ),
            // A stranger's key issues no valid grants, not even for an admitted node.
            (
                2,
                PIPELINE,
                with(&|g| g.subject = key(2).id(), 3),
                CloseCode::Unauthorized,
            ),
        ];
        for (from, purpose, token, code) in cases {
            let answer =
                Admission::admit_hello(&authorizer(), &peer(from), &hello(purpose, token), NOW);
            assert_eq!(answer, Err(code));
        }
    }

    #[test]
    fn the_host_may_issue_for_an_admitted_node() {
        let token = Grant {
            issuer: key(1).id(),
            ..grant(2)
        }
        .sign(&key(1))
        .unwrap();
        assert_eq!(
            Admission::admit_hello(&authorizer(), &peer(2), &hello(PIPELINE, token), NOW),
            Ok(())
        );
    }
}
