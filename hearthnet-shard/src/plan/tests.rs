//! Single turns, and runs of them in which callers compete.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Pages enough for everybody.
pub(super) const PLENTY: Pool = Pool {
    total: u32::MAX,
    quota: u32::MAX,
    page: 16,
};

pub(super) fn caller(number: u8) -> NodeId {
    NodeId::from_checked([number; 32])
}

/// An empty stream of a caller, with a whole step waiting.
fn of(number: u8, stream: u64, rows: u32, served: u64) -> View {
    let head = Head {
        rows,
        left: rows,
        served,
        arrived: Duration::ZERO,
    };
    View {
        stream,
        caller: caller(number),
        layers: (0, 3),
        length: 0,
        active: Duration::ZERO,
        rests: false,
        head: Some(head),
    }
}

/// The same, of a caller of its own.
fn step(stream: u64, rows: u32, served: u64) -> View {
    of(stream as u8, stream, rows, served)
}

/// A stream of a caller that holds so many positions, with a decode step waiting.
fn long(number: u8, stream: u64, length: u32) -> View {
    View {
        length,
        ..of(number, stream, 1, 0)
    }
}

/// Pages of 16 positions: so many in all, and of one caller.
fn pool(total: u32, quota: u32) -> Pool {
    Pool {
        total,
        quota,
        page: 16,
    }
}

fn left(view: View, left: u32) -> View {
    let head = view.head.map(|head| Head { left, ..head });
    View { head, ..view }
}

fn after(last: Kind) -> Planner {
    Planner {
        last,
        ..Planner::new()
    }
}

/// Pieces of so many rows, which take short steps along or not.
pub(super) fn sizes(piece: u32, rides: bool) -> Sizes {
    Sizes {
        piece,
        rides,
        decoders: 1,
        more: 0,
    }
}

fn plan(planner: &mut Planner, streams: &[View], piece: u32) -> Option<Turn> {
    planner.plan(streams, &PLENTY, &sizes(piece, false), Duration::ZERO)
}

#[test]
fn the_example_of_the_module_is_what_happens() {
    let mut waiting = 100;
    let mut planner = Planner::new();
    let mut turns = Vec::new();
    for turn in 1..=7 {
        let mut streams = vec![step(1, 1, turn), step(2, 1, turn)];
        if waiting > 0 {
            streams.push(left(step(3, 100, 0), waiting));
        }
        let planned = plan(&mut planner, &streams, 40).unwrap();
        waiting -= planned.takes.iter().find(|t| t.0 == 3).map_or(0, |t| t.1);
        turns.push(planned.takes);
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
fn prompts_go_beside_the_decode_of_others_only() {
    let now = Duration::from_secs(5);
    let prompt = of(1, 1, 100, 0);
    let own = of(1, 2, 1, 0);
    let other = of(2, 3, 1, 0);
    let back = |ago: u64| View {
        length: 7,
        active: now - Duration::from_millis(ago),
        head: None,
        ..other
    };
    assert!(others_decode(&[prompt, own, other], now));
    assert!(others_decode(&[back(20), prompt], now));
    let rests = View {
        rests: true,
        ..back(1)
    };
    let unused = View {
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
fn nothing_waiting_is_no_turn() {
    assert_eq!(plan(&mut Planner::new(), &[], 40), None);
    let quiet = View {
        head: None,
        ..step(1, 1, 0)
    };
    assert_eq!(plan(&mut Planner::new(), &[quiet], 40), None);
}

#[test]
fn a_piece_is_filled_from_several_streams_and_the_one_served_last_comes_last() {
    let streams = [of(1, 1, 30, 9), of(1, 2, 30, 3), of(1, 3, 30, 5)];
    let turn = plan(&mut Planner::new(), &streams, 64).unwrap();
    assert_eq!(turn.takes, [(2, 30), (3, 30), (1, 4)]);
}

#[test]
fn a_caller_with_eight_streams_gets_as_much_prefill_as_one_with_one() {
    let mut planner = Planner::new();
    let mut served: BTreeMap<u64, u64> = BTreeMap::new();
    let mut given = [0, 0];
    for turn in 1..=100 {
        let at = |stream: u64| served.get(&stream).copied().unwrap_or(0);
        let mut streams: Vec<_> = (1..=8).map(|s| of(1, s, 5000, at(s))).collect();
        streams.push(of(2, 9, 5000, at(9)));
        for (stream, rows) in plan(&mut planner, &streams, 40).unwrap().takes {
            served.insert(stream, turn);
            given[usize::from(stream == 9)] += rows;
        }
    }
    assert_eq!(given, [2000, 2000]);
}

#[test]
fn the_example_of_the_ledger_is_what_happens() {
    let mut planner = Planner::new();
    let mut served = [0, 0];
    let mut seen = Vec::new();
    for turn in 1..=6 {
        let mut streams = vec![of(1, 1, 5000, served[0])];
        if turn >= 3 {
            streams.push(of(2, 2, 5000, served[1]));
        }
        let takes = plan(&mut planner, &streams, 40).unwrap().takes;
        let [(stream, 40)] = takes[..] else {
            panic!("{takes:?}")
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
fn a_crowd_of_decoding_streams_does_not_make_a_single_one_wait() {
    let mut planner = Planner::new();
    for turn in 1..=20 {
        // More than a turn takes, of one caller; the other comes back each time.
        let mut streams: Vec<_> = (1..=100).map(|s| of(1, s, 8, s % 3)).collect();
        streams.push(of(2, 200, 1, turn));
        let turn = plan(&mut planner, &streams, 40).unwrap();
        assert!(turn.takes.contains(&(200, 1)), "{turn:?}");
        assert!(turn.takes.iter().map(|t| t.1).sum::<u32>() > MAX_TURN_ROWS - 8);
    }
}

#[test]
fn whoever_comes_back_has_not_got_rid_of_what_it_was_given() {
    // Caller 1 closes its stream after each piece and opens another; caller 2 stays.
    let mut planner = Planner::new();
    let mut given = [0, 0];
    for turn in 1..=100 {
        let streams = [of(1, 1000 + turn, 40, 0), of(2, 1, 5000, turn)];
        for (stream, rows) in plan(&mut planner, &streams, 40).unwrap().takes {
            given[usize::from(stream == 1)] += rows;
        }
    }
    assert_eq!(given, [2000, 2000]);
}

#[test]
fn whoever_was_away_has_nothing_saved_up() {
    let mut planner = Planner::new();
    for turn in 1..=50 {
        plan(&mut planner, &[of(1, 1, 5000, turn)], 40).unwrap();
    }
    let mut given = [0u32, 0];
    for turn in 51..=60 {
        let streams = [of(1, 1, 5000, turn), of(2, 2, 5000, 0)];
        for (stream, rows) in plan(&mut planner, &streams, 40).unwrap().takes {
            given[usize::from(stream == 2)] += rows;
        }
    }
    // Up to the bound: two pieces.
    assert!(given[0].abs_diff(given[1]) <= 2 * 40, "{given:?}");
}

#[test]
fn a_step_is_cut_to_the_pages_that_are_left() {
    let pool = pool(4, 4);
    // Three pages and a bit are in use, so one page is free, and 13 rows of the last one.
    let streams = [View {
        length: 35,
        ..of(1, 1, 100, 0)
    }];
    let turn = Planner::new().plan(&streams, &pool, &sizes(64, false), Duration::ZERO);
    assert_eq!(turn.unwrap().takes, [(1, 29)]);
}

#[test]
fn the_example_of_the_pages_is_what_happens() {
    let pool = pool(10, 10);
    let streams = [long(1, 1, 75), long(1, 2, 40), long(2, 3, 32)];
    let turn = Planner::new().plan(&streams, &pool, &sizes(64, false), Duration::ZERO);
    let turn = turn.unwrap();
    assert_eq!(
        (turn.preempted, turn.takes),
        (vec![2], vec![(1, 1), (3, 1)])
    );
}

#[test]
fn kept_streams_go_first_and_the_longest_idle_before_the_others() {
    let pool = pool(6, 6);
    let now = Duration::from_secs(100);
    let kept = |stream, length, secs| View {
        length,
        active: now - Duration::from_secs(secs),
        head: None,
        ..of(1, stream, 1, 0)
    };
    // The one that is longest idle holds nothing.
    let streams = [
        kept(1, 0, 90),
        kept(2, 32, 30),
        kept(3, 32, 20),
        View {
            length: 32,
            active: now,
            ..of(2, 4, 40, 0)
        },
    ];
    let turn = Planner::new()
        .plan(&streams, &pool, &sizes(64, false), now)
        .unwrap();
    // Neither the youngest nor the least progressed, but the longest idle.
    assert_eq!((turn.preempted, turn.takes), (vec![2], vec![(4, 32)]));
}

#[test]
fn a_caller_beyond_its_own_share_gives_up_streams_of_its_own_only() {
    let pool = pool(10, 4);
    let streams = [long(1, 1, 48), long(1, 2, 10), long(2, 3, 5)];
    let turn = Planner::new().plan(&streams, &pool, &sizes(64, false), Duration::ZERO);
    let turn = turn.unwrap();
    assert_eq!(
        (turn.preempted, turn.takes),
        (vec![2], vec![(1, 1), (3, 1)])
    );
}

#[test]
fn a_stream_that_asks_may_be_the_one_to_go() {
    let pool = pool(2, 2);
    let streams = [long(1, 1, 20), long(1, 2, 0)];
    let turn = Planner::new().plan(&streams, &pool, &sizes(64, false), Duration::ZERO);
    let turn = turn.unwrap();
    assert_eq!((turn.preempted, turn.takes), (vec![2], vec![(1, 1)]));
}

#[test]
fn a_stream_may_begin_where_a_page_is_left_or_due_to_it() {
    let pool = pool(4, 3);
    let now = Duration::from_secs(100);
    let holds = |number, stream, length| View {
        length,
        active: now,
        head: None,
        ..of(number, stream, 1, 0)
    };
    let admit = |streams: &[View], number| {
        let holders = holders(streams, &pool, now);
        super::admit(&holders, &pool, caller(number))
    };
    assert_eq!(admit(&[], 1), Ok(()));
    assert_eq!(admit(&[holds(1, 1, 32)], 1), Ok(()));
    // One that has not begun will take a page.
    let mut streams = vec![holds(1, 1, 32), holds(1, 2, 0)];
    assert_eq!(admit(&streams, 1), Err(Full::Caller));
    streams.push(holds(2, 3, 16));
    // All are taken: the first caller has more than a third, the second all that is due to it.
    assert_eq!(admit(&streams, 2), Ok(()), "half of four pages is two");
    streams.push(holds(2, 4, 0));
    assert_eq!(admit(&streams, 2), Err(Full::Host));
    assert_eq!(admit(&streams, 3), Ok(()), "a third of four pages is one");
    // A conversation that is kept gives way.
    streams[0].active = Duration::ZERO;
    assert_eq!(admit(&streams, 1), Ok(()));
    assert_eq!(admit(&streams, 2), Ok(()));
}

fn any_streams() -> impl Strategy<Value = Vec<View>> {
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
            View {
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

fn head_of(streams: &[View], stream: u64) -> Head {
    let view = streams.iter().find(|view| view.stream == stream);
    view.unwrap().head.unwrap()
}

/// The greatest and the least lead of one caller over another since both have been left waiting.
#[derive(Default)]
struct Lead(BTreeMap<(NodeId, NodeId), (i64, i64, i64)>);

impl Lead {
    /// Takes note of a turn, and returns by how much a lead has come to change.
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
        streams in any_streams(), last in any_kind(), piece in 0u32..2000, rides in any::<bool>(),
    ) {
        let turn = after(last).plan(&streams, &PLENTY, &sizes(piece, rides), Duration::ZERO);
        let Some(turn) = turn else {
            prop_assert!(streams.is_empty());
            return Ok(());
        };
        prop_assert!(!turn.takes.is_empty() && turn.preempted.is_empty());
        let bound = match turn.kind {
            Kind::Decode => 0,
            Kind::Prefill => piece.clamp(1, MAX_TURN_ROWS),
        };
        prop_assert!(turn.takes.iter().map(|t| t.1).sum::<u32>() <= MAX_TURN_ROWS);
        let (mut seen, mut long) = (BTreeSet::new(), 0);
        for (stream, rows) in &turn.takes {
            prop_assert!(seen.insert(*stream));
            let step = head_of(&streams, *stream);
            prop_assert!(*rows >= 1 && *rows <= step.left);
            match Kind::of(step) {
                Kind::Decode => prop_assert!(*rows == step.left && long == 0),
                Kind::Prefill => long += rows,
            }
        }
        prop_assert!(long <= bound && (long > 0) == (turn.kind == Kind::Prefill));
        prop_assert_eq!(long, turn.piece);
        let short = turn.takes.iter().map(|take| take.1).sum::<u32>() - long;
        prop_assert!(short == 0 || rides || turn.kind == Kind::Decode);
    }

    #[test]
    fn a_decode_step_waits_for_one_piece_at_most(
        streams in any_streams(), last in any_kind(), piece in 1u32..600,
    ) {
        let is_short = |view: &&View| view.head.is_some_and(|head| head.rows <= SHORT_ROWS);
        // Up to 64 streams of 8 rows fit one turn.
        prop_assume!((1..=64).contains(&streams.iter().filter(is_short).count()));
        let mut planner = after(last);
        let mut turn = plan(&mut planner, &streams, piece).unwrap();
        if turn.kind == Kind::Prefill {
            prop_assert_eq!(last, Kind::Decode);
            turn = plan(&mut planner, &streams, piece).unwrap();
        }
        prop_assert_eq!(turn.kind, Kind::Decode);
        for view in streams.iter().filter(is_short) {
            prop_assert!(turn.takes.contains(&(view.stream, view.head.unwrap().left)));
        }
    }

    /// Decode steps that come back at once never starve prefill, and prefill is
    /// shared: after enough turns every long step is done, in the number of turns
    /// that the rows need.
    #[test]
    fn all_prefill_ends_while_others_decode_without_pause(
        longs in proptest::collection::vec(9u32..400, 1..12), decoders in 0u64..40, piece in 1u32..200,
    ) {
        let mut waiting: BTreeMap<u64, (u32, u32, u64)> =
            longs.iter().enumerate().map(|(i, &r)| (100 + i as u64, (r, r, 0))).collect();
        let rows: u32 = longs.iter().sum();
        let bound = 2 * (u64::from(rows.div_ceil(piece)) + 1);
        let mut planner = after(Kind::Decode);
        let mut turn_no = 0;
        while !waiting.is_empty() {
            turn_no += 1;
            prop_assert!(turn_no <= bound, "not done after {turn_no} turns");
            let mut streams: Vec<_> = (0..decoders).map(|s| step(s, 1, turn_no - 1)).collect();
            for (&stream, &(rows, rest, served)) in &waiting {
                streams.push(left(step(stream, rows, served), rest));
            }
            for (stream, rows) in plan(&mut planner, &streams, piece).unwrap().takes {
                if let Some(step) = waiting.get_mut(&stream) {
                    step.1 -= rows;
                    step.2 = turn_no;
                }
            }
            waiting.retain(|_, step| step.1 > 0);
        }
    }

    /// Over any run of turns that leave two callers waiting, what they are given differs by two of
    /// the largest pieces at most, or of the longest short steps: whatever streams they have,
    /// whoever comes and goes meanwhile.
    #[test]
    fn callers_that_wait_are_given_the_same(
        turns in proptest::collection::vec(
            (1u32..200, proptest::collection::vec((0u8..4, 9u32..300), 0..6)), 20..150),
        decode in any::<bool>(),
    ) {
        let mut planner = Planner::new();
        let mut streams: Vec<View> = Vec::new();
        let mut lead = Lead::default();
        let (mut largest, mut number) = (0, 0);
        for (turn_no, (piece, arrivals)) in (1u64..).zip(turns) {
            // In decode, a few turns' worth of streams come at a time.
            let copies = if decode { 40 } else { 1 };
            for (caller, rows) in arrivals {
                for _ in 0..copies {
                    number += 1;
                    let rows = if decode { rows % SHORT_ROWS + 1 } else { rows };
                    streams.push(of(caller, number, rows, 0));
                }
            }
            let bound = if decode { SHORT_ROWS } else { piece };
            largest = largest.max(bound.min(MAX_TURN_ROWS));
            let Some(turn) = plan(&mut planner, &streams, piece) else {
                continue;
            };
            let mut given: BTreeMap<NodeId, i64> = BTreeMap::new();
            for (stream, rows) in turn.takes {
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
        let pool = Pool { total: pages, quota: pages, page: 16 };
        let run = || {
            let mut planner = Planner::new();
            let plan = |(streams, piece): &(Vec<View>, u32)| {
                planner.plan(streams, &pool, &sizes(*piece, true), Duration::ZERO)
            };
            calls.iter().map(plan).collect::<Vec<_>>()
        };
        prop_assert_eq!(run(), run());
    }
}

#[test]
fn a_batch_waits_for_company_while_fewer_wait_than_come_back() {
    let now = Duration::from_secs(9);
    let came = |stream| View {
        active: now,
        ..step(stream, 1, 0)
    };
    let answered = |stream| View {
        head: None,
        ..came(stream)
    };
    let gone = |stream| View {
        active: Duration::ZERO,
        ..answered(stream)
    };
    let may_grow = |streams: &[View], now| {
        let standing = |view: &View| (view.head.map(|head| head.rows), view.active);
        may_grow(streams.iter().map(standing), now)
    };
    assert!(may_grow(&[came(1), answered(2), answered(3)], now));
    // A lone stream has nobody to wait for, nor has the last of several.
    assert!(!may_grow(&[came(1)], now));
    assert!(!may_grow(&[came(1), gone(2), gone(3)], now));
    // Half of them are there.
    assert!(!may_grow(&[came(1), answered(2)], now));
    assert!(!may_grow(
        &[came(1), came(2), answered(3), answered(4)],
        now
    ));
    // There is other work to do, or none at all.
    let prompt = View {
        active: now,
        ..step(9, 100, 0)
    };
    assert!(!may_grow(&[came(1), answered(2), answered(3), prompt], now));
    assert!(!may_grow(&[answered(2), answered(3)], now));
}

#[test]
fn a_stream_is_waited_for_while_it_comes_back_at_once_and_tried_again_when_it_did_not() {
    let at = Duration::from_micros;
    let (mut rhythm, mut now) = (Rhythm::default(), at(1000));
    // One that has a number of rows comes so long after an answer; whether it was waited for before turn 1,
    // and before a turn in which all are tried again.
    let mut comes = |after: u64, rows| {
        rhythm.answered(1, now);
        let awaited = [1, ALL_AGAIN].map(|turn| rhythm.awaited(at(200), now + at(50), turn));
        assert!(awaited.iter().flatten().all(|left| *left == at(150)));
        assert_eq!(
            rhythm.awaited(at(200), now + at(200), 1),
            None,
            "it is late"
        );
        rhythm.came(rows, now + at(after), at(200));
        assert_eq!(rhythm.awaited(at(200), now, 1), None, "it is there");
        now += at(5000);
        awaited.map(|left| left.is_some())
    };
    // Nothing is known of it; then it comes at once, or a little later than that.
    assert_eq!(comes(90, 1), [false, false]);
    assert_eq!(comes(201, 1), [true, true]);
    assert_eq!(comes(200, SHORT_ROWS), [true, true]);
    for _ in 0..OFTEN_LATE {
        assert_eq!(comes(900, 1), [true, true]);
    }
    for _ in 0..40 {
        assert_eq!(comes(900, 1), [false, true]);
    }
    // In time, it is one that comes at once again.
    assert_eq!(comes(90, 1), [false, true]);
    // What comes of a prompt says nothing.
    assert_eq!(comes(9000, 9), [true, true]);
    assert_eq!(comes(90, 1), [true, true]);
    rhythm.answered(9, now);
    assert_eq!(rhythm.awaited(at(200), now, ALL_AGAIN), None);
}

#[test]
fn a_piece_takes_others_steps_along_where_all_go_through_the_same_layers() {
    let (prompt, short) = (of(1, 1, 100, 0), of(2, 2, 1, 0));
    assert!(rides(&[prompt, short], true));
    assert!(!rides(&[prompt, short], false));
    assert!(!rides(&[prompt], true));
    let elsewhere = View {
        layers: (0, 2),
        ..of(3, 3, 1, 0)
    };
    assert!(!rides(&[prompt, short, elsewhere], true));
    let gone = View {
        head: None,
        ..elsewhere
    };
    assert!(rides(&[prompt, short, gone], true));
    let plan = |rides| {
        let streams = [short, of(4, 4, 8, 0), prompt];
        let turn = after(Kind::Decode).plan(&streams, &PLENTY, &sizes(40, rides), Duration::ZERO);
        let turn = turn.unwrap();
        (turn.kind, turn.takes, turn.piece)
    };
    assert_eq!(plan(false), (Kind::Prefill, vec![(1, 40)], 40));
    let all = vec![(2, 1), (4, 8), (1, 40)];
    assert_eq!(plan(true), (Kind::Prefill, all, 40));
}

#[test]
fn a_short_step_that_has_to_go_for_a_piece_makes_it_no_longer_and_its_caller_no_richer() {
    // Three pages: one is free, which the short step of a caller with two needs.
    let pool = pool(3, 3);
    let rich = View {
        length: 32,
        ..of(1, 1, 8, 0)
    };
    let prompt = View {
        length: 0,
        ..of(2, 2, 100, 0)
    };
    let mut planner = after(Kind::Decode);
    let turn = planner.plan(&[rich, prompt], &pool, &sizes(10, true), Duration::ZERO);
    let turn = turn.unwrap();
    assert_eq!((turn.preempted, turn.takes), (vec![1], vec![(2, 10)]));
    assert_eq!(turn.piece, 10);
    assert_eq!(planner.prefill.tag(caller(1)), 0);
    assert_eq!(planner.prefill.tag(caller(2)), 10);
}

#[test]
fn one_callers_many_streams_do_not_make_anothers_turns_longer_than_they_may_be() {
    let limited = |decoders, more| Sizes {
        decoders,
        more,
        ..sizes(40, true)
    };
    // Caller 1 has one stream, caller 2 has seven, with short steps of so many rows.
    let run = |rows: u32, sizes: Sizes, turns: u64| {
        let mut planner = Planner::new();
        let mut served = BTreeMap::new();
        let (mut longest, mut missed, mut given) = (0, 0, [0, 0]);
        for turn in 1..=turns {
            let at = |stream: u64| served.get(&stream).copied().unwrap_or(0);
            let mut streams = vec![of(1, 1, 1, at(1))];
            streams.extend((2..=8).map(|stream| of(2, stream, rows, at(stream))));
            let planned = planner.plan(&streams, &PLENTY, &sizes, Duration::ZERO);
            let takes = planned.unwrap().takes;
            missed += u64::from(takes.iter().all(|take| take.0 != 1));
            longest = longest.max(takes.iter().map(|take| take.1).sum::<u32>());
            for (stream, rows) in takes {
                served.insert(stream, turn);
                given[usize::from(stream > 1)] += rows;
            }
        }
        (longest, missed, given)
    };
    assert_eq!(run(1, limited(2, 0), 100), (2, 0, [100, 100]));
    assert_eq!(run(1, limited(2, 3), 100), (5, 0, [100, 400]));
    assert_eq!(run(1, limited(1, 0), 100).0, 8);
    // Nor do steps of eight rows: they are cut.
    assert_eq!(run(8, limited(2, 0), 100), (2, 0, [100, 100]));
    assert_eq!(run(8, limited(2, 3), 100), (5, 0, [100, 400]));
    // Nor do streams through other layers each, which are other weights.
    let through = |stream, layers| View {
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
    assert_eq!(turn.unwrap().takes, [(1, 1), (2, 1), (4, 1)]);
    // With a piece, one row of each.
    let streams = [
        of(1, 1, 1, 0),
        of(2, 2, 1, 0),
        of(2, 3, 1, 0),
        of(3, 4, 100, 0),
    ];
    let turn = after(Kind::Decode).plan(&streams, &PLENTY, &limited(2, 5), Duration::ZERO);
    assert_eq!(turn.unwrap().takes, [(1, 1), (2, 1), (4, 40)]);
}

#[test]
fn those_decode_whose_short_steps_wait_or_come_back_in_a_moment() {
    let now = Duration::from_secs(5);
    let back = |number, ago: u64| View {
        length: 7,
        active: now - Duration::from_millis(ago),
        head: None,
        ..of(number, u64::from(number), 1, 0)
    };
    assert_eq!(decoders(&[of(1, 1, 1, 0), of(1, 2, 8, 0)], now), 1);
    assert_eq!(
        decoders(&[of(1, 1, 1, 0), back(2, 1000), back(3, 1001)], now),
        2
    );
    assert_eq!(decoders(&[of(1, 1, 9, 0)], now), 0);
}

#[test]
fn what_one_was_given_beside_another_that_wanted_no_more_is_no_debt() {
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
        let takes = planned.unwrap().takes;
        [10, 20].map(|end| {
            takes
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
