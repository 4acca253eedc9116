//! To prevent replays, a node remembers the envelope of each call for minutes, and refuses calls
//! when that memory is full. Each member may make ten calls per second: four members would fill it
//! in 205 s, a larger group with its first forty calls each. A member could admit such a crowd and
//! block the node for others. Invited members therefore count together with their inviter, in call
//! rate and in remembered calls.

use std::time::Instant;

use hearthnet_bus::calls::Code;
use hearthnet_bus::log::Policy;
use serde_json::json;

use super::prelude::*;

/// Limits of all calls together and of one member (`specs/capability-bus.md`, section 5).
const REMEMBERED: u64 = 8192;
const SHARE: u64 = REMEMBERED / 4;
const AT_ONCE: u64 = 40;
const PER_SECOND: u64 = 10;
/// Members admitted by the attacker: more than their first calls are needed to fill the memory.
const CROWD: u32 = (REMEMBERED / AT_ONCE) as u32 + 4;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let crowd = let_in(bench, found, &attacker, CROWD).await?;

    let begin = Instant::now();
    let mut taken = 0;
    // The attacker itself uses a new connection for each call.
    for key in [&attacker, &attacker, &attacker].into_iter().chain(&crowd) {
        let client = bench.target.client(key).await?;
        for _ in 0..AT_ONCE {
            taken += u64::from(is_taken(&client).await?);
        }
    }
    let most = AT_ONCE + PER_SECOND * (begin.elapsed().as_secs() + 1);
    let what = "accepted calls of a member and of the members it invited";
    found.check(what, format!("at most {most}"), taken, taken <= most);
    let what = "calls of them that the node remembers";
    found.check(what, format!("at most {SHARE}"), taken, taken <= SHARE);

    let client = bench.target.client(&guest).await?;
    let mut neighbours = 0;
    for _ in 0..AT_ONCE {
        neighbours += u64::from(is_taken(&client).await?);
    }
    found.same("accepted calls of a neighbour", AT_ONCE, neighbours);
    bench.still_works(found).await
}

/// Admits `count` members, as a member with the right to invite.
pub(super) async fn let_in(
    bench: &mut Bench,
    found: &mut Findings,
    attacker: &NodeKey,
    count: u32,
) -> Result<Vec<NodeKey>> {
    let policy = Policy {
        who_may_invite: Level::Member,
        research: true,
    };
    let community = bench.community()?;
    community.append(Body::PolicyChanged(policy));
    let (id, after) = (community.id(), community.lamport()?);
    bench.wait_for_agreement(found).await?;

    let expires_ms = now_ms() + 3_600_000;
    let invite = Invite::generate(id, expires_ms / 1000, Vec::new())?;
    let invited = invitation(&invite, count, "member", expires_ms);
    let (mut crowd, mut bodies) = (Vec::new(), vec![("member.invited", invited)]);
    for _ in 0..count {
        let key = new_key()?;
        bodies.push(("member.admitted", admission(&invite, &key, "member")?));
        crowd.push(key);
    }
    let mut events = Vec::new();
    for (kind, body) in bodies {
        let author = &mut bench.community()?.attacker;
        let later = |event: &mut Event| event.lamport = event.lamport.max(after + 1);
        events.push(author.write(kind, body, later));
    }
    let what = "an invite and the admissions of a crowd";
    bench.stores(found, what, attacker, &events).await?;
    Ok(crowd)
}

/// Whether a call is accepted: remembered and answered.
async fn is_taken(client: &Client) -> Result<bool> {
    let call = client.call(&Capability::bus_describe(), &json!({}));
    let refusal = call?.result().await.err();
    match refusal {
        None => Ok(true),
        Some(refusal) if *refusal.code() == Code::RATE_LIMITED => Ok(false),
        Some(refusal) => Err(HarnessError::attacker(refusal)),
    }
}
