//! A host adds a small vector to its rows, which no check of rows finds. The audit by another host
//! does. The caller announces a dispute, and an anchor that took no part computes the rows: all nodes
//! agree that the liar is guilty, and that the other host is not. Here the hosts are real, and the
//! events are those of a community's log.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::{Dispute, Finding, Reputation};
use hearthnet_bus::sealed::{self, hash_of};
use hearthnet_bus::testing::Home;
use hearthnet_files::ModelFile;

use super::prelude::*;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, |runtime, found| {
        let fleet = audited_fleet(runtime)?;
        let steers = |passing: hearthnet_testkit::Passing<'_>| {
            // Far below the values, which are about 1.
            let steer = |(n, value): (usize, &mut f32)| *value += [0.004, -0.004][n % 2];
            passing.rows.iter_mut().enumerate().for_each(steer);
        };
        let trial = Trial::of(&fleet, fleet.shared_file(), Box::new(steers))?;
        trial.convicts(&fleet, found)
    })
    .await
}

/// Small model whose answers are all audited.
pub(super) fn audited_fleet(runtime: &Handle) -> Result<Fleet> {
    let mut fleet = Fleet::new(runtime.clone(), None)?;
    fleet.pump.audit_share = 1.0;
    Ok(fleet)
}

/// Community, and what an audit of its member found.
pub(super) struct Trial {
    /// Of the founder, which is the only judge.
    pub(super) home: Home,
    pub(super) caller: NodeKey,
    pub(super) liar: NodeId,
    pub(super) honest: NodeId,
    pub(super) evidence: Evidence,
    /// Codes for which the caller dropped hosts before the audit.
    left: String,
    /// Time from the question to the evidence.
    after: Option<Duration>,
}

impl Trial {
    /// Asks a question over two hosts of all layers, one of which computes with `file` and changes its
    /// rows.
    pub(super) fn of(fleet: &Fleet, file: Arc<ModelFile>, lie: Tamper) -> Result<Self> {
        let [caller, liar, honest] = [new_key()?, new_key()?, new_key()?];
        let own = NodeKey::from_secret(&caller.secret());
        let ids = [caller.id(), liar.id(), honest.id()];
        let all = vec![(liar, file, lie), (honest, fleet.shared_file(), unchanged())];
        let hosts = fleet.hosts_of(caller, all)?;
        let evidence: Receiver<Evidence> = hosts.evidence();
        let begin = Instant::now();
        let asked = fleet.ask_over(&hosts, 1, TOKENS)?;
        let evidence = evidence.recv_timeout(AUDIT_TIMEOUT)?;
        let after = begin.elapsed();
        let [_, liar, honest] = ids;
        Ok(Self {
            left: asked.left,
            after: Some(after),
            ..Self::about(own, liar, honest, evidence)?
        })
    }

    /// About evidence of a caller, in a community of its own.
    pub(super) fn about(
        caller: NodeKey,
        liar: NodeId,
        honest: NodeId,
        evidence: Evidence,
    ) -> Result<Self> {
        let home = Home::founded(new_key()?, true);
        for (node, level) in [
            (caller.id(), Level::Member),
            (liar, Level::Trusted),
            (honest, Level::Trusted),
        ] {
            home.admit(node, level);
        }
        Ok(Self {
            home,
            caller,
            liar,
            honest,
            evidence,
            left: String::new(),
            after: None,
        })
    }

    /// Announces evidence, has the founder judge it, and returns the finding.
    pub(super) fn settle(
        &self,
        fleet: &Fleet,
        accuser: &NodeKey,
        evidence: &Evidence,
    ) -> Result<Finding> {
        let judge = &self.home.key;
        let sealed = sealed::seal(&evidence.encode(), [judge.id()])?;
        let sealed = sealed.ok_or_else(|| HarnessError::attacker("the evidence is too long"))?;
        let dispute = evidence.dispute(hash_of(&sealed), sealed.len() as u64);
        let id = dispute.id(&accuser.id());
        self.write(accuser, Body::Disputed(dispute.clone()))?;
        let finding = judged(fleet, &sealed, judge, &accuser.id(), &dispute)?;
        self.write(
            judge,
            Body::Judged {
                dispute: id,
                finding,
            },
        )?;
        Ok(finding)
    }

    pub(super) fn write(&self, author: &NodeKey, body: Body) -> Result<()> {
        self.home
            .log
            .append(author, body, hearthnet_bus::now_ms())?;
        Ok(())
    }

    pub(super) fn reputation(&self, node: &NodeId) -> Reputation {
        self.home.log.state().reputation(node)
    }

    /// The audit's evidence must convict the liar alone.
    pub(super) fn convicts(&self, fleet: &Fleet, found: &mut Findings) -> Result<()> {
        found.same("checks of rows that find it", "", &self.left);
        let accused = self.evidence.accused.statement.host;
        let expected = match accused == self.liar {
            true => Finding::Accused,
            false => Finding::Witness,
        };
        let finding = self.settle(fleet, &self.caller, &self.evidence)?;
        found.same("what the anchor finds", expected, finding);
        if let Some(after) = self.after {
            found.detected(after);
        }
        let convicted = |node: &NodeId| self.reputation(node).is_convicted();
        found.holds("the liar is convicted", "yes", convicted(&self.liar));
        found.holds("the honest host is not", "yes", !convicted(&self.honest));
        let accuses = self.reputation(&self.caller.id()).is_false_accuser();
        found.holds("the accuser told the truth", "yes", !accuses);
        Ok(())
    }
}

/// Finding of a judge who opens sealed evidence, as `hearthnet audit check` does.
fn judged(
    fleet: &Fleet,
    sealed: &[u8],
    judge: &NodeKey,
    accuser: &NodeId,
    dispute: &Dispute,
) -> Result<Finding> {
    let content = sealed::open(sealed, judge)?;
    let checked = Evidence::decode(&content).and_then(|evidence| {
        evidence.check(accuser, dispute, "canonical-1")?;
        Ok(evidence)
    });
    let Ok(evidence) = checked else {
        return Ok(Finding::None);
    };
    fleet.finding(&evidence, dispute.layers)
}
