//! Disputes of this node: announces what its audits found, serves the sealed evidence, and, on an
//! anchor's node, fetches the evidence that it may judge, and judges it (`specs/disputes.md`).
//!
//! ```text
//! audit ─► found ─► announced, served
//! log ───► a task for each dispute that this node may judge: fetch ─► wait until idle ─► verdict
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::{Body, Case, Finding, Level};
use hearthnet_bus::node::weights::{Busy, Held, Object, WeightsStore};
use hearthnet_bus::receipt::Claim;
use hearthnet_bus::sealed::{hash_of, seal};
use hearthnet_files::WeightsId;
use hearthnet_hub::ModelRef;
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_transport::background;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep};

use super::weights::Parts;
use crate::answering::judge::{settle, text_of};
use crate::cli::{Failure, Stop, blocking, first_digits, note};
use crate::config::Context;
use crate::home::Home;
use crate::home::evidence::EvidenceFolder;
use crate::node::{Came, DaemonNode, EvidenceFetch, to_judge};

/// Evidences that wait to be announced, and their bytes. Further ones are dropped.
const WAITING: (usize, usize) = (16, 64 << 20);
/// Evidences that are fetched at once. Further ones take turns.
const FETCHES: usize = 4;
/// Pause before evidence that no member serves is asked for again. It doubles each time. At first
/// the accuser's address may not be known yet.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How long a verdict waits until this node computes nothing else. A busy node judges all the same.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between looks at that.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Parts of models, and sealed evidence, for other members.
pub(super) struct Shelf {
    pub(super) parts: Arc<Parts>,
    pub(super) evidence: EvidenceFolder,
}

impl WeightsStore for Shelf {
    fn held(&self, weights: &[u8; 32]) -> Option<Held> {
        self.parts.held(weights)
    }

    fn piece(&self, weights: &[u8; 32], index: u32) -> Option<Vec<u8>> {
        let piece = self.parts.piece(weights, index);
        piece.or_else(|| self.evidence.piece(weights, index))
    }

    fn read(&self, weights: &[u8; 32], object: Object, offset: u64, len: u32) -> Option<Vec<u8>> {
        self.parts.read(weights, object, offset, len)
    }
}

/// Evidence that waits to be announced, with its part of the memory for that.
pub(super) struct Found {
    evidence: Evidence,
    _memory: OwnedSemaphorePermit,
}

/// Bytes of an evidence in memory.
fn bytes_of(evidence: &Evidence) -> usize {
    let proofs = [Some(&evidence.accused), evidence.witness.as_ref()];
    let claims = proofs.into_iter().flatten();
    let claims: usize = claims.map(|proof| proof.claims.len()).sum();
    evidence.rows.len() + claims * size_of::<Claim>()
}

/// Evidence that the audits of this process find from now on.
pub(super) fn found(health: &SharedHealth) -> mpsc::Receiver<Found> {
    let (most, bytes) = WAITING;
    let (sender, found) = mpsc::channel(most);
    let memory = Arc::new(Semaphore::new(bytes));
    health.on_evidence(Box::new(move |evidence| {
        let bytes = u32::try_from(bytes_of(&evidence)).unwrap_or(u32::MAX);
        let taken = Arc::clone(&memory).try_acquire_many_owned(bytes);
        let sent = taken.is_ok_and(|_memory| {
            let found = Found { evidence, _memory };
            sender.try_send(found).is_ok()
        });
        // The audit has its consequences here in any case.
        if !sent {
            tracing::warn!("a dispute is not announced: too many wait, or the node ends");
        }
    }));
    found
}

/// Judge of disputes in the daemon of an anchor.
pub(super) struct Judge {
    pub(super) cx: Context,
    /// Model that this daemon was started with.
    pub(super) model: Option<(ModelRef, WeightsId)>,
    /// Whether this node computes something else.
    pub(super) busy: Busy,
}

#[derive(Clone)]
pub(super) struct Disputes {
    home: Home,
    node: Arc<DaemonNode>,
    evidence: EvidenceFolder,
    /// `None` if only commands judge.
    judge: Option<Arc<Judge>>,
    /// Transfers at once.
    fetches: Arc<Semaphore>,
    /// Held by the one verdict that is computed.
    bench: Arc<Semaphore>,
}

impl Disputes {
    pub(super) fn new(
        home: &Home,
        node: &Arc<DaemonNode>,
        evidence: EvidenceFolder,
        judge: Option<Judge>,
    ) -> Self {
        Self {
            home: home.clone(),
            node: Arc::clone(node),
            evidence,
            judge: judge.map(Arc::new),
            fetches: Arc::new(Semaphore::new(FETCHES)),
            bench: Arc::new(Semaphore::new(1)),
        }
    }

    /// Runs until a stop. `found` is absent if this node announces nothing.
    pub(super) async fn run(self, mut found: Option<mpsc::Receiver<Found>>, stop: Stop) {
        let mut changes = self.home.log.changes();
        // Ends its tasks when dropped.
        let mut tasks = JoinSet::new();
        let mut pursued = BTreeSet::new();
        self.follow(&mut tasks, &mut pursued).await;
        loop {
            let next = async {
                match &mut found {
                    Some(found) => found.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.asked() => return,
                found_one = next => match found_one {
                    Some(Found { evidence, _memory }) => self.announce(evidence).await,
                    None => found = None,
                },
                Some(_) = tasks.join_next() => {}
                changed = changes.changed() => match changed {
                    Ok(()) => self.follow(&mut tasks, &mut pursued).await,
                    Err(_) => return,
                },
            }
        }
    }

    /// Announces a dispute, if there is an anchor that can judge it.
    async fn announce(&self, evidence: Evidence) {
        let shown = evidence.accused.statement.host.short();
        match self.try_announce(evidence).await {
            Ok(Some(id)) => note(format!(
                "rows of the host {shown} were wrong: the dispute {} is for the anchors",
                first_digits(&id)
            )),
            Ok(None) => {
                tracing::info!(host = %shown, "a dispute is not announced: it is known, or no anchor can judge it");
            }
            Err(why) => {
                tracing::warn!(host = %shown, "a dispute is not announced: {}", why.with_hint());
            }
        }
    }

    async fn try_announce(&self, evidence: Evidence) -> Result<Option<[u8; 32]>, Failure> {
        let (state, own) = (self.home.state(), self.home.key.id());
        let draft = evidence.dispute([0; 32], 1);
        let is_known = |case: &Case| {
            case.accuser == own
                && case.dispute.accused == draft.accused
                && state.outcome(case).is_none()
        };
        let is_new = !state.reputation(&draft.accused).is_convicted()
            && !state.disputes().any(|(_, case)| is_known(case));
        let is_party = |node: &NodeId| *node == own || draft.hosts().any(|host| host == *node);
        let anchors = state.members().map(|(node, _)| *node);
        let anchors = anchors.filter(|node| state.level(node) == Some(Level::Anchor));
        let judges: Vec<NodeId> = anchors.filter(|node| !is_party(node)).collect();
        if !is_new || judges.is_empty() {
            return Ok(None);
        }
        let folder = self.evidence.clone();
        let stored = blocking(move || {
            let sealed = seal(&evidence.encode(), judges).map_err(Failure::internal)?;
            let Some(sealed) = sealed else {
                return Ok(None);
            };
            let put = folder.put(&sealed);
            put.map_err(|e| folder.failure("write", e))?;
            Ok(Some(
                evidence.dispute(hash_of(&sealed), sealed.len() as u64),
            ))
        });
        let Some(dispute) = stored.await? else {
            return Ok(None);
        };
        let id = dispute.id(&own);
        self.node
            .append(&self.home, Body::Disputed(dispute))
            .await?;
        Ok(Some(id))
    }

    /// Removes evidence of disputes that are not open any more, and begins tasks for those that
    /// this node may judge. A task that has ended is not begun again while its dispute is open.
    async fn follow(&self, tasks: &mut JoinSet<()>, pursued: &mut BTreeSet<[u8; 32]>) {
        let (state, own) = (self.home.state(), self.home.key.id());
        let open = state.disputes().map(|(_, case)| case);
        let open = open.filter(|case| state.outcome(case).is_none());
        let kept: BTreeSet<[u8; 32]> = open.map(|case| case.dispute.evidence).collect();
        let ids: BTreeSet<[u8; 32]> = to_judge(&state, &own).map(|(id, _)| *id).collect();
        for id in ids.difference(pursued) {
            tasks.spawn(self.clone().pursue(*id));
        }
        *pursued = ids;
        let folder = self.evidence.clone();
        let done = spawn_blocking(move || folder.keep(&kept)).await;
        if let Ok(Err(error)) = done {
            complain(&error);
        }
    }

    /// Fetches the evidence of a dispute, and judges it. Ends without, if the dispute is decided.
    async fn pursue(self, dispute: [u8; 32]) {
        let own = self.home.key.id();
        let mut fetch = EvidenceFetch::new(self.evidence.clone());
        let mut pause = PAUSE.0;
        let case = loop {
            let state = self.home.state();
            let found = to_judge(&state, &own).find(|(id, _)| **id == dispute);
            let Some((_, case)) = found else {
                return;
            };
            if self.evidence.has(&case.dispute.evidence) {
                break case.clone();
            }
            // The semaphore is fair, so that slow members of one dispute do not hold up the others.
            let turn = self.fetches.acquire().await;
            let came = fetch.turn(&self.node.node, &state, case).await;
            drop(turn);
            match came {
                Ok(Came::Whole | Came::More) => continue,
                Ok(Came::Nothing) => {}
                Err(error) => complain(&error),
            }
            sleep(pause).await;
            pause = PAUSE.1.min(pause * 2);
        };
        if let Some(judge) = &self.judge {
            match self.judged(judge, dispute, case).await {
                Ok(Some(finding)) => note(format!(
                    "judged the dispute {}: {}",
                    first_digits(&dispute),
                    text_of(finding)
                )),
                Ok(None) => {}
                Err(why) => note(format!(
                    "the dispute {} waits for `hearthnet audit check`: {}",
                    first_digits(&dispute),
                    why.with_hint()
                )),
            }
        }
    }

    /// Publishes a verdict, unless this node has judged the dispute before: it has withdrawn that.
    async fn judged(
        &self,
        judge: &Arc<Judge>,
        dispute: [u8; 32],
        case: Case,
    ) -> Result<Option<Finding>, Failure> {
        // It is never closed.
        let _bench = self.bench.acquire().await;
        let until = Instant::now() + IDLE_TIMEOUT;
        while (judge.busy)() && Instant::now() < until {
            sleep(LOOK_EVERY).await;
        }
        let (home, judge) = (self.home.clone(), Arc::clone(judge));
        let computed = background().spawn_blocking(move || -> Result<_, Failure> {
            if has_judged(&home, &dispute)? {
                return Ok(None);
            }
            let weights = WeightsId(case.dispute.weights);
            let own = judge.model.as_ref().filter(|(_, own)| *own == weights);
            let named = own.map(|(named, _)| named);
            settle(&home, &case, named, Some(1), &judge.cx).map(Some)
        });
        let finding = computed.await.map_err(Failure::internal)??;
        if let Some(finding) = finding {
            let verdict = Body::Judged { dispute, finding };
            self.node.append(&self.home, verdict).await?;
        }
        Ok(finding)
    }
}

fn complain(error: &std::io::Error) {
    tracing::warn!("the folder of evidence cannot be used: {error}");
}

/// Whether this home's log has a verdict of its node on a dispute, withdrawn or not.
fn has_judged(home: &Home, id: &[u8; 32]) -> Result<bool, Failure> {
    let (own, mut found) = (home.key.id(), false);
    home.log.records(|record| {
        let is_judged = matches!(&record.event.body, Body::Judged { dispute, .. } if dispute == id);
        found |= is_judged && record.event.author == own;
        Ok(!found)
    })?;
    Ok(found)
}
