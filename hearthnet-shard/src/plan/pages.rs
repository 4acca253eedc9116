//! Who gets pages of KV when they are scarce, and who has to give some back: pure functions.
//!
//! The budget is overcommitted. A stream is opened when there is a page for it to begin with, and
//! takes more as it grows. When none is left for a step, a *victim* ends with `preempted`; its
//! caller opens it again later and replays it. In this order:
//!
//! 1. the stream that has been idle for longest, if one is: a conversation that is kept for its next
//!    turn, as its caller has said, or as its silence says ([`IDLE_AFTER`]);
//! 2. of the callers that hold more than their *fair share* (all pages, divided by the callers
//!    whose streams run), the least progressed stream; of equals, the youngest. Whoever asks counts
//!    with what it asks for, so a caller may be told to give up a stream of its own, or the one
//!    that asks.
//!
//! A caller that has reached its own share of the KV ([`Pool::quota`]) gives up streams of its own
//! only, in the same order.
//!
//! What follows from that:
//!
//! - There is always a victim. If the caller that asks stays within its fair share, the others
//!   hold more than theirs together, so one of them holds more than its own.
//! - No running stream of a caller within its fair share is a victim.
//! - Of the callers beyond it, the most progressed stream goes last; with one caller, it never
//!   goes. So it comes to its end, and the next one after it.
//! - A stream that has the host to itself gets all pages there are.
//!
//! Example: 10 pages. A has streams of 5 and 3 pages, B one of 2, and B needs another page. Both
//! run, so the fair share is 5; A holds 8. The victim is A's stream of 3 pages.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use hearthnet_transport::NodeId;

/// A stream on which nothing happened for so long is kept for later rather than running. Steps of
/// an answer follow each other within it on all but the slowest pipelines; where they do not, the
/// stream is the first to be replayed when memory is short, and nothing worse.
pub(crate) const IDLE_AFTER: Duration = Duration::from_secs(5);

/// The same for a stream that holds no rows: there is nothing to replay.
pub(crate) const UNUSED_AFTER: Duration = Duration::from_secs(1);

/// The pages that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pool {
    /// Pages of all streams together.
    pub(crate) total: u32,
    /// Most pages of one caller, at most `total`.
    pub(crate) quota: u32,
    /// Positions per page, at least 1.
    pub(crate) page: u32,
}

impl Pool {
    /// What a budget in bytes makes, where `page` positions take `page_bytes`, and each caller may
    /// hold so many per cent. Pages that take no memory are without number.
    pub(crate) fn new(budget: u64, page: u32, page_bytes: u64, percent: u32) -> Self {
        let total = budget.checked_div(page_bytes).unwrap_or(u64::MAX);
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        let quota = u64::from(total) * u64::from(percent.min(100)) / 100;
        Self {
            total,
            quota: u32::try_from(quota).unwrap_or(total),
            page: page.max(1),
        }
    }

    /// Pages that so many positions take.
    pub(crate) fn pages(&self, positions: u32) -> u32 {
        positions.div_ceil(self.page)
    }

    /// Pages that a stream of `length` needs besides its own for `rows` more.
    pub(crate) fn needs(&self, length: u32, rows: u32) -> u32 {
        self.pages(length.saturating_add(rows)) - self.pages(length)
    }

    /// Rows that a stream of `length` can take in with `pages` more.
    pub(crate) fn fits(&self, length: u32, pages: u32) -> u32 {
        self.pages(length)
            .saturating_add(pages)
            .saturating_mul(self.page)
            .saturating_sub(length)
    }
}

/// A stream, as far as pages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) stream: u64,
    pub(crate) caller: NodeId,
    /// Positions that it holds: how far it has come.
    pub(crate) length: u32,
    /// Pages that it holds, those that the turn has given it included.
    pub(crate) pages: u32,
    /// When something last happened on it.
    pub(crate) active: Duration,
    /// Nothing of it waits, and its caller has said that nothing will, or asked nothing for long.
    pub(crate) idle: bool,
}

/// A stream that needs pages which are not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) stream: u64,
    pub(crate) caller: NodeId,
    /// Pages, at least 1.
    pub(crate) pages: u32,
}

/// Pages that a caller holds.
pub(crate) fn held_by(holders: &[Holder], caller: NodeId) -> u32 {
    holders
        .iter()
        .filter(|holder| holder.caller == caller)
        .map(|holder| holder.pages)
        .fold(0, u32::saturating_add)
}

/// The stream that has to go so that `need` can be met: see the module. One may not be enough.
/// `None` if there is nobody to choose from, which is so only where the need is no need.
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
        // One that only waits to begin counts as well: its caller runs.
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

/// Why a stream may not begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// No page is left for it.
    Host,
    /// Its caller holds all that one caller may.
    Caller,
}

/// Whether one more stream of `caller` may begin: if a page is left for it, besides one for each
/// stream that has not begun; or would be, once kept streams have gone; or if it is due to a caller
/// that holds less than its fair share.
///
/// # Errors
/// What is full.
pub(crate) fn admit(holders: &[Holder], pool: &Pool, caller: NodeId) -> Result<(), Full> {
    // A stream that has not begun will take a page.
    let due = |holder: &Holder| holder.pages.max(1);
    let kept = |holder: &Holder| holder.idle && holder.pages > 0;
    let own = || holders.iter().filter(|holder| holder.caller == caller);
    let held = own().map(due).fold(0, u32::saturating_add);
    if pool.quota < pool.total && held >= pool.quota && !own().any(kept) {
        return Err(Full::Caller);
    }
    let taken = holders.iter().map(due).fold(0, u32::saturating_add);
    if taken < pool.total || holders.iter().any(kept) {
        return Ok(());
    }
    let mut callers: Vec<NodeId> = holders.iter().map(|holder| holder.caller).collect();
    callers.push(caller);
    callers.sort_unstable();
    callers.dedup();
    match held < fair_share(pool, callers.len()) {
        true => Ok(()),
        false => Err(Full::Host),
    }
}
