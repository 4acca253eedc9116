//! Many callers with too few pages, which open again and replay after a preemption. All complete,
//! and the guarantees of `pages.rs` hold on the way.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_transport::NodeId;
use proptest::prelude::*;

use super::*;

const PAGE: u32 = 16;
/// Duration of a turn: ten turns without a step make a stream idle.
const TURN: Duration = Duration::from_millis(500);
/// Longest pause in turns: as in the orchestrator, forty times the first.
const LONGEST_PAUSE: u64 = 40;
/// Rows of a replay's steps.
const CHUNK: u32 = 64;

/// A conversation of one caller.
#[derive(Debug, Clone)]
struct Chat {
    caller: u8,
    /// Positions at its end.
    total: u32,
    /// Positions whose rows the caller knows: prompt and answer so far.
    known: u32,
    /// Whether its stream stays open at the end.
    kept: bool,
    /// Adversarial: never ends, and reopens at once.
    hog: bool,
    stream: Option<StreamSnapshot>,
    /// Turn from which on it may open again.
    until: u64,
    /// Refusals since its last progress.
    tries: u32,
    preempted: u32,
}

impl Chat {
    fn is_over(&self) -> bool {
        self.known >= self.total
    }

    /// Schedules the next attempt, with exponential backoff up to a bound.
    fn back_off(&mut self, turn: u64) {
        self.stream = None;
        if !self.hog {
            self.until = turn + LONGEST_PAUSE.min(1 << self.tries.min(20));
            self.tries += 1;
        }
    }

    /// A hog begins again, with a replay of everything.
    fn hog_on(&mut self) {
        if self.hog && self.is_over() {
            (self.stream, self.known) = (None, self.total - 1);
        }
    }

    /// Sends the next step, if the last one was answered.
    fn ask(&mut self, turn: u64, now: Duration) {
        let Some(stream) = &mut self.stream else {
            return;
        };
        if stream.head.is_some() || self.known >= self.total && stream.length >= self.known {
            return;
        }
        // Replays the known positions, then sends one token at a time.
        let rows = (self.known - stream.length).clamp(1, CHUNK);
        stream.active = now;
        stream.head = Some(Head {
            rows,
            left: rows,
            served: turn,
            arrived: now,
        });
    }
}

struct World {
    pool: Pool,
    planner: Planner,
    chats: Vec<Chat>,
    next: u64,
    turn: u64,
    preempted: u64,
}

impl World {
    fn now(&self) -> Duration {
        TURN * u32::try_from(self.turn).unwrap()
    }

    fn views(&self) -> Vec<StreamSnapshot> {
        self.chats.iter().filter_map(|chat| chat.stream).collect()
    }

    fn used(&self, number: Option<u8>) -> u32 {
        let of = |chat: &&Chat| number.is_none_or(|number| chat.caller == number);
        let streams = self.chats.iter().filter(of).filter_map(|chat| chat.stream);
        streams.map(|view| self.pool.pages(view.length)).sum()
    }

    /// Opens a stream for each chat that is out and may return, if the host admits it.
    fn open(&mut self) {
        let (turn, now) = (self.turn, self.now());
        for at in 0..self.chats.len() {
            let chat = &self.chats[at];
            if chat.stream.is_some() || chat.is_over() || chat.until > turn {
                continue;
            }
            let caller = caller(chat.caller);
            let admitted = admit(&holders(&self.views(), &self.pool, now), &self.pool, caller);
            let chat = &mut self.chats[at];
            match admitted {
                Ok(()) => {
                    self.next += 1;
                    chat.stream = Some(StreamSnapshot {
                        stream: self.next,
                        caller,
                        layers: (0, 3),
                        length: 0,
                        active: now,
                        rests: false,
                        head: None,
                    });
                }
                Err(_) => chat.back_off(turn),
            }
        }
    }

    /// Runs one turn and checks its invariants.
    fn step(&mut self) {
        self.turn += 1;
        self.open();
        let (turn, now) = (self.turn, self.now());
        self.chats.iter_mut().for_each(|chat| chat.ask(turn, now));
        let views = self.views();
        let sizes = Sizes {
            decoders: decoders(&views, now),
            more: 3,
            ..sizes(96, piggybacks(&views, true))
        };
        let Some(planned) = self.planner.plan(&views, &self.pool, &sizes, now) else {
            return;
        };
        assert!(!planned.scheduled.is_empty() || !planned.preempted.is_empty());
        self.check_victims(&views, &planned);
        for &stream in &planned.preempted {
            self.preempted += 1;
            assert!(planned.scheduled.iter().all(|take| take.0 != stream));
            let chat = self.chat(stream);
            chat.preempted += 1;
            match chat.is_over() {
                true => chat.stream = None,
                false => chat.back_off(turn),
            }
        }
        for &(stream, rows) in &planned.scheduled {
            let chat = self.chat(stream);
            let view = chat.stream.as_mut().unwrap();
            view.length += rows;
            view.active = now;
            let head = view.head.as_mut().unwrap();
            (head.left, head.served) = (head.left - rows, turn);
            if head.left == 0 {
                view.head = None;
            }
            if view.length > chat.known {
                (chat.known, chat.tries) = (view.length, 0);
            }
            if chat.is_over() && !chat.kept {
                chat.stream = None;
            }
            chat.hog_on();
        }
        assert!(self.used(None) <= self.pool.total);
        for chat in &self.chats {
            assert!(self.used(Some(chat.caller)) <= self.pool.quota);
        }
    }

    fn chat(&mut self, stream: u64) -> &mut Chat {
        let is_it = |chat: &&mut Chat| chat.stream.is_some_and(|view| view.stream == stream);
        self.chats.iter_mut().find(is_it).unwrap()
    }

    /// A running stream is a victim only if its caller holds more than its fair share or its quota,
    /// or would with what it asks for.
    fn check_victims(&self, views: &[StreamSnapshot], planned: &Turn) {
        let holders = holders(views, &self.pool, self.now());
        let running: BTreeSet<NodeId> = holders
            .iter()
            .filter(|holder| !holder.idle)
            .map(|holder| holder.caller)
            .collect();
        let share = self.pool.total / u32::try_from(running.len()).unwrap();
        let mut demand: BTreeMap<NodeId, u32> = BTreeMap::new();
        for view in views {
            let asked = view.head.map_or(0, |head| head.left);
            let pages = self.pool.pages(view.length + asked);
            *demand.entry(view.caller).or_default() += pages;
        }
        for stream in &planned.preempted {
            let victim = holders.iter().find(|h| h.stream == *stream).unwrap();
            let demand = demand[&victim.caller];
            let beyond = demand > share || demand > self.pool.quota;
            assert!(
                victim.idle || beyond,
                "{victim:?} of {demand}, {share} each"
            );
            // With one caller, its most progressed stream stays.
            let of_one = running.len() == 1 && self.pool.quota == self.pool.total;
            let first = holders
                .iter()
                .max_by_key(|h| (h.length, std::cmp::Reverse(h.stream)));
            assert!(
                victim.idle || !of_one || first != Some(victim),
                "{holders:?}"
            );
        }
    }

    fn run(&mut self, most: u64) -> bool {
        let is_done = |world: &Self| world.chats.iter().all(|chat| chat.hog || chat.is_over());
        while self.turn < most && !is_done(self) {
            self.step();
        }
        is_done(self)
    }
}

fn world(pages: u32, quota: u32, chats: Vec<(u8, u32, u32, bool)>) -> World {
    let quota = quota.clamp(1, pages);
    let chat = |(caller, prompt, answer, kept): (u8, u32, u32, bool)| {
        // A stream that could never fit would not be admitted.
        let total = (prompt + answer).min(quota * PAGE);
        Chat {
            caller,
            total,
            known: prompt.min(total - 1),
            kept,
            hog: false,
            stream: None,
            until: 0,
            tries: 0,
            preempted: 0,
        }
    };
    World {
        pool: Pool {
            total: pages,
            quota,
            page: PAGE,
            base: 0,
        },
        planner: Planner::new(),
        chats: chats.into_iter().map(chat).collect(),
        next: 0,
        turn: 0,
        preempted: 0,
    }
}

#[test]
fn two_streams_that_each_need_most_pages_both_complete() {
    let mut world = world(10, 10, vec![(1, 100, 59, false), (2, 100, 59, false)]);
    assert!(world.run(2000), "{:?}", world.chats);
    assert!(world.preempted > 0);
}

#[test]
fn a_stream_alone_on_the_host_gets_all_pages() {
    let mut world = world(10, 10, vec![(1, 100, 60, false)]);
    assert!(world.run(200));
    assert_eq!((world.chats[0].known, world.preempted), (160, 0));
}

#[test]
fn the_conversations_of_one_caller_end_one_after_the_other() {
    let chats = (0..8).map(|_| (1, 40, 60, false)).collect();
    let mut world = world(9, 9, chats);
    assert!(world.run(20_000), "{:?}", world.chats);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// With a budget that a fraction of the chats would fill, and any number of chats per caller,
    /// all chats end and none waits for ever. The bound: the cost of every row if every position
    /// were replayed once per chat.
    #[test]
    fn all_chats_end_however_few_pages_there_are(
        pages in 2u32..24,
        share in 1u32..=100,
        chats in proptest::collection::vec((0u8..5, 1u32..200, 1u32..60, any::<bool>()), 1..14),
    ) {
        // In half of the cases there is no quota.
        let quota = (pages * (2 * share).min(100) / 100).max(1);
        let mut world = world(pages, quota, chats);
        let rows: u32 = world.chats.iter().map(|chat| chat.total).sum();
        let most = u64::from(rows) * (world.chats.len() as u64 + 1) * 4 + 1000;
        prop_assert!(world.run(most), "after {most} turns: {:?}", world.chats);
    }
    /// Some callers take all they can get, with any number of streams that never end and reopen at
    /// once. A caller within its fair share is never preempted, and ends in time.
    #[test]
    fn callers_within_their_share_are_not_preempted_for_greedy_ones(
        spare in 0u32..20,
        hogs in proptest::collection::vec((0u8..3, 1u32..400), 1..12),
        honest in proptest::collection::vec((1u32..60, 1u32..60), 1..4),
    ) {
        // As many callers as there can be; each honest caller needs its share at most.
        let callers = 3 + honest.len() as u32;
        let need = |(prompt, answer): &(u32, u32)| (prompt + answer).div_ceil(PAGE);
        let share = honest.iter().map(need).max().unwrap_or(1);
        let pages = callers * share + spare;
        let good = honest.iter().zip(10..).map(|(&(prompt, answer), n)| (n, prompt, answer, false));
        let greedy = hogs.iter().map(|&(n, prompt)| (n, prompt, 400, false));
        let mut world = world(pages, pages, good.chain(greedy).collect());
        for chat in world.chats.iter_mut().skip(honest.len()) {
            chat.hog = true;
        }
        let rows: u32 = honest.iter().map(|(prompt, answer)| prompt + answer).sum();
        let most = u64::from(rows * callers * 4) + 100;
        prop_assert!(world.run(most), "after {most} turns: {:?}", world.chats);
        for chat in world.chats.iter().take(honest.len()) {
            prop_assert_eq!(chat.preempted, 0, "{:?}", chat);
        }
    }
}
