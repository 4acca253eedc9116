//! A host that leaves: new streams are refused, open ones are served.

use super::*;

#[test]
fn a_host_that_leaves_refuses_new_streams_and_serves_those_that_are_open() {
    let (mut host, mut caller) = with_streams(1);
    caller.tell(step(1, 0, &rows(40)));
    host.host_state.slots.close();
    assert_eq!(caller.refusal_now(open(2, 1)), "shutting_down");
    // Later steps are answered as well, and so are repeated steps and truncations.
    caller.tell(step(1, 40, &rows(1)));
    caller.tell(truncate(1, 20));
    caller.tell(step(1, 20, &rows(2)));
    host.run();
    let answers = caller.sink.take();
    assert_eq!(codes(&answers), [(1, "result"); 3]);
    // Streams that are still open at the deadline are told.
    host.scheduler
        .end_all(&crate::fault::StreamFault::ShuttingDown);
    assert_eq!(codes(&caller.sink.take()), [(1, "shutting_down")]);
    host.assert_empty();
}

#[test]
fn a_refused_later_epoch_does_not_end_the_earlier_one() {
    let (mut host, mut caller) = with_streams(1);
    host.host_state.slots.close();
    assert_eq!(caller.refusal_now(open(1, 2)), "shutting_down");
    let answers = caller.ask(&mut host, step(1, 0, &rows(1)));
    assert_eq!(codes(&answers), [(1, "result")]);
}

#[test]
fn closed_slots_stay_empty_after_the_last_stream() {
    let (mut host, mut caller) = with_streams(2);
    let slots = Arc::clone(&host.host_state.slots);
    slots.close();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let mut emptied = runtime.spawn(async move { slots.emptied().await });
    // First by a close, then by the end of the connection.
    for left in [1, 0] {
        runtime.block_on(tokio::task::yield_now());
        assert!(!emptied.is_finished(), "{left}");
        match left {
            1 => assert_eq!(caller.ask(&mut host, close(1, 1)), []),
            _ => caller = host.caller(1),
        }
    }
    runtime.block_on(&mut emptied).unwrap();
    assert_eq!(caller.refusal_now(open(3, 1)), "shutting_down");
    host.run();
    host.assert_empty();
}
