//! Steps: results, batching, and the cost of a bad step.

use super::*;

#[test]
fn rows_come_back_as_the_engine_made_them() {
    let (mut host, mut caller) = with_streams(0);
    caller.open(&mut host, 9);
    let answers = caller.ask(&mut host, step(9, 0, &rows(3)));
    let answer = result(&answers);
    assert_eq!(
        (answer.stream, answer.epoch, answer.position, answer.rows),
        (9, 1, 0, 3)
    );
    assert_eq!((answer.width, answer.dtype), (WIDTH, DType::F16));
    assert_eq!(answer.data, encode(&expected(0.0, 0, &rows(3))));
    let one = [[5.0, 6.0, 7.0, 8.0]];
    let answers = caller.ask(&mut host, step(9, 3, &one));
    assert_eq!(result(&answers).data, encode(&expected(2.0, 3, &one)));
}

#[test]
fn rows_of_other_nodes_are_counted_in_each_layer_and_own_rows_are_not() {
    let (mut host, mut caller) = with_streams(1);
    caller.ask(&mut host, step(1, 0, &rows(3)));
    let StreamOpen { lo, hi, .. } = open_for(1, 1, 256);
    let given = 3 * u64::from(hi - lo + 1);
    assert_eq!(host.stats().given_layer_rows, given);
    let mut own = host.caller_as(CallerId {
        node: owner(),
        party: owner(),
        ..caller_id(1)
    });
    own.open(&mut host, 1);
    own.ask(&mut host, step(1, 0, &rows(3)));
    assert_eq!(host.stats().given_layer_rows, given);
    assert_eq!(host.stats().steps, 2);
}

#[test]
fn the_caller_gets_the_rows_that_it_wants_and_no_others() {
    let (mut host, mut caller) = with_streams(1);
    // Long enough to be cut into chunks.
    let all = expected(0.0, 0, &rows(200));
    for (want, count, data) in [
        (Want::None, 0, encode(&[])),
        (Want::Last, 1, encode(&all[199..])),
        (Want::All, 200, encode(&all)),
    ] {
        let step = Step {
            want,
            ..step_of(1, 0, &rows(200))
        };
        let answers = caller.ask(&mut host, Message::Step(step));
        assert_eq!(
            (result(&answers).rows, &result(&answers).data[..]),
            (count, &data[..])
        );
    }
    assert!(
        host.probe
            .batches
            .lock()
            .iter()
            .all(|batch| batch.len() == 1)
    );
    assert!(host.probe.batches.lock().len() > 3);
}

#[test]
fn a_repeated_step_replaces_what_came_after_it() {
    let (mut host, mut caller) = with_streams(1);
    let first = caller.ask(&mut host, step(1, 0, &rows(20)));
    let again = caller.ask(&mut host, step(1, 0, &rows(20)));
    assert_eq!(result(&first).data, result(&again).data);
    let other = [[40.0, 0.0, 0.0, 0.0]];
    let answers = caller.ask(&mut host, step(1, 5, &other));
    assert_eq!(result(&answers).data, encode(&expected(4.0, 5, &other)));
    // The stream now has six positions.
    assert_eq!(
        caller.refusal(&mut host, step(1, 7, &other)),
        "position_gap"
    );
    host.assert_empty();
}

#[test]
fn truncation_takes_effect_in_its_place() {
    let (mut host, mut caller) = with_streams(1);
    caller.tell(step(1, 0, &rows(20)));
    caller.tell(truncate(1, 3));
    let next = [[9.0, 0.0, 0.0, 0.0]];
    let answers = caller.ask(&mut host, step(1, 3, &next));
    let [Message::StepResult(_), Message::StepResult(last)] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!(last.data, encode(&expected(2.0, 3, &next)));
    assert_eq!(caller.refusal(&mut host, truncate(1, 5)), "position_gap");
    host.assert_empty();
}

#[test]
fn a_step_that_cannot_be_computed_ends_its_stream_with_its_own_code() {
    let good = step_of(1, 0, &rows(2));
    let with = |change: &dyn Fn(&mut Step)| {
        let mut step = good.clone();
        change(&mut step);
        step
    };
    let data = |value: f32| encode(&[[1.0, 2.0, value, 3.0]; 2]);
    let cases = [
        (
            "tensor_shape",
            with(&|s| (s.rows, s.data) = (0, Vec::new().into())),
        ),
        ("tensor_shape", with(&|s| (s.width, s.rows) = (2, 4))),
        (
            "tensor_shape",
            with(&|s| (s.dtype, s.width) = (DType::F32, 2)),
        ),
        ("tensor_shape", with(&|s| s.dtype = DType::Bf16)),
        (
            "tensor_shape",
            with(&|s| (s.dtype, s.width) = (DType::I8, 8)),
        ),
        ("tensor_shape", with(&|s| s.rows = 3)),
        ("tensor_shape", with(&|s| s.rows = u32::MAX)),
        ("tensor_nonfinite", with(&|s| s.data = data(f32::NAN))),
        (
            "tensor_nonfinite",
            with(&|s| s.data = data(f32::NEG_INFINITY)),
        ),
        ("position_gap", with(&|s| s.position = 1)),
        ("position_gap", with(&|s| s.position = u32::MAX)),
        ("context_full", step_of(1, 0, &rows(257))),
        (
            "boundary_overflow",
            step_of(1, 0, &[[OVERFLOWS, 0.0, 0.0, 0.0]]),
        ),
    ];
    for (code, step) in cases {
        // The row beyond the limit must not be refused as too many waiting rows.
        let (mut host, mut caller) = with_streams(1);
        let answer = caller.refusal(&mut host, Message::Step(step));
        // A stream's limit of waiting rows is its limit of positions, and may be reported first.
        let queue_full = code == "context_full" && answer == "queue_full";
        assert!(answer == code || queue_full, "{answer} for {code}");
        assert_eq!(host.errors(answer.as_str()), 1);
        host.assert_empty();
        // The slot is free, and the number can be used again in a later epoch.
        assert_eq!(caller.ask(&mut host, open(1, 2)), [opened(1, 2)]);
    }
}

#[test]
fn a_step_for_an_unknown_stream_is_answered() {
    let (mut host, mut caller) = with_streams(0);
    let one = step(1, 0, &rows(1));
    assert_eq!(caller.refusal(&mut host, one.clone()), "unknown_stream");
    assert_eq!(caller.refusal(&mut host, truncate(1, 0)), "unknown_stream");
    caller.open(&mut host, 1);
    assert_eq!(
        caller.refusal(&mut host, step(1, 9, &rows(1))),
        "position_gap"
    );
    assert_eq!(caller.refusal(&mut host, one.clone()), "stream_ended");
    let early = step_in(2, 1, 0, &rows(1));
    assert_eq!(caller.refusal(&mut host, early), "unknown_stream");
    // The same stream number on another connection is another stream.
    let mut other = host.caller(1);
    assert_eq!(other.refusal(&mut host, one), "unknown_stream");
}

#[test]
fn decode_steps_of_all_streams_share_a_batch() {
    let (mut host, mut a, mut b) = Host::with_three_streams();
    a.tell(step(1, 0, &rows(1)));
    a.tell(step(2, 0, &rows(1)));
    b.tell(step(1, 0, &rows(1)));
    host.run();
    assert_eq!(*host.probe.batches.lock(), [[1, 1, 1]]);
    for answer in a.sink.take().iter().chain(&b.sink.take()) {
        let Message::StepResult(answer) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(answer.data, encode(&expected(0.0, 0, &rows(1))));
    }
}

#[test]
fn streams_through_some_of_the_layers_run_in_batches_of_their_own() {
    let (mut host, mut caller) = with_streams(0);
    let part = |stream, lo, hi| open_with(stream, 1, |o| (o.lo, o.hi) = (lo, hi));
    for open in [part(1, 2, 5), part(2, 3, 4), part(3, 2, 5)] {
        assert_eq!(caller.ask(&mut host, open).len(), 1);
    }
    for stream in 1..=3 {
        caller.tell(step(stream, 0, &rows(1)));
    }
    host.run();
    // A turn with two engine batches.
    assert_eq!(*host.probe.batches.lock(), [vec![1, 1], vec![1]]);
    assert_eq!(host.stats().turns, 1);
    for answer in caller.sink.take() {
        let Message::StepResult(answer) = answer else {
            panic!("{answer:?}")
        };
        let mut all = expected(0.0, 0, &rows(1));
        if answer.stream == 2 {
            all.as_flattened_mut()
                .iter_mut()
                .for_each(|value| *value += 4.0);
        }
        assert_eq!(answer.data, encode(&all));
    }
}

#[test]
fn decode_goes_between_the_pieces_of_a_long_prefill() {
    let (mut host, mut caller) = with_streams(2);
    caller.tell(step(1, 0, &rows(200)));
    host.take_in();
    assert!(host.scheduler.turn());
    for position in 0..3 {
        caller.tell(step(2, position, &rows(1)));
        // At most one chunk, then the answer.
        let mut turns = 0;
        while caller.sink.is_empty() {
            host.take_in();
            assert!(host.scheduler.turn());
            turns += 1;
        }
        assert!(turns <= 2, "{turns} turns");
        assert_eq!(result(&caller.sink.take()).stream, 2);
    }
    // The prefill is not done: the decode steps overtook the rest of it.
    let batches = host.probe.batches.lock().clone();
    assert!(batches.iter().flatten().sum::<u32>() < 200, "{batches:?}");
    assert!(
        batches
            .iter()
            .all(|batch| batch.len() == 1 && batch[0] <= 40),
        "{batches:?}"
    );
    host.run();
    assert_eq!(
        result(&caller.sink.take()).data,
        encode(&expected(0.0, 0, &rows(200)))
    );
}

#[test]
fn two_streams_of_one_caller_get_no_more_prefill_than_one_of_another() {
    let (mut host, mut a, mut b) = Host::with_three_streams();
    for stream in 1..=2 {
        a.tell(step(stream, 0, &rows(240)));
    }
    b.tell(step(1, 0, &rows(240)));
    host.take_in();
    while b.sink.is_empty() {
        assert!(host.scheduler.turn());
    }
    // The other two have had as much between them, up to two of the largest chunks.
    let batches = host.probe.batches.lock().clone();
    let chunk = batches.iter().map(|batch| batch.iter().sum::<u32>()).max();
    let all: u32 = batches.iter().flatten().sum();
    assert!(
        (all - 240).abs_diff(240) <= 2 * chunk.unwrap(),
        "{batches:?}"
    );
    assert!(a.sink.is_empty());
}

#[test]
fn a_fault_in_a_shared_batch_costs_only_the_stream_at_fault() {
    let (mut host, mut caller) = with_streams(3);
    caller.tell(step(1, 0, &rows(2)));
    caller.tell(step(2, 0, &[[3.0; 4], [OVERFLOWS, 0.0, 0.0, 0.0]]));
    caller.tell(step(3, 0, &rows(2)));
    host.run();
    let answers = caller.sink.take();
    let mut good = 0;
    for answer in &answers {
        match answer {
            Message::StepResult(result) => {
                good += 1;
                assert_eq!(result.data, encode(&expected(0.0, 0, &rows(2))));
            }
            Message::StreamError(error) => {
                assert_eq!(
                    (error.stream, error.code.as_str()),
                    (2, "boundary_overflow")
                );
                assert_eq!(error.position, Some(0));
                assert!(error.message.contains("layer 3"));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((answers.len(), good), (3, 2));
    assert_eq!(host.stats().streams, 2);
}

#[test]
fn a_stream_may_not_pile_up_steps_or_rows() {
    let (mut host, mut caller) = with_streams(1);
    for position in 0..WAITING {
        caller.tell(step(1, position, &rows(1)));
    }
    let fifth = step(1, WAITING, &rows(1));
    assert_eq!(caller.refusal_now(fifth), "queue_full");
    host.run();
    host.assert_empty();

    caller.open(&mut host, 2);
    caller.tell(step(2, 0, &rows(200)));
    let beyond = step(2, 200, &rows(57));
    assert_eq!(caller.refusal_now(beyond), "queue_full");
    host.run();
    host.assert_empty();
}

#[test]
fn a_split_decode_step_has_a_single_answer() {
    for want in [Want::All, Want::Last, Want::None] {
        let mut host = Host::new();
        let (mut one, mut other) = (host.caller(1), host.caller(2));
        one.open(&mut host, 1);
        other.open(&mut host, 1);
        one.tell(Message::Step(Step {
            want,
            ..step_of(1, 0, &rows(8))
        }));
        other.tell(step(1, 0, &rows(1)));
        host.run();
        let batches = host.probe.batches.lock().clone();
        let cut = batches.iter().flatten().all(|rows| *rows < 8);
        assert!(cut && batches[0].len() == 2, "{batches:?}");
        let all = encode(&expected(0.0, 0, &rows(8)));
        let answer = one.sink.take();
        let wanted = match want {
            Want::All => &all[..],
            Want::Last => &all[all.len() - 8..],
            Want::None => &[],
        };
        assert_eq!(result(&answer).data, wanted);
        let single = encode(&expected(0.0, 0, &rows(1)));
        assert_eq!(result(&other.sink.take()).data, single);
    }
}
