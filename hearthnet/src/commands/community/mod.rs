//! `hearthnet community`: found or join a community, and manage its members.
//!
//! Every change is one signed event in this node's log. A daemon on this home writes it and sends
//! it to other members. Without a daemon the command writes it, and members that are offline
//! receive it later.

pub(super) mod change;
mod invites;
pub(super) mod join;
mod leave;
mod renew;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use hearthnet_bus::invite::{Invite, is_name};
use hearthnet_bus::log::{Body, EventLog, Level, Policy};
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_text::sanitize_name;
use serde_json::json;
use zeroize::Zeroizing;

use self::change::{change, in_community, keeps_an_anchor};
use crate::cli::args::{
    CommunityCommand, CreateArgs, InviteArgs, LevelArgs, PolicyArgs, RevokeArgs,
};
use crate::cli::{
    Failure, Kind, confirm, failure, note, print, print_json, print_result, secret, span, when,
};
use crate::config::{Config, Context};
use crate::home::members::{self, find};
use crate::home::rights::{authority, is_anchor, signs_as_root};
use crate::home::{
    Home, Membership, OnDisk, ROOT_KEY, discard_unborn, display_name, first_free, key_status,
    now_ms, root_key,
};
use crate::node::{Change, NewInvite, log_writer, open_home};

pub(crate) fn run(command: CommunityCommand, cx: &Context) -> Result<(), Failure> {
    let home = || open_home(cx);
    let config = &cx.config;
    match command {
        CommunityCommand::Create(args) => create(&args, cx),
        CommunityCommand::Invite(args) => invite(&args, &home()?, config),
        CommunityCommand::Join(args) => join::run(&args, cx),
        CommunityCommand::Members { json } => list_members(&home()?, json),
        CommunityCommand::Promote(args) => level(&args, &home()?, config, true),
        CommunityCommand::Demote(args) => level(&args, &home()?, config, false),
        CommunityCommand::Revoke(args) => revoke(&args, &home()?, config),
        CommunityCommand::Invites { all, json } => invites::list(&home()?, all, json),
        CommunityCommand::Withdraw { invite, json } => {
            invites::withdraw(&invite, &home()?, config, json)
        }
        CommunityCommand::Renew(args) => renew::run(&args, cx),
        CommunityCommand::Leave(args) => leave::run(&args, cx),
        CommunityCommand::Policy(args) => policy(&args, &home()?, config),
        CommunityCommand::Passphrase { remove } => passphrase(&home()?, remove),
    }
}

/// Founds a community named `name` with this node as its anchor, which others see as `called`.
/// `passphrase` is asked for once nothing else can fail.
pub(super) fn found(
    cx: &Context,
    name: &str,
    called: &str,
    research: bool,
    passphrase: impl FnOnce() -> Result<Option<Zeroizing<String>>, Failure>,
) -> Result<Founded, Failure> {
    if !is_name(name) {
        return Err(Failure::new(
            Kind::Config,
            "a community's name has 1 to 64 bytes and no invisible characters",
        )
        .hint("for example: hearthnet community create \"Elm Street\""));
    }
    let dir = cx.global.dir()?;
    match Home::on_disk(&cx.global, &dir)? {
        OnDisk::Here(home) => return Err(in_community(&home.state().name)),
        OnDisk::Lost(noted) => {
            return Err(failure!(
                Community,
                "this node is in {:?}, whose log was lost on this machine",
                noted.name
            )
            .code("in_community")
            .hint("`hearthnet status` restores the log from any other member that runs; `hearthnet community leave` leaves the community"));
        }
        OnDisk::Nothing => {}
    }
    let key = cx.global.node_key()?;
    if !is_name(called) {
        return Err(Failure::new(
            Kind::Config,
            "a node's name has 1 to 64 bytes and no invisible characters",
        )
        .hint("choose another name with --as"));
    }
    let passphrase = passphrase()?;
    discard_unborn(&dir)?;
    let root = new_root_key(
        &dir.join(ROOT_KEY),
        passphrase.as_ref().map(|it| it.as_str()),
    )?;
    let policy = Policy {
        research,
        ..Policy::default()
    };
    let log = EventLog::create(&dir, &root, key.id(), name, policy, now_ms())?;
    let named = Body::Named {
        name: called.to_owned(),
    };
    log.append(&key, named, now_ms())?;
    Membership::note(&dir, &log.state(), &key.id());
    Ok(Founded {
        dir,
        key,
        log,
        sealed: passphrase.is_some(),
    })
}

/// A community that this node has just founded.
pub(super) struct Founded {
    dir: PathBuf,
    key: NodeKey,
    log: EventLog,
    /// Whether the root key has a passphrase.
    sealed: bool,
}

fn create(args: &CreateArgs, cx: &Context) -> Result<(), Failure> {
    let name = args.name.trim();
    let called = display_name(args.as_name.as_deref(), &cx.config);
    let research = args.research.unwrap_or(cx.config.policy.research.enable);
    let passphrase = || args.passphrase.then(new_passphrase).transpose();
    let Founded {
        dir,
        key,
        log,
        sealed,
    } = found(cx, name, &called, research, passphrase)?;
    if args.json {
        return print_json(&json!({
            "community": log.community().to_string(),
            "name": name,
            "node_name": called,
            "founder": key.id().to_string(),
            "research": research,
            "root_key": dir.join(ROOT_KEY).to_string_lossy(),
        }));
    }
    print(format!(
        "community      {}\n\
             id             {}\n\
             this node      {} ({}, anchor)\n\
             research       {}\n\
             root key       {}\n",
        sanitize_name(name),
        log.community(),
        sanitize_name(&called),
        key.id().short(),
        on_off(research),
        dir.join(ROOT_KEY).display(),
    ))?;
    note(match sealed {
        true => {
            "keep a copy of the root key in a safe place, and its passphrase in another one: together they alone make and remove anchors"
        }
        false => {
            "keep a copy of the root key in a safe place: it alone makes and removes anchors (`hearthnet community passphrase` seals it)"
        }
    });
    note("next: `hearthnet community invite --level trusted` for a machine that will serve layers");
    Ok(())
}

/// Always creates a new root key. The key is the community's id: if two communities had the same
/// key, the log would have two conflicting first events.
fn new_root_key(path: &Path, passphrase: Option<&str>) -> Result<NodeKey, Failure> {
    let fail = |e: &dyn std::fmt::Display| {
        Failure::new(Kind::Host, e.to_string()).hint("choose another directory with --data-dir")
    };
    if path.exists() {
        let aside = first_free(|n| path.with_extension(format!("key.old-{n}")))?;
        std::fs::rename(path, &aside).map_err(|e| fail(&e))?;
        note(format!(
            "the root key of an earlier community was moved to {}; every community has its own",
            aside.display()
        ));
    }
    let key = NodeKey::generate().map_err(|e| fail(&e))?;
    root_key::write(path, &key, passphrase)?;
    Ok(key)
}

/// Seals the root key with a new passphrase, or removes the passphrase.
fn passphrase(home: &Home, remove: bool) -> Result<(), Failure> {
    let root = home.root_key()?;
    let was_sealed = root.is_some_and(|root| root.is_sealed());
    let key = home.open_root_key()?;
    let new = (!remove).then(new_passphrase).transpose()?;
    let path = home.dir.join(ROOT_KEY);
    root_key::write(&path, &key, new.as_ref().map(|it| it.as_str()))?;
    note(match (was_sealed, remove) {
        (_, true) => "the root key has no passphrase now: anyone who can read its file can use it",
        (true, false) => "the root key is sealed with the new passphrase",
        (false, false) => {
            "the root key is sealed. Earlier copies and backups are not sealed: replace them"
        }
    });
    print(format!("{}\n", path.display()))
}

/// Asks for a passphrase, twice on a terminal, where the input is hidden.
fn new_passphrase() -> Result<Zeroizing<String>, Failure> {
    let passphrase = secret::ask("new passphrase of the root key", false)?;
    root_key::check(&passphrase)?;
    if std::io::stdin().is_terminal()
        && secret::ask("repeat the new passphrase", false)? != passphrase
    {
        return Err(Failure::new(Kind::Config, "the two passphrases differ")
            .hint("nothing was changed; try again"));
    }
    Ok(passphrase)
}

pub(super) fn invite(args: &InviteArgs, home: &Home, config: &Config) -> Result<(), Failure> {
    let wanted = args.level;
    let (code, live) = change(home, config, args.json, || make_invite(args, home, config))?;
    let (id, expires_ms) = (code.key().id(), code.expires().saturating_mul(1000));
    let (state, now) = (home.state(), now_ms());
    if args.json {
        return print_json(&json!({
            "code": code.to_string(),
            "id": id.short(),
            "level": wanted,
            "uses": args.uses,
            "expires_ms": expires_ms,
            "hints": code.hints(),
        }));
    }
    print(format!("{code}\n"))?;
    note(format!(
        "anyone with this code becomes {wanted} in {:?}: {}, until {} ({}).\nThey run `hearthnet up` and paste it.\n`hearthnet community invites` lists it as {}; `hearthnet community withdraw` takes it back.",
        state.name,
        match args.uses {
            1 => "one node".to_owned(),
            n => format!("{n} nodes"),
        },
        when(expires_ms),
        span(expires_ms.saturating_sub(now)),
        id.short(),
    ));
    if !live && !args.node_starts {
        note(
            "No node of the community runs here now. Start one before they join: \
             `hearthnet serve`, or `hearthnet shard serve`.",
        );
    }
    Ok(())
}

/// Returns the code, and whether this node runs, so that nodes can join through it.
fn make_invite(args: &InviteArgs, home: &Home, config: &Config) -> Result<(Invite, bool), Failure> {
    let state = home.state();
    let wanted = args.level;
    let who = match wanted {
        Level::Member => format!("nodes that are {} or more", state.policy.who_may_invite),
        Level::Trusted => "anchors".to_owned(),
        Level::Anchor => "the holder of the root key".to_owned(),
    };
    let may = state.may_invite(&home.key.id(), wanted);
    let rule = format!("only {who} may invite a node as {wanted}");
    let by_root = signs_as_root(home, may, &rule)?;
    let new = NewInvite::generate(home, config, wanted, args.uses, args.expires)?;
    log_writer::write(home, by_root, new.change)?;
    Ok((new.code, new.live))
}

fn list_members(home: &Home, as_json: bool) -> Result<(), Failure> {
    let state = home.state();
    let own = home.key.id();
    let now = now_ms();
    let online = |node: &NodeId| state.nodes(now).any(|seen| seen.node == *node);
    let back = key_status::dated_back(home);
    if as_json {
        return print_json(&json!({
            "community": home.log.community().to_string(),
            "name": state.name,
            "members": members::json(&state, &own, &back),
        }));
    }
    print(members::table(&state, "name", |node| {
        match (state.is_frozen(node), members::judged(&state, node)) {
            (true, _) => "frozen: signed two histories",
            (_, Some(judged)) => judged,
            _ if *node == own => "this node",
            _ if online(node) => "online",
            _ => "",
        }
    }))?;
    if let Some(line) = key_status::dated_back_line(&state, &back) {
        note(line);
    }
    Ok(())
}

fn level(args: &LevelArgs, home: &Home, config: &Config, up: bool) -> Result<(), Failure> {
    let (node, now, next) = change(home, config, args.json, || set_level(args, home, up))?;
    let who = home.state().label(&node, now_ms());
    let done = json!({ "node": node.to_string(), "level": next });
    print_result(args.json, &done, || {
        format!("{who} is {next} now, and was {now}\n")
    })
}

fn set_level(args: &LevelArgs, home: &Home, up: bool) -> Result<(NodeId, Level, Level), Failure> {
    let state = home.state();
    let node = find(&args.node, &home.state())?;
    let Some(now) = state.member(&node).map(|member| member.level) else {
        return Err(not_a_member(&args.node));
    };
    let next = match (args.level, now, up) {
        (Some(level), ..) => level,
        (None, Level::Member, true) | (None, Level::Anchor, false) => Level::Trusted,
        (None, Level::Trusted, true) => Level::Anchor,
        (None, Level::Trusted, false) => Level::Member,
        (None, Level::Anchor, true) => {
            return Err(no_step(&args.node, "an anchor, the highest level there is"));
        }
        (None, Level::Member, false) => {
            return Err(no_step(&args.node, "a member, the lowest level there is")
                .hint("`hearthnet community revoke` removes a node for good"));
        }
    };
    if next == now || (next > now) != up {
        let other = if up { "demote" } else { "promote" };
        let failure = no_step(&args.node, &format!("{now} already"));
        return Err(match next == now {
            true => failure,
            false => failure.hint(format!("use `hearthnet community {other}`")),
        });
    }
    if next < Level::Anchor {
        keeps_an_anchor(&state, &node, &format!("made {next}"))?;
    }
    let by_root = authority(home, now.max(next), "change the level of")?;
    log_writer::write(home, by_root, Change::Level { node, level: next })?;
    Ok((node, now, next))
}

fn revoke(args: &RevokeArgs, home: &Home, config: &Config) -> Result<(), Failure> {
    let node = find(&args.node, &home.state())?;
    let state = home.state();
    // Check before asking for confirmation.
    keeps_an_anchor(&state, &node, "revoked")?;
    // The log no longer shows the name after the revocation.
    let (who, name) = (state.label(&node, now_ms()), &state.name);
    let question = match node == home.key.id() {
        true => format!("Revoke this node, {who}, in {name:?} for good?"),
        false => format!("Revoke {who} in {name:?} for good? Its key can never rejoin."),
    };
    confirm(args.yes, &question)?;
    change(home, config, args.json, || {
        revoke_node(&args.node, node, home)
    })?;
    let done = json!({ "node": node.to_string(), "revoked": true });
    print_result(args.json, &done, || {
        format!("{who} was revoked; its sessions end as soon as their hosts receive the event\n")
    })
}

fn revoke_node(text: &str, node: NodeId, home: &Home) -> Result<(), Failure> {
    let state = home.state();
    keeps_an_anchor(&state, &node, "revoked")?;
    let now = match state.member(&node) {
        Some(member) => member.level,
        // A node that left may still hold its invite code, so it can be revoked.
        None if state.left().any(|gone| *gone == node) => Level::Member,
        None => return Err(not_a_member(text)),
    };
    let by_root = authority(home, now, "revoke")?;
    log_writer::write(home, by_root, Change::Revoke { node })
}

fn policy(args: &PolicyArgs, home: &Home, config: &Config) -> Result<(), Failure> {
    let asks = args.research.is_some() || args.who_may_invite.is_some();
    let new = match asks {
        true => change(home, config, args.json, || set_policy(args, home))?,
        false => home.state().policy,
    };
    let (research, who) = (new.research, new.who_may_invite);
    let policy = json!({ "research": research, "who_may_invite": who });
    print_result(args.json, &policy, || {
        let research = on_off(research);
        format!("research         {research}\nwho may invite   {who}\n")
    })
}

fn set_policy(args: &PolicyArgs, home: &Home) -> Result<Policy, Failure> {
    let old = home.state().policy;
    let new = Policy {
        research: args.research.unwrap_or(old.research),
        who_may_invite: args.who_may_invite.unwrap_or(old.who_may_invite),
    };
    if new != old {
        let rule = "only anchors may change the policy";
        let by_root = signs_as_root(home, is_anchor(home), rule)?;
        log_writer::write(home, by_root, Change::Policy(new))?;
    }
    Ok(new)
}

fn not_a_member(text: &str) -> Failure {
    failure!(Community, "{text:?} is no longer a member")
        .code("unknown_node")
        .hint("`hearthnet community members` lists the members")
}

fn no_step(text: &str, what: &str) -> Failure {
    failure!(Community, "{text:?} is {what}").code("bad_request")
}

fn on_off(value: bool) -> &'static str {
    if value { "on" } else { "off" }
}
