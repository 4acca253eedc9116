//! Measurements that a node announces about itself, from which all members plan alike.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::NodeId;
use crate::identity::cbor::MAX_NUMBER;
use crate::identity::{by_format, raw_keys};

/// Maximum number of models that a node has measured.
pub const MAX_MODEL_SPEEDS: usize = 8;
/// Maximum number of links that a node has measured.
pub const MAX_LINK_SPEEDS: usize = 32;

/// Measurements of a node (`node.measured`). Its fields stand in canonical order, as in the structs
/// below. The default withdraws what the node has announced.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Links to members, at most [`MAX_LINK_SPEEDS`], one of each.
    pub links: Vec<LinkSpeed>,
    /// Models, at most [`MAX_MODEL_SPEEDS`], one of each.
    pub models: Vec<ModelSpeed>,
    /// Time for which the daemon had run when it announced this, in seconds.
    pub running_s: u32,
    /// Memory that the node would give to weights, keys and values.
    pub memory_bytes: u64,
    /// Share of the last seven days, or of the time since the node's first hour if that is shorter, in
    /// which the node was online, in thousandths.
    pub online_permille: u16,
}

/// Time of a node for parts of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpeed {
    /// Embedding and output matrix for one token on this node as caller, in us; 0: not
    /// known.
    pub head_us: u32,
    /// Time of a step of one row on this node as host, without its layers, in us.
    pub step_us: u32,
    #[serde(with = "by_format::hash")]
    pub weights: [u8; 32],
    /// Time of one row through one average layer, at batch 1, in us.
    pub layer_us: u32,
    /// Time per row of a prompt's chunk through one average layer, in us, rounded up.
    pub prefill_row_us: u32,
}

/// Speed of the link to one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpeed {
    #[serde(with = "raw_keys")]
    pub node: NodeId,
    /// Bandwidth in kbit/s; 0: not known.
    pub kbit_s: u32,
    /// Half a round trip with wake-ups, in us.
    pub delay_us: u32,
}

impl Measured {
    /// Times for parts of the model with these weights, if the node has announced any.
    pub fn speed_of(&self, weights: &[u8; 32]) -> Option<&ModelSpeed> {
        self.models.iter().find(|model| model.weights == *weights)
    }

    /// Checks numbers and ranges. The error is the rule that is broken.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let models: BTreeSet<_> = self.models.iter().map(|model| model.weights).collect();
        let links: BTreeSet<_> = self.links.iter().map(|link| link.node).collect();
        let rules = [
            (
                models.len() == self.models.len() && models.len() <= MAX_MODEL_SPEEDS,
                "a node measures at most 8 models, each once",
            ),
            (
                links.len() == self.links.len() && links.len() <= MAX_LINK_SPEEDS,
                "a node measures at most 32 links, each once",
            ),
            (
                self.memory_bytes <= MAX_NUMBER && self.online_permille <= 1000,
                "the measured memory or time online is out of its range",
            ),
        ];
        let mut rules = rules.into_iter();
        rules.try_for_each(|(fits, rule)| match fits {
            true => Ok(()),
            false => Err(rule),
        })
    }
}
