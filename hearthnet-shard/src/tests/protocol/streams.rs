//! Streams: how they open and end.

use super::*;

#[test]
fn invalid_opens_are_refused_with_their_own_codes() {
    let (mut host, mut caller) = with_streams(0);
    for (code, message) in [
        ("weights_mismatch", open_with(1, 1, |o| o.weights[31] ^= 1)),
        ("bad_descriptor", open_with(1, 1, |o| (o.lo, o.hi) = (5, 2))),
        ("bad_descriptor", open_with(1, 1, |o| (o.lo, o.hi) = (2, 8))),
        (
            "bad_descriptor",
            open_with(1, 1, |o| (o.lo, o.hi) = (0, u32::MAX)),
        ),
        ("layer_range", open_with(1, 1, |o| (o.lo, o.hi) = (1, 5))),
        ("layer_range", open_with(1, 1, |o| (o.lo, o.hi) = (2, 6))),
        ("layer_range", open_with(1, 1, |o| (o.lo, o.hi) = (0, 1))),
        (
            "context_full",
            open_with(1, 1, |o| o.max_positions = POSITIONS + 1),
        ),
        ("context_full", open_with(1, 1, |o| o.max_positions = 0)),
    ] {
        assert_eq!(caller.refusal(&mut host, message), code);
        host.assert_empty();
    }
}

#[test]
fn a_stream_ends_at_the_positions_that_it_was_opened_for() {
    let (mut host, mut caller) = with_streams(1);
    let answers = caller.ask(&mut host, step(1, 0, &rows(256)));
    assert_eq!(result(&answers).rows, 256);
    assert_eq!(
        caller.refusal(&mut host, step(1, 256, &rows(1))),
        "context_full"
    );
    host.assert_empty();
}

#[test]
fn one_stream_too_many_is_refused_at_once_and_takes_nothing() {
    let (mut host, mut a, mut b) = Host::with_three_streams();
    // The compute thread is not needed: `run` is not called before the answers are there.
    for caller in [&mut a, &mut b] {
        assert_eq!(caller.refusal_now(open(7, 1)), "stream_limit");
    }
    assert_eq!(host.stats().streams, STREAMS);
    // A close frees the slot at once, for the caller refused first.
    a.tell(close(2, 1));
    a.open(&mut host, 7);
    assert_eq!(host.stats().streams, STREAMS);
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), STREAMS);
}

#[test]
fn a_later_epoch_ends_the_earlier_one_and_its_steps() {
    let (mut host, mut caller) = with_streams(3);
    caller.tell(step(1, 0, &rows(40)));
    // All slots are taken: the new epoch takes the slot of the old one.
    caller.tell(open(1, 5));
    // A step of the old epoch that crossed with the open.
    caller.tell(step(1, 40, &rows(1)));
    caller.tell(step_in(5, 1, 0, &rows(2)));
    host.run();
    let answers = caller.sink.take();
    let stale = (1, "stale_epoch");
    assert_eq!(
        codes(&answers),
        [stale, stale, (5, "opened"), (5, "result")]
    );
    assert_eq!(host.errors("stale_epoch"), 2);
    assert_eq!(host.stats().dropped_steps, 2);
    // Only rows of the new epoch were computed, from an empty sequence.
    assert_eq!(*host.probe.batches.lock(), [[2]]);
    let Some(Message::StepResult(last)) = answers.last() else {
        panic!()
    };
    assert_eq!(last.data, encode(&expected(0.0, 0, &rows(2))));
    assert_eq!(host.stats().streams, 3);
}

#[test]
fn an_open_with_an_earlier_epoch_is_stale() {
    let (mut host, mut caller) = with_streams(0);
    assert_eq!(caller.ask(&mut host, open(1, 5)), [opened(1, 5)]);
    assert_eq!(caller.refusal(&mut host, open(1, 5)), "stale_epoch");
    assert_eq!(caller.refusal(&mut host, open(1, 4)), "stale_epoch");
    assert_eq!(caller.ask(&mut host, close(1, 5)), []);
    assert_eq!(caller.refusal(&mut host, open(1, 5)), "stale_epoch");
    host.assert_empty();
}

#[test]
fn a_cancelled_stream_is_gone_before_the_next_batch() {
    let (mut host, mut caller) = with_streams(1);
    caller.ask(&mut host, step(1, 0, &rows(20)));
    assert!(host.stats().kv_bytes > 0);
    host.probe.batches.lock().clear();
    caller.tell(step(1, 20, &rows(100)));
    caller.tell(step(1, 120, &rows(1)));
    host.take_in();
    assert!(host.scheduler.turn(), "a first chunk is computed");
    caller.tell(close(1, 1));
    // The slot is free before the compute thread runs.
    assert_eq!(host.stats().streams, 0);
    host.run();
    assert_eq!(host.probe.batches.lock().len(), 1);
    assert_eq!(caller.sink.take(), [], "a cancelled step has no answer");
    assert_eq!(host.stats().dropped_steps, 2);
    host.assert_empty();
}

#[test]
fn a_closed_connection_ends_its_own_streams_only() {
    let (mut host, mut a, mut b) = Host::with_three_streams();
    a.tell(step(1, 0, &rows(30)));
    a.tell(step(2, 0, &rows(1)));
    host.take_in();
    drop(a);
    host.run();
    assert_eq!(host.stats().streams, 1);
    assert_eq!(host.stats().dropped_steps, 2);
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), 1);
    let answers = b.ask(&mut host, step(1, 0, &rows(1)));
    assert_eq!(result(&answers).rows, 1);
    drop(b);
    host.run();
    host.assert_empty();
}

#[test]
fn host_messages_from_a_caller_close_the_session() {
    let host = Host::new();
    let mut caller = host.caller(1);
    for message in [
        opened(1, 1),
        Message::StreamError(StreamError {
            stream: 1,
            epoch: 1,
            position: None,
            code: "x".into(),
            message: String::new(),
        }),
    ] {
        assert_eq!(
            caller.stream_table.message(message),
            Err(CloseCode::ProtocolState)
        );
    }
}
