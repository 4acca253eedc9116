//! `hearthnet community join`: from a pasted code to a member with the community's log.
//!
//! Where to ask comes from the code's hints and from what mDNS says about the community;
//! whoever answers first and admits will do. All of it ends by a deadline.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::calls::Client;
use hearthnet_bus::discovery::{CommunityTag, Discovery};
use hearthnet_bus::invite::{Invite, JoinRequest};
use hearthnet_bus::joining::{JoinFailure, join_through};
use hearthnet_bus::log::{EventLog, Level};
use hearthnet_bus::node::bus_rule;
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_transport::{CloseCode, ConnectError, Identity, connect_path};
use serde_json::json;
use tokio::task::JoinSet;

use crate::args::{Global, JoinArgs};
use crate::commands::{node_key, print_bytes, print_json, runtime};
use crate::community::{Home, discard_unborn, display_name, log_failure, now_ms};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::output::note;

/// How long an address is left alone after it did not work.
const TRY_AGAIN: Duration = Duration::from_secs(3);
/// How long others may still admit after one node said that the invite is no good: whoever
/// said so may not be of the community at all.
const SECOND_OPINION: Duration = Duration::from_secs(3);
/// The same after a node let this one not even ask: it knows of no open invite, or not yet.
const SHUT_OUT: Duration = Duration::from_secs(10);
/// Most addresses tried at the same time; more than a LAN has nodes of one community.
const AT_ONCE: usize = 16;
/// How often a person hears that the search goes on.
const REPORT: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &JoinArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    let code = args.code.join("");
    let invite: Invite = code.parse().map_err(|e: hearthnet_bus::invite::InviteError| {
        Failure::new(Kind::Config, e.to_string())
            .code(e.code())
            .hint("the code is one line that begins with hearth1, as `hearthnet community invite` printed it")
    })?;
    if let Some(home) = Home::find(global)? {
        let state = home.state();
        if home.log.community() == invite.community() && state.level(&home.key.id()).is_some() {
            return report(args.json, &state.name, home.level()?, &home.log, None);
        }
        return Err(Failure::new(
            Kind::Community,
            format!("this node is in {:?} already", state.name),
        )
        .code("in_community")
        .hint("another community needs another node: --data-dir names another directory"));
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
    let dir = crate::paths::data_dir(global.data_dir.clone())?;
    let key = Arc::new(node_key(global)?);
    let name = display_name(args.name.as_deref(), config);
    let request = invite.request(key.id(), &name).map_err(|e| {
        Failure::new(Kind::Config, e.to_string()).hint("--name gives this node another name")
    })?;
    discard_unborn(&dir)?;
    let log = EventLog::prepare(&dir, invite.community()).map_err(|e| log_failure(&dir, &e))?;
    let runtime = runtime()?;
    let started = Instant::now();
    let search = Search {
        key,
        request,
        log: log.clone(),
        config,
        quiet: args.json,
    };
    let outcome = runtime.block_on(async {
        tokio::select! {
            outcome = search.run(&invite, args.wait) => outcome,
            _ = tokio::signal::ctrl_c() => {
                Err(Failure::new(Kind::Interrupted, "stopped; this node has not joined"))
            }
        }
    });
    runtime.shutdown_timeout(Duration::from_millis(500));
    match outcome {
        Ok(level) => {
            let state = log.state();
            report(args.json, &state.name, level, &log, Some(started.elapsed()))
        }
        Err(failure) => {
            drop((search, log));
            discard_unborn(&dir)?;
            Err(failure)
        }
    }
}

fn report(
    as_json: bool,
    name: &str,
    level: Level,
    log: &EventLog,
    took: Option<Duration>,
) -> Result<(), Failure> {
    let members = log.state().members().count();
    if as_json {
        return print_json(&json!({
            "community": log.community().to_string(),
            "name": name,
            "level": level,
            "members": members,
            "joined_now": took.is_some(),
            "seconds": took.map(|t| t.as_secs_f64()),
        }));
    }
    let how = match took {
        Some(took) => format!("joined {name:?} in {:.1} s", took.as_secs_f64()),
        None => format!("this node is in {name:?} already"),
    };
    print_bytes(format!("{how}\nlevel    {level}\nmembers  {members}\n").as_bytes())?;
    note(match level {
        Level::Member => "next: `hearthnet chat \"...\"`",
        _ => {
            "next: `hearthnet shard serve --model ... --layers auto`, and `hearthnet chat \"...\"` on any member"
        }
    });
    Ok(())
}

struct Search<'a> {
    key: Arc<NodeKey>,
    request: JoinRequest,
    log: EventLog,
    config: &'a Config,
    quiet: bool,
}

/// How one address answered.
enum Answer {
    Admitted(Level),
    Failed(JoinFailure),
    Unreachable(ConnectError),
}

impl Answer {
    fn is_refusal(&self) -> bool {
        match self {
            Self::Failed(_) => true,
            Self::Unreachable(error) => is_shut_out(error),
            Self::Admitted(_) => false,
        }
    }
}

/// Whether a node was there, and does not talk to strangers: no invite is open.
fn is_shut_out(error: &ConnectError) -> bool {
    error.code() == Some(CloseCode::Unauthorized)
}

impl Search<'_> {
    fn say(&self, line: impl AsRef<str>) {
        if !self.quiet {
            note(line);
        }
    }

    async fn run(&self, invite: &Invite, wait: Duration) -> Result<Level, Failure> {
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
        let mut last: Option<(SocketAddr, Answer)> = None;
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
                    let request = self.request.clone();
                    running.spawn(async move {
                        (
                            address,
                            attempt(address, &identity, config, key, request, log).await,
                        )
                    });
                }
            }
            let now = Instant::now();
            if now >= deadline {
                break Err(gave_up(last, wait, hints.is_empty()));
            }
            tokio::select! {
                Some(Ok((address, answer))) = running.join_next(), if !running.is_empty() => {
                    tried.insert(address, Instant::now());
                    match answer {
                        Answer::Admitted(level) => break Ok(level),
                        Answer::Failed(failure) if failure.is_final() => {
                            deadline = deadline.min(Instant::now() + SECOND_OPINION);
                            last = Some((address, Answer::Failed(failure)));
                        }
                        Answer::Unreachable(error) if is_shut_out(&error) => {
                            deadline = deadline.min(started + wait.min(SHUT_OUT));
                            if !matches!(last, Some((_, Answer::Failed(_)))) {
                                last = Some((address, Answer::Unreachable(error)));
                            }
                        }
                        // A refusal tells more than a silence.
                        Answer::Unreachable(_) if last.as_ref().is_some_and(|(_, a)| a.is_refusal()) => {}
                        answer => last = Some((address, answer)),
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
                        .map_or_else(|| "nobody answered yet".to_owned(), explain)
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
) -> Answer {
    let refused = |e| Answer::Failed(JoinFailure::Refused(e));
    let socket =
        match connect_path(&address.to_string(), identity, None, &bus_rule(), &config).await {
            Ok(socket) => socket,
            Err(error) => return Answer::Unreachable(error),
        };
    let Ok(from) = NodeId::try_from(socket.peer()) else {
        return Answer::Failed(JoinFailure::NotAdmitted);
    };
    let client = match Client::new(socket, key) {
        Ok(client) => client,
        Err(error) => return refused(error),
    };
    match join_through(&client, from, &request, &log, now_ms, |_| {}).await {
        Ok(level) => Answer::Admitted(level),
        Err(failure) => Answer::Failed(failure),
    }
}

fn explain((address, answer): &(SocketAddr, Answer)) -> String {
    match answer {
        Answer::Failed(failure) => format!("{address} answered: {failure}"),
        Answer::Unreachable(error) => format!("{address}: {error}"),
        Answer::Admitted(_) => String::new(),
    }
}

fn gave_up(last: Option<(SocketAddr, Answer)>, wait: Duration, no_hints: bool) -> Failure {
    match &last {
        Some((_, Answer::Failed(failure))) if failure.is_final() => {
            Failure::new(Kind::Community, failure.to_string())
                .code("bad_invite")
                .hint("ask for a new code with `hearthnet community invite`")
        }
        Some(last @ (_, Answer::Failed(_))) => Failure::new(
            Kind::Community,
            format!("no node of the community admitted this one in {} s; {}", wait.as_secs(), explain(last)),
        )
        .code("not_admitted")
        .hint("members that may admit are those that are trusted or anchors; one of them has to be running"),
        Some((address, Answer::Unreachable(error))) if is_shut_out(error) => Failure::new(
            Kind::Community,
            format!("the node at {address} has no open invite: this code was used up or withdrawn"),
        )
        .code("bad_invite")
        .hint("ask for a new code with `hearthnet community invite`"),
        other => Failure::new(
            Kind::Community,
            format!(
                "no node of the community was found in {} s{}",
                wait.as_secs(),
                other.as_ref().map_or_else(String::new, |last| format!("; {}", explain(last)))
            ),
        )
        .code("unreachable")
        .hint(if no_hints {
            "is `hearthnet serve` running where the code was made, on the same network?"
        } else {
            "is `hearthnet serve` running where the code was made, and can this machine reach it?"
        }),
    }
}
