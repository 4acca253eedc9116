//! Share of the caller's streams that a host may have.
//!
//! Claims are free, and a host that attracted all chats by them would see all of their activations.

use std::collections::BTreeMap;

use hearthnet_bus::NodeId;

use super::request::{Candidate, Usable};

/// Streams that a host may get regardless of its share: the first few show no pattern.
const FREE_STREAMS: u32 = 2;

/// Hosts that hold a layer, and the recent streams given to them.
pub(super) struct Share {
    hosts: u32,
    streams: u32,
}

impl Share {
    pub(super) fn of(layer: u32, usable: &[Usable<'_>]) -> Self {
        let here = usable.iter().filter(|(_, c)| c.holds(layer));
        let given: BTreeMap<NodeId, u32> =
            here.map(|(_, c)| (c.descriptor.host, c.streams)).collect();
        Self {
            hosts: u32::try_from(given.len()).unwrap_or(u32::MAX),
            streams: given.values().sum(),
        }
    }

    /// Returns true if one more stream would exceed a host's share: half of all streams, or twice
    /// an equal share, whichever is less. The caller's own node has no limit.
    pub(super) fn is_exceeded_by(&self, candidate: &Candidate) -> bool {
        let (own, all) = (
            u64::from(candidate.streams) + 1,
            u64::from(self.streams) + 1,
        );
        !is_free(candidate) && own * u64::from(self.hosts.max(4)) > 2 * all
    }
}

fn is_free(candidate: &Candidate) -> bool {
    candidate.is_self || candidate.streams < FREE_STREAMS
}

/// Whether a host exceeds its share at the first of its layers that is wanted.
pub(super) fn is_over(candidate: &Candidate, first: u32, usable: &[Usable<'_>]) -> bool {
    // Only hosts of recent streams get further, so the work is small under a flood of descriptors.
    !is_free(candidate)
        && Share::of(candidate.descriptor.layer_range.0.max(first), usable)
            .is_exceeded_by(candidate)
}
