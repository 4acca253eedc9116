//! Callers over scripted hosts: real sessions on loopback, plain arithmetic. This file has the
//! fixtures.

mod audits;
mod codes;
mod convicted;
mod failures;
mod fallback;
mod forks;
mod giving_up;
mod receipts;
mod rewinds;
mod room;
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

/// Settings that cut prompts into pieces of `prefill_rows` rows.
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
