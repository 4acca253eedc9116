//! What the next turn of the engine computes: a pure function of the streams, the steps that
//! wait, the pages left, and what callers were given before.
//!
//! A turn is one batch. A *decode* turn takes the waiting short steps of all streams
//! at once; where several callers decode, a row of each and so many more as make it a third longer, for one
//! caller's many streams are not to cost another one more than that. A *prefill* turn takes a piece of one long step, or of several until the
//! piece is full. When both kinds wait, the turns alternate, so
//!
//! - a decode step waits for at most one piece, however much prefill there is (and, where several callers
//!   decode, for those of its own caller that are before it), and
//! - prefill gets every other turn, however many streams decode.
//!
//! Example: streams A and B decode, C sends 100 rows, a piece is 40 rows.
//!
//! ```text
//! turn      1        2         3        4         5        6         7
//! rows      A B      C 0..40   A B      C 40..80  A B      C 80..100 A B
//! ```
//!
//! A piece of a neighbour's prompt takes waiting short steps along, a row of each caller, where all go
//! through the same layers ([`rides`]): the weights are read once for all of them. Turn 2 is then
//! `A B C 0..40`.
//!
//! Where a turn cannot take all that waits of its kind, callers get equal parts of it over time
//! (`fair.rs`), whatever the number of their streams; among the streams of a caller, the one that
//! was served longest ago is first. Where there are not enough pages, a step is cut to what there
//! is room for, and if that is nothing, a stream is preempted (`pages.rs`).
//!
//! The length of a piece follows from how fast the engine was ([`crate::chunked_prefill`]), so that it
//! takes about the same time on every machine. While somebody else decodes, it makes a turn with decode steps
//! longer by a third, or takes as long as a decode turn where none waits: that is what a neighbour's prompts
//! cost whoever chats.
//!
//! Which is why streams that come back at once are waited for, a moment, before a turn ([`Rhythm`]): what
//! comes later than that waits for a whole turn.

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

/// Steps of at most this many rows count as decode. One row is a plain decode step;
/// a few are one with guesses to check.
pub(crate) const SHORT_ROWS: u32 = 8;
/// Most rows of one turn: bounds the batch's memory.
pub(crate) const MAX_TURN_ROWS: u32 = 512;

/// A stream as the plan sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) stream: u64,
    pub(crate) caller: NodeId,
    /// First and last layer that its rows run through.
    pub(crate) layers: (u32, u32),
    /// Positions that it holds.
    pub(crate) length: u32,
    /// When something last happened on it.
    pub(crate) active: Duration,
    /// Its caller has said that it asks nothing for now.
    pub(crate) rests: bool,
    /// The step that is next, if one waits.
    pub(crate) head: Option<Head>,
}

/// The step at the head of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// Rows of the whole step.
    pub(crate) rows: u32,
    /// Rows of it that are still to be computed, at least 1.
    pub(crate) left: u32,
    /// Turn in which the stream was last served.
    pub(crate) served: u64,
    /// When the step arrived.
    pub(crate) arrived: Duration,
}

impl View {
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

/// All streams, as far as pages go.
pub(crate) fn holders(streams: &[View], pool: &Pool, now: Duration) -> Vec<Holder> {
    streams.iter().map(|view| view.holder(pool, now)).collect()
}

/// A stream that something happened on no longer ago than this is expected to come back.
const COMES_BACK: Duration = Duration::from_millis(20);

/// Whether a stream on which something last happened then is expected to come back in a moment.
fn comes_back(active: Duration, now: Duration) -> bool {
    now <= active.saturating_add(COMES_BACK)
}

/// Whether the next batch is one of decode rows that are worth waiting for company: fewer wait
/// than are expected back in a moment. When half are there, those are better computed while
/// the others are at the next host.
///
/// Of each stream: the rows of the step that is next, if one waits, and when something last
/// happened on it.
pub(crate) fn may_grow(
    streams: impl Iterator<Item = (Option<u32>, Duration)>,
    now: Duration,
) -> bool {
    let (mut ready, mut expected) = (0, 0);
    for (rows, active) in streams {
        match rows {
            Some(rows) if rows <= SHORT_ROWS => ready += 1,
            // There is other work to do meanwhile.
            Some(_) => return false,
            None => expected += u32::from(comes_back(active, now)),
        }
    }
    (1..expected).contains(&ready)
}

/// Whether a stream comes back at once when a short step of it was answered.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rhythm {
    /// When its last step was answered, if that was a short one and none has come since.
    answered: Option<Duration>,
    /// How often in a row it came back later than that; `None` before the first time.
    late: Option<u32>,
}

/// A stream that was late so often in a row is not waited for at every turn.
const OFTEN_LATE: u32 = 4;
/// At every turn with such a number it is: who shares a core with this host cannot come back while it
/// computes. The same turns for all, so that this costs the same however many they are; and an odd number,
/// for every other turn may take a piece.
const ALL_AGAIN: u64 = 17;

impl Rhythm {
    /// A step with so many rows was answered, and none waits.
    pub(crate) fn answered(&mut self, rows: u32, now: Duration) {
        self.answered = (Kind::of_rows(rows) == Kind::Decode).then_some(now);
    }

    /// A step with so many rows came, where `at_once` is soon.
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

    /// How much longer the next step is worth waiting for before this turn, where it is worth `at_once` from
    /// the answer on.
    pub(crate) fn awaited(&self, at_once: Duration, now: Duration, turn: u64) -> Option<Duration> {
        let until = self.answered? + at_once;
        let waited_for = self.late? < OFTEN_LATE || turn.is_multiple_of(ALL_AGAIN);
        (waited_for && now < until).then(|| until - now)
    }
}

/// Whether a piece takes the waiting short steps along: they are others' than its own, or it would hold them
/// up for as long as it may, and all go through the same layers, or nothing is gained.
pub(crate) fn rides(streams: &[View], others_decode: bool) -> bool {
    let heads = || streams.iter().filter(|view| view.head.is_some());
    let short = |view: &View| view.head.is_some_and(|head| Kind::of(head) == Kind::Decode);
    let mut layers = heads().map(|view| view.layers);
    let first = layers.next();
    others_decode && heads().any(short) && layers.all(|one| Some(one) == first)
}

/// Whether somebody decodes beside the prompts of others: a short step waits, or is expected back in
/// a moment, and a longer one waits that is of another caller.
pub(crate) fn others_decode(streams: &[View], now: Duration) -> bool {
    let prompts = || {
        let long = |view: &&View| {
            view.head
                .is_some_and(|head| Kind::of(head) == Kind::Prefill)
        };
        streams.iter().filter(long)
    };
    let mut decoding = streams.iter().filter(|view| decodes(view, now, COMES_BACK));
    decoding.any(|one| prompts().any(|view| view.caller != one.caller))
}

/// Who has decoded within this time may be at other hosts meanwhile, and wait for its next turn when it is
/// back.
const DECODES_ON: Duration = Duration::from_secs(1);

/// How many callers decode: a short step of theirs waits, or the next is on its way.
pub(crate) fn decoders(streams: &[View], now: Duration) -> u32 {
    let decoding = streams.iter().filter(|view| decodes(view, now, DECODES_ON));
    let callers: BTreeSet<NodeId> = decoding.map(|view| view.caller).collect();
    u32::try_from(callers.len()).unwrap_or(u32::MAX)
}

fn decodes(view: &View, now: Duration, within: Duration) -> bool {
    match view.head {
        Some(head) => Kind::of(head) == Kind::Decode,
        None => view.length > 0 && !view.rests && now <= view.active.saturating_add(within),
    }
}

/// Rows of short steps that wait.
pub(crate) fn short_rows(streams: &[View]) -> u32 {
    let heads = streams.iter().filter_map(|view| view.head);
    let short = heads.filter(|head| Kind::of(*head) == Kind::Decode);
    short.map(|head| head.left).sum()
}

/// How large the next turn may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Rows of a piece.
    pub(crate) piece: u32,
    /// Whether a piece takes short steps along: [`rides`].
    pub(crate) rides: bool,
    /// How many callers decode.
    pub(crate) decoders: u32,
    /// Where there are several: rows of short steps, of those that have more than one, beside one of each.
    pub(crate) more: u32,
}

impl Sizes {
    /// Most rows of short steps that a turn of this kind has room for.
    fn room(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Decode => MAX_TURN_ROWS,
            Kind::Prefill if self.rides => MAX_TURN_ROWS - self.piece(),
            Kind::Prefill => 0,
        }
    }

    /// Rows of short steps that are to be in it, where several callers decode.
    fn short(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Decode => self.decoders.saturating_add(self.more),
            // The piece is what there is more.
            Kind::Prefill => self.decoders,
        }
    }

    fn piece(&self) -> u32 {
        self.piece.clamp(1, MAX_TURN_ROWS)
    }
}

/// Kinds of steps, and of turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Short steps; turns that take those only.
    Decode,
    /// Pieces of long ones; turns with one.
    Prefill,
}

impl Kind {
    fn of(head: Head) -> Self {
        Self::of_rows(head.rows)
    }

    /// The kind of a step with so many rows.
    pub(crate) fn of_rows(rows: u32) -> Self {
        match rows <= SHORT_ROWS {
            true => Self::Decode,
            false => Self::Prefill,
        }
    }
}

/// One batch, and what has to go for it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) kind: Kind,
    /// Streams and how many rows each contributes, from the head of its step: short steps first. Empty if
    /// each of them had to go.
    pub(crate) takes: Vec<(u64, u32)>,
    /// Rows of them that are of longer steps.
    pub(crate) piece: u32,
    /// Streams that have to give their pages back before.
    pub(crate) preempted: Vec<u64>,
}

/// Plans turns. Its state is what happened before: the same calls give the same turns.
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

    /// Plans the next turn at `now`, of these sizes; `None` if nothing waits.
    pub(crate) fn plan(
        &mut self,
        streams: &[View],
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
        let mut room = Room::new(streams, pool, now, short + long);
        let queue = Step::queue(streams, Kind::Decode, short);
        let (most, several) = (sizes.room(kind), sizes.decoders > 1);
        let alike = queue.windows(2).all(|two| two[0].layers == two[1].layers);
        let all = !several || alike && short_rows <= sizes.short(kind);
        if short_rows <= most && all {
            for step in &queue {
                room.take(step, step.left, step.left);
            }
            // Nobody has to wait.
            self.decode.settle();
        } else if several {
            room.share_short(queue, sizes.short(kind).min(most), &mut self.decode);
        } else if most > 0 {
            room.share(queue, most, Kind::Decode, &mut self.decode);
        }
        room.own_from = room.takes.len();
        if kind == Kind::Prefill {
            let queue = Step::queue(streams, kind, long);
            room.share(queue, sizes.piece(), kind, &mut self.prefill);
        }
        if short == 0 {
            self.decode.settle();
        }
        if long == 0 {
            self.prefill.settle();
        }
        let piece = room.takes.iter().skip(room.own_from);
        Some(Turn {
            kind,
            piece: piece.map(|(_, rows)| rows).sum(),
            takes: room.takes,
            preempted: room.preempted,
        })
    }
}

/// A step that a turn may take.
#[derive(Debug, Clone, Copy)]
struct Step {
    stream: u64,
    caller: NodeId,
    layers: (u32, u32),
    length: u32,
    left: u32,
    served: u64,
    arrived: Duration,
}

impl Step {
    fn of(view: &View, kind: Kind) -> Option<Self> {
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

    /// The `count` steps of a kind, in order.
    fn queue(streams: &[View], kind: Kind, count: usize) -> Vec<Self> {
        let mut queue = Vec::with_capacity(count);
        queue.extend(streams.iter().filter_map(|view| Self::of(view, kind)));
        queue.sort_unstable_by_key(Self::order);
        queue
    }

    /// Who was served longest ago is first.
    fn order(&self) -> (u64, Duration, u64) {
        (self.served, self.arrived, self.stream)
    }
}

/// A turn in the making.
struct Room<'a> {
    streams: &'a [View],
    pool: &'a Pool,
    now: Duration,
    /// Pages that nobody holds.
    free: u32,
    takes: Vec<(u64, u32)>,
    preempted: Vec<u64>,
    /// Where the takes of the kind begin that is being divided.
    own_from: usize,
    /// Rows of that kind that were taken from streams that had to go after all.
    returned: Vec<(NodeId, u32)>,
    /// Who holds what, kept from the first time on that pages are short.
    holders: Option<Vec<Holder>>,
}

impl<'a> Room<'a> {
    fn new(streams: &'a [View], pool: &'a Pool, now: Duration, steps: usize) -> Self {
        let pages = streams.iter().map(|view| pool.pages(view.length));
        let used = pages.fold(0, u32::saturating_add);
        Self {
            streams,
            pool,
            now,
            free: pool.total.saturating_sub(used),
            takes: Vec::with_capacity(steps),
            preempted: Vec::new(),
            own_from: 0,
            returned: Vec::new(),
            holders: None,
        }
    }

    /// Divides `rows` among the callers of `queue`, whose steps are in order.
    fn share(&mut self, queue: Vec<Step>, mut rows: u32, kind: Kind, ledger: &mut Ledger) {
        self.returned.clear();
        let mut of_caller: BTreeMap<NodeId, VecDeque<Step>> = BTreeMap::new();
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

    /// Divides `rows` of short steps among the callers of `queue`, whose steps are in order: one for each, and
    /// what is left for those that have more, where it goes through the layers of their first, for other ones
    /// are other weights to read. A step may be cut.
    fn share_short(&mut self, queue: Vec<Step>, rows: u32, ledger: &mut Ledger) {
        let mut of_caller: BTreeMap<NodeId, Vec<Step>> = BTreeMap::new();
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
        let rows_of = |steps: &Vec<Step>| steps.iter().map(|step| step.left).sum::<u32>();
        let has: BTreeMap<NodeId, u32> = of_caller
            .iter()
            .map(|(caller, steps)| (*caller, rows_of(steps)))
            .collect();
        let mut left = rows - callers.len() as u32;
        let mut given: BTreeMap<NodeId, u32> = BTreeMap::new();
        // The tag of whoever was given a row more last: who has no more to be given is at it as well.
        let mut reached = 0;
        // The next row is that of whoever will then have been given least.
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

    /// Takes a step in, with `want` rows or as many as there are pages for; makes room for `least`
    /// by letting others go. The rows that were taken: 0 if the step's own stream had to go.
    fn take(&mut self, step: &Step, want: u32, least: u32) -> u32 {
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

    fn book(&mut self, step: &Step, rows: u32) {
        let pages = self.pool.needs(step.length, rows);
        self.free -= pages;
        self.takes.push((step.stream, rows));
        let holders = self.holders.iter_mut().flatten();
        for holder in holders.filter(|holder| holder.stream == step.stream) {
            holder.pages += pages;
        }
    }

    /// Pages that a caller may have besides its own.
    fn left_of_quota(&mut self, caller: NodeId) -> u32 {
        if self.pool.quota >= self.pool.total {
            return self.pool.total;
        }
        let held = held_by(self.holders(), caller);
        self.pool.quota.saturating_sub(held)
    }

    fn holders(&mut self) -> &mut Vec<Holder> {
        let (streams, pool, takes, now) = (self.streams, self.pool, &self.takes, self.now);
        self.holders.get_or_insert_with(|| {
            let takes: BTreeMap<u64, u32> = takes.iter().copied().collect();
            let mut holders = holders(streams, pool, now);
            for holder in &mut holders {
                let rows = takes.get(&holder.stream).copied().unwrap_or(0);
                holder.pages += pool.needs(holder.length, rows);
            }
            holders
        })
    }

    /// Lets a stream go, so that others have its pages. Which one it was.
    fn reclaim(&mut self, need: &Need) -> Option<u64> {
        let pool = self.pool;
        let holders = self.holders();
        let stream = victim(holders, pool, need)?;
        let at = holders.iter().position(|holder| holder.stream == stream)?;
        let gone = holders.swap_remove(at);
        self.free += gone.pages;
        self.preempted.push(stream);
        if let Some(at) = self.takes.iter().position(|take| take.0 == stream) {
            let (_, rows) = self.takes.remove(at);
            match at < self.own_from {
                true => self.own_from -= 1,
                false => self.returned.push((gone.caller, rows)),
            }
        }
        Some(stream)
    }
}
