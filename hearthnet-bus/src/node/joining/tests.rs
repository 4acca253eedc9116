use std::path::Path;

use super::*;
use crate::community::invite::Invite;
use crate::community::log::Policy;
use crate::node::calls::{Authority, CallServer, Origin, Registry, Research, Wire};

const NOW: u64 = 1_800_000_000_000;
const DAY: u64 = 86_400_000;

fn now() -> u64 {
    NOW
}

fn key(seed: u8) -> Arc<NodeKey> {
    Arc::new(NodeKey::from_secret(&[seed; 32]))
}

/// A community founded by node 1, with root key 9.
fn found(dir: &Path) -> EventLog {
    EventLog::create(
        dir,
        &key(9),
        key(1).id(),
        "Elm Street",
        Policy::default(),
        NOW,
    )
    .unwrap()
}

fn invite(log: &EventLog, uses: u32) -> Invite {
    let invite = Invite::generate(log.community(), (NOW + DAY) / 1000, vec![]).unwrap();
    let body = Body::Invited {
        invite: invite.key().id(),
        level: Level::Trusted,
        uses,
        expires_ms: NOW + DAY,
    };
    log.append(&key(1), body, NOW).unwrap();
    invite
}

/// Every caller is a stranger.
struct OnlyStrangers;

impl Authority for OnlyStrangers {
    fn trust(&self, _: &NodeId) -> Trust {
        Trust::Anyone
    }

    fn research(&self) -> Research {
        Research::OffHere
    }
}

/// A client of `joiner` at a node that answers `community.join` with `handler`.
fn connect(handler: Arc<dyn Handler>, joiner: &Arc<NodeKey>, host: NodeId) -> Client {
    let registry = Arc::new(Registry::new());
    registry.register(descriptor(), handler).unwrap();
    let server = CallServer::new(host, registry, Arc::new(OnlyStrangers));
    let (ours, theirs) = Wire::pair();
    let from = Origin::Peer(joiner.id());
    tokio::spawn(async move { server.serve_wire(theirs, from).await });
    Client::over(ours, Arc::clone(joiner), host)
}

async fn join(
    at: &EventLog,
    admitter: u8,
    joiner: u8,
    request: &JoinRequest,
    dir: &Path,
) -> Result<Level, JoinFailure> {
    let handler = Arc::new(JoinHandler::new(at.clone(), key(admitter), real_now));
    let client = connect(handler, &key(joiner), key(admitter).id());
    let log = EventLog::prepare(dir, request.community).unwrap();
    let level = join_through(&client, key(admitter).id(), request, &log, real_now, |_| {}).await?;
    assert_eq!(log.state().state_hash(), at.state().state_hash());
    Ok(level)
}

/// The server checks envelopes against the machine's clock, so its tests use that clock.
fn real_now() -> u64 {
    crate::now_ms()
}

/// A community whose events are of today, with an invite.
fn today(dir: &Path, uses: u32) -> (EventLog, Invite) {
    let now = real_now();
    let log = EventLog::create(
        dir,
        &key(9),
        key(1).id(),
        "Elm Street",
        Policy::default(),
        now,
    )
    .unwrap();
    let invite = Invite::generate(log.community(), (now + DAY) / 1000, vec![]).unwrap();
    let body = Body::Invited {
        invite: invite.key().id(),
        level: Level::Trusted,
        uses,
        expires_ms: now + DAY,
    };
    log.append(&key(1), body, now).unwrap();
    (log, invite)
}

#[tokio::test]
async fn a_stranger_with_an_invite_leaves_as_a_member_who_has_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let (log, invite) = today(&dir.path().join("host"), 1);
    // Enough events for several messages.
    let mut policy = log.state().policy;
    for _ in 0..400 {
        policy.research = !policy.research;
        log.append(&key(1), Body::PolicyChanged(policy), real_now())
            .unwrap();
    }
    let request = invite.request(key(2).id(), "kitchen").unwrap();
    let level = join(&log, 1, 2, &request, &dir.path().join("joiner")).await;
    assert_eq!(level.unwrap(), Level::Trusted);
    assert_eq!(log.state().level(&key(2).id()), Some(Level::Trusted));
    assert_eq!(log.state().member(&key(2).id()).unwrap().name, "kitchen");
}

#[tokio::test]
async fn a_member_that_lost_the_answer_gets_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let (log, invite) = today(&dir.path().join("host"), 1);
    let request = invite.request(key(2).id(), "kitchen").unwrap();
    for attempt in ["first", "second"] {
        let level = join(&log, 1, 2, &request, &dir.path().join(attempt)).await;
        assert_eq!(level.unwrap(), Level::Trusted);
    }
    assert_eq!(log.state().invite(&invite.key().id()).unwrap().used, 1);
}

#[tokio::test]
async fn a_used_up_invite_is_a_final_failure() {
    let dir = tempfile::tempdir().unwrap();
    let (log, invite) = today(&dir.path().join("host"), 1);
    let request = |n: u8| invite.request(key(n).id(), "x").unwrap();
    join(&log, 1, 2, &request(2), &dir.path().join("2"))
        .await
        .unwrap();
    let failure = join(&log, 1, 3, &request(3), &dir.path().join("3"))
        .await
        .unwrap_err();
    assert_eq!(failure.code(), "bad_invite");
    assert!(failure.is_final());
}

#[test]
fn joins_per_code_are_limited_at_all_nodes_and_other_codes_still_work() {
    let dir = tempfile::tempdir().unwrap();
    let (log, invite) = today(dir.path(), 100);
    let (_, other) = {
        let invite = Invite::generate(log.community(), (real_now() + DAY) / 1000, vec![]).unwrap();
        let body = Body::Invited {
            invite: invite.key().id(),
            level: Level::Member,
            uses: 100,
            expires_ms: real_now() + DAY,
        };
        (log.append(&key(1), body, real_now()).unwrap(), invite)
    };
    let join = |code: &Invite, n: u8, now: u64| {
        let request = code.request(key(n).id(), "kim").unwrap();
        let admitted = admit(&log, &key(1), key(n).id(), &request, now);
        admitted.map_err(|error| error.code().to_string())
    };
    let now = real_now();
    let let_in = |code: &Invite, keys: std::ops::Range<u8>, now| {
        let joined = keys.map(|n| join(code, n, now));
        joined.filter(Result::is_ok).count()
    };
    assert_eq!(let_in(&invite, 10..59, now), JOINS_PER_CODE);
    assert_eq!(join(&invite, 60, now), Err("busy".to_owned()));
    assert!(join(&other, 61, now).is_ok());
    // After ten minutes further joins are admitted.
    assert_eq!(let_in(&invite, 62..90, now + JOINS_MS + 1), JOINS_PER_CODE);
    let request = invite.request(key(60).id(), "kim").unwrap();
    let refused = admit(&log, &key(1), key(60).id(), &request, now).unwrap_err();
    assert!(!JoinFailure::Refused(refused).is_final());
    // Names that are shown alone are made unique.
    let state = log.state();
    let shown: std::collections::BTreeSet<String> = state
        .members()
        .map(|(node, _)| state.shown_name(node, now))
        .collect();
    assert_eq!(shown.len(), state.members().count());
}

#[test]
fn a_request_counts_for_the_node_that_brings_it_and_for_this_community_only() {
    let dir = tempfile::tempdir().unwrap();
    let log = found(dir.path());
    let invite = invite(&log, 5);
    let request = invite.request(key(2).id(), "x").unwrap();
    let code = |caller: u8, request: &JoinRequest| {
        let refusal = admit(&log, &key(1), key(caller).id(), request, NOW).unwrap_err();
        refusal.code().as_str().to_owned()
    };
    assert_eq!(code(3, &request), "unauthorized");
    let elsewhere = JoinRequest {
        community: key(8).id().into(),
        ..request.clone()
    };
    assert_eq!(code(2, &elsewhere), "wrong_community");
    let mut forged = request.clone();
    forged.name = "y".into();
    assert_eq!(code(2, &forged), "invalid_signature");
    let other = Invite::generate(log.community(), NOW / 1000, vec![]).unwrap();
    let unknown = other.request(key(2).id(), "x").unwrap();
    assert_eq!(code(2, &unknown), "unknown_invite");
    assert_eq!(log.state().level(&key(2).id()), None);
    assert_eq!(
        admit(&log, &key(1), key(2).id(), &request, NOW).unwrap(),
        Level::Trusted
    );
}

#[test]
fn an_expired_invite_or_an_unauthorized_admitter_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let log = found(dir.path());
    let invite = invite(&log, 5);
    let request = invite.request(key(2).id(), "x").unwrap();
    let late = admit(&log, &key(1), key(2).id(), &request, NOW + DAY + 1).unwrap_err();
    assert_eq!(late.code().as_str(), "bad_invite");
    // A stranger that signs the admission.
    let stranger = admit(&log, &key(5), key(2).id(), &request, NOW).unwrap_err();
    assert_eq!(stranger.code().as_str(), "unauthorized");
    assert!(!JoinFailure::Refused(stranger).is_final());
}

#[test]
fn a_revoked_node_stays_out_whatever_code_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let log = found(dir.path());
    let invite = invite(&log, 5);
    let request = invite.request(key(2).id(), "x").unwrap();
    admit(&log, &key(1), key(2).id(), &request, NOW).unwrap();
    let revoked = Body::Revoked {
        node: key(2).id(),
        last_seq: 0,
    };
    log.append(&key(1), revoked, NOW).unwrap();
    let refusal = admit(&log, &key(1), key(2).id(), &request, NOW).unwrap_err();
    assert_eq!(refusal.code().as_str(), "revoked");
    // The withdrawn invite does not work with another key either.
    let request = invite.request(key(3).id(), "x").unwrap();
    let refusal = admit(&log, &key(1), key(3).id(), &request, NOW).unwrap_err();
    assert_eq!(refusal.code().as_str(), "bad_invite");
}

/// Claims success, and sends another community's log.
struct Impostor(EventLog);

impl Handler for Impostor {
    fn call(&self, _: CallContext, _: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            let nothing = Heads::empty(self.0.community());
            let batch = self.0.missing(&nothing, 100, 100_000).unwrap();
            let texts: Vec<String> = batch
                .events
                .iter()
                .map(|raw| URL_SAFE_NO_PAD.encode(raw))
                .collect();
            out.send(EVENTS, &json!(texts)).await?;
            out.send(EVENTS, &json!(["%%%", 7, "AAAA"])).await?;
            Ok(json!({ "level": "anchor" }))
        })
    }
}

#[tokio::test]
async fn a_forged_log_makes_no_member() {
    let dir = tempfile::tempdir().unwrap();
    let (_, invite) = today(&dir.path().join("real"), 1);
    let false_root = NodeKey::from_secret(&[66; 32]);
    let other = EventLog::create(
        &dir.path().join("false"),
        &false_root,
        key(2).id(),
        "Elm Street",
        Policy::default(),
        real_now(),
    )
    .unwrap();
    let client = connect(Arc::new(Impostor(other)), &key(2), key(6).id());
    let log = EventLog::prepare(&dir.path().join("joiner"), invite.community()).unwrap();
    let request = invite.request(key(2).id(), "x").unwrap();
    let failure = join_through(&client, key(6).id(), &request, &log, now, |_| {})
        .await
        .unwrap_err();
    assert!(matches!(failure, JoinFailure::NotAdmitted), "{failure}");
    assert!(!log.state().is_created());
}
