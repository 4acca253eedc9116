//! Division of a batch's rows and pages among callers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use hearthnet_transport::NodeId;

use super::fair::Ledger;
use super::pages::{Holder, Need, Pool, held_by, victim};
use super::snapshot::{Kind, StreamSnapshot, holders};

/// A step that the batch may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    stream: u64,
    caller: NodeId,
    pub(super) layers: (u32, u32),
    length: u32,
    pub(super) left: u32,
    served: u64,
    arrived: Duration,
}

impl Candidate {
    fn of(view: &StreamSnapshot, kind: Kind) -> Option<Self> {
        let head = view.head.filter(|head| Kind::of(*head) == kind)?;
        Some(Self {
            stream: view.stream,
            caller: view.caller,
            layers: view.layers,
            length: view.length,
            left: head.left,
            served: head.served,
            arrived: head.arrived,
        })
    }

    /// The `count` steps of a kind, in order of service.
    pub(super) fn queue(streams: &[StreamSnapshot], kind: Kind, count: usize) -> Vec<Self> {
        let mut queue = Vec::with_capacity(count);
        queue.extend(streams.iter().filter_map(|view| Self::of(view, kind)));
        queue.sort_unstable_by_key(Self::order);
        queue
    }

    /// The step of the stream served longest ago comes first.
    fn order(&self) -> (u64, Duration, u64) {
        (self.served, self.arrived, self.stream)
    }
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
    /// Index of the first entry of the kind that is being divided.
    pub(super) own_from: usize,
    /// Rows of that kind taken back from streams that were preempted after all.
    returned: Vec<(NodeId, u32)>,
    /// Page use of the streams; filled when pages are short for the first time.
    holders: Option<Vec<Holder>>,
}

impl<'a> BatchBuilder<'a> {
    pub(super) fn new(
        streams: &'a [StreamSnapshot],
        pool: &'a Pool,
        now: Duration,
        steps: usize,
    ) -> Self {
        let pages = streams.iter().map(|view| pool.pages(view.length));
        let used = pages.fold(0, u32::saturating_add);
        Self {
            streams,
            pool,
            now,
            free: pool.total.saturating_sub(used),
            scheduled: Vec::with_capacity(steps),
            preempted: Vec::new(),
            own_from: 0,
            returned: Vec::new(),
            holders: None,
        }
    }

    /// Divides `rows` among the callers of `queue`, which is in order of service.
    pub(super) fn share(
        &mut self,
        queue: Vec<Candidate>,
        mut rows: u32,
        kind: Kind,
        ledger: &mut Ledger,
    ) {
        self.returned.clear();
        let mut of_caller: BTreeMap<NodeId, VecDeque<Candidate>> = BTreeMap::new();
        for step in queue {
            of_caller.entry(step.caller).or_default().push_back(step);
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
            let least = match kind {
                // A short step runs whole or not at all.
                Kind::Decode => step.left,
                Kind::Prefill => 1,
            };
            if least > rows {
                break;
            }
            ledger.reach(tag);
            let taken = self.take(&step, step.left.min(rows), least);
            rows -= taken;
            if taken > 0 {
                ledger.charge(caller, taken);
            }
            for (caller, taken) in self.returned.drain(..) {
                rows += taken;
                ledger.refund(caller, taken);
            }
            if let Some(next) = steps.front() {
                order.insert((ledger.tag(caller), next.order(), caller));
            }
        }
    }

    /// Divides `rows` of short steps among the callers of `queue`, which is in order of service:
    /// one row for each, and the rest for callers that have more. Only steps through the layers of
    /// a caller's first step count, since other layers mean other weights to read. A step may be
    /// cut.
    pub(super) fn share_short(&mut self, queue: Vec<Candidate>, rows: u32, ledger: &mut Ledger) {
        let mut of_caller: BTreeMap<NodeId, Vec<Candidate>> = BTreeMap::new();
        for step in queue {
            let steps = of_caller.entry(step.caller).or_default();
            if steps
                .first()
                .is_none_or(|first| first.layers == step.layers)
            {
                steps.push(step);
            }
        }
        let mut callers: Vec<(u64, (u64, Duration, u64), NodeId)> = of_caller
            .iter()
            .filter_map(|(caller, steps)| {
                Some((ledger.tag(*caller), steps.first()?.order(), *caller))
            })
            .collect();
        callers.sort_unstable();
        if let Some((least, ..)) = callers.first() {
            ledger.reach(*least);
        }
        callers.truncate(rows as usize);
        let rows_of = |steps: &Vec<Candidate>| steps.iter().map(|step| step.left).sum::<u32>();
        let has: BTreeMap<NodeId, u32> = of_caller
            .iter()
            .map(|(caller, steps)| (*caller, rows_of(steps)))
            .collect();
        let mut left = rows - callers.len() as u32;
        let mut given: BTreeMap<NodeId, u32> = BTreeMap::new();
        // Tag of the caller that got the last extra row; callers without more rows are raised to it
        // too.
        let mut reached = 0;
        // The next row goes to the caller that will then have been given least.
        let mut next: BTreeSet<_> = callers.iter().copied().collect();
        while let Some((tag, order, caller)) = next.pop_first() {
            let given = given.entry(caller).or_insert(0);
            if *given == 0 {
                *given = 1;
            } else if left > 0 {
                (*given, left) = (*given + 1, left - 1);
                reached = reached.max(tag);
            } else {
                continue;
            }
            if has.get(&caller).is_some_and(|has| *given < *has) {
                next.insert((tag + 1, order, caller));
            }
        }
        for (.., caller) in callers {
            let mut given = given.get(&caller).copied().unwrap_or(0);
            for step in of_caller.remove(&caller).into_iter().flatten() {
                if given == 0 {
                    break;
                }
                self.returned.clear();
                let taken = self.take(&step, step.left.min(given), 1);
                given -= taken.min(given);
                if taken > 0 {
                    ledger.charge(caller, taken);
                }
                for (caller, rows) in self.returned.drain(..) {
                    ledger.refund(caller, rows);
                }
            }
        }
        ledger.reach(reached);
    }

    /// Takes up to `want` rows of a step, as pages allow; preempts other streams to make room for
    /// `least`. Returns the rows taken: 0 if the step's own stream was preempted.
    pub(super) fn take(&mut self, step: &Candidate, want: u32, least: u32) -> u32 {
        if self.preempted.contains(&step.stream) {
            return 0;
        }
        loop {
            let rows = match self.pool.needs(step.length, want) {
                0 => want,
                _ => {
                    let pages = self.free.min(self.left_of_quota(step.caller));
                    self.pool.fits(step.length, pages).min(want)
                }
            };
            if rows >= least {
                self.book(step, rows);
                return rows;
            }
            let need = Need {
                stream: step.stream,
                caller: step.caller,
                pages: self.pool.needs(step.length, least).max(1),
            };
            match self.reclaim(&need) {
                Some(stream) if stream != step.stream => {}
                _ => return 0,
            }
        }
    }

    fn book(&mut self, step: &Candidate, rows: u32) {
        let pages = self.pool.needs(step.length, rows);
        self.free -= pages;
        self.scheduled.push((step.stream, rows));
        let holders = self.holders.iter_mut().flatten();
        for holder in holders.filter(|holder| holder.stream == step.stream) {
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
                let rows = scheduled.get(&holder.stream).copied().unwrap_or(0);
                holder.pages += pool.needs(holder.length, rows);
            }
            holders
        })
    }

    /// Preempts a stream, so that others get its pages. Returns its id.
    fn reclaim(&mut self, need: &Need) -> Option<u64> {
        let pool = self.pool;
        let holders = self.holders();
        let stream = victim(holders, pool, need)?;
        let at = holders.iter().position(|holder| holder.stream == stream)?;
        let gone = holders.swap_remove(at);
        self.free += gone.pages;
        self.preempted.push(stream);
        if let Some(at) = self.scheduled.iter().position(|take| take.0 == stream) {
            let (_, rows) = self.scheduled.remove(at);
            match at < self.own_from {
                true => self.own_from -= 1,
                false => self.returned.push((gone.caller, rows)),
            }
        }
        Some(stream)
    }
}
