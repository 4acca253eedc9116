//! Content of the engine's next batch: a pure function of the streams, the waiting steps, the free
//! pages, and the rows given to callers before.
//!
//! A turn is one batch. A *decode* turn takes the waiting short steps of all streams at once. If
//! several callers decode, it takes a row of each, and extra rows that lengthen it by a third, so
//! that one caller's many streams cost another caller no more than that. A *prefill* turn takes a
//! chunk of one long step, or of several until the chunk is full. When both kinds wait, the turns
//! alternate, so
//!
//! - a decode step waits for at most one chunk, however much prefill there is (and, if several
//!   callers decode, for the earlier decode steps of its own caller), and
//! - prefill gets every other turn, however many streams decode.
//!
//! Example: streams A and B decode, C sends 100 rows, a chunk is 40 rows.
//!
//! ```text
//! turn      1        2         3        4         5        6         7
//! rows      A B      C 0..40   A B      C 40..80  A B      C 80..100 A B
//! ```
//!
//! A chunk of a neighbour's prompt takes waiting short steps along, a row of each caller, if all
//! use the same layers ([`piggybacks`]): the weights are read once for all of them. In the example,
//! turn 2 is then `A B C 0..40`.
//!
//! If a turn cannot take all waiting steps of its kind, callers get equal parts of it over time
//! (`fair.rs`), whatever the number of their streams. Among the streams of a caller, the one served
//! longest ago is first. If pages are short, a step is cut to the rows that fit; if none fits, a
//! stream is preempted (`pages.rs`).
//!
//! The length of a chunk follows from the engine's measured speed ([`crate::chunked_prefill`]), so
//! it takes about the same time on every machine. While another caller decodes, the chunk lengthens
//! a turn with decode steps by a third, or takes as long as a decode turn if no decode step waits.
//! That bounds what a neighbour's prompts cost a chat.
//!
//! So the host waits a moment before a turn for streams that return at once ([`ReturnEstimator`]):
//! a step that arrives later waits for a whole turn.

mod fair;
mod pages;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use hearthnet_transport::NodeId;

use fair::Ledger;
pub(crate) use pages::{Full, IDLE_AFTER, Pool, UNUSED_AFTER, admit};
use pages::{Holder, Need, held_by, victim};

/// Steps of at most this many rows count as decode: one row is a plain decode step, several are one
/// with speculated tokens to verify.
pub(crate) const SHORT_ROWS: u32 = 8;
/// Limit of rows per batch: bounds the batch's memory.
pub(crate) const MAX_TURN_ROWS: u32 = 512;

/// Snapshot of a stream for the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamSnapshot {
    pub(crate) stream: u64,
    pub(crate) caller: NodeId,
    /// First and last layer, both inclusive.
    pub(crate) layers: (u32, u32),
    /// Positions in its KV.
    pub(crate) length: u32,
    /// Time of the last event on it.
    pub(crate) active: Duration,
    /// Its caller has said that it needs nothing for now.
    pub(crate) rests: bool,
    /// The next step, if one waits.
    pub(crate) head: Option<Head>,
}

/// The step at the head of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// Rows of the whole step.
    pub(crate) rows: u32,
    /// Rows of it still to compute, at least 1.
    pub(crate) left: u32,
    /// Number of the batch that last served the stream.
    pub(crate) served: u64,
    pub(crate) arrived: Duration,
}

impl StreamSnapshot {
    fn holder(&self, pool: &Pool, now: Duration) -> Holder {
        Holder {
            stream: self.stream,
            caller: self.caller,
            length: self.length,
            pages: pool.pages(self.length),
            active: self.active,
            idle: self.head.is_none()
                && (self.rests || now.saturating_sub(self.active) >= IDLE_AFTER),
        }
    }
}

/// Page use of all streams.
pub(crate) fn holders(streams: &[StreamSnapshot], pool: &Pool, now: Duration) -> Vec<Holder> {
    streams.iter().map(|view| view.holder(pool, now)).collect()
}

/// A stream with an event within this time is expected to send its next step in a moment.
const COMES_BACK: Duration = Duration::from_millis(20);

/// Returns whether a stream whose last event was at `active` is expected back in a moment.
fn comes_back(active: Duration, now: Duration) -> bool {
    now <= active.saturating_add(COMES_BACK)
}

/// Returns whether to wait for more decode rows: fewer wait than are expected in a moment. Once
/// half of them are there, they are better computed while the others are at the next host.
///
/// `streams` gives, for each stream, the rows of its next step if one waits, and its last event.
pub(crate) fn may_grow(
    streams: impl Iterator<Item = (Option<u32>, Duration)>,
    now: Duration,
) -> bool {
    let (mut ready, mut expected) = (0, 0);
    for (rows, active) in streams {
        match rows {
            Some(rows) if rows <= SHORT_ROWS => ready += 1,
            // A prefill step can be computed meanwhile.
            Some(_) => return false,
            None => expected += u32::from(comes_back(active, now)),
        }
    }
    (1..expected).contains(&ready)
}

/// Tracks whether a stream's next decode step arrives at once after an answer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReturnEstimator {
    /// Time of the last answer, if that step was short and none has come since.
    answered: Option<Duration>,
    /// Number of late returns in a row; `None` before the first return.
    late: Option<u32>,
}

/// After this many late returns in a row, a stream is not waited for at every batch.
const MAX_LATE_RETURNS: u32 = 4;
/// Every 17th batch waits for late streams again: a caller that shares a core with this host cannot
/// return while it computes. All streams share the same batches, so that the cost does not grow
/// with their number. Odd, since every second batch may be prefill.
const REPROBE_EVERY: u64 = 17;

impl ReturnEstimator {
    /// Records the answer to a step of `rows` rows, when no other step waits.
    pub(crate) fn answered(&mut self, rows: u32, now: Duration) {
        self.answered = (Kind::of_rows(rows) == Kind::Decode).then_some(now);
    }

    /// Records the arrival of a step. `at_once` is the limit of an immediate return.
    pub(crate) fn came(&mut self, rows: u32, at: Duration, at_once: Duration) {
        if let Some(answered) = self.answered.take()
            && Kind::of_rows(rows) == Kind::Decode
        {
            self.late = Some(match at <= answered + at_once {
                true => 0,
                false => self.late.unwrap_or(0).saturating_add(1),
            });
        }
    }

    /// Remaining time to wait for the next step before this batch, up to `at_once` after the
    /// answer.
    pub(crate) fn awaited(&self, at_once: Duration, now: Duration, turn: u64) -> Option<Duration> {
        let until = self.answered? + at_once;
        let waited_for = self.late? < MAX_LATE_RETURNS || turn.is_multiple_of(REPROBE_EVERY);
        (waited_for && now < until).then(|| until - now)
    }
}

/// Returns whether a chunk takes the waiting short steps along. They must be of other callers, or
/// the chunk would delay its own for as long as it may. All must use the same layers, or nothing is
/// gained.
pub(crate) fn piggybacks(streams: &[StreamSnapshot], others_decode: bool) -> bool {
    let heads = || streams.iter().filter(|view| view.head.is_some());
    let short =
        |view: &StreamSnapshot| view.head.is_some_and(|head| Kind::of(head) == Kind::Decode);
    let mut layers = heads().map(|view| view.layers);
    let first = layers.next();
    others_decode && heads().any(short) && layers.all(|one| Some(one) == first)
}

/// Returns whether a caller decodes beside the prompts of others: a short step waits or is expected
/// in a moment, and a long step of another caller waits.
pub(crate) fn others_decode(streams: &[StreamSnapshot], now: Duration) -> bool {
    let prompts = || {
        let long = |view: &&StreamSnapshot| {
            view.head
                .is_some_and(|head| Kind::of(head) == Kind::Prefill)
        };
        streams.iter().filter(long)
    };
    let mut decoding = streams.iter().filter(|view| decodes(view, now, COMES_BACK));
    decoding.any(|one| prompts().any(|view| view.caller != one.caller))
}

/// A caller whose stream was active within this time still decodes: it may be at other hosts.
const DECODES_ON: Duration = Duration::from_secs(1);

/// Number of callers that decode: a short step waits, or the next is on its way.
pub(crate) fn decoders(streams: &[StreamSnapshot], now: Duration) -> u32 {
    let decoding = streams.iter().filter(|view| decodes(view, now, DECODES_ON));
    let callers: BTreeSet<NodeId> = decoding.map(|view| view.caller).collect();
    u32::try_from(callers.len()).unwrap_or(u32::MAX)
}

fn decodes(view: &StreamSnapshot, now: Duration, within: Duration) -> bool {
    match view.head {
        Some(head) => Kind::of(head) == Kind::Decode,
        None => view.length > 0 && !view.rests && now <= view.active.saturating_add(within),
    }
}

/// Rows of the waiting short steps.
pub(crate) fn short_rows(streams: &[StreamSnapshot]) -> u32 {
    let heads = streams.iter().filter_map(|view| view.head);
    let short = heads.filter(|head| Kind::of(*head) == Kind::Decode);
    short.map(|head| head.left).sum()
}

/// Limits of the next batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Rows of a chunk.
    pub(crate) chunk: u32,
    /// Whether a chunk takes short steps along: [`piggybacks`].
    pub(crate) piggybacks: bool,
    pub(crate) decoders: u32,
    /// If several callers decode: extra rows of short steps, beside one row of each caller.
    pub(crate) more: u32,
}

impl Sizes {
    /// Limit of rows of short steps in a batch of this kind.
    fn room(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Decode => MAX_TURN_ROWS,
            Kind::Prefill if self.piggybacks => MAX_TURN_ROWS - self.chunk(),
            Kind::Prefill => 0,
        }
    }

    /// Target rows of short steps in a batch of this kind, if several callers decode.
    fn short(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Decode => self.decoders.saturating_add(self.more),
            // The chunk takes the place of the extra rows.
            Kind::Prefill => self.decoders,
        }
    }

    fn chunk(&self) -> u32 {
        self.chunk.clamp(1, MAX_TURN_ROWS)
    }
}

/// Kinds of steps and of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Short steps, or a batch of short steps only.
    Decode,
    /// Long steps, or a batch with a chunk of them.
    Prefill,
}

impl Kind {
    fn of(head: Head) -> Self {
        Self::of_rows(head.rows)
    }

    pub(crate) fn of_rows(rows: u32) -> Self {
        match rows <= SHORT_ROWS {
            true => Self::Decode,
            false => Self::Prefill,
        }
    }
}

/// A batch, and the streams to preempt for it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) kind: Kind,
    /// Streams, and the rows that each contributes from the head of its step: short steps first.
    /// Empty if each of them was preempted.
    pub(crate) scheduled: Vec<(u64, u32)>,
    /// Number of these rows that belong to long steps.
    pub(crate) chunk: u32,
    /// Streams to end before the batch, for their pages.
    pub(crate) preempted: Vec<u64>,
}

/// Plans batches. Deterministic: the same calls give the same batches.
#[derive(Debug, Clone)]
pub(crate) struct Planner {
    last: Kind,
    decode: Ledger,
    prefill: Ledger,
}

impl Planner {
    pub(crate) fn new() -> Self {
        Self {
            last: Kind::Prefill,
            decode: Ledger::default(),
            prefill: Ledger::default(),
        }
    }

    /// Plans the next batch; `None` if no step waits.
    pub(crate) fn plan(
        &mut self,
        streams: &[StreamSnapshot],
        pool: &Pool,
        sizes: &Sizes,
        now: Duration,
    ) -> Option<Turn> {
        let (mut short, mut short_rows, mut long) = (0, 0u32, 0);
        for head in streams.iter().filter_map(|view| view.head) {
            match Kind::of(head) {
                Kind::Decode => (short, short_rows) = (short + 1, short_rows + head.left),
                Kind::Prefill => long += 1,
            }
        }
        let kind = match (short, long) {
            (0, 0) => return None,
            (_, 0) => Kind::Decode,
            (0, _) => Kind::Prefill,
            _ if self.last == Kind::Prefill => Kind::Decode,
            _ => Kind::Prefill,
        };
        self.last = kind;
        let mut builder = BatchBuilder::new(streams, pool, now, short + long);
        let queue = Candidate::queue(streams, Kind::Decode, short);
        let (most, several) = (sizes.room(kind), sizes.decoders > 1);
        let alike = queue.windows(2).all(|two| two[0].layers == two[1].layers);
        let all = !several || alike && short_rows <= sizes.short(kind);
        if short_rows <= most && all {
            for step in &queue {
                builder.take(step, step.left, step.left);
            }
            // All fit, so no caller has to wait.
            self.decode.settle();
        } else if several {
            builder.share_short(queue, sizes.short(kind).min(most), &mut self.decode);
        } else if most > 0 {
            builder.share(queue, most, Kind::Decode, &mut self.decode);
        }
        builder.own_from = builder.scheduled.len();
        if kind == Kind::Prefill {
            let queue = Candidate::queue(streams, kind, long);
            builder.share(queue, sizes.chunk(), kind, &mut self.prefill);
        }
        if short == 0 {
            self.decode.settle();
        }
        if long == 0 {
            self.prefill.settle();
        }
        let chunk = builder.scheduled.iter().skip(builder.own_from);
        Some(Turn {
            kind,
            chunk: chunk.map(|(_, rows)| rows).sum(),
            scheduled: builder.scheduled,
            preempted: builder.preempted,
        })
    }
}

/// A step that the batch may take.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    stream: u64,
    caller: NodeId,
    layers: (u32, u32),
    length: u32,
    left: u32,
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
    fn queue(streams: &[StreamSnapshot], kind: Kind, count: usize) -> Vec<Self> {
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
struct BatchBuilder<'a> {
    streams: &'a [StreamSnapshot],
    pool: &'a Pool,
    now: Duration,
    /// Free pages.
    free: u32,
    scheduled: Vec<(u64, u32)>,
    preempted: Vec<u64>,
    /// Index of the first entry of the kind that is being divided.
    own_from: usize,
    /// Rows of that kind taken back from streams that were preempted after all.
    returned: Vec<(NodeId, u32)>,
    /// Page use of the streams; filled when pages are short for the first time.
    holders: Option<Vec<Holder>>,
}

impl<'a> BatchBuilder<'a> {
    fn new(streams: &'a [StreamSnapshot], pool: &'a Pool, now: Duration, steps: usize) -> Self {
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
    fn share(&mut self, queue: Vec<Candidate>, mut rows: u32, kind: Kind, ledger: &mut Ledger) {
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
    fn share_short(&mut self, queue: Vec<Candidate>, rows: u32, ledger: &mut Ledger) {
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
    fn take(&mut self, step: &Candidate, want: u32, least: u32) -> u32 {
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
