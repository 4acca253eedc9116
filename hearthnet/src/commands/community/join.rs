//! `hearthnet community join`: from an invite code to a member with the community's log.
//!
//! Candidate addresses come from the code's hints and from mDNS. They are asked one at a time until
//! one node admits this one, or until a deadline.

use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::{CallError, Client, Code};
use hearthnet_bus::discovery::Discovery;
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
use crate::cli::args::JoinArgs;
use crate::cli::{Failure, Kind, Styled, block_on, failure, note, print, print_json, secret, when};
use crate::config::{Config, Context, Loaded, default_path};
use crate::home::{Home, Membership, NODE_KEY, OnDisk, discard_unborn, display_name, now_ms};
use crate::node::{discovery_settings, transient, with_synced_node};

/// Delay before an address is tried again after a failure.
const TRY_AGAIN: Duration = Duration::from_secs(3);
/// Time in which other nodes may still admit after one node called the invite invalid: that node
/// may not belong to the community at all.
const SECOND_OPINION: Duration = Duration::from_secs(3);
/// The same after a node refused the connection: it knows of no open invite, or not yet.
const AFTER_REFUSAL: Duration = Duration::from_secs(10);
/// Time in which one node must admit before the next is asked: far longer than an honest node needs
/// for the log of a large community.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(10);
/// Most addresses tried at the same time: more than one community has nodes on a LAN.
const AT_ONCE: usize = 16;
/// Interval of the progress message.
const REPORT: Duration = Duration::from_secs(5);

pub(super) fn run(args: &JoinArgs, cx: &Context) -> Result<(), Failure> {
    let next = enter(args, cx)?;
    if !args.json {
        note(next);
    }
    Ok(())
}

/// Joins the community of the code, and reports it. Returns a recommendation of the next command.
pub(crate) fn enter(args: &JoinArgs, cx: &Context) -> Result<String, Failure> {
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
        // Joining with the code restores a lost log.
        OnDisk::Lost(noted) if noted.community == invite.community() => lost = true,
        OnDisk::Lost(noted) => return Err(in_community(&noted.name)),
        OnDisk::Here(home) => {
            let (state, id) = (home.state(), home.key.id());
            if home.log.community() != invite.community() {
                return Err(in_community(&state.name));
            }
            if state.level(&id).is_none() {
                // Reports whether the key was revoked or frozen, or the node left, with the remedy.
                home.level()?;
            }
            // Sync first: this node's own log may be outdated.
            block_on(with_synced_node(&home, &cx.config, async |_| Ok(())))?;
            home.require_valid_key()?;
            return report(args, home.level()?, &home, None, &cx.config);
        }
    }
    if invite.expires().saturating_mul(1000) <= now_ms() {
        let expired = when(invite.expires().saturating_mul(1000));
        return Err(failure!(Community, "the invite expired on {expired}")
            .code("bad_invite")
            .hint("ask for a new code; if it is fresh, compare the clocks of both machines"));
    }
    let key = Arc::new(cx.global.node_key()?);
    let name = display_name(args.name.as_deref(), &cx.config);
    let request = invite.request(key.id(), &name).map_err(|e| {
        Failure::new(Kind::Config, e.to_string()).hint("choose another name with --name")
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
        Ok(by) => {
            drop(search);
            let took = started.elapsed();
            let home = Home::new(dir, key, log);
            let ids = (home.key.id(), by);
            let start = async || transient::start(&home, &cx.config).await;
            let others = block_on(second_opinion(&home.log, ids, start))?;
            let level = home.level()?;
            Membership::note(&home.dir, &home.state(), &home.key.id());
            let config = configuration(args, cx, &home)?;
            let joined = Joined { took, by, others };
            report(args, level, &home, Some(joined), &config)
        }
        Err(failure) => {
            drop((search, log));
            discard_unborn(&dir)?;
            Err(failure)
        }
    }
}

/// Writes a configuration if there is none, so that the recommended next step works: a node that
/// joins a community with distributed inference usually wants to use it. Returns the configuration
/// in force.
fn configuration(args: &JoinArgs, cx: &Context, home: &Home) -> Result<Config, Failure> {
    let path = cx.global.config.clone().or_else(default_path);
    let Some(path) = path.filter(|path| !path.exists()) else {
        return Ok(cx.config.clone());
    };
    let together = home.state().policy.research;
    let research = match args.research {
        Some(research) => research,
        None if cx.config.policy.research.enable => true,
        None => together && crate::commands::init::agrees_to_research(args.json, true)?,
    };
    crate::commands::init::write_new(&path, research, args.name.as_deref())?;
    if !args.json {
        let (path, state) = (path.display(), if research { "on" } else { "off" });
        note(format!(
            "wrote {path}: distributed inference is {state} on this machine; enable = {} under [policy.research] changes that",
            !research
        ));
    }
    Ok(Loaded::load(cx.global.config.as_deref(), &cx.global.set)?.config)
}

fn report(
    args: &JoinArgs,
    level: Level,
    home: &Home,
    joined: Option<Joined>,
    config: &Config,
) -> Result<String, Failure> {
    let state = home.state();
    let (name, members) = (&state.name, state.members().count());
    let research = config.policy.research.enable;
    if args.json {
        let ids = |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect::<Vec<_>>();
        let joined = joined.as_ref();
        let asked = joined.map(|joined| {
            let mut asked = vec![joined.by];
            asked.extend(&joined.others.from);
            ids(&asked)
        });
        print_json(&json!({
            "community": home.log.community().to_string(),
            "name": name,
            "level": level,
            "members": members,
            "research": research,
            "joined_now": joined.is_some(),
            "seconds": joined.map(|joined| joined.took.as_secs_f64()),
            "asked": asked,
            "kept_back": joined.map(|joined| ids(&joined.others.revoked)),
            "strange_to": joined.map(|joined| ids(&joined.others.unknown_to)),
        }))?;
        return Ok(next_step(level, research, state.policy.research));
    }
    let how = match &joined {
        Some(joined) => format!("joined {name:?} in {:.1} s", joined.took.as_secs_f64()),
        None => format!("this node is in {name:?} already"),
    };
    print(format!("{how}\nlevel    {level}\nmembers  {members}\n"))?;
    if let Some(Joined { by, others, .. }) = &joined {
        let label = |node: &NodeId| state.label(node, now_ms());
        let by = label(by);
        if let Some(other) = others.unknown_to.first() {
            let advice = match others.from.first() {
                None => "If `hearthnet status` finds no other member either, run `hearthnet community leave` and join with a code from another member".to_owned(),
                Some(one) => format!("{} knows this node as a member", label(one)),
            };
            note(format!(
                "{} does not know this node as a member: it has not received the event yet, or {by}, which admitted this node, was revoked. {advice}",
                label(other)
            ));
        } else if others.from.is_empty() {
            note(format!(
                "only {by} could be asked about the community. If it withheld events, such as a revocation, the next member that this node meets sends them"
            ));
        }
        for node in &others.revoked {
            note(format!(
                "{} was revoked: other members report it, {by} did not",
                label(node)
            ));
        }
    }
    Ok(next_step(level, research, state.policy.research))
}

struct Joined {
    took: Duration,
    /// Node that admitted this one.
    by: NodeId,
    others: SecondOpinion,
}

/// Recommends the next command for a member of this level.
fn next_step(level: Level, here: bool, together: bool) -> String {
    match (here, together, level) {
        (_, false, _) => "next: an anchor switches distributed inference on with `hearthnet community policy --research on`; until then no layers are served".to_owned(),
        (false, true, _) => "next: enable = true under [policy.research] in the configuration (`hearthnet config show` names the file) switches distributed inference on; until then `hearthnet chat --local \"...\"` works here".to_owned(),
        (true, true, Level::Member) => "next: `hearthnet chat \"...\"`".to_owned(),
        (true, true, _) => "next: `hearthnet up` serves layers of the community's models (`hearthnet model list`); `hearthnet chat \"...\"` asks, on any member".to_owned(),
    }
}

struct Search<'a> {
    dir: PathBuf,
    key: Arc<NodeKey>,
    request: JoinRequest,
    log: EventLog,
    config: &'a Config,
    quiet: bool,
    /// Only one node is asked at a time: if several admit the same node, only one admission takes
    /// effect.
    asking: Arc<Semaphore>,
}

/// Error of one address.
enum NotAdmitted {
    Failed(JoinFailure),
    Unreachable(ConnectError),
}

/// Assessment of a refusal.
struct Refusal {
    /// Significance: the most significant refusal is reported.
    weight: u8,
    /// Progress message while the search continues.
    said: String,
    /// Error of the search if no node admits.
    failure: Failure,
    /// Deadline that the refusal sets for the rest of the search.
    until: Option<Instant>,
}

impl Search<'_> {
    fn say(&self, line: impl Into<Styled>) {
        if !self.quiet {
            note(line);
        }
    }

    /// Returns the node that admitted this one.
    async fn run(&self, invite: &Invite, wait: Duration) -> Result<NodeId, Failure> {
        let own = self.key.id();
        let settings = discovery_settings(self.config, own, invite.community());
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
        let transport = self.config.transport();
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
                    // Marks the address as busy with a time in the future, so that it is not tried
                    // twice.
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
                        Ok(by) => break Ok(by),
                        Err(why) => why,
                    };
                    let refusal = Refusal::of(address, &why, (started, wait), &self.dir);
                    deadline = refusal.until.map_or(deadline, |until| deadline.min(until));
                    // A refusal is more significant than no answer.
                    if last.as_ref().is_none_or(|last| last.weight <= refusal.weight) {
                        last = Some(refusal);
                    }
                }
                _ = changes.changed() => {}
                () = tokio::time::sleep(Duration::from_millis(250).min(deadline - now)) => {}
            }
            if reported.elapsed() >= REPORT {
                reported = Instant::now();
                let last = last.as_ref().map_or("no answer yet", |last| &last.said);
                self.say(format!("still looking; {last}"));
            }
        };
        running.abort_all();
        discovery.shutdown().await;
        outcome
    }
}

/// Connects to one address and requests admission. Returns the node that admitted this one.
async fn attempt(
    address: SocketAddr,
    identity: &Identity,
    config: hearthnet_transport::Config,
    key: Arc<NodeKey>,
    request: JoinRequest,
    log: EventLog,
    asking: &Semaphore,
) -> Result<NodeId, NotAdmitted> {
    let socket = connect_path(&address.to_string(), identity, None, &bus_rule(), &config)
        .await
        .map_err(NotAdmitted::Unreachable)?;
    let from = socket.peer();
    let client = Client::new(socket, key);
    // Connects to all addresses at once, but asks one at a time, in the order of connection.
    let Ok(turn) = asking.acquire().await else {
        return Err(NotAdmitted::Failed(JoinFailure::NotAdmitted));
    };
    let asked = join_through(&client, from, &request, &log, |_| {});
    let asked = tokio::time::timeout(ADMISSION_TIMEOUT, asked).await;
    let late = "it did not answer in time; other nodes are asked";
    let late = JoinFailure::Refused(CallError::new(Code::BUSY, late));
    let asked = asked.unwrap_or(Err(late));
    if asked.is_ok() {
        // Keeps the permit, so that no other node is asked before the waiting tasks are aborted.
        turn.forget();
    }
    asked.map(|_| from).map_err(NotAdmitted::Failed)
}

impl Refusal {
    /// Assesses the answer of `address` to a search that started at `began` and lasts for `wait`.
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
                Some(began + wait.min(AFTER_REFUSAL)),
                fail(format!(
                    "the node at {address} says that this machine's key was revoked"
                ))
                .code("revoked")
                .hint(format!(
                    "a revoked key cannot rejoin: move {} away, and join again with a new code, which makes a new key",
                    dir.join(NODE_KEY).display()
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
                .hint("a trusted member or an anchor must be running to admit a node"),
            ),
            // The node refuses strangers, so no invite is open there.
            Unreachable(error) if error.code() == Some(CloseCode::Unauthorized) => (
                1,
                Some(began + wait.min(AFTER_REFUSAL)),
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

/// Error if no node was found; `last` describes the last attempt.
fn nobody(wait: Duration, last: &str) -> Failure {
    let time = wait.as_secs();
    failure!(Community, "no node of the community was found in {time} s{last}")
        .code("unreachable")
        .hint("is `hearthnet up` running where the code was made, on the same network, and can this machine reach it?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_step_fits_the_level_and_the_settings() {
        for level in [Level::Member, Level::Trusted, Level::Anchor] {
            assert!(next_step(level, true, false).contains("policy --research on"));
            assert!(next_step(level, false, true).contains("[policy.research]"));
            let serves = next_step(level, true, true).contains("`hearthnet up`");
            assert_eq!(serves, level >= Level::Trusted);
        }
    }
}
