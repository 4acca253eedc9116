//! Unused weights are released to the system. In a binary of its own, because it measures the
//! memory of the whole process.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::{Model, assert_same, pipeline};

#[tokio::test(flavor = "multi_thread")]
#[cfg(target_os = "linux")]
async fn unloaded_weights_free_their_memory_and_reload_unchanged() {
    let model = Model::open();
    let rows = model.rows(5);
    let expected = model.computed((0, 29), &rows);
    let host = model
        .host((0, 29), |config| {
            config.serve.stream_idle = Duration::from_secs(3600);
            config.serve.evict_after = Some(Duration::from_millis(1));
        })
        .await;
    // Twice, because an allocator may keep freed memory once for the next time.
    for round in 1..=2 {
        let mut caller = pipeline(&host).await;
        caller.open(&model, 1, (0, 29)).await;
        let out = caller.run(1, &rows, model.width, &[3, 2]).await;
        assert_same(&out, &expected);
        let with = host.running.memory();
        let evictions = host.running.stats().evictions;
        drop(caller);
        host.until(|stats| stats.evictions > evictions).await;
        let without = host.running.memory();
        let freed = with
            .resident_bytes
            .unwrap()
            .saturating_sub(without.resident_bytes.unwrap());
        assert!(
            freed * 10 >= with.weight_bytes * 9,
            "round {round}: {freed} of {} bytes were given back",
            with.weight_bytes
        );
        assert_eq!(
            (without.weight_bytes, host.running.stats().kv_bytes),
            (0, 0)
        );
    }
}
