//! `hearthnet community leave`: tells the other members, and frees the data directory for another
//! community, or for the same one again.

use std::fs;
use std::path::{Path, PathBuf};

use hearthnet_bus::CommunityId;
use hearthnet_bus::log::{Body, Community};
use hearthnet_files::WeightsId;
use hearthnet_files::part::PartError;
use hearthnet_platform::whole_file::{self, Access};
use serde::Serialize;
use serde_json::json;

use super::change::{keeps_an_anchor, sent, told};
use crate::cli::args::LeaveArgs;
use crate::cli::{self, Failure, Kind, block_on, confirm, first_digits, note, print, print_json};
use crate::config::{Config, Context};
use crate::home::key_status::{CLOCK_FILE, KeyStatus};
use crate::home::{
    Home, LOG_FILE, Lock, NODE_KEY, OnDisk, ROOT_KEY, first_free, membership, now_ms,
};
use crate::models::adopted::{
    UsedPart, leave_parts, name_in_parts, node_in_parts, parts_dir, used_parts,
};
use crate::node::{sync_log, transient};

pub(super) fn run(args: &LeaveArgs, cx: &Context) -> Result<(), Failure> {
    let dir = cx.global.dir()?;
    match Home::on_disk(&cx.global, &dir)? {
        OnDisk::Here(home) => leave(args, home, &cx.config),
        // Without the log no event can be signed, and nothing needs to be kept.
        OnDisk::Lost(noted) => {
            // The key is made on first use.
            let key = match dir.join(NODE_KEY).exists() {
                true => cx.global.node_key().ok(),
                false => None,
            };
            let in_parts = key.map(|key| node_in_parts(noted.community, key.id()));
            let parts = in_parts.as_ref().map(|own| what_goes(own, None));
            let question = format!(
                "Leave {:?}? Its log is lost on this machine, so no other member can be told.{}",
                noted.name,
                parts.unwrap_or_default()
            );
            confirm(args.yes, &question)?;
            let _lock = lock(&dir)?;
            let aside = put_aside(&dir, noted.community, true)?;
            let removed = in_parts.map_or_else(Vec::new, |own| end_parts(&own, None));
            done(args.json, &noted.name, (None, true), &aside, &removed)
        }
        OnDisk::Nothing => Err(
            Failure::new(Kind::Community, "this node is not in a community")
                .code("no_community")
                .hint("there is nothing to leave"),
        ),
    }
}

fn leave(args: &LeaveArgs, home: Home, config: &Config) -> Result<(), Failure> {
    // Held to the end, so that no node starts on data that is being moved.
    let _lock = lock(&home.dir)?;
    let name = home.state().name.clone();
    let status = KeyStatus::of(&home);
    let keep_key = status == KeyStatus::Good;
    let member = home.state().level(&home.key.id()).is_some() && keep_key;
    let others = home.state().members().count() > 1;
    if member && others {
        keeps_an_anchor(&home.state(), &home.key.id(), "removed")?;
    }
    let question = match (member, others) {
        (true, true) => format!("Leave {name:?}?"),
        (true, false) => {
            format!("Leave {name:?}? This node is its only member, so the community ends.")
        }
        (false, _) if keep_key => format!("Put the log of {name:?} aside?"),
        (false, _) => format!(
            "Put the key and the log of {name:?} aside? A new key is made when this home joins again."
        ),
    };
    let parts = what_goes(&name_in_parts(&home), Some(&home.state()));
    confirm(args.yes, &(question + &parts))?;
    let told = match member && others {
        true => say_goodbye(args, &home, config)?,
        false => None,
    };
    // The sync may have shown that the key is no longer valid.
    let status = KeyStatus::of(&home);
    let keep_key = keep_key && status == KeyStatus::Good;
    if !keep_key && member && !args.json {
        note(status.sentence(&name));
    }
    let (dir, community) = (home.dir.clone(), home.log.community());
    let (state, in_parts) = (home.state(), name_in_parts(&home));
    // The last handle closes the log.
    drop(home);
    // A key that is no longer valid cannot be used in any community.
    let aside = put_aside(&dir, community, keep_key)?;
    let removed = end_parts(&in_parts, Some(&state));
    done(args.json, &name, (told, keep_key), &aside, &removed)
}

/// Part that no home of this user uses any more.
#[derive(Serialize)]
struct Removed {
    /// Name of the model, or the first digits of its weights id.
    model: String,
    weights: WeightsId,
    /// Freed bytes.
    bytes: u64,
    /// The part was a second name of a file of the user, which stays.
    is_own_file: bool,
}

fn model_name(weights: &WeightsId, state: Option<&Community>) -> String {
    let known = state.and_then(|state| state.model(&weights.0));
    known.map_or_else(|| first_digits(&weights.0), |model| model.name.clone())
}

/// Sentences about the parts of the home with this name in them, before it leaves.
fn what_goes(own: &str, state: Option<&Community>) -> String {
    let Ok(parts) = parts_dir() else {
        return String::new();
    };
    let used = used_parts(&parts, own).into_iter();
    let (stay, go): (Vec<_>, Vec<_>) = used.partition(|part| part.has_other_homes);
    let names = |parts: &[UsedPart]| {
        let names = parts.iter().map(|part| model_name(&part.weights, state));
        names.collect::<Vec<_>>().join(", ")
    };
    let mut text = String::new();
    if !go.is_empty() {
        let freed: u64 = go.iter().map(|part| part.bytes).sum();
        let (names, freed) = (names(&go), cli::bytes(freed));
        text += &format!(" The parts of models here ({names}) are removed; that frees {freed}.");
    }
    if go.iter().any(|part| part.is_shared) {
        text += " Whole files of yours stay.";
    }
    if !stay.is_empty() {
        let names = names(&stay);
        text += &format!(" Another home of this user uses parts, which stay: {names}.");
    }
    text
}

/// Ends the use of all parts by the home with this name in them.
fn end_parts(own: &str, state: Option<&Community>) -> Vec<Removed> {
    let Ok(parts) = parts_dir() else {
        return Vec::new();
    };
    let stays = |why: PartError| note(format!("a part of a model stays: {why}"));
    let removed = leave_parts(&parts, own, |_| false, stays);
    let named = removed.into_iter().map(|part| Removed {
        model: model_name(&part.weights, state),
        weights: part.weights,
        bytes: part.bytes,
        is_own_file: part.is_shared,
    });
    named.collect()
}

fn lock(dir: &Path) -> Result<Lock, Failure> {
    Lock::take(dir).map_err(|failure| match failure.has_code("node_runs") {
        true => Failure::new(
            Kind::Community,
            "this node is running, and has to be stopped before it leaves",
        )
        .code("node_runs")
        .hint("stop `hearthnet serve` or `hearthnet shard serve` here, and try again"),
        false => failure,
    })
}

/// Appends a `left` event, and waits until other members have it. Returns how many have it, or
/// `None` if this node was already revoked.
fn say_goodbye(args: &LeaveArgs, home: &Home, config: &Config) -> Result<Option<usize>, Failure> {
    let told = block_on(async {
        let node = transient::start(home, config).await?;
        sync_log(&node, home).await;
        let before = sent(&node);
        if before.is_empty() && KeyStatus::of(home) != KeyStatus::Good {
            node.shutdown().await;
            return Ok(None);
        }
        if before.is_empty() && !args.anyway {
            node.shutdown().await;
            return Err(Failure::new(
                Kind::Community,
                "no other member was found, so none would learn that this node has left",
            )
            .code("unreachable")
            .hint(
                "try again when one of them runs `hearthnet up`, or leave without telling them with --anyway",
            ));
        }
        let left = match keeps_an_anchor(&home.state(), &home.key.id(), "removed") {
            // While the log is in doubt about this node's own events, the node must not sign any.
            Ok(()) if args.anyway && home.log.is_in_doubt() => Ok(()),
            Ok(()) => home.append(&home.key, Body::Left {}),
            Err(failure) => Err(failure),
        };
        let told = match left {
            Ok(()) => told(&node, &before, true).await,
            Err(_) => 0,
        };
        node.shutdown().await;
        left.map(|()| Some(told))
    })?;
    if told == Some(0) && !args.json {
        note(
            "no member could be told: they count this node as a member until an anchor revokes it",
        );
    }
    Ok(told)
}

/// Moves the community's data into a new folder, and the node key with it unless `keep_key`.
fn put_aside(dir: &Path, community: CommunityId, keep_key: bool) -> Result<PathBuf, Failure> {
    let short = community.short();
    let short = short.rsplit(':').next().unwrap_or(&short);
    let aside = first_free(|n| dir.join(format!("left-{short}-{n}")))?;
    let fail = |what: &Path, e: std::io::Error| {
        let why = format!("cannot move {} to {}: {e}", what.display(), aside.display());
        Failure::new(Kind::Host, why)
            .hint("nothing else was changed; move the community's files away by hand")
    };
    whole_file::make_folder(&aside, Access::Owner).map_err(|e| fail(dir, e))?;
    let damaged = format!("{LOG_FILE}.damaged-");
    let entries = fs::read_dir(dir).map_err(|e| fail(dir, e))?;
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| {
            let of_the_log = [
                LOG_FILE,
                "log.sqlite-wal",
                "log.sqlite-shm",
                "log.community",
                membership::FILE,
                CLOCK_FILE,
            ];
            of_the_log.contains(&name.as_str())
                || name.starts_with(&damaged)
                // The root key of a revoked node can make it an anchor again, so it stays.
                || (keep_key && name == ROOT_KEY)
                || (!keep_key && name == NODE_KEY)
        })
        .collect();
    // Moves the membership file last: until it is gone, an interrupted attempt is recognised.
    names.sort_by_key(|name| (name == membership::FILE, name == NODE_KEY));
    for name in names {
        let from = dir.join(&name);
        fs::rename(&from, aside.join(&name)).map_err(|e| fail(&from, e))?;
    }
    whole_file::sync_folder(&aside).map_err(|e| fail(dir, e))?;
    whole_file::sync_folder(dir).map_err(|e| fail(dir, e))?;
    Ok(aside)
}

/// Reports the result. `told`: number of members that have the event; `None` if there was no member
/// to tell, or if this node's key is no longer valid.
fn done(
    as_json: bool,
    name: &str,
    (told, kept_key): (Option<usize>, bool),
    aside: &Path,
    removed: &[Removed],
) -> Result<(), Failure> {
    if as_json {
        return print_json(&json!({
            "left": name,
            "told": told,
            "kept_key": kept_key,
            "put_aside": aside,
            "removed_parts": removed,
            "at_ms": now_ms(),
        }));
    }
    let heard = match told {
        None => "",
        Some(0) => "; no other member was told",
        Some(1) => "; one other member was told",
        Some(_) => "; the other members were told",
    };
    let what = match kept_key {
        true => "its log is",
        false => "its log and its revoked or frozen key are",
    };
    print(format!(
        "left {name:?}{heard}\n{what} in {}\n",
        aside.display()
    ))?;
    for part in removed {
        let model = &part.model;
        note(match part.is_own_file {
            true => format!(
                "neighbours can no longer fetch {model} from here; your own file of it stays"
            ),
            false => format!(
                "removed this machine's part of {model} ({})",
                cli::bytes(part.bytes)
            ),
        });
    }
    note("next: `hearthnet community join CODE`, or `hearthnet community create NAME`");
    Ok(())
}
