//! Tests of whole nodes over real sockets on the loopback interface. There is no multicast here: a
//! node starts with one known address.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::{
    CloseCode, Config, ConnectError, Connection, Hello, PathRule, PeerSocket, SessionClosed,
    connect, connect_path,
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::*;
use crate::community::log::{Body, Event, EventHash, EventId, Lane, Policy};
use crate::community::sync::path_rule;
use crate::node::calls::{
    Answering, CallContext, CapabilityDescriptor, Client, FrameSink, Handler,
};
use crate::node::discovery::StaticPeer;
use crate::now_ms;
use crate::testing::{self, id, key};
use crate::{Capability, Grant};

pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

fn echo() -> Capability {
    "test.echo@1.0".parse().unwrap()
}

struct Echo;

impl Handler for Echo {
    fn call(&self, ctx: CallContext, _: Value, _: FrameSink) -> Answering<'_> {
        Box::pin(async move { Ok(json!({ "caller": ctx.caller.to_string() })) })
    }
}

/// A listening node and its log.
pub(super) struct Home {
    pub(super) node: Node,
    pub(super) community: testing::Home,
}

async fn start(seed: u8, community: testing::Home, peers: Vec<StaticPeer>) -> Home {
    let registry = Arc::new(Registry::new());
    let descriptor = CapabilityDescriptor::new(echo(), "Says who asks.", Some(Level::Member));
    registry.register(descriptor, Arc::new(Echo)).unwrap();
    let mut settings = NodeSettings::new(format!("node {seed}"));
    settings.listen = Some("127.0.0.1:0".into());
    settings.discovery.mdns = false;
    settings.discovery.static_peers = peers;
    let log = community.log.clone();
    let node = Node::start(Arc::new(key(seed)), log, settings, registry).await;
    Home {
        node: node.unwrap(),
        community,
    }
}

/// A node with key 1 that has founded a community with research on.
pub(super) async fn founder() -> Home {
    start(1, testing::Home::founded(key(1), true), Vec::new()).await
}

/// [`founder`] with an open invite, and members of these keys.
pub(super) async fn founder_of(members: &[u8]) -> Home {
    let first = founder().await;
    first.invite();
    members.iter().for_each(|seed| first.admit(*seed));
    first
}

/// A member that is in sync with the founder, at which it joined.
pub(super) async fn member(seed: u8, at: &Home) -> Home {
    let home = joiner(seed, at).await;
    home.linked_with(&[1]).await;
    timeout(TIMEOUT, home.node.until_in_sync()).await.unwrap();
    home
}

/// A node that knows the community's id and one address.
async fn joiner(seed: u8, at: &Home) -> Home {
    let community = testing::Home::joining(key(seed));
    start(seed, community, vec![at.address()]).await
}

impl Home {
    fn address(&self) -> StaticPeer {
        StaticPeer::new(self.node.listen_addr().unwrap(), Some(self.node.id()))
    }

    fn addr(&self) -> String {
        self.node.listen_addr().unwrap().to_string()
    }

    pub(super) fn append(&self, body: Body) {
        self.community.append(body);
    }

    fn invite(&self) {
        self.append(Body::Invited {
            invite: id(100),
            level: Level::Member,
            uses: 50,
            expires_ms: now_ms() + 3_600_000,
        });
    }

    fn withdraw(&self) {
        self.append(Body::InviteWithdrawn {
            invite: id(100),
            members: None,
        });
    }

    fn admit(&self, seed: u8) {
        self.community.admit(id(seed), Level::Member);
    }

    pub(super) fn revoke(&self, seed: u8) {
        self.community.revoke(id(seed));
    }

    fn set_level(&self, seed: u8, level: Level) {
        let node = id(seed);
        self.append(Body::LevelChanged {
            node,
            level,
            last_seq: None,
        });
    }

    /// Freezes key `seed` at this node, by two contradicting histories.
    fn freeze(&self, seed: u8) {
        let log = self.node.log();
        let twin = |byte: u8| {
            let event = Event {
                community: log.community(),
                author: id(seed),
                seq: 1,
                lamport: 100,
                time_ms: now_ms(),
                id: EventId::new(now_ms(), u128::from(byte)),
                lane: Lane::Durable {
                    prev: EventHash::ZERO,
                },
                body: Body::Unknown {
                    kind: "notes.written".into(),
                    slot: None,
                    bytes: vec![byte],
                },
            };
            event.sign(&key(seed)).unwrap()
        };
        log.receive(&[twin(1), twin(2)], id(1), now_ms()).unwrap();
        assert!(log.state().is_frozen(&id(seed)));
    }

    fn links(&self) -> Vec<NodeId> {
        let peers = self.node.peers().into_iter();
        peers
            .filter(|peer| peer.link.is_some())
            .map(|peer| peer.node)
            .collect()
    }

    async fn linked_with(&self, seeds: &[u8]) {
        let mut expected: Vec<_> = seeds.iter().map(|seed| id(*seed)).collect();
        expected.sort_unstable();
        until(|| self.links() == expected).await;
    }

    /// Waits until this node knows an address of key `seed`.
    pub(super) async fn knows(&self, seed: u8) {
        until(|| !self.node.discovery().endpoints(&id(seed)).is_empty()).await;
    }

    /// Connects to this node with key `seed`.
    pub(super) async fn dial(&self, seed: u8, rule: &PathRule) -> Result<PeerSocket, ConnectError> {
        let own = key(seed).identity().unwrap();
        let (expect, config) = (Some(self.node.id()), Config::default());
        connect_path(&self.addr(), &own, expect, rule, &config).await
    }

    async fn tensor(&self, seed: u8, token: Vec<u8>) -> Result<Connection, ConnectError> {
        let own = key(seed).identity().unwrap();
        let hello = Hello::new("pipeline", token);
        let host = self.node.id();
        connect(&self.addr(), &own, host, hello, Config::default()).await
    }
}

pub(super) async fn until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "it does not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// State of a node that neither computes nor answers.
pub(super) fn never_busy() -> Busy {
    Arc::new(|| false)
}

pub(super) async fn end_of(socket: &mut PeerSocket) -> SessionClosed {
    let read = async {
        loop {
            if let Err(closed) = socket.recv().await {
                return closed;
            }
        }
    };
    timeout(TIMEOUT, read).await.unwrap()
}

/// Code of a session's end, and whether this side ended it.
async fn end_of_session(session: &mut Connection) -> (CloseCode, bool) {
    let closed = timeout(TIMEOUT, session.recv()).await.unwrap().unwrap_err();
    (closed.code, closed.by_us)
}

/// Token of the host with key `issuer` for key `subject`.
fn token(issuer: u8, subject: u8, number: u8) -> Vec<u8> {
    let now = now_ms() / 1000;
    let grant = Grant {
        issuer: id(issuer),
        subject: id(subject),
        audience: id(issuer),
        scope: Capability::shard_serve(),
        not_before: now,
        expires: now + 60,
        id: [number; 16],
    };
    grant.sign(&key(issuer)).unwrap()
}

pub(super) fn refusal<T: std::fmt::Debug>(result: Result<T, ConnectError>) -> CloseCode {
    let error = result.unwrap_err();
    error.code().unwrap_or_else(|| panic!("{error}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_know_one_address_find_everybody_and_share_one_history() {
    let first = founder_of(&[2, 3]).await;
    let second = joiner(2, &first).await;
    let third = joiner(3, &first).await;
    first.linked_with(&[2, 3]).await;
    // These two learned each other's address from the log alone.
    second.linked_with(&[1, 3]).await;
    third.linked_with(&[1, 2]).await;
    for home in [&first, &second, &third] {
        timeout(TIMEOUT, home.node.until_in_sync()).await.unwrap();
        assert_eq!(home.node.log().state().members().count(), 3);
    }
    second.knows(3).await;
    let stream = second.node.call(id(3), &echo(), &json!({})).await.unwrap();
    let answer = stream.result_within(TIMEOUT).await;
    assert_eq!(answer.unwrap()["caller"], id(2).to_string());
    // A node that leaves is noticed, and found again at another port.
    second.node.shutdown().await;
    first.linked_with(&[3]).await;
    let second = start(2, testing::Home::joining(key(2)), vec![third.address()]).await;
    first.linked_with(&[2, 3]).await;
    second.linked_with(&[1, 3]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_links_the_one_that_the_lower_id_dialled_stays() {
    let first = founder_of(&[2]).await;
    let second = member(2, &first).await;
    first.linked_with(&[2]).await;
    first.knows(2).await;
    let (lower, higher) = match id(1) < id(2) {
        true => (&first, &second),
        false => (&second, &first),
    };
    // Both dial once more, at the same time.
    for _ in 0..5 {
        let rule = path_rule();
        let dialled = tokio::join!(
            lower.node.inner.reach(higher.node.id(), &rule),
            higher.node.inner.reach(lower.node.id(), &rule),
        );
        lower.node.inner.adopt(dialled.0.unwrap(), true);
        higher.node.inner.adopt(dialled.1.unwrap(), true);
    }
    let dialled = |home: &Home| {
        let link = home.node.peers().remove(0).link;
        link.map(|link| (link.dialled, link.progress.in_sync))
    };
    until(|| dialled(lower) == Some((true, true)) && dialled(higher) == Some((false, true))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_get_nothing_and_may_ask_to_join_only_while_there_is_an_invite() {
    let first = founder().await;
    let paths = [bus_rule(), path_rule()];
    for rule in &paths {
        assert_eq!(refusal(first.dial(66, rule).await), CloseCode::Unauthorized);
    }
    let session = first.tensor(66, vec![]).await;
    assert_eq!(refusal(session), CloseCode::Unauthorized);
    first.invite();
    let [bus, sync] = &paths;
    assert_eq!(refusal(first.dial(66, sync).await), CloseCode::Unauthorized);
    let session = first.tensor(66, vec![]).await;
    assert_eq!(refusal(session), CloseCode::Unauthorized);
    let mut socket = first.dial(66, bus).await.unwrap();
    let client = Client::new(first.dial(66, bus).await.unwrap(), Arc::new(key(66)));
    let refused = client.call(&echo(), &json!({})).unwrap().result().await;
    assert_eq!(refused.unwrap_err().code().as_str(), "unauthorized");
    // The last invite is withdrawn: joiners are refused, and connected ones are closed.
    first.withdraw();
    assert_eq!(end_of(&mut socket).await.code, CloseCode::Unauthorized);
    assert_eq!(refusal(first.dial(66, bus).await), CloseCode::Unauthorized);
}

/// Admits every session that gets this far.
struct AdmitAll;

impl TensorAcceptor for AdmitAll {
    fn admit_hello(&self, _: &NodeId, _: &Hello, _: u64) -> Result<(), CloseCode> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_node_loses_every_connection_at_once_and_learns_why() {
    let first = founder_of(&[2]).await;
    let mut sessions = first.node.serve_tensors([7; 32], Arc::new(AdmitAll));
    let mut bus = first.dial(2, &bus_rule()).await.unwrap();
    let mut sync = first.dial(2, &path_rule()).await.unwrap();
    let mut tensor = first.tensor(2, vec![]).await.unwrap();
    let mut session = sessions.next().await.unwrap();
    first.linked_with(&[2]).await;

    first.revoke(2);
    for socket in [&mut bus, &mut sync] {
        let closed = end_of(socket).await;
        assert_eq!((closed.code, closed.by_us), (CloseCode::Revoked, false));
    }
    assert_eq!(
        end_of_session(&mut tensor).await,
        (CloseCode::Revoked, false)
    );
    assert_eq!(
        end_of_session(&mut session).await,
        (CloseCode::Revoked, true)
    );
    first.linked_with(&[]).await;
    // The node is refused on every path.
    for path in [&bus_rule(), &path_rule()] {
        assert_eq!(refusal(first.dial(2, path).await), CloseCode::Revoked);
    }
    assert_eq!(refusal(first.tensor(2, vec![]).await), CloseCode::Revoked);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_or_frozen_node_is_told_so_wherever_it_dials() {
    let first = founder_of(&[2]).await;
    let second = member(2, &first).await;
    assert_eq!(second.node.refused_by(), []);
    first.revoke(2);
    until(|| second.node.refused_by() == [id(1)]).await;
    // Frozen by two histories, it gets the same code.
    first.admit(3);
    let third = member(3, &first).await;
    let fork = |name: &str| {
        let home = testing::Home::joining(key(3));
        testing::hear(&home.log, first.node.log());
        let (before, name) = (home.log.heads(), name.to_owned());
        home.append(Body::Named { name });
        home.log.missing(&before, 1, 1 << 20).unwrap().events
    };
    for events in [fork("one"), fork("two")] {
        first.node.log().receive(&events, id(1), now_ms()).unwrap();
    }
    assert!(first.node.log().state().is_frozen(&id(3)));
    until(|| third.node.refused_by() == [id(1)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_counts_from_a_member_known_only_by_address() {
    let first = founder_of(&[2]).await;
    let second = member(2, &first).await;
    // The only anchor, with an old copy of the log: the member is in it, its address is not.
    let old = testing::Home::joining(key(1));
    let mut known = first.node.log().missing(&old.log.heads(), 100, 1 << 20);
    let known = &mut known.as_mut().unwrap().events;
    known.retain(|raw| matches!(Event::verify(raw).unwrap().lane, Lane::Durable { .. }));
    old.log.receive(known, id(2), now_ms()).unwrap();
    first.node.shutdown().await;
    second.freeze(1);
    let nameless = StaticPeer::new(second.node.listen_addr().unwrap(), None);
    let old = start(1, old, vec![nameless]).await;
    assert_eq!(old.node.discovery().endpoints(&id(2)), []);
    until(|| old.node.refused_by() == [id(2)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revocation_on_one_node_closes_connections_on_another() {
    let first = founder_of(&[2, 3]).await;
    let second = member(2, &first).await;
    let mut socket = second.dial(3, &bus_rule()).await.unwrap();
    first.revoke(3);
    assert_eq!(end_of(&mut socket).await.code, CloseCode::Revoked);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_grant_ends_the_session_that_stands_on_it_and_no_other() {
    let first = founder_of(&[2]).await;
    let mut sessions = first.node.serve_tensors([7; 32], Arc::new(AdmitAll));
    let mut open = Vec::new();
    for number in [1, 2] {
        let tensor = first.tensor(2, token(1, 2, number)).await.unwrap();
        open.push((tensor, sessions.next().await.unwrap()));
    }
    let (issuer, id) = (id(1), [1; 16]);
    first.append(Body::GrantRevoked { issuer, id });
    let ended = end_of_session(&mut open[0].0).await;
    assert_eq!(ended, (CloseCode::Revoked, false));
    assert_eq!(open[1].0.sender().closed(), None);
    // Shown again, it is refused.
    let again = first.tensor(2, token(1, 2, 1)).await;
    assert_eq!(refusal(again), CloseCode::Revoked);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_callers_sessions_end_when_it_is_frozen_or_research_is_switched_off() {
    let ends: [(End, CloseCode, usize); 2] = [
        (|home| home.freeze(2), CloseCode::Revoked, 0),
        // Calls continue: they do not depend on the research policy.
        (end_research, CloseCode::Unauthorized, 1),
    ];
    for (end, code, open) in ends {
        let first = founder_of(&[2]).await;
        let mut sessions = first.node.serve_tensors([7; 32], Arc::new(AdmitAll));
        let bus = first.dial(2, &bus_rule()).await.unwrap();
        // Two sessions of one caller.
        let mut kept = Vec::new();
        for _ in 0..2 {
            let tensor = first.tensor(2, vec![]).await.unwrap();
            kept.push((tensor, sessions.next().await.unwrap()));
        }
        end(&first);
        for (tensor, session) in &mut kept {
            assert_eq!(end_of_session(tensor).await, (code, false));
            assert!(session.recv().await.is_err());
        }
        until(|| first.node.connections().count() == open).await;
        assert_eq!(refusal(first.tensor(2, vec![]).await), code);
        drop(bus);
    }
}

/// Ends a right at a node.
type End = fn(&Home);

fn end_research(home: &Home) {
    home.append(Body::PolicyChanged(Policy::default()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_to_a_host_closes_when_the_host_loses_its_right() {
    let revoke_grant: End = |home| {
        let (issuer, id) = (id(3), [7; 16]);
        home.append(Body::GrantRevoked { issuer, id });
    };
    let demote: End = |home| home.set_level(3, Level::Member);
    let convict: End = |home| home.community.convict(&key(2), id(3));
    let ends: [(End, CloseCode); 6] = [
        (demote, CloseCode::Unauthorized),
        (convict, CloseCode::Unauthorized),
        (|home| home.revoke(3), CloseCode::Revoked),
        (|home| home.freeze(3), CloseCode::Revoked),
        (end_research, CloseCode::Unauthorized),
        (revoke_grant, CloseCode::Revoked),
    ];
    let token = token(3, 1, 7);
    for (end, code) in ends {
        let first = founder_of(&[2, 3]).await;
        first.set_level(3, Level::Trusted);
        // A host in its own community, which grants it every right.
        let host = start(3, testing::Home::founded(key(3), true), Vec::new()).await;
        host.admit(1);
        let mut sessions = host.node.serve_tensors([7; 32], Arc::new(AdmitAll));
        // The table of the node, and that of a program beside the node.
        let beside = Connections::watched(first.node.log().clone());
        let mut links = Vec::new();
        for watch in [first.node.connections(), &beside] {
            let link = host.tensor(1, token.clone()).await.unwrap();
            watch.watch_host(id(3), Some(&token), link.closer());
            links.push((link, sessions.next().await.unwrap()));
        }
        assert!(links.iter().all(|(link, _)| !link.closer().is_closed()));
        end(&first);
        for (link, session) in &mut links {
            assert_eq!(end_of_session(link).await, (code, true));
            assert_eq!(end_of_session(session).await.0, code);
        }
        // A connection made meanwhile is closed when it is watched.
        let late = host.tensor(1, token.clone()).await.unwrap();
        let watched = first.node.connections();
        watched.watch_host(id(3), Some(&token), late.closer());
        assert!(late.closer().is_closed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_shard_host_there_are_no_tensor_sessions() {
    let first = founder_of(&[2]).await;
    let refused = refusal(first.tensor(2, vec![]).await);
    assert_eq!(refused, CloseCode::PurposeUnknown);
    let sessions = first.node.serve_tensors([7; 32], Arc::new(AdmitAll));
    let mut newer = first.node.serve_tensors([7; 32], Arc::new(AdmitAll));
    drop(sessions);
    let _session = first.tensor(2, vec![]).await.unwrap();
    assert!(newer.next().await.is_some());
    drop(newer);
    let refused = refusal(first.tensor(2, vec![]).await);
    assert_eq!(refused, CloseCode::PurposeUnknown);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_goes_to_the_host_of_the_model_that_its_grant_names() {
    let first = founder_of(&[2]).await;
    let granted = |weights: u8| {
        let grant = Grant::of_host(id(1), id(2), id(1), &[weights; 32], 60);
        grant.unwrap().sign(&key(1)).unwrap()
    };
    let serve = |weights: u8| {
        let node = &first.node;
        node.serve_tensors([weights; 32], Arc::new(AdmitAll))
    };
    let (mut sevens, mut eights) = (serve(7), serve(8));
    for _ in 0..2 {
        let _callers = [
            first.tensor(2, granted(8)).await.unwrap(),
            first.tensor(2, granted(7)).await.unwrap(),
        ];
        for (sessions, weights) in [(&mut sevens, 7), (&mut eights, 8)] {
            let taken = timeout(TIMEOUT, sessions.next()).await;
            let grant = Grant::verify_signature(taken.unwrap().unwrap().token()).unwrap();
            assert!(Grant::is_for_host(&grant.id, &[weights; 32]));
        }
        // A host that moves to other layers of its model replaces itself only.
        sevens = serve(7);
    }
    // A model that is not served here.
    let refused = refusal(first.tensor(2, granted(9)).await);
    assert_eq!(refused, CloseCode::PurposeUnknown);
    // The only host takes every session, and refuses the streams of other models.
    drop(eights);
    let _caller = first.tensor(2, granted(9)).await.unwrap();
    assert!(sevens.next().await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_at_a_static_address_must_be_a_member() {
    // A node of another community; its peer entry has no node id.
    let other = testing::Home::founded_as(201, key(7), false);
    let other = start(7, other, Vec::new()).await;
    other.invite();

    let unnamed = StaticPeer::new(other.node.listen_addr().unwrap(), None);
    // The same address with a member's node id: another key answers there.
    let wrong = StaticPeer::new(other.node.listen_addr().unwrap(), Some(id(2)));
    let community = testing::Home::founded(key(1), false);
    let first = start(1, community, vec![unnamed, wrong]).await;
    first.invite();
    first.admit(2);
    first.knows(2).await;
    let failed = first.node.call(id(2), &echo(), &json!({})).await;
    let error = failed.unwrap_err();
    assert_eq!(error.code().as_str(), "unreachable");
    assert!(error.message().contains("another key"), "{error}");
    let failed = first.node.call(id(7), &echo(), &json!({})).await;
    assert_eq!(failed.unwrap_err().code().as_str(), "unauthorized");
    assert_eq!(first.links(), []);
    assert_eq!(other.links(), []);
}

#[tokio::test]
async fn a_node_that_no_neighbour_would_accept_an_announcement_of_does_not_start() {
    let community = testing::Home::founded(key(1), true);
    let mut settings = NodeSettings::new("node 1");
    settings.listen = Some("127.0.0.1:0".into());
    settings.discovery.mdns = false;
    settings.caps = vec!["\u{1b}[2J".into()];
    let (log, registry) = (community.log.clone(), Arc::new(Registry::new()));
    let node = Node::start(Arc::new(key(1)), log, settings, registry).await;
    assert_eq!(node.err().unwrap().code(), "discovery");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_ends_says_so_and_frees_its_port() {
    let first = founder_of(&[2]).await;
    let addr = first.addr();
    let mut bus = first.dial(2, &bus_rule()).await.unwrap();
    until(|| first.node.inner.connections.count() == 1).await;
    first.node.shutdown().await;
    assert_eq!(end_of(&mut bus).await.code, CloseCode::Shutdown);
    let again = async {
        while tokio::net::TcpListener::bind(&addr).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(TIMEOUT, again).await.unwrap();
    // Without `shutdown`, dropping the last handle ends the node.
    let second = founder_of(&[2]).await;
    let mut bus = second.dial(2, &bus_rule()).await.unwrap();
    until(|| second.node.inner.connections.count() == 1).await;
    drop(second);
    assert_eq!(end_of(&mut bus).await.code, CloseCode::Shutdown);
}

/// Answers a call with forged pages of a flight record.
struct Liar(fn(u64) -> Value, u64);

impl Handler for Liar {
    fn call(&self, _: CallContext, _: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            for n in 0..self.1 {
                out.send("page", &(self.0)(n)).await?;
            }
            Ok(json!({}))
        })
    }
}

fn page(records: &Value) -> Value {
    let clock = json!({"unix_ms": 1, "mono_us": 1});
    json!({"run": 1, "began": clock, "now": clock, "forgotten": u64::MAX, "records": records})
}

fn record(seq: u64, event: &Value) -> Value {
    let year_3000 = json!({"unix_ms": 32_503_680_000_000_u64, "mono_us": u64::MAX});
    json!({"seq": seq, "at": year_3000, "times": u32::MAX, "event": event})
}

#[tokio::test]
async fn a_forged_flight_record_is_bounded_and_harmless() {
    let endless = |n: u64| {
        let event = json!({"kind": "connection_refused", "code": "\u{1b}[2J\u{202e}".repeat(9)});
        let records: Vec<Value> = (1..=200).map(|k| record(n * 200 + k, &event)).collect();
        page(&json!(records))
    };
    let backwards = |n: u64| page(&json!([record(9 - n.min(8), &json!({"kind": "unknown"}))]));
    let nonsense = |_| json!({"records": {"seq": []}, "run": "\u{7}"});
    let mixed = |_| {
        page(
            &json!([7, {"seq": 1}, record(1, &json!({"kind": "cancelled", "pipeline": 3})), record(2, &json!({"kind": "node_started"}))]),
        )
    };
    let liars: [(&str, Liar); 4] = [
        ("test.endless@1.0", Liar(endless, 100_000)),
        ("test.backwards@1.0", Liar(backwards, 9)),
        ("test.nonsense@1.0", Liar(nonsense, 1)),
        ("test.mixed@1.0", Liar(mixed, 1)),
    ];
    let home = founder_of(&[]).await;
    let other = joiner(2, &home).await;
    home.admit(2);
    until(|| home.links() == [id(2)]).await;
    until(|| other.node.log().state().level(&id(2)).is_some()).await;
    for (name, liar) in liars {
        let name: Capability = name.parse().unwrap();
        let descriptor = CapabilityDescriptor {
            streaming: true,
            ..CapabilityDescriptor::new(name.clone(), "Lies.", Some(Level::Member))
        };
        let registry = home.node.call_server().registry();
        registry.register(descriptor, Arc::new(liar)).unwrap();
        let asked = flight::now();
        let stream = other.node.call(id(1), &name, &json!({})).await.unwrap();
        let answer = timeout(TIMEOUT, flight::Answer::collect(asked, stream)).await;
        let answer = answer.unwrap();
        match name.name() {
            "test.endless" => {
                let answer = answer.unwrap();
                assert!(answer.cut && answer.page.records.len() <= 12_000);
                let json = serde_json::to_string(&answer.page.records).unwrap();
                assert!(!json.contains("\\u001b") && json.is_ascii());
            }
            "test.mixed" => {
                let answer = answer.unwrap();
                assert_eq!((answer.page.records.len(), answer.unreadable), (1, 3));
                let line = flight::merge(&[(id(1), answer)]);
                assert!(line.iter().all(|entry| entry.doubtful));
                let now_us = flight::now().unix_ms * 1000;
                assert!(line.iter().all(|entry| entry.at_us <= now_us));
            }
            _ => {
                let error = answer.unwrap_err();
                assert_eq!(error.code().as_str(), "bad_request", "{name}");
            }
        }
    }
}

#[test]
fn the_connections_of_a_member_are_limited_as_the_specification_says() {
    let spec = include_str!("../../../specs/x08-tensor-transport.md");
    let sessions = Config::default();
    let (each, all) = (sessions.max_sessions_per_peer, sessions.max_sessions);
    let mut rows = vec![format!("| `/tensor/v1` | {each} | {each} | {all} |")];
    for rule in [bus_rule(), path_rule(), weights::path_rule()] {
        let (each, all) = (rule.max_sockets_per_peer, rule.max_sockets);
        let party = each.max(all / 4);
        rows.push(format!("| `{}` | {each} | {party} | {all} |", rule.path));
    }
    for row in rows {
        assert!(spec.contains(&row), "{row}");
    }
}
