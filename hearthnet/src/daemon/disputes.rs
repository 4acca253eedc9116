//! Disputes of this node: announces what its audits found, serves the sealed evidence, and, on an
//! anchor's node, fetches the evidence that it may judge (`specs/disputes.md`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::{Body, Case, Level};
use hearthnet_bus::node::weights::{Held, Object, WeightsStore};
use hearthnet_bus::sealed::{hash_of, seal};
use hearthnet_orchestrator::health::SharedHealth;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::weights::Parts;
use crate::cli::{Failure, Stop, first_digits, note};
use crate::home::Home;
use crate::home::evidence::EvidenceFolder;
use crate::node::{DaemonNode, fetch_evidence, to_judge};

/// Evidences that wait to be announced, each of at most 32 MiB. Further ones are dropped.
const WAITING: usize = 16;
/// Interval between attempts to fetch evidence.
const FETCH_EVERY: Duration = Duration::from_secs(60);

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

/// Evidence that the audits of this process find from now on.
pub(super) fn found(health: &SharedHealth) -> mpsc::Receiver<Evidence> {
    let (sender, found) = mpsc::channel(WAITING);
    health.on_evidence(Box::new(move |evidence| {
        // The audit has its consequences here in any case.
        if sender.try_send(evidence).is_err() {
            tracing::warn!("a dispute is not announced: too many wait, or the node ends");
        }
    }));
    found
}

pub(super) struct Disputes {
    pub(super) home: Home,
    pub(super) node: Arc<DaemonNode>,
    pub(super) evidence: EvidenceFolder,
}

impl Disputes {
    /// Runs until a stop. `found` is absent if this node announces nothing.
    pub(super) async fn run(self, mut found: Option<mpsc::Receiver<Evidence>>, stop: Stop) {
        let mut changes = self.home.log.changes();
        let mut pause = tokio::time::interval(FETCH_EVERY);
        loop {
            let next = async {
                match &mut found {
                    Some(found) => found.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.asked() => return,
                evidence = next => match evidence {
                    Some(evidence) => self.announce(evidence).await,
                    None => found = None,
                },
                _ = pause.tick() => self.follow().await,
                changed = changes.changed() => match changed {
                    Ok(()) => self.follow().await,
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
        let stored = spawn_blocking(move || -> Result<_, Failure> {
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
        let Some(dispute) = stored.await.map_err(Failure::internal)?? else {
            return Ok(None);
        };
        let id = dispute.id(&own);
        self.node
            .append(&self.home, Body::Disputed(dispute))
            .await?;
        Ok(Some(id))
    }

    /// Removes evidence of disputes that are not open any more, and fetches what this node may judge.
    async fn follow(&self) {
        let (state, own) = (self.home.state(), self.home.key.id());
        let open = state.disputes().map(|(_, case)| case);
        let open = open.filter(|case| state.outcome(case).is_none());
        let kept: BTreeSet<[u8; 32]> = open.map(|case| case.dispute.evidence).collect();
        self.blocking(move |folder| folder.keep(&kept)).await;
        for (_, case) in to_judge(&state, &own) {
            if self.evidence.has(&case.dispute.evidence) {
                continue;
            }
            if let Some(sealed) = fetch_evidence(&self.node.node, &state, case).await {
                self.blocking(move |folder| folder.put(&sealed)).await;
            }
        }
    }

    async fn blocking(
        &self,
        work: impl FnOnce(EvidenceFolder) -> std::io::Result<()> + Send + 'static,
    ) {
        let folder = self.evidence.clone();
        let done = spawn_blocking(move || work(folder)).await;
        if let Ok(Err(error)) = done {
            tracing::warn!("the folder of evidence cannot be used: {error}");
        }
    }
}
