//! Caller over hosts that inspect received rows or change returned rows, for attacks on row
//! contents. The model is a small one, in this process.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::{EventLog, Finding};
use hearthnet_bus::node::Connections;
use hearthnet_bus::{Descriptor, NodeId, NodeKey};
use hearthnet_engine::Head;
use hearthnet_files::magnitude::Band;
use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_files::{ModelFile, WeightsId};
use hearthnet_orchestrator::chat::{
    AnswerOptions, ChatRequest, Conversation, Done, Frame, Prompt, TextModel, TurnOptions,
};
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::health::{AuditCounts, ShardHealth, SharedHealth, Standing};
use hearthnet_orchestrator::hosts::{
    Choice, CommunityHosts, HostSource, Links, RoutedSpan, Search,
};
use hearthnet_orchestrator::link::{HostAddr, HostLink};
use hearthnet_orchestrator::private_layers::PrivateLayers;
use hearthnet_orchestrator::router::{PolicyName, Speeds};
use hearthnet_orchestrator::sharded::{ModelOnWire, PumpSettings, ShardedBackend, recompute};
use hearthnet_orchestrator::{Cancel, ChatError};
use hearthnet_shard::{RunningHost, ServeConfig, ShardHost};
use hearthnet_testkit::{Tamper, TamperedSource, TinyLlama, one_thread};
use hearthnet_tokens::Tokenizer;
use hearthnet_transport::{Code, Config};
use tokio::runtime::Handle;

use crate::{Findings, HarnessError, Result};

const LAYERS: u32 = 4;
const MODEL: &str = "tiny-tampered";
/// Tokens of the question.
pub(crate) const PROMPT: u32 = 40;
/// Tokens of the answer.
pub(crate) const TOKENS: u32 = 12;

/// Longest wait for the result of an audit, and the interval between looks at it.
pub(crate) const AUDIT_TIMEOUT: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Leaves the rows of a host as they are.
pub(crate) fn unchanged() -> Tamper {
    Box::new(|_| {})
}

/// Result of a question.
pub(crate) struct Asked {
    pub(crate) done: Done,
    /// Codes for which the caller dropped hosts, separated by spaces.
    pub(crate) left: String,
    /// Time until it dropped the first one.
    after: Option<Duration>,
}

impl Asked {
    /// The caller must have dropped the host that `lied`, with this code, and the answer must be
    /// the honest one.
    pub(crate) fn corrected(
        &self,
        found: &mut Findings,
        what: &str,
        code: &str,
        lied: bool,
        honest: &Asked,
    ) {
        let why = format!("{what}: why the host is dropped");
        found.check(why, code, &self.left, self.left == code && lied);
        if let Some(after) = self.after {
            found.detected(after);
        }
        let same = self.done.token_ids == honest.done.token_ids;
        found.holds(format!("{what}: the same answer"), "yes", same);
    }
}

/// Fixed set of hosts with open sessions.
#[derive(Clone)]
struct Connected {
    links: Vec<Arc<HostLink>>,
    /// See [`Hosts::order`]. Each host with all others.
    order: Vec<(NodeId, BTreeSet<NodeId>)>,
    choice: Choice,
}

impl HostSource for Connected {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        for (first, others) in &self.order {
            let alone = Search {
                layers: search.layers.clone(),
                exclude: &(search.exclude | others),
                ..*search
            };
            if !search.exclude.contains(first)
                && let Ok(route) = self.choice.among(&self.links, &alone)
            {
                return Ok(route);
            }
        }
        self.choice.among(&self.links, search)
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn fork(&self) -> Option<Box<dyn HostSource>> {
        Some(Box::new(self.clone()))
    }
}

/// Hosts, the sessions of one caller with them, and the caller's health records of them.
pub(crate) struct Hosts {
    caller: NodeKey,
    running: Vec<RunningHost>,
    addrs: Vec<HostAddr>,
    links: Vec<Arc<HostLink>>,
    health: SharedHealth,
    /// Hosts of all layers. Routes use the first of them that is there and not excluded.
    pub(crate) order: Vec<NodeId>,
}

/// Small model, and the caller's side of it.
pub(crate) struct Fleet {
    runtime: Handle,
    file: Arc<ModelFile>,
    model: ModelOnWire,
    pub(crate) text: TextModel,
    /// Last layers that the caller computes itself.
    pub(crate) private_last: u32,
    pub(crate) pump: PumpSettings,
}

impl Hosts {
    pub(crate) fn addrs(&self) -> Vec<HostAddr> {
        self.addrs.clone()
    }

    fn others(&self, first: NodeId) -> BTreeSet<NodeId> {
        let nodes = self.addrs.iter().map(|addr| addr.node);
        nodes.filter(|node| *node != first).collect()
    }

    /// Sessions of the caller with the hosts.
    pub(crate) fn links(&self) -> &[Arc<HostLink>] {
        &self.links
    }

    /// Evidence that audits of the caller find from now on.
    pub(crate) fn evidence(&self) -> Receiver<Evidence> {
        let (sender, evidence) = channel();
        // The receiver is gone if the attack has ended.
        let accuse = move |evidence| drop(sender.send(evidence));
        self.health.on_evidence(Box::new(accuse));
        evidence
    }

    /// Waits until audits have had more results about a host's answers than `before`, and returns
    /// their number.
    pub(crate) fn audited(&self, host: NodeId, before: u64) -> Result<u64> {
        let until = Instant::now() + AUDIT_TIMEOUT;
        loop {
            let all = self.health().into_iter();
            let of_host = all.filter(|one| one.host == host).map(|one| one.audits);
            let results =
                |audits: AuditCounts| audits.confirmed + audits.mismatches + audits.not_auditable;
            let now = of_host.map(results).sum();
            if now > before {
                return Ok(now);
            }
            if Instant::now() > until {
                return Err(HarnessError::victim("no audit has had a result"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Returns whether the caller holds nothing against a host.
    pub(crate) fn is_good(&self, host: NodeId) -> bool {
        let mut of_host = self.health().into_iter().filter(|one| one.host == host);
        of_host.all(|one| one.standing == Standing::Good)
    }

    /// Health records that the caller keeps of the hosts.
    pub(crate) fn health(&self) -> Vec<ShardHealth> {
        self.health.all()
    }
}

impl Fleet {
    /// Fleet over the default tiny model. `band` limits the magnitude of rows that hosts return.
    pub(crate) fn new(runtime: Handle, band: Option<Band>) -> Result<Self> {
        let tiny = TinyLlama {
            layers: LAYERS,
            ..TinyLlama::default()
        };
        Self::of(&tiny, MODEL, runtime, band)
    }

    /// Fleet over another model; `name` is its id on its hosts.
    pub(crate) fn of(
        tiny: &TinyLlama,
        model_id: &str,
        runtime: Handle,
        band: Option<Band>,
    ) -> Result<Self> {
        let file = Arc::new(tiny.file());
        let weights = file.manifest(&mut |_, _| {}).weights_id();
        let bands = band.map(|band| vec![band; tiny.layers as usize]);
        let text = TextModel {
            tokenizer: Tokenizer::from_gguf(file.gguf())?,
            template: None,
            head: Head::load(&file, &one_thread())?.into(),
            context: file.spec().context,
            pooling: file.pooling(),
            sampling: SamplingChoice::GREEDY,
        };
        Ok(Self {
            runtime,
            model: ModelOnWire::new(model_id, weights, file.spec(), bands),
            file,
            text,
            private_last: 0,
            pump: PumpSettings {
                audit_share: 0.0,
                ..PumpSettings::default()
            },
        })
    }

    /// Model identity that hosts must announce.
    pub(crate) fn model(&self) -> ModelOnWire {
        self.model.clone()
    }

    pub(crate) fn file(&self) -> &ModelFile {
        &self.file
    }

    pub(crate) fn shared_file(&self) -> Arc<ModelFile> {
        Arc::clone(&self.file)
    }

    /// Descriptor of a host that serves all layers.
    pub(crate) fn descriptor(&self, host: NodeId) -> Descriptor {
        let (model, layers) = (&self.model, (0, self.model.layers.saturating_sub(1)));
        Descriptor {
            shard_id: Descriptor::shard_id(&model.model_id, layers.0, layers.1),
            model_id: model.model_id.clone(),
            weights_sha256: model.weights.to_string(),
            layer_range: layers,
            total_layers: model.layers,
            vram_required_mb: 1,
            weights_mb: 1,
            kv_mb: 1,
            max_concurrent_streams: 8,
            host,
            endpoint: "127.0.0.1:1".into(),
            advertised_at: 1,
            boundary_dtype: model.boundary.descriptor_name().into(),
            arithmetic: "canonical-1".into(),
            ms_per_token: 0.0,
            queue_depth: 0,
            software: "attacker".into(),
        }
    }

    /// Limits the magnitude of rows, by one band for each layer's output.
    pub(crate) fn set_bands(&mut self, bands: Vec<Band>) {
        self.model.bands = Some(bands);
    }

    /// Finding about evidence, from the rows that layers `lo` to `hi` of the right file compute.
    pub(crate) fn finding(&self, evidence: &Evidence, (lo, hi): (u32, u32)) -> Result<Finding> {
        let boundary = self.model.boundary;
        let mut values = Vec::new();
        boundary.decode(&evidence.rows, &mut values)?;
        let computed = recompute(&self.file, lo..hi + 1, &one_thread(), &values)?;
        let mut rows = Vec::new();
        boundary.encode(&computed, &mut rows);
        let row_bytes = self.width() * boundary.bytes_per_value();
        Ok(evidence.finding(&rows, row_bytes))
    }

    /// Values per row.
    pub(crate) fn width(&self) -> usize {
        self.model.rows.width as usize
    }

    /// Rows of the embedding table, concatenated.
    pub(crate) fn table(&self) -> Result<Vec<f32>> {
        let mut table = Vec::new();
        let tokens: Vec<u32> = (0..self.file.spec().vocab).collect();
        self.text.head.embed(&tokens, &mut table)?;
        Ok(table)
    }

    /// Asks one question over hosts that tamper in these ways, each serving all layers. The caller
    /// computes the first `private` layers itself.
    pub(crate) fn ask(&self, private: u32, tampers: Vec<Tamper>) -> Result<Asked> {
        self.ask_over(&self.new_hosts(tampers)?, private, TOKENS)
    }

    /// Hosts that tamper in these ways, each serving all layers, for a new caller.
    pub(crate) fn new_hosts(&self, tampers: Vec<Tamper>) -> Result<Hosts> {
        let with_key = |tamper| Ok((NodeKey::generate()?, tamper));
        let hosts: Result<Vec<_>> = tampers.into_iter().map(with_key).collect();
        self.hosts(NodeKey::generate()?, hosts?)
    }

    /// Hosts with these keys and ways to tamper, each serving all layers, for one caller.
    pub(crate) fn hosts(&self, caller: NodeKey, hosts: Vec<(NodeKey, Tamper)>) -> Result<Hosts> {
        let with_file = |(key, tamper)| (key, self.shared_file(), tamper);
        self.hosts_of(caller, hosts.into_iter().map(with_file).collect())
    }

    /// As [`Self::hosts`], each with the file that it computes with, whatever it claims.
    pub(crate) fn hosts_of(
        &self,
        caller: NodeKey,
        hosts: Vec<(NodeKey, Arc<ModelFile>, Tamper)>,
    ) -> Result<Hosts> {
        let (mut running, mut addrs, mut links) = (Vec::new(), Vec::new(), Vec::new());
        for (key, file, tamper) in hosts {
            let model = (self.model.model_id.as_str(), self.model.weights);
            let start = tampered_host(&file, model, caller.id(), &key, tamper);
            let host = self.runtime.block_on(start)?;
            let addr = HostAddr {
                endpoint: host.local_addr().to_string(),
                node: key.id(),
            };
            running.push(host);
            let link = HostLink::connect(&addr, &caller, Config::default());
            links.push(Arc::new(self.runtime.block_on(link)?));
            addrs.push(addr);
        }
        Ok(Hosts {
            caller,
            running,
            addrs,
            links,
            health: SharedHealth::default(),
            order: Vec::new(),
        })
    }

    /// Lets a host drain and end, as its owner does. Open streams have 10 s to move.
    pub(crate) fn leave(&self, hosts: &mut Hosts, host: NodeId) {
        let running = std::mem::take(&mut hosts.running).into_iter();
        let (leaving, rest) = running.partition(|one| one.node_id() == host);
        hosts.running = rest;
        let leaving: Vec<RunningHost> = leaving;
        for host in leaving {
            self.runtime.spawn(host.shutdown(Duration::from_secs(10)));
        }
    }

    /// Asks one question over these hosts, for an answer of `tokens` tokens.
    pub(crate) fn ask_over(&self, hosts: &Hosts, private: u32, tokens: u32) -> Result<Asked> {
        let (done, left, after) = self.ask_timed(hosts, private, &question(PROMPT, tokens))?;
        let done = done?;
        Ok(Asked { done, left, after })
    }

    /// Sends any request over these hosts. Returns the answer and the codes for which hosts were
    /// dropped.
    pub(crate) fn ask_for(
        &self,
        hosts: &Hosts,
        private: u32,
        request: &ChatRequest,
    ) -> Result<(Result<Done, ChatError>, String)> {
        let (done, left, _) = self.ask_timed(hosts, private, request)?;
        Ok((done, left))
    }

    /// As [`Self::ask_for`], with the time until the first host was dropped.
    fn ask_timed(
        &self,
        hosts: &Hosts,
        private: u32,
        request: &ChatRequest,
    ) -> Result<(Result<Done, ChatError>, String, Option<Duration>)> {
        let (cancel, mut left, mut after) = (Cancel::default(), Vec::<Code>::new(), None);
        let (mut conversation, now) = (self.conversation(hosts, private)?, Instant::now());
        let mut hear = |frame: &Frame| {
            if let Frame::ShardStatus { status, code, .. } = frame
                && status == "degraded"
            {
                after.get_or_insert_with(|| now.elapsed());
                left.extend(code.clone());
            }
        };
        let done = conversation.answer(&self.text, request, now, &cancel, &mut hear);
        let left: Vec<&str> = left.iter().map(Code::as_str).collect();
        Ok((done, left.join(" "), after))
    }

    /// Chat over these hosts. The caller computes the first `private` layers itself.
    pub(crate) fn conversation(&self, hosts: &Hosts, private: u32) -> Result<Conversation> {
        let (ends, rows) = ((private, self.private_last), self.pump.prefill_rows);
        let own = PrivateLayers::load(&self.file, MODEL, ends, rows, &one_thread())?;
        let model = ModelOnWire {
            hosted: own.hosted(),
            ..self.model.clone()
        };
        let choice = Choice {
            model,
            health: hosts.health.clone(),
            ..self.choice(hosts.caller.id())
        };
        let source = Connected {
            links: hosts.links.clone(),
            order: hosts
                .order
                .iter()
                .map(|first| (*first, hosts.others(*first)))
                .collect(),
            choice,
        };
        let backend = self.backend(Box::new(source))?;
        Ok(Conversation::new(own.around(Box::new(backend))?))
    }

    /// Chat over the hosts that a log names for a member.
    pub(crate) fn community(&self, caller: NodeKey, log: &EventLog) -> Result<Conversation> {
        let choice = self.choice(caller.id());
        let connections = async { Connections::watched(log.clone()) };
        let connections = self.runtime.block_on(connections);
        let links = Links::new(connections, choice.health.clone());
        let (runtime, key, config) = (self.runtime.clone(), Arc::new(caller), Config::default());
        let hosts = CommunityHosts::new(runtime, key, log.clone(), config, choice, links);
        Ok(Conversation::new(Box::new(self.backend(Box::new(hosts))?)))
    }

    /// Answer of a conversation to a question of `prompt` tokens.
    pub(crate) fn answer(
        &self,
        conversation: &mut Conversation,
        prompt: u32,
    ) -> Result<Done, ChatError> {
        let (request, cancel) = (question(prompt, TOKENS), Cancel::default());
        let (now, mut hear) = (Instant::now(), |_: &Frame| {});
        conversation.answer(&self.text, &request, now, &cancel, &mut hear)
    }

    /// How a node chooses among hosts of this model.
    pub(crate) fn choice(&self, caller: NodeId) -> Choice {
        Choice {
            model: self.model.clone(),
            max_shards: 4,
            own_id: caller,
            allow_self: false,
            exact: Exact::Require,
            policy: PolicyName::default(),
            speeds: Speeds::new(),
            health: SharedHealth::default(),
        }
    }

    /// Chat backend over these hosts.
    pub(crate) fn backend(&self, source: Box<dyn HostSource>) -> Result<ShardedBackend> {
        let (runtime, pump, cancel) = (self.runtime.clone(), self.pump.clone(), Cancel::default());
        Ok(ShardedBackend::open(runtime, source, pump, &cancel)?)
    }
}

/// Serves a whole model to one caller and tampers with its rows. `model` gives the id and the
/// weights.
pub(crate) async fn tampered_host(
    file: &Arc<ModelFile>,
    (model_id, weights): (&str, WeightsId),
    caller: NodeId,
    key: &NodeKey,
    tamper: Tamper,
) -> Result<RunningHost> {
    let source = TamperedSource::new(file, 0..file.spec().layers, tamper);
    let served = source.served(model_id, weights);
    let mut config = ServeConfig::new("127.0.0.1:0");
    config.admitted = vec![caller];
    Ok(ShardHost::start_on(config, key, served, source, &mut |_| {}).await?)
}

/// Runs work that blocks and observes, outside of the runtime's threads.
pub(crate) async fn blocking(
    found: &mut Findings,
    work: impl FnOnce(&Handle, &mut Findings) -> Result<()> + Send + 'static,
) -> Result<()> {
    let (runtime, mut heard) = (Handle::current(), Findings::default());
    let working = tokio::task::spawn_blocking(move || work(&runtime, &mut heard).map(|()| heard));
    found.observations.extend(working.await??.observations);
    Ok(())
}

/// Question of `prompt` tokens for an answer of `tokens` tokens. A longer prompt is an extension of
/// a shorter one.
pub(crate) fn question(prompt: u32, tokens: u32) -> ChatRequest {
    ChatRequest {
        prompt: Prompt::Tokens((3..3 + prompt).collect()),
        sampling: SamplerConfig::default(),
        max_tokens: Some(tokens),
        stop: Vec::new(),
        exact: None,
        grammar: None,
        turn: TurnOptions::default(),
        options: AnswerOptions::default(),
    }
}
