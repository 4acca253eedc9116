//! The observer's knowledge of wrong rows: which hosts have made them, and which rows follow from
//! them.
//!
//! Everything else that a run computes must be rows of a transcript. So each row of an answer is
//! either right, or it follows from a row that a lying host returned.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use hearthnet_bus::NodeId;
use parking_lot::Mutex;

/// Lies of a run. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Lies(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    /// Hosts that have returned a wrong row by themselves.
    liars: BTreeSet<NodeId>,
    /// Rows that follow from lies: the layer before which they are, position, hash.
    rows: BTreeSet<(u32, u32, u64)>,
}

fn hash(row: &[f32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for value in row {
        value.to_bits().hash(&mut hasher);
    }
    hasher.finish()
}

impl Lies {
    /// A host returns wrong rows.
    pub(crate) fn told_by(&self, host: NodeId) {
        self.0.lock().liars.insert(host);
    }

    pub(crate) fn is_liar(&self, host: &NodeId) -> bool {
        self.0.lock().liars.contains(host)
    }

    /// True if any host has lied.
    pub(crate) fn exist(&self) -> bool {
        !self.0.lock().liars.is_empty()
    }

    /// A host returns a row that follows from a lie. `layer`: the one behind it.
    pub(crate) fn note(&self, layer: u32, position: u32, row: &[f32]) {
        self.0.lock().rows.insert((layer, position, hash(row)));
    }

    /// True if a row follows from a lie.
    pub(crate) fn explain(&self, layer: u32, position: u32, row: &[f32]) -> bool {
        let known = self.0.lock();
        !known.rows.is_empty() && known.rows.contains(&(layer, position, hash(row)))
    }
}
