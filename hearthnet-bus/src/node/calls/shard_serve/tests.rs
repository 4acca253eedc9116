use hearthnet_transport::CloseCode;
use serde_json::{Value, json};

use super::super::client::Client;
use super::super::descriptor::Trust;
use super::super::server::{Authority, CallServer, Origin, Research};
use super::super::wire::Wire;
use super::*;
use crate::community::log::Body;
use crate::now_ms;
use crate::testing::{self, Home};
use crate::{Capability, Descriptor, Expectation, Grant, ReplayCache};

/// Authority by the log alone; equivalent to the node's own rules (`node/access.rs`).
struct Log {
    log: EventLog,
    research_here: bool,
}

impl Authority for Log {
    fn trust(&self, node: &NodeId) -> Trust {
        self.log.state().level(node).into()
    }

    fn research(&self) -> Research {
        match (self.research_here, self.log.state().policy.research) {
            (false, _) => Research::OffHere,
            (true, false) => Research::OffInCommunity,
            (true, true) => Research::On,
        }
    }
}

fn key(seed: u8) -> Arc<NodeKey> {
    Arc::new(testing::key(seed))
}

/// A community and its founder, key 1, which is an anchor and the called node. Key 2 is trusted, 3
/// a member.
struct TestCommunity {
    home: Home,
    log: EventLog,
    served: Arc<Served>,
    server: Arc<CallServer>,
}

fn test_community(own: u8, research_here: bool, research: bool) -> TestCommunity {
    let home = Home::founded(testing::key(1), research);
    home.admit(key(2).id(), Level::Trusted);
    home.admit(key(3).id(), Level::Member);
    let log = home.log.clone();
    let registry = Arc::new(Registry::new());
    let served = Arc::new(Served::default());
    register_shards(&registry, key(own), log.clone(), Arc::clone(&served)).unwrap();
    let authority = Arc::new(Log {
        log: log.clone(),
        research_here,
    });
    let server = Arc::new(CallServer::new(key(own).id(), registry, authority));
    TestCommunity {
        home,
        log,
        served,
        server,
    }
}

impl TestCommunity {
    fn append(&self, body: Body) {
        self.home.append(body);
    }

    /// Calls as the node with key `seed`, over a socket; key 1 calls through the local API.
    async fn call(
        &self,
        seed: u8,
        capability: Capability,
        params: Value,
    ) -> Result<Value, CallError> {
        let (ours, theirs) = Wire::pair();
        let server = Arc::clone(&self.server);
        let is_local = self.server.own() == key(seed).id();
        let origin = if is_local {
            Origin::Local
        } else {
            Origin::Peer(key(seed).id())
        };
        tokio::spawn(async move { server.serve_wire(theirs, origin).await });
        let client = if is_local {
            Client::local(ours)
        } else {
            Client::over(ours, key(seed), self.server.own())
        };
        client.call(&capability, &params)?.result().await
    }
}

fn code(result: Result<Value, CallError>) -> String {
    result.unwrap_err().code().to_string()
}

fn shard(host: u8) -> Descriptor {
    Descriptor {
        shard_id: "m:0-7".into(),
        model_id: "m".into(),
        weights_sha256: "0a".repeat(32),
        layer_range: (0, 7),
        total_layers: 16,
        vram_required_mb: 10,
        weights_mb: 0,
        kv_mb: 0,
        max_concurrent_streams: 4,
        host: key(host).id(),
        endpoint: "192.0.2.7:4710".into(),
        advertised_at: 1,
        boundary_dtype: "fp16".into(),
        arithmetic: "canonical-1".into(),
        ms_per_token: 0.5,
        queue_depth: 0,
        software: "test/1".into(),
    }
}

#[tokio::test]
async fn a_grant_opens_one_session_of_its_caller_at_this_node() {
    let test_community = test_community(1, true, true);
    test_community.served.set(shard(1));
    let params = json!({"shard_id": "m:0-7"});
    let grant = test_community
        .call(3, Capability::shard_serve(), params.clone())
        .await
        .unwrap();
    let grant: ShardGrant = serde_json::from_value(grant).unwrap();
    assert_eq!(
        (grant.endpoint.as_str(), grant.node),
        ("192.0.2.7:4710", key(1).id())
    );
    let token = grant.token().unwrap();
    let now = now_ms() / 1000;
    assert!(grant.expires > now && grant.expires <= now + 61);
    let scope = Capability::shard_serve();
    let expected = |peer: u8| Expectation {
        peer: key(peer).id(),
        party: key(peer).id(),
        audience: key(1).id(),
        scope: &scope,
    };
    let mut seen = ReplayCache::new(16);
    let issued_here = |issuer: &NodeId| *issuer == key(1).id();
    let mut admit = |peer| Grant::admit(&token, &expected(peer), issued_here, &mut seen, now, 30);
    assert_eq!(admit(2).unwrap_err().code(), CloseCode::TokenSubject);
    let admitted = admit(3).unwrap();
    assert_eq!(admit(3).unwrap_err().code(), CloseCode::TokenReplayed);
    // The grant can be revoked.
    let (issuer, id) = (admitted.issuer, admitted.id);
    assert!(
        !test_community
            .log
            .state()
            .is_grant_revoked(&issuer, &id, now_ms())
    );
    test_community.append(Body::GrantRevoked { issuer, id });
    assert!(
        test_community
            .log
            .state()
            .is_grant_revoked(&issuer, &id, now_ms())
    );
    // Each call returns a new grant.
    let next = test_community
        .call(3, Capability::shard_serve(), params)
        .await
        .unwrap();
    assert_ne!(next["grant"], json!(grant.grant));
}

#[tokio::test]
async fn what_is_not_served_or_must_not_be_is_not_granted() {
    let test_community = test_community(1, true, true);
    let call = |seed, params| test_community.call(seed, Capability::shard_serve(), params);
    assert_eq!(
        code(call(3, json!({"shard_id": "m:0-7"})).await),
        "shard_unavailable"
    );
    assert_eq!(code(call(3, json!({})).await), "bad_request");
    assert_eq!(
        code(call(9, json!({"shard_id": "m:0-7"})).await),
        "unauthorized"
    );
    // A host that lost its level grants no sessions.
    let test_community = self::test_community(3, true, true);
    test_community.served.set(shard(3));
    let refused = test_community
        .call(2, Capability::shard_serve(), json!({"shard_id": "m:0-7"}))
        .await;
    assert_eq!(code(refused), "unauthorized");
}

#[tokio::test]
async fn shards_are_refused_while_research_is_off_naming_the_setting() {
    for (here, community, setting) in [
        (false, true, "policy.research.enable"),
        (true, false, "policy `research`"),
    ] {
        let test_community = test_community(1, here, community);
        test_community.served.set(shard(1));
        let params = json!({"shard_id": "m:0-7"});
        let refused = test_community
            .call(3, Capability::shard_serve(), params)
            .await
            .unwrap_err();
        assert_eq!(refused.code(), &Code::EXPERIMENTAL_DISABLED);
        assert!(refused.message().contains(setting), "{refused}");
    }
}
