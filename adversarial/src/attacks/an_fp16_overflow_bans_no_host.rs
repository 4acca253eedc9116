//! Control: a text can make an honest model's rows overflow the boundary dtype. Every exact host
//! reports it (`boundary_overflow`) and none is at fault: the chat ends with that code, the hosts
//! keep their standing, and the next chat runs on them. A host that returns infinities instead is
//! quarantined. A host that claims an overflow which the next host does not have has failed.

use std::sync::Arc;

use hearthnet_orchestrator::chat::{ChatRequest, Prompt};
use hearthnet_orchestrator::health::{FailureKind, ShardHealth, Standing};
use hearthnet_shard::StreamFault;
use parking_lot::Mutex;

use super::prelude::*;
use crate::fleet::{Hosts, question};

/// Token whose row overflows.
const LOUD: u32 = 20;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, chats).await
}

/// Model in which [`LOUD`] overflows, with this boundary dtype.
fn fleet(runtime: &Handle, boundary: Option<&'static str>) -> Result<Fleet> {
    let tiny = TinyLlama {
        layers: 4,
        embedding: "f32",
        // With tied embeddings, the token would be the likeliest one of every answer.
        tied: false,
        loud: Some(LOUD),
        boundary,
        ..TinyLlama::default()
    };
    Fleet::of(&tiny, "tiny-tampered", runtime.clone(), None)
}

/// The ordinary question without [`LOUD`], which it contains.
fn quiet() -> ChatRequest {
    let tokens = (3..3 + PROMPT).filter(|token| *token != LOUD);
    ChatRequest {
        prompt: Prompt::Tokens(tokens.collect()),
        ..question(PROMPT, TOKENS)
    }
}

/// Standing and failures of the hosts that have any.
fn blamed(hosts: &Hosts) -> Vec<(Standing, Vec<FailureKind>)> {
    let all = hosts.health();
    let against = |one: &ShardHealth| !one.failures.is_empty() || one.standing != Standing::Good;
    let all = all.iter().filter(|one| against(one));
    all.map(|one| (one.standing, one.failures.keys().copied().collect()))
        .collect()
}

fn chats(runtime: &Handle, found: &mut Findings) -> Result<()> {
    let fleet_of = |tampers: Vec<Tamper>| {
        let fleet = fleet(runtime, None)?;
        let hosts = fleet.new_hosts(tampers)?;
        Ok::<_, HarnessError>((fleet, hosts))
    };
    let (loud, quiet) = (question(PROMPT, TOKENS), quiet());

    let (fleet_16, hosts) = fleet_of(vec![unchanged(), unchanged()])?;
    let (before, _) = fleet_16.ask_for(&hosts, 0, &quiet)?;
    let before = before?.token_ids;
    let (refused, left) = fleet_16.ask_for(&hosts, 0, &loud)?;
    let code = refused.map_or_else(|error| error.code().to_string(), |_| "an answer".to_owned());
    let told = "an overflow: the end of the chat";
    found.same(told, "boundary_overflow", code);
    let both = "boundary_overflow boundary_overflow";
    found.same("an overflow: why the hosts are dropped", both, left);
    let blame = blamed(&hosts);
    let told = "an overflow: failures of the hosts";
    found.same(told, "[]", format!("{blame:?}"));
    let (after, left) = fleet_16.ask_for(&hosts, 0, &quiet)?;
    found.same("the next chat: dropped hosts", "", left);
    let same = after.is_ok_and(|done| done.token_ids == before);
    found.holds("the next chat: the same answer as before", "yes", same);

    let (refused, left) = fleet_16.ask_for(&hosts, 1, &loud)?;
    let code = refused.map_or_else(|error| error.code().to_string(), |_| "an answer".to_owned());
    let what = "an overflow in the caller's own layers: the end of the chat";
    found.same(what, "boundary_overflow", code);
    let claim = "an overflow in the caller's own layers: dropped hosts";
    found.same(claim, "", left);

    let fleet_32 = fleet(runtime, Some("f32"))?;
    let wide = fleet_32.ask(0, vec![unchanged()])?;
    let tokens = wide.done.token_ids.len();
    found.same(
        "the same text in fp32: tokens of the answer",
        TOKENS,
        tokens,
    );

    // The host that is asked first lies; the other one is honest.
    type Lie = fn(hearthnet_testkit::Passing<'_>);
    let lies: [(&str, &str, Lie, &str); 2] = [
        (
            "infinities",
            "tensor_nonfinite",
            |passing| passing.rows.fill(f32::INFINITY),
            "[(Quarantined, [Corruption])]",
        ),
        (
            "an overflow that the next host does not have",
            "boundary_overflow",
            |passing| *passing.fault = Some(StreamFault::BoundaryOverflow { layer: 0 }),
            "[(Failing, [Refused])]",
        ),
    ];
    for (what, code, lie, blame) in lies {
        let first = Arc::new(Mutex::new(None));
        let host = |name: u8| -> Tamper {
            let first = Arc::clone(&first);
            Box::new(move |passing| {
                if *first.lock().get_or_insert(name) == name {
                    lie(passing);
                }
            })
        };
        let (fleet_16, hosts) = fleet_of(vec![host(0), host(1)])?;
        let (done, left) = fleet_16.ask_for(&hosts, 0, &quiet)?;
        found.same(format!("{what}: why the host is dropped"), code, left);
        let same = done.is_ok_and(|done| done.token_ids == before);
        found.holds(format!("{what}: the same answer"), "yes", same);
        let seen = format!("{:?}", blamed(&hosts));
        found.same(format!("{what}: failures of the host"), blame, seen);
    }
    Ok(())
}
