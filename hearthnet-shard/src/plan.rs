//! What the next turn of the engine computes: a pure function of what waits.
//!
//! A turn is one batch. A *decode* turn takes the waiting short steps of all streams
//! at once. A *prefill* turn takes a piece of one long step, or of several until the
//! piece is full. When both kinds wait, the turns alternate, so
//!
//! - a decode step waits for at most one piece, however much prefill there is, and
//! - prefill gets every other turn, however many streams decode.
//!
//! Example: streams A and B decode, C sends 100 rows, a piece is 40 rows.
//!
//! ```text
//! turn      1        2         3        4         5        6         7
//! rows      A B      C 0..40   A B      C 40..80  A B      C 80..100 A B
//! ```
//!
//! The length of a piece follows from how fast the engine was ([`Pace`]), so that it
//! takes about the same time on every machine.

use std::time::Duration;

/// Steps of at most this many rows count as decode. One row is a plain decode step;
/// a few are one with guesses to check.
pub(crate) const SHORT_ROWS: u32 = 8;
/// Most rows of one turn: bounds the batch's memory.
pub(crate) const MAX_TURN_ROWS: u32 = 512;
/// Fewest rows of a piece: below this the engine reads weights for too few rows.
const MIN_PIECE_ROWS: u32 = 8;
/// Rows of the first piece, before anything was measured.
const FIRST_PIECE_ROWS: u32 = 32;

/// The step at the head of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// The stream.
    pub(crate) stream: u64,
    /// Rows of the whole step.
    pub(crate) rows: u32,
    /// Rows of it that are still to be computed, at least 1.
    pub(crate) left: u32,
    /// Turn in which the stream was last served.
    pub(crate) served: u64,
    /// When the step arrived.
    pub(crate) arrived: Duration,
}

/// Which kind of steps a turn takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Short steps.
    Decode,
    /// Pieces of long ones.
    Prefill,
}

/// One batch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) kind: Kind,
    /// Streams and how many rows each contributes, from the head of its step.
    pub(crate) takes: Vec<(u64, u32)>,
}

/// Plans the next turn; `None` if nothing waits. `last` is the kind of the turn before.
pub(crate) fn plan(waiting: &[Waiting], last: Kind, piece_rows: u32) -> Option<Turn> {
    let (mut short, mut long): (Vec<&Waiting>, Vec<&Waiting>) =
        waiting.iter().partition(|step| step.rows <= SHORT_ROWS);
    let kind = match (short.is_empty(), long.is_empty()) {
        (true, true) => return None,
        (false, true) => Kind::Decode,
        (true, false) => Kind::Prefill,
        (false, false) if last == Kind::Prefill => Kind::Decode,
        (false, false) => Kind::Prefill,
    };
    let (queue, mut room) = match kind {
        Kind::Decode => (&mut short, MAX_TURN_ROWS),
        Kind::Prefill => (&mut long, piece_rows.clamp(1, MAX_TURN_ROWS)),
    };
    queue.sort_by_key(|step| (step.served, step.arrived, step.stream));
    let mut takes = Vec::with_capacity(queue.len());
    for step in queue.iter() {
        let rows = match kind {
            // A short step runs whole or not at all.
            Kind::Decode if step.left > room => break,
            _ => step.left.min(room),
        };
        if rows == 0 {
            break;
        }
        room -= rows;
        takes.push((step.stream, rows));
    }
    Some(Turn { kind, takes })
}

/// How long a prefill row takes here, and how many fit the time that a piece may last.
#[derive(Debug)]
pub(crate) struct Pace {
    target_us: f64,
    us_per_row: Option<f64>,
}

impl Pace {
    /// Pieces are to last about `target`.
    pub(crate) fn new(target: Duration) -> Self {
        Self {
            target_us: target.as_micros() as f64,
            us_per_row: None,
        }
    }

    /// Rows of the next piece.
    pub(crate) fn piece_rows(&self) -> u32 {
        match self.us_per_row {
            None => FIRST_PIECE_ROWS,
            // The cast saturates; an engine that takes no time gets the largest piece.
            Some(us) => ((self.target_us / us) as u32).clamp(MIN_PIECE_ROWS, MAX_TURN_ROWS),
        }
    }

    /// Takes note of a prefill turn. The newest counts a quarter, so that one slow
    /// turn does not change much and a changed load is followed within a few turns.
    pub(crate) fn note(&mut self, rows: u32, took: Duration) {
        if rows == 0 {
            return;
        }
        let now = took.as_micros() as f64 / f64::from(rows);
        self.us_per_row = Some(self.us_per_row.map_or(now, |old| old + (now - old) / 4.0));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn step(stream: u64, rows: u32, served: u64) -> Waiting {
        Waiting {
            stream,
            rows,
            left: rows,
            served,
            arrived: Duration::ZERO,
        }
    }

    #[test]
    fn the_example_of_the_module_is_what_happens() {
        let mut left = 100;
        let mut last = Kind::Prefill;
        let mut turns = Vec::new();
        for turn in 1.. {
            let mut waiting = vec![step(1, 1, turn), step(2, 1, turn)];
            if left > 0 {
                waiting.push(Waiting {
                    left,
                    ..step(3, 100, 0)
                });
            }
            let planned = plan(&waiting, last, 40).unwrap();
            last = planned.kind;
            left -= planned.takes.iter().find(|t| t.0 == 3).map_or(0, |t| t.1);
            turns.push(planned.takes);
            if turn == 7 {
                break;
            }
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
    fn nothing_waiting_is_no_turn() {
        assert_eq!(plan(&[], Kind::Decode, 40), None);
    }

    #[test]
    fn a_piece_is_filled_from_several_streams_and_the_one_served_last_comes_last() {
        let waiting = [step(1, 30, 9), step(2, 30, 3), step(3, 30, 5)];
        let turn = plan(&waiting, Kind::Decode, 64).unwrap();
        assert_eq!(turn.takes, [(2, 30), (3, 30), (1, 4)]);
    }

    #[test]
    fn the_pace_keeps_a_piece_near_its_time() {
        let mut pace = Pace::new(Duration::from_millis(20));
        assert_eq!(pace.piece_rows(), FIRST_PIECE_ROWS);
        for _ in 0..40 {
            pace.note(10, Duration::from_millis(5));
        }
        assert_eq!(pace.piece_rows(), 40);
        for _ in 0..40 {
            pace.note(8, Duration::from_secs(8));
        }
        assert_eq!(pace.piece_rows(), MIN_PIECE_ROWS);
        let mut instant = Pace::new(Duration::from_millis(20));
        instant.note(8, Duration::ZERO);
        assert_eq!(instant.piece_rows(), MAX_TURN_ROWS);
    }

    fn any_waiting() -> impl Strategy<Value = Vec<Waiting>> {
        let step = (
            prop_oneof![1u32..=SHORT_ROWS, 9u32..5000],
            0u32..5000,
            0u64..20,
            0u64..50,
        );
        proptest::collection::vec(step, 0..120).prop_map(|steps| {
            let waiting = |(i, (rows, done, served, arrived)): (usize, (u32, u32, u64, u64))| {
                let done = if rows <= SHORT_ROWS { 0 } else { done % rows };
                let arrived = Duration::from_micros(arrived);
                Waiting {
                    stream: i as u64,
                    rows,
                    left: rows - done,
                    served,
                    arrived,
                }
            };
            steps.into_iter().enumerate().map(waiting).collect()
        })
    }

    fn any_kind() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(Kind::Decode), Just(Kind::Prefill)]
    }

    proptest! {
        #[test]
        fn a_turn_is_bounded_and_takes_from_each_stream_once(
            waiting in any_waiting(), last in any_kind(), piece in 0u32..2000,
        ) {
            let Some(turn) = plan(&waiting, last, piece) else {
                prop_assert!(waiting.is_empty());
                return Ok(());
            };
            prop_assert!(!turn.takes.is_empty());
            let bound = match turn.kind {
                Kind::Decode => MAX_TURN_ROWS,
                Kind::Prefill => piece.clamp(1, MAX_TURN_ROWS),
            };
            prop_assert!(turn.takes.iter().map(|t| t.1).sum::<u32>() <= bound);
            let mut seen = std::collections::BTreeSet::new();
            for (stream, rows) in &turn.takes {
                prop_assert!(seen.insert(*stream));
                let step = waiting.iter().find(|w| w.stream == *stream).unwrap();
                prop_assert_eq!(step.rows <= SHORT_ROWS, turn.kind == Kind::Decode);
                prop_assert!(*rows >= 1 && *rows <= step.left);
                prop_assert!(turn.kind == Kind::Prefill || *rows == step.left);
            }
        }

        #[test]
        fn a_decode_step_waits_for_one_piece_at_most(
            waiting in any_waiting(), last in any_kind(), piece in 1u32..600,
        ) {
            let shorts = waiting.iter().filter(|w| w.rows <= SHORT_ROWS);
            // Up to 64 streams of 8 rows fit one turn.
            prop_assume!((1..=64).contains(&shorts.count()));
            let mut turn = plan(&waiting, last, piece).unwrap();
            if turn.kind == Kind::Prefill {
                prop_assert_eq!(last, Kind::Decode);
                turn = plan(&waiting, turn.kind, piece).unwrap();
            }
            prop_assert_eq!(turn.kind, Kind::Decode);
            for step in waiting.iter().filter(|w| w.rows <= SHORT_ROWS) {
                prop_assert!(turn.takes.contains(&(step.stream, step.rows)));
            }
        }

        /// Decode steps that come back at once never starve prefill, and prefill is
        /// shared: after enough turns every long step is done, in the number of turns
        /// that the rows need.
        #[test]
        fn all_prefill_ends_while_others_decode_without_pause(
            longs in proptest::collection::vec(9u32..400, 1..12), decoders in 0u64..40, piece in 1u32..200,
        ) {
            let mut left: BTreeMap<u64, (u32, u32, u64)> =
                longs.iter().enumerate().map(|(i, &r)| (100 + i as u64, (r, r, 0))).collect();
            let rows: u32 = longs.iter().sum();
            let bound = 2 * (u64::from(rows.div_ceil(piece)) + 1);
            let mut last = Kind::Decode;
            let mut turn_no = 0;
            while !left.is_empty() {
                turn_no += 1;
                prop_assert!(turn_no <= bound, "not done after {turn_no} turns");
                let mut waiting: Vec<_> = (0..decoders).map(|s| step(s, 1, turn_no - 1)).collect();
                for (&stream, &(rows, left, served)) in &left {
                    waiting.push(Waiting { left, ..step(stream, rows, served) });
                }
                let turn = plan(&waiting, last, piece).unwrap();
                last = turn.kind;
                for (stream, rows) in turn.takes {
                    if let Some(step) = left.get_mut(&stream) {
                        step.1 -= rows;
                        step.2 = turn_no;
                    }
                }
                left.retain(|_, step| step.1 > 0);
            }
        }
    }
}
