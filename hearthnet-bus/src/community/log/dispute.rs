//! Disputes about signed rows, verdicts on them, and the reputation that follows
//! (`specs/disputes.md`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;
use sha2::{Digest as _, Sha256};

use super::adoption::MAX_MODEL_LAYERS;
use crate::identity::{by_format, raw_keys};
use crate::receipt::Hash;
use crate::{MAX_SEALED_BYTES, NodeId};

/// Maximum number of disputes in the state.
pub const MAX_DISPUTES: usize = 1024;
/// Maximum number of open disputes of a group of members.
pub const MAX_OPEN_DISPUTES: usize = 4;
/// Maximum number of judges of a dispute.
pub const MAX_JUDGES: usize = 16;

/// Announcement of a dispute (`audit.dispute`); its author is the accuser. Part of the state hash, so
/// its fields stand in canonical order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dispute {
    /// First and last layer.
    pub layers: (u32, u32),
    /// Host whose rows were audited.
    #[serde(with = "raw_keys")]
    pub accused: NodeId,
    /// Identity of the model's weights.
    #[serde(with = "by_format::hash")]
    pub weights: [u8; 32],
    /// Host that computed the rows again; `None` if the accuser did.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "raw_keys::option"
    )]
    pub witness: Option<NodeId>,
    /// SHA-256 of the sealed evidence.
    #[serde(with = "by_format::hash")]
    pub evidence: Hash,
    /// Digests of the receipts: the accused's, then the witness's.
    #[serde(with = "by_format::hashes")]
    pub receipts: Vec<Hash>,
    /// Length of the sealed evidence, at most [`MAX_SEALED_BYTES`].
    pub evidence_bytes: u64,
}

impl Dispute {
    /// Hosts whose rows contradict.
    pub fn hosts(&self) -> impl Iterator<Item = NodeId> {
        std::iter::once(self.accused).chain(self.witness)
    }

    /// Id of the dispute, if this node accuses.
    pub fn id(&self, accuser: &NodeId) -> Hash {
        let id = Sha256::new().chain_update(accuser.as_bytes());
        id.chain_update(self.evidence).finalize().into()
    }

    /// Checks lengths and ranges. The error is the rule that is broken.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let (lo, hi) = self.layers;
        let rules = [
            (
                lo <= hi && hi < MAX_MODEL_LAYERS,
                "the layers of a dispute run backwards, or no model has them",
            ),
            (
                self.witness != Some(self.accused),
                "a dispute has the same host twice",
            ),
            (
                self.receipts.len() == self.hosts().count(),
                "a dispute has one receipt of each host",
            ),
            (
                (1..=MAX_SEALED_BYTES as u64).contains(&self.evidence_bytes),
                "the length of a dispute's evidence is out of its range",
            ),
        ];
        let mut rules = rules.into_iter();
        rules.try_for_each(|(fits, rule)| match fits {
            true => Ok(()),
            false => Err(rule),
        })
    }
}

/// Result of a judge who computed the rows of a dispute.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
#[allow(clippy::exhaustive_enums)] // The format has these.
pub enum Finding {
    /// The accused signed wrong rows.
    Accused,
    /// The witness did.
    Witness,
    /// Both did.
    Both,
    /// The evidence shows no wrong rows: the accusation is false.
    None,
    /// The judge withdraws its earlier verdict.
    Withdrawn,
}

/// Announced dispute, with the verdicts on it. Part of the state hash, so its fields stand in
/// canonical order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Time of the announcement in Unix milliseconds, by the accuser's clock.
    #[serde(rename = "time")]
    pub time_ms: u64,
    /// Member that answered for the accuser at that time.
    #[serde(with = "raw_keys")]
    pub group: NodeId,
    #[serde(with = "raw_keys")]
    pub accuser: NodeId,
    pub dispute: Dispute,
    /// The last verdict of each judge.
    #[serde(with = "raw_keys::map")]
    pub verdicts: BTreeMap<NodeId, Finding>,
}

impl Case {
    /// Returns whether a node is accuser, accused or witness.
    pub fn is_party(&self, node: &NodeId) -> bool {
        self.accuser == *node || self.dispute.hosts().any(|host| host == *node)
    }

    /// Finding of more judges than any other. `None` while the dispute is open. Verdicts of nodes that
    /// were `revoked` do not count.
    pub(super) fn outcome(&self, revoked: impl Fn(&NodeId) -> bool) -> Option<Finding> {
        let mut votes: BTreeMap<Finding, usize> = BTreeMap::new();
        for (_, finding) in self.verdicts.iter().filter(|(judge, _)| !revoked(judge)) {
            let count = votes.entry(*finding).or_default();
            *count = count.saturating_add(1);
        }
        let most = votes.values().copied().max()?;
        let mut first = votes.into_iter().filter(|(_, count)| *count == most);
        match (first.next(), first.next()) {
            (Some((finding, _)), None) => Some(finding),
            _ => None,
        }
    }

    /// Nodes that an outcome finds guilty.
    pub(super) fn guilty(&self, outcome: Finding) -> [Option<NodeId>; 2] {
        let accused = Some(self.dispute.accused);
        match outcome {
            Finding::Accused => [accused, None],
            Finding::Witness => [None, self.dispute.witness],
            Finding::Both => [accused, self.dispute.witness],
            Finding::None | Finding::Withdrawn => [None, None],
        }
    }
}

/// Disputes that count for or against a node, by verdicts. The same on all nodes with the same events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct Reputation {
    /// Disputes in which it was found to have signed wrong rows.
    pub guilty: usize,
    /// False accusations by it.
    pub falsely_accused: usize,
}

impl Reputation {
    /// No route uses the node.
    pub fn is_convicted(&self) -> bool {
        self.guilty > 0
    }

    /// Its further disputes have no effect.
    pub fn is_false_accuser(&self) -> bool {
        self.falsely_accused > 0
    }
}

/// Disputes by id.
pub(super) type Cases = BTreeMap<ByteArray<32>, Case>;

/// Reputation of the nodes that have one, from all disputes.
pub(super) fn reputations(
    cases: &Cases,
    revoked: impl Fn(&NodeId) -> bool,
) -> BTreeMap<NodeId, Reputation> {
    let mut all: BTreeMap<NodeId, Reputation> = BTreeMap::new();
    for case in cases.values() {
        let Some(outcome) = case.outcome(&revoked) else {
            continue;
        };
        for node in case.guilty(outcome).into_iter().flatten() {
            let one = all.entry(node).or_default();
            one.guilty = one.guilty.saturating_add(1);
        }
        if outcome == Finding::None {
            let one = all.entry(case.accuser).or_default();
            one.falsely_accused = one.falsely_accused.saturating_add(1);
        }
    }
    all
}
