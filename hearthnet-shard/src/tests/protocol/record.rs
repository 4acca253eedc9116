//! Stream events in the flight record.

use hearthnet_bus::flight::StreamTrace;

use super::*;

/// Stream events since the last call, as short texts.
fn story() -> Vec<String> {
    let name = |trace: &StreamTrace| format!("{}.{}", trace.stream, trace.epoch);
    let word = |event: &Event| match event {
        Event::StreamOpened { trace, .. } => Some(format!("opened {}", name(trace))),
        Event::StreamRefused { trace, code, .. } => Some(format!("refused {} {code}", name(trace))),
        Event::StreamEnded {
            trace,
            code,
            steps,
            rows,
            ..
        } => Some(format!("ended {} {code}, {steps} of {rows}", name(trace))),
        _ => None,
    };
    let recorded = RECORDED.with_borrow_mut(std::mem::take);
    recorded.iter().filter_map(word).collect()
}

#[test]
fn every_stream_epoch_ends_once() {
    let (mut host, mut caller) = with_streams(3);
    caller.ask(&mut host, step(2, 0, &rows(5)));
    for _ in 0..2 {
        assert_eq!(caller.ask(&mut host, close(1, 1)), []);
    }
    assert_eq!(
        caller.refusal(&mut host, step(2, 9, &rows(1))),
        "position_gap"
    );
    drop(caller);
    host.run();
    assert_eq!(
        story(),
        [
            "opened 1.1",
            "opened 2.1",
            "opened 3.1",
            "ended 1.1 closed, 0 of 0",
            "ended 2.1 position_gap, 1 of 6",
            "ended 3.1 session_ended, 0 of 0",
        ]
    );
}

#[test]
fn refused_streams_are_recorded_without_an_end() {
    let (mut host, mut caller) = with_streams(1);
    assert_eq!(
        caller.refusal(&mut host, open_with(7, 1, |o| o.max_positions = 0)),
        "context_full"
    );
    // The weights cannot be loaded again, so the later epoch never begins.
    caller.ask(&mut host, close(1, 1));
    host.clock.advance(EVICT);
    host.run();
    *host.probe.load_error.lock() = Some("the file is gone".into());
    assert_eq!(caller.refusal(&mut host, open(1, 2)), "weights_unavailable");
    assert_eq!(
        caller.refusal(&mut host, step(9, 0, &rows(1))),
        "unknown_stream"
    );
    assert_eq!(
        story(),
        [
            "opened 1.1",
            "refused 7.1 context_full",
            "ended 1.1 closed, 0 of 0",
            "refused 1.2 weights_unavailable",
            "refused 9.1 unknown_stream",
        ]
    );
    caller.open(&mut host, 2);
    caller.tell(open(2, 3));
    host.run();
    assert_eq!(
        story(),
        ["opened 2.1", "ended 2.1 stale_epoch, 0 of 0", "opened 2.3"]
    );
}
