//! Stream slots when they are scarce: preemption, and the order of waiting callers.

use crate::claims::{DUE, HOLDS};
use crate::fault::StreamFault;
use crate::plan::{IDLE_AFTER, UNUSED_AFTER};
use crate::stream_handle::StreamHandle;

use super::*;

/// Opens a stream and runs a row in it.
fn run_in(caller: &mut Caller, host: &mut Host, stream: u32) {
    caller.open(host, stream);
    let answers = caller.ask(host, step(stream, 0, &rows(1)));
    assert_eq!(result(&answers).rows, 1);
}

/// A caller that runs a stream in each slot.
fn with_every_slot(host: &mut Host, peer: u8) -> Caller {
    let mut caller = host.caller(peer);
    for stream in 1..=STREAMS {
        run_in(&mut caller, host, stream);
    }
    caller
}

/// Truncates the stream, as a caller does when its answer is complete.
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
fn a_resting_stream_is_preempted_for_a_new_one_at_once() {
    let mut host = Host::new();
    let mut a = with_every_slot(&mut host, 1);
    let mut b = host.caller(2);
    for stream in [2, 1] {
        host.clock.advance(Duration::from_millis(1));
        rest(&mut a, &mut host, stream);
    }
    // The longest resting stream is preempted first, and a running one is not.
    run_in(&mut b, &mut host, 1);
    assert_eq!(preempted(&a.sink.take()), 2);
    run_in(&mut b, &mut host, 2);
    assert_eq!(preempted(&a.sink.take()), 1);
    assert_eq!(b.refusal_now(open(3, 1)), "stream_limit");
    let answers = a.ask(&mut host, step(3, 1, &rows(1)));
    assert_eq!(result(&answers).rows, 1);
    assert_eq!(host.stats().streams, STREAMS);
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), STREAMS);
}

#[test]
fn a_stream_that_resumed_is_not_preempted() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    for stream in 1..=STREAMS {
        run_in(&mut a, &mut host, stream);
        rest(&mut a, &mut host, stream);
        let answers = a.ask(&mut host, step(stream, 1, &rows(1)));
        assert_eq!(result(&answers).rows, 1);
    }
    assert_eq!(b.refusal_now(open(1, 1)), "stream_limit");
}

#[test]
fn unused_streams_are_preempted_after_a_second() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    for stream in 1..=STREAMS {
        a.open(&mut host, stream);
    }
    assert_eq!(b.refusal_now(open(1, 1)), "stream_limit");
    host.clock.advance(UNUSED_AFTER);
    for stream in 1..=STREAMS {
        run_in(&mut b, &mut host, stream);
        assert_eq!(preempted(&a.sink.take()), stream);
    }
}

#[test]
fn a_silent_stream_counts_as_resting_after_a_while() {
    let mut host = Host::new();
    let mut a = with_every_slot(&mut host, 1);
    let mut b = host.caller(2);
    host.clock.advance(IDLE_AFTER - Duration::from_millis(10));
    assert_eq!(b.refusal_now(open(1, 1)), "stream_limit");
    // A step that waits for the engine counts as activity.
    a.tell(step(1, 1, &rows(1)));
    host.clock.advance(IDLE_AFTER);
    run_in(&mut b, &mut host, 1);
    let answers = a.sink.take();
    assert_eq!(preempted(&answers[..1]), 2);
    assert_eq!(result(&answers[1..]).stream, 1);
}

/// Takes one of four slots, of which a caller may have two. Preempts a resting stream if need be.
fn begin(slots: &Arc<Slots>, peer: u8, stream: u32) -> Result<Arc<StreamHandle>, StreamFault> {
    let (sink, now) = (Arc::new(Recorder::default()), Duration::from_secs(1));
    let open = open_for(stream, 1, 256);
    StreamHandle::begin(slots, caller_id(peer), &open, sink, now, |resting| {
        assert!(resting.end(|| ()));
    })
}

fn four_slots() -> Arc<Slots> {
    let limits = ServeConfig {
        max_concurrent_streams: 4,
        max_streams_per_caller: 2,
        max_waiting_steps_per_caller: 9,
        ..ServeConfig::new("")
    };
    Slots::new(owner(), &limits, Arc::default())
}

#[test]
fn a_peer_cannot_take_more_places_than_its_share() {
    let slots = four_slots();
    let begin = |peer, stream| begin(&slots, peer, stream);
    let a = begin(1, 1).unwrap();
    let b = begin(1, 2).unwrap();
    assert_eq!(begin(1, 3).unwrap_err().code(), "stream_quota");
    let c = begin(2, 1).unwrap();
    drop(b);
    assert!(begin(1, 3).is_ok());
    // Only a resting stream can be preempted, and neither of these rests.
    assert!(!a.has_ended() && !c.has_ended());
}

#[test]
fn at_its_quota_a_callers_own_resting_stream_is_preempted() {
    let slots = four_slots();
    let begin = |peer, stream| begin(&slots, peer, stream);
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
fn a_freed_slot_goes_to_the_caller_that_runs_fewest_streams() {
    let mut host = Host::new();
    let (mut a, mut b, mut c) = (host.caller(1), host.caller(2), host.caller(3));
    run_in(&mut a, &mut host, 1);
    run_in(&mut a, &mut host, 2);
    run_in(&mut b, &mut host, 1);
    assert_eq!(c.refusal_now(open(1, 1)), "stream_limit");
    a.tell(close(2, 1));
    // Asking at once, and repeatedly, gains nothing.
    for stream in 3..9 {
        assert_eq!(a.refusal_now(open(stream, 1)), "stream_limit");
    }
    c.open(&mut host, 1);
    assert_eq!(a.refusal_now(open(9, 1)), "stream_limit");
    assert_eq!(host.stats().streams, STREAMS);
}

#[test]
fn an_expired_claim_withholds_no_slot() {
    let mut host = Host::new();
    let mut a = with_every_slot(&mut host, 1);
    let mut c = host.caller(3);
    assert_eq!(c.refusal_now(open(1, 1)), "stream_limit");
    a.tell(close(1, 1));
    assert_eq!(a.refusal_now(open(4, 1)), "stream_limit");
    host.clock.advance(HOLDS + Duration::from_millis(1));
    a.open(&mut host, 5);
}

/// Runs a row in each of these streams, so that they count as running.
fn goes_on(caller: &mut Caller, host: &mut Host, streams: &[u32], position: u32) {
    for stream in streams {
        let answers = caller.ask(host, step(*stream, position, &rows(1)));
        assert_eq!(result(&answers).rows, 1);
    }
}

#[test]
fn a_due_claim_preempts_a_stream_of_the_caller_that_runs_most() {
    let mut host = Host::new();
    let mut a = with_every_slot(&mut host, 2);
    let mut b = host.caller(3);
    // A stream with more rows costs more to replay.
    goes_on(&mut a, &mut host, &[1, 3], 1);
    for second in 0..DUE.as_secs() as u32 {
        assert_eq!(b.refusal_now(open(1, 1)), "stream_limit", "second {second}");
        host.clock.advance(Duration::from_secs(1));
        goes_on(&mut a, &mut host, &[1, 3], 2 + second);
        goes_on(&mut a, &mut host, &[2], 1 + second);
    }
    run_in(&mut b, &mut host, 1);
    assert_eq!(preempted(&a.sink.take()), 2);
    // The share is one slot (a third of them), so B gets no more, and A gets none back.
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
fn a_member_and_its_invitees_share_one_quota() {
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
    assert_eq!(preempted(&them[2].sink.take()), 1);
}

#[test]
fn the_machines_owner_gets_a_slot_at_once() {
    let mut host = Host::new();
    let owner = CallerId {
        node: owner(),
        party: owner(),
        ..caller_id(9)
    };
    let mut a = with_every_slot(&mut host, 2);
    let mut owner = host.caller_as(owner);
    run_in(&mut owner, &mut host, 1);
    // Of equal streams, the latest is preempted.
    assert_eq!(preempted(&a.sink.take()), STREAMS);
    // The owner is entitled to one slot; for more it waits like any caller.
    assert_eq!(owner.refusal_now(open(2, 1)), "stream_limit");
    assert_eq!(a.refusal_now(open(9, 1)), "stream_limit");
}
