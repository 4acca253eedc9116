//! `hearthnet community invites` and `withdraw`: list invites and their uses, and withdraw them.

use std::collections::BTreeMap;

use hearthnet_bus::NodeId;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::log::{Body, Community, OpenInvite, Status};
use hearthnet_text::sanitize_name;
use serde_json::json;
use zeroize::Zeroizing;

use super::change::change;
use crate::cli::{
    Failure, failure, note, print, print_json, print_result, secret, span, table, when,
};
use crate::config::Config;
use crate::home::rights::{is_anchor, signs_as_root};
use crate::home::{Home, now_ms};
use crate::node::{Change, log_writer};

/// Fewest characters of an id, after `ed25519:`, that identify an invite.
const LEAST: usize = 4;

/// Node that joined with an invite.
struct Joined {
    node: NodeId,
    name: String,
    at_ms: u64,
}

pub(super) fn list(home: &Home, all: bool, as_json: bool) -> Result<(), Failure> {
    let (state, now) = (home.state(), now_ms());
    let mut joined = joined(home)?;
    let mut shown: Vec<(&NodeId, &OpenInvite)> = state
        .invites()
        .filter(|(_, invite)| all || left(&state, invite, now).is_ok())
        .collect();
    shown.sort_by_key(|(_, invite)| invite.expires_ms);
    if as_json {
        let invites = shown.iter().map(|(id, invite)| {
            let joined = joined.remove(*id).unwrap_or_default();
            json!({
                "invite": id.to_string(),
                "short": id.short(),
                "level": invite.level,
                "used": invite.used,
                "uses": invite.uses,
                "expires_ms": invite.expires_ms,
                "withdrawn": invite.withdrawn,
                "open": left(&state, invite, now).is_ok(),
                "by": by(&state, invite),
                "used_by": joined.iter().map(|it| json!({
                    "node": it.node.to_string(),
                    "name": it.name,
                    "at_ms": it.at_ms,
                    "member": state.member(&it.node).is_some(),
                })).collect::<Vec<_>>(),
            })
        });
        return print_json(&json!({ "invites": invites.collect::<Vec<_>>() }));
    }
    if shown.is_empty() {
        note(match all {
            true => "no invite was ever made",
            false => "no invite is open; --all also shows former invites",
        });
        return Ok(());
    }
    let rows = shown.iter().map(|(id, invite)| {
        let used_by: Vec<String> = joined
            .remove(*id)
            .unwrap_or_default()
            .iter()
            .map(|it| match state.member(&it.node) {
                Some(_) => state.shown_name(&it.node, now),
                None if state.is_revoked(&it.node) => format!("{} (revoked)", it.name),
                None => format!("{} ({}, left)", it.name, it.node.short()),
            })
            .collect();
        [
            id.short(),
            invite.level.to_string(),
            format!("{} of {}", invite.used, invite.uses),
            match left(&state, invite, now) {
                Ok(ms) => format!("for {}", span(ms)),
                Err(why) => why,
            },
            by(&state, invite),
            used_by.join(", "),
        ]
    });
    print(table("invite|level|used|open|made by|used by", rows))
}

/// Remaining validity of an invite in ms, or the reason why it is void.
fn left(state: &Community, invite: &OpenInvite, now: u64) -> Result<u64, String> {
    if invite.withdrawn {
        return Err("withdrawn".to_owned());
    }
    if invite.used >= invite.uses {
        return Err("used up".to_owned());
    }
    if invite.expires_ms <= now {
        return Err(format!("expired on {}", when(invite.expires_ms)));
    }
    let root = invite.author == state.id.root();
    if !root && !state.may_invite(&invite.author, invite.level) {
        return Err("void: its maker may no longer invite".to_owned());
    }
    Ok(invite.expires_ms.saturating_sub(now))
}

fn by(state: &Community, invite: &OpenInvite) -> String {
    match invite.author == state.id.root() {
        true => "the root key".to_owned(),
        false => state.label(&invite.author, now_ms()),
    }
}

/// Nodes that joined with each invite, including former members.
fn joined(home: &Home) -> Result<BTreeMap<NodeId, Vec<Joined>>, Failure> {
    let mut all: BTreeMap<NodeId, Vec<Joined>> = BTreeMap::new();
    home.log.records(|record| {
        if let (Body::Admitted { request, .. }, Status::Effective) =
            (&record.event.body, record.status)
        {
            all.entry(request.invite).or_default().push(Joined {
                node: request.node,
                name: sanitize_name(&request.name).into_owned(),
                at_ms: record.event.time_ms,
            });
        }
        Ok(true)
    })?;
    Ok(all)
}

pub(super) fn withdraw(
    text: &str,
    home: &Home,
    config: &Config,
    as_json: bool,
) -> Result<(), Failure> {
    let text = match text {
        "-" => secret::ask("invite", true)?,
        text => Zeroizing::new(text.to_owned()),
    };
    let invite = change(home, config, as_json, || take_back(&text, home))?;
    let done = json!({ "invite": invite.to_string(), "withdrawn": true });
    print_result(as_json, &done, || {
        format!(
            "{} was withdrawn: it no longer admits anyone\n",
            invite.short()
        )
    })
}

fn take_back(text: &str, home: &Home) -> Result<NodeId, Failure> {
    let state = home.state();
    let id = find(text, &state)?;
    let author = state.invite(&id).map(|invite| invite.author);
    let may = author == Some(home.key.id()) || is_anchor(home);
    let rule = "only the maker of an invite, or an anchor, may withdraw it";
    let by_root = signs_as_root(home, may, rule)?;
    log_writer::write(home, by_root, Change::Withdraw { invite: id })?;
    Ok(id)
}

/// Finds an invite by its code, its id, or a unique prefix of the id.
fn find(text: &str, state: &Community) -> Result<NodeId, Failure> {
    let text = text.trim();
    let unknown = || {
        failure!(Community, "there is no invite {text:?}")
            .code("bad_invite")
            .hint("`hearthnet community invites --all` lists every one")
    };
    if let Ok(code) = text.parse::<Invite>() {
        let id = code.key().id();
        return state.invite(&id).map(|_| id).ok_or_else(unknown);
    }
    let begin = text.strip_prefix("ed25519:").unwrap_or(text);
    if begin.len() < LEAST {
        return Err(unknown());
    }
    let begin = format!("ed25519:{begin}");
    let ids = state.invites().map(|(id, _)| *id);
    let fits = ids.filter(|id| id.to_string().starts_with(&begin));
    let fits: Vec<NodeId> = fits.collect();
    match fits.as_slice() {
        [id] => Ok(*id),
        [] => Err(unknown()),
        several => {
            let ids: Vec<String> = several.iter().map(ToString::to_string).collect();
            let ids = ids.join(" and ");
            Err(failure!(Community, "{text:?} can be any of {ids}")
                .code("bad_invite")
                .hint("write more of the id"))
        }
    }
}
