//! Computes the durable state from the durable events.
//!
//! | concept | file |
//! |---|---|
//! | passes over the events, cuts | here |
//! | rights of authors | `rights.rs` |
//! | whether an event may have its effect, and the effect of each kind | `kinds.rs` |
//! | disputes and verdicts | `disputes.rs` |
//! | reasons why an event has no effect | [`NoEffect`], `no_effect.rs` |
//!
//! Events are applied in the order of their [`Position`]s. Each is judged in the state just before
//! it. An event that its author may not make has no effect.
//!
//! # Demotions and revocations are retroactive
//!
//! A revocation or a change of level names the last event of the node that its author had seen.
//! Later events of the node have no more effect than its remaining level allows, *even if they sort
//! before*. Otherwise a revoked or demoted node could keep its former rights by making events with
//! small Lamport times. The effect of an event can therefore depend on events after it, and the
//! state is defined in three steps (`specs/event-log.md`, section 5):
//!
//! 1. The root's revocations and changes of level always hold. They give the first cuts: for a
//!    revoked node `node -> last event`, for another node `node -> (level, last event)`.
//! 2. All events are applied under these cuts. This decides which revocations and changes of level
//!    by anchors hold. Being an anchor depends on the root and on anchors only, never on nodes that
//!    anchors may revoke or demote.
//! 3. If step 2 cuts off an event that had an effect, all events are applied once more, with the
//!    revocations of step 2 that are not cut off themselves, and under their cuts. If a change of
//!    level holds only now, because step 2 took its author for revoked, this pass is repeated with
//!    its limit, at most [`MAX_REPEATS`] times.
//!
//! Normally no effect is cut off, because the revocation or demotion names the node's last event.
//! Then one pass gives the same result, and events that sort last are applied as they come.
//! [`Fold::apply`] returns [`Effect::Retroactive`] if that shortcut is not possible.

mod disputes;
mod kinds;
mod no_effect;
mod rights;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use self::no_effect::NoEffect;
use super::body::{Body, Level};
use super::community::Durable;
use super::event::{Event, Position};
use crate::identity::raw_keys::{self, RawKey};
use crate::{CommunityId, NodeId};

/// Maximum number of members and revoked nodes together. Heads and views list them all.
pub const MAX_MEMBERS: usize = 4096;

/// Maximum number of invites in the state. Closed ones are removed to make room for new ones.
pub const MAX_INVITES: usize = 1024;

/// Maximum number of models that a community adopts at a time.
pub const MAX_MODELS: usize = 16;

/// Version of the effects of kinds. It rises when a kind gets an effect, because snapshots of older
/// programs lack the effects of such events.
const RULES: u32 = 3;

/// Maximum number of repetitions of step 3. Each reads all events.
const MAX_REPEATS: u8 = 3;

/// Effect of an event on the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    Plain,
    /// The event takes a level from a node, and with it the right to events that already had an
    /// effect: the state must be computed again from all events. [`Fold::apply`] does not apply
    /// this event.
    Retroactive,
}

/// State while events are applied, with all that is needed to continue. Snapshots store this.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Fold {
    #[serde(with = "raw_keys")]
    root: NodeId,
    /// [`RULES`] by which the state was computed.
    #[serde(default)]
    rules: u32,
    pub(super) state: Durable,
    /// Last event of each of these authors that counts (revocations).
    #[serde(with = "raw_keys::map")]
    cuts: Cuts,
    /// Changes of level, by node. An event that sorts before such a change, but has a greater
    /// number than the change names, is judged by the lower of the two levels.
    #[serde(default, with = "raw_keys::map")]
    levels: BTreeMap<NodeId, BTreeSet<LevelCut>>,
    /// Number of the last event of each author that had an effect.
    #[serde(with = "raw_keys::map")]
    effective: BTreeMap<NodeId, u64>,
    /// Authors whose events had an effect in step 2 or 3. Their events are kept even if the result
    /// does not list the authors as members.
    acted: BTreeSet<[u8; 32]>,
    /// Positions of the revocations that hold, in step 3 and in a replay.
    decided: Option<BTreeSet<Position>>,
    /// Revocations by anchors that were found to hold, with the cuts that they make.
    found: BTreeMap<Position, (RawKey, u64)>,
    /// Position of the last applied event.
    pub(super) at: Option<Position>,
    /// Number of applied events.
    pub(super) count: u64,
}

/// Last event of each of these authors that counts.
type Cuts = BTreeMap<NodeId, u64>;

/// Returns whether an event with this number is later than the last one that counts.
fn is_cut_off(cuts: &Cuts, author: &NodeId, seq: u64) -> bool {
    cuts.get(author).is_some_and(|last| seq > *last)
}

/// Change of a member's level, as a limit on events that sort before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct LevelCut {
    /// Position of the change.
    place: Position,
    /// Last event of the member that the author of the change had seen.
    last_seq: u64,
    level: Level,
}

impl Fold {
    pub(super) fn new(community: CommunityId) -> Self {
        Self {
            root: community.root(),
            rules: RULES,
            state: Durable::default(),
            cuts: BTreeMap::new(),
            levels: BTreeMap::new(),
            effective: BTreeMap::new(),
            acted: BTreeSet::new(),
            decided: None,
            found: BTreeMap::new(),
            at: None,
            count: 0,
        }
    }

    /// Returns whether a snapshot is of this community, and by the rules of this program.
    pub(super) fn is_usable(&self, community: CommunityId) -> bool {
        self.root == community.root() && self.rules == RULES
    }

    /// Returns whether the log stores this author's events without the limits for strangers. That
    /// holds for the root, for current and former members, and for authors of events that had an
    /// effect.
    pub(super) fn knows(&self, author: &NodeId) -> bool {
        self.state.knows(self.community(), author) || self.acted.contains(author.as_bytes())
    }

    /// Returns whether an event at this position sorts after all applied ones.
    pub(super) fn is_before(&self, position: Position) -> bool {
        self.at.is_none_or(|at| at < position)
    }

    /// Returns whether events that sort last can be applied and snapshots used. After a retroactive
    /// revocation they cannot, because the states before it have changed.
    pub(super) fn is_plain(&self) -> bool {
        self.decided.is_none()
    }

    /// Returns whether an event of this author with at least this number had an effect.
    pub(super) fn had_effect(&self, author: &NodeId, from_seq: u64) -> bool {
        self.effective
            .get(author)
            .is_some_and(|seq| *seq >= from_seq)
    }

    /// Computes the state from all events. Each call of `scan` passes all of them in their order.
    pub(super) fn of_all<E>(
        community: CommunityId,
        mut scan: impl FnMut(&mut dyn FnMut(&Event)) -> Result<(), E>,
    ) -> Result<Self, E> {
        let root = community.root();
        let mut first = Self::new(community);
        scan(&mut |event| {
            if event.author != root {
                return;
            }
            match event.body {
                Body::Revoked { node, last_seq } if node != root => first.cut(node, last_seq),
                Body::LevelChanged {
                    node,
                    level,
                    last_seq: Some(last_seq),
                } => first.cut_level(event, node, level, last_seq),
                _ => {}
            }
        })?;
        let mut second = first.clone();
        let mut retroactive = false;
        scan(&mut |event| {
            // An event that is cut off keeps its effect here: this pass only decides which
            // revocations hold.
            retroactive |= second.step(event, true) == Ok(Effect::Retroactive);
        })?;
        if !retroactive {
            return Ok(second);
        }
        let mut third = first;
        let mut decided = BTreeSet::new();
        // A revocation is cut off only by one that sorts after it, because a revoked node has no
        // rights from there on. So the last one holds, and then decides about those before it.
        for (place, (node, last_seq)) in second.found.into_iter().rev() {
            if !is_cut_off(&third.cuts, &place.author, place.seq) {
                third.cut(node.0, last_seq);
                decided.insert(place);
            }
        }
        third.levels = second.levels;
        for limits in third.levels.values_mut() {
            limits.retain(|LevelCut { place, .. }| {
                !is_cut_off(&third.cuts, &place.author, place.seq)
            });
        }
        third.decided = Some(decided);
        third.acted = second.acted;
        // A change of level may hold only now: step 2 took its author for revoked, by a revocation
        // that is void. It must limit events that sort before it too. The limits only grow, so that
        // the repetitions end.
        let mut repeats = 0..MAX_REPEATS;
        loop {
            let mut pass = third.clone();
            scan(&mut |event| {
                let _ = pass.step(event, true);
            })?;
            if pass.levels == third.levels || repeats.next().is_none() {
                // A replay starts from the limits under which this pass started.
                pass.levels = third.levels;
                return Ok(pass);
            }
            third.levels = pass.levels;
            third.acted = pass.acted;
        }
    }

    /// Creates a fold without applied events. Applying all events to it leads to the state of this
    /// one, with the same result for each event.
    pub(super) fn replay(&self) -> Self {
        let mut replay = Self::new(self.community());
        replay.cuts.clone_from(&self.cuts);
        replay.levels.clone_from(&self.levels);
        let found = || self.found.keys().copied().collect();
        replay.decided = Some(self.decided.clone().unwrap_or_else(found));
        replay
    }

    /// Applies the next event of a replay and returns whether it had an effect.
    pub(super) fn again(&mut self, event: &Event) -> Result<(), NoEffect> {
        self.step(event, true).map(|_| ())
    }

    /// Applies an event that sorts after all others. With [`Effect::Retroactive`], the state is
    /// unchanged.
    pub(super) fn apply(&mut self, event: &Event) -> Result<Effect, NoEffect> {
        let takes = matches!(event.body, Body::Revoked { .. } | Body::LevelChanged { .. });
        if !self.is_plain() && takes {
            return Ok(Effect::Retroactive);
        }
        self.step(event, false)
    }

    /// Returns whether an event that sorts after all others would have an effect.
    pub(super) fn check(&self, event: &Event) -> Result<(), NoEffect> {
        let mut after = self.clone();
        after.decided = None;
        after.step(event, true).map(|_| ())
    }

    fn cut(&mut self, node: NodeId, last_seq: u64) {
        let cut = self.cuts.entry(node).or_insert(last_seq);
        *cut = last_seq.min(*cut);
    }

    /// Records that `event` sets a level. If all cuts are known already, this changes nothing.
    fn cut_level(&mut self, event: &Event, node: NodeId, level: Level, last_seq: u64) {
        let cut = LevelCut {
            place: event.position(),
            last_seq,
            level,
        };
        self.levels.entry(node).or_default().insert(cut);
    }

    /// Returns whether an event, the next one of a [replay](Self::replay), counts for less than its
    /// author's level at its position: the author of a later revocation or demotion had not seen
    /// it.
    pub(super) fn is_void(&self, event: &Event) -> bool {
        is_cut_off(&self.cuts, &event.author, event.seq)
            || self.actor(event) < self.state.actor(self.community(), &event.author)
    }

    fn step(&mut self, event: &Event, go_on: bool) -> Result<Effect, NoEffect> {
        let applied = self.judge(event, go_on);
        if applied == Ok(Effect::Retroactive) && !go_on {
            return applied;
        }
        if applied.is_ok() {
            self.effective.insert(event.author, event.seq);
            self.acted.insert(*event.author.as_bytes());
        }
        self.at = Some(event.position());
        self.count = self.count.saturating_add(1);
        applied
    }

    fn community(&self) -> CommunityId {
        CommunityId::from(self.root)
    }
}
