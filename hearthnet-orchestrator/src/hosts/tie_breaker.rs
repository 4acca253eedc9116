//! Order of hosts that are otherwise equal.

use std::hash::{BuildHasher as _, DefaultHasher, Hash as _, Hasher as _, RandomState};

use hearthnet_bus::NodeId;

/// Secret key of the tie-break. Callers thus prefer different ones of otherwise equal hosts, and no
/// host can choose a node id that comes first.
#[derive(Debug, Clone)]
pub struct TieBreaker(u64);

impl TieBreaker {
    pub fn random() -> Self {
        Self(RandomState::new().hash_one(()))
    }

    /// For simulations, which have to be repeatable.
    pub fn of_seed(seed: u64) -> Self {
        Self(seed)
    }

    /// Place of a host among equal ones.
    pub(crate) fn rank(&self, host: &NodeId) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.0, host).hash(&mut hasher);
        hasher.finish()
    }
}
