//! `hearthnet community`: found one, join one, say who may do what.
//!
//! What changes the community is one signed event in this node's log. A running node on
//! this machine sees it at once and passes it on; without one it waits in the log.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use hearthnet_bus::invite::{GenerateError, Invite, MAX_HINTS, MAX_NAME_BYTES};
use hearthnet_bus::log::{Body, Community, EventLog, Level, Policy};
use hearthnet_bus::node::{LinkInfo, Node};
use hearthnet_bus::{NodeId, NodeKey};
use serde_json::json;

use crate::addresses::DEFAULT_PORT;
use crate::args::{
    CommunityCommand, CreateArgs, Global, InviteArgs, LevelArgs, LevelName, PolicyArgs, RevokeArgs,
    Switch,
};
use crate::commands::{node_key, print_bytes, print_json, runtime};
use crate::community::{
    Home, OnDisk, ROOT_KEY, discard_unborn, display_name, endpoints_of, label, log_failure,
    name_of, now_ms,
};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::membership::Membership;
use crate::node::{LOG_LOOK, Lock, learn};
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
        CommunityCommand::Revoke(args) => revoke(&args, &Home::open(global)?, config),
        CommunityCommand::Invites { all, json } => {
            super::invites::list(&Home::open(global)?, all, json)
        }
        CommunityCommand::Withdraw { invite, json } => {
            super::invites::withdraw(&invite, &Home::open(global)?, config, json)
        }
        CommunityCommand::Leave(args) => super::leave::run(&args, global, config),
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
    match Home::on_disk(global, &dir)? {
        OnDisk::Here(home) => return Err(in_community(&home.state().name)),
        OnDisk::Lost(noted) => {
            return Err(Failure::new(
                Kind::Community,
                format!(
                    "this node is in {:?}, whose log was lost on this machine",
                    noted.name
                ),
            )
            .code("in_community")
            .hint("`hearthnet status` gets the log back from any other member that runs; `hearthnet community leave` gives it up"));
        }
        OnDisk::Nothing => {}
    }
    let key = node_key(global)?;
    let called = display_name(args.as_name.as_deref(), config);
    if called.len() > MAX_NAME_BYTES || called.chars().any(char::is_control) {
        return Err(Failure::new(
            Kind::Config,
            "a node's name has 1 to 64 bytes and no control characters",
        )
        .hint("--as gives this node another name"));
    }
    discard_unborn(&dir)?;
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
    let named = Body::Named {
        name: called.clone(),
    };
    log.append(&key, named, now_ms())
        .map_err(|e| log_failure(&dir, &e))?;
    Membership::note(&dir, &log.state(), &key.id());
    if args.json {
        return print_json(&json!({
            "community": log.community().to_string(),
            "name": name,
            "node_name": called,
            "founder": key.id().to_string(),
            "research": research,
            "root_key": dir.join(ROOT_KEY),
        }));
    }
    print_bytes(
        format!(
            "community      {name}\n\
             id             {}\n\
             this node      {called} ({}, anchor)\n\
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

/// The refusal of a second community.
pub(crate) fn in_community(name: &str) -> Failure {
    Failure::new(
        Kind::Community,
        format!("this node is in {name:?} already"),
    )
    .code("in_community")
    .hint("`hearthnet community leave` ends that; or --data-dir names another directory, for another node")
}

/// A fresh root key, always: the key is the community's id, and a community that was founded
/// twice would have two first events, of which nobody could take either.
fn new_root_key(path: &Path) -> Result<NodeKey, Failure> {
    let fail = |e: &dyn std::fmt::Display| {
        Failure::new(Kind::Host, e.to_string()).hint("--data-dir names another directory")
    };
    if path.exists() {
        let aside = (1..)
            .map(|n: u32| path.with_extension(format!("key.old-{n}")))
            .find(|aside| !aside.exists())
            .ok_or_else(|| Failure::internal("no free name for the old root key"))?;
        std::fs::rename(path, &aside).map_err(|e| fail(&e))?;
        note(format!(
            "the root key of an earlier community is in {} now; a community is founded once",
            aside.display()
        ));
    }
    let key = NodeKey::generate().map_err(|e| fail(&e))?;
    key.write_new(path).map_err(|e| fail(&e))?;
    Ok(key)
}

fn invite(args: &InviteArgs, home: &Home, config: &Config) -> Result<(), Failure> {
    let wanted = Level::from(args.level);
    let invite = change(home, config, args.json, || make_invite(args, home, config))?;
    let (state, now) = (home.state(), now_ms());
    if args.json {
        return print_json(&json!({
            "code": invite.code.to_string(),
            "id": invite.code.key().id().short(),
            "level": wanted,
            "uses": args.uses,
            "expires_ms": invite.expires_ms,
            "hints": invite.code.hints(),
        }));
    }
    print_bytes(format!("{}\n", invite.code).as_bytes())?;
    note(format!(
        "whoever has this code becomes {wanted} in {:?}: {}, until {} ({}).\n\
         They type: hearthnet community join CODE\n\
         `hearthnet community invites` lists it as {}; `hearthnet community withdraw` takes it back.",
        state.name,
        match args.uses {
            1 => "one node".to_owned(),
            n => format!("{n} nodes"),
        },
        when(invite.expires_ms),
        span(invite.expires_ms.saturating_sub(now)),
        invite.code.key().id().short(),
    ));
    if !invite.live {
        note(
            "No node of the community runs here now, and one has to run when they join: \
             `hearthnet serve`, or `hearthnet shard serve`.",
        );
    }
    Ok(())
}

/// An invite that was made.
struct Made {
    code: Invite,
    expires_ms: u64,
    /// Whether this node runs, so that people can join through it.
    live: bool,
}

fn make_invite(args: &InviteArgs, home: &Home, config: &Config) -> Result<Made, Failure> {
    let state = home.state();
    let wanted = Level::from(args.level);
    let root = home.root_key()?;
    // The root key may do all that anchors may, also where this node's own key counts no more.
    let author = match state.may_invite(&home.key.id(), wanted) {
        true => None,
        false => root.as_ref(),
    };
    if author.is_none() && !state.may_invite(&home.key.id(), wanted) {
        let own = home.level()?;
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
    let code = Invite::generate(home.log.community(), expires_ms / 1000, hints)
        .map_err(|e: GenerateError| Failure::internal(e))?;
    let body = Body::Invited {
        invite: code.key().id(),
        level: wanted,
        uses: args.uses,
        expires_ms,
    };
    append(home, author, body)?;
    Ok(Made {
        code,
        expires_ms,
        live,
    })
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
    let (node, now, next) = change(home, config, args.json, || set_level(args, home, up))?;
    report(
        &label(&home.state(), &node),
        args.json,
        node,
        format!("is {next} now, and was {now}"),
        json!({ "level": next }),
    )
}

fn set_level(args: &LevelArgs, home: &Home, up: bool) -> Result<(NodeId, Level, Level), Failure> {
    let state = home.state();
    let node = find(home, &args.node)?;
    let Some(now) = state.member(&node).map(|member| member.level) else {
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
        let other = if up { "demote" } else { "promote" };
        let failure = no_step(&args.node, &format!("{now} already"));
        return Err(match next == now {
            true => failure,
            false => failure.hint(format!("`hearthnet community {other}` goes the other way")),
        });
    }
    if next < Level::Anchor {
        keeps_an_anchor(&state, &node, &format!("made {next}"))?;
    }
    let root = home.root_key()?;
    let author = authority(home, root.as_ref(), now.max(next), "change the level of")?;
    append(home, author, Body::LevelChanged { node, level: next })?;
    Ok((node, now, next))
}

/// Refuses what would take the last anchor from a community: nobody could invite or revoke any
/// more but whoever finds the root key. The log itself does not refuse it, for the root's word
/// about a lost key must hold whatever else has happened.
pub(crate) fn keeps_an_anchor(state: &Community, node: &NodeId, what: &str) -> Result<(), Failure> {
    let anchor = |node: &NodeId| state.level(node) == Some(Level::Anchor);
    let others = state
        .members()
        .any(|(other, _)| other != node && anchor(other));
    if !anchor(node) || others {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Community,
        format!(
            "{} is the last anchor of {:?}, and cannot be {what}: nobody could invite or put out anybody any more",
            label(state, node),
            state.name
        ),
    )
    .code("last_anchor")
    .hint("first make another member an anchor: `hearthnet community promote NODE anchor`, on the machine that has root.key"))
}

fn revoke(args: &RevokeArgs, home: &Home, config: &Config) -> Result<(), Failure> {
    let node = find(home, &args.node)?;
    let state = home.state();
    // Before anybody is asked: what is refused needs no answer.
    keeps_an_anchor(&state, &node, "put out")?;
    let question = match node == home.key.id() {
        true => format!(
            "Put this very node, {}, out of {:?} for good?",
            label(&state, &node),
            state.name
        ),
        false => format!(
            "Put {} out of {:?} for good? Its key never comes back.",
            label(&state, &node),
            state.name
        ),
    };
    if !args.yes && !agreed(&question)? {
        return Err(Failure::new(Kind::Interrupted, "nothing was changed"));
    }
    // By its name, which the log does not show afterwards.
    let who = label(&state, &node);
    change(home, config, args.json, || put_out(&args.node, node, home))?;
    report(
        &who,
        args.json,
        node,
        "was put out of the community; its sessions end as soon as their hosts hear of it".into(),
        json!({ "revoked": true }),
    )
}

fn put_out(text: &str, node: NodeId, home: &Home) -> Result<(), Failure> {
    let state = home.state();
    keeps_an_anchor(&state, &node, "put out")?;
    let Some(now) = state.member(&node).map(|member| member.level) else {
        return Err(not_a_member(text));
    };
    let root = home.root_key()?;
    let author = authority(home, root.as_ref(), now, "revoke")?;
    // What this node has seen of it counts; whatever it says later does not.
    let heads = home.log.heads();
    let last_seq = heads.authors.get(&node).map_or(0, |head| head.seq);
    append(home, author, Body::Revoked { node, last_seq })
}

/// Asks a person, if there is one; without a terminal the command stands for itself.
pub(crate) fn agreed(question: &str) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Ok(true);
    }
    let _ = write!(io::stderr(), "{question} [y/N] ");
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes" | "Yes"))
}

fn policy(args: &PolicyArgs, home: &Home, config: &Config) -> Result<(), Failure> {
    let asks = args.research.is_some() || args.who_may_invite.is_some();
    let set = || set_policy(args, home);
    let new = match asks {
        true => change(home, config, args.json, set)?,
        false => home.state().policy,
    };
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

fn set_policy(args: &PolicyArgs, home: &Home) -> Result<Policy, Failure> {
    let old = home.state().policy;
    let new = Policy {
        research: args.research.map_or(old.research, |s| s == Switch::On),
        who_may_invite: args.who_may_invite.map_or(old.who_may_invite, Level::from),
    };
    if new != old {
        let root = home.root_key()?;
        let anchor = home.state().level(&home.key.id()) == Some(Level::Anchor);
        let author = root.as_ref().filter(|_| !anchor);
        if author.is_none() {
            home.require(Level::Anchor, "change the policy")?;
        }
        append(home, author, Body::PolicyChanged(new))?;
    }
    Ok(new)
}

/// With which key something is said about a node of level `level`: anchors say it about
/// others, the root about anchors.
fn authority<'a>(
    home: &Home,
    root: Option<&'a NodeKey>,
    level: Level,
    what: &str,
) -> Result<Option<&'a NodeKey>, Failure> {
    let own = home.state().level(&home.key.id());
    match (level, own, root) {
        (Level::Member | Level::Trusted, Some(Level::Anchor), _) => Ok(None),
        (_, _, Some(root)) => Ok(Some(root)),
        (Level::Anchor, ..) => Err(Failure::new(
            Kind::Community,
            format!("only the holder of the root key may {what} an anchor, or make one"),
        )
        .code("unauthorized")
        .hint("ask whoever founded the community")),
        _ => {
            home.level()?;
            home.require(Level::Anchor, &format!("{what} others"))?;
            Ok(None)
        }
    }
}

/// Makes a change to the community: `work` judges by the log and appends. If no node runs here,
/// others are looked for first, for a few seconds: their news may decide, and after an old copy
/// of the log was put back they know what this node has said. Then they are told.
pub(crate) fn change<T>(
    home: &Home,
    config: &Config,
    quiet: bool,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    if Lock::is_held(&home.dir) {
        let done = work()?;
        // Who asks the node that runs here after this command has ended is told of it.
        std::thread::sleep(LOG_LOOK);
        return Ok(done);
    }
    if home.state().members().count() < 2 {
        return work();
    }
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let node = crate::node::transient(home, config).await?;
        learn(&node, home).await;
        let before = sent(&node);
        let done = work();
        let told = match done {
            Ok(_) => told(&node, &before, false).await,
            Err(_) => 0,
        };
        node.shutdown().await;
        Ok::<_, Failure>((done?, told))
    });
    runtime.shutdown_timeout(Duration::from_millis(500));
    let (done, told) = outcome?;
    if !quiet {
        note(match told {
            0 => "nobody else could be told yet; a node that runs here (`hearthnet serve`) will"
                .to_owned(),
            1 => "told one other node".to_owned(),
            n => format!("told {n} other nodes"),
        });
    }
    Ok(done)
}

/// How many events went to each node that is linked.
pub(crate) fn sent(node: &Node) -> BTreeMap<NodeId, u64> {
    let peers = node.peers();
    let links = peers
        .iter()
        .filter_map(|peer| Some((peer, peer.link.as_ref()?)));
    links
        .map(|(peer, link)| (peer.node, link.progress.sent))
        .collect()
}

/// How long those who are linked may take to hear of a change.
const TELLING: Duration = Duration::from_secs(4);

/// Waits until everybody who was linked has what was appended after `before` was taken, for a few
/// seconds; how many have. Who hears that this node `leaves` closes the link.
pub(crate) async fn told(node: &Node, before: &BTreeMap<NodeId, u64>, leaves: bool) -> usize {
    let mut changes = node.changes();
    let deadline = Instant::now() + TELLING;
    loop {
        let peers = node.peers();
        let linked: BTreeMap<NodeId, &LinkInfo> = peers
            .iter()
            .filter_map(|peer| Some((peer.node, peer.link.as_ref()?)))
            .collect();
        let has = |node: &NodeId, earlier: u64| match linked.get(node) {
            Some(link) => link.progress.in_sync && link.progress.sent > earlier,
            None => leaves,
        };
        let told = before.iter().filter(|(node, sent)| has(node, **sent));
        let told = told.count();
        let wait_for = match leaves {
            true => before.len(),
            false => before
                .keys()
                .filter(|node| linked.contains_key(*node))
                .count(),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if told >= wait_for || left.is_zero() {
            return told;
        }
        // Whether a link is even is told; how much went over it has to be looked at.
        let _ = tokio::time::timeout(left.min(LOOK), changes.changed()).await;
    }
}

/// How often it is looked whether a change has gone over a link.
const LOOK: Duration = Duration::from_millis(20);

/// Appends an event of this node, or of the root.
pub(crate) fn append(home: &Home, author: Option<&NodeKey>, body: Body) -> Result<(), Failure> {
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
    who: &str,
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
    print_bytes(format!("{who} {what}\n").as_bytes())
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
