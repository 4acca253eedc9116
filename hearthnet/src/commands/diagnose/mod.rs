//! `hearthnet diagnose`: recent events of all reachable nodes on one timeline.
//!
//! Every running node keeps a flight record (`hearthnet_bus::flight`). It reports the record to
//! trusted members and to programs on its own machine. A standalone host reports it to its owner,
//! and to each caller the caller's own events.
//!
//! This command asks all nodes at once, each with a limit of time and size. A node that cannot be
//! asked is listed with the reason. [`hearthnet_bus::flight::merge`] builds the timeline.

mod flight_report;

use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::iter;
use hearthnet_bus::calls::{CallError, Client, Code};
use hearthnet_bus::flight::{self, Answer, Entry, PipelineId};
use hearthnet_bus::log::Level;
use hearthnet_bus::node::{Node, bus_rule};
use hearthnet_bus::{Capability, NodeId, NodeKey};
use hearthnet_orchestrator::coverage::by_model;
use hearthnet_transport::{CloseCode, Config as Transport, ConnectError, connect_path};
use serde_json::json;

use self::flight_report::Asked;
use crate::answering::local_service::running_in;
use crate::cli::args::{DiagnoseArgs, Global};
use crate::cli::{Failure, Kind, block_on, failure, note, print, print_json};
use crate::config::{Config, Context};
use crate::home::{Home, now_ms};
use crate::hosting::cards;
use crate::models::text_disagreement;
use crate::node::{NODE_FLIGHT, Running, find_home, local_api, with_synced_node};

/// Time limit for one node, from the connection to its last page.
const PER_NODE: Duration = Duration::from_secs(15);
/// Time limit to connect to one address.
const PER_ADDRESS: Duration = Duration::from_secs(3);
const MAX_ADDRESSES: usize = 6;
const AT_ONCE: usize = 16;

pub(crate) fn run(args: &DiagnoseArgs, cx: &Context) -> Result<(), Failure> {
    let home = find_home(cx)?;
    let dir = cx.global.dir()?;
    let age_ms = u64::try_from(args.since.as_millis()).unwrap_or(u64::MAX);
    let (nodes, isolation) = block_on(async {
        let mut nodes = here(&dir, &cx.global, age_ms).await?;
        let running = Running::ask(&dir, &json!({})).await;
        let named = args.shard.iter();
        let named = named.map(|host| (host.node, vec![host.endpoint.clone()]));
        let mut others: Vec<Target> = named.collect();
        if let Some(home) = &home {
            others.extend(members(home, &cx.config).await?);
        }
        if !others.is_empty() {
            let key = Arc::new(cx.global.node_key()?);
            nodes.extend(elsewhere(others, &key, &cx.config.transport(), age_ms).await);
        }
        Ok((nodes, running.map(|running| running.isolation)))
    })?;
    let nodes = each_run_once(nodes);
    if nodes.is_empty() {
        return Err(
            Failure::new(Kind::Host, "no node runs here, and there is no other node to ask")
                .code("no_node")
                .hint("`hearthnet serve` and `hearthnet shard serve` keep a record while they run; --shard names a standalone host"),
        );
    }

    let answers: Vec<(NodeId, Answer)> = nodes
        .iter()
        .filter_map(|asked| Some((asked.node, asked.answer.as_ref().ok()?.clone())))
        .collect();
    let since_us = now_ms().saturating_sub(age_ms).saturating_mul(1000);
    let mut line = flight::merge(&answers);
    // Another node may send older events than requested.
    line.retain(|entry| entry.at_us >= since_us);
    if let Some(wanted) = &args.pipeline {
        line = flight::of_pipeline(&line, find(&line, wanted)?);
    }
    let state = home.as_ref().map(Home::state);
    let state = state.as_deref();
    if !args.json {
        print(flight_report::as_text(&nodes, &line, state))?;
        if let Some(isolation) = isolation {
            note(format!("sandbox of the node here: {isolation}"));
        }
        for card in cards::cards() {
            note(format!("graphics card here: {card}"));
        }
        if let Some(state) = state {
            let models = by_model(state.shards(now_ms()), |_| true);
            let told = models
                .iter()
                .filter_map(|model| text_disagreement(model, state, now_ms()));
            told.for_each(|text| note(format!("warning: {text}")));
        }
    }
    if answers.is_empty() {
        let asked = flight_report::as_json(&nodes, &line, state);
        return Err(nobody_told(home.as_ref()).beside(asked));
    }
    if let Some(Err(_)) = home.as_ref().map(|home| home.require(Level::Trusted, "")) {
        note("this node is a member; other nodes report their records to trusted nodes only");
    }
    match args.json {
        true => print_json(&flight_report::as_json(&nodes, &line, state)),
        false => Ok(()),
    }
}

/// Error if no node sent a record. The reason of each node has been printed before.
fn nobody_told(home: Option<&Home>) -> Failure {
    match home.map(|home| home.require(Level::Trusted, "read the records of other nodes")) {
        Some(Err(refused)) => refused,
        _ => Failure::new(Kind::Host, "no node answered")
            .code("no_record")
            .hint("the reason is listed beside each node"),
    }
}

/// Keeps the first answer of each process run: a node may be asked at two addresses.
fn each_run_once(mut nodes: Vec<Asked>) -> Vec<Asked> {
    let mut seen = HashSet::new();
    nodes.retain(|asked| match &asked.answer {
        Ok(answer) => seen.insert((asked.node, answer.page.run)),
        Err(_) => true,
    });
    nodes
}

/// Finds the pipeline whose id is, or ends with, `wanted`.
fn find(line: &[Entry], wanted: &str) -> Result<PipelineId, Failure> {
    let wanted = wanted.trim().to_ascii_uppercase();
    let found: BTreeSet<PipelineId> = line
        .iter()
        .filter_map(|entry| entry.pipeline)
        .filter(|id| !wanted.is_empty() && id.to_string().ends_with(&wanted))
        .collect();
    let fail = |what: &str| {
        failure!(BadRequest, "{what} pipeline ends with {wanted:?}")
            .hint("`hearthnet diagnose` shows the ends of ids, `--json` whole ones; --since looks further back")
    };
    match (found.first(), found.len()) {
        (Some(id), 1) => Ok(*id),
        (None, _) => Err(fail("the id of no")),
        _ => Err(fail("the id of more than one")),
    }
}

/// Record of the node that runs on this data directory.
async fn here(dir: &Path, global: &Global, age_ms: u64) -> Result<Vec<Asked>, Failure> {
    let mut nodes = Vec::new();
    for dir in running_in(dir) {
        let asking = async {
            let client = Client::connect_local(&dir).await?;
            ask(&client, NODE_FLIGHT, age_ms).await
        };
        nodes.push(Asked {
            node: global.node_key()?.id(),
            here: true,
            answer: in_time(asking).await,
        });
    }
    Ok(nodes)
}

/// Node, and its candidate addresses, best first.
type Target = (NodeId, Vec<String>);

async fn members(home: &Home, config: &Config) -> Result<Vec<Target>, Failure> {
    home.level()?;
    // A node that runs here keeps the log in sync and knows the members' addresses.
    with_synced_node(home, config, async |guest| {
        let running = Running::ask(&home.dir, &json!({})).await;
        let own = home.key.id();
        let state = home.state();
        let others = state.members().map(|(node, _)| *node);
        let others = others.filter(|node| *node != own);
        let target = |node| (node, addresses(home, guest, running.as_ref(), node));
        Ok(others.map(target).collect())
    })
    .await
}

async fn elsewhere(
    targets: Vec<Target>,
    key: &Arc<NodeKey>,
    transport: &Transport,
    age_ms: u64,
) -> Vec<Asked> {
    let name = &Capability::diagnose().to_string();
    let asked = iter(targets).map(|(node, addresses)| async move {
        let asking = async {
            let client = connect(node, &addresses, key, transport).await?;
            ask(&client, name, age_ms).await
        };
        Asked {
            node,
            here: false,
            answer: in_time(asking).await,
        }
    });
    let mut nodes: Vec<Asked> = asked.buffer_unordered(AT_ONCE).collect().await;
    nodes.sort_by_key(|asked| asked.node);
    nodes
}

async fn in_time(
    asking: impl Future<Output = Result<Answer, CallError>>,
) -> Result<Answer, CallError> {
    match tokio::time::timeout(PER_NODE, asking).await {
        Ok(answer) => answer,
        Err(_) => Err(CallError::new(
            Code::TIMEOUT,
            format!("its record did not arrive within {} s", PER_NODE.as_secs()),
        )),
    }
}

async fn ask(client: &Client, capability: &str, age_ms: u64) -> Result<Answer, CallError> {
    let asked = flight::now();
    let stream = local_api::call(client, capability, &flight::params(Some(age_ms)))?;
    Answer::collect(asked, stream).await
}

/// Candidate addresses of a member, best first.
fn addresses(
    home: &Home,
    guest: Option<&Node>,
    running: Option<&Running>,
    node: NodeId,
) -> Vec<String> {
    let (state, now) = (home.state(), now_ms());
    let linked = running.into_iter().flat_map(|running| &running.peers);
    let linked = linked
        .filter(|peer| peer.node == node)
        .map(|peer| peer.endpoint.clone());
    let shards = state.shards(now).filter(|advert| advert.author == node);
    let shards = shards.map(|advert| advert.descriptor.endpoint.clone());
    let discovered = guest.map_or_else(Vec::new, |guest| guest.discovery().endpoints(&node));
    let mut seen = BTreeSet::new();
    linked
        .chain(state.endpoints_of(&node, now).to_vec())
        .chain(shards)
        .filter_map(|text| text.parse().ok())
        .chain(discovered)
        .filter(|address: &SocketAddr| seen.insert(*address))
        .take(MAX_ADDRESSES)
        .map(|address| address.to_string())
        .collect()
}

/// Connects to the first address at which the node answers.
async fn connect(
    node: NodeId,
    addresses: &[String],
    key: &Arc<NodeKey>,
    transport: &Transport,
) -> Result<Client, CallError> {
    let unreachable =
        |why: &dyn std::fmt::Display| CallError::new(Code::UNREACHABLE, why.to_string());
    let identity = key.identity().map_err(|error| unreachable(&error))?;
    let mut last = CallError::new(Code::UNREACHABLE, "its address is unknown");
    for at in addresses {
        let (expected, rule) = (Some(node), bus_rule());
        let connecting = connect_path(at, &identity, expected, &rule, transport);
        match tokio::time::timeout(PER_ADDRESS, connecting).await {
            Ok(Ok(socket)) => return Ok(Client::new(socket, Arc::clone(key))),
            Ok(Err(error)) => last = CallError::new(code_of(&error), format!("{at}: {error}")),
            Err(_) => {
                last = unreachable(&format!(
                    "{at} did not answer in {} s",
                    PER_ADDRESS.as_secs()
                ));
            }
        }
    }
    Err(last)
}

/// Error code that distinguishes a refusal from an unreachable node.
fn code_of(error: &ConnectError) -> Code {
    let code = match error {
        ConnectError::NotServed => return Code::NOT_FOUND,
        ConnectError::Refused { .. }
        | ConnectError::IdentityMismatch { .. }
        | ConnectError::Closed(_) => error.code(),
        _ => None,
    };
    code.map(CloseCode::as_str)
        .and_then(Code::parse)
        .unwrap_or(Code::UNREACHABLE)
}
