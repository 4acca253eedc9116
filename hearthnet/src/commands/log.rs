//! `hearthnet log`: shows, checks and exports the community's event log.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Body, Community, LogError, Record, Status};
use serde_json::json;

use crate::cli::args::LogCommand;
use crate::cli::{
    Failure, Kind, block_on, bytes, counted, escaped, failure, first_digits, note, print,
    print_json, print_result, when,
};
use crate::config::Context;
use crate::home::members::hours;
use crate::home::{Home, key_status, now_ms};
use crate::node::{Change, Running, log_writer, open_home};

pub(crate) fn run(command: LogCommand, cx: &Context) -> Result<(), Failure> {
    let home = open_home(cx)?;
    match command {
        LogCommand::Show { last, json } => show(&home, last, json),
        LogCommand::Verify { json } => verify(&home, json),
        LogCommand::Resume { yes } => resume(&home, yes),
        LogCommand::Export { output } => export(&home, output.as_deref()),
    }
}

fn show(home: &Home, last: Option<usize>, as_json: bool) -> Result<(), Failure> {
    let state = home.state();
    let mut kept: VecDeque<Record> = VecDeque::new();
    let print = |record: &Record| -> Result<(), Failure> {
        print_result(as_json, record, || format!("{}\n", line(record, &state)))
    };
    let mut failed = None;
    let read = home.log.records(|record| {
        match last {
            None => failed = print(&record).err(),
            Some(last) => {
                kept.push_back(record);
                if kept.len() > last {
                    kept.pop_front();
                }
            }
        }
        Ok(failed.is_none())
    });
    if let Some(failure) = failed {
        return Err(failure);
    }
    read?;
    kept.iter().try_for_each(print)
}

fn line(record: &Record, state: &Community) -> String {
    let event = &record.event;
    let who = if event.author == state.id.root() {
        "the root".to_owned()
    } else {
        state.label(&event.author, now_ms())
    };
    let note = match record.status {
        Status::Effective | Status::Live => String::new(),
        Status::NoEffect(why) => format!(" (no effect: {why})"),
        Status::Waiting => " (waiting for an earlier event of its author)".to_owned(),
        Status::Fork => " (proof that its author signed two histories)".to_owned(),
    };
    let (when, what) = (when(event.time_ms), what(&event.body, state));
    format!("{when}  {who} {what}{note}")
}

fn what(body: &Body, state: &Community) -> String {
    let of = |node: &NodeId| state.label(node, now_ms());
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
        Body::InviteWithdrawn { invite, .. } => format!("withdrew the invite {}", invite.short()),
        Body::Admitted { request, level } => format!(
            "admitted {:?} ({}) as {level} on the invite {}",
            request.name,
            request.node.short(),
            request.invite.short()
        ),
        Body::LevelChanged { node, level, .. } => format!("made {} {level}", of(node)),
        Body::Revoked { node, last_seq } => {
            format!("revoked {}; its first {last_seq} events count", of(node))
        }
        Body::Left {} => "left the community".to_owned(),
        Body::Named { name } => format!("is called {name:?}"),
        Body::ModelAdopted(model) => {
            format!(
                "adopted the model {:?} (weights {})",
                model.name,
                first_digits(&model.weights)
            )
        }
        Body::ModelDropped { weights } => {
            format!(
                "dropped the model with the weights {}",
                first_digits(weights)
            )
        }
        Body::Disputed(dispute) => {
            let hosts: Vec<String> = dispute.hosts().map(|host| of(&host)).collect();
            format!(
                "disputes the rows of {} (layers {}-{}, weights {})",
                hosts.join(" and "),
                dispute.layers.0,
                dispute.layers.1,
                first_digits(&dispute.weights)
            )
        }
        Body::Judged { dispute, finding } => {
            format!("judged the dispute {}: {finding}", first_digits(dispute))
        }
        Body::NodeGave(gave) => format!(
            "has given {} tokens, layers for {} and {} of weights",
            gave.tokens,
            hours(gave.minutes),
            bytes(gave.weights_bytes)
        ),
        Body::ShardAdvertised(d) => format!("serves {} at {}", d.shard_id, d.endpoint),
        Body::ShardWithdrawn { shard_id } => format!("no longer serves {shard_id}"),
        Body::NodeSeen { endpoints, .. } => format!("listens at {}", endpoints.join(", ")),
        Body::NodeMeasured(measured) => format!(
            "measured {} models and {} links",
            measured.models.len(),
            measured.links.len()
        ),
        Body::GrantRevoked { .. } => "revoked a session token".to_owned(),
        other => format!("wrote an event of the kind {}", other.kind()),
    }
}

fn verify(home: &Home, as_json: bool) -> Result<(), Failure> {
    let found = home.log.verify()?;
    let state = home.state();
    let hash = hex::encode(state.state_hash());
    let running = block_on(async { Ok(Running::ask(&home.dir, &json!({})).await) })?;
    let mut notes = key_status::dated_ahead(home, running.as_ref().map(|it| &it.dated_ahead));
    let events = |(author, n): (&NodeId, &u64)| {
        let events = if *n == 1 { "event" } else { "events" };
        format!("{n} {events} of {}", state.label(author, now_ms()))
    };
    notes.extend(found.void.iter().map(|them| {
        format!(
            "{} are dated before its demotion or revocation, but arrived after it: back-dated, or its machine was offline. They count only as far as its present level allows",
            events(them)
        )
    }));
    notes.extend(found.late.iter().map(|them| {
        format!(
            "{} arrived after later-dated events of other members: its machine was offline, or they are back-dated",
            events(them)
        )
    }));
    if as_json {
        print_json(&json!({
            "durable_events": found.durable,
            "ephemeral_events": found.ephemeral,
            "state_hash": hash,
            "ok": found.problems.is_empty(),
            "problems": found.problems,
            "notes": notes,
        }))?;
    } else {
        print(format!(
            "{} events and {} short-lived ones\nstate  {hash}\n{}",
            found.durable,
            found.ephemeral,
            match found.problems.is_empty() {
                true =>
                    "ok     file, signatures and hash chains are intact, and the members match the events\n",
                false => "",
            }
        ))?;
        for line in found.problems.iter().chain(&notes) {
            note(line);
        }
    }
    match found.problems.len() {
        0 => Ok(()),
        n => Err(failure!(Host, "the log has {}", counted(n, "problem"))
            .code("log_corrupt")
            .hint("other members have the log, too: move this data directory away and join again")),
    }
}

fn resume(home: &Home, yes: bool) -> Result<(), Failure> {
    if !home.log.is_in_doubt() {
        note("nothing to resume: this node already writes to the log");
        return Ok(());
    }
    if !yes {
        return Err(Failure::new(
            Kind::Community,
            "if another member has later events of this node, continuing without them freezes its key for good",
        )
        .code("log_behind")
        .hint("run `hearthnet up` in another home instead; use --yes only if no other member is left"));
    }
    log_writer::write(home, false, Change::Resume {})?;
    note("this node writes to the log again");
    Ok(())
}

/// Writes every event as a line of JSON: its fields, its status, and its signed bytes, which allow
/// a full verification. Returns the number of events.
fn write_lines(home: &Home, out: &mut dyn Write) -> Result<u64, LogError> {
    let mut lines: u64 = 0;
    home.log.records(|record| {
        let json = serde_json::to_string(&record).map_err(|e| LogError::Export(e.into()))?;
        writeln!(out, "{}", escaped(&json)).map_err(LogError::Export)?;
        lines += 1;
        Ok(true)
    })?;
    out.flush().map_err(LogError::Export)?;
    Ok(lines)
}

fn export(home: &Home, output: Option<&Path>) -> Result<(), Failure> {
    let Some(path) = output else {
        write_lines(home, &mut std::io::stdout().lock())?;
        return Ok(());
    };
    let fail = |e: std::io::Error| {
        Failure::file("write", path, e).hint("name a file that does not exist yet")
    };
    let mut file = BufWriter::new(File::create_new(path).map_err(fail)?);
    let count = write_lines(home, &mut file)?;
    file.into_inner()
        .map_err(|e| fail(e.into_error()))?
        .sync_all()
        .map_err(fail)?;
    note(format!("{count} events"));
    print(format!("{}\n", path.display()))
}
