//! `hearthnet community renew`: a new key, signed by the root key, for a home whose key is no
//! longer valid. The only way back for the last anchor, since no other member can invite it.
//!
//! The root key invites and admits the new key and revokes the old one, all with ordinary events.

use std::path::PathBuf;
use std::sync::Arc;

use hearthnet_bus::NodeKey;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, Level};
use serde_json::json;

use super::change::bring_as_root;
use crate::cli::args::RenewArgs;
use crate::cli::{Failure, block_on, confirm, note, print, print_json};
use crate::config::{Config, Context};
use crate::home::{Home, KeyStatus, Lock, Membership, NODE_KEY, display_name, first_free, now_ms};
use crate::models::adopted::{name_in_parts, node_in_parts, rename_in_parts};
use crate::node::{open_home, with_synced_node};

/// Validity of the invite in ms. It is used at once.
const INVITE_MS: u64 = 60_000;

pub(super) fn run(args: &RenewArgs, cx: &Context) -> Result<(), Failure> {
    let mut home = open_home(cx)?;
    home.open_root_key()?;
    // Sync first: other members know whether the key is still valid.
    block_on(with_synced_node(&home, &cx.config, async |_| Ok(())))?;
    let state = home.state();
    let counts = KeyStatus::of(&home) == KeyStatus::Good && state.level(&home.key.id()).is_some();
    let aside = match counts {
        true => None,
        false => {
            let question = format!(
                "Put the key of this home aside, and make it a member of {:?} with a new one?",
                state.name
            );
            confirm(args.yes, &question)?;
            Some(new_key(&mut home, &cx.config)?)
        }
    };
    let told = bring_as_root(&home, &cx.config)?;
    report(args, &home, aside, told)
}

/// Makes a new key and admits it. Returns the path of the old one.
fn new_key(home: &mut Home, config: &Config) -> Result<PathBuf, Failure> {
    // Held meanwhile, so that no node starts with the old key.
    let _lock = Lock::take(&home.dir)?;
    let root = home.open_root_key()?;
    let (state, old, now) = (home.state(), home.key.id(), now_ms());
    let level = state
        .member(&old)
        .map_or(Level::Anchor, |member| member.level);
    let name = match state.name_of(&old, now) {
        name if name.is_empty() => display_name(None, config),
        name => name.into_owned(),
    };
    let path = home.dir.join(NODE_KEY);
    let aside = first_free(|n| path.with_extension(format!("key.old-{n}")))?;
    let fail = |e: &dyn std::fmt::Display| Failure::file("put aside", &path, e);
    std::fs::rename(&path, &aside).map_err(|e| fail(&e))?;
    let key = NodeKey::generate().map_err(|e| fail(&e))?;
    key.write_new(&path).map_err(|e| fail(&e))?;
    let renamed = node_in_parts(home.log.community(), key.id());
    rename_in_parts(&name_in_parts(home), &renamed);

    let expires_ms = now.saturating_add(INVITE_MS) / 1000 * 1000;
    let invite = Invite::generate(home.log.community(), expires_ms / 1000, Vec::new());
    let invite = invite.map_err(Failure::internal)?;
    let request = invite.request(key.id(), &name).map_err(Failure::internal)?;
    let invited = Body::Invited {
        invite: invite.key().id(),
        level,
        uses: 1,
        expires_ms,
    };
    home.append(&root, invited)?;
    home.append(&root, Body::Admitted { request, level })?;
    if state.member(&old).is_some() {
        let last_seq = home.last_seq(&old);
        let revoked = Body::Revoked {
            node: old,
            last_seq,
        };
        home.append(&root, revoked)?;
    }
    Membership::note_refusal(&home.dir, None);
    (home.key, home.refused) = (Arc::new(key), Arc::default());
    Membership::note(&home.dir, &home.state(), &home.key.id());
    Ok(aside)
}

fn report(
    args: &RenewArgs,
    home: &Home,
    aside: Option<PathBuf>,
    told: usize,
) -> Result<(), Failure> {
    let (state, id) = (home.state(), home.key.id());
    if args.json {
        return print_json(&json!({
            "node": id.to_string(),
            "level": state.level(&id),
            "old_key": aside,
            "told": told,
        }));
    }
    print(match &aside {
        Some(aside) => format!(
            "this node is {} now, {}\nits old key is in {}\n",
            id.short(),
            state.level(&id).map_or("no member", Level::into),
            aside.display(),
        ),
        None => "the key of this node is valid\n".to_owned(),
    })?;
    note(match told {
        0 => "no other member could be told yet: repeat `hearthnet community renew` when one runs"
            .to_owned(),
        1 => "one other node has the events that the root key has signed".to_owned(),
        n => format!("{n} other nodes have the events that the root key has signed"),
    });
    Ok(())
}
