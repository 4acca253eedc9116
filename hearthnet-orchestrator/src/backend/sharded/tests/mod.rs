//! Callers over scripted hosts: real sessions on loopback, plain arithmetic.

mod audits;
mod codes;
mod convicted;
mod forks;
mod receipts;
mod rewinds;
mod together;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use hearthnet_bus::receipt::{Claim, Inputs, Statement};
use hearthnet_bus::{Descriptor, NodeKey};
use hearthnet_engine::ARITHMETIC;
use hearthnet_files::spec::RowShape;
use hearthnet_files::{BoundaryDtype, WeightsId};
use hearthnet_transport::{
    Admission, CloseCode, Code, Config, Connection, DType, Hello, Identity, Listener, Message,
    NodeId, Receipt, Sender, Step, StepResult, StreamError, StreamOpen, StreamOpened, Truncate,
    Truncated, Want,
};
use parking_lot::{Mutex, MutexGuard};
use proptest::prelude::*;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::*;
use crate::backend::fallback::{LoadLocal, WithFallback};
use crate::backend::tests::{run_all, run_quietly, run_rows};
use crate::exact::{Arithmetics, Exact};
use crate::hosts::health::{FailureKind, ShardHealth, Standing};
use crate::hosts::link::{HostAddr, HostLink};
use crate::hosts::router::{PolicyName, Speeds};
use crate::hosts::{Choice, HostPool, Search};
use crate::tests::{descriptor, layer, node};

const LAYERS: u32 = 4;
const WIDTH: usize = 4;
const WEIGHTS: WeightsId = WeightsId([7; 32]);
/// Long enough for a loaded machine; reaching it is a failure.
const TIMEOUT: Duration = Duration::from_secs(60);

fn row(value: u32) -> [f32; WIDTH] {
    [0, 1, 2, 3].map(|n| (value + n) as f32)
}

fn rows(values: &[u32]) -> Vec<f32> {
    values.iter().flat_map(|value| row(*value)).collect()
}

/// Scripted action of a host at a step, instead of its answer or beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    /// Sends LEAVING, and answers.
    Leave,
    /// Preempts the stream.
    Preempt,
    /// Closes the session.
    Die,
    /// Never answers on this stream again.
    Mute,
    /// Ends the stream with a code.
    Refuse(&'static str),
    /// Ends the session with a code.
    End(CloseCode),
}

/// Wrong rows that no check of rows finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    /// A small change of the last row of each answer.
    Noise,
    /// All layers but the last one.
    SkipsLayer,
    /// Rows of an earlier answer, computed behind other rows.
    Yesterday,
}

/// First layer of a stream, and the states of all its layers.
type Layers = (u32, Vec<Vec<u32>>);

#[derive(Default)]
struct State {
    /// Keyed by session and stream.
    streams: BTreeMap<(usize, u32), Layers>,
    /// Actions by position of the step; each is done once.
    deeds: Vec<(u32, Deed)>,
    /// Codes with which the next streams are refused.
    refusals: Vec<&'static str>,
    /// Codes with which the next forks are refused.
    refused_forks: Vec<&'static str>,
    /// Streams without answers.
    mute: BTreeSet<(usize, u32)>,
    leaving: bool,
    /// Answers leave two at a time.
    pairs: bool,
    /// Change to the rows of every answer.
    spoils: Option<fn(&mut StepResult)>,
    lies: Option<Lie>,
    /// Change to every answer to STREAM_OPEN.
    misnames: Option<fn(&mut StreamOpened)>,
    /// If set, a stream returns to its length and to multiples of this number only.
    checkpoints: Option<u32>,
    /// Change to every answer to a truncation.
    misstates: Option<fn(&mut Truncated)>,
    /// Answers no truncation.
    ignores_truncation: bool,
    /// Sends an answer to a truncation that was not requested, once, before its next result.
    babbles: bool,
    /// Number of steps received.
    steps: u32,
    /// Number of streams opened.
    opened: u32,
    /// Positions requested when streams were opened or grown.
    asked: Vec<u32>,
    /// Lengths at which streams became idle.
    rests: Vec<u32>,
    /// Positions, rows and first layers of the steps received.
    received: Vec<(u32, Bytes, u32)>,
    /// Claims of streams, keyed as `streams`.
    books: BTreeMap<(usize, u32), Book>,
    /// Sends no receipts.
    unsigned: bool,
    /// Change to every receipt.
    forges: Option<fn(&mut Receipt)>,
    /// Messages received for closed streams.
    late: u32,
    sessions: Vec<Sender>,
}

/// Answers between two receipts of a puppet.
const RECEIPT_EVERY: u32 = 3;

/// Claims of a stream, as a host keeps them.
#[derive(Clone)]
struct Book {
    statement: Statement,
    inputs: Inputs,
    signed: u32,
}

impl State {
    /// Positions that a stream keeps when it has to return to `position`.
    fn kept(&self, stream: (usize, u32), position: u32) -> u32 {
        let held = self.streams.get(&stream).map(|(_, layers)| layers[0].len());
        match self.checkpoints {
            Some(every) if held > Some(position as usize) => position - position % every,
            _ => position,
        }
    }

    fn truncate(&mut self, session: usize, truncate: Truncate) -> Option<Truncated> {
        if self.ignores_truncation {
            return None;
        }
        let stream = (session, truncate.stream);
        let position = self.kept(stream, truncate.position);
        let (_, layers) = self.streams.get_mut(&stream)?;
        for layer in layers {
            layer.truncate(position as usize);
        }
        let mut truncated = Truncated {
            stream: truncate.stream,
            epoch: truncate.epoch,
            position,
        };
        if let Some(misstate) = self.misstates {
            misstate(&mut truncated);
        }
        Some(truncated)
    }

    fn begin_book(&mut self, host: NodeId, session: usize, open: &StreamOpen) {
        let source = open
            .fork
            .map(|fork| (fork, self.books.get(&(session, fork.stream))));
        let inputs = match source {
            Some((fork, Some(source))) => source.inputs.fork(fork.position),
            _ => Inputs::default(),
        };
        let statement = Statement {
            host,
            caller: caller_key().id(),
            weights: open.weights,
            layers: (open.lo, open.hi),
            arithmetic: ARITHMETIC.into(),
            stream: open.stream,
            epoch: open.epoch,
            claims: 0,
            chain: [0; 32],
        };
        let book = Book {
            statement,
            inputs,
            signed: 0,
        };
        self.books.insert((session, open.stream), book);
    }

    fn book(&mut self, session: usize, sent: &Step, result: &StepResult, key: &NodeKey) {
        let stream = (session, sent.stream);
        let Some(book) = self.books.get_mut(&stream) else {
            return;
        };
        assert!(book.inputs.extend(sent.position, &sent.data, 4 * WIDTH));
        if let Some(claim) = Claim::new(&book.inputs, result.rows, &result.data) {
            book.statement.chain = claim.after(book.statement.chain);
            book.statement.claims += 1;
        }
        if book.statement.claims >= book.signed + RECEIPT_EVERY {
            self.certify(stream, key);
        }
    }

    /// Sends a receipt, before the answer that it covers.
    fn certify(&mut self, stream: (usize, u32), key: &NodeKey) {
        let Some(book) = self.books.get_mut(&stream) else {
            return;
        };
        let Statement {
            stream: number,
            epoch,
            claims,
            chain,
            ..
        } = book.statement;
        if self.unsigned || claims == book.signed {
            return;
        }
        book.signed = claims;
        let mut receipt = Receipt {
            stream: number,
            epoch,
            claims: claims.try_into().unwrap(),
            chain,
            signature: book.statement.sign(key),
        };
        if let Some(forge) = self.forges {
            forge(&mut receipt);
        }
        let _ = self.sessions[stream.0].try_send(Message::Receipt(receipt));
    }
}

/// Key of the callers.
fn caller_key() -> NodeKey {
    NodeKey::from_secret(&[200; 32])
}

/// Scripted host.
struct Puppet {
    key: NodeKey,
    addr: HostAddr,
    lo: u32,
    hi: u32,
    arithmetic: &'static str,
    software: &'static str,
    state: Mutex<State>,
    alive: watch::Sender<bool>,
}

struct Everybody;

impl Admission for Everybody {
    fn admit_peer(&self, _: &NodeId) -> bool {
        true
    }
    fn admit_hello(&self, _: &NodeId, _: &Hello, _: u64) -> Result<(), CloseCode> {
        Ok(())
    }
}

impl Puppet {
    fn start(
        runtime: &Runtime,
        seed: u8,
        (lo, hi): (u32, u32),
        arithmetic: &'static str,
        software: &'static str,
    ) -> Arc<Self> {
        let key = NodeKey::from_secret(&[seed; 32]);
        let identity = Identity::from_secret(&key.secret()).unwrap();
        let listener = Listener::bind(
            "127.0.0.1:0",
            &identity,
            Arc::new(Everybody),
            Config::default(),
            &[],
        );
        let mut listener = runtime.block_on(listener).unwrap();
        let puppet = Arc::new(Self {
            addr: HostAddr {
                endpoint: listener.local_addr().to_string(),
                node: key.id(),
            },
            key,
            lo,
            hi,
            arithmetic,
            software,
            state: Mutex::default(),
            alive: watch::Sender::new(true),
        });
        let shared = Arc::clone(&puppet);
        runtime.spawn(async move {
            loop {
                let connection = listener.session().await;
                tokio::spawn(Arc::clone(&shared).serve(connection));
            }
        });
        puppet
    }

    fn node(&self) -> String {
        self.addr.node.to_string()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn at(&self, position: u32, deed: Deed) {
        self.state().deeds.push((position, deed));
    }

    fn leave(state: &mut State) {
        state.leaving = true;
        for session in &state.sessions {
            let _ = session.try_send(Message::Leaving { within_ms: 60_000 });
        }
    }

    fn open_streams(&self) -> usize {
        self.state().streams.len()
    }

    fn descriptor(&self) -> Descriptor {
        Descriptor {
            weights_sha256: WEIGHTS.to_string(),
            endpoint: self.addr.endpoint.clone(),
            advertised_at: 1,
            boundary_dtype: "fp32".into(),
            arithmetic: self.arithmetic.into(),
            software: self.software.into(),
            ..descriptor("puppet", self.addr.node, self.lo, self.hi, LAYERS)
        }
    }

    async fn serve(self: Arc<Self>, mut connection: Connection) {
        let mut alive = self.alive.subscribe();
        let session = {
            let mut state = self.state();
            state.sessions.push(connection.sender());
            state.sessions.len() - 1
        };
        let mut held = Vec::new();
        loop {
            let message = tokio::select! {
                message = connection.recv() => match message {
                    Ok(message) => message,
                    Err(_) => break,
                },
                _ = alive.wait_for(|alive| !alive) => break,
            };
            let Some(answer) = self.handle(session, message) else {
                continue;
            };
            if self.state().pairs && matches!(answer, Message::StepResult(_)) {
                held.push(answer);
                if held.len() == 2 {
                    let left = connection.sender().try_send_all(&held);
                    assert_eq!(left.unwrap(), 0);
                    held.clear();
                }
            } else {
                let _ = connection.sender().send(answer).await;
            }
        }
        self.state().streams.retain(|(at, _), _| *at != session);
    }

    fn handle(&self, session: usize, message: Message) -> Option<Message> {
        let refuse = |stream, epoch, code: &'static str| {
            Some(Message::StreamError(StreamError {
                stream,
                epoch,
                position: None,
                code: code.into(),
                message: "as told".into(),
            }))
        };
        let mut state = self.state();
        if !*self.alive.borrow() {
            return None;
        }
        match message {
            Message::Describe => Some(Message::Descriptor(
                self.descriptor().to_cbor().unwrap().into(),
            )),
            Message::StreamOpen(open) => {
                // A second STREAM_OPEN of the same stream only grows it.
                let grows = state.streams.contains_key(&(session, open.stream));
                let refusal = match grows || state.refusals.is_empty() {
                    false => Some(state.refusals.remove(0)),
                    true => (state.leaving && !grows).then_some("shutting_down"),
                };
                let fork = open.fork.filter(|_| !grows);
                let source = fork.map(|fork| (fork, (session, fork.stream)));
                let refused_fork = source.and_then(|(_, source)| {
                    let is_gone = !state.streams.contains_key(&source);
                    let refused = state.refused_forks.pop();
                    refused.or(is_gone.then_some("unknown_stream"))
                });
                if let Some(code) = refusal.or(refused_fork) {
                    return refuse(open.stream, open.epoch, code);
                }
                assert!(self.lo <= open.lo && open.hi <= self.hi);
                state.asked.push(open.max_positions);
                let layers = match source {
                    None => vec![Vec::new(); (open.hi - open.lo + 1) as usize],
                    Some((fork, source)) => {
                        let (lo, mut layers) = state.streams[&source].clone();
                        assert_eq!(lo, open.lo);
                        for layer in &mut layers {
                            layer.truncate(fork.position as usize);
                        }
                        layers
                    }
                };
                let stream = (session, open.stream);
                if !grows {
                    state.opened += 1;
                    state.streams.insert(stream, (open.lo, layers));
                    if self.arithmetic == ARITHMETIC {
                        state.begin_book(self.key.id(), session, &open);
                    }
                }
                let mut opened = StreamOpened {
                    stream: open.stream,
                    epoch: open.epoch,
                };
                if let Some(misname) = state.misnames {
                    misname(&mut opened);
                }
                Some(Message::StreamOpened(opened))
            }
            Message::StreamClose(close) => {
                state.streams.remove(&(session, close.stream));
                state.certify((session, close.stream), &self.key);
                state.books.remove(&(session, close.stream));
                None
            }
            Message::Truncate(truncate) if truncate.answer => {
                assert!(self.descriptor().answers_truncation());
                state.truncate(session, truncate).map(Message::Truncated)
            }
            Message::Truncate(truncate) => {
                let stream = (session, truncate.stream);
                let held = state
                    .streams
                    .get(&stream)
                    .map(|(_, layers)| layers[0].len());
                // A closed stream may receive a late TRUNCATE.
                assert!(held.is_none_or(|held| held == truncate.position as usize));
                state.rests.push(truncate.position);
                state.certify((session, truncate.stream), &self.key);
                None
            }
            Message::Step(step) => {
                state.steps += 1;
                let stream = (session, step.stream);
                if !state.streams.contains_key(&stream) {
                    state.late += 1;
                }
                let covers = |at: u32| step.position <= at && at < step.position + step.rows;
                let deed = state.deeds.iter().position(|(at, _)| covers(*at));
                match deed.map(|index| state.deeds.remove(index).1) {
                    Some(Deed::Preempt) => {
                        state.streams.remove(&stream);
                        return refuse(step.stream, step.epoch, "preempted");
                    }
                    Some(Deed::Refuse(code)) => {
                        state.streams.remove(&stream);
                        return refuse(step.stream, step.epoch, code);
                    }
                    Some(Deed::End(code)) => {
                        state.sessions[session].close(code);
                        return None;
                    }
                    Some(Deed::Die) => {
                        self.alive.send_replace(false);
                        return None;
                    }
                    Some(Deed::Mute) => {
                        state.mute.insert(stream);
                    }
                    Some(Deed::Leave) => Self::leave(&mut state),
                    None => {}
                }
                if state.mute.contains(&stream) {
                    return None;
                }
                if state.babbles {
                    state.babbles = false;
                    let _ = state.sessions[session].try_send(Message::Truncated(Truncated {
                        stream: step.stream,
                        epoch: step.epoch,
                        position: 0,
                    }));
                }
                if state.kept(stream, step.position) != step.position {
                    state.streams.remove(&stream);
                    return refuse(step.stream, step.epoch, "position_gap");
                }
                let lies = state.lies;
                let Some((lo, layers)) = state.streams.get_mut(&stream) else {
                    return refuse(step.stream, step.epoch, "unknown_stream");
                };
                let received = (step.position, step.data.clone(), *lo);
                let mut result = match lies {
                    None | Some(Lie::Noise) => run(*lo, layers, step.clone()),
                    Some(Lie::SkipsLayer) => {
                        let count = layers.len() - 1;
                        run(*lo, &mut layers[..count], step.clone())
                    }
                    Some(Lie::Yesterday) => {
                        let mut other = layers.clone();
                        let before = other.iter_mut().flatten();
                        before.for_each(|state| *state ^= 0x5555);
                        run(*lo, layers, step.clone());
                        run(*lo, &mut other, step.clone())
                    }
                };
                if lies == Some(Lie::Noise) && result.rows > 0 {
                    add_noise(&mut result);
                }
                if let Some(spoil) = state.spoils.filter(|_| result.rows > 0) {
                    spoil(&mut result);
                }
                state.received.push(received);
                state.book(session, &step, &result, &self.key);
                Some(Message::StepResult(result))
            }
            _ => None,
        }
    }
}

/// Changes the third value of the last row.
fn add_noise(result: &mut StepResult) {
    let mut data = result.data.to_vec();
    let third = data.len() - 2 * size_of::<f32>();
    let value = data[third..].first_chunk_mut::<4>().unwrap();
    *value = (f32::from_le_bytes(*value) + 1.0).to_le_bytes();
    result.data = data.into();
}

/// Runs a step through the layers from `lo` on.
fn run(lo: u32, layers: &mut [Vec<u32>], step: Step) -> StepResult {
    let mut out = Vec::new();
    let rows = step.data.chunks_exact(4 * WIDTH);
    for (position, bytes) in (step.position..).zip(rows) {
        let first = f32::from_le_bytes(bytes[..4].try_into().unwrap());
        let value = (lo..)
            .zip(layers.iter_mut())
            .fold(first as u32, |value, (number, state)| {
                layer(number, state, position, value)
            });
        // Makes rows distinct that agree by chance in the values that are read.
        let last = layers.last().and_then(|state| state.last()).copied();
        let [first, second, third, _] = row(value);
        out.push([first, second, third, (last.unwrap_or_default() >> 8) as f32]);
    }
    let back = match step.want {
        Want::None => &[][..],
        Want::Last => &out[out.len() - 1..],
        Want::All => &out[..],
    };
    StepResult {
        stream: step.stream,
        epoch: step.epoch,
        position: step.position,
        rows: back.len() as u32,
        width: step.width,
        dtype: DType::F32,
        compute_us: 1,
        queue_us: 0,
        data: back
            .iter()
            .flatten()
            .flat_map(|v| v.to_le_bytes())
            .collect(),
    }
}

/// Fixed set of hosts with open sessions.
#[derive(Clone)]
struct Connected {
    links: Vec<Arc<HostLink>>,
    choice: Choice,
    convicted: Convicted,
}

/// Hosts that a verdict convicted.
type Convicted = Arc<Mutex<BTreeSet<NodeId>>>;

impl HostSource for Connected {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        self.choice.among(&self.links, search)
    }

    fn fork(&self) -> Option<Box<dyn HostSource>> {
        Some(Box::new(self.clone()))
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn is_convicted(&self, host: &NodeId) -> bool {
        self.convicted.lock().contains(host)
    }
}

/// Caller and its hosts.
struct Stage {
    runtime: Runtime,
    hosts: Vec<Arc<Puppet>>,
    links: Vec<Arc<HostLink>>,
    cancel: Cancel,
    health: SharedHealth,
    exact: Exact,
    audit_share: f64,
    /// Computes layers on this machine for audits.
    here: Option<RecomputeHere>,
    convicted: Convicted,
}

/// Events of a sequence.
#[derive(Default)]
struct Heard {
    outputs: Vec<u32>,
    degraded: Vec<Code>,
    /// Codes of hosts that the caller waited for.
    waits: Vec<Code>,
    /// Codes of failovers, and the new hosts.
    moves: Vec<(Code, Vec<String>)>,
    /// Arithmetics before and after a failover.
    changes: Vec<(Arithmetics, Arithmetics)>,
}

impl Stage {
    /// Exact hosts for layer ranges, all connected.
    fn new(ranges: &[(u32, u32)]) -> Self {
        let ranges: Vec<_> = ranges.iter().map(|range| (*range, ARITHMETIC)).collect();
        Self::of(&ranges)
    }

    /// Hosts for layer ranges, each with its arithmetic, all connected.
    fn of(hosts: &[((u32, u32), &'static str)]) -> Self {
        Self::with_software(hosts, "puppet/1 fork/1")
    }

    /// As [`Self::of`]. `software`: what the hosts say that they are.
    fn with_software(hosts: &[((u32, u32), &'static str)], software: &'static str) -> Self {
        let runtime = Runtime::new().unwrap();
        let hosts: Vec<_> = (1..)
            .zip(hosts)
            .map(|(seed, &(range, arithmetic))| {
                Puppet::start(&runtime, seed, range, arithmetic, software)
            })
            .collect();
        let key = caller_key();
        let links = hosts
            .iter()
            .map(|host| {
                let link = HostLink::connect(&host.addr, &key, Config::default());
                Arc::new(runtime.block_on(link).unwrap())
            })
            .collect();
        Self {
            runtime,
            hosts,
            links,
            cancel: Cancel::default(),
            health: SharedHealth::default(),
            exact: Exact::default(),
            audit_share: 0.0,
            here: None,
            convicted: Convicted::default(),
        }
    }

    fn host(&self, node: &str) -> &Puppet {
        self.hosts.iter().find(|host| host.node() == node).unwrap()
    }

    /// Host that currently runs a span.
    fn runs(&self, backend: &ShardedBackend, span: usize) -> &Puppet {
        self.host(&backend.route()[span].host.clone().unwrap())
    }

    fn open_with(&self, settings: PumpSettings) -> Result<ShardedBackend, ChatError> {
        self.open_between(0..LAYERS, settings)
    }

    /// As [`Self::open_with`], for some of the layers.
    fn open_between(
        &self,
        hosted: Range<u32>,
        settings: PumpSettings,
    ) -> Result<ShardedBackend, ChatError> {
        let source = Connected {
            links: self.links.clone(),
            choice: self.choice(hosted),
            convicted: Arc::clone(&self.convicted),
        };
        let opened = self.open_by(source, settings);
        opened.map(|backend| backend.with_local_audits(self.here.clone()))
    }

    fn open_by(
        &self,
        source: impl HostSource + 'static,
        settings: PumpSettings,
    ) -> Result<ShardedBackend, ChatError> {
        let runtime = self.runtime.handle().clone();
        let settings = PumpSettings {
            audit_share: self.audit_share,
            ..settings
        };
        ShardedBackend::open(runtime, Box::new(source), settings, &self.cancel)
    }

    fn choice(&self, hosted: Range<u32>) -> Choice {
        let model = ModelOnWire {
            model_id: "puppet".into(),
            weights: WEIGHTS,
            rows: RowShape::plain(WIDTH as u32),
            layers: LAYERS,
            together: LAYERS..LAYERS,
            hosted,
            recurrent: true,
            context: 4096,
            boundary: BoundaryDtype::F32,
            bands: None,
        };
        Choice {
            model,
            max_shards: 16,
            own_id: node("nobody"),
            allow_self: false,
            exact: self.exact,
            policy: PolicyName::default(),
            speeds: Speeds::new(),
            health: self.health.clone(),
        }
    }

    /// The same hosts, connected by the sequence itself.
    fn open_pooled(&self, settings: PumpSettings) -> Result<ShardedBackend, ChatError> {
        let addresses = self.hosts.iter().map(|host| host.addr.clone());
        self.open_addresses(addresses, settings)
    }

    fn open_addresses(
        &self,
        addresses: impl IntoIterator<Item = HostAddr>,
        settings: PumpSettings,
    ) -> Result<ShardedBackend, ChatError> {
        let runtime = self.runtime.handle().clone();
        let key = Arc::new(caller_key());
        let (config, choice) = (Config::default(), self.choice(0..LAYERS));
        let pool = HostPool::new(runtime, key, config, addresses, choice);
        self.open_by(pool, settings)
    }

    fn open(&self) -> ShardedBackend {
        self.open_with(in_pieces_of(3)).unwrap()
    }

    /// Sequence that waits so long for room.
    fn open_for(&self, room_timeout: Duration) -> ShardedBackend {
        self.open_with(PumpSettings {
            room_timeout,
            ..PumpSettings::default()
        })
        .unwrap()
    }

    /// Runs one call: a prompt, then `tokens` rows, each made of the output before it.
    fn call(
        &self,
        backend: &mut ShardedBackend,
        prompt: &[u32],
        tokens: u32,
        heard: &mut Heard,
    ) -> Result<(), ChatError> {
        backend.begin_call(0);
        let mut rows = rows(prompt);
        let mut position = backend.length();
        for _ in 0..=tokens {
            let mut run = Run {
                cancel: &self.cancel,
                notify: &mut |frame| match frame {
                    Frame::ShardStatus { status, code, .. } if status == "degraded" => {
                        heard.degraded.extend(code);
                    }
                    Frame::ShardStatus { status, code, .. } if status == "waiting" => {
                        heard.waits.extend(code);
                    }
                    Frame::ShardFailover {
                        code,
                        replacements,
                        arithmetic,
                        ..
                    } => {
                        heard.moves.push((code, replacements));
                        heard.changes.extend(arithmetic);
                    }
                    Frame::PromptProgress { done, total } => assert!(done <= total),
                    other => panic!("{other:?}"),
                },
            };
            let out = run_rows(backend, position, &rows, &mut run)?;
            position += (rows.len() / WIDTH) as u32;
            heard.outputs.push(out[0] as u32);
            rows = row(out[0] as u32).to_vec();
        }
        backend.end_call();
        Ok(())
    }

    /// Runs one call, which must not fail.
    fn ended(&self, backend: &mut ShardedBackend, prompt: &[u32], tokens: u32) -> Heard {
        let mut heard = Heard::default();
        self.call(backend, prompt, tokens, &mut heard).unwrap();
        heard
    }

    /// Runs the first call with [`PROMPT`]. Its output must be as without failures.
    fn answer(&self, backend: &mut ShardedBackend, tokens: u32) -> Heard {
        let heard = self.ended(backend, &PROMPT, tokens);
        assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, tokens)]));
        heard
    }

    /// Hosts, and the backend that `load` makes if they fail.
    fn with_fallback(
        &self,
        hosts: Result<ShardedBackend, ChatError>,
        load: LoadLocal,
    ) -> WithFallback {
        let (since, runtime) = (Instant::now(), self.runtime.handle());
        let begun = WithFallback::begin(hosts, since, load, self.exact, runtime, &self.cancel);
        begun.unwrap()
    }

    /// Runs a call with [`PROMPT`] and `more` rows. Returns its result, and of each failover whether
    /// it changed the arithmetic, and its recovery time.
    fn failovers(
        &self,
        backend: &mut dyn Backend,
        more: u32,
    ) -> (Result<Vec<f32>, ChatError>, Vec<(bool, f64)>) {
        let mut moves = Vec::new();
        let mut notify = |frame| {
            if let Frame::ShardFailover {
                arithmetic,
                recovery_ms,
                ..
            } = frame
            {
                moves.push((arithmetic.is_some(), recovery_ms));
            }
        };
        let mut run = Run {
            cancel: &self.cancel,
            notify: &mut notify,
        };
        backend.begin_call(0);
        let mut result = run_rows(backend, 0, &rows(&PROMPT), &mut run);
        for position in 8..8 + more {
            result = result.and_then(|_| run_rows(backend, position, &row(1), &mut run));
        }
        (result, moves)
    }

    /// `None` for a host that was not used yet.
    fn known_of(&self, host: &str) -> Option<ShardHealth> {
        let mut all = self.health.all().into_iter();
        all.find(|one| one.host.to_string() == host)
    }

    fn health_of(&self, host: &str) -> ShardHealth {
        self.known_of(host).unwrap()
    }

    /// Number of hosts in quarantine.
    fn quarantined(&self) -> usize {
        let all = self.health.all().into_iter();
        all.filter(|one| one.standing == Standing::Quarantined)
            .count()
    }

    fn all_are_good(&self) {
        let told = self.health.all();
        let is_good = |one: &ShardHealth| one.standing == Standing::Good;
        assert!(told.iter().all(is_good), "{told:?}");
    }

    fn until(&self, what: &str, is: impl Fn() -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !is() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::yield_now();
        }
    }

    fn until_empty(&self) {
        self.until("a stream is left", || {
            self.hosts.iter().all(|host| host.open_streams() == 0)
        });
    }
}

/// Prompts are cut into pieces of so many rows.
fn in_pieces_of(prefill_rows: usize) -> PumpSettings {
    PumpSettings {
        prefill_rows,
        ..PumpSettings::default()
    }
}

/// As with a fallback: gives up after the second failure, once rows have been sent.
fn fallback_settings() -> PumpSettings {
    PumpSettings {
        give_up_after: Some(2),
        ..PumpSettings::default()
    }
}

const PROMPT: [u32; 8] = [3, 1, 4, 1, 5, 9, 2, 6];

/// Honest hosts of some layers: the output of each further row.
fn honest(hosted: Range<u32>) -> impl FnMut(u32) -> u32 {
    let mut layers = vec![Vec::new(); hosted.len()];
    let mut positions = 0..;
    move |given| {
        let position = positions.next().unwrap();
        let numbered = hosted.clone().zip(&mut layers);
        numbered.fold(given, |value, (number, state)| {
            layer(number, state, position, value)
        })
    }
}

/// Expected outputs of the calls of one conversation, without failures.
fn undisturbed(calls: &[(&[u32], u32)]) -> Vec<u32> {
    let (mut honest, mut outputs) = (honest(0..LAYERS), Vec::new());
    for (prompt, tokens) in calls {
        let mut last = prompt.iter().fold(0, |_, given| honest(*given));
        outputs.push(last);
        for _ in 0..*tokens {
            last = honest(last);
            outputs.push(last);
        }
    }
    outputs
}

const HALVES: [(u32, u32); 4] = [(0, 1), (0, 1), (2, 3), (2, 3)];

/// Runs one call with an action of the first or second host at a position.
fn with_deed(span: usize, position: u32, deed: Deed) -> (Stage, Heard, BTreeSet<String>) {
    let stage = Stage::new(&HALVES);
    let mut backend = stage.open();
    let node = stage.runs(&backend, span).node();
    stage.host(&node).at(position, deed);
    let heard = stage.answer(&mut backend, 12);
    let now = backend.route().into_iter().filter_map(|hop| hop.host);
    let now: BTreeSet<String> = now.collect();
    assert!(!now.contains(&node), "there is another");
    drop(backend);
    stage.until_empty();
    (stage, heard, now)
}

#[test]
fn a_sequence_moves_off_a_host_that_leaves_and_nothing_has_failed() {
    // In the first chunk of the prompt, in its last, and in the answer.
    for span in [0, 1] {
        for position in [0, 7, 8, 15] {
            let (_, heard, now) = with_deed(span, position, Deed::Leave);
            assert_eq!(heard.degraded, [""; 0], "span {span}, position {position}");
            assert_eq!(heard.moves.len(), 1);
            assert_eq!(heard.moves[0].0, "leaving");
            assert!(now.contains(&heard.moves[0].1[0]));
        }
    }
}

#[test]
fn a_caller_with_private_layers_gets_every_row_once_despite_host_failures() {
    // Rows in parts, layers 1 and 2 of 4 on hosts; output of each position.
    let prompt: Vec<u32> = (0..20).map(|n| n * 37 % 101).collect();
    let expected: Vec<u32> = prompt.iter().copied().map(honest(1..3)).collect();
    let deeds = [Deed::Die, Deed::Leave, Deed::Preempt];
    for (span, position, deed) in (0..2).flat_map(|span| {
        [0, 7, 13, 19]
            .map(|at| deeds.map(|deed| (span, at, deed)))
            .concat()
    }) {
        let stage = Stage::new(&HALVES);
        let mut backend = stage.open_between(1..3, in_pieces_of(3)).unwrap();
        let node = stage.runs(&backend, span).node();
        stage.host(&node).at(position, deed);
        backend.begin_call(0);
        let mut run = Run {
            cancel: &stage.cancel,
            notify: &mut |_| {},
        };
        let (mut at, mut got) = (0, Vec::new());
        // A prompt of twelve in parts of four, one of seven at once, one row.
        for (length, part) in [(12, 4), (7, 7), (1, 1)] {
            let mut left = length;
            for values in prompt[at..at + length].chunks(part) {
                let rows = rows(values);
                left -= values.len();
                let part = Rows {
                    position: (at + length - left - values.len()) as u32,
                    values: &rows,
                    more: left as u32,
                    all: false,
                };
                chat_loop::block_on(backend.submit(part, run.cancel));
            }
            let out = chat_loop::block_on(backend.output(&mut run)).unwrap();
            got.extend(out.chunks_exact(WIDTH).map(|row| row[0] as u32));
            at += length;
        }
        assert_eq!(got, expected, "{deed:?} of host {span} at {position}");
    }
}

#[test]
fn a_preempted_sequence_restarts_without_a_failover_frame() {
    for span in [0, 1] {
        for position in [0, 7, 8, 15] {
            let (_, heard, _) = with_deed(span, position, Deed::Preempt);
            assert!(heard.degraded.is_empty() && heard.moves.is_empty());
        }
    }
}

/// Stage with three hosts for the first half; the preferred one spoils every answer.
fn with_spoiler(spoil: fn(&mut StepResult)) -> (Stage, String) {
    let stage = Stage::new(&[(0, 1), (0, 1), (0, 1), (2, 3)]);
    let preferred = stage.runs(&stage.open(), 0).node();
    stage.host(&preferred).state().spoils = Some(spoil);
    (stage, preferred)
}

#[test]
fn a_host_that_always_returns_nan_spoils_one_of_five_chats() {
    let (stage, liar) = with_spoiler(|result| result.data = vec![0xff; result.data.len()].into());
    let expected = undisturbed(&[(&[5, 6, 7], 4)]);
    let mut degraded = Vec::new();
    for _ in 0..5 {
        let heard = stage.ended(&mut stage.open(), &[5, 6, 7], 4);
        assert_eq!(heard.outputs, expected);
        degraded.extend(heard.degraded);
    }
    assert_eq!(degraded, ["tensor_nonfinite"]);
    let told = stage.health_of(&liar);
    assert_eq!(told.standing, Standing::Quarantined);
    assert!(told.quarantine_ms > 0);
    let worth = told.failures[&FailureKind::Corruption];
    assert!(worth > 0.9 && worth <= 1.0, "{worth}");
    // If no other host has its layers, the quarantined host is used.
    let mut stage = stage;
    let second = stage.hosts[3].node();
    let is_left =
        |link: &Arc<HostLink>| [&liar, &second].contains(&&link.descriptor.host.to_string());
    stage.links.retain(is_left);
    assert_eq!(stage.runs(&stage.open(), 0).node(), liar);
}

#[test]
fn a_host_that_returns_the_same_rows_for_other_rows_is_found_out() {
    let (stage, liar) = with_spoiler(|result| {
        let one = row(7).into_iter().flat_map(f32::to_le_bytes);
        let one: Vec<u8> = one.collect();
        result.data = one.repeat(result.rows as usize).into();
    });
    let heard = stage.ended(&mut stage.open(), &[5, 6, 7], 4);
    assert_eq!(heard.outputs, undisturbed(&[(&[5, 6, 7], 4)]));
    assert_eq!(heard.degraded, ["tensor_band"]);
    assert_eq!(stage.health_of(&liar).standing, Standing::Quarantined);
}

#[test]
fn the_same_conversation_again_and_its_beginning_in_another_are_no_repeats() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    for prompt in [&[5, 6, 7][..], &[5, 6, 7], &[5, 6, 8, 7], &[5, 5, 5, 5, 5]] {
        let heard = stage.ended(&mut stage.open(), prompt, 6);
        assert_eq!(heard.degraded, [""; 0]);
    }
}

#[test]
fn a_slow_host_is_left_to_others_by_the_next_chat() {
    // 20 ms per step, where others take much less.
    let (stage, slow) = with_spoiler(|_| std::thread::sleep(Duration::from_millis(20)));
    let mut heard = vec![stage.ended(&mut stage.open(), &[5, 6, 7], 12)];
    // The spares are unmeasured, but the host of the other layers is a reference.
    let mut asked = Vec::new();
    for _ in 0..4 {
        let mut backend = stage.open();
        asked.push(stage.runs(&backend, 0).node());
        heard.push(stage.ended(&mut backend, &[5, 6, 7], 12));
    }
    assert!(!asked.contains(&slow), "{slow}: {asked:?}");
    let speed = stage.health_of(&slow).shards[0].p50_ms;
    assert!(speed >= 10.0, "20 ms through two layers");
    assert!(heard.iter().all(|heard| heard.degraded.is_empty()));
}

#[test]
fn a_host_whose_models_numbers_overflow_is_not_banned() {
    let stage = Stage::new(&[(0, 3), (0, 3)]);
    for host in &stage.hosts {
        host.state().refusals.extend(["boundary_overflow"; 2]);
    }
    assert!(stage.open_with(PumpSettings::default()).is_err());
    stage.all_are_good();
}

#[test]
fn a_leaving_host_without_replacement_works_to_the_end() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    stage.hosts[1].at(9, Deed::Leave);
    let heard = stage.answer(&mut backend, 12);
    assert!(heard.degraded.is_empty() && heard.moves.is_empty());
    // The call has ended: the idle stream does not delay the host's shutdown.
    stage.until("the leaving host is free", || {
        stage.hosts[1].open_streams() == 0
    });
    assert!(!backend.is_alive());
}

#[test]
fn a_conversation_that_rests_lets_a_leaving_host_go_and_goes_on_elsewhere() {
    let stage = Stage::new(&HALVES);
    let mut backend = stage.open();
    let mut heard = stage.answer(&mut backend, 4);
    let first = stage.runs(&backend, 0);
    let second = stage.runs(&backend, 1);
    Puppet::leave(&mut first.state());
    stage.until("it goes", || first.open_streams() == 0);
    assert_eq!(second.open_streams(), 1, "only what leaves is let go");
    assert!(!backend.is_alive());
    // The next call gives the same output.
    stage.call(&mut backend, &[7, 7], 4, &mut heard).unwrap();
    assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, 4), (&[7, 7], 4)]));
    assert!(heard.degraded.is_empty());
    assert_eq!(heard.moves.len(), 1);
}

#[test]
fn a_sequence_waits_for_room_where_there_is_none_elsewhere() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    stage.hosts[1].at(10, Deed::Preempt);
    stage.hosts[1].state().refusals = vec!["kv_full", "stream_limit", "preempted"];
    let heard = stage.answer(&mut backend, 12);
    assert!(heard.degraded.is_empty() && heard.moves.is_empty());
    assert!(stage.hosts[1].state().refusals.is_empty());
}

#[test]
fn a_host_that_takes_over_may_be_full_for_a_while() {
    let stage = Stage::new(&[(0, 1), (2, 3), (2, 3)]);
    let mut backend = stage.open();
    let dies = stage.runs(&backend, 1).node();
    stage.host(&dies).at(10, Deed::Die);
    let spare = stage.hosts[1..].iter().find(|host| host.node() != dies);
    let spare = spare.unwrap();
    spare.state().refusals = vec!["stream_limit"; 3];
    let heard = stage.answer(&mut backend, 12);
    assert_eq!(heard.degraded, ["connection_lost"]);
    assert_eq!(
        heard.moves,
        [("connection_lost".into(), vec![spare.node()])]
    );
}

#[test]
fn giving_up_does_not_wait_until_this_machine_has_loaded_the_model() {
    let stage = Stage::new(&[(0, 3)]);
    stage.hosts[0].at(2, Deed::Die);
    let (loading, begun) = std::sync::mpsc::channel();
    let (told, wait) = std::sync::mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let load = move || {
        loading.send(()).unwrap();
        // Until the test ends.
        let _ = wait.lock().recv();
        Err(ChatError::Cancelled)
    };
    let mut backend = stage.with_fallback(Ok(stage.open()), Arc::new(load));
    std::thread::scope(|scope| {
        let cancel = &stage.cancel;
        let call =
            scope.spawn(move || run_quietly(&mut backend, 0, &rows(&PROMPT), cancel).map(drop));
        begun.recv_timeout(TIMEOUT).unwrap();
        cancel.cancel();
        assert_eq!(call.join().unwrap(), Err(ChatError::Cancelled));
    });
    drop(told);
}

/// Arithmetic other than the exact one. Here it gives the same results.
const OTHER: &str = "torch-cpu-fp32";

/// Call whose first host fails at a position, when a spare becomes available; 8 is the first row
/// after the prompt. Arithmetics of the first half, of its spare, and of the second half.
fn with_spare(
    [first, spare, second]: [&'static str; 3],
    exact: Exact,
    at: u32,
) -> (Result<(), ChatError>, Heard) {
    let mut stage = Stage::of(&[((0, 1), first), ((2, 3), second), ((0, 1), spare)]);
    stage.exact = exact;
    let host = &stage.hosts[0];
    host.at(at, Deed::Die);
    // The spare has no room when the sequence begins.
    stage.hosts[2].state().refusals = vec!["kv_full"];
    let mut backend = stage.open();
    stage.hosts[2].state().refusals.clear();
    assert_eq!(stage.runs(&backend, 0).node(), host.node());
    let mut heard = Heard::default();
    let result = stage.call(&mut backend, &PROMPT, 12, &mut heard);
    (result, heard)
}

/// The host of all layers preempts a stream in the middle of an answer, beside a spare.
fn preempted(host: &'static str, spare: &'static str) -> (Result<(), ChatError>, Heard) {
    let mut stage = Stage::of(&[((0, 3), host), ((0, 3), spare)]);
    stage.exact = Exact::Any;
    stage.hosts[1].state().refusals = vec!["kv_full"];
    let mut backend = stage.open();
    stage.hosts[1].state().refusals.clear();
    stage.hosts[0].at(9, Deed::Preempt);
    let mut heard = Heard::default();
    let result = stage.call(&mut backend, &PROMPT, 12, &mut heard);
    assert_eq!(
        stage.runs(&backend, 0).node(),
        stage.hosts[1].node(),
        "the spare goes on"
    );
    (result, heard)
}

#[test]
fn an_answer_goes_on_with_the_arithmetic_that_it_was_begun_with() {
    for host in [ARITHMETIC, OTHER] {
        let spare = if host == ARITHMETIC {
            OTHER
        } else {
            ARITHMETIC
        };
        let of = |name: &str| Arithmetics::from_iter([name.to_owned()]);
        let call = |spare, exact, at| with_spare([host, spare, ARITHMETIC], exact, at);
        // In the middle of the answer, only a spare with the same arithmetic is accepted.
        let (result, heard) = call(host, Exact::Prefer, 9);
        assert_eq!((result, heard.moves.len()), (Ok(()), 1));
        assert_eq!(heard.changes, []);
        let (result, heard) = call(spare, Exact::Prefer, 9);
        assert!(
            matches!(&result, Err(ChatError::ArithmeticMismatch(why)) if why.contains(spare)),
            "{result:?}"
        );
        assert_eq!(heard.moves, []);
        // `Exact::Any` accepts it, and reports the change.
        let (result, heard) = call(spare, Exact::Any, 9);
        assert_eq!((result, heard.moves.len()), (Ok(()), 1));
        assert_eq!(heard.changes, [(of(host), of(spare))]);
        // Nor before the first row of the answer: the second half holds KV of its rows.
        let (result, _) = call(spare, Exact::Prefer, 5);
        assert!(
            matches!(result, Err(ChatError::ArithmeticMismatch(_))),
            "{result:?}"
        );
        let (result, heard) = call(spare, Exact::Any, 5);
        assert_eq!((result, heard.moves.len()), (Ok(()), 1));
        assert_eq!(heard.changes, [(of(host), of(spare))]);
        // A preemption reports the change as well.
        let (result, heard) = preempted(host, spare);
        assert_eq!(result, Ok(()));
        assert_eq!(heard.moves.len(), 1);
        assert_eq!(heard.moves[0].0, Code::PREEMPTED);
        assert_eq!(heard.changes, [(of(host), of(spare))]);
        let (result, heard) = preempted(host, host);
        assert_eq!((result, heard.moves), (Ok(()), vec![]));
    }
}

#[test]
fn required_exactness_holds_to_the_end() {
    let call = |arithmetics, at| with_spare(arithmetics, Exact::Require, at);
    for at in [2, 9] {
        let (result, heard) = call([ARITHMETIC, ARITHMETIC, ARITHMETIC], at);
        assert_eq!((result, heard.changes), (Ok(()), vec![]));
        let (result, _) = call([ARITHMETIC, OTHER, ARITHMETIC], at);
        assert!(
            matches!(&result, Err(ChatError::ArithmeticMismatch(why)) if why.contains(OTHER)),
            "{result:?}"
        );
    }
    let mut stage = Stage::of(&[((0, 1), ARITHMETIC), ((2, 3), OTHER)]);
    stage.exact = Exact::Require;
    let refused = stage.open_with(PumpSettings::default()).err();
    assert!(matches!(refused, Some(ChatError::ArithmeticMismatch(_))));
    // A full host is not a missing one: the sequence waits for it.
    let mut stage = Stage::of(&[((0, 3), ARITHMETIC), ((0, 3), OTHER)]);
    stage.exact = Exact::Require;
    stage.hosts[0].state().refusals = vec!["kv_full"; 1000];
    let refused = stage.open_with(PumpSettings {
        start_timeout: Duration::from_millis(200),
        ..PumpSettings::default()
    });
    assert!(matches!(refused.err(), Some(ChatError::HostsFull(_))));
}

#[test]
fn a_fallback_completes_exact_answers_and_refuses_others() {
    for (arithmetic, exact, at, goes_on) in [
        (ARITHMETIC, Exact::Prefer, 9, true),
        (ARITHMETIC, Exact::Require, 9, true),
        (OTHER, Exact::Prefer, 9, false),
        (OTHER, Exact::Prefer, 2, true),
        (OTHER, Exact::Any, 9, true),
    ] {
        let case = format!("{arithmetic} {exact:?} {at}");
        let mut stage = Stage::of(&[((0, 3), arithmetic)]);
        stage.exact = exact;
        stage.hosts[0].at(at, Deed::Die);
        let mut backend = stage.with_fallback(Ok(stage.open()), here());
        let (result, moves) = stage.failovers(&mut backend, 4);
        match goes_on {
            true => assert!(result.is_ok(), "{case}: {result:?}"),
            false => assert!(
                matches!(result, Err(ChatError::ArithmeticMismatch(_))),
                "{case}: {result:?}"
            ),
        }
        // All rows of an answer that has not begun are computed here.
        let changed = goes_on && arithmetic == OTHER && at > 8;
        let changes = moves.iter().filter(|(is_change, _)| *is_change);
        assert_eq!(changes.count(), usize::from(changed), "{case}");
    }
}

/// This machine's layers, with the length of their sequence. Rows must be submitted without gaps.
struct Here(u32);

fn here() -> LoadLocal {
    Arc::new(|| Ok(Box::new(Here(0)) as Box<dyn Backend>))
}

impl Backend for Here {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, _: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        assert_eq!(rows.position, self.0, "a hole");
        self.0 += (rows.values.len() / WIDTH) as u32;
        std::future::ready(()).boxed_local()
    }

    fn output<'a>(&'a mut self, _: &'a mut Run<'_>) -> Output<'a> {
        std::future::ready(Ok(row(self.0).to_vec())).boxed_local()
    }

    fn route(&self) -> Vec<RouteHop> {
        vec![RouteHop {
            shard_id: "puppet:0-3".into(),
            host: None,
            endpoint: None,
            layers: (0, 3),
            memory_mb: 0,
            arithmetic: ARITHMETIC.into(),
            policy: "".into(),
        }]
    }
}

#[test]
fn a_sequence_does_not_wait_for_room_for_ever() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open_for(Duration::from_millis(200));
    stage.hosts[1].at(10, Deed::Preempt);
    stage.hosts[1].state().refusals = vec!["kv_full"; 1000];
    let mut heard = Heard::default();
    let error = stage.call(&mut backend, &PROMPT, 12, &mut heard);
    assert_eq!(error.unwrap_err().code(), "shard_unavailable");
    assert_eq!(heard.degraded, ["kv_full"]);
    drop(backend);
    stage.until_empty();
}

#[test]
fn answering_one_row_and_taking_the_memory_back_for_the_next_ends() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open_for(Duration::from_millis(400));
    // Only host of its layers; each action is done once, so the row is answered afterwards.
    for position in 8..500 {
        stage.hosts[1].at(position, Deed::Preempt);
    }
    let mut heard = Heard::default();
    let error = stage.call(&mut backend, &PROMPT, 400, &mut heard);
    assert_eq!(error.unwrap_err().code(), "shard_unavailable");
    assert_eq!(heard.degraded, ["preempted"]);
    assert!((1..100).contains(&heard.outputs.len()), "some rows came");
    let told = stage.health_of(&stage.hosts[1].node());
    assert!(told.failures.contains_key(&FailureKind::Refused));
    drop(backend);
    stage.until_empty();
}

#[test]
fn a_host_that_asks_for_its_memory_now_and_then_is_waited_for_and_has_not_failed() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open_for(Duration::from_millis(2000));
    for position in (10..200).step_by(20) {
        stage.hosts[1].at(position, Deed::Preempt);
    }
    let heard = stage.answer(&mut backend, 200);
    assert!(heard.degraded.is_empty());
    stage.all_are_good();
}

#[test]
fn a_new_sequence_waits_for_room_and_holds_nothing_meanwhile() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    stage.hosts[1].state().refusals = vec!["stream_limit", "kv_full", "stream_quota"];
    let mut backend = stage.open();
    assert!(stage.hosts[1].state().refusals.is_empty());
    stage.until("one stream on each", || {
        stage.hosts.iter().all(|host| host.open_streams() == 1)
    });
    // Each attempt asks the host that had room again.
    assert!(stage.hosts[0].state().asked.len() >= 4);
    let heard = stage.answer(&mut backend, 2);
    assert!(heard.degraded.is_empty() && heard.moves.is_empty());
}

#[test]
fn hosts_that_stay_full_are_told_as_full_and_not_as_missing() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    stage.hosts[1].state().refusals = vec!["stream_limit"; 1000];
    let error = stage.open_with(PumpSettings {
        start_timeout: Duration::from_millis(300),
        ..PumpSettings::default()
    });
    let error = error.err().unwrap();
    assert!(matches!(error, ChatError::HostsFull(_)), "{error}");
    assert_eq!(error.code(), "busy");
    assert!(!error.hint().contains("missing"));
    stage.until_empty();
}

#[test]
fn a_host_that_could_never_hold_a_sequence_is_passed_over_and_not_waited_for() {
    let stage = Stage::new(&[(0, 3), (0, 3)]);
    let first = stage.runs(&stage.open(), 0).node();
    stage.until_empty();
    stage.host(&first).state().refusals = vec!["kv_too_small"];
    let backend = stage.open();
    assert_ne!(stage.runs(&backend, 0).node(), first);
    drop(backend);
    for host in &stage.hosts {
        host.state().refusals = vec!["kv_too_small"; 2];
    }
    let error = stage.open_with(PumpSettings::default()).err().unwrap();
    assert_eq!(error.code(), "shard_unavailable", "{error}");
}

#[test]
fn streams_are_opened_for_the_expected_length_and_grow() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    backend.begin_call(PROMPT.len() as u32 + 3);
    let mut heard = stage.answer(&mut backend, 3);
    for host in &stage.hosts {
        assert_eq!(host.state().asked, [1, 11]);
    }
    // The model's context is 4096, but no host is asked for that.
    stage.call(&mut backend, &PROMPT, 3, &mut heard).unwrap();
    for host in &stage.hosts {
        assert!(matches!(host.state().asked[..], [1, 11, more] if (22..2048).contains(&more)));
    }
    assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, 3), (&PROMPT, 3)]));
}

#[test]
fn a_sequence_reports_itself_idle_after_a_call() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    stage.answer(&mut backend, 3);
    stage.until("both hosts have heard it", || {
        stage.hosts.iter().all(|host| host.state().rests == [11])
    });
}

#[test]
fn a_host_without_room_is_passed_over_at_the_start() {
    let stage = Stage::new(&HALVES);
    let full = stage.runs(&stage.open(), 0).node();
    stage.until_empty();
    stage.host(&full).state().refusals = vec!["stream_limit"];
    let mut backend = stage.open();
    assert_ne!(stage.runs(&backend, 0).node(), full);
    assert!(stage.answer(&mut backend, 2).degraded.is_empty());
}

/// Cancels a call while a host does not answer the step for a position, after `sent` steps. The
/// host then receives the end of the stream, and no further message.
fn given_up(span: usize, position: u32, prompt: &[u32], sent: u32) {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut backend = stage.open();
    let host = &stage.hosts[span];
    host.at(position, Deed::Mute);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let result = stage.call(&mut backend, prompt, 12, &mut Heard::default());
            drop(backend);
            result
        });
        stage.until("the steps that are not answered", || {
            let state = host.state();
            state.deeds.is_empty() && state.steps == sent
        });
        stage.cancel.cancel();
        assert_eq!(call.join().unwrap(), Err(ChatError::Cancelled));
    });
    stage.until_empty();
    assert_eq!(host.state().steps, sent, "span {span}, position {position}");
    assert!(stage.hosts.iter().all(|host| host.state().late == 0));
}

#[test]
fn cancelling_in_mid_answer_ends_the_wait_and_frees_every_host() {
    // Three chunks of the prompt and two rows of the answer.
    for span in [0, 1] {
        given_up(span, 9, &PROMPT, 5);
    }
}

#[test]
fn of_a_long_prompt_that_is_given_up_no_further_piece_is_sent() {
    let long: Vec<u32> = (0..300).map(|n| n % 11).collect();
    for span in [0, 1] {
        for pieces in [0, 50] {
            // The unanswered chunk, and the one that waits behind it.
            given_up(span, 3 * pieces, &long, pieces + 2);
        }
    }
}

#[test]
fn giving_up_ends_a_pause_for_room() {
    let stage = Stage::new(&[(0, 3)]);
    let mut backend = stage.open();
    stage.hosts[0].at(9, Deed::Preempt);
    stage.hosts[0].state().refusals = vec!["kv_full"; 1000];
    std::thread::scope(|scope| {
        let call = scope.spawn(|| stage.call(&mut backend, &PROMPT, 12, &mut Heard::default()));
        stage.until("some refusals", || {
            stage.hosts[0].state().refusals.len() < 998
        });
        stage.cancel.cancel();
        assert_eq!(call.join().unwrap(), Err(ChatError::Cancelled));
    });
}

#[test]
fn a_chat_that_waits_for_a_host_does_not_hold_up_another_on_the_same_session() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let mut stuck = stage.open();
    stage.hosts[1].at(9, Deed::Mute);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let result = stage.call(&mut stuck, &PROMPT, 12, &mut Heard::default());
            drop(stuck);
            result
        });
        stage.until("the step that is not answered", || {
            stage.hosts[1].state().deeds.is_empty()
        });
        stage.answer(&mut stage.open(), 12);
        stage.cancel.cancel();
        assert_eq!(call.join().unwrap(), Err(ChatError::Cancelled));
    });
    stage.until_empty();
}

#[test]
fn a_host_that_is_there_and_does_nothing_is_left_for_a_spare() {
    // With the reference of another host, and after a few steps of its own.
    for (span, position) in [(1, 0), (0, 9), (1, 9)] {
        let (_, heard, _) = with_deed(span, position, Deed::Mute);
        assert_eq!(heard.degraded, ["degraded"], "span {span} at {position}");
        assert_eq!(heard.moves.len(), 1, "span {span} at {position}");
        assert!(heard.waits.contains(&"busy".into()), "{:?}", heard.waits);
    }
}

#[test]
fn a_host_that_answers_about_another_stream_or_epoch_has_failed_and_is_not_waited_for() {
    let lies: [fn(&mut StreamOpened); 2] =
        [|opened| opened.stream += 7, |opened| opened.epoch += 1];
    for lie in lies {
        let stage = Stage::new(&HALVES);
        let liar = stage.runs(&stage.open(), 0).node();
        stage.host(&liar).state().misnames = Some(lie);
        let mut backend = stage.open();
        stage.answer(&mut backend, 4);
        let failures = stage.health_of(&liar).failures.into_keys();
        let failures: Vec<_> = failures.collect();
        assert_eq!(failures, [FailureKind::Refused], "not `stalled`");
    }
}

/// Restarts a host each time that it has failed, until `done`.
fn revive(host: &Puppet, done: &std::sync::atomic::AtomicBool) {
    while !done.load(std::sync::atomic::Ordering::Relaxed) {
        // Not before the session has ended, so that each failure happens.
        let ended = host
            .state()
            .sessions
            .iter()
            .all(|one| one.closed().is_some());
        if ended {
            host.alive
                .send_if_modified(|alive| !std::mem::replace(alive, true));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_host_that_comes_back_is_asked_again_by_the_answer_that_lost_it() {
    // A single failure, and repeated failures caused by the prompt.
    for (deaths, left) in [(1, 0), (10, 6)] {
        let stage = Stage::new(&[(0, 1), (2, 3)]);
        let mut backend = stage.open_pooled(PumpSettings::default()).unwrap();
        for _ in 0..deaths {
            stage.hosts[1].at(9, Deed::Die);
        }
        let done = std::sync::atomic::AtomicBool::new(false);
        let mut heard = Heard::default();
        let result = std::thread::scope(|scope| {
            scope.spawn(|| revive(&stage.hosts[1], &done));
            let result = stage.call(&mut backend, &PROMPT, 12, &mut heard);
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            result
        });
        assert_eq!(stage.hosts[1].state().deeds.len(), left);
        if left > 0 {
            assert!(
                matches!(result, Err(ChatError::ShardUnavailable(_))),
                "{result:?}"
            );
            continue;
        }
        result.unwrap();
        assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, 12)]));
        let back = (Code::CONNECTION_LOST, vec![stage.hosts[1].node()]);
        assert_eq!(heard.moves, [back]);
    }
}

#[test]
fn a_new_chat_does_not_wait_for_an_offline_host_until_the_connect_timeout() {
    // It accepts connections, as a suspended process does, and sends nothing.
    let dark = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stage = Stage::new(&[]);
    let addr = HostAddr {
        endpoint: dark.local_addr().unwrap().to_string(),
        node: NodeKey::from_secret(&[1; 32]).id(),
    };
    let opened = stage.open_addresses([addr], fallback_settings());
    let why = opened.err().unwrap().to_string();
    assert!(why.ends_with("has not answered yet"), "{why}");
}

/// Source whose searches for replacements fail for a while.
struct Vain(Connected, Duration);

impl HostSource for Vain {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        if search.before.is_some() {
            std::thread::sleep(self.1);
        }
        self.0.route(search)
    }

    fn choice(&self) -> &Choice {
        self.0.choice()
    }
}

#[test]
fn the_recovery_time_of_a_fallback_includes_the_search_for_hosts() {
    let stage = Stage::new(&[(0, 3)]);
    stage.hosts[0].at(9, Deed::Die);
    let wait = Duration::from_millis(300);
    let connected = Connected {
        links: stage.links.clone(),
        choice: stage.choice(0..LAYERS),
        convicted: Convicted::default(),
    };
    let hosts = stage.open_by(Vain(connected, wait), fallback_settings());
    let mut backend = stage.with_fallback(hosts, here());
    let (result, moves) = stage.failovers(&mut backend, 3);
    result.unwrap();
    let took: Vec<f64> = moves.into_iter().map(|(_, took)| took).collect();
    assert_eq!(took.len(), 1);
    assert!(took[0] >= wait.as_secs_f64() * 1e3, "{took:?}");
}

#[test]
fn rows_of_every_data_type_have_one_on_the_wire() {
    for boundary in BoundaryDtype::ALL {
        let dtype = DType::of_rows(boundary.descriptor_name()).unwrap();
        assert_eq!(dtype.size(), boundary.bytes_per_value());
    }
}

#[test]
fn hosts_that_fail_before_the_first_row_do_not_end_the_call_beside_their_spares() {
    let stage = Stage::new(&[(0, 1), (2, 3), (0, 1), (2, 3), (0, 3)]);
    for host in &stage.hosts[..4] {
        host.state().refusals = vec!["internal"; 8];
    }
    let mut backend = stage.open_with(fallback_settings()).unwrap();
    let heard = stage.answer(&mut backend, 4);
    assert_eq!(heard.degraded, [""; 0]);
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        3 => Just(Deed::Leave),
        3 => Just(Deed::Preempt),
        1 => Just(Deed::Die),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Hosts leave, fail and preempt at any step, also during replays and openings; each half has
    /// one host that stays.
    #[test]
    fn random_host_failures_do_not_change_the_output(
        deeds in proptest::collection::vec((0usize..6, 0u32..30, deed()), 0..12),
        refusals in proptest::collection::vec((0usize..6, prop_oneof![Just("preempted"), Just("shutting_down")]), 0..4),
        history_bytes in prop_oneof![Just(usize::MAX), Just(100)],
    ) {
        let stage = Stage::new(&[(0, 1), (0, 3), (2, 3), (0, 1), (2, 3), (0, 3)]);
        let mut backend = stage.open_with(PumpSettings {
            history_bytes,
            ..in_pieces_of(3)
        }).unwrap();
        for (host, position, deed) in deeds {
            // The last host may be busy, but it stays.
            if host < 5 || deed == Deed::Preempt {
                stage.hosts[host].at(position, deed);
            }
        }
        for (host, code) in refusals {
            if host < 5 {
                stage.hosts[host].state().refusals.push(code);
            }
        }
        let mut heard = stage.ended(&mut backend, &PROMPT, 6);
        stage.call(&mut backend, &[8, 8], 10, &mut heard).unwrap();
        prop_assert_eq!(heard.outputs, undisturbed(&[(&PROMPT, 6), (&[8, 8], 10)]));
        drop(backend);
        stage.until_empty();
    }
}
