//! Single turns, and runs of turns in which callers compete.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_engine::Footprint;
use hearthnet_transport::NodeId;
use proptest::prelude::*;

use super::pages::Holder;
use super::returns::{MAX_LATE_RETURNS, REPROBE_EVERY};
use super::snapshot::SHORT_ROWS;
use super::*;

mod simulation;

/// Enough pages for all.
const PLENTY: Pool = Pool {
    total: u32::MAX,
    quota: u32::MAX,
    page: 16,
    base: 0,
};

fn caller(number: u8) -> NodeId {
    NodeId::from_checked([number; 32])
}

/// An empty stream of a caller, with a whole step waiting.
fn of(number: u8, stream: u64, rows: u32, served: u64) -> StreamSnapshot {
    let head = Head {
        rows,
        left: rows,
        served,
        arrived: Duration::ZERO,
    };
    StreamSnapshot {
        stream,
        caller: caller(number),
        layers: (0, 3),
        length: 0,
        active: Duration::ZERO,
        rests: false,
        head: Some(head),
    }
}

/// An empty stream with a caller of its own, with a whole step waiting.
fn step(stream: u64, rows: u32, served: u64) -> StreamSnapshot {
    of(stream as u8, stream, rows, served)
}

/// A stream of a caller that holds `length` positions, with a decode step waiting.
fn long(number: u8, stream: u64, length: u32) -> StreamSnapshot {
    StreamSnapshot {
        length,
        ..of(number, stream, 1, 0)
    }
}

/// A stream of a caller that holds `length` positions, without a waiting step.
fn quiet(number: u8, stream: u64, length: u32, active: Duration) -> StreamSnapshot {
    StreamSnapshot {
        length,
        active,
        head: None,
        ..of(number, stream, 1, 0)
    }
}

/// Pages of 16 positions: the total, and the quota of one caller.
fn pool(total: u32, quota: u32) -> Pool {
    Pool {
        total,
        quota,
        page: 16,
        base: 0,
    }
}

fn left(view: StreamSnapshot, left: u32) -> StreamSnapshot {
    let head = view.head.map(|head| Head { left, ..head });
    StreamSnapshot { head, ..view }
}

fn after(last: Kind) -> Planner {
    Planner {
        last,
        ..Planner::new()
    }
}

/// Chunks of `chunk` rows, which take short steps along or not.
fn sizes(chunk: u32, piggybacks: bool) -> Sizes {
    Sizes {
        chunk,
        piggybacks,
        decoders: 1,
        more: 0,
    }
}

fn plan(planner: &mut Planner, streams: &[StreamSnapshot], chunk: u32) -> Option<Turn> {
    planner.plan(streams, &PLENTY, &sizes(chunk, false), Duration::ZERO)
}

/// Streams that the first turn preempts, and rows that it takes.
fn first_turn(
    streams: &[StreamSnapshot],
    pool: &Pool,
    now: Duration,
) -> (Vec<u64>, Vec<(u64, u32)>) {
    let turn = Planner::new().plan(streams, pool, &sizes(64, false), now);
    let turn = turn.unwrap();
    (turn.preempted, turn.scheduled)
}

#[test]
fn the_example_of_the_module_holds() {
    let mut waiting = 100;
    let mut planner = Planner::new();
    let mut turns = Vec::new();
    for turn in 1..=7 {
        let mut streams = vec![step(1, 1, turn), step(2, 1, turn)];
        if waiting > 0 {
            streams.push(left(step(3, 100, 0), waiting));
        }
        let planned = plan(&mut planner, &streams, 40).unwrap();
        waiting -= planned
            .scheduled
            .iter()
            .find(|t| t.0 == 3)
            .map_or(0, |t| t.1);
        turns.push(planned.scheduled);
    }
    let both = vec![(1, 1), (2, 1)];
    let c = |rows| vec![(3, rows)];
    assert_eq!(
        turns,
        [
            both.clone(),
            c(40),
            both.clone(),
            c(40),
            both.clone(),
            c(20),
            both
        ]
    );
}

#[test]
fn decode_counts_beside_prompts_of_other_callers_only() {
    let now = Duration::from_secs(5);
    let prompt = of(1, 1, 100, 0);
    let own = of(1, 2, 1, 0);
    let other = of(2, 3, 1, 0);
    let back = |ago| quiet(2, 3, 7, now - Duration::from_millis(ago));
    assert!(others_decode(&[prompt, own, other], now));
    assert!(others_decode(&[back(20), prompt], now));
    let rests = StreamSnapshot {
        rests: true,
        ..back(1)
    };
    let unused = StreamSnapshot {
        length: 0,
        ..back(1)
    };
    for without in [
        &[prompt, own][..],
        &[own, other],
        &[prompt, back(21)],
        &[prompt, rests],
        &[prompt, unused],
        &[prompt, of(2, 3, 100, 0)],
    ] {
        assert!(!others_decode(without, now), "{without:?}");
    }
}

#[test]
fn no_batch_is_planned_without_waiting_steps() {
    assert_eq!(plan(&mut Planner::new(), &[], 40), None);
    let quiet = StreamSnapshot {
        head: None,
        ..step(1, 1, 0)
    };
    assert_eq!(plan(&mut Planner::new(), &[quiet], 40), None);
}

#[test]
fn a_chunk_is_filled_from_several_streams_in_order_of_service() {
    let streams = [of(1, 1, 30, 9), of(1, 2, 30, 3), of(1, 3, 30, 5)];
    let turn = plan(&mut Planner::new(), &streams, 64).unwrap();
    assert_eq!(turn.scheduled, [(2, 30), (3, 30), (1, 4)]);
}

#[test]
fn prefill_is_shared_per_caller_not_per_stream() {
    let mut planner = Planner::new();
    let mut served: BTreeMap<u64, u64> = BTreeMap::new();
    let mut given = [0, 0];
    for turn in 1..=100 {
        let at = |stream: u64| served.get(&stream).copied().unwrap_or(0);
        let mut streams: Vec<_> = (1..=8).map(|s| of(1, s, 5000, at(s))).collect();
        streams.push(of(2, 9, 5000, at(9)));
        for (stream, rows) in plan(&mut planner, &streams, 40).unwrap().scheduled {
            served.insert(stream, turn);
            given[usize::from(stream == 9)] += rows;
        }
    }
    assert_eq!(given, [2000, 2000]);
}

#[test]
fn the_example_of_the_ledger_holds() {
    let mut planner = Planner::new();
    let mut served = [0, 0];
    let mut seen = Vec::new();
    for turn in 1..=6 {
        let mut streams = vec![of(1, 1, 5000, served[0])];
        if turn >= 3 {
            streams.push(of(2, 2, 5000, served[1]));
        }
        let scheduled = plan(&mut planner, &streams, 40).unwrap().scheduled;
        let [(stream, 40)] = scheduled[..] else {
            panic!("{scheduled:?}")
        };
        served[usize::from(stream == 2)] = turn;
        let tag = |number| planner.prefill.tag(caller(number));
        seen.push((stream, tag(1), if turn < 3 { 0 } else { tag(2) }));
    }
    assert_eq!(
        seen,
        [
            (1, 40, 0),
            (1, 80, 0),
            (2, 80, 80),
            (1, 120, 80),
            (2, 120, 120),
            (1, 160, 120)
        ]
    );
}

#[test]
fn one_callers_many_streams_do_not_delay_another_callers_decode_step() {
    let mut planner = Planner::new();
    for turn in 1..=20 {
        // Caller 1 has more than fits a turn; caller 2 returns each time.
        let mut streams: Vec<_> = (1..=100).map(|s| of(1, s, 8, s % 3)).collect();
        streams.push(of(2, 200, 1, turn));
        let turn = plan(&mut planner, &streams, 40).unwrap();
        assert!(turn.scheduled.contains(&(200, 1)), "{turn:?}");
        assert!(turn.scheduled.iter().map(|t| t.1).sum::<u32>() > MAX_TURN_ROWS - 8);
    }
}

#[test]
fn a_returning_caller_keeps_its_debt() {
    // Caller 1 closes its stream after each chunk and opens another; caller 2 stays.
    let mut planner = Planner::new();
    let mut given = [0, 0];
    for turn in 1..=100 {
        let streams = [of(1, 1000 + turn, 40, 0), of(2, 1, 5000, turn)];
        for (stream, rows) in plan(&mut planner, &streams, 40).unwrap().scheduled {
            given[usize::from(stream == 1)] += rows;
        }
    }
    assert_eq!(given, [2000, 2000]);
}

#[test]
fn an_absent_caller_earns_no_credit() {
    let mut planner = Planner::new();
    for turn in 1..=50 {
        plan(&mut planner, &[of(1, 1, 5000, turn)], 40).unwrap();
    }
    let mut given = [0u32, 0];
    for turn in 51..=60 {
        let streams = [of(1, 1, 5000, turn), of(2, 2, 5000, 0)];
        for (stream, rows) in plan(&mut planner, &streams, 40).unwrap().scheduled {
            given[usize::from(stream == 2)] += rows;
        }
    }
    // Up to the bound: two chunks.
    assert!(given[0].abs_diff(given[1]) <= 2 * 40, "{given:?}");
}

#[test]
fn a_step_is_cut_to_the_pages_that_are_left() {
    let pool = pool(4, 4);
    // Three pages and a part are in use, so one page is free, and 13 rows of the last one.
    let streams = [StreamSnapshot {
        length: 35,
        ..of(1, 1, 100, 0)
    }];
    let (_, scheduled) = first_turn(&streams, &pool, Duration::ZERO);
    assert_eq!(scheduled, [(1, 29)]);
}

#[test]
fn the_example_of_the_pages_holds() {
    let pool = pool(10, 10);
    let streams = [long(1, 1, 75), long(1, 2, 40), long(2, 3, 32)];
    let turn = first_turn(&streams, &pool, Duration::ZERO);
    assert_eq!(turn, (vec![2], vec![(1, 1), (3, 1)]));
}

#[test]
fn idle_streams_are_preempted_first_longest_idle_before_others() {
    let pool = pool(6, 6);
    let now = Duration::from_secs(100);
    let kept = |stream, length, secs| quiet(1, stream, length, now - Duration::from_secs(secs));
    // The longest idle stream holds nothing.
    let streams = [
        kept(1, 0, 90),
        kept(2, 32, 30),
        kept(3, 32, 20),
        StreamSnapshot {
            length: 32,
            active: now,
            ..of(2, 4, 40, 0)
        },
    ];
    let turn = first_turn(&streams, &pool, now);
    // The victim is the longest idle, not the youngest or the least progressed.
    assert_eq!(turn, (vec![2], vec![(4, 32)]));
}

#[test]
fn a_caller_beyond_its_own_share_gives_up_streams_of_its_own_only() {
    let pool = pool(10, 4);
    let streams = [long(1, 1, 48), long(1, 2, 10), long(2, 3, 5)];
    let turn = first_turn(&streams, &pool, Duration::ZERO);
    assert_eq!(turn, (vec![2], vec![(1, 1), (3, 1)]));
}

#[test]
fn the_stream_that_needs_a_page_may_be_the_victim() {
    let pool = pool(2, 2);
    let streams = [long(1, 1, 20), long(1, 2, 0)];
    let turn = first_turn(&streams, &pool, Duration::ZERO);
    assert_eq!(turn, (vec![2], vec![(1, 1)]));
}

#[test]
fn a_stream_is_admitted_if_a_page_is_free_or_within_its_callers_share() {
    let pool = pool(4, 3);
    let now = Duration::from_secs(100);
    let holds = |number, stream, length| quiet(number, stream, length, now);
    let admit = |streams: &[StreamSnapshot], number| {
        let holders = holders(streams, &pool, now);
        super::admit(&holders, &pool, caller(number))
    };
    assert_eq!(admit(&[], 1), Ok(()));
    assert_eq!(admit(&[holds(1, 1, 32)], 1), Ok(()));
    // A stream that has not begun will take a page.
    let mut streams = vec![holds(1, 1, 32), holds(1, 2, 0)];
    assert_eq!(admit(&streams, 1), Err(Full::Caller));
    streams.push(holds(2, 3, 16));
    // No page is left: the first caller has more than a third, the second exactly its share.
    assert_eq!(admit(&streams, 2), Ok(()), "half of four pages is two");
    streams.push(holds(2, 4, 0));
    assert_eq!(admit(&streams, 2), Err(Full::Host));
    assert_eq!(admit(&streams, 3), Ok(()), "a third of four pages is one");
    // An idle conversation gives way.
    streams[0].active = Duration::ZERO;
    assert_eq!(admit(&streams, 1), Ok(()));
    assert_eq!(admit(&streams, 2), Ok(()));
}

#[test]
fn states_of_recurrent_layers_count_in_pages_from_the_first_position_on() {
    let footprint = Footprint {
        per_sequence: 250,
        per_position: 10,
        page: 10,
    };
    // Pages of 100 bytes; states of three pages.
    let pool = Pool::new(1000, &footprint, 50);
    assert_eq!((pool.total, pool.quota, pool.base), (10, 5, 3));
    assert_eq!(
        [0, 1, 10, 11].map(|length| pool.pages(length)),
        [0, 4, 4, 5]
    );
    assert_eq!(
        (pool.needs(0, 1), pool.needs(1, 9), pool.needs(10, 1)),
        (4, 0, 1)
    );
    assert_eq!([3, 4, 5].map(|pages| pool.fits(0, pages)), [0, 10, 20]);
    assert_eq!((pool.fits(10, 2), pool.holds(pool.quota)), (20, 20));
    // The first stream takes four of ten pages, or of its caller's five.
    let holder = |number: u8, pages| Holder {
        stream: number.into(),
        caller: caller(number),
        length: 1,
        pages,
        active: Duration::ZERO,
        idle: false,
    };
    assert_eq!(super::admit(&[], &pool, caller(1)), Ok(()));
    let full = super::admit(&[holder(1, 4)], &pool, caller(1));
    assert_eq!(full, Err(Full::Caller));
    // A stream that has not begun will take four.
    let streams = [holder(1, 4), holder(2, 0)];
    assert_eq!(super::admit(&streams, &pool, caller(3)), Err(Full::Host));
    assert_eq!(super::admit(&streams[..1], &pool, caller(3)), Ok(()));
}

#[test]
fn a_host_without_keys_and_values_counts_streams() {
    let footprint = Footprint {
        per_sequence: 300,
        per_position: 0,
        page: 32,
    };
    let pool = Pool::new(1000, &footprint, 100);
    assert_eq!((pool.total, pool.least()), (3, 1));
    assert_eq!(
        [0, 1, 1_000_000].map(|length| pool.pages(length)),
        [0, 1, 1]
    );
    assert_eq!((pool.needs(1, 5000), pool.fits(0, 1)), (0, u32::MAX));
}

fn any_streams() -> impl Strategy<Value = Vec<StreamSnapshot>> {
    let step = (
        prop_oneof![1u32..=SHORT_ROWS, 9u32..5000],
        0u32..5000,
        0u64..20,
        0u64..50,
        0u8..5,
    );
    proptest::collection::vec(step, 0..120).prop_map(|steps| {
        let view = |(i, (rows, done, served, arrived, number)): (usize, _)| {
            let done: u32 = if rows <= SHORT_ROWS { 0 } else { done % rows };
            let head = Head {
                rows,
                left: rows - done,
                served,
                arrived: Duration::from_micros(arrived),
            };
            StreamSnapshot {
                head: Some(head),
                ..of(number, i as u64, rows, served)
            }
        };
        steps.into_iter().enumerate().map(view).collect()
    })
}

fn any_kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Decode), Just(Kind::Prefill)]
}

fn head_of(streams: &[StreamSnapshot], stream: u64) -> Head {
    let view = streams.iter().find(|view| view.stream == stream);
    view.unwrap().head.unwrap()
}

/// The greatest and the least lead of one caller over another while both have been waiting.
#[derive(Default)]
struct Lead(BTreeMap<(NodeId, NodeId), (i64, i64, i64)>);

impl Lead {
    /// Records a turn, and returns the spread of the leads.
    fn note(&mut self, given: &BTreeMap<NodeId, i64>, left: &BTreeSet<NodeId>) -> i64 {
        self.0
            .retain(|(a, b), _| left.contains(a) && left.contains(b));
        let mut most = 0;
        for &a in left {
            for &b in left.range(..a) {
                let given = |caller| given.get(&caller).copied().unwrap_or(0);
                let (now, least, greatest) = self.0.entry((a, b)).or_default();
                *now += given(a) - given(b);
                (*least, *greatest) = ((*least).min(*now), (*greatest).max(*now));
                most = most.max(*greatest - *least);
            }
        }
        most
    }
}

proptest! {
    #[test]
    fn a_turn_is_bounded_and_takes_from_each_stream_once(
        streams in any_streams(), last in any_kind(), chunk in 0u32..2000, piggybacks in any::<bool>(),
    ) {
        let turn = after(last).plan(&streams, &PLENTY, &sizes(chunk, piggybacks), Duration::ZERO);
        let Some(turn) = turn else {
            prop_assert!(streams.is_empty());
            return Ok(());
        };
        prop_assert!(!turn.scheduled.is_empty() && turn.preempted.is_empty());
        let bound = match turn.kind {
            Kind::Decode => 0,
            Kind::Prefill => chunk.clamp(1, MAX_TURN_ROWS),
        };
        prop_assert!(turn.scheduled.iter().map(|t| t.1).sum::<u32>() <= MAX_TURN_ROWS);
        let (mut seen, mut long) = (BTreeSet::new(), 0);
        for (stream, rows) in &turn.scheduled {
            prop_assert!(seen.insert(*stream));
            let step = head_of(&streams, *stream);
            prop_assert!(*rows >= 1 && *rows <= step.left);
            match Kind::of(step) {
                Kind::Decode => prop_assert!(*rows == step.left && long == 0),
                Kind::Prefill => long += rows,
            }
        }
        prop_assert!(long <= bound && (long > 0) == (turn.kind == Kind::Prefill));
        prop_assert_eq!(long, turn.chunk);
        let short = turn.scheduled.iter().map(|take| take.1).sum::<u32>() - long;
        prop_assert!(short == 0 || piggybacks || turn.kind == Kind::Decode);
    }

    #[test]
    fn a_decode_step_waits_for_at_most_one_chunk(
        streams in any_streams(), last in any_kind(), chunk in 1u32..600,
    ) {
        let is_short = |view: &&StreamSnapshot| view.head.is_some_and(|head| head.rows <= SHORT_ROWS);
        // Up to 64 streams of 8 rows fit one turn.
        prop_assume!((1..=64).contains(&streams.iter().filter(is_short).count()));
        let mut planner = after(last);
        let mut turn = plan(&mut planner, &streams, chunk).unwrap();
        if turn.kind == Kind::Prefill {
            prop_assert_eq!(last, Kind::Decode);
            turn = plan(&mut planner, &streams, chunk).unwrap();
        }
        prop_assert_eq!(turn.kind, Kind::Decode);
        for view in streams.iter().filter(is_short) {
            prop_assert!(turn.scheduled.contains(&(view.stream, view.head.unwrap().left)));
        }
    }

    /// Decode steps that return at once never starve prefill, and prefill is shared: every long
    /// step is done after the number of turns that its rows need.
    #[test]
    fn all_prefill_ends_while_others_decode_without_pause(
        longs in proptest::collection::vec(9u32..400, 1..12), decoders in 0u64..40, chunk in 1u32..200,
    ) {
        let mut waiting: BTreeMap<u64, (u32, u32, u64)> =
            longs.iter().enumerate().map(|(i, &r)| (100 + i as u64, (r, r, 0))).collect();
        let rows: u32 = longs.iter().sum();
        let bound = 2 * (u64::from(rows.div_ceil(chunk)) + 1);
        let mut planner = after(Kind::Decode);
        let mut turn_no = 0;
        while !waiting.is_empty() {
            turn_no += 1;
            prop_assert!(turn_no <= bound, "not done after {turn_no} turns");
            let mut streams: Vec<_> = (0..decoders).map(|s| step(s, 1, turn_no - 1)).collect();
            for (&stream, &(rows, rest, served)) in &waiting {
                streams.push(left(step(stream, rows, served), rest));
            }
            for (stream, rows) in plan(&mut planner, &streams, chunk).unwrap().scheduled {
                if let Some(step) = waiting.get_mut(&stream) {
                    step.1 -= rows;
                    step.2 = turn_no;
                }
            }
            waiting.retain(|_, step| step.1 > 0);
        }
    }

    /// Over any run of turns that leave two callers waiting, their rows differ by at most two of
    /// the largest chunks, or of the longest short steps. This holds for any streams and for other
    /// callers that come and go.
    #[test]
    fn callers_that_wait_are_given_the_same(
        turns in proptest::collection::vec(
            (1u32..200, proptest::collection::vec((0u8..4, 9u32..300), 0..6)), 20..150),
        decode in any::<bool>(),
    ) {
        let mut planner = Planner::new();
        let mut streams: Vec<StreamSnapshot> = Vec::new();
        let mut lead = Lead::default();
        let (mut largest, mut number) = (0, 0);
        for (turn_no, (chunk, arrivals)) in (1u64..).zip(turns) {
            // In decode, streams for several turns come at a time.
            let copies = if decode { 40 } else { 1 };
            for (caller, rows) in arrivals {
                for _ in 0..copies {
                    number += 1;
                    let rows = if decode { rows % SHORT_ROWS + 1 } else { rows };
                    streams.push(of(caller, number, rows, 0));
                }
            }
            let bound = if decode { SHORT_ROWS } else { chunk };
            largest = largest.max(bound.min(MAX_TURN_ROWS));
            let Some(turn) = plan(&mut planner, &streams, chunk) else {
                continue;
            };
            let mut given: BTreeMap<NodeId, i64> = BTreeMap::new();
            for (stream, rows) in turn.scheduled {
                let view = streams.iter_mut().find(|view| view.stream == stream).unwrap();
                *given.entry(view.caller).or_default() += i64::from(rows);
                let head = view.head.as_mut().unwrap();
                (head.left, head.served) = (head.left - rows, turn_no);
            }
            streams.retain(|view| view.head.unwrap().left > 0);
            let waiting = streams.iter().map(|view| view.caller).collect();
            let changed = lead.note(&given, &waiting);
            prop_assert!(changed <= 2 * i64::from(largest), "{changed} rows apart");
        }
    }

    #[test]
    fn the_same_calls_give_the_same_turns(
        calls in proptest::collection::vec((any_streams(), 1u32..600), 1..6), pages in 1u32..200,
    ) {
        let pool = pool(pages, pages);
        let run = || {
            let mut planner = Planner::new();
            let plan = |(streams, chunk): &(Vec<StreamSnapshot>, u32)| {
                planner.plan(streams, &pool, &sizes(*chunk, true), Duration::ZERO)
            };
            calls.iter().map(plan).collect::<Vec<_>>()
        };
        prop_assert_eq!(run(), run());
    }
}

#[test]
fn a_batch_waits_for_company_while_fewer_wait_than_come_back() {
    let now = Duration::from_secs(9);
    let came = |stream| StreamSnapshot {
        active: now,
        ..step(stream, 1, 0)
    };
    let answered = |stream| StreamSnapshot {
        head: None,
        ..came(stream)
    };
    let gone = |stream| StreamSnapshot {
        active: Duration::ZERO,
        ..answered(stream)
    };
    let may_grow = |streams: &[StreamSnapshot], now| {
        let standing = |view: &StreamSnapshot| (view.head.map(|head| head.rows), view.active);
        may_grow(streams.iter().map(standing), now)
    };
    assert!(may_grow(&[came(1), answered(2), answered(3)], now));
    // A lone stream has no company to wait for, nor has the last of several.
    assert!(!may_grow(&[came(1)], now));
    assert!(!may_grow(&[came(1), gone(2), gone(3)], now));
    // Half of them have come.
    assert!(!may_grow(&[came(1), answered(2)], now));
    assert!(!may_grow(
        &[came(1), came(2), answered(3), answered(4)],
        now
    ));
    // A prefill step can be computed, or no step waits.
    let prompt = StreamSnapshot {
        active: now,
        ..step(9, 100, 0)
    };
    assert!(!may_grow(&[came(1), answered(2), answered(3), prompt], now));
    assert!(!may_grow(&[answered(2), answered(3)], now));
}

#[test]
fn late_streams_are_waited_for_at_every_seventeenth_batch_only() {
    let at = Duration::from_micros;
    let (mut return_estimator, mut now) = (ReturnEstimator::default(), at(1000));
    // A step of `rows` rows arrives `after` so long. Returns whether it was waited for before turn
    // 1, and before a turn that probes all streams again.
    let mut comes = |after: u64, rows| {
        return_estimator.answered(1, now);
        let awaited =
            [1, REPROBE_EVERY].map(|turn| return_estimator.awaited(at(200), now + at(50), turn));
        assert!(awaited.iter().flatten().all(|left| *left == at(150)));
        assert_eq!(
            return_estimator.awaited(at(200), now + at(200), 1),
            None,
            "it is late"
        );
        return_estimator.came(rows, now + at(after), at(200));
        assert_eq!(
            return_estimator.awaited(at(200), now, 1),
            None,
            "it is there"
        );
        now += at(5000);
        awaited.map(|left| left.is_some())
    };
    // First return: no history. Then it returns at once, or a little too late.
    assert_eq!(comes(90, 1), [false, false]);
    assert_eq!(comes(201, 1), [true, true]);
    assert_eq!(comes(200, SHORT_ROWS), [true, true]);
    for _ in 0..MAX_LATE_RETURNS {
        assert_eq!(comes(900, 1), [true, true]);
    }
    for _ in 0..40 {
        assert_eq!(comes(900, 1), [false, true]);
    }
    // A return in time ends the series of late ones.
    assert_eq!(comes(90, 1), [false, true]);
    // A return with a prompt is not counted.
    assert_eq!(comes(9000, 9), [true, true]);
    assert_eq!(comes(90, 1), [true, true]);
    return_estimator.answered(9, now);
    assert_eq!(return_estimator.awaited(at(200), now, REPROBE_EVERY), None);
}

#[test]
fn a_chunk_takes_other_callers_decode_steps_for_the_same_layers_along() {
    let (prompt, short) = (of(1, 1, 100, 0), of(2, 2, 1, 0));
    assert!(piggybacks(&[prompt, short], true));
    assert!(!piggybacks(&[prompt, short], false));
    assert!(!piggybacks(&[prompt], true));
    let elsewhere = StreamSnapshot {
        layers: (0, 2),
        ..of(3, 3, 1, 0)
    };
    assert!(!piggybacks(&[prompt, short, elsewhere], true));
    let gone = StreamSnapshot {
        head: None,
        ..elsewhere
    };
    assert!(piggybacks(&[prompt, short, gone], true));
    let plan = |piggybacks| {
        let streams = [short, of(4, 4, 8, 0), prompt];
        let turn =
            after(Kind::Decode).plan(&streams, &PLENTY, &sizes(40, piggybacks), Duration::ZERO);
        let turn = turn.unwrap();
        (turn.kind, turn.scheduled, turn.chunk)
    };
    assert_eq!(plan(false), (Kind::Prefill, vec![(1, 40)], 40));
    let all = vec![(2, 1), (4, 8), (1, 40)];
    assert_eq!(plan(true), (Kind::Prefill, all, 40));
}

#[test]
fn rows_of_a_preempted_short_step_are_neither_charged_nor_given_to_the_chunk() {
    // Of three pages one is free, and the short step of a caller that holds two needs it.
    let pool = pool(3, 3);
    let rich = StreamSnapshot {
        length: 32,
        ..of(1, 1, 8, 0)
    };
    let prompt = StreamSnapshot {
        length: 0,
        ..of(2, 2, 100, 0)
    };
    let mut planner = after(Kind::Decode);
    let turn = planner.plan(&[rich, prompt], &pool, &sizes(10, true), Duration::ZERO);
    let turn = turn.unwrap();
    assert_eq!((turn.preempted, turn.scheduled), (vec![1], vec![(2, 10)]));
    assert_eq!(turn.chunk, 10);
    assert_eq!(planner.prefill.tag(caller(1)), 0);
    assert_eq!(planner.prefill.tag(caller(2)), 10);
}

#[test]
fn one_callers_many_streams_lengthen_anothers_batches_by_a_bounded_share() {
    let limited = |decoders, more| Sizes {
        decoders,
        more,
        ..sizes(40, true)
    };
    // Caller 1 has one stream, caller 2 has seven, with short steps of `rows` rows.
    let run = |rows: u32, sizes: Sizes, turns: u64| {
        let mut planner = Planner::new();
        let mut served = BTreeMap::new();
        let (mut longest, mut missed, mut given) = (0, 0, [0, 0]);
        for turn in 1..=turns {
            let at = |stream: u64| served.get(&stream).copied().unwrap_or(0);
            let mut streams = vec![of(1, 1, 1, at(1))];
            streams.extend((2..=8).map(|stream| of(2, stream, rows, at(stream))));
            let planned = planner.plan(&streams, &PLENTY, &sizes, Duration::ZERO);
            let scheduled = planned.unwrap().scheduled;
            missed += u64::from(scheduled.iter().all(|take| take.0 != 1));
            longest = longest.max(scheduled.iter().map(|take| take.1).sum::<u32>());
            for (stream, rows) in scheduled {
                served.insert(stream, turn);
                given[usize::from(stream > 1)] += rows;
            }
        }
        (longest, missed, given)
    };
    assert_eq!(run(1, limited(2, 0), 100), (2, 0, [100, 100]));
    assert_eq!(run(1, limited(2, 3), 100), (5, 0, [100, 400]));
    assert_eq!(run(1, limited(1, 0), 100).0, 8);
    // Steps of eight rows change nothing: they are cut.
    assert_eq!(run(8, limited(2, 0), 100), (2, 0, [100, 100]));
    assert_eq!(run(8, limited(2, 3), 100), (5, 0, [100, 400]));
    // Streams through other layers change nothing: they need other weights.
    let through = |stream, layers| StreamSnapshot {
        layers,
        ..of(2, stream, 1, 0)
    };
    let streams = [
        of(1, 1, 1, 0),
        through(2, (0, 1)),
        through(3, (0, 2)),
        through(4, (0, 1)),
    ];
    let turn = Planner::new().plan(&streams, &PLENTY, &limited(2, 5), Duration::ZERO);
    assert_eq!(turn.unwrap().scheduled, [(1, 1), (2, 1), (4, 1)]);
    // With a chunk, one row of each.
    let streams = [
        of(1, 1, 1, 0),
        of(2, 2, 1, 0),
        of(2, 3, 1, 0),
        of(3, 4, 100, 0),
    ];
    let turn = after(Kind::Decode).plan(&streams, &PLENTY, &limited(2, 5), Duration::ZERO);
    assert_eq!(turn.unwrap().scheduled, [(1, 1), (2, 1), (4, 40)]);
}

#[test]
fn callers_with_waiting_or_recent_short_steps_count_as_decoders() {
    let now = Duration::from_secs(5);
    let back = |number, ago| quiet(number, number.into(), 7, now - Duration::from_millis(ago));
    assert_eq!(decoders(&[of(1, 1, 1, 0), of(1, 2, 8, 0)], now), 1);
    assert_eq!(
        decoders(&[of(1, 1, 1, 0), back(2, 1000), back(3, 1001)], now),
        2
    );
    assert_eq!(decoders(&[of(1, 1, 9, 0)], now), 0);
}

#[test]
fn extra_rows_given_while_no_other_caller_wanted_them_are_not_charged() {
    let limited = Sizes {
        decoders: 3,
        more: 3,
        ..sizes(40, true)
    };
    let mut planner = Planner::new();
    let mut turn = |turn: u64, third: bool| {
        let mut streams = vec![of(1, 1, 1, turn)];
        streams.extend((2..=8).map(|stream| of(2, stream, 1, turn)));
        if third {
            streams.extend((12..=18).map(|stream| of(3, stream, 1, turn)));
        }
        let planned = planner.plan(&streams, &PLENTY, &limited, Duration::ZERO);
        let scheduled = planned.unwrap().scheduled;
        [10, 20].map(|end| {
            scheduled
                .iter()
                .filter(|take| (2..end).contains(&take.0))
                .count()
        })
    };
    for number in 1..=1000 {
        turn(number, false);
    }
    let (mut second, mut both) = (0, 0);
    for number in 1001..=1100 {
        let [of_second, of_both] = turn(number, true);
        (second, both) = (second + of_second, both + of_both);
    }
    assert_eq!(both, 500);
    assert!(second.abs_diff(both - second) <= 16, "{second} of {both}");
}
