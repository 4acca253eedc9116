//! Division of a batch's rows and pages among callers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use hearthnet_transport::NodeId;

use super::fair::Ledger;
use super::pages::{Holder, Need, Pool, held_by, holders, victim};
use super::snapshot::{Head, Kind, StreamSnapshot};

/// A step that the batch may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate<'a> {
    pub(super) view: &'a StreamSnapshot,
    pub(super) head: Head,
}

impl Candidate<'_> {
    /// The step of the stream served longest ago comes first.
    fn order(&self) -> (u64, Duration, u64) {
        (self.head.served, self.head.arrived, self.view.stream)
    }
}

/// The waiting steps of a kind, in order of service.
pub(super) fn queue(streams: &[StreamSnapshot], kind: Kind) -> Vec<Candidate<'_>> {
    let waiting = streams.iter().filter_map(|view| {
        let head = view.head.filter(|head| Kind::of(*head) == kind)?;
        Some(Candidate { view, head })
    });
    let mut queue: Vec<_> = waiting.collect();
    queue.sort_unstable_by_key(Candidate::order);
    queue
}

/// Rows of steps that are still to be computed.
pub(super) fn rows_of<'a>(steps: impl IntoIterator<Item = &'a Candidate<'a>>) -> u32 {
    steps.into_iter().map(|step| step.head.left).sum()
}

/// Builder of a batch.
pub(super) struct BatchBuilder<'a> {
    streams: &'a [StreamSnapshot],
    pool: &'a Pool,
    now: Duration,
    /// Free pages.
    free: u32,
    pub(super) scheduled: Vec<(u64, u32)>,
    pub(super) preempted: Vec<u64>,
    /// Streams and rows that were taken back, because the stream was preempted after all.
    returned: Vec<(u64, u32)>,
    /// Page use of the streams; filled when pages are short for the first time.
    holders: Option<Vec<Holder>>,
}

impl<'a> BatchBuilder<'a> {
    pub(super) fn new(streams: &'a [StreamSnapshot], pool: &'a Pool, now: Duration) -> Self {
        let pages = streams.iter().map(|view| pool.pages(view.length));
        let used = pages.fold(0, u32::saturating_add);
        Self {
            streams,
            pool,
            now,
            free: pool.total.saturating_sub(used),
            scheduled: Vec::new(),
            preempted: Vec::new(),
            returned: Vec::new(),
            holders: None,
        }
    }

    /// Rows of the batch so far.
    pub(super) fn rows(&self) -> u32 {
        self.scheduled.iter().map(|(_, rows)| rows).sum()
    }

    /// Divides `rows` among the callers of `queue`, which is in order of service. A step gets at
    /// least `least` rows, or none; `None`: it runs whole or not at all.
    pub(super) fn share(
        &mut self,
        queue: &[Candidate<'_>],
        mut rows: u32,
        least: Option<u32>,
        ledger: &mut Ledger,
    ) {
        let mut of_caller: BTreeMap<NodeId, VecDeque<&Candidate<'_>>> = BTreeMap::new();
        for step in queue {
            let steps = of_caller.entry(step.view.caller).or_default();
            steps.push_back(step);
        }
        let mut order: BTreeSet<_> = of_caller
            .iter()
            .filter_map(|(caller, steps)| {
                Some((ledger.tag(*caller), steps.front()?.order(), *caller))
            })
            .collect();
        while let Some((tag, _, caller)) = order.pop_first() {
            let Some(steps) = of_caller.get_mut(&caller) else {
                continue;
            };
            let Some(step) = steps.pop_front() else {
                continue;
            };
            let least = least.unwrap_or(step.head.left);
            if least > rows {
                break;
            }
            ledger.reach(tag);
            let taken = self.take(step, step.head.left.min(rows), least);
            rows -= taken;
            rows += self.charge(caller, taken, queue, ledger);
            if let Some(next) = steps.front() {
                order.insert((ledger.tag(caller), next.order(), caller));
            }
        }
    }

    /// Adds the rows of a step of `queue` to its caller's tag, and takes back those of its steps
    /// that were preempted for it. Returns the rows taken back.
    fn charge(
        &mut self,
        caller: NodeId,
        taken: u32,
        queue: &[Candidate<'_>],
        ledger: &mut Ledger,
    ) -> u32 {
        if taken > 0 {
            ledger.charge(caller, taken);
        }
        let mut back = 0;
        for (stream, rows) in self.returned.drain(..) {
            // A preempted step of the other kind is not of this queue.
            if let Some(step) = queue.iter().find(|step| step.view.stream == stream) {
                ledger.refund(step.view.caller, rows);
                back += rows;
            }
        }
        back
    }

    /// Divides `rows` of short steps among the callers of `queue`, which is in order of service:
    /// one row for each, and the rest for callers that have more. Only steps through the layers of
    /// a caller's first step count, since other layers mean other weights to read. A step may be
    /// cut.
    pub(super) fn share_short(&mut self, queue: &[Candidate<'_>], rows: u32, ledger: &mut Ledger) {
        let mut firsts: BTreeMap<NodeId, Candidate<'_>> = BTreeMap::new();
        let mut alike = Vec::with_capacity(queue.len());
        for step in queue {
            let first = firsts.entry(step.view.caller).or_insert(*step);
            if first.view.layers == step.view.layers {
                alike.push(*step);
            }
        }
        let mut firsts: Vec<Candidate<'_>> = firsts.into_values().collect();
        firsts.sort_by_key(|step| (ledger.tag(step.view.caller), step.order()));
        if let Some(first) = firsts.first() {
            ledger.reach(ledger.tag(first.view.caller));
        }
        let before = self.rows();
        for step in firsts.iter().take(rows as usize) {
            let taken = self.take(step, 1, 1);
            self.charge(step.view.caller, taken, queue, ledger);
        }
        let given = self.rows().saturating_sub(before);
        self.share(&alike, rows.saturating_sub(given), Some(1), ledger);
    }

    /// Takes up to `want` more rows of a step, as pages allow; preempts other streams to make room
    /// for `least`. Returns the rows taken: 0 if fewer are left, or the step's own stream was
    /// preempted.
    pub(super) fn take(&mut self, step: &Candidate<'_>, want: u32, least: u32) -> u32 {
        let view = step.view;
        let taken = self.scheduled.iter().find(|take| take.0 == view.stream);
        let taken = taken.map_or(0, |take| take.1);
        let length = view.length.saturating_add(taken);
        let want = want.min(step.head.left.saturating_sub(taken));
        if want < least || self.preempted.contains(&view.stream) {
            return 0;
        }
        loop {
            let rows = match self.pool.needs(length, want) {
                0 => want,
                _ => {
                    let pages = self.free.min(self.left_of_quota(view.caller));
                    self.pool.fits(length, pages).min(want)
                }
            };
            if rows >= least {
                self.book(view.stream, length, rows);
                return rows;
            }
            let need = Need {
                stream: view.stream,
                caller: view.caller,
                pages: self.pool.needs(length, least).max(1),
            };
            match self.reclaim(&need) {
                Some(stream) if stream != view.stream => {}
                _ => return 0,
            }
        }
    }

    /// Adds rows of a stream that will hold `length` positions before them.
    fn book(&mut self, stream: u64, length: u32, rows: u32) {
        let pages = self.pool.needs(length, rows);
        self.free -= pages;
        match self.scheduled.iter_mut().find(|take| take.0 == stream) {
            Some((_, all)) => *all += rows,
            None => self.scheduled.push((stream, rows)),
        }
        let holders = self.holders.iter_mut().flatten();
        for holder in holders.filter(|holder| holder.view.stream == stream) {
            holder.pages += pages;
        }
    }

    /// Pages that a caller may take beyond those that it holds.
    fn left_of_quota(&mut self, caller: NodeId) -> u32 {
        if self.pool.quota >= self.pool.total {
            return self.pool.total;
        }
        let held = held_by(self.holders(), caller);
        self.pool.quota.saturating_sub(held)
    }

    fn holders(&mut self) -> &mut Vec<Holder> {
        let (streams, pool, scheduled, now) = (self.streams, self.pool, &self.scheduled, self.now);
        self.holders.get_or_insert_with(|| {
            let scheduled: BTreeMap<u64, u32> = scheduled.iter().copied().collect();
            let mut holders = holders(streams, pool, now);
            for holder in &mut holders {
                let rows = scheduled.get(&holder.view.stream).copied().unwrap_or(0);
                holder.pages += pool.needs(holder.view.length, rows);
            }
            holders
        })
    }

    /// Preempts a stream, so that others get its pages. Returns its id.
    fn reclaim(&mut self, need: &Need) -> Option<u64> {
        let pool = self.pool;
        let holders = self.holders();
        let stream = victim(holders, pool, need)?;
        let at = holders
            .iter()
            .position(|holder| holder.view.stream == stream)?;
        let gone = holders.swap_remove(at);
        self.free += gone.pages;
        self.preempted.push(stream);
        if let Some(at) = self.scheduled.iter().position(|take| take.0 == stream) {
            self.returned.push(self.scheduled.remove(at));
        }
        Some(stream)
    }
}
