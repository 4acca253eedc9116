//! Fair turns between callers: start-time fair queueing.
//!
//! Each caller that waits has a *tag*: the rows that it has been given, on a scale that all share.
//! The one with the smallest tag is next, and what it is given is added to its tag. A caller that
//! comes, or comes back, begins at the *floor*, the tag of whoever was served last, unless its own
//! is greater: who was away has nothing saved up, and who comes back at once has not got rid of
//! what it was given.
//!
//! ```text
//! A sends without pause, 40 rows at a time; B comes in turn 3; a turn takes 40 rows
//! turn    1      2      3      4      5      6
//! serves  A      A      B      A      B      A
//! tag A   40     80     80     120    120    160
//! tag B                 80     80     120    120
//! ```
//!
//! *Bound.* If no caller is given more than `m` rows at once, the tags of all that have steps left
//! waiting lie between the floor and the floor + `m`, for one is at the floor when it is served. So
//! over any run of turns that leave steps of two callers waiting, the rows that the two are given
//! differ by at most `2 m`, however many streams each has: in decode turns `m` is the longest short
//! step (8 rows), in prefill turns the longest piece (at most 512). Where several callers decode, each has a row in every
//! decode turn, and the ledger says whose the rows are that there are more.
//!
//! Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996.

use std::collections::BTreeMap;

use hearthnet_transport::NodeId;

/// What callers have been given of one kind of turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ledger {
    floor: u64,
    /// Tags above the floor. As many as callers that were served of late: fewer than there are
    /// nodes that may connect, and none when nobody waits.
    tags: BTreeMap<NodeId, u64>,
}

impl Ledger {
    /// Where a caller stands that waits.
    pub(crate) fn tag(&self, caller: NodeId) -> u64 {
        let tag = self.tags.get(&caller).copied();
        tag.map_or(self.floor, |tag| tag.max(self.floor))
    }

    /// The caller with this tag, the smallest of those that wait, is next.
    pub(crate) fn reach(&mut self, tag: u64) {
        if tag > self.floor {
            self.floor = tag;
            self.tags.retain(|_, other| *other > tag);
        }
    }

    /// A caller is given rows.
    pub(crate) fn charge(&mut self, caller: NodeId, rows: u32) {
        let tag = self.tag(caller).saturating_add(u64::from(rows));
        self.tags.insert(caller, tag);
    }

    /// It did not get them after all.
    pub(crate) fn refund(&mut self, caller: NodeId, rows: u32) {
        if let Some(tag) = self.tags.get_mut(&caller) {
            *tag = tag.saturating_sub(u64::from(rows));
        }
    }

    /// Nobody is left waiting: all are even.
    pub(crate) fn settle(&mut self) {
        self.floor = 0;
        self.tags.clear();
    }
}
