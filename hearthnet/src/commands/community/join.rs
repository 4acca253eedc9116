//! `hearthnet community join`: from a pasted code to a member with the community's log.
//!
//! Where to ask comes from the code's hints and from what mDNS says about the community;
//! one after the other is asked until one admits. All of it ends by a deadline.

use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::{CallError, Client, Code};
use hearthnet_bus::discovery::{CommunityTag, Discovery};
use hearthnet_bus::invite::{Invite, JoinRequest};
use hearthnet_bus::joining::{JoinFailure, SecondOpinion, join_through, second_opinion};
use hearthnet_bus::log::{EventLog, Level};
use hearthnet_bus::node::bus_rule;
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_transport::{CloseCode, ConnectError, Identity, connect_path};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use zeroize::Zeroizing;

use super::change::in_community;
use crate::args::JoinArgs;
use crate::community::{Home, OnDisk, discard_unborn, display_name, now_ms};
use crate::config::{Config, Loaded, default_path};
use crate::context::Context;
use crate::failure::{Failure, Kind};
use crate::membership::Membership;
use crate::node::transient::{self, among_others};
use crate::output::{Styled, note, print, print_json};
use crate::runtime::block_on;
use crate::secret;

/// How long an address is left alone after it did not work.
const TRY_AGAIN: Duration = Duration::from_secs(3);
/// How long others may still admit after one node said that the invite is no good: whoever
/// said so may not be of the community at all.
const SECOND_OPINION: Duration = Duration::from_secs(3);
/// The same after a node let this one not even ask: it knows of no open invite, or not yet.
const SHUT_OUT: Duration = Duration::from_secs(10);
/// How long one node may take to admit, while others wait for their turn: far longer than an honest
/// one needs for the log of a large community.
const ONE_NODE: Duration = Duration::from_secs(10);
/// Most addresses tried at the same time; more than a LAN has nodes of one community.
const AT_ONCE: usize = 16;
/// How often a person hears that the search goes on.
const REPORT: Duration = Duration::from_secs(5);

pub(super) fn run(args: &JoinArgs, cx: &Context) -> Result<(), Failure> {
    let code = match args.code.as_slice() {
        [] if !std::io::stdin().is_terminal() => {
            return Err(Failure::new(Kind::Config, "there is no invite code")
                .hint("`hearthnet community join -` takes it from standard input"));
        }
        [] => secret::ask("invite code", true)?,
        [input] if input == "-" => secret::ask("invite code", true)?,
        parts => Zeroizing::new(parts.concat()),
    };
    let invite: Invite = code.parse().map_err(|e: hearthnet_bus::invite::InviteError| {
        Failure::new(Kind::Config, e.to_string())
            .code(e.code())
            .hint("the code is one line that begins with hearth1, as `hearthnet community invite` printed it")
    })?;
    let dir = cx.global.dir()?;
    let mut lost = false;
    match Home::on_disk(&cx.global, &dir)? {
        OnDisk::Nothing => {}
        // What was lost comes back with the code.
        OnDisk::Lost(noted) if noted.community == invite.community() => lost = true,
        OnDisk::Lost(noted) => return Err(in_community(&noted.name)),
        OnDisk::Here(home) => {
            let (state, id) = (home.state(), home.key.id());
            if home.log.community() != invite.community() {
                return Err(in_community(&state.name));
            }
            if state.level(&id).is_none() {
                // Put out, frozen, or gone: says which, and what to do.
                home.level()?;
            }
            // This node's own log may be the last to know.
            block_on(among_others(&home, &cx.config, async |_| Ok(())))?;
            home.good_standing()?;
            return report(args, home.level()?, &home, None, &cx.config);
        }
    }
    if invite.expires().saturating_mul(1000) <= now_ms() {
        return Err(Failure::new(
            Kind::Community,
            format!(
                "the invite expired on {}",
                crate::output::when(invite.expires().saturating_mul(1000))
            ),
        )
        .code("bad_invite")
        .hint("ask for a new code; if it is fresh, compare the clocks of both machines"));
    }
    let key = Arc::new(cx.global.node_key()?);
    let name = display_name(args.name.as_deref(), &cx.config);
    let request = invite.request(key.id(), &name).map_err(|e| {
        Failure::new(Kind::Config, e.to_string()).hint("--name gives this node another name")
    })?;
    discard_unborn(&dir)?;
    let log = match lost {
        true => EventLog::prepare_again(&dir, invite.community()),
        false => EventLog::prepare(&dir, invite.community()),
    }?;
    let started = Instant::now();
    let search = Search {
        dir: dir.clone(),
        key: Arc::clone(&key),
        request,
        log: log.clone(),
        config: &cx.config,
        quiet: args.json,
        asking: Arc::new(Semaphore::new(1)),
    };
    let outcome = block_on(async {
        tokio::select! {
            outcome = search.run(&invite, args.wait) => outcome,
            _ = tokio::signal::ctrl_c() => {
                Err(Failure::new(Kind::Interrupted, "stopped; this node has not joined"))
            }
        }
    });
    match outcome {
        Ok((_, by)) => {
            drop(search);
            let took = started.elapsed();
            let home = Home::new(dir, key, log);
            let ids = (home.key.id(), by);
            let start = async || transient::start(&home, &cx.config).await;
            let others = block_on(second_opinion(&home.log, ids, now_ms, start))?;
            let level = home.level()?;
            Membership::note(&home.dir, &home.state(), &home.key.id());
            let written = configuration(args, cx, &home)?;
            if let Some((path, research)) = &written
                && !args.json
            {
                note(format!(
                    "wrote {}: computing with others is {} on this machine; {} under [policy.research] changes that",
                    path.display(),
                    if *research { "on" } else { "off" },
                    if *research {
                        "enable = false"
                    } else {
                        "enable = true"
                    },
                ));
            }
            let now = match written {
                Some(_) => Loaded::load(cx.global.config.as_deref(), &cx.global.set)?.config,
                None => cx.config.clone(),
            };
            report(args, level, &home, Some(Joined { took, by, others }), &now)
        }
        Err(failure) => {
            drop((search, log));
            discard_unborn(&dir)?;
            Err(failure)
        }
    }
}

/// Writes a configuration where there is none, so that what is recommended next works: who joins
/// a community that computes together wants to. Where it was written, and whether this machine
/// computes with others by it.
fn configuration(
    args: &JoinArgs,
    cx: &Context,
    home: &Home,
) -> Result<Option<(PathBuf, bool)>, Failure> {
    let Some(path) = cx.global.config.clone().or_else(default_path) else {
        return Ok(None);
    };
    if path.exists() {
        return Ok(None);
    }
    let together = home.state().policy.research;
    let research = match args.research {
        Some(research) => research,
        None if cx.config.policy.research.enable => true,
        None => together && crate::commands::init::agrees_to_research(args.json, true)?,
    };
    crate::commands::init::write_new(&path, research, args.name.as_deref())?;
    Ok(Some((path, research)))
}

fn report(
    args: &JoinArgs,
    level: Level,
    home: &Home,
    joined: Option<Joined>,
    config: &Config,
) -> Result<(), Failure> {
    let state = home.state();
    let (name, members) = (&state.name, state.members().count());
    let research = config.policy.research.enable;
    if args.json {
        let ids = |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect::<Vec<_>>();
        let joined = joined.as_ref();
        let asked = joined.map(|joined| {
            let first = std::iter::once(joined.by);
            ids(&first
                .chain(joined.others.from.iter().copied())
                .collect::<Vec<_>>())
        });
        return print_json(&json!({
            "community": home.log.community().to_string(),
            "name": name,
            "level": level,
            "members": members,
            "research": research,
            "joined_now": joined.is_some(),
            "seconds": joined.map(|joined| joined.took.as_secs_f64()),
            "asked": asked,
            "kept_back": joined.map(|joined| ids(&joined.others.put_out)),
            "strange_to": joined.map(|joined| ids(&joined.others.strange_to)),
        }));
    }
    let how = match &joined {
        Some(joined) => format!("joined {name:?} in {:.1} s", joined.took.as_secs_f64()),
        None => format!("this node is in {name:?} already"),
    };
    print(format!("{how}\nlevel    {level}\nmembers  {members}\n"))?;
    if let Some(Joined { by, others, .. }) = &joined {
        let label = |node: &NodeId| state.label(node, now_ms());
        let by = label(by);
        if let Some(other) = others.strange_to.first() {
            let advice = match others.from.first() {
                None => "If `hearthnet status` finds nobody else either, ask somebody else for a code: `hearthnet community leave`, and join with that".to_owned(),
                Some(one) => format!("To {} it is one", label(one)),
            };
            note(format!(
                "to {} this node is no member: it has not heard of it yet, or {by}, who let it in, was put out itself. {advice}",
                label(other)
            ));
        } else if others.from.is_empty() {
            note(format!(
                "only {by} could be asked what the community knows. What it may have kept back, as that somebody was put out, is heard from the next member that is met"
            ));
        }
        for node in &others.put_out {
            note(format!(
                "{} was put out of the community: others know it, {by} did not say so",
                label(node)
            ));
        }
    }
    note(next_step(level, research, state.policy.research));
    Ok(())
}

/// How this node became a member.
struct Joined {
    took: Duration,
    /// Who let it in.
    by: NodeId,
    others: SecondOpinion,
}

/// What works next, for a member of this level.
fn next_step(level: Level, here: bool, together: bool) -> String {
    match (here, together, level) {
        (_, false, _) => "next: an anchor switches distributed inference on with `hearthnet community policy --research on`; until then members know each other, and no more".to_owned(),
        (false, true, _) => "next: enable = true under [policy.research] in the configuration (`hearthnet config show` says which file) lets this machine compute with the others; until then `hearthnet chat --local \"...\"` works here".to_owned(),
        (true, true, Level::Member) => "next: `hearthnet chat \"...\"`".to_owned(),
        (true, true, _) => "next: `hearthnet serve --layers auto`, with --model for another than the others serve (`hearthnet status`); and `hearthnet chat \"...\"` on any member".to_owned(),
    }
}

struct Search<'a> {
    dir: PathBuf,
    key: Arc<NodeKey>,
    request: JoinRequest,
    log: EventLog,
    config: &'a Config,
    quiet: bool,
    /// One node is asked at a time: of several that admit the same node, all but one say so in vain.
    asking: Arc<Semaphore>,
}

/// Why one address did not admit.
enum NotAdmitted {
    Failed(JoinFailure),
    Unreachable(ConnectError),
}

/// What is made of an answer that admits nobody.
struct Refusal {
    /// How much it tells, against others.
    weight: u8,
    /// What is said while the search goes on.
    said: String,
    /// How the search fails if nothing better comes.
    failure: Failure,
    /// How long others are still asked: of a search that began then.
    until: Option<Instant>,
}

impl Search<'_> {
    fn say(&self, line: impl Into<Styled>) {
        if !self.quiet {
            note(line);
        }
    }

    /// The level, and who gave it.
    async fn run(&self, invite: &Invite, wait: Duration) -> Result<(Level, NodeId), Failure> {
        let settings = crate::node::discovery_settings(
            self.config,
            self.key.id(),
            CommunityTag::of(invite.community().as_bytes()),
        )?;
        let (discovery, mut changes) = Discovery::start(settings, None).map_err(|e| {
            Failure::new(Kind::Host, e.to_string()).hint(
                "discovery.mdns = false leaves mDNS out; the code's own addresses still count",
            )
        })?;
        let hints: Vec<String> = invite.hints().iter().map(ToString::to_string).collect();
        self.say(match hints.as_slice() {
            [] => "looking for the community on the local network".to_owned(),
            hints => format!(
                "looking for the community at {} and on the local network",
                hints.join(", ")
            ),
        });
        let identity = Arc::new(self.key.identity().map_err(Failure::internal)?);
        let transport = self.config.transport()?;
        let started = Instant::now();
        let mut deadline = started + wait;
        let mut tried: HashMap<SocketAddr, Instant> = HashMap::new();
        let mut running = JoinSet::new();
        let mut last: Option<Refusal> = None;
        let mut reported = Instant::now();
        let outcome = loop {
            let found = discovery.found();
            let all = invite
                .hints()
                .iter()
                .chain(found.iter().flat_map(|h| &h.endpoints));
            for &address in all {
                let fresh = tried
                    .get(&address)
                    .is_none_or(|at| at.elapsed() >= TRY_AGAIN);
                if fresh && running.len() < AT_ONCE {
                    // While it runs it is not tried again: its time lies ahead.
                    tried.insert(address, deadline.max(Instant::now()));
                    let (identity, config) = (Arc::clone(&identity), transport.clone());
                    let (key, log) = (Arc::clone(&self.key), self.log.clone());
                    let (request, asking) = (self.request.clone(), Arc::clone(&self.asking));
                    running.spawn(async move {
                        let asked = attempt(address, &identity, config, key, request, log, &asking);
                        (address, asked.await)
                    });
                }
            }
            let now = Instant::now();
            if now >= deadline {
                break Err(last.map_or_else(|| nobody(wait, ""), |last| last.failure));
            }
            tokio::select! {
                Some(Ok((address, answer))) = running.join_next(), if !running.is_empty() => {
                    tried.insert(address, Instant::now());
                    let why = match answer {
                        Ok(level) => break Ok(level),
                        Err(why) => why,
                    };
                    let refusal = Refusal::of(address, &why, (started, wait), &self.dir);
                    deadline = refusal.until.map_or(deadline, |until| deadline.min(until));
                    // A refusal tells more than a silence.
                    if last.as_ref().is_none_or(|last| last.weight <= refusal.weight) {
                        last = Some(refusal);
                    }
                }
                _ = changes.changed() => {}
                () = tokio::time::sleep(Duration::from_millis(250).min(deadline - now)) => {}
            }
            if reported.elapsed() >= REPORT {
                reported = Instant::now();
                self.say(format!(
                    "still looking; {}",
                    last.as_ref()
                        .map_or("nobody answered yet", |last| &last.said)
                ));
            }
        };
        running.abort_all();
        discovery.shutdown().await;
        outcome
    }
}

/// Connects to one address and asks to be admitted.
async fn attempt(
    address: SocketAddr,
    identity: &Identity,
    config: hearthnet_transport::Config,
    key: Arc<NodeKey>,
    request: JoinRequest,
    log: EventLog,
    asking: &Semaphore,
) -> Result<(Level, NodeId), NotAdmitted> {
    let socket = connect_path(&address.to_string(), identity, None, &bus_rule(), &config)
        .await
        .map_err(NotAdmitted::Unreachable)?;
    let from = socket.peer();
    let client = Client::new(socket, key);
    // Connected at once to all, and asked in turn: whoever connects first comes first.
    let Ok(turn) = asking.acquire().await else {
        return Err(NotAdmitted::Failed(JoinFailure::NotAdmitted));
    };
    let asked = join_through(&client, from, &request, &log, now_ms, |_| {});
    let asked = tokio::time::timeout(ONE_NODE, asked).await;
    let late = |_| CallError::new(Code::BUSY, "it did not answer in time; others are asked");
    let asked = asked.map_err(|e| JoinFailure::Refused(late(e))).flatten();
    if asked.is_ok() {
        // Nobody else is asked any more, until whoever waits here is dropped.
        turn.forget();
    }
    asked
        .map(|level| (level, from))
        .map_err(NotAdmitted::Failed)
}

impl Refusal {
    /// What `address` answered to a search that began then, and lasts for `wait`.
    fn of(
        address: SocketAddr,
        why: &NotAdmitted,
        (began, wait): (Instant, Duration),
        dir: &Path,
    ) -> Self {
        use NotAdmitted::{Failed, Unreachable};
        let said = match why {
            Failed(failure) => format!("{address} answered: {failure}"),
            Unreachable(error) => format!("{address}: {error}"),
        };
        let fail = |message: String| Failure::new(Kind::Community, message);
        let (weight, until, failure) = match why {
            Failed(failure) if failure.is_final() => (
                4,
                Some(Instant::now() + SECOND_OPINION),
                fail(failure.to_string())
                    .code("bad_invite")
                    .hint("ask for a new code with `hearthnet community invite`"),
            ),
            Unreachable(error) if error.code() == Some(CloseCode::Revoked) => (
                3,
                Some(began + wait.min(SHUT_OUT)),
                fail(format!(
                    "the node at {address} says that this machine's key was put out of the community"
                ))
                .code("revoked")
                .hint(format!(
                    "a key that was put out stays out: move {} away, and join again with a new code; a new key is made then",
                    dir.join("node.key").display()
                )),
            ),
            Failed(_) => (
                2,
                None,
                fail(format!(
                    "no node of the community admitted this one in {} s; {said}",
                    wait.as_secs()
                ))
                .code("not_admitted")
                .hint("members that may admit are those that are trusted or anchors; one of them has to be running"),
            ),
            // A node was there, and does not talk to strangers: no invite is open.
            Unreachable(error) if error.code() == Some(CloseCode::Unauthorized) => (
                1,
                Some(began + wait.min(SHUT_OUT)),
                fail(format!(
                    "the node at {address} has no open invite: this code was used up or withdrawn"
                ))
                .code("bad_invite")
                .hint("ask for a new code with `hearthnet community invite`"),
            ),
            Unreachable(_) => (0, None, nobody(wait, &format!("; {said}"))),
        };
        Self {
            weight,
            said,
            failure,
            until,
        }
    }
}

/// Nobody was found who could answer; `last` is what came of it.
fn nobody(wait: Duration, last: &str) -> Failure {
    let found = format!(
        "no node of the community was found in {} s{last}",
        wait.as_secs()
    );
    Failure::new(Kind::Community, found).code("unreachable").hint(
        "is `hearthnet serve` running where the code was made, on the same network, and can this machine reach it?",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_recommended_fits_the_level_and_what_is_switched_on() {
        for level in [Level::Member, Level::Trusted, Level::Anchor] {
            assert!(next_step(level, true, false).contains("policy --research on"));
            assert!(next_step(level, false, true).contains("[policy.research]"));
            let serves = next_step(level, true, true).contains("serve --layers auto");
            assert_eq!(serves, level >= Level::Trusted);
        }
    }
}
