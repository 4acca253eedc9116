use proptest::prelude::*;

use super::fuzzing::{Conversation, LAYERS};
use super::rows::GRAIN;
use super::*;

const LIMITS: Limits = Limits {
    depth: 2,
    chunk_rows: 2,
    history_bytes: usize::MAX,
};

fn rows(values: &[u32]) -> Bytes {
    values.iter().flat_map(|v| v.to_be_bytes()).collect()
}

fn sends(p: &mut Pipeline) -> Vec<(usize, u32, Want)> {
    let mut out = Vec::new();
    while let Some(action) = p.poll() {
        match action {
            Action::Send {
                span, chunk, want, ..
            } => out.push((span, chunk.position, want)),
            Action::Output { .. } => out.push((99, p.length(), Want::Last)),
        }
    }
    out
}

#[test]
fn chunks_overlap_across_spans() {
    let mut p = Pipeline::new(2, 4, Want::Last, Limits { depth: 1, ..LIMITS });
    p.submit(0, rows(&[1, 2, 3, 4, 5, 6]), 0);
    assert_eq!(sends(&mut p), [(0, 0, Want::All)]);
    p.on_result(0, 1, 0, 2, rows(&[0, 0])).unwrap();
    // While the second span has the first chunk, the first span gets the second chunk.
    assert_eq!(sends(&mut p), [(1, 0, Want::None), (0, 2, Want::All)]);
    let in_flight = p.spans.iter().map(|span| span.in_flight.len());
    assert_eq!(in_flight.sum::<usize>(), 2);
}

#[test]
fn only_the_last_chunk_returns_a_row_from_the_last_span() {
    let mut p = Pipeline::new(1, 4, Want::Last, LIMITS);
    p.submit(0, rows(&[1, 2, 3, 4]), 0);
    assert_eq!(sends(&mut p), [(0, 0, Want::None), (0, 2, Want::Last)]);
    p.on_result(0, 1, 0, 0, Bytes::new()).unwrap();
    assert_eq!((p.poll(), p.length()), (None, 2));
    p.on_result(0, 1, 2, 1, rows(&[7])).unwrap();
    assert_eq!(p.poll(), Some(Action::Output { row: rows(&[7]) }));
    assert_eq!((p.poll(), p.length()), (None, 4));
}

#[test]
fn rows_that_come_in_parts_are_on_their_way_before_the_last_ones_are_there() {
    let mut p = Pipeline::new(1, 4, Want::Last, LIMITS);
    p.submit(0, rows(&[1, 2]), 1);
    assert_eq!(sends(&mut p), [(0, 0, Want::None)]);
    p.on_result(0, 1, 0, 0, Bytes::new()).unwrap();
    assert!(!p.is_through());
    p.submit(2, rows(&[3]), 0);
    assert_eq!(sends(&mut p), [(0, 2, Want::Last)]);
    p.on_result(0, 1, 2, 1, rows(&[7])).unwrap();
    assert_eq!(p.poll(), Some(Action::Output { row: rows(&[7]) }));
    assert!(p.is_through());
}

#[test]
fn a_caller_that_goes_on_with_them_gets_all_rows() {
    let mut p = Pipeline::new(1, 4, Want::All, LIMITS);
    p.submit(0, rows(&[1, 2, 3]), 0);
    assert_eq!(sends(&mut p), [(0, 0, Want::All), (0, 2, Want::All)]);
    p.on_result(0, 1, 0, 2, rows(&[7, 8])).unwrap();
    let first = Action::Output { row: rows(&[7, 8]) };
    assert_eq!((p.poll(), p.is_through()), (Some(first), false));
    // Its host fails: rows that have left the pipeline are not requested again.
    p.replace(0, 1);
    assert_eq!(sends(&mut p), [(0, 0, Want::None), (0, 2, Want::All)]);
    p.on_result(0, 2, 0, 0, Bytes::new()).unwrap();
    p.on_result(0, 2, 2, 1, rows(&[9])).unwrap();
    let second = Action::Output { row: rows(&[9]) };
    assert_eq!((p.poll(), p.is_through()), (Some(second), true));
}

#[test]
fn an_answer_that_was_not_asked_for_is_a_fault() {
    let mut p = Pipeline::new(1, 4, Want::Last, LIMITS);
    p.submit(0, rows(&[1]), 0);
    assert!(p.on_result(0, 1, 0, 1, rows(&[0])).is_err(), "not sent yet");
    p.poll();
    for (span, epoch, position, why) in [
        (0, 1, 5, "other position"),
        (0, 2, 0, "future epoch"),
        (3, 1, 0, "no such span"),
    ] {
        assert!(
            p.on_result(span, epoch, position, 1, rows(&[0])).is_err(),
            "{why}"
        );
    }
    for (rows, bytes) in [(1, 3), (2, 8), (0, 0), (1, 8)] {
        let answered = p.on_result(0, 1, 0, rows, Bytes::from(vec![0; bytes]));
        let fault = answered.unwrap_err().to_string();
        let says = format!("it returned {rows} rows in {bytes} bytes where 1 rows were asked for");
        assert_eq!(fault, says);
    }
    p.on_result(0, 1, 0, 1, rows(&[0])).unwrap();
    assert!(
        p.on_result(0, 1, 0, 1, rows(&[0])).is_err(),
        "answered twice"
    );
}

#[test]
fn a_new_span_gets_the_history_and_returns_only_new_rows() {
    let mut p = Pipeline::new(2, 4, Want::Last, LIMITS);
    p.submit(0, rows(&[1, 2, 3]), 0);
    assert_eq!(sends(&mut p), [(0, 0, Want::All), (0, 2, Want::All)]);
    p.on_result(0, 1, 0, 2, rows(&[11, 12])).unwrap();
    p.on_result(0, 1, 2, 1, rows(&[13])).unwrap();
    assert_eq!(sends(&mut p), [(1, 0, Want::None), (1, 2, Want::Last)]);

    // The first host fails without a step in flight: its replacement replays and returns nothing.
    assert_eq!(p.replace(0, 1), 0..1);
    assert_eq!(sends(&mut p), [(0, 0, Want::None), (0, 2, Want::None)]);
    // The second fails with both chunks in flight; two hosts replace it.
    assert_eq!(p.replace(1, 2), 1..3);
    assert_eq!((p.epoch(0), p.epoch(1), p.epoch(2)), (2, 3, 3));
    assert_eq!(sends(&mut p), [(1, 0, Want::All), (1, 2, Want::All)]);

    assert_eq!(p.on_result(1, 1, 0, 0, Bytes::new()), Ok(Outcome::Stale));
    p.on_result(1, 3, 0, 2, rows(&[21, 22])).unwrap();
    p.on_result(1, 3, 2, 1, rows(&[23])).unwrap();
    assert_eq!(sends(&mut p), [(2, 0, Want::None), (2, 2, Want::Last)]);
    p.on_result(2, 3, 0, 0, Bytes::new()).unwrap();
    p.on_result(2, 3, 2, 1, rows(&[33])).unwrap();
    assert_eq!(p.poll(), Some(Action::Output { row: rows(&[33]) }));
}

#[test]
fn behind_a_host_with_wrong_rows_everything_runs_again_and_no_row_comes_back_twice() {
    let mut p = Pipeline::new(3, 4, Want::Last, LIMITS);
    p.submit(0, rows(&[1, 2]), 0);
    sends(&mut p);
    p.on_result(0, 1, 0, 2, rows(&[11, 12])).unwrap();
    sends(&mut p);
    p.on_result(1, 1, 0, 2, rows(&[66, 67])).unwrap();
    sends(&mut p);
    p.on_result(2, 1, 0, 1, rows(&[68])).unwrap();
    assert_eq!(p.poll(), Some(Action::Output { row: rows(&[68]) }));
    // The next row is in flight in the last span when the host of the second is convicted.
    p.submit(2, rows(&[3]), 0);
    sends(&mut p);
    p.on_result(0, 1, 2, 1, rows(&[13])).unwrap();
    sends(&mut p);
    p.on_result(1, 1, 2, 1, rows(&[69])).unwrap();
    assert_eq!(sends(&mut p), [(2, 2, Want::Last)]);
    assert_eq!(p.redo(1, 1), 1..3);
    assert_eq!((p.epoch(0), p.epoch(1), p.epoch(2)), (1, 2, 2));
    assert_eq!(sends(&mut p), [(1, 0, Want::All), (1, 2, Want::All)]);
    assert_eq!(p.on_result(2, 1, 2, 1, rows(&[70])), Ok(Outcome::Stale));
    p.on_result(1, 2, 0, 2, rows(&[21, 22])).unwrap();
    p.on_result(1, 2, 2, 1, rows(&[23])).unwrap();
    assert_eq!(sends(&mut p), [(2, 0, Want::None), (2, 2, Want::Last)]);
    p.on_result(2, 2, 0, 0, Bytes::new()).unwrap();
    p.on_result(2, 2, 2, 1, rows(&[33])).unwrap();
    assert_eq!(p.poll(), Some(Action::Output { row: rows(&[33]) }));
    assert!(p.is_through());
}

#[test]
fn a_caller_with_layers_behind_wrong_rows_gets_all_rows_again() {
    let mut p = Pipeline::new(1, 4, Want::All, LIMITS);
    p.submit(0, rows(&[1, 2]), 0);
    sends(&mut p);
    p.on_result(0, 1, 0, 2, rows(&[66, 67])).unwrap();
    assert!(matches!(p.poll(), Some(Action::Output { .. })));
    p.submit(2, rows(&[3]), 0);
    sends(&mut p);
    assert_eq!(p.redo(0, 1), 0..1);
    assert_eq!(sends(&mut p), [(0, 0, Want::All), (0, 2, Want::All)]);
    p.on_result(0, 2, 0, 2, rows(&[11, 12])).unwrap();
    let again = Action::Output {
        row: rows(&[11, 12]),
    };
    assert_eq!((p.poll(), p.is_through()), (Some(again), false));
    p.on_result(0, 2, 2, 1, rows(&[13])).unwrap();
    assert!(matches!(p.poll(), Some(Action::Output { .. })));
    assert!(p.is_through());
}

#[test]
fn dropped_history_is_recomputed_by_the_earlier_spans() {
    let limits = Limits {
        history_bytes: 20,
        ..LIMITS
    };
    let mut p = Pipeline::new(2, 4, Want::Last, limits);
    p.submit(0, rows(&[1, 2, 3]), 0);
    sends(&mut p);
    p.on_result(0, 1, 0, 2, rows(&[11, 12])).unwrap();
    assert_eq!(p.history_bytes(), 20);
    p.on_result(0, 1, 2, 1, rows(&[13])).unwrap();
    assert_eq!(p.history_bytes(), 12, "the first boundary stays");
    sends(&mut p);
    assert_eq!(
        p.replace(1, 1),
        0..2,
        "the first span runs again for the second"
    );
    assert_eq!(sends(&mut p), [(0, 0, Want::All), (0, 2, Want::All)]);
}

#[test]
fn a_host_that_kept_less_gets_the_rows_in_between_and_no_other_host_notices() {
    let mut p = Pipeline::new(2, 4, Want::Last, LIMITS);
    p.submit(0, rows(&[1, 2, 3, 4, 5]), 0);
    while let Some(Action::Send {
        span, chunk, want, ..
    }) = p.poll()
    {
        let back = match want {
            Want::None => 0,
            Want::Last => 1,
            Want::All => chunk.rows,
        };
        let data = rows(&vec![7; back as usize]);
        p.on_result(span, 1, chunk.position, back, data).unwrap();
    }
    assert!(p.is_idle() && p.is_through());
    // Back to position 3, with a new row. Neither host may get it yet.
    p.submit(3, rows(&[9]), 0);
    (0..2).for_each(|span| p.hold(span, 3));
    assert_eq!((p.poll(), p.is_idle()), (None, false));
    // The first host kept all three positions.
    assert!(p.kept(0, 3));
    assert_eq!(sends(&mut p), [(0, 3, Want::All)]);
    p.on_result(0, 1, 3, 1, rows(&[19])).unwrap();
    assert_eq!(p.poll(), None, "the second host has not answered");
    // The second one kept none.
    assert!(p.kept(1, 0));
    assert_eq!(sends(&mut p), [(1, 0, Want::None), (1, 2, Want::None)]);
    p.on_result(1, 1, 0, 0, Bytes::new()).unwrap();
    assert_eq!(sends(&mut p), [(1, 3, Want::Last)]);
    p.on_result(1, 1, 2, 0, Bytes::new()).unwrap();
    p.on_result(1, 1, 3, 1, rows(&[29])).unwrap();
    assert_eq!(p.poll(), Some(Action::Output { row: rows(&[29]) }));
}

#[test]
fn a_host_that_kept_less_is_replaced_if_the_rows_in_between_were_dropped() {
    let limits = Limits {
        history_bytes: 0,
        ..LIMITS
    };
    let mut p = Pipeline::new(2, 4, Want::Last, limits);
    p.submit(0, rows(&[1, 2]), 0);
    sends(&mut p);
    p.on_result(0, 1, 0, 2, rows(&[11, 12])).unwrap();
    sends(&mut p);
    p.on_result(1, 1, 0, 1, rows(&[22])).unwrap();
    sends(&mut p);
    p.submit(1, rows(&[3]), 0);
    (0..2).for_each(|span| p.hold(span, 1));
    assert!(p.kept(0, 0), "the first boundary is always kept");
    assert!(!p.kept(1, 0));
    assert_eq!(p.replace(1, 1), 0..2);
    assert_eq!(sends(&mut p), [(0, 0, Want::All)]);
}

#[test]
fn a_prompt_is_cut_into_about_equal_chunks() {
    assert_eq!(
        [32, 33, 45, 64, 65, 512].map(|n| even_cut(n, 32)),
        [32, 24, 24, 32, 24, 32]
    );
    assert_eq!([1, 9, 100].map(|n| even_cut(n, 40)), [8, 16, 40]);
    assert_eq!([0, 1, 5].map(|n| even_cut(n, 3)), [3, 3, 3]);
}

proptest! {
    #[test]
    fn there_are_as_few_chunks_as_there_can_be(rows in 1usize..2000, most in 1usize..200) {
        let cut = even_cut(rows, most);
        prop_assert!((1..=most).contains(&cut));
        prop_assert_eq!(rows.div_ceil(cut), rows.div_ceil(most));
        // No chunk could be shorter by a whole grain.
        let shorter = cut.saturating_sub(GRAIN);
        prop_assert!(shorter == 0 || rows.div_ceil(shorter) > rows.div_ceil(most));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// The same rows come out for any failures and any split of the model.
    #[test]
    fn host_failures_never_change_the_output(
        cuts in proptest::collection::vec(1..LAYERS, 0..3),
        turns in proptest::collection::vec((0u32..6, proptest::collection::vec(any::<u32>(), 1..9)), 1..6),
        depth in 1usize..4,
        chunk_rows in 1usize..5,
        history_bytes in prop_oneof![Just(usize::MAX), 0usize..120],
        part in 1usize..9,
        back in prop_oneof![Just(Want::Last), Just(Want::All)],
        checkpoints in proptest::option::of(1u32..5),
        script in proptest::collection::vec(any::<u32>(), 0..300),
    ) {
        let mut script = script.into_iter();
        let limits = Limits { depth, chunk_rows, history_bytes };
        let conversation = Conversation { cuts, turns, limits, part, back, checkpoints };
        // After the end of the script, no host fails.
        conversation.check(&mut |n| script.next().map_or(0, |x| x % n.max(1)));
    }
}
