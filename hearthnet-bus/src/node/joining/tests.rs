use std::path::Path;

use super::*;
use crate::community::invite::Invite;
use crate::community::log::Policy;
use crate::node::calls::tests::{connect, key};
use crate::node::calls::{CallServer, OneLevel, Registry};
use crate::testing::id;

const NOW: u64 = 1_800_000_000_000;
const DAY: u64 = 86_400_000;

/// A community founded by node 1 at `now`, with the root key of seed `root`.
fn found(dir: &Path, root: u8, now: u64) -> EventLog {
    let policy = Policy::default();
    EventLog::create(dir, &key(root), id(1), "Elm Street", policy, now).unwrap()
}

/// An invite of node 1, valid for a day from `now`.
fn invite(log: &EventLog, level: Level, uses: u32, now: u64) -> Invite {
    let invite = Invite::generate(log.community(), (now + DAY) / 1000, vec![]).unwrap();
    let body = Body::Invited {
        invite: invite.key().id(),
        level,
        uses,
        expires_ms: now + DAY,
    };
    log.append(&key(1), body, now).unwrap();
    invite
}

/// A community at [`NOW`], with a request of node 2 and the invite that it names.
fn asked(dir: &Path) -> (EventLog, Invite, JoinRequest) {
    let log = found(dir, 9, NOW);
    let invite = invite(&log, Level::Trusted, 5, NOW);
    let request = invite.request(id(2), "x").unwrap();
    (log, invite, request)
}

/// A client of the stranger `joiner` at a node that answers `community.join` with `handler`.
fn client(handler: Arc<dyn Handler>, joiner: u8, host: u8) -> Client {
    let registry = Arc::new(Registry::new());
    registry.register(descriptor(), handler).unwrap();
    let server = CallServer::new(id(host), registry, Arc::new(OneLevel(None)));
    connect(&Arc::new(server), joiner).0
}

async fn join(
    at: &EventLog,
    admitter: u8,
    joiner: u8,
    request: &JoinRequest,
    dir: &Path,
) -> Result<Level, JoinFailure> {
    let handler = Arc::new(JoinHandler::new(at.clone(), key(admitter)));
    let client = client(handler, joiner, admitter);
    let log = EventLog::prepare(dir, request.community).unwrap();
    let level = join_through(&client, id(admitter), request, &log, |_| {}).await?;
    assert_eq!(log.state().state_hash(), at.state().state_hash());
    Ok(level)
}

/// A community whose events are of today, with an invite.
fn today(dir: &Path, uses: u32) -> (EventLog, Invite) {
    let now = now_ms();
    let log = found(dir, 9, now);
    let invite = invite(&log, Level::Trusted, uses, now);
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
        log.append(&key(1), Body::PolicyChanged(policy), now_ms())
            .unwrap();
    }
    let request = invite.request(id(2), "kitchen").unwrap();
    let level = join(&log, 1, 2, &request, &dir.path().join("joiner")).await;
    assert_eq!(level.unwrap(), Level::Trusted);
    assert_eq!(log.state().level(&id(2)), Some(Level::Trusted));
    assert_eq!(log.state().member(&id(2)).unwrap().name, "kitchen");
}

#[tokio::test]
async fn a_member_that_lost_the_answer_gets_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let (log, invite) = today(&dir.path().join("host"), 1);
    let request = invite.request(id(2), "kitchen").unwrap();
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
    let request = |n: u8| invite.request(id(n), "x").unwrap();
    let joined = join(&log, 1, 2, &request(2), &dir.path().join("2")).await;
    joined.unwrap();
    let joined = join(&log, 1, 3, &request(3), &dir.path().join("3")).await;
    let failure = joined.unwrap_err();
    assert_eq!(failure.code(), "bad_invite");
    assert!(failure.is_final());
}

#[test]
fn a_joiner_asks_another_member_unless_all_would_refuse() {
    for (code, is_final) in [
        ("bad_invite", true),
        ("invalid_signature", true),
        ("revoked", true),
        ("bad_request", true),
        ("unknown_invite", false),
        ("wrong_community", false),
        ("unauthorized", false),
        ("busy", false),
        ("not_found", false),
    ] {
        let refused = JoinFailure::Refused(CallError::new(code.into(), "no"));
        assert_eq!(refused.is_final(), is_final, "{code}");
    }
}

#[test]
fn joins_per_code_are_limited_at_all_nodes_and_other_codes_still_work() {
    let dir = tempfile::tempdir().unwrap();
    let (log, invite) = today(dir.path(), 100);
    let other = self::invite(&log, Level::Member, 100, now_ms());
    let join = |code: &Invite, n: u8, now: u64| {
        let request = code.request(id(n), "kim").unwrap();
        let admitted = admit(&log, &key(1), id(n), &request, now);
        admitted.map_err(|error| error.code().to_string())
    };
    let now = now_ms();
    let let_in = |code: &Invite, keys: std::ops::Range<u8>, now| {
        let joined = keys.map(|n| join(code, n, now));
        joined.filter(Result::is_ok).count()
    };
    assert_eq!(let_in(&invite, 10..59, now), JOINS_PER_CODE);
    assert_eq!(join(&invite, 60, now), Err("busy".to_owned()));
    assert!(join(&other, 61, now).is_ok());
    // After ten minutes further joins are admitted.
    assert_eq!(let_in(&invite, 62..90, now + JOINS_MS + 1), JOINS_PER_CODE);
    let request = invite.request(id(60), "kim").unwrap();
    let refused = admit(&log, &key(1), id(60), &request, now).unwrap_err();
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
    let (log, _, request) = asked(dir.path());
    let code = |caller: u8, request: &JoinRequest| {
        let refusal = admit(&log, &key(1), id(caller), request, NOW).unwrap_err();
        refusal.code().as_str().to_owned()
    };
    assert_eq!(code(3, &request), "unauthorized");
    let elsewhere = JoinRequest {
        community: id(8).into(),
        ..request.clone()
    };
    assert_eq!(code(2, &elsewhere), "wrong_community");
    let mut forged = request.clone();
    forged.name = "y".into();
    assert_eq!(code(2, &forged), "invalid_signature");
    let other = Invite::generate(log.community(), NOW / 1000, vec![]).unwrap();
    let unknown = other.request(id(2), "x").unwrap();
    assert_eq!(code(2, &unknown), "unknown_invite");
    assert_eq!(log.state().level(&id(2)), None);
    let admitted = admit(&log, &key(1), id(2), &request, NOW).unwrap();
    assert_eq!(admitted, Level::Trusted);
}

#[test]
fn an_expired_invite_or_an_unauthorized_admitter_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (log, _, request) = asked(dir.path());
    let late = admit(&log, &key(1), id(2), &request, NOW + DAY + 1).unwrap_err();
    assert_eq!(late.code().as_str(), "bad_invite");
    // A stranger that signs the admission.
    let stranger = admit(&log, &key(5), id(2), &request, NOW).unwrap_err();
    assert_eq!(stranger.code().as_str(), "unauthorized");
    assert!(!JoinFailure::Refused(stranger).is_final());
}

#[test]
fn a_revoked_node_stays_out_whatever_code_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let (log, invite, request) = asked(dir.path());
    admit(&log, &key(1), id(2), &request, NOW).unwrap();
    let revoked = Body::Revoked {
        node: id(2),
        last_seq: 0,
    };
    log.append(&key(1), revoked, NOW).unwrap();
    let refusal = admit(&log, &key(1), id(2), &request, NOW).unwrap_err();
    assert_eq!(refusal.code().as_str(), "revoked");
    // The withdrawn invite does not work with another key either.
    let request = invite.request(id(3), "x").unwrap();
    let refusal = admit(&log, &key(1), id(3), &request, NOW).unwrap_err();
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
    let other = found(&dir.path().join("false"), 66, now_ms());
    let client = client(Arc::new(Impostor(other)), 2, 6);
    let log = EventLog::prepare(&dir.path().join("joiner"), invite.community()).unwrap();
    let request = invite.request(id(2), "x").unwrap();
    let joined = join_through(&client, id(6), &request, &log, |_| {}).await;
    let failure = joined.unwrap_err();
    assert!(matches!(failure, JoinFailure::NotAdmitted), "{failure}");
    assert!(!log.state().is_created());
}
