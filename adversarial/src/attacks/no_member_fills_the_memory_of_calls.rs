//! So that nobody uses a call twice, a node remembers its envelope for minutes, and refuses calls when that
//! memory is full. Each member may make ten calls a second: four would fill it in 205 seconds, and more
//! in the time of their first forty calls. So one could let a crowd in, and keep everybody else from the node. Whom
//! a member has let in is counted together with it: in what it may ask, and in what is remembered for it.

use std::time::Instant;

use hearthnet_bus::calls::{Client, Code};
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, Level, Policy};
use hearthnet_bus::{Capability, NodeKey};
use serde_json::json;

use crate::bench::new_key;
use crate::raw::cbor;
use crate::raw::event::{admission, bytes, now_ms};
use crate::{Bench, Findings, HarnessError};

/// What all calls together and one member may do (`specs/capability-bus.md`, section 5).
const REMEMBERED: u64 = 8192;
const SHARE: u64 = REMEMBERED / 4;
const AT_ONCE: u64 = 40;
const PER_SECOND: u64 = 10;
/// Members that it lets in: their first calls are all that is remembered, and some more.
const CROWD: u32 = (REMEMBERED / AT_ONCE) as u32 + 4;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, guest] = bench.members();
    let crowd = let_in(bench, found, &attacker, CROWD).await?;

    let begin = Instant::now();
    let mut taken = 0;
    // By itself it connects anew each time.
    for key in [&attacker, &attacker, &attacker].into_iter().chain(&crowd) {
        let client = bench.target.client(key).await?;
        for _ in 0..AT_ONCE {
            taken += u64::from(is_taken(&client).await?);
        }
    }
    let most = AT_ONCE + PER_SECOND * (begin.elapsed().as_secs() + 1);
    let what = "calls of a member and of those it let in that are taken";
    found.check(what, format!("at most {most}"), taken, taken <= most);
    let what = "of which the node remembers, at most";
    found.check(what, format!("at most {SHARE}"), taken, taken <= SHARE);

    let client = bench.target.client(&guest).await?;
    let mut neighbours = 0;
    for _ in 0..AT_ONCE {
        neighbours += u64::from(is_taken(&client).await?);
    }
    found.same("calls of a neighbour that are taken", AT_ONCE, neighbours);
    bench.goes_on(found).await
}

/// Lets a crowd of `count` in, as a member may that may invite.
pub(super) async fn let_in(
    bench: &mut Bench,
    found: &mut Findings,
    attacker: &NodeKey,
    count: u32,
) -> Result<Vec<NodeKey>, HarnessError> {
    let policy = Policy {
        who_may_invite: Level::Member,
        research: true,
    };
    let community = bench.test_community()?;
    community.append(Body::PolicyChanged(policy));
    let (id, after) = (community.id(), community.lamport()?);
    bench.agrees(found).await?;

    let expires_ms = now_ms() + 3_600_000;
    let invite = Invite::generate(id, expires_ms / 1000, Vec::new());
    let invite = invite.map_err(HarnessError::attacker)?;
    let invited = cbor(&[
        ("key", bytes(invite.key().id().as_bytes())),
        ("uses", count.into()),
        ("level", "member".into()),
        ("until", expires_ms.into()),
    ]);
    let (mut crowd, mut bodies) = (Vec::new(), vec![("member.invited", invited)]);
    for _ in 0..count {
        let key = new_key()?;
        bodies.push(("member.admitted", admission(&invite, &key, "member")?));
        crowd.push(key);
    }
    let mut events = Vec::new();
    for (kind, body) in bodies {
        let author = &mut bench.test_community()?.attacker;
        let mut event = author.draft(kind, body);
        event.lamport = event.lamport.max(after + 1);
        events.push(author.go_on(&event));
    }
    let pushed = bench.gossip(attacker).await?.push(&events).await;
    let all = u64::from(count) + 1;
    found.taken("an invite and a crowd let in", (all, 0), None, &pushed);
    Ok(crowd)
}

/// Whether a call is taken: remembered, and answered.
async fn is_taken(client: &Client) -> Result<bool, HarnessError> {
    let call = client.call(&Capability::bus_describe(), &json!({}));
    let refusal = call.map_err(HarnessError::attacker)?.result().await.err();
    match refusal {
        None => Ok(true),
        Some(refusal) if *refusal.code() == Code::RATE_LIMITED => Ok(false),
        Some(refusal) => Err(HarnessError::attacker(refusal)),
    }
}
