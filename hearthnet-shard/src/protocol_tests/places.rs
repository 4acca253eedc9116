//! Places for streams where there are fewer than are wanted: who gives way, and who is next.

use crate::claims::{DUE, HOLDS};
use crate::plan::{IDLE_AFTER, UNUSED_AFTER};

use crate::stream_handle::StreamHandle;

use super::*;

/// Opens a stream and runs a row in it.
fn run_in(caller: &mut Caller, host: &mut Host, stream: u32) {
    caller.open(host, stream);
    let answers = caller.ask(host, Message::Step(step(stream, 0, &rows(1))));
    assert_eq!(result(&answers).rows, 1);
}

/// As a caller does whose answer is complete.
fn rest(caller: &mut Caller, host: &mut Host, stream: u32) {
    assert_eq!(caller.ask(host, truncate(stream, 1)), []);
}

fn preempted(answers: &[Message]) -> u32 {
    match answers {
        [Message::StreamError(e)] if e.code == "preempted" => e.stream,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_stream_that_rests_gives_its_place_to_a_new_one_at_once() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    for stream in 1..=STREAMS {
        run_in(&mut a, &mut host, stream);
    }
    for stream in [2, 1] {
        host.clock.advance(Duration::from_millis(1));
        rest(&mut a, &mut host, stream);
    }
    // The one that has been resting for longest goes first, and one that runs does not go.
    run_in(&mut b, &mut host, 1);
    assert_eq!(preempted(&a.outlet.take()), 2);
    run_in(&mut b, &mut host, 2);
    assert_eq!(preempted(&a.outlet.take()), 1);
    assert_eq!(b.refusal_now(open(3, 1)), "stream_limit");
    let answers = a.ask(&mut host, Message::Step(step(3, 1, &rows(1))));
    assert_eq!(result(&answers).rows, 1);
    assert_eq!(host.stats().streams, STREAMS);
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), STREAMS);
}

#[test]
fn a_stream_that_rested_and_goes_on_gives_way_to_nobody() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    for stream in 1..=STREAMS {
        run_in(&mut a, &mut host, stream);
        rest(&mut a, &mut host, stream);
        let answers = a.ask(&mut host, Message::Step(step(stream, 1, &rows(1))));
        assert_eq!(result(&answers).rows, 1);
    }
    assert_eq!(b.refusal_now(open(1, 1)), "stream_limit");
}

#[test]
fn streams_that_hold_no_rows_lock_nobody_out() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    for stream in 1..=STREAMS {
        a.open(&mut host, stream);
    }
    assert_eq!(b.refusal_now(open(1, 1)), "stream_limit");
    host.clock.advance(UNUSED_AFTER);
    for stream in 1..=STREAMS {
        run_in(&mut b, &mut host, stream);
        assert_eq!(preempted(&a.outlet.take()), stream);
    }
}

#[test]
fn a_caller_that_never_says_that_it_rests_is_taken_to_when_it_asks_nothing_for_long() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    for stream in 1..=STREAMS {
        run_in(&mut a, &mut host, stream);
    }
    host.clock.advance(IDLE_AFTER - Duration::from_millis(10));
    assert_eq!(b.refusal_now(open(1, 1)), "stream_limit");
    // A step that waits for the engine is no silence.
    a.tell(Message::Step(step(1, 1, &rows(1))));
    host.clock.advance(IDLE_AFTER);
    run_in(&mut b, &mut host, 1);
    let answers = a.outlet.take();
    assert_eq!(preempted(&answers[..1]), 2);
    assert_eq!(result(&answers[1..]).stream, 1);
}

#[test]
fn of_its_own_streams_the_one_that_rests_makes_room_within_a_callers_share() {
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
    let begin = |peer: u8, stream: u32| {
        let Message::StreamOpen(open) = open(stream, 1) else {
            unreachable!()
        };
        let (caller, now) = (caller_id(peer), Duration::from_secs(1));
        StreamHandle::begin(&slots, caller, &open, outlet.clone(), now, |resting| {
            assert!(resting.end(|| ()));
        })
    };
    let others = begin(2, 1).unwrap();
    others.rest(Duration::ZERO);
    let (a, b) = (begin(1, 2).unwrap(), begin(1, 3).unwrap());
    assert_eq!(begin(1, 4).unwrap_err().code(), "stream_quota");
    a.rest(Duration::from_secs(1));
    let c = begin(1, 4).unwrap();
    assert_eq!(
        [&others, &a, &b, &c].map(|handle| handle.has_ended()),
        [false, true, false, false]
    );
}

#[test]
fn a_place_that_is_given_back_is_for_the_caller_that_runs_fewest() {
    let mut host = Host::new();
    let (mut a, mut b, mut c) = (host.caller(1), host.caller(2), host.caller(3));
    run_in(&mut a, &mut host, 1);
    run_in(&mut a, &mut host, 2);
    run_in(&mut b, &mut host, 1);
    assert_eq!(c.refusal_now(open(1, 1)), "stream_limit");
    a.tell(close(2, 1));
    // Asking at once, and again, gains nothing.
    for stream in 3..9 {
        assert_eq!(a.refusal_now(open(stream, 1)), "stream_limit");
    }
    c.open(&mut host, 1);
    assert_eq!(a.refusal_now(open(9, 1)), "stream_limit");
    assert_eq!(host.stats().streams, STREAMS);
}

#[test]
fn a_caller_that_was_refused_and_stays_away_holds_no_place_free() {
    let mut host = Host::new();
    let (mut a, mut c) = (host.caller(1), host.caller(3));
    for stream in 1..=STREAMS {
        run_in(&mut a, &mut host, stream);
    }
    assert_eq!(c.refusal_now(open(1, 1)), "stream_limit");
    a.tell(close(1, 1));
    assert_eq!(a.refusal_now(open(4, 1)), "stream_limit");
    host.clock.advance(HOLDS + Duration::from_millis(1));
    a.open(&mut host, 5);
}

/// Runs a row in each of these streams, as somebody does whose answers go on.
fn goes_on(caller: &mut Caller, host: &mut Host, streams: &[u32], position: u32) {
    for stream in streams {
        let answers = caller.ask(host, Message::Step(step(*stream, position, &rows(1))));
        assert_eq!(result(&answers).rows, 1);
    }
}

#[test]
fn who_has_waited_for_long_gets_its_share_from_whoever_has_most() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(2), host.caller(3));
    for stream in 1..=STREAMS {
        run_in(&mut a, &mut host, stream);
    }
    // What is further on costs more to repeat.
    goes_on(&mut a, &mut host, &[1, 3], 1);
    for second in 0..DUE.as_secs() as u32 {
        assert_eq!(b.refusal_now(open(1, 1)), "stream_limit", "second {second}");
        host.clock.advance(Duration::from_secs(1));
        goes_on(&mut a, &mut host, &[1, 3], 2 + second);
        goes_on(&mut a, &mut host, &[2], 1 + second);
    }
    run_in(&mut b, &mut host, 1);
    assert_eq!(preempted(&a.outlet.take()), 2);
    // A third of the places each is one, so B has what it may have, and A does not get back more.
    for second in 0..3 * DUE.as_secs() as u32 {
        assert_eq!(b.refusal_now(open(2, 1)), "stream_limit");
        assert_eq!(a.refusal_now(open(2, 2)), "stream_limit");
        host.clock.advance(Duration::from_secs(1));
        goes_on(&mut a, &mut host, &[1, 3], 12 + second);
        goes_on(&mut b, &mut host, &[1], 1 + second);
    }
    assert_eq!(host.stats().streams, STREAMS);
}

#[test]
fn a_member_and_those_that_it_let_in_have_one_share() {
    let mut host = Host::new();
    let sybil = |n: u8| CallerId {
        party: caller_id(2).party,
        ..caller_id(n)
    };
    let mut them: Vec<Caller> = [2, 12, 22].map(|n| host.caller_as(sybil(n))).into();
    for caller in &mut them {
        run_in(caller, &mut host, 1);
    }
    let mut b = host.caller(3);
    for second in 0..DUE.as_secs() as u32 {
        assert_eq!(b.refusal_now(open(1, 1)), "stream_limit");
        host.clock.advance(Duration::from_secs(1));
        for caller in &mut them {
            goes_on(caller, &mut host, &[1], 1 + second);
        }
    }
    run_in(&mut b, &mut host, 1);
    assert_eq!(preempted(&them[2].outlet.take()), 1);
}

#[test]
fn the_owner_of_the_machine_has_a_place_on_it_at_once() {
    let mut host = Host::new();
    let owner = CallerId {
        node: owner(),
        party: owner(),
        ..caller_id(9)
    };
    let (mut a, mut owner) = (host.caller(2), host.caller_as(owner));
    for stream in 1..=STREAMS {
        run_in(&mut a, &mut host, stream);
    }
    run_in(&mut owner, &mut host, 1);
    // Of equals, the one that began last.
    assert_eq!(preempted(&a.outlet.take()), STREAMS);
    // One place is its own by right, for more it waits like anybody.
    assert_eq!(owner.refusal_now(open(2, 1)), "stream_limit");
    assert_eq!(a.refusal_now(open(9, 1)), "stream_limit");
}
