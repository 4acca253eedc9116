//! Streams that begin with positions of another one.

use crate::tests::fake::{KV_BYTES, PAGE};

use super::*;

#[test]
fn a_fork_continues_behind_the_same_rows_and_both_streams_are_independent() {
    let (mut host, mut caller) = with_streams(1);
    caller.ask(&mut host, step(1, 0, &rows(20)));
    assert_eq!(
        caller.ask(&mut host, fork_of(2, 1, 18)),
        [opened(2, 1)],
        "within the source"
    );
    let (one, other) = ([[40.0, 0.0, 0.0, 0.0]], [[30.0, 1.0, 1.0, 1.0]]);
    // The row before position 18 began with 17, that before position 20 with 19.
    let answers = caller.ask(&mut host, step(2, 18, &one));
    assert_eq!(result(&answers).data, encode(&expected(17.0, 18, &one)));
    let answers = caller.ask(&mut host, step(1, 20, &other));
    assert_eq!(result(&answers).data, encode(&expected(19.0, 20, &other)));
    let answers = caller.ask(&mut host, step(2, 19, &other));
    assert_eq!(result(&answers).data, encode(&expected(40.0, 19, &other)));
    // The fork outlives its source.
    caller.tell(close(1, 1));
    let answers = caller.ask(&mut host, step(2, 20, &one));
    assert_eq!(result(&answers).data, encode(&expected(30.0, 20, &one)));
    caller.tell(close(2, 1));
    host.run();
    host.assert_empty();
}

#[test]
fn steps_may_follow_a_fork_before_its_answer() {
    let (mut host, mut caller) = with_streams(1);
    caller.ask(&mut host, step(1, 0, &rows(5)));
    let row = [[9.0, 0.0, 0.0, 0.0]];
    caller.tell(fork_of(2, 1, 5));
    caller.tell(step(2, 5, &row));
    caller.tell(step(1, 5, &row));
    host.run();
    let answers = caller.sink.take();
    assert_eq!(
        codes(&answers),
        [(1, "opened"), (1, "result"), (1, "result")]
    );
    for answer in &answers[1..] {
        let data = &result(std::slice::from_ref(answer)).data;
        assert_eq!(*data, encode(&expected(4.0, 5, &row)));
    }
}

#[test]
fn a_fork_without_such_a_source_is_refused_and_the_source_goes_on() {
    let (mut host, mut caller) = with_streams(1);
    caller.ask(&mut host, step(1, 0, &rows(5)));
    assert_eq!(caller.refusal_now(fork_of(2, 7, 1)), "unknown_stream");
    let earlier = fork(1, 1).map(|fork| Fork { epoch: 0, ..fork });
    let earlier = open_with(2, 1, |open| open.fork = earlier);
    assert_eq!(caller.refusal_now(earlier), "unknown_stream");
    let layers = open_with(2, 1, |open| (open.lo, open.fork) = (3, fork(1, 1)));
    assert_eq!(caller.refusal_now(layers), "unknown_stream");
    assert_eq!(caller.refusal_now(fork_of(2, 1, 257)), "context_full");
    assert_eq!(caller.refusal(&mut host, fork_of(2, 1, 6)), "position_gap");
    // A source that ends behind the fork is no obstacle.
    caller.open(&mut host, 3);
    caller.ask(&mut host, step(3, 0, &rows(2)));
    caller.tell(fork_of(4, 3, 2));
    caller.tell(close(3, 1));
    host.run();
    assert_eq!(codes(&caller.sink.take()), [(1, "opened")]);
    let row = [[9.0, 0.0, 0.0, 0.0]];
    let answers = caller.ask(&mut host, step(1, 5, &row));
    assert_eq!(result(&answers).data, encode(&expected(4.0, 5, &row)));
    // Streams of another caller are no sources.
    let mut other = host.caller(2);
    assert_eq!(other.refusal_now(fork_of(1, 2, 1)), "unknown_stream");
}

#[test]
fn a_fork_takes_free_pages_only() {
    let mut host = Host::with_config(|config| {
        config.kv_budget_bytes = u64::from(5 * PAGE) * KV_BYTES;
    });
    let mut caller = host.caller(1);
    let positions = |stream, fork| {
        open_with(stream, 1, |open| {
            open.max_positions = 4 * PAGE;
            open.fork = fork;
        })
    };
    let fork = fork(1, 2 * PAGE);
    caller.ask(&mut host, positions(1, None));
    caller.ask(&mut host, step(1, 0, &rows(2 * PAGE)));
    assert_eq!(caller.ask(&mut host, positions(2, fork)), [opened(2, 1)]);
    assert_eq!(caller.refusal(&mut host, positions(3, fork)), "kv_full");
    // No stream was preempted for the refused fork.
    assert_eq!(host.stats().streams, 2);
}

#[test]
fn a_fork_rests_no_earlier_than_a_stream_with_rows() {
    let (mut host, mut caller) = with_streams(1);
    caller.ask(&mut host, step(1, 0, &rows(5)));
    caller.ask(&mut host, fork_of(2, 1, 5));
    caller.open(&mut host, 3);
    // All slots are taken: the unused stream gives way, and not the fork.
    host.clock.advance(Duration::from_secs(2));
    let answers = caller.ask(&mut host, open(4, 1));
    let ended: Vec<u32> = answers
        .iter()
        .filter_map(|answer| match answer {
            Message::StreamError(error) => Some(error.stream),
            _ => None,
        })
        .collect();
    assert_eq!(ended, [3]);
}
