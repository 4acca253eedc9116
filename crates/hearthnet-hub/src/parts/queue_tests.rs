//! Choice of the next pieces.

use std::collections::BTreeSet;
use std::ops::Range;

use hearthnet_files::manifest::Digest;
use hearthnet_files::part::{PIECE_BYTES, Piece};
use proptest::prelude::*;

use super::queue::{MAX_GAP, Queue};
use super::source::Rank;

/// Pieces of full length; `gaps` are the bytes before each.
fn pieces(gaps: impl IntoIterator<Item = u64>) -> Vec<Piece> {
    let mut end = 0;
    let each = gaps.into_iter().zip(0..).map(|(gap, index)| {
        let offset = end + gap;
        end = offset + u64::from(PIECE_BYTES);
        Piece {
            index,
            offset,
            len: PIECE_BYTES,
            sha256: Digest([0; 32]),
        }
    });
    each.collect()
}

fn one(run: Range<u32>) -> Vec<Range<u32>> {
    vec![run]
}

fn queue(count: usize, ranks: &[Rank]) -> Queue {
    Queue::new(pieces(vec![0; count]), ranks, 1)
}

/// Takes everything that a source may be asked for, as if each read delivered.
fn take_all(queue: &mut Queue, source: usize, most: usize) -> BTreeSet<usize> {
    let mut taken = BTreeSet::new();
    loop {
        let run = queue.take(source, most);
        if run.is_empty() {
            return taken;
        }
        for &at in &run {
            assert!(taken.insert(at), "piece {at} is taken twice");
            queue.done(at);
        }
        queue.put_back(&run);
    }
}

#[test]
fn a_higher_rank_is_asked_for_nothing_until_lower_ranks_have_answered() {
    let mut queue = queue(10, &[Rank::Neighbour, Rank::Neighbour, Rank::Hub]);
    queue.offer(2, one(0..10));
    queue.offer(0, one(0..2));
    assert!(queue.take(2, 4).is_empty());
    queue.offer(1, one(2..6));
    assert!(take_all(&mut queue, 2, 4).into_iter().eq(6..10));
}

#[test]
fn a_source_that_does_not_work_is_not_waited_for() {
    let mut queue = queue(10, &[Rank::Neighbour, Rank::Hub]);
    queue.offer(1, one(0..10));
    assert!(queue.take(1, 4).is_empty());
    queue.prefer(0, false);
    // A run ends with the last piece.
    let first = queue.take(1, 4).len();
    assert!((1..=4).contains(&first));
    queue.prefer(0, true);
    assert!(queue.take(1, 4).is_empty());
    queue.drop_source(0);
    assert_eq!(take_all(&mut queue, 1, 4).len(), 10 - first);
}

#[test]
fn rare_pieces_are_asked_first() {
    let mut queue = queue(30, &[Rank::Neighbour; 3]);
    queue.offer(0, one(0..30));
    queue.offer(1, one(0..20));
    queue.offer(2, vec![0..10, 15..20]);
    let order: Vec<usize> = std::iter::from_fn(|| queue.take(0, 1).pop()).collect();
    let sources =
        |at: usize| 1 + usize::from(at < 20) + usize::from(at < 10 || (15..20).contains(&at));
    assert_eq!(order.len(), 30);
    assert!(order.is_sorted_by_key(|&at| sources(at)), "{order:?}");
}

#[test]
fn a_piece_that_was_refused_is_asked_again_after_the_next_offer() {
    let mut queue = queue(4, &[Rank::Neighbour]);
    assert!(queue.offer(0, one(0..4)));
    let run = queue.take(0, 4);
    queue.refuse(0, &run);
    queue.put_back(&run);
    assert!(queue.take(0, 4).is_empty());
    // These are no new pieces, so a source cannot keep a fetch alive with them.
    assert!(!queue.offer(0, one(1..3)));
    assert!(take_all(&mut queue, 0, 4).into_iter().eq(1..3));
}

#[test]
fn at_most_one_percent_is_asked_twice() {
    let mut queue = queue(400, &[Rank::Neighbour, Rank::Hub]);
    queue.offer(0, one(0..400));
    queue.offer(1, one(0..400));
    let mut again = 0;
    for _ in 0..400 {
        let slow = queue.take(0, 1);
        let run = queue.take_again(1, &slow, 1);
        assert!(queue.take_again(1, &slow, 1).is_empty());
        again += run.len();
    }
    assert_eq!(again, 4);
}

/// Three nodes fetch from a seeder that serves one run at a time, and from each other.
#[test]
fn three_empty_nodes_exchange_pieces_and_spare_the_seeder() {
    const COUNT: usize = 600;
    let mut nodes: Vec<Queue> = (0..3)
        .map(|seed| Queue::new(pieces(vec![0; COUNT]), &[Rank::Neighbour; 4], seed))
        .collect();
    let mut held = vec![BTreeSet::new(); 3];
    let mut sent = 0;
    for round in 0.. {
        assert!(round < COUNT, "the fetch does not end");
        if nodes.iter().all(|node| node.left() == 0) {
            break;
        }
        let before = held.clone();
        for (me, node) in nodes.iter_mut().enumerate() {
            for (other, held) in before.iter().enumerate() {
                let has = held.iter().map(|&at| at as u32..at as u32 + 1);
                let has = if other == me {
                    Vec::new()
                } else {
                    has.collect()
                };
                node.offer(other, has);
            }
            node.offer(3, one(0..COUNT as u32));
            // One run from the seeder if it is this node's turn, and two from each neighbour.
            let turns = std::iter::repeat_n(3, usize::from(round % 3 == me));
            for source in turns.chain([0, 1, 2, 0, 1, 2]) {
                let run = node.take(source, 4);
                sent += if source == 3 { run.len() } else { 0 };
                run.iter().for_each(|&at| node.done(at));
                node.put_back(&run);
                held[me].extend(run);
            }
        }
    }
    // Without an exchange it sends everything three times.
    assert!(sent * 10 < COUNT * 16, "the seeder sent {sent} of {COUNT}");
}

#[derive(Clone, Debug)]
struct Plan {
    gaps: Vec<u64>,
    /// Rank, and pieces that the source has.
    sources: Vec<(Rank, Vec<bool>)>,
    most: usize,
    seed: u64,
    /// Which source acts next, and whether it begins or ends a read.
    steps: Vec<(usize, bool)>,
}

fn plans() -> impl Strategy<Value = Plan> {
    let rank = prop_oneof![Just(Rank::Neighbour), Just(Rank::Local), Just(Rank::Hub)];
    let gap = prop_oneof![Just(0), Just(31), Just(MAX_GAP), Just(MAX_GAP + 1)];
    (1..200usize).prop_flat_map(move |count| {
        let has = prop::collection::vec(any::<bool>(), count);
        let sources = prop::collection::vec((rank.clone(), has), 1..5);
        let gaps = prop::collection::vec(gap.clone(), count);
        let steps = prop::collection::vec((0..5usize, any::<bool>()), 0..300);
        (gaps, sources, 1..6usize, any::<u64>(), steps).prop_map(
            |(gaps, sources, most, seed, steps)| Plan {
                gaps,
                sources,
                most,
                seed,
                steps,
            },
        )
    })
}

fn offered(has: &[bool]) -> Vec<Range<u32>> {
    let held = has.iter().zip(0..).filter(|(has, _)| **has);
    held.map(|(_, index)| index..index + 1).collect()
}

proptest! {
    /// Sources that deliver what they offer: each piece that one of them has is taken exactly once,
    /// from a source of the lowest rank that has it. A run begins with a piece that no fewer sources
    /// have than any other that could have been taken.
    #[test]
    fn every_piece_is_taken_exactly_once(plan in plans()) {
        let all = pieces(plan.gaps.iter().copied());
        let ranks: Vec<Rank> = plan.sources.iter().map(|(rank, _)| *rank).collect();
        let mut queue = Queue::new(all.clone(), &ranks, plan.seed);
        for (at, (_, has)) in plan.sources.iter().enumerate() {
            queue.offer(at, offered(has));
        }
        let mut flights: Vec<Vec<Vec<usize>>> = vec![Vec::new(); ranks.len()];
        let mut taken = BTreeSet::new();
        // After the random steps every source acts until nothing is left to do.
        let rest = (0..4 * all.len()).flat_map(|_| (0..ranks.len()).flat_map(|at| [(at, true), (at, false)]));
        for (source, begins) in plan.steps.iter().copied().chain(rest) {
            let source = source % ranks.len();
            if begins {
                let run = queue.take(source, plan.most);
                prop_assert!(run.len() <= plan.most);
                let sources = |at: usize| plan.sources.iter().filter(|(_, has)| has[at]).count();
                let is_open = |at: &usize| {
                    let may = |(rank, has): &(Rank, Vec<bool>)| has[*at] && *rank < ranks[source];
                    plan.sources[source].1[*at] && !taken.contains(at) && !plan.sources.iter().any(may)
                };
                let fewest = (0..all.len()).filter(is_open).map(sources).min();
                prop_assert_eq!(run.first().map(|&at| sources(at)), fewest);
                for &at in &run {
                    prop_assert!(taken.insert(at), "piece {at} is taken twice");
                    prop_assert!(plan.sources[source].1[at]);
                    let lower = |(rank, has): &(Rank, Vec<bool>)| *rank < ranks[source] && has[at];
                    prop_assert!(!plan.sources.iter().any(lower), "piece {at} is left to another");
                }
                for pair in run.windows(2) {
                    let (a, b) = (all[pair[0]], all[pair[1]]);
                    prop_assert!(b.offset - a.offset - u64::from(a.len) <= MAX_GAP);
                }
                if !run.is_empty() {
                    flights[source].push(run);
                }
            } else if let Some(run) = flights[source].pop() {
                run.iter().for_each(|&at| queue.done(at));
                queue.put_back(&run);
            }
        }
        let had = (0..all.len()).filter(|&at| plan.sources.iter().any(|(_, has)| has[at]));
        prop_assert!(had.eq(taken.iter().copied()));
        let left = (all.len() - taken.len()) as u64 * u64::from(PIECE_BYTES);
        prop_assert_eq!(queue.left(), left);
    }
}
