//! A host in a community: sessions come through the node's listener, permissions from its log.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::log::{Body, Level};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::{Grant, NodeKey, testing};
use hearthnet_transport::{CloseCode, ConnectError, Hello, Message, connect};
use tokio::time::timeout;

use super::fake::{FakeSource, HandClock, Probe, encode, expected, served};
use super::net::{Caller, close, open};
use super::{caller_key, host_key, rows, step};
use crate::host::{Place, start};
use crate::{PIPELINE, RunningHost, ServeConfig, StartError};

const TIMEOUT: Duration = Duration::from_secs(60);

fn stranger_key() -> NodeKey {
    NodeKey::from_secret(&[66; 32])
}

/// A host in a node, which has founded a community with one other member.
struct Home {
    running: RunningHost,
    node: Node,
    community: testing::Home,
}

async fn node(listen: Option<&str>) -> (Node, testing::Home) {
    let community = testing::Home::founded(host_key(), true);
    let log = community.log.clone();
    let mut settings = NodeSettings::new("host");
    settings.listen = listen.map(str::to_owned);
    settings.discovery.mdns = false;
    let registry = Arc::new(Registry::new());
    let node = Node::start(Arc::new(host_key()), log, settings, registry).await;
    (node.unwrap(), community)
}

impl Home {
    async fn new() -> Self {
        let (node, community) = node(Some("127.0.0.1:0")).await;
        let (probe, clock) = (Arc::new(Probe::default()), Arc::new(HandClock::default()));
        let config = ServeConfig::new("nowhere: the node listens");
        let source = FakeSource(probe);
        let place = Place::In(&node);
        let running = start(config, place, served(), source, clock.clone(), &mut |_| {}).await;
        let running = running.unwrap();
        clock.drives(running.inbox());
        community.admit(caller_key().id(), Level::Member);
        Self {
            running,
            node,
            community,
        }
    }

    async fn dial(&self, key: &NodeKey, token: Vec<u8>) -> Result<Caller, ConnectError> {
        let (identity, hello) = (key.identity().unwrap(), Hello::new(PIPELINE, token));
        let (addr, host) = (self.running.local_addr().to_string(), self.node.id());
        let session = connect(&addr, &identity, host, hello, Default::default()).await;
        session.map(Caller)
    }

    async fn refusal(&self, key: &NodeKey, token: Vec<u8>) -> CloseCode {
        match self.dial(key, token).await {
            Err(error) => error.code().unwrap(),
            Ok(_) => panic!("it was let in"),
        }
    }
}

/// A grant of `issuer` for the member, modified by `change`.
fn token(change: impl FnOnce(&mut Grant), issuer: &NodeKey) -> Vec<u8> {
    super::token(issuer, &caller_key(), change)
}

fn good() -> Vec<u8> {
    token(|_| {}, &host_key())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_with_a_grant_of_the_host_computes_through_the_nodes_listener() {
    let home = Home::new().await;
    assert_eq!(home.running.local_addr(), home.node.listen_addr().unwrap());
    let mut caller = home.dial(&caller_key(), good()).await.unwrap();
    caller.open(1).await.unwrap();
    caller.send(step(1, 0, &rows(3))).await;
    let result = caller.result().await;
    assert_eq!(result.data, encode(&expected(0.0, 0, &rows(3))));
    caller.send(Message::Describe).await;
    let Message::Descriptor(descriptor) = caller.recv().await else {
        panic!()
    };
    let descriptor = hearthnet_bus::Descriptor::from_cbor(&descriptor).unwrap();
    assert_eq!(descriptor.host, home.node.id());
    assert_eq!(descriptor.endpoint, home.node.own_endpoints()[0]);
    // When the host ends, the node stays, and refuses tensor sessions.
    let leave = tokio::spawn(home.running.shutdown(TIMEOUT));
    assert!(matches!(caller.recv().await, Message::Leaving { .. }));
    caller.send(close(1)).await;
    let closed = timeout(TIMEOUT, caller.0.recv()).await.unwrap();
    assert_eq!(closed.unwrap_err().code, CloseCode::Shutdown);
    assert_eq!(leave.await.unwrap().streams_cut, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_flaw_of_a_token_has_its_code() {
    let home = Home::new().await;
    let other = NodeKey::from_secret(&[9; 32]);
    let mut forged = good();
    *forged.last_mut().unwrap() ^= 1;
    let past = |grant: &mut Grant| {
        grant.not_before -= 600;
        grant.expires = grant.not_before + 60;
    };
    let future = |grant: &mut Grant| {
        grant.not_before += 600;
        grant.expires += 600;
    };
    let cases = [
        (CloseCode::TokenInvalid, vec![]),
        (CloseCode::InvalidSignature, forged),
        // Presented by another node than its subject; made for another host.
        (
            CloseCode::TokenSubject,
            token(|g| g.subject = other.id(), &host_key()),
        ),
        (
            CloseCode::TokenAudience,
            token(|g| g.audience = other.id(), &host_key()),
        ),
        (CloseCode::TokenExpired, token(past, &host_key())),
        (CloseCode::TokenExpired, token(future, &host_key())),
        (
            CloseCode::TokenScope,
            token(|g| g.scope = "test.other@1.0".parse().unwrap(), &host_key()),
        ),
        // In a community a caller does not issue its own grants.
        (CloseCode::Unauthorized, token(|_| {}, &caller_key())),
    ];
    for (code, token) in cases {
        assert_eq!(home.refusal(&caller_key(), token).await, code);
    }
    let used = good();
    home.dial(&caller_key(), used.clone()).await.unwrap();
    assert_eq!(
        home.refusal(&caller_key(), used).await,
        CloseCode::TokenReplayed
    );
    // A grant does not make a member.
    let stranger = token(|g| g.subject = stranger_key().id(), &host_key());
    assert_eq!(
        home.refusal(&stranger_key(), stranger).await,
        CloseCode::Unauthorized
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_is_revoked_in_the_middle_of_a_stream_is_cut_off_and_frees_it() {
    let home = Home::new().await;
    let mut caller = home.dial(&caller_key(), good()).await.unwrap();
    caller.send(open(1)).await;
    assert!(matches!(caller.recv().await, Message::StreamOpened(_)));
    home.community.revoke(caller_key().id());
    let closed = timeout(TIMEOUT, caller.0.recv())
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!((closed.code, closed.by_us), (CloseCode::Revoked, false));
    let freed = async {
        while home.running.stats().streams > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(TIMEOUT, freed).await.unwrap();
    assert_eq!(
        home.refusal(&caller_key(), good()).await,
        CloseCode::Revoked
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_is_revoked_ends_its_session() {
    let home = Home::new().await;
    let (kept, lost) = (good(), token(|g| g.id = [5; 16], &host_key()));
    let kept = home.dial(&caller_key(), kept).await.unwrap();
    let mut lost_session = home.dial(&caller_key(), lost.clone()).await.unwrap();
    home.community.append(Body::GrantRevoked {
        issuer: host_key().id(),
        id: [5; 16],
    });
    let closed = timeout(TIMEOUT, lost_session.0.recv()).await.unwrap();
    assert_eq!(closed.unwrap_err().code, CloseCode::Revoked);
    assert_eq!(kept.0.sender().closed(), None);
    assert_eq!(home.refusal(&caller_key(), lost).await, CloseCode::Revoked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_does_not_listen_serves_no_shards() {
    let (node, _dir) = node(None).await;
    let source = FakeSource(Arc::new(Probe::default()));
    let config = ServeConfig::new("");
    let started = crate::ShardHost::start_on(config, &node, served(), source, &mut |_| {}).await;
    assert!(matches!(
        started,
        Err(StartError::Setting {
            setting: "node.listen",
            ..
        })
    ));
}
