//! Ends of a host: by leaving, at once, by a defect.

use super::*;

/// Milliseconds of the next message, which must be LEAVING.
async fn leaving(caller: &mut Caller) -> u32 {
    match caller.recv().await {
        Message::Leaving { within_ms } => within_ms,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_leaves_tells_every_session_and_goes_when_the_last_stream_has_gone() {
    let host = Host::start().await;
    let (mut caller, mut other) = (host.connect(PIPELINE).await, host.connect(BENCH).await);
    let mut idle = host.connect(PIPELINE).await;
    // A session that the host has not accepted yet when it leaves is just closed.
    host.until(|stats| stats.sessions == 3).await;
    caller.open(1).await.unwrap();
    caller.open(2).await.unwrap();
    host.probe.shut_gate();
    caller.send(step(1, 0, &rows(1))).await;
    host.probe.wait_inside();
    let addr = host.running.local_addr();
    let Host { running, probe, .. } = host;
    let shutdown = tokio::spawn(running.shutdown(Duration::from_secs(300)));
    for caller in [&mut caller, &mut other, &mut idle] {
        let within_ms = leaving(caller).await;
        assert!((1..=300_000).contains(&within_ms), "{within_ms}");
    }
    // The host takes no more connections and no more streams.
    while tokio::net::TcpStream::connect(addr).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert_eq!(caller.open(3).await.unwrap_err().code, "shutting_down");
    probe.open_gate();
    assert_eq!(caller.result().await.rows, 1);
    // Open streams go on until they end, and so does the echo.
    for position in 1..20 {
        caller.send(step(1, position, &rows(1))).await;
        assert_eq!(caller.result().await.position, position);
    }
    other.send(step(1, 0, &rows(1))).await;
    assert_eq!(other.result().await.rows, 1);
    assert!(!shutdown.is_finished());
    caller.send(close(1)).await;
    caller.send(step(2, 0, &rows(4))).await;
    assert_eq!(caller.result().await.rows, 4);
    assert!(!shutdown.is_finished());
    caller.send(close(2)).await;
    for caller in [&mut caller, &mut other, &mut idle] {
        let closed = caller.0.recv().await.unwrap_err();
        assert_eq!((closed.code, closed.by_us), (CloseCode::Shutdown, false));
    }
    assert_eq!(shutdown.await.unwrap().streams_cut, 0);
    assert_eq!(probe.loaded.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_leaves_does_not_wait_longer_than_it_may() {
    let (host, mut caller) = with_streams(1).await;
    host.probe.shut_gate();
    caller.send(step(1, 0, &rows(1))).await;
    host.probe.wait_inside();
    let Host { running, probe, .. } = host;
    let report = running.shutdown(Duration::ZERO).await;
    assert_eq!(report.streams_cut, 1);
    let closed = loop {
        match caller.0.recv().await {
            Ok(message) => assert_eq!(message, Message::Leaving { within_ms: 0 }),
            Err(closed) => break closed,
        }
    };
    assert_eq!(closed.code, CloseCode::Shutdown);
    probe.open_gate();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_asked_twice_goes_at_once() {
    let (host, mut caller) = with_streams(1).await;
    let Host { running, .. } = host;
    let leave = running.shutdown(Duration::from_secs(300));
    tokio::select! {
        _ = leave => panic!("a stream was open"),
        within_ms = leaving(&mut caller) => assert!(within_ms > 0),
    }
    let closed = loop {
        match caller.0.recv().await {
            Ok(Message::StreamError(e)) => assert_eq!(e.code, "shutting_down"),
            Ok(other) => panic!("{other:?}"),
            Err(closed) => break closed,
        }
    };
    assert_eq!((closed.code, closed.by_us), (CloseCode::Shutdown, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_defect_of_the_engine_closes_the_sessions_and_is_told_to_the_operator() {
    let (host, mut caller) = with_streams(1).await;
    caller.send(step(1, 0, &[[PANICS; 4]])).await;
    assert_eq!(caller.0.recv().await.unwrap_err().code, CloseCode::Internal);
    host.running.failed().await;
    let report = host.running.shutdown(Duration::from_secs(30)).await;
    assert_eq!(report.streams_cut, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_device_is_gone_ends_all_streams_and_says_so_to_the_operator() {
    let (host, mut caller) = with_streams(2).await;
    caller.send(step(1, 0, &[[LOSES; 4]])).await;
    let mut ended = Vec::new();
    let closed = loop {
        match caller.0.recv().await {
            Ok(Message::StreamError(e)) => ended.push((e.stream, e.code)),
            Ok(other) => panic!("{other:?}"),
            Err(closed) => break closed,
        }
    };
    assert_eq!(closed.code, CloseCode::Internal);
    let internal = |stream| (stream, "internal".into());
    assert_eq!(ended, [internal(1), internal(2)]);
    host.running.failed().await;
    let report = host.running.shutdown(Duration::from_secs(30)).await;
    assert_eq!(report.streams_cut, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_engine_may_be_replaced_ends_all_streams_and_serves_the_next_one() {
    let (host, mut caller) = with_streams(2).await;
    host.probe.reloads.store(1, Ordering::SeqCst);
    caller.send(step(1, 0, &[[LOSES; 4]])).await;
    let mut ended = Vec::new();
    while ended.len() < 2 {
        match caller.0.recv().await.unwrap() {
            Message::StreamError(e) => ended.push((e.stream, e.code)),
            other => panic!("{other:?}"),
        }
    }
    let internal = |stream| (stream, "internal".into());
    assert_eq!(ended, [internal(1), internal(2)]);
    host.until(|stats| stats.weight_bytes == 0).await;
    caller.open(3).await.unwrap();
    assert_eq!(host.running.stats().weight_bytes, WEIGHT_BYTES);
    caller.send(step(3, 0, &rows(2))).await;
    assert_eq!(caller.result().await.rows, 2);
    // The next loss is one too many.
    caller.send(step(3, 2, &[[LOSES; 4]])).await;
    host.running.failed().await;
}
