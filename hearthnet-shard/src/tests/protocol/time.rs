//! Timeouts: idle streams, eviction of the weights.

use super::*;

#[test]
fn an_idle_stream_is_closed_and_one_in_use_is_not() {
    let (mut host, mut caller) = with_streams(2);
    host.clock.advance(IDLE / 2);
    caller.ask(&mut host, step(2, 0, &rows(1)));
    host.clock.advance(IDLE / 2);
    host.run();
    let answers = caller.sink.take();
    assert!(
        matches!(&answers[..], [Message::StreamError(e)] if e.stream == 1 && e.code == "idle_timeout")
    );
    assert!(host.scheduler.upkeep().is_some_and(|left| left <= IDLE / 2));
    assert_eq!(host.stats().streams, 1);
}

#[test]
fn unused_weights_are_unloaded_and_reloaded_for_the_next_stream() {
    let (mut host, mut caller) = with_streams(1);
    caller.ask(&mut host, step(1, 0, &rows(1)));
    // The weights stay while a stream is open, however old the host is.
    host.clock.advance(IDLE - Duration::from_secs(1));
    host.run();
    caller.ask(&mut host, step(1, 1, &rows(1)));
    caller.ask(&mut host, close(1, 1));
    host.clock.advance(EVICT - Duration::from_secs(1));
    assert_eq!(host.scheduler.upkeep(), Some(Duration::from_secs(1)));
    assert_eq!(host.probe.loaded.load(Ordering::SeqCst), 1);
    host.clock.advance(Duration::from_secs(1));
    assert_eq!(host.scheduler.upkeep(), None);
    assert_eq!(host.probe.loaded.load(Ordering::SeqCst), 0);
    assert_eq!((host.stats().weight_bytes, host.stats().evictions), (0, 1));

    caller.open(&mut host, 2);
    let answers = caller.ask(&mut host, step(2, 0, &rows(2)));
    assert_eq!(result(&answers).data, encode(&expected(0.0, 0, &rows(2))));
    assert_eq!(
        (host.stats().weight_bytes, host.stats().loads),
        (WEIGHT_BYTES, 2)
    );
}

#[test]
fn a_failed_reload_refuses_the_stream_and_is_retried() {
    let (mut host, mut caller) = with_streams(0);
    host.clock.advance(EVICT);
    host.run();
    *host.probe.load_error.lock() = Some("the file is gone".into());
    let answers = caller.ask(&mut host, open(1, 1));
    assert!(matches!(&answers[..], [Message::StreamError(e)]
        if e.code == "weights_unavailable" && e.message.contains("the file is gone")));
    host.assert_empty();
    let unavailable = host.host_state.events.unavailable();
    assert_eq!(unavailable.borrow().as_deref(), Some("the file is gone"));
    caller.open(&mut host, 2);
    assert_eq!(*unavailable.borrow(), None);
}
