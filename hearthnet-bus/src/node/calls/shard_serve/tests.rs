use hearthnet_transport::CloseCode;
use serde_json::{Value, json};

use super::super::server::CallServer;
use super::super::tests::{connect, key};
use super::*;
use crate::community::log::Body;
use crate::node::access::Access;
use crate::now_ms;
use crate::testing::{Home, descriptor, id};
use crate::{Capability, Descriptor, Expectation, Grant, ReplayCache};

/// A community and its founder, key 1, which is an anchor and the called node. Key 2 is trusted, 3
/// a member.
struct TestCommunity {
    home: Home,
    server: Arc<CallServer>,
}

/// Node `own` of the community serves its shard `m:0-7` if `serves`.
fn test_community(own: u8, research: [bool; 2], serves: bool) -> TestCommunity {
    let [here, community] = research;
    let home = Home::founded(crate::testing::key(1), community);
    home.admit(id(2), Level::Trusted);
    home.admit(id(3), Level::Member);
    let (registry, served) = (Arc::new(Registry::new()), Arc::new(Served::default()));
    if serves {
        served.set(shard(own));
    }
    register_shards(&registry, key(own), home.log.clone(), served).unwrap();
    let authority = Arc::new(Access {
        log: home.log.clone(),
        research: here,
        tensor: Default::default(),
        weights: Default::default(),
    });
    let server = Arc::new(CallServer::new(id(own), registry, authority));
    TestCommunity { home, server }
}

impl TestCommunity {
    /// Asks for a session as the node with key `seed`.
    async fn ask(&self, seed: u8, params: Value) -> Result<Value, CallError> {
        let (client, _) = connect(&self.server, seed);
        let call = client.call(&Capability::shard_serve(), &params)?;
        call.result().await
    }
}

fn code(result: Result<Value, CallError>) -> String {
    result.unwrap_err().code().to_string()
}

fn its_shard() -> Value {
    json!({"shard_id": "m:0-7"})
}

fn shard(host: u8) -> Descriptor {
    Descriptor {
        endpoint: "192.0.2.7:4710".into(),
        ..descriptor(id(host))
    }
}

#[tokio::test]
async fn a_grant_opens_one_session_of_its_caller_at_this_node() {
    let community = test_community(1, [true, true], true);
    let grant = community.ask(3, its_shard()).await.unwrap();
    let grant: ShardGrant = serde_json::from_value(grant).unwrap();
    assert_eq!(
        (grant.endpoint.as_str(), grant.node),
        ("192.0.2.7:4710", id(1))
    );
    let token = grant.token().unwrap();
    let now = now_ms() / 1000;
    assert!(grant.expires > now && grant.expires <= now + 61);
    let scope = Capability::shard_serve();
    let expected = |peer: u8| Expectation {
        peer: id(peer),
        party: id(peer),
        audience: id(1),
        scope: &scope,
    };
    let mut seen = ReplayCache::new(16);
    let issued_here = |issuer: &NodeId| *issuer == id(1);
    let mut admit = |peer| Grant::admit(&token, &expected(peer), issued_here, &mut seen, now, 30);
    assert_eq!(admit(2).unwrap_err().code(), CloseCode::TokenSubject);
    let admitted = admit(3).unwrap();
    assert_eq!(admit(3).unwrap_err().code(), CloseCode::TokenReplayed);
    // The grant can be revoked.
    let (issuer, id) = (admitted.issuer, admitted.id);
    let is_revoked = || {
        let state = community.home.log.state();
        state.is_grant_revoked(&issuer, &id, now_ms())
    };
    assert!(!is_revoked());
    community.home.append(Body::GrantRevoked { issuer, id });
    assert!(is_revoked());
    // Each call returns a new grant.
    let next = community.ask(3, its_shard()).await.unwrap();
    assert_ne!(next["grant"], json!(grant.grant));
}

#[tokio::test]
async fn what_is_not_served_or_must_not_be_is_not_granted() {
    let serves_none = test_community(1, [true, true], false);
    // A host that lost its level grants no sessions.
    let is_member = test_community(3, [true, true], true);
    for (community, caller, params, refusal) in [
        (&serves_none, 3, its_shard(), "shard_unavailable"),
        (&serves_none, 3, json!({}), "bad_request"),
        (&serves_none, 9, its_shard(), "unauthorized"),
        (&is_member, 2, its_shard(), "unauthorized"),
    ] {
        assert_eq!(code(community.ask(caller, params).await), refusal);
    }
}

#[tokio::test]
async fn shards_are_refused_while_research_is_off_naming_the_setting() {
    for (research, setting) in [
        ([false, true], "policy.research.enable"),
        ([true, false], "policy `research`"),
    ] {
        let community = test_community(1, research, true);
        let refused = community.ask(3, its_shard()).await.unwrap_err();
        assert_eq!(refused.code(), &Code::EXPERIMENTAL_DISABLED);
        assert!(refused.message().contains(setting), "{refused}");
    }
}
