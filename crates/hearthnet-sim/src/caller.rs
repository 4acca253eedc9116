//! Callers: the pipeline, the failover and the fallback of `hearthnet-orchestrator`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::NodeKey;
use hearthnet_orchestrator::backend::{Rows, Run};
use hearthnet_orchestrator::chat::Frame;
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::fallback::{LoadLocal, WithFallback};
use hearthnet_orchestrator::health::{FailureKind, SharedHealth};
use hearthnet_orchestrator::hosts::{
    Choice, GRACE, HostSource, Patience, RoutedSpan, SHORT_DISCOVERY_TIMEOUT, Search, TieBreaker,
};
use hearthnet_orchestrator::link::{HostAddr, HostLink};
use hearthnet_orchestrator::router::{PolicyName, Speeds};
use hearthnet_orchestrator::sharded::watch::{Told, Watch};
use hearthnet_orchestrator::sharded::{
    AuditQueue, PumpSettings, RecomputeHere, ShardedBackend, recompute,
};
use hearthnet_orchestrator::{Backend, Cancel, ChatError, run_in_task};
use hearthnet_testkit::one_thread;
use hearthnet_transport::{CloseCode, Closer};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::here::Here;
use crate::host::transport;
use crate::judge::Judge;
use crate::lies::Lies;
use crate::model::{LAYERS, Model};
use crate::net::{Net, Node};
use crate::observer::{Actor, Observer};
use crate::random::Random;

/// Virtual time within which every call ends, counted from its beginning or, if that is later, from
/// the end of all faults. A host that is silent without a fallback is waited for longest.
pub(crate) const CALL_ENDS_WITHIN: Duration = Duration::from_secs(90);

/// Share of the spans that are audited. The daemon's is 5%.
const AUDIT_SHARE: f64 = 0.3;
/// Virtual time within which all audits end, counted from the end of all calls and faults.
const AUDITS_END_WITHIN: Duration = Duration::from_secs(300);

/// Pause between two attempts to connect, and between two looks at an open session.
const RECONNECT: Duration = Duration::from_millis(500);

/// A caller's sessions with its hosts.
struct Links {
    links: Mutex<Vec<Option<Arc<HostLink>>>>,
    /// All sessions so far: a call may still use one that was replaced.
    closers: Mutex<Vec<(Node, Closer)>>,
    /// Hosts that are no members.
    revoked: Mutex<BTreeSet<Node>>,
    changed: Notify,
}

impl Links {
    fn open(&self) -> Vec<Arc<HostLink>> {
        let links = self.links.lock();
        let open = links.iter().flatten().filter(|link| link.takes_streams());
        open.cloned().collect()
    }
}

/// A caller with its sessions. Dropping it ends them.
pub(crate) struct Caller {
    node: Node,
    actor: Actor,
    net: Net,
    model: Arc<Model>,
    links: Arc<Links>,
    choice: Choice,
    lies: Lies,
    connecting: Vec<JoinHandle<()>>,
    /// Queue of audits until the last call, and the task that does them.
    audits: Mutex<Option<AuditQueue>>,
    auditing: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.connecting.iter().for_each(JoinHandle::abort);
        self.auditing.lock().iter().for_each(JoinHandle::abort);
    }
}

pub(crate) fn key(node: Node) -> NodeKey {
    NodeKey::from_secret(&[100 + node as u8; 32])
}

impl Caller {
    /// Begins to connect with the hosts.
    pub(crate) fn new(
        node: Node,
        hosts: &[(Node, HostAddr)],
        model: &Arc<Model>,
        net: &Net,
        observer: &Observer,
        lies: &Lies,
        seed: u64,
    ) -> Self {
        let links = Arc::new(Links {
            links: Mutex::new(vec![None; hosts.len()]),
            closers: Mutex::default(),
            revoked: Mutex::default(),
            changed: Notify::new(),
        });
        let actor = observer.actor(format!("caller {node}"));
        let lots = Mutex::new(Random::new(seed, 300 + node as u64));
        let (queue, audits) =
            AuditQueue::new(move || (lots.lock().draw() >> 11) as f64 / 2f64.powi(53));
        let judge = Judge {
            caller: key(node).id(),
            actor: actor.clone(),
            model: Arc::clone(model),
            lies: lies.clone(),
        };
        let health = SharedHealth::new(TieBreaker::of_seed(seed ^ node as u64));
        health.on_evidence(Box::new(move |evidence| judge.judge(&evidence)));
        let mut caller = Self {
            node,
            actor,
            net: net.clone(),
            model: Arc::clone(model),
            links,
            choice: Choice {
                model: model.on_wire.clone(),
                max_shards: 16,
                own_id: key(node).id(),
                allow_self: false,
                exact: Exact::Require,
                policy: PolicyName::default(),
                speeds: Speeds::new(),
                health,
            },
            lies: lies.clone(),
            connecting: Vec::new(),
            audits: Mutex::new(Some(queue)),
            auditing: Mutex::new(Some(spawn_local(audits.run()))),
        };
        for (place, (host, addr)) in hosts.iter().cloned().enumerate() {
            let keep = caller.keep_connected(node, place, host, addr);
            caller.connecting.push(tokio::spawn(keep));
        }
        caller
    }

    /// Keeps a session with a host open, as `HostPool` does on demand.
    fn keep_connected(
        &self,
        node: Node,
        place: usize,
        host: Node,
        addr: HostAddr,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (net, links, actor) = (
            self.net.clone(),
            Arc::clone(&self.links),
            self.actor.clone(),
        );
        async move {
            loop {
                if links.revoked.lock().contains(&host) {
                    sleep(RECONNECT).await;
                    continue;
                }
                let link = links.links.lock().get(place).cloned().flatten();
                if let Some(link) = link
                    && link.takes_streams()
                    && link.answers(GRACE).await
                {
                    sleep(RECONNECT).await;
                    continue;
                }
                let connected = async {
                    let io = net.connect(node, host).await.ok()?;
                    let link = HostLink::connect_over(io, &addr, &key(node), transport()).await;
                    link.ok().map(Arc::new)
                };
                match connected.await {
                    Some(_) if links.revoked.lock().contains(&host) => {}
                    Some(link) => {
                        actor.note(format!("connected with host {host}"));
                        net.established(node, host);
                        links.closers.lock().push((host, link.closer()));
                        if let Some(place) = links.links.lock().get_mut(place) {
                            *place = Some(link);
                        }
                        links.changed.notify_waiters();
                    }
                    None => sleep(RECONNECT).await,
                }
            }
        }
    }

    /// Learns that a host is no member any more, or one again. As in `Node`, sessions with it end.
    pub(crate) fn revoke(&self, host: Node, is_revoked: bool) {
        match is_revoked {
            true => self.links.revoked.lock().insert(host),
            false => self.links.revoked.lock().remove(&host),
        };
        if !is_revoked {
            return;
        }
        let closers = self.links.closers.lock();
        for (_, closer) in closers.iter().filter(|(of, _)| *of == host) {
            closer.close(CloseCode::Revoked);
        }
        self.net.count_from_now(self.node, host);
    }

    /// Observer of a pipeline: an answer must be of the newest epoch under which its layers were asked
    /// for.
    fn watch_epochs(&self) -> Watch {
        let newest = Mutex::new([0u32; LAYERS as usize]);
        let actor = self.actor.clone();
        Watch::new(move |told| {
            let mut newest = newest.lock();
            let (Told::Asked { layers, epoch } | Told::Taken { layers, epoch, .. }) = told;
            let of_layers = newest.iter_mut().take(layers.1 as usize + 1);
            for newest in of_layers.skip(layers.0 as usize) {
                match told {
                    Told::Asked { .. } => *newest = epoch.max(*newest),
                    Told::Taken { position, .. } => {
                        actor.check(epoch == *newest, || {
                            format!(
                                "an answer for position {position} of layers {layers:?} is taken, of \
                                 epoch {epoch} instead of {newest}"
                            )
                        });
                    }
                }
            }
        })
    }

    fn source(&self) -> Source {
        Source {
            links: Arc::clone(&self.links),
            choice: self.choice.clone(),
        }
    }

    /// Checks that no session has exceeded its credit or its step slots.
    pub(crate) fn check_credit(&self) {
        for link in self.links.links.lock().iter().flatten() {
            let stats = link.stats();
            let holds = stats.credit_available <= stats.credit_granted
                && stats.steps_in_flight <= stats.steps_granted;
            // An ended session has neither.
            self.actor.check(holds || !link.is_open(), || {
                format!("beyond the window of a session: {stats:?}")
            });
        }
    }

    /// Answers one of the model's prompts, and checks each row and token against its transcript.
    /// `faults_end`: see [`CALL_ENDS_WITHIN`].
    pub(crate) async fn chat(&self, random: &mut Random, faults_end: Instant) -> bool {
        let number = random.below(self.model.transcripts.len() as u64) as usize;
        let falls_back = !random.one_in(3);
        self.actor
            .note(format!("asks prompt {number}, fallback: {falls_back}"));
        let until = Instant::now().max(faults_end) + CALL_ENDS_WITHIN;
        let answer = run_in_task(self.answer(number, falls_back, random));
        match timeout_at(until, answer).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                let code = error.code();
                self.actor.note(format!("the call ends with {code}"));
                // A defect, whatever the hosts do. With a fallback, no host can end a call.
                let is_fine = !falls_back && error.blames_host();
                self.actor
                    .check(is_fine, || format!("a call ended: {error}"));
                false
            }
            Err(_) => {
                self.actor.violated("a call does not end");
                false
            }
        }
    }

    /// Waits for the audits of all calls, and checks whom they blame.
    pub(crate) async fn finish_audits(&self) {
        self.audits.lock().take();
        let auditing = self.auditing.lock().take();
        if let Some(auditing) = auditing {
            let abort = auditing.abort_handle();
            match timeout(AUDITS_END_WITHIN, auditing).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.actor.violated(format!("audits: {error}")),
                Err(_) => {
                    abort.abort();
                    self.actor.violated("audits do not end");
                }
            }
        }
        for one in self.choice.health.all() {
            let (audits, host) = (one.audits, one.host.short());
            let blamed = |kind| one.failures.contains_key(&kind);
            let event = format!(
                "audits of {host}: {} answers, {} signed, {} confirmed, {} differ, {} not auditable",
                audits.answers,
                audits.signed,
                audits.confirmed,
                audits.mismatches,
                audits.not_auditable
            );
            self.actor.note(event);
            let is_liar = self.lies.is_liar(&one.host);
            self.actor
                .check(is_liar || !blamed(FailureKind::Corruption), || {
                    format!("{host} is blamed for wrong rows, and never lied")
                });
            // One of several hosts is wrong then.
            let differ = blamed(FailureKind::Disputed) || audits.mismatches > 0;
            self.actor.check(!differ || self.lies.exist(), || {
                format!("rows of {host} are disputed, and no host lied")
            });
        }
    }

    async fn answer(
        &self,
        number: usize,
        falls_back: bool,
        random: &mut Random,
    ) -> Result<(), ChatError> {
        let (cancel, handle) = (Cancel::new(), Handle::current());
        let settings = PumpSettings {
            give_up_after: falls_back.then_some(3),
            audit_share: AUDIT_SHARE,
            watch: Some(self.watch_epochs()),
            audits: self.audits.lock().clone(),
            ..PumpSettings::default()
        };
        let since = Instant::now();
        let source = Box::new(self.source());
        let hosts = ShardedBackend::opened(handle.clone(), source, settings, &cancel).await;
        let here = falls_back.then(|| {
            let model = Arc::clone(&self.model);
            let here: RecomputeHere =
                Arc::new(move |layers, rows| recompute(&model.file, layers, &one_thread(), rows));
            here
        });
        let hosts = hosts.map(|hosts| hosts.with_local_audits(here));
        let mut backend: Box<dyn Backend> = match falls_back {
            false => Box::new(hosts?),
            true => {
                let model = Arc::clone(&self.model);
                let load: LoadLocal = Arc::new(move || Ok(Box::new(Here::load(&model)?)));
                let exact = Exact::Require;
                Box::new(WithFallback::begun(hosts, since, load, exact, &handle, &cancel).await?)
            }
        };
        self.go_through(&mut *backend, number, random, &cancel)
            .await
    }

    /// Submits the prompt and then each token, and sometimes goes back.
    async fn go_through(
        &self,
        backend: &mut dyn Backend,
        number: usize,
        random: &mut Random,
        cancel: &Cancel,
    ) -> Result<(), ChatError> {
        let model = &self.model;
        let Some(transcript) = model.transcripts.get(number) else {
            return Ok(());
        };
        let (inputs, outputs) = (transcript.rows.first(), transcript.rows.last());
        let (Some(inputs), Some(outputs)) = (inputs, outputs) else {
            return Ok(());
        };
        let mut notify = |frame: Frame| match frame {
            Frame::ShardStatus { status, code, .. } => {
                let code = code.map(|code| code.to_string()).unwrap_or_default();
                self.actor.note(format!("host is {status} {code}"));
            }
            Frame::ShardFailover { code, replayed, .. } => {
                let event = format!("layers moved after {code}, {replayed} rows replayed");
                self.actor.note(event);
            }
            _ => {}
        };
        let begin = transcript.prompt.len();
        backend.begin_call((begin + transcript.answer.len()) as u32);
        // Rows from `from` to `end` are submitted; their last output gives the next token.
        let (mut from, mut end, mut furthest) = (0, begin, begin);
        while end < begin + transcript.answer.len() {
            let rows: Vec<f32> = inputs.get(from..end).unwrap_or_default().concat();
            backend.submit(Rows::at(from as u32, &rows), cancel).await;
            let mut run = Run {
                cancel,
                notify: &mut notify,
            };
            let row = backend.output(&mut run).await?;
            self.check_credit();
            let is_right = outputs.get(end - 1) == Some(&row);
            // A row that follows from a lie may give another token. All others are right, so what is
            // streamed up to the first lie is what a run without faults streams.
            let follows = || self.lies.explain(LAYERS, end as u32 - 1, &row);
            self.actor.check(is_right || follows(), || {
                format!(
                    "prompt {number}: the row of position {} is another one",
                    end - 1
                )
            });
            if !is_right {
                let event = format!("prompt {number}, token {} follows from a lie", end - begin);
                self.actor.note(event);
            }
            let token = model.next_token(&row);
            let expected = transcript.answer.get(end - begin).copied();
            self.actor.check(!is_right || token == expected, || {
                format!("prompt {number}: token {} is another one", end - begin)
            });
            self.actor
                .note(format!("prompt {number}, token {}", end - begin));
            from = end;
            end += 1;
            // Goes back once in a while, and submits the same rows again.
            if end > furthest && random.one_in(12) {
                furthest = end;
                let back = random.below(end as u64) as u32;
                from = backend.rewind(back).await? as usize;
                self.actor.note(format!("goes back to {back}, to {from}"));
            }
        }
        backend.end_call();
        Ok(())
    }
}

/// Hosts of a caller, for one chat.
struct Source {
    links: Arc<Links>,
    choice: Choice,
}

impl HostSource for Source {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        self.choice.among(&self.links.open(), search)
    }

    /// Waits for hosts as `HostPool` does.
    fn ready<'a>(&'a mut self, search: &'a Search<'_>) -> LocalBoxFuture<'a, ()> {
        let limit = match search.patience {
            Patience::None => Duration::ZERO,
            Patience::Short => SHORT_DISCOVERY_TIMEOUT,
            Patience::Long => hearthnet_orchestrator::hosts::DISCOVERY_TIMEOUT,
        };
        let links = Arc::clone(&self.links);
        let come = async move {
            loop {
                let changed = links.changed.notified();
                if self.route(search).is_ok() {
                    return;
                }
                // A session may have ended meanwhile.
                let _ = timeout(Duration::from_millis(200), changed).await;
            }
        };
        let come = timeout(limit, search.cancel.run_until_cancelled(come));
        come.map(drop).boxed_local()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn fork(&self) -> Option<Box<dyn HostSource>> {
        Some(Box::new(Self {
            links: Arc::clone(&self.links),
            choice: self.choice.clone(),
        }))
    }
}
