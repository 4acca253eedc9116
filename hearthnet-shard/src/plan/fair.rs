//! Fairness between callers: start-time fair queueing.
//!
//! Each waiting caller has a *tag*: the rows that it has been given, on a common scale. The caller
//! with the smallest tag is next, and its rows are added to its tag. A caller that arrives or
//! returns begins at the *floor*, the tag of the caller served last, unless its own tag is greater.
//! So absence earns no credit, and a caller that leaves and returns at once keeps its debt.
//!
//! ```text
//! A sends without pause, 40 rows at a time; B comes in turn 3; a turn takes 40 rows
//! turn    1      2      3      4      5      6
//! serves  A      A      B      A      B      A
//! tag A   40     80     80     120    120    160
//! tag B                 80     80     120    120
//! ```
//!
//! *Bound.* If no caller is given more than `m` rows at once, the tags of all waiting callers lie
//! between the floor and the floor + `m`, since a served caller's tag is at the floor. So over any
//! run of batches that leave steps of two callers waiting, their rows differ by at most `2 m`,
//! however many streams each has. In decode batches `m` is the longest short step (8 rows), in
//! prefill batches the longest chunk (at most 512). If several callers decode, each has a row in
//! every decode batch, and the ledger assigns the extra rows.
//!
//! Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996.

use std::collections::BTreeMap;

use hearthnet_transport::NodeId;

/// Rows given to callers in one kind of batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ledger {
    floor: u64,
    /// Tags above the floor, one per recently served caller. Bounded by the nodes that may connect;
    /// empty when no step waits.
    tags: BTreeMap<NodeId, u64>,
}

impl Ledger {
    /// Tag of a waiting caller.
    pub(crate) fn tag(&self, caller: NodeId) -> u64 {
        let tag = self.tags.get(&caller).copied();
        tag.map_or(self.floor, |tag| tag.max(self.floor))
    }

    /// Moves the floor to `tag`, the smallest tag of the waiting callers.
    pub(crate) fn reach(&mut self, tag: u64) {
        if tag > self.floor {
            self.floor = tag;
            self.tags.retain(|_, other| *other > tag);
        }
    }

    /// Adds rows to a caller's tag.
    pub(crate) fn charge(&mut self, caller: NodeId, rows: u32) {
        let tag = self.tag(caller).saturating_add(u64::from(rows));
        self.tags.insert(caller, tag);
    }

    /// Takes back rows that the caller did not get.
    pub(crate) fn refund(&mut self, caller: NodeId, rows: u32) {
        if let Some(tag) = self.tags.get_mut(&caller) {
            *tag = tag.saturating_sub(u64::from(rows));
        }
    }

    /// Resets all tags: no step waits any more.
    pub(crate) fn settle(&mut self) {
        self.floor = 0;
        self.tags.clear();
    }
}
