//! KV pages when they are scarce: admission of streams, and choice of victims. Pure functions.
//!
//! The budget is overcommitted. A stream is opened when there is a page for it to begin with, and
//! takes more as it grows. When none is left for a step, a *victim* ends with `preempted`; its
//! caller opens it again later and replays it. Victims are chosen in this order:
//!
//! 1. the stream that has been idle for longest: a conversation kept for its next turn, as declared
//!    by its caller or concluded from its silence ([`IDLE_AFTER`]);
//! 2. of the callers that hold more than their *fair share* (all pages, divided by the callers
//!    whose streams run), the least progressed stream; of equals, the youngest. The asking caller
//!    counts with the pages that it asks for, so its own stream, even the asking one, can be the
//!    victim.
//!
//! A stream of a model with recurrent layers takes memory for their states beside the pages of its
//! positions, from its first position on ([`Pool::base`]). It counts in whole pages.
//!
//! When a caller has reached its own share of the KV ([`Pool::quota`]), only streams of its own are
//! victims, in the same order.
//!
//! Consequences:
//!
//! - There is always a victim. If the asking caller stays within its fair share, the others hold
//!   more than theirs together, so one of them holds more than its own.
//! - No running stream of a caller within its fair share is a victim.
//! - Of the callers beyond it, the most progressed stream goes last; with one caller, it is never a
//!   victim. So it completes, and then the next one does.
//! - A stream alone on the host gets all pages.
//!
//! Example: 10 pages. A has streams of 5 and 3 pages, B one of 2, and B needs another page. Both
//! run, so the fair share is 5; A holds 8. The victim is A's stream of 3 pages.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use hearthnet_engine::Footprint;
use hearthnet_transport::NodeId;

/// A stream without events for this long counts as idle. Steps of an answer follow each other
/// faster on all but the slowest pipelines. On a slower one the only harm is that the stream is
/// preempted first when memory is short.
pub(crate) const IDLE_AFTER: Duration = Duration::from_secs(5);

/// The same limit for a stream that holds no rows: there is nothing to replay.
pub(crate) const UNUSED_AFTER: Duration = Duration::from_secs(1);

/// Page budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) total: u32,
    /// Limit of pages per caller, at most `total`.
    pub(crate) quota: u32,
    /// Positions per page, at least 1.
    pub(crate) page: u32,
    /// Pages that a stream takes whatever its length, once it has a position.
    pub(crate) base: u32,
}

impl Pool {
    /// Pages that fit a budget in bytes, if each caller may hold `percent` per cent. If pages take
    /// no memory, their number is unlimited.
    pub(crate) fn new(budget: u64, footprint: &Footprint, percent: u32) -> Self {
        let small = |pages: u64| u32::try_from(pages).unwrap_or(u32::MAX);
        let pages = budget.checked_div(footprint.unit());
        let total = small(pages.unwrap_or(u64::MAX));
        let (page, base) = match footprint.page_bytes() {
            // One page holds a stream of any length.
            0 if footprint.per_sequence > 0 => (u32::MAX, 0),
            0 => (footprint.page.max(1), 0),
            bytes => (
                footprint.page.max(1),
                small(footprint.per_sequence.div_ceil(bytes)),
            ),
        };
        Self {
            total,
            quota: Self::quota(total, percent),
            page,
            base,
        }
    }

    fn quota(total: u32, percent: u32) -> u32 {
        let quota = u64::from(total) * u64::from(percent.min(100)) / 100;
        u32::try_from(quota).unwrap_or(total)
    }

    /// Pool of at least the pages that streams hold. A smaller budget takes no page from a stream;
    /// the pool shrinks as streams end.
    pub(crate) fn holding(&self, held: u32, percent: u32) -> Self {
        let total = self.total.max(held);
        Self {
            total,
            quota: Self::quota(total, percent),
            ..*self
        }
    }

    /// Pages for so many positions.
    pub(crate) fn pages(&self, positions: u32) -> u32 {
        match positions {
            0 => 0,
            _ => positions.div_ceil(self.page).saturating_add(self.base),
        }
    }

    /// Pages that a stream takes to begin with.
    pub(crate) fn least(&self) -> u32 {
        self.pages(1)
    }

    /// Positions that one stream can have in so many pages.
    pub(crate) fn holds(&self, pages: u32) -> u32 {
        self.fits(0, pages)
    }

    /// Additional pages that a stream of `length` needs for `rows` more.
    pub(crate) fn needs(&self, length: u32, rows: u32) -> u32 {
        self.pages(length.saturating_add(rows)) - self.pages(length)
    }

    /// Rows that fit a stream of `length` with `pages` more.
    pub(crate) fn fits(&self, length: u32, pages: u32) -> u32 {
        self.pages(length)
            .saturating_add(pages)
            .saturating_sub(self.base)
            .saturating_mul(self.page)
            .saturating_sub(length)
    }
}

/// Page use of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) stream: u64,
    pub(crate) caller: NodeId,
    /// Positions in its KV: its progress.
    pub(crate) length: u32,
    /// Pages that it holds, including those given by the planned batch.
    pub(crate) pages: u32,
    /// Time of the last event on it.
    pub(crate) active: Duration,
    /// No step of it waits, and its caller has paused it or sent nothing for long.
    pub(crate) idle: bool,
}

/// A stream that needs more pages than are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) stream: u64,
    pub(crate) caller: NodeId,
    /// Number of pages, at least 1.
    pub(crate) pages: u32,
}

pub(crate) fn held_by(holders: &[Holder], caller: NodeId) -> u32 {
    holders
        .iter()
        .filter(|holder| holder.caller == caller)
        .map(|holder| holder.pages)
        .fold(0, u32::saturating_add)
}

/// Chooses the stream to preempt for `need` (see the module); one may not be enough. `None` only if
/// there is no stream to choose from, which means that the need can be met without one.
pub(crate) fn victim(holders: &[Holder], pool: &Pool, need: &Need) -> Option<u64> {
    let own = held_by(holders, need.caller).saturating_add(need.pages);
    let beyond_quota = own > pool.quota;
    let in_question = |holder: &&Holder| !beyond_quota || holder.caller == need.caller;
    let kept = holders
        .iter()
        .filter(in_question)
        .filter(|holder| holder.idle && holder.pages > 0)
        .min_by_key(|holder| (holder.active, holder.stream));
    if let Some(kept) = kept {
        return Some(kept.stream);
    }
    let mut by_caller: BTreeMap<NodeId, u32> = BTreeMap::new();
    for holder in holders {
        // A stream without pages counts too: its caller runs.
        let pages = by_caller.entry(holder.caller).or_default();
        *pages = pages.saturating_add(holder.pages);
    }
    by_caller.insert(need.caller, own);
    by_caller.retain(|caller, pages| *pages > 0 || runs(holders, *caller));
    let share = fair_share(pool, by_caller.len());
    let beyond = |holder: &&Holder| {
        beyond_quota
            || by_caller
                .get(&holder.caller)
                .is_some_and(|pages| *pages > share)
    };
    holders
        .iter()
        .filter(in_question)
        .filter(beyond)
        .filter(|holder| holder.pages > 0 || holder.stream == need.stream)
        .min_by_key(|holder| (holder.length, Reverse(holder.stream)))
        .map(|holder| holder.stream)
}

fn runs(holders: &[Holder], caller: NodeId) -> bool {
    holders
        .iter()
        .any(|holder| holder.caller == caller && !holder.idle)
}

fn fair_share(pool: &Pool, callers: usize) -> u32 {
    pool.total / u32::try_from(callers.max(1)).unwrap_or(u32::MAX)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// No page is free.
    Host,
    /// The caller has reached its quota.
    Caller,
}

/// Checks whether one more stream of `caller` may begin. It may if its first pages are left, besides
/// those of each stream that has not begun; or if an idle stream can be preempted; or if the caller
/// holds less than its fair share.
///
/// # Errors
/// The limit that is reached.
pub(crate) fn admit(holders: &[Holder], pool: &Pool, caller: NodeId) -> Result<(), Full> {
    // A stream that has not begun will take its first pages.
    let least = pool.least();
    let due = |holder: &Holder| holder.pages.max(least);
    let kept = |holder: &Holder| holder.idle && holder.pages > 0;
    let own = || holders.iter().filter(|holder| holder.caller == caller);
    let held = own().map(due).fold(0, u32::saturating_add);
    let own_pages = held.saturating_add(least);
    if pool.quota < pool.total && own_pages > pool.quota && !own().any(kept) {
        return Err(Full::Caller);
    }
    let taken = holders.iter().map(due).fold(0, u32::saturating_add);
    if taken.saturating_add(least) <= pool.total || holders.iter().any(kept) {
        return Ok(());
    }
    let mut callers: Vec<NodeId> = holders.iter().map(|holder| holder.caller).collect();
    callers.push(caller);
    callers.sort_unstable();
    callers.dedup();
    match own_pages <= fair_share(pool, callers.len()) {
        true => Ok(()),
        false => Err(Full::Host),
    }
}

/// Checks whether a fork with so many pages may begin. It takes free pages only: its caller can send
/// the rows instead.
///
/// # Errors
/// The limit that is reached.
pub(crate) fn admit_fork(
    holders: &[Holder],
    pool: &Pool,
    caller: NodeId,
    pages: u32,
) -> Result<(), Full> {
    let own = held_by(holders, caller).saturating_add(pages);
    if pool.quota < pool.total && own > pool.quota {
        return Err(Full::Caller);
    }
    // A stream that has not begun will take its first pages.
    let least = pool.least();
    let taken = holders.iter().map(|holder| holder.pages.max(least));
    match taken.fold(pages, u32::saturating_add) <= pool.total {
        true => Ok(()),
        false => Err(Full::Host),
    }
}
