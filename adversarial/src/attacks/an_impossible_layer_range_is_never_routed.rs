//! A descriptor names the layers that a host serves. A range that is inverted, exceeds the model or
//! overflows could make a router loop, reserve memory, or send rows to a host that cannot compute
//! them. The log refuses such a descriptor with `bad_descriptor`, and so does a caller that gets
//! one in answer to DESCRIBE. A range that exceeds the model but fits the claimed depth is valid by
//! itself, and no router uses it. Other hosts are still found.

use std::sync::Arc;

use ciborium::Value;
use hearthnet_orchestrator::chat::Conversation;
use hearthnet_orchestrator::hosts::HostPool;
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_transport::Message;

use super::prelude::*;
use crate::puppet::Puppet;

/// Event kind of a descriptor.
const ADVERTISED: &str = "experimental.shard.advertised";
/// Lifetime of the descriptors.
const LIFE_MS: u64 = 600_000;

/// Layer range and model depth of a descriptor.
struct Claim {
    what: &'static str,
    range: Vec<Value>,
    total: u64,
}

/// Impossible claims for a model with this many layers.
fn impossible(layers: u64) -> Vec<Claim> {
    let max = u64::from(u32::MAX);
    let claim = |what, range: &[u64], total| Claim {
        what,
        range: range.iter().map(|&n| n.into()).collect(),
        total,
    };
    let mut all = vec![
        claim("an inverted range", &[1, 0], layers),
        claim("a range that ends beyond the model", &[0, layers], layers),
        claim("a range beyond the model", &[layers, layers], layers),
        claim("a range up to the largest number", &[0, max], layers),
        claim(
            "a range whose length overflows, with a matching depth",
            &[0, max - 1],
            max,
        ),
        claim("a range at the largest number", &[max, max], layers),
        claim("a number of 33 bits", &[0, max + 1], layers),
        claim("a number of 64 bits", &[u64::MAX, u64::MAX], layers),
        claim("a depth of 64 bits", &[0, layers - 1], u64::MAX),
        claim("a model without layers", &[0, 0], 0),
        claim("no numbers", &[], layers),
        claim("one number", &[0], layers),
        claim("three numbers", &[0, 1, 1], layers),
    ];
    for (what, first) in [
        ("a negative number", Value::from(-1)),
        ("a fraction", Value::from(0.5)),
        ("text", Value::from("0")),
    ] {
        let range = vec![first, (layers - 1).into()];
        let total = layers;
        all.push(Claim { what, range, total });
    }
    all
}

impl Claim {
    /// Encoded descriptor, valid in every other field.
    fn of(&self, base: &Descriptor) -> Result<(String, Vec<u8>)> {
        let number = |value: Option<&Value>| {
            let number = value.and_then(Value::as_integer).map(i128::from);
            number.unwrap_or_default()
        };
        let (lo, hi) = (number(self.range.first()), number(self.range.get(1)));
        let shard = format!("{}:{lo}-{hi}", base.model_id);
        let mut value = Value::serialized(base)?;
        for (key, field) in value.as_map_mut().into_iter().flatten() {
            match key.as_text() {
                Some("shard_id") => *field = shard.as_str().into(),
                Some("layer_range") => *field = Value::Array(self.range.clone()),
                Some("total_layers") => *field = self.total.into(),
                _ => {}
            }
        }
        let mut bytes = Vec::new();
        ciborium::into_writer(&value, &mut bytes)?;
        Ok((shard, bytes))
    }
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, _] = bench.members();
    let puppet = Puppet::start(&attacker, Box::new(|_| Vec::new())).await?;
    let base = Descriptor {
        host: attacker.id(),
        endpoint: puppet.addr.endpoint.clone(),
        ..bench.victim.descriptor.clone()
    };
    let layers = u64::from(base.total_layers);
    let events = in_the_log(bench, found, &base, impossible(layers)).await?;

    // A caller receives all of them, and the descriptor of the victim.
    let home = bench.community()?.home("serves")?;
    let host = bench.another(&home).await?;
    let log = bench.community()?.copy("asks")?;
    log.receive(&events, attacker.id(), now_ms())?;
    let offered = log.state().shards(now_ms()).count();
    found.same("shards that the caller's log offers", 1, offered);
    let advertised = Body::ShardAdvertised(Box::new(host.descriptor.clone()));
    log.append(&NodeKey::load(&home.join(KEY_FILE))?, advertised, now_ms())?;
    let [_, caller] = bench.members();
    let (model, runtime) = (bench.which.description(), Handle::current());
    let asked = tokio::task::spawn_blocking(move || -> Result<_> {
        let fleet = Fleet::of(&model, MODEL_ID, runtime, None)?;
        ask(&fleet, fleet.community(caller, &log)?)
    });
    let endpoints = asked.await??;
    let expected = [host.descriptor.endpoint.clone()];
    let what = "the hosts that answer a caller which knows all descriptors";
    found.same(what, expected.join(" "), endpoints.join(" "));
    found.same("streams opened at the attacker", 0, puppet.streams());
    drop(puppet);

    as_answers(found).await?;
    host.kill().await?;
    bench.still_works(found).await
}

/// Pushes each impossible descriptor and a valid one into the log. Returns all pushed events.
async fn in_the_log(
    bench: &mut Bench,
    found: &mut Findings,
    base: &Descriptor,
    claims: Vec<Claim>,
) -> Result<Vec<Vec<u8>>> {
    let [attacker, _] = bench.members();
    let (mut gossip, now) = (bench.gossip(&attacker).await?, now_ms());
    let mut events = Vec::new();
    for (seq, claim) in (now..).zip(&claims) {
        let (shard, body) = claim.of(base)?;
        let author = &bench.community()?.attacker;
        let slot = format!("shard:{shard}");
        let event = author
            .say(ADVERTISED, &slot, seq, LIFE_MS, body)
            .signed(&attacker);
        let pushed = gossip.push(std::slice::from_ref(&event)).await;
        found.taken(claim.what, (0, 1), Some("bad_descriptor"), &pushed);
        events.push(event);
    }
    let offered = bench.victim.gauges().await?.log;
    let offered = offered.map_or(0, |log| log.shards.len());
    found.same("shards that the host's log offers", 0, offered);
    // Claims a deeper model. Only a node that has the model can detect it.
    let total = base.total_layers + 60;
    let deeper = Descriptor {
        shard_id: Descriptor::shard_id(&base.model_id, 0, total - 1),
        layer_range: (0, total - 1),
        total_layers: total,
        ..base.clone()
    };
    let slot = format!("shard:{}", deeper.shard_id);
    let (seq, body) = (now + claims.len() as u64, deeper.to_cbor()?);
    let author = &bench.community()?.attacker;
    let event = author
        .say(ADVERTISED, &slot, seq, LIFE_MS, body)
        .signed(&attacker);
    let pushed = gossip.push(std::slice::from_ref(&event)).await;
    found.taken("a range within the claimed depth", (1, 0), None, &pushed);
    events.push(event);
    Ok(events)
}

/// Asks a question. Returns the endpoints of the hosts that answered.
fn ask(fleet: &Fleet, mut conversation: Conversation) -> Result<Vec<String>> {
    let route = fleet.answer(&mut conversation, PROMPT)?.route.into_iter();
    Ok(route.filter_map(|hop| hop.endpoint).collect())
}

/// Answers DESCRIBE with each impossible claim.
async fn as_answers(found: &mut Findings) -> Result<()> {
    let (runtime, caller) = (Handle::current(), new_key()?);
    let fleet = tokio::task::spawn_blocking(move || Fleet::new(runtime, None)).await??;
    let model = fleet.model();
    let mut puppets = Vec::new();
    for claim in impossible(model.layers.into()) {
        let key = new_key()?;
        let base = fleet.descriptor(key.id());
        let (_, bytes) = claim.of(&base)?;
        let described = move |message| match message {
            Message::Describe => vec![Message::Descriptor(bytes.clone().into())],
            _ => Vec::new(),
        };
        let puppet = Puppet::start(&key, Box::new(described)).await?;
        let link = HostLink::connect(&puppet.addr, &caller, Config::default()).await;
        let refused = link.err().map_or(String::new(), |error| error.to_string());
        let held = refused.contains(": bad_descriptor: ");
        let what = format!("{}, as the answer to DESCRIBE", claim.what);
        found.check(what, "no session, and bad_descriptor", refused, held);
        puppets.push(puppet);
    }
    // Beside an honest host, which must answer.
    let addrs: Vec<HostAddr> = puppets.iter().map(|puppet| puppet.addr.clone()).collect();
    let asked = tokio::task::spawn_blocking(move || -> Result<_> {
        let (runtime, key) = (Handle::current(), new_key()?);
        let own = NodeKey::from_secret(&caller.secret());
        let hosts = fleet.hosts(own, vec![(key, unchanged())])?;
        let honest = hosts.addrs();
        let (choice, config) = (fleet.choice(caller.id()), Config::default());
        let all = addrs.into_iter().chain(honest.clone());
        let pool = HostPool::new(runtime, Arc::new(caller), config, all, choice);
        let backend = fleet.backend(Box::new(pool))?;
        let endpoints = ask(&fleet, Conversation::new(Box::new(backend)))?;
        Ok((honest, endpoints))
    });
    let (honest, endpoints) = asked.await??;
    let honest: Vec<String> = honest.into_iter().map(|addr| addr.endpoint).collect();
    let what = "the hosts that answer a caller which has described all";
    found.same(what, honest.join(" "), endpoints.join(" "));
    let streams: u64 = puppets.iter().map(Puppet::streams).sum();
    found.same("streams opened at the others", 0, streams);
    Ok(())
}
