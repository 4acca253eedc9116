//! Moves of a running host with `--layers auto`. Pure; the rules are in `specs/shard-host.md` 7.
//!
//! ```text
//!  links           -> LostLinks -> gone --+
//!  advertisements, measurements ----------+-> Situation::wish -> WaitLimits -> Loads -> move
//! ```
//!
//! [`left_alone`] takes the place of [`Situation::wish`] in a host without any link.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_bus::NodeId;

use super::plan::{Community, Layers, Machine, Model, Moved, Purpose, Replanned, Task, replan};
use super::{Held, missing, settle};

/// Time after the end of its link in which a host still counts: it may reconnect or restart.
const GRACE_MS: u64 = 3_000;

/// Time after an advertisement in which hosts that started together may not have seen each other.
const TOGETHER_MS: u64 = 15_000;
/// How long a proposed move must hold within that time, or if the link to the host of missing layers
/// has ended: other advertisements may be on their way.
const SOON_MS: u64 = 1_500;
/// How long it must hold if layers are missing for another reason: a restarting host is back by then.
const LATER_MS: u64 = 20_000;
/// Time without any link after which a host counts as left alone although it has met no other host since
/// its start. After a power cut the others have as long to start.
const ALONE_MS: u64 = 120_000;
/// The same in a community without other members: the founder's neighbours may be about to join.
const FOUNDER_MS: u64 = 30_000;
/// How long it must hold if no layer is missing: measurements vary.
const BETTER_MS: u64 = 300_000;

/// Time in which the host that a plan names for missing layers has to take them, before plans do
/// without it. It doubles for each further host: each may have to fetch weights.
const TURN_MS: u64 = 30_000;

/// Full loads of this host's memory that its moves may take in an hour.
const LOADS_PER_HOUR: u64 = 4;
const HOUR_MS: u64 = 3_600_000;

/// Links that this node had, and when they ended.
#[derive(Debug, Default)]
pub struct LostLinks(BTreeMap<NodeId, Option<u64>>);

impl LostLinks {
    /// Takes the nodes that are linked now. Returns those whose link ended more than 3 s ago. A node
    /// without an earlier link is not among them: not all nodes are linked with each other.
    pub fn look(&mut self, now_ms: u64, linked: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        for node in linked {
            self.0.insert(*node, None);
        }
        let mut gone = BTreeSet::new();
        for (node, since) in &mut self.0 {
            if linked.contains(node) {
                continue;
            }
            let since = *since.get_or_insert(now_ms);
            if now_ms.saturating_sub(since) >= GRACE_MS {
                gone.insert(*node);
            }
        }
        gone
    }
}

/// Whether this host is with others: it is left alone if it was linked with another host of the model
/// before, or had no link to any member for a while, for example because it restarted or is the first
/// home of its community.
#[derive(Debug, Default)]
pub struct Together {
    /// Nodes that were linked, as hosts or before they served.
    met: BTreeSet<NodeId>,
    is_known: bool,
    last_link_ms: u64,
}

impl Together {
    /// Takes the time since the start, the nodes that are linked now, the other hosts, and whether the
    /// community has other members. Returns true if this host is left alone. Other nodes come and go,
    /// and a host that has met no other one takes the whole model only after a long time without any.
    pub fn has_ended(
        &mut self,
        now_ms: u64,
        linked: &BTreeSet<NodeId>,
        others: &[Held],
        has_members: bool,
    ) -> bool {
        self.met.extend(linked);
        self.is_known |= others.iter().any(|host| self.met.contains(&host.node));
        if !linked.is_empty() {
            self.last_link_ms = now_ms;
            return false;
        }
        let without = now_ms.saturating_sub(self.last_link_ms);
        let long = if has_members { ALONE_MS } else { FOUNDER_MS };
        self.is_known || without >= long
    }
}

/// Layers that are missing, and since when, as this host saw it.
#[derive(Debug, Default)]
pub struct MissingSince {
    runs: Vec<(u32, u32)>,
    since_ms: u64,
}

impl MissingSince {
    /// Takes the runs of layers that are missing now. Returns how many hosts, named by plans one after
    /// the other, have had time to take them. The time begins again when a further layer is missing.
    pub fn look(&mut self, now_ms: u64, runs: Vec<(u32, u32)>) -> u32 {
        let before = |run: &(u32, u32)| self.runs.iter().any(|b| b.0 <= run.0 && run.1 <= b.1);
        if !runs.iter().all(before) {
            self.since_ms = now_ms;
        }
        self.runs = runs;
        if self.runs.is_empty() {
            return 0;
        }
        let mut left = now_ms.saturating_sub(self.since_ms);
        let (mut turn, mut turns) = (TURN_MS, 0);
        while left >= turn {
            left -= turn;
            turn = turn.saturating_mul(2);
            turns += 1;
        }
        turns
    }
}

/// Reason for a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// Layers are missing, and the link to a host of some of them has ended.
    Lost,
    /// Layers are missing.
    Missing,
    /// This host is left alone ([`Together`]): the others are gone, its own network has failed, or it
    /// is the only home.
    LeftAlone,
    /// All layers are served, but the plan is faster or has more copies. Or the plan names another
    /// host for the missing layers, which has not taken them yet.
    Better,
}

/// Proposed move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Changed by hosts.
pub struct Wish {
    /// First and last layer, inclusive.
    pub range: (u32, u32),
    pub cause: Cause,
}

/// Returns the move of a host that is left alone: to all layers of the model, if they fit. It gives up
/// no layer, because its own network may have failed. Some of the missing layers would not help,
/// because no other host can be reached.
pub fn left_alone(total: u32, room: u32, mine: (u32, u32)) -> Option<Wish> {
    let range = (0, total.checked_sub(1)?);
    let is_larger = range != mine && total <= room;
    is_larger.then_some(Wish {
        range,
        cause: Cause::LeftAlone,
    })
}

/// Input of a running host's decision.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // Built by hosts.
pub struct Situation<'a> {
    /// Layers of the model.
    pub total: u32,
    /// Number of layers that fit into this host's memory.
    pub room: u32,
    pub mine: Held,
    /// Advertised ranges of the other hosts.
    pub others: &'a [Held],
    /// Nodes that cannot be reached, whatever they advertise.
    pub gone: &'a BTreeSet<NodeId>,
    /// Number of hosts that were named for the missing layers and did not take them; from
    /// [`MissingSince`].
    pub passed_over: u32,
    /// Measurements of this host and others, and the model without private layers. `None`: [`settle`]
    /// decides.
    pub measured: Option<(&'a Community, &'a Model)>,
}

impl Situation<'_> {
    /// Returns the range to which this host should move, if any.
    pub fn wish(&self) -> Option<Wish> {
        let there = self.there();
        let settled = || settle(self.total, self.room, self.mine, &there);
        let cause = self.cause(&there);
        let wish = |range, cause| Wish { range, cause };
        let Some((community, model)) = self.measured else {
            return settled().map(|range| wish(range, cause));
        };
        let planned = self.planned(community, model, &there, cause);
        let planned = planned.map(|range| wish(range, cause));
        planned.or_else(|| settled().map(|range| wish(range, Cause::Better)))
    }

    /// Returns the layers of this host's range that it keeps, if its memory does not hold all of them.
    pub fn kept(&self) -> Option<(u32, u32)> {
        let all = Layers::from_inclusive(self.mine.range);
        let is_large = all.count() > self.room;
        is_large.then(|| self.fitting(all, &self.there())).flatten()
    }

    /// Ranges of the other hosts that can be reached.
    fn there(&self) -> Vec<Held> {
        let there = self.others.iter().filter(|h| !self.gone.contains(&h.node));
        there.copied().collect()
    }

    /// Runs of layers that no reachable host holds.
    fn missing(&self, there: &[Held]) -> Vec<(u32, u32)> {
        let held = there.iter().chain([&self.mine]);
        let held: Vec<(u32, u32)> = held.map(|h| h.range).collect();
        missing(self.total, &held)
    }

    fn cause(&self, there: &[Held]) -> Cause {
        let runs = self.missing(there);
        let gone = self.others.iter().filter(|h| self.gone.contains(&h.node));
        let gone: Vec<(u32, u32)> = gone.map(|h| h.range).collect();
        let is_lost = |run: &(u32, u32)| gone.iter().any(|h| h.0 <= run.1 && run.0 <= h.1);
        if runs.is_empty() {
            Cause::Better
        } else if runs.iter().any(is_lost) {
            Cause::Lost
        } else {
            Cause::Missing
        }
    }

    /// Range of the plan, unless this host has it already or its move would take layers away.
    fn planned(
        &self,
        community: &Community,
        model: &Model,
        there: &[Held],
        cause: Cause,
    ) -> Option<(u32, u32)> {
        let task = Task {
            purpose: Purpose::Chat,
            caller: None,
        };
        // Each host limits its own loads, so that all hosts compute the same plan. If layers are
        // missing, the plan may use the half of the limit that is for them, so it has no copies.
        let is_covered = cause == Cause::Better;
        let moved = Moved {
            in_last_hour: if is_covered { 0 } else { u64::MAX / 2 },
            limit: u64::MAX,
        };
        let mut community = self.hosts(community, model, there);
        let mut next = replan(&community, model, task, moved).ok()?;
        // Plans do without hosts that had time to take missing layers, and did not: they may claim
        // memory that they do not have. This host is none of them, since it may be fetching weights.
        let mut stalled = BTreeSet::new();
        for _ in 0..self.passed_over {
            let named = named(&next, &self.missing(there));
            if named.is_empty() || named.contains(&self.mine.node) {
                break;
            }
            stalled.extend(named);
            community = community.map(|machine| {
                let is_fixed = machine.is_fixed || stalled.contains(&machine.node);
                let machine = machine.clone();
                Some(Machine {
                    is_fixed,
                    ..machine
                })
            });
            next = replan(&community, model, task, moved).ok()?;
        }
        let to = self.fitting(*next.plan.ranges.get(&self.mine.node)?, there)?;
        // A range that is too large costs nothing until it has to be loaded.
        let (lo, hi) = self.mine.range;
        if lo <= to.0 && to.1 <= hi {
            return None;
        }
        let moves = next.moves.iter().filter_map(|one| {
            let to = one.to?;
            let stays = one.from.is_some_and(|from| from.within(to) == to);
            (!stays).then_some((one.node, to))
        });
        let moves: BTreeMap<NodeId, Layers> = moves.collect();
        let may_leave = |h: &Held| {
            let is_unmeasured = community.machine(h.node).is_some_and(|m| m.is_fixed);
            stalled.contains(&h.node) || (is_unmeasured && self.may_settle(*h, there))
        };
        let stay = there.iter().filter(|h| is_covered || !may_leave(h));
        let stay: Vec<Held> = stay.copied().collect();
        is_safe(self.mine, to, &stay, &moves, is_covered).then_some(to)
    }

    /// Whether rule 3 may move the host `other`, which has measured nothing and so follows no plan.
    fn may_settle(&self, other: Held, there: &[Held]) -> bool {
        let others = there.iter().chain([&self.mine]);
        let others: Vec<Held> = others.filter(|h| h.node != other.node).copied().collect();
        settle(self.total, self.total, other, &others).is_some()
    }

    /// Hosts of the model that can be reached, and callers.
    fn hosts(&self, community: &Community, model: &Model, there: &[Held]) -> Community {
        community.map(|machine| {
            let mut machine = machine.clone();
            if machine.node == self.mine.node {
                machine.holds = Some(Layers::from_inclusive(self.mine.range));
            } else if self.gone.contains(&machine.node) {
                return None;
            } else if !there.iter().any(|h| h.node == machine.node) {
                machine.serves = false;
                machine.holds = None;
            }
            Some(machine.with_held(model))
        })
    }

    /// Part of a planned range that fits into this host's memory: with the fewest layers that others
    /// serve, then with the most layers that this host has.
    fn fitting(&self, planned: Layers, there: &[Held]) -> Option<(u32, u32)> {
        let size = planned.count().min(self.room);
        if size == 0 {
            return None;
        }
        let served = |layer: u32| there.iter().filter(|h| h.holds(layer)).count();
        let score = |lo: u32| {
            let window = lo..lo.saturating_add(size);
            let covered = window.clone().filter(|&layer| served(layer) > 0).count();
            let new = window.clone().filter(|&layer| !self.mine.holds(layer));
            let new = new.count();
            (covered, new, window.map(served).sum::<usize>(), lo)
        };
        let last = planned.end.saturating_sub(size);
        let lo = (planned.first..=last).min_by_key(|&lo| score(lo))?;
        Some((lo, lo.saturating_add(size - 1)))
    }
}

/// Nodes that are to take missing layers.
fn named(next: &Replanned, missing: &[(u32, u32)]) -> BTreeSet<NodeId> {
    let takes = |to: Layers| {
        let mut runs = missing.iter().map(|run| Layers::from_inclusive(*run));
        runs.any(|run| !run.within(to).is_empty())
    };
    let moves = next.moves.iter().filter(|one| one.to.is_some_and(takes));
    moves.map(|one| one.node).collect()
}

/// Whether the host `mine` can move to `to` without taking layers away, while others make `moves`.
///
/// A host serves nothing while it loads. Hosts with smaller ids go first: of all that move at once,
/// the last one that holds a layer waits, so the layer stays served. If layers are missing, no chat
/// runs anyway, so a host may load layers that it keeps.
fn is_safe(
    mine: Held,
    to: (u32, u32),
    there: &[Held],
    moves: &BTreeMap<NodeId, Layers>,
    is_covered: bool,
) -> bool {
    let stays_held = |layer: u32| {
        let mut holders = there.iter().filter(|h| h.holds(layer));
        holders.any(|h| match moves.get(&h.node) {
            None => true,
            Some(to) => h.node > mine.node || (!is_covered && to.holds(layer)),
        })
    };
    let is_kept = |layer: u32| !is_covered && to.0 <= layer && layer <= to.1;
    let (lo, hi) = mine.range;
    (lo..=hi).all(|layer| is_kept(layer) || stays_held(layer))
}

/// Debounces moves.
#[derive(Debug)]
pub struct WaitLimits {
    advertised_ms: u64,
    /// Since when a move is proposed, and its cause.
    wished: Option<(u64, Cause)>,
}

impl WaitLimits {
    /// Creates the debouncer of a host that advertised at `now_ms`.
    pub fn new(now_ms: u64) -> Self {
        Self {
            advertised_ms: now_ms,
            wished: None,
        }
    }

    /// True in the first 15 s after the advertisement: hosts that started together do not plan yet,
    /// since they may see different hosts.
    pub fn is_new(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.advertised_ms) < TOGETHER_MS
    }

    /// Takes the current proposal. Returns its range once a move has been proposed for long enough;
    /// the range may have changed meanwhile.
    pub fn look(&mut self, now_ms: u64, wish: Option<Wish>) -> Option<(u32, u32)> {
        let Some(wish) = wish else {
            self.wished = None;
            return None;
        };
        let cause = match wish.cause {
            // The same layers: the advertisement of a gone host has expired.
            Cause::Missing => Cause::Lost,
            cause => cause,
        };
        let before = self.wished.filter(|(_, before)| *before == cause);
        let since = before.map_or(now_ms, |(since, _)| since);
        self.wished = Some((since, cause));
        let wait = match wish.cause {
            Cause::Lost => SOON_MS,
            Cause::Missing if self.is_new(since) => SOON_MS,
            Cause::Missing | Cause::LeftAlone => LATER_MS,
            Cause::Better => BETTER_MS,
        };
        (now_ms.saturating_sub(since) >= wait).then_some(wish.range)
    }
}

/// Bytes that a host loaded to move, in the last hour.
#[derive(Debug, Default)]
pub struct Loads {
    /// Limit per hour: four times what fits into the host's memory. So a host can follow a few
    /// changes at once, but hosts that come and go do not keep its disk and its network busy.
    limit: u64,
    done: Vec<(u64, u64)>,
}

impl Loads {
    /// `full`: bytes of the layers that fit into the host's memory.
    pub fn new(full: u64) -> Self {
        Self {
            limit: full.saturating_mul(LOADS_PER_HOUR),
            done: Vec::new(),
        }
    }

    pub fn add(&mut self, now_ms: u64, bytes: u64) {
        self.done.push((now_ms, bytes));
    }

    /// Whether a move may load so many bytes. Without missing layers it may use half of the limit.
    pub fn allows(&mut self, now_ms: u64, bytes: u64, cause: Cause) -> bool {
        let is_recent = |at: u64| now_ms.saturating_sub(at) < HOUR_MS;
        self.done.retain(|(at, _)| is_recent(*at));
        let limit = match cause {
            Cause::Lost | Cause::Missing | Cause::LeftAlone => self.limit,
            Cause::Better => self.limit / 2,
        };
        let done = self.done.iter().map(|(_, bytes)| *bytes);
        done.fold(bytes, u64::saturating_add) <= limit
    }
}

#[cfg(test)]
#[path = "auto_tests.rs"]
mod tests;
