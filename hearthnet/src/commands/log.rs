//! `hearthnet log`: the community's history, for people.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Body, Community, Event, EventHash, Heads, Lane};
use serde_json::{Value, json};

use crate::args::{Global, LogCommand};
use crate::commands::{print_bytes, print_json};
use crate::community::{Home, label, log_failure};
use crate::failure::{Failure, Kind};
use crate::output::{note, when};

/// Events and bytes that are read from the file at a time.
const BATCH: (usize, usize) = (1000, 1 << 20);

pub(crate) fn run(command: LogCommand, global: &Global) -> Result<(), Failure> {
    let home = Home::open(global)?;
    match command {
        LogCommand::Show { last, json } => show(&home, last, json),
        LogCommand::Verify { json } => verify(&home, json),
        LogCommand::Export { output } => export(&home, output.as_deref()),
    }
}

/// Hands out every event that the log holds, as stored: the lasting ones in the order in
/// which they count, then the proofs of forks, then the short-lived ones.
fn for_each(
    home: &Home,
    mut each: impl FnMut(&[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut seen = Heads::empty(home.log.community());
    loop {
        let batch = home
            .log
            .missing(&seen, BATCH.0, BATCH.1)
            .map_err(|e| log_failure(&home.dir, &e))?;
        for raw in &batch.events {
            each(raw)?;
        }
        if !batch.more {
            return Ok(());
        }
        seen = batch.then;
    }
}

fn read(raw: &[u8]) -> Result<Event, Failure> {
    Event::verify(raw).map_err(|e| {
        Failure::new(
            Kind::Host,
            format!("an event in the log does not verify: {e}"),
        )
        .code(e.code())
        .hint("the file was damaged: take the log from another member, by joining again")
    })
}

fn show(home: &Home, last: Option<usize>, as_json: bool) -> Result<(), Failure> {
    let state = home.state();
    let mut kept: VecDeque<Vec<u8>> = VecDeque::new();
    let print = |raw: &[u8]| -> Result<(), Failure> {
        let event = read(raw)?;
        if as_json {
            print_json(&event_json(&event, raw))
        } else {
            print_bytes(format!("{}\n", line(&event, &state)).as_bytes())
        }
    };
    for_each(home, |raw| match last {
        None => print(raw),
        Some(last) => {
            kept.push_back(raw.to_vec());
            if kept.len() > last {
                kept.pop_front();
            }
            Ok(())
        }
    })?;
    kept.iter().try_for_each(|raw| print(raw))
}

fn event_json(event: &Event, raw: &[u8]) -> Value {
    let (lane, slot, expires_ms) = match &event.lane {
        Lane::Durable { .. } => ("durable", None, None),
        Lane::Ephemeral { slot, expires_ms } => ("ephemeral", Some(slot), Some(*expires_ms)),
    };
    json!({
        "id": event.id.to_string(),
        "hash": EventHash::of(raw).map(|h| h.to_string()),
        "kind": event.body.kind(),
        "author": event.author.to_string(),
        "lane": lane,
        "seq": event.seq,
        "lamport": event.lamport,
        "time_ms": event.time_ms,
        "slot": slot,
        "expires_ms": expires_ms,
        "body": event.body,
    })
}

/// One event on one line.
fn line(event: &Event, state: &Community) -> String {
    let who = if event.author == state.id.root() {
        "the root".to_owned()
    } else {
        label(state, &event.author)
    };
    format!(
        "{}  {who} {}",
        when(event.time_ms),
        what(&event.body, state)
    )
}

fn what(body: &Body, state: &Community) -> String {
    let of = |node: &NodeId| label(state, node);
    match body {
        Body::CommunityCreated { name, founder, .. } => {
            format!("founded {name:?} with {} as first anchor", of(founder))
        }
        Body::PolicyChanged(policy) => format!(
            "changed the policy: research {}, {} nodes may invite members",
            if policy.research { "on" } else { "off" },
            policy.who_may_invite
        ),
        Body::Invited {
            invite,
            level,
            uses,
            expires_ms,
        } => format!(
            "invited {uses} as {level} until {} (invite {})",
            when(*expires_ms),
            invite.short()
        ),
        Body::InviteWithdrawn { invite } => format!("withdrew the invite {}", invite.short()),
        Body::Admitted { request, level } => format!(
            "admitted {:?} ({}) as {level} on the invite {}",
            request.name,
            request.node.short(),
            request.invite.short()
        ),
        Body::LevelChanged { node, level } => format!("made {} {level}", of(node)),
        Body::Revoked { node, last_seq } => {
            format!("put {} out; its first {last_seq} events count", of(node))
        }
        Body::ShardAdvertised(d) => format!("serves {} at {}", d.shard_id, d.endpoint),
        Body::ShardWithdrawn { shard_id } => format!("no longer serves {shard_id}"),
        Body::NodeSeen { endpoints, .. } => format!("listens at {}", endpoints.join(", ")),
        Body::GrantRevoked { .. } => "took a session token back".to_owned(),
        other => format!("said something of the kind {}", other.kind()),
    }
}

fn verify(home: &Home, as_json: bool) -> Result<(), Failure> {
    let mut events = 0u64;
    for_each(home, |raw| {
        events += 1;
        read(raw).map(|_| ())
    })?;
    let hash = crate::output::hex(&home.state().state_hash());
    if as_json {
        return print_json(&json!({ "events": events, "state_hash": hash }));
    }
    print_bytes(format!("{events} events, every signature valid\nstate  {hash}\n").as_bytes())
}

fn export(home: &Home, output: Option<&Path>) -> Result<(), Failure> {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    let Some(path) = output else {
        return for_each(home, |raw| {
            print_bytes(format!("{}\n", URL_SAFE_NO_PAD.encode(raw)).as_bytes())
        });
    };
    let fail = |e: std::io::Error| {
        Failure::new(Kind::Host, format!("cannot write {}: {e}", path.display()))
            .hint("name a file that does not exist yet")
    };
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(fail)?;
    let mut file = BufWriter::new(file);
    let mut count = 0u64;
    for_each(home, |raw| {
        count += 1;
        writeln!(file, "{}", URL_SAFE_NO_PAD.encode(raw)).map_err(fail)
    })?;
    file.into_inner()
        .map_err(|e| fail(e.into_error()))?
        .sync_all()
        .map_err(fail)?;
    note(format!("{count} events"));
    print_bytes(format!("{}\n", path.display()).as_bytes())
}
