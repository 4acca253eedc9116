//! Hosts for a chat, found in the community's log.
//!
//! Which hosts there are, the advertisements say; where one is, its advertisement, what it
//! says of itself and what discovery heard say; who it is, the TLS handshake proves; that
//! it lets this node in, its own grant says, which is asked for anew for each session.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearthnet_bus::calls::{Client, SHARD_SERVE, ShardGrant};
use hearthnet_bus::discovery::{Distance, Local};
use hearthnet_bus::log::{Advert, EventLog};
use hearthnet_bus::node::{Node, bus_rule};
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_orchestrator::ChatError;
use hearthnet_orchestrator::hosts::{Choice, HostSource, RoutedSpan, Search};
use hearthnet_orchestrator::link::{HostAddr, HostLink};
use hearthnet_orchestrator::router::{Candidate, RouteError, Span};
use hearthnet_transport::{Config, PeerKey, connect_path};
use serde_json::json;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::commands::OpenModel;
use crate::commands::chat::choice;
use crate::community::{Home, endpoints_of, label, now_ms};
use crate::config::Config as Settings;
use crate::failure::Failure;
use crate::layers::{missing, runs_text};
use crate::node::Lock;

/// How long one address of a host may take: connecting, the grant, the session.
const PER_ADDRESS: Duration = Duration::from_secs(5);
/// Most addresses that are tried of one host.
const MAX_ADDRESSES: usize = 6;
/// How long all addresses of a host may take together.
const MAX_CONNECT: Duration = Duration::from_secs(PER_ADDRESS.as_secs() * MAX_ADDRESSES as u64);
/// The same where somebody else does the work meanwhile, and waits for this.
const OPTIONAL: Duration = Duration::from_secs(1);

/// How long to wait for advertisements that close a gap: this node may have found the others
/// only now, or a host may be coming back.
const PATIENCE: Duration = Duration::from_secs(6);

/// A host that cannot be used and is known not to be within this time may be asked again.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Where else a node may be, as discovery knows.
pub(crate) type Places = Arc<dyn Fn(&NodeId) -> Vec<SocketAddr> + Send + Sync>;

/// Sessions with the hosts of a community, opened as routes need them.
pub(crate) struct CommunityHosts {
    /// Runs the connections.
    pub(crate) runtime: Handle,
    /// This node.
    pub(crate) key: Arc<NodeKey>,
    /// Its community's log, which something keeps even with the others.
    pub(crate) log: EventLog,
    /// What discovery knows.
    pub(crate) places: Places,
    /// Limits of the sessions.
    pub(crate) transport: Config,
    /// How to choose among them.
    pub(crate) choice: Choice,
    /// How long to wait for advertisements that close a gap: the log may only be coming.
    pub(crate) patience: Duration,
    /// Open sessions, which chats share.
    pub(crate) links: Links,
}

/// Sessions that chats share.
pub(crate) type Links = Arc<Mutex<Vec<Arc<HostLink>>>>;

/// What a chat needs of the community while it lasts: somebody who keeps the log even with
/// the others. Where a node runs on this machine, it does.
#[derive(Default)]
pub(crate) struct Visit(Option<Node>);

impl Visit {
    /// Starts looking for the others, unless a node here has found them already.
    pub(crate) async fn begin(home: &Home, config: &Settings) -> Result<Self, Failure> {
        if Lock::is_held(&home.dir) {
            return Ok(Self(None));
        }
        Ok(Self(Some(crate::node::visit(home, config).await?)))
    }

    /// The hosts of the community, for chats with `model`.
    pub(crate) fn hosts(
        &self,
        runtime: Handle,
        home: &Home,
        model: &OpenModel,
        config: &Settings,
    ) -> Result<CommunityHosts, Failure> {
        let node = self.0.clone();
        let places: Places = Arc::new(move |id: &NodeId| {
            node.as_ref()
                .map_or_else(Vec::new, |node| node.discovery().endpoints(id))
        });
        CommunityHosts::new(runtime, home, model, config, places, Links::default())
    }

    /// Says goodbye.
    pub(crate) async fn end(self) {
        if let Some(node) = self.0 {
            node.shutdown().await;
        }
    }
}

impl HostSource for CommunityHosts {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let (layers, exclude) = (&search.layers, search.exclude);
        let patience = if search.optional {
            Duration::ZERO
        } else {
            self.patience
        };
        let deadline = Instant::now() + patience;
        let mut changes = self.log.changes();
        // Hosts that could not be used in this search, and why the last of them could not.
        // Those that said so at once are asked again: a host that has just been started
        // listens before it serves.
        let mut unusable = exclude.clone();
        let mut resting = BTreeSet::new();
        let mut failure = None;
        loop {
            if search.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            changes.borrow_and_update();
            let mut passed_over = &unusable | &resting;
            self.links().retain(|link| {
                // It would refuse; its advertisement may be gone a moment later only.
                if link.is_leaving() {
                    passed_over.insert(link.descriptor().host.clone());
                }
                link.is_open()
            });
            let adverts: Vec<Advert> = self.log.state().shards(now_ms()).cloned().collect();
            let spans = match self.choose(&adverts, layers.clone(), &passed_over) {
                Ok(spans) => spans,
                Err(error) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(
                            failure.unwrap_or_else(|| self.explain(error, &adverts, exclude))
                        );
                    }
                    // Advertisements also expire without a change of the log.
                    let wait = left.min(Duration::from_millis(200));
                    let changed = async { timeout(wait, changes.changed()).await };
                    let _ = self.runtime.block_on(search.cancel.or(changed));
                    resting.clear();
                    continue;
                }
            };
            let asked = Instant::now();
            match self.open(&adverts, &spans, search) {
                Ok(route) => return Ok(route),
                Err((_, error @ ChatError::Cancelled)) => return Err(error),
                Err((host, error)) => {
                    let said_so = asked.elapsed() < AT_ONCE;
                    if said_so { &mut resting } else { &mut unusable }.insert(host);
                    failure = Some(error);
                }
            }
        }
    }
}

impl CommunityHosts {
    /// The hosts of `home`'s community.
    pub(crate) fn new(
        runtime: Handle,
        home: &Home,
        model: &OpenModel,
        config: &Settings,
        places: Places,
        links: Links,
    ) -> Result<Self, Failure> {
        Ok(Self {
            runtime,
            choice: choice(model, &home.key.id().to_string(), config),
            key: Arc::clone(&home.key),
            log: home.log.clone(),
            places,
            transport: config.transport()?,
            patience: PATIENCE,
            links,
        })
    }

    fn choose(
        &self,
        adverts: &[Advert],
        layers: RangeInclusive<u32>,
        exclude: &BTreeSet<String>,
    ) -> Result<Vec<Span>, RouteError> {
        let own = self.key.id();
        let local = Local::read(&[]);
        let candidates: Vec<Candidate> = adverts
            .iter()
            .map(|advert| Candidate {
                descriptor: advert.descriptor.clone(),
                hop_weight: match advert.descriptor.endpoint.parse() {
                    Ok(at) if local.distance(&at) <= Distance::Subnet => 0,
                    _ => 1,
                },
                is_self: advert.author == own,
            })
            .collect();
        self.choice.pick(&candidates, layers, exclude)
    }

    /// Sessions for the spans: those that are open, and new ones, all at once. An error names
    /// the host.
    fn open(
        &self,
        adverts: &[Advert],
        spans: &[Span],
        search: &Search<'_>,
    ) -> Result<Vec<RoutedSpan>, (String, ChatError)> {
        let mut tasks = Vec::new();
        for span in spans {
            let Some(advert) = adverts.get(span.candidate) else {
                continue;
            };
            let shard = &advert.descriptor.shard_id;
            let found = self
                .links()
                .iter()
                .find(|link| {
                    link.is_fresh()
                        && link.addr().node == advert.author
                        && link.descriptor().shard_id == *shard
                })
                .cloned();
            let task = match found {
                Some(link) => Err(link),
                None => {
                    let addresses = self.addresses(advert);
                    let (key, transport) = (Arc::clone(&self.key), self.transport.clone());
                    let (node, shard) = (advert.author, shard.clone());
                    Ok(self.runtime.spawn(async move {
                        connect(node, &shard, &addresses, &key, &transport).await
                    }))
                }
            };
            tasks.push((*span, advert, task));
        }
        let mut route = Vec::new();
        let mut failed = None;
        for (span, advert, task) in tasks {
            let link = match task {
                Err(link) => Ok(link),
                Ok(task) => match self.connected(task, search) {
                    Err(error) => return Err((advert.descriptor.host.clone(), error)),
                    Ok(Ok(link)) => {
                        let link = Arc::new(link);
                        self.links().push(Arc::clone(&link));
                        Ok(link)
                    }
                    Ok(Err(why)) => Err(why),
                },
            };
            match link {
                // A host that has moved to other layers since it advertised is of no use.
                Ok(link) if holds(&link, span.lo, span.hi) => route.push(RoutedSpan {
                    link,
                    lo: span.lo,
                    hi: span.hi,
                }),
                other => {
                    let why = other
                        .err()
                        .unwrap_or_else(|| "it serves other layers now".into());
                    let host = label(&self.log.state(), &advert.author);
                    failed.get_or_insert((
                        advert.descriptor.host.clone(),
                        ChatError::ShardUnavailable(format!(
                            "{host} serves layers {}-{} but cannot be used: {why}",
                            span.lo, span.hi
                        )),
                    ));
                }
            }
        }
        match failed {
            Some(failed) => Err(failed),
            None => Ok(route),
        }
    }

    /// Waits for a session that is being opened, as long as the search is worth it.
    fn connected(
        &self,
        mut task: JoinHandle<Result<HostLink, String>>,
        search: &Search<'_>,
    ) -> Result<Result<HostLink, String>, ChatError> {
        let limit = if search.optional {
            OPTIONAL
        } else {
            MAX_CONNECT
        };
        let opened = search.cancel.or(async { timeout(limit, &mut task).await });
        let opened = self.runtime.block_on(opened);
        // Nobody would use it.
        task.abort();
        Ok(match opened.ok_or(ChatError::Cancelled)? {
            Ok(Ok(link)) => link,
            Ok(Err(ended)) => Err(ended.to_string()),
            Err(_) => Err(format!("it did not answer in {} s", limit.as_secs())),
        })
    }

    fn links(&self) -> MutexGuard<'_, Vec<Arc<HostLink>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a host may be, the nearest first.
    fn addresses(&self, advert: &Advert) -> Vec<SocketAddr> {
        let state = self.log.state();
        let told = endpoints_of(&state, &advert.author, now_ms());
        let mut all: Vec<SocketAddr> = std::iter::once(&advert.descriptor.endpoint)
            .chain(&told)
            .filter_map(|text| text.parse().ok())
            .chain((self.places)(&advert.author))
            .collect();
        let local = Local::read(&[]);
        // Stable: of the same distance, what the host itself says comes first.
        all.sort_by_key(|address| local.distance(address));
        let mut seen = BTreeSet::new();
        all.retain(|address| seen.insert(*address));
        all.truncate(MAX_ADDRESSES);
        all
    }

    /// Why there is no route, in terms of the whole model.
    fn explain(
        &self,
        error: RouteError,
        adverts: &[Advert],
        exclude: &BTreeSet<String>,
    ) -> ChatError {
        let RouteError::Uncovered { .. } = error else {
            return error.into();
        };
        let weights = self.choice.model.weights.to_string();
        let own = self.key.id();
        let held: Vec<(u32, u32)> = adverts
            .iter()
            .filter(|a| self.choice.allow_self || a.author != own)
            .filter(|a| {
                a.descriptor.weights_sha256 == weights && !exclude.contains(&a.descriptor.host)
            })
            .map(|a| a.descriptor.layer_range)
            .collect();
        let community = &self.log.state().name;
        let model = &self.choice.model.model_id;
        let mut text = if held.is_empty() {
            format!("nobody in {community:?} serves {model}")
        } else {
            let missing = runs_text(&missing(self.choice.model.layers, &held));
            format!("nobody in {community:?} serves layers {missing} of {model}")
        };
        let own_serves = |a: &Advert| a.author == own && a.descriptor.weights_sha256 == weights;
        if !self.choice.allow_self && adverts.iter().any(own_serves) {
            text.push_str(
                ", and what this node serves itself does not count \
                 (research.distributed_inference.allow_self_as_shard is false)",
            );
        }
        ChatError::ShardUnavailable(text)
    }
}

fn holds(link: &HostLink, lo: u32, hi: u32) -> bool {
    let (first, last) = link.descriptor().layer_range;
    first <= lo && hi <= last
}

/// Tries the addresses in turn until one leads to the host and it grants a session.
async fn connect(
    node: NodeId,
    shard: &str,
    addresses: &[SocketAddr],
    key: &Arc<NodeKey>,
    transport: &Config,
) -> Result<HostLink, String> {
    let mut last = "it says nowhere where it is".to_owned();
    for address in addresses {
        match timeout(
            PER_ADDRESS,
            connect_at(node, shard, *address, key, transport),
        )
        .await
        {
            Ok(Ok(link)) => return Ok(link),
            Ok(Err(why)) => last = why,
            Err(_) => last = format!("{address} did not answer in {} s", PER_ADDRESS.as_secs()),
        }
    }
    Err(last)
}

async fn connect_at(
    node: NodeId,
    shard: &str,
    address: SocketAddr,
    key: &Arc<NodeKey>,
    transport: &Config,
) -> Result<HostLink, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let identity = key.identity().map_err(|e| text(&e))?;
    let endpoint = address.to_string();
    let expected = Some(PeerKey::from(node));
    let socket = connect_path(&endpoint, &identity, expected, &bus_rule(), transport)
        .await
        .map_err(|e| text(&e))?;
    let client = Client::new(socket, Arc::clone(key)).map_err(|e| text(&e))?;
    let capability = SHARD_SERVE.parse().map_err(|e| text(&e))?;
    let answer = client
        .call(&capability, &json!({ "shard_id": shard }))
        .map_err(|e| text(&e))?
        .result()
        .await
        .map_err(|e| text(&e))?;
    let grant: ShardGrant = serde_json::from_value(answer).map_err(|e| text(&e))?;
    let token = grant.token().ok_or("its grant is not base64url")?;
    let addr = HostAddr { endpoint, node };
    HostLink::connect_with(&addr, key, token, transport.clone())
        .await
        .map_err(|e| text(&e))
}
