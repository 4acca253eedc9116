//! Rows over the wire, and the messages around them.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn rows_cross_the_wire_and_come_back_computed() {
    let (host, mut caller) = with_streams(1).await;
    caller.send(step(1, 0, &rows(2048))).await;
    let result = caller.result().await;
    assert_eq!((result.rows, result.position), (2048, 0));
    assert_eq!(result.data, encode(&expected(0.0, 0, &rows(2048))));
    caller.send(step(1, 7, &rows(1))).await;
    assert_eq!(
        caller.result().await.data,
        encode(&expected(6.0, 7, &rows(1)))
    );
    caller.send(close(1)).await;
    host.until_empty().await;
    let stats = host.running.stats();
    assert_eq!(
        (stats.steps, stats.bytes_in, stats.bytes_out),
        (2, 2049 * 8, 2049 * 8)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_descriptor_says_what_is_served_and_how_busy_it_is() {
    let (host, mut caller) = with_streams(1).await;
    let descriptor = host.running.descriptor();
    caller.send(Message::Describe).await;
    let told = caller.recv().await;
    assert_eq!(
        told,
        Message::Descriptor(descriptor.to_cbor().unwrap().into())
    );
    assert_eq!(
        Descriptor::from_cbor(&descriptor.to_cbor().unwrap()),
        Ok(descriptor.clone())
    );
    assert_eq!(descriptor.shard_id, "fake:2-5");
    assert_eq!(descriptor.weights_sha256, "07".repeat(32));
    assert_eq!(
        (descriptor.layer_range, descriptor.total_layers),
        ((2, 5), 8)
    );
    assert_eq!(descriptor.host, host_key().id());
    assert_eq!(descriptor.endpoint, host.running.local_addr().to_string());
    assert_eq!(
        (descriptor.max_concurrent_streams, descriptor.queue_depth),
        (STREAMS, 1)
    );
    let memory = (descriptor.weights_mb, descriptor.kv_mb);
    assert_eq!((descriptor.vram_required_mb, memory), (1025, (1, 1024)));
    assert_eq!(descriptor.boundary_dtype, "fp16");
    let memory = host.running.memory();
    assert_eq!(
        (memory.weight_bytes, memory.kv_bytes_per_position),
        (WEIGHT_BYTES, 10)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_does_not_wait_for_the_engine() {
    let (host, mut caller) = with_streams(STREAMS).await;
    host.probe.shut_gate();
    caller.send(step(1, 0, &rows(1))).await;
    host.probe.wait_inside();
    // The refusal arrives while the compute thread is blocked.
    assert_eq!(caller.open(9).await.unwrap_err().code, "stream_limit");
    host.probe.open_gate();
    assert_eq!(caller.result().await.rows, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_stream_is_freed_and_not_computed() {
    let (host, mut caller) = with_streams(2).await;
    host.probe.shut_gate();
    caller.send(step(1, 0, &rows(1))).await;
    host.probe.wait_inside();
    for position in 0..5 {
        caller.send(step(2, position, &rows(1))).await;
    }
    host.until(|stats| stats.bytes_in == 6 * 8).await;
    caller.send(close(2)).await;
    // The slot is free while the engine is still blocked.
    host.until(|stats| stats.streams == 1).await;
    host.probe.open_gate();
    assert_eq!(caller.result().await.stream, 1);
    host.until(|stats| stats.dropped_steps == 5).await;
    assert_eq!(*host.probe.batches.lock(), [[1]]);
    caller.send(close(1)).await;
    host.until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_are_unloaded_without_streams_and_reloaded_for_the_next() {
    let host = Host::start().await;
    assert_eq!(host.running.memory().weight_bytes, WEIGHT_BYTES);
    host.clock.advance(Duration::from_secs(600));
    host.until(|stats| stats.evictions == 1).await;
    assert_eq!(host.probe.loaded.load(Ordering::SeqCst), 0);
    assert_eq!(host.running.memory().weight_bytes, 0);
    let mut caller = host.connect(PIPELINE).await;
    caller.open(1).await.unwrap();
    caller.send(step(1, 0, &rows(3))).await;
    assert_eq!(
        caller.result().await.data,
        encode(&expected(0.0, 0, &rows(3)))
    );
    assert_eq!(host.running.memory().weight_bytes, WEIGHT_BYTES);
    // Idle streams are closed first, then the weights are unloaded.
    host.clock.advance(Duration::from_secs(300));
    assert!(matches!(caller.recv().await, Message::StreamError(e) if e.code == "idle_timeout"));
    host.clock.advance(Duration::from_secs(600));
    host.until(|stats| stats.evictions == 2).await;
}
