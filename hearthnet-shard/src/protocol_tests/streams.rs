//! Streams: who gets one, and how it ends.

use crate::stream_handle::StreamHandle;

use super::*;

#[test]
fn what_does_not_fit_the_host_is_refused_at_the_open_with_its_own_code() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
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
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let answers = caller.ask(&mut host, Message::Step(step(1, 0, &rows(256))));
    assert_eq!(result(&answers).rows, 256);
    assert_eq!(
        caller.refusal(&mut host, Message::Step(step(1, 256, &rows(1)))),
        "context_full"
    );
    host.assert_empty();
}

#[test]
fn one_stream_too_many_is_refused_at_once_and_takes_nothing() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.open(&mut host, 1);
    a.open(&mut host, 2);
    b.open(&mut host, 1);
    // The compute thread is not asked: no `run` before the answers are there.
    for caller in [&mut a, &mut b] {
        caller.tell(open(7, 1));
        let answers = caller.outlet.take();
        assert!(
            matches!(&answers[..], [Message::StreamError(e)] if e.code == "stream_limit"),
            "{answers:?}"
        );
    }
    assert_eq!(host.stats().streams, STREAMS);
    // A close makes room at once, for whoever was refused first.
    a.tell(close(2, 1));
    a.open(&mut host, 7);
    assert_eq!(host.stats().streams, STREAMS);
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), STREAMS);
}

#[test]
fn a_peer_cannot_take_more_places_than_its_share() {
    let slots = Slots::new(
        owner(),
        4,
        Quota {
            streams: 2,
            steps: 9,
        },
        Arc::default(),
    );
    let outlet = Arc::new(Recorder::default());
    let begin = |peer: u8, stream| {
        let Message::StreamOpen(open) = open(stream, 1) else {
            unreachable!()
        };
        let (caller, now) = (caller_id(peer), Duration::ZERO);
        StreamHandle::begin(&slots, caller, &open, outlet.clone(), now, |_| {
            unreachable!("nobody rests")
        })
    };
    let _a = begin(1, 1).unwrap();
    let b = begin(1, 2).unwrap();
    assert_eq!(begin(1, 3).unwrap_err().code(), "stream_quota");
    let _c = begin(2, 1).unwrap();
    drop(b);
    assert!(begin(1, 3).is_ok());
}

#[test]
fn a_later_life_ends_the_earlier_one_and_its_steps() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.open(&mut host, 2);
    caller.open(&mut host, 3);
    caller.tell(Message::Step(step(1, 0, &rows(40))));
    // All places are taken: the new life takes the old one's.
    caller.tell(open(1, 5));
    // A step of the old life that crossed with it.
    caller.tell(Message::Step(step(1, 40, &rows(1))));
    caller.tell(Message::Step(Step {
        epoch: 5,
        ..step(1, 0, &rows(2))
    }));
    host.run();
    let answers = caller.outlet.take();
    let codes: Vec<_> = answers
        .iter()
        .map(|answer| match answer {
            Message::StreamError(e) => (e.epoch, e.code.as_str()),
            Message::StreamOpened(o) => (o.epoch, "opened"),
            Message::StepResult(r) => (r.epoch, "result"),
            other => panic!("{other:?}"),
        })
        .collect();
    let stale = (1, "stale_epoch");
    assert_eq!(codes, [stale, stale, (5, "opened"), (5, "result")]);
    assert_eq!(host.errors("stale_epoch"), 2);
    assert_eq!(host.stats().dropped_steps, 2);
    // Only the new life's rows were computed, from an empty beginning.
    assert_eq!(*host.probe.batches.lock(), [[2]]);
    let Some(Message::StepResult(last)) = answers.last() else {
        panic!()
    };
    assert_eq!(last.data, encode(&expected(0.0, 0, &rows(2))));
    assert_eq!(host.stats().streams, 3);
}

#[test]
fn an_open_of_a_life_that_is_over_is_stale() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    assert_eq!(caller.ask(&mut host, open(1, 5)), [opened(1, 5)]);
    assert_eq!(caller.refusal(&mut host, open(1, 5)), "stale_epoch");
    assert_eq!(caller.refusal(&mut host, open(1, 4)), "stale_epoch");
    assert_eq!(caller.ask(&mut host, close(1, 5)), []);
    assert_eq!(caller.refusal(&mut host, open(1, 5)), "stale_epoch");
    host.assert_empty();
}

#[test]
fn a_cancelled_stream_is_gone_before_the_next_batch() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    caller.ask(&mut host, Message::Step(step(1, 0, &rows(20))));
    assert!(host.stats().kv_bytes > 0);
    host.probe.batches.lock().clear();
    caller.tell(Message::Step(step(1, 20, &rows(100))));
    caller.tell(Message::Step(step(1, 120, &rows(1))));
    host.take_in();
    assert!(host.scheduler.turn(), "a first piece is computed");
    caller.tell(close(1, 1));
    // The place is free before the compute thread looks.
    assert_eq!(host.stats().streams, 0);
    host.run();
    assert_eq!(host.probe.batches.lock().len(), 1);
    assert_eq!(caller.outlet.take(), [], "a cancelled step has no answer");
    assert_eq!(host.stats().dropped_steps, 2);
    host.assert_empty();
}

#[test]
fn a_closed_connection_takes_its_streams_with_it_and_no_others() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.open(&mut host, 1);
    a.open(&mut host, 2);
    b.open(&mut host, 1);
    a.tell(Message::Step(step(1, 0, &rows(30))));
    a.tell(Message::Step(step(2, 0, &rows(1))));
    host.take_in();
    drop(a);
    host.run();
    assert_eq!(host.stats().streams, 1);
    assert_eq!(host.stats().dropped_steps, 2);
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), 1);
    let answers = b.ask(&mut host, Message::Step(step(1, 0, &rows(1))));
    assert_eq!(result(&answers).rows, 1);
    drop(b);
    host.run();
    host.assert_empty();
}

#[test]
fn whoever_asks_is_told_what_is_served() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let answers = caller.ask(&mut host, Message::Describe);
    let [Message::Descriptor(bytes)] = &answers[..] else {
        panic!("{answers:?}")
    };
    let descriptor = Descriptor::from_cbor(bytes).unwrap();
    assert_eq!(
        (descriptor.shard_id.as_str(), descriptor.queue_depth),
        ("fake:2-5", 1)
    );
}

#[test]
fn what_only_a_host_says_closes_the_session() {
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
            caller.stream_table.handle(message),
            Err(CloseCode::ProtocolState)
        );
    }
}
