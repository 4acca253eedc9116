//! `hearthnet community`: found one, join one, say who may do what.
//!
//! What changes the community is one signed event in this node's log. A running node on
//! this machine sees it at once and passes it on; without one it waits in the log.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use hearthnet_bus::invite::{GenerateError, Invite, MAX_HINTS, MAX_NAME_BYTES};
use hearthnet_bus::log::{Body, EventLog, Level, Policy};
use hearthnet_bus::node::PeerInfo;
use hearthnet_bus::{KeyFileError, NodeId, NodeKey};
use serde_json::json;

use crate::addresses::DEFAULT_PORT;
use crate::args::{
    CommunityCommand, CreateArgs, Global, InviteArgs, LevelArgs, LevelName, PolicyArgs, Switch,
};
use crate::commands::{node_key, print_bytes, print_json, runtime};
use crate::community::{Home, ROOT_KEY, endpoints_of, label, log_failure, name_of, now_ms};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::node::{Lock, settle_in};
use crate::output::{note, span, table, when};

pub(crate) fn run(
    command: CommunityCommand,
    global: &Global,
    config: &Config,
) -> Result<(), Failure> {
    match command {
        CommunityCommand::Create(args) => create(&args, global, config),
        CommunityCommand::Invite(args) => invite(&args, &Home::open(global)?, config),
        CommunityCommand::Join(args) => super::join::run(&args, global, config),
        CommunityCommand::Members { json } => members(&Home::open(global)?, json),
        CommunityCommand::Promote(args) => level(&args, &Home::open(global)?, config, true),
        CommunityCommand::Demote(args) => level(&args, &Home::open(global)?, config, false),
        CommunityCommand::Revoke { node, json } => {
            revoke(&node, &Home::open(global)?, config, json)
        }
        CommunityCommand::Policy(args) => policy(&args, &Home::open(global)?, config),
    }
}

impl From<LevelName> for Level {
    fn from(name: LevelName) -> Self {
        match name {
            LevelName::Member => Self::Member,
            LevelName::Trusted => Self::Trusted,
            LevelName::Anchor => Self::Anchor,
        }
    }
}

fn create(args: &CreateArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    let name = args.name.trim();
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        return Err(Failure::new(
            Kind::Config,
            "a community's name has 1 to 64 bytes and no control characters",
        )
        .hint("for example: hearthnet community create \"Elm Street\""));
    }
    let dir = crate::paths::data_dir(global.data_dir.clone())?;
    if let Some(home) = Home::find(global)? {
        return Err(Failure::new(
            Kind::Community,
            format!("this node is in {:?} already", home.state().name),
        )
        .code("in_community")
        .hint("another community needs another node: --data-dir names another directory"));
    }
    let key = node_key(global)?;
    let root = new_root_key(&dir.join(ROOT_KEY))?;
    let research = match args.research {
        Some(switch) => switch == Switch::On,
        None => config.policy.research.enable,
    };
    let policy = Policy {
        research,
        ..Policy::default()
    };
    let log = EventLog::create(&dir, &root, key.id(), name, policy, now_ms())
        .map_err(|e| log_failure(&dir, &e))?;
    if args.json {
        return print_json(&json!({
            "community": log.community().to_string(),
            "name": name,
            "founder": key.id().to_string(),
            "research": research,
            "root_key": dir.join(ROOT_KEY),
        }));
    }
    print_bytes(
        format!(
            "community      {name}\n\
             id             {}\n\
             this node      {} (anchor)\n\
             research       {}\n\
             root key       {}\n",
            log.community(),
            key.id().short(),
            on_off(research),
            dir.join(ROOT_KEY).display(),
        )
        .as_bytes(),
    )?;
    note("keep a copy of the root key in a safe place: it alone makes and removes anchors");
    note(
        "next: `hearthnet community invite --level trusted` for a machine that is to serve layers",
    );
    Ok(())
}

/// A fresh root key, or the one that an interrupted attempt left.
fn new_root_key(path: &Path) -> Result<NodeKey, Failure> {
    let fail = |e: KeyFileError| {
        Failure::new(Kind::Host, e.to_string()).hint("--data-dir names another directory")
    };
    NodeKey::load_or_create(path).map_err(fail)
}

fn invite(args: &InviteArgs, home: &Home, config: &Config) -> Result<(), Failure> {
    let state = home.state();
    let wanted = Level::from(args.level);
    let own = home.level()?;
    let root = home.root_key()?;
    let may = match wanted {
        Level::Anchor => root.is_some(),
        _ => state.may_invite(&home.key.id(), wanted),
    };
    if !may {
        let who = match wanted {
            Level::Member => format!("nodes that are {} or more", state.policy.who_may_invite),
            Level::Trusted => "anchors".to_owned(),
            Level::Anchor => "the holder of the root key".to_owned(),
        };
        return Err(Failure::new(
            Kind::Community,
            format!("only {who} may invite somebody as {wanted}, and this node is {own}"),
        )
        .code("unauthorized")
        .hint("ask one of them; `hearthnet community members` shows who is what"));
    }
    let now = now_ms();
    let expires_ms =
        now.saturating_add(u64::try_from(args.expires.as_millis()).unwrap_or(u64::MAX));
    let expires_ms = expires_ms / 1000 * 1000;
    let (hints, live) = hints(home, config, now);
    let invite = Invite::generate(home.log.community(), expires_ms / 1000, hints)
        .map_err(|e: GenerateError| Failure::internal(e))?;
    let author = root.as_ref().filter(|_| wanted == Level::Anchor);
    let body = Body::Invited {
        invite: invite.key().id(),
        level: wanted,
        uses: args.uses,
        expires_ms,
    };
    append(home, author, body)?;
    if args.json {
        return print_json(&json!({
            "code": invite.to_string(),
            "level": wanted,
            "uses": args.uses,
            "expires_ms": expires_ms,
            "hints": invite.hints(),
        }));
    }
    print_bytes(format!("{invite}\n").as_bytes())?;
    note(format!(
        "whoever has this code becomes {wanted} in {:?}: {}, until {} ({}).\n\
         They type: hearthnet community join CODE",
        state.name,
        match args.uses {
            1 => "one node".to_owned(),
            n => format!("{n} nodes"),
        },
        when(expires_ms),
        span(expires_ms.saturating_sub(now)),
    ));
    if !live {
        note(
            "No node of the community runs here now, and one has to run when they join: \
             `hearthnet serve`, or `hearthnet shard serve`.",
        );
    }
    Ok(())
}

/// Where nodes that can admit somebody listen, this one first; and whether this one runs.
fn hints(home: &Home, config: &Config, now: u64) -> (Vec<SocketAddr>, bool) {
    let state = home.state();
    let own = home.key.id();
    let of = |node: &NodeId| -> Vec<SocketAddr> {
        endpoints_of(&state, node, now)
            .iter()
            .filter_map(|e| e.parse().ok())
            .collect()
    };
    let mut hints = of(&own);
    let live = !hints.is_empty();
    if !live {
        // Where it will listen, if nobody else takes the port.
        let listen = config
            .node
            .listen
            .parse()
            .unwrap_or_else(|_| SocketAddr::from(([0, 0, 0, 0], DEFAULT_PORT)));
        if listen.port() != 0 {
            hints.extend(crate::addresses::reachable(listen));
        }
    }
    for (node, _) in state.members() {
        if *node != own && state.level(node) >= Some(Level::Trusted) {
            hints.extend(of(node));
        }
    }
    hints.truncate(MAX_HINTS);
    (hints, live)
}

fn members(home: &Home, as_json: bool) -> Result<(), Failure> {
    let state = home.state();
    let own = home.key.id();
    let now = now_ms();
    let online = |node: &NodeId| state.nodes(now).any(|seen| seen.node == *node);
    if as_json {
        let members: Vec<_> = state
            .members()
            .map(|(node, member)| {
                json!({
                    "node": node.to_string(),
                    "name": name_of(&state, node, now),
                    "level": member.level,
                    "since_ms": member.since_ms,
                    "frozen": state.is_frozen(node),
                    "this_node": *node == own,
                    "online": online(node),
                })
            })
            .collect();
        return print_json(&json!({
            "community": home.log.community().to_string(),
            "name": state.name,
            "members": members,
        }));
    }
    let rows: Vec<Vec<String>> = state
        .members()
        .map(|(node, member)| {
            vec![
                name_of(&state, node, now).to_owned(),
                node.short(),
                member.level.to_string(),
                match (state.is_frozen(node), *node == own, online(node)) {
                    (true, ..) => "frozen: signed two histories",
                    (_, true, _) => "this node",
                    (_, _, true) => "online",
                    _ => "",
                }
                .to_owned(),
            ]
        })
        .collect();
    print_bytes(table(&["name", "node", "level", ""], &rows).as_bytes())
}

fn level(args: &LevelArgs, home: &Home, config: &Config, up: bool) -> Result<(), Failure> {
    let state = home.state();
    let node = find(home, &args.node)?;
    let Some(now) = state.level(&node) else {
        return Err(not_a_member(&args.node));
    };
    let next = match (args.level.map(Level::from), now, up) {
        (Some(level), ..) => level,
        (None, Level::Member, true) | (None, Level::Anchor, false) => Level::Trusted,
        (None, Level::Trusted, true) => Level::Anchor,
        (None, Level::Trusted, false) => Level::Member,
        (None, Level::Anchor, true) => {
            return Err(no_step(&args.node, "an anchor, the highest level there is"));
        }
        (None, Level::Member, false) => {
            return Err(no_step(&args.node, "a member, the lowest level there is")
                .hint("`hearthnet community revoke` puts a node out for good"));
        }
    };
    if next == now || (next > now) != up {
        return Err(no_step(&args.node, &format!("{now} already")));
    }
    let root = home.root_key()?;
    let author = authority(home, root.as_ref(), now.max(next), "change the level of")?;
    append(home, author, Body::LevelChanged { node, level: next })?;
    spread(home, config, args.json)?;
    report(
        home,
        args.json,
        node,
        format!("is {next} now, and was {now}"),
        json!({ "level": next }),
    )
}

fn revoke(text: &str, home: &Home, config: &Config, as_json: bool) -> Result<(), Failure> {
    let state = home.state();
    let node = find(home, text)?;
    let Some(now) = state.level(&node) else {
        return Err(not_a_member(text));
    };
    let root = home.root_key()?;
    let author = authority(home, root.as_ref(), now, "revoke")?;
    // What this node has seen of it counts; whatever it says later does not.
    let heads = home.log.heads();
    let last_seq = heads.authors.get(&node).map_or(0, |head| head.seq);
    append(home, author, Body::Revoked { node, last_seq })?;
    spread(home, config, as_json)?;
    report(
        home,
        as_json,
        node,
        "was put out of the community; its sessions end as soon as their hosts hear of it".into(),
        json!({ "revoked": true }),
    )
}

fn policy(args: &PolicyArgs, home: &Home, config: &Config) -> Result<(), Failure> {
    let old = home.state().policy;
    let new = Policy {
        research: args.research.map_or(old.research, |s| s == Switch::On),
        who_may_invite: args.who_may_invite.map_or(old.who_may_invite, Level::from),
    };
    if new != old {
        let root = home.root_key()?;
        let author = match home.level()? {
            Level::Anchor => None,
            _ if root.is_some() => root.as_ref(),
            _ => {
                home.require(Level::Anchor, "change the policy")?;
                None
            }
        };
        append(home, author, Body::PolicyChanged(new))?;
        spread(home, config, args.json)?;
    }
    if args.json {
        return print_json(&json!({
            "research": new.research,
            "who_may_invite": new.who_may_invite,
        }));
    }
    print_bytes(
        format!(
            "research         {}\nwho may invite   {}\n",
            on_off(new.research),
            new.who_may_invite
        )
        .as_bytes(),
    )
}

/// With which key something is said about a node of level `level`: anchors say it about
/// others, the root about anchors.
fn authority<'a>(
    home: &Home,
    root: Option<&'a NodeKey>,
    level: Level,
    what: &str,
) -> Result<Option<&'a NodeKey>, Failure> {
    let own = home.level()?;
    match (level, own, root) {
        (Level::Member | Level::Trusted, Level::Anchor, _) => Ok(None),
        (_, _, Some(root)) => Ok(Some(root)),
        (Level::Anchor, ..) => Err(Failure::new(
            Kind::Community,
            format!("only the holder of the root key may {what} an anchor, or make one"),
        )
        .code("unauthorized")
        .hint("ask whoever founded the community")),
        _ => {
            home.require(Level::Anchor, &format!("{what} others"))?;
            Ok(None)
        }
    }
}

/// Takes a change to the others, if no node runs here that does: looks for them, and waits a
/// few seconds until they have it.
fn spread(home: &Home, config: &Config, quiet: bool) -> Result<(), Failure> {
    if Lock::is_held(&home.dir) || home.state().members().count() < 2 {
        return Ok(());
    }
    let runtime = runtime()?;
    let told = runtime.block_on(async {
        let node = crate::node::visit(home, config).await?;
        settle_in(&node).await;
        let even = |peer: &PeerInfo| peer.link.as_ref().is_some_and(|l| l.progress.even);
        let told = node.peers().iter().filter(|peer| even(peer)).count();
        node.shutdown().await;
        Ok::<_, Failure>(told)
    })?;
    runtime.shutdown_timeout(Duration::from_millis(500));
    if !quiet {
        note(match told {
            0 => "nobody else could be told yet; a node that runs here (`hearthnet serve`) will"
                .to_owned(),
            1 => "told one other node".to_owned(),
            n => format!("told {n} other nodes"),
        });
    }
    Ok(())
}

/// Appends an event of this node, or of the root.
fn append(home: &Home, author: Option<&NodeKey>, body: Body) -> Result<(), Failure> {
    let key = author.unwrap_or(&home.key);
    home.log
        .append(key, body, now_ms())
        .map(|_| ())
        .map_err(|e| log_failure(&home.dir, &e))
}

fn find(home: &Home, text: &str) -> Result<NodeId, Failure> {
    let state = home.state();
    let now = now_ms();
    let members = state.members();
    crate::members::find(
        text,
        members.map(|(node, _)| (*node, name_of(&state, node, now))),
    )
}

fn report(
    home: &Home,
    as_json: bool,
    node: NodeId,
    what: String,
    mut fields: serde_json::Value,
) -> Result<(), Failure> {
    if as_json {
        if let Some(object) = fields.as_object_mut() {
            object.insert("node".into(), node.to_string().into());
        }
        return print_json(&fields);
    }
    print_bytes(format!("{} {what}\n", label(&home.state(), &node)).as_bytes())
}

fn not_a_member(text: &str) -> Failure {
    Failure::new(
        Kind::Community,
        format!("{text:?} is not a member any more"),
    )
    .code("unknown_node")
    .hint("`hearthnet community members` lists everybody")
}

fn no_step(text: &str, what: &str) -> Failure {
    Failure::new(Kind::Community, format!("{text:?} is {what}")).code("bad_request")
}

fn on_off(value: bool) -> &'static str {
    if value { "on" } else { "off" }
}
