//! Hosts of the real model compute the same bits as a single engine.
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_bus::receipt::{Claim, Inputs, Statement};
use hearthnet_engine::ARITHMETIC;
use hearthnet_shard::{PIPELINE, ShardConfig, ShardHost, StartError};
use hearthnet_transport::Message;

use crate::common::{self, Model, assert_same, pipeline};

#[tokio::test(flavor = "multi_thread")]
async fn two_hosts_compute_what_one_engine_computes() {
    let model = Model::open();
    let rows = model.rows(48);
    let whole = model.computed((0, 29), &rows);
    let first = model.host((0, 12), |_| {}).await;
    let second = model.host((13, 29), |_| {}).await;
    let (mut a, mut b) = (pipeline(&first).await, pipeline(&second).await);
    a.open(&model, 1, (0, 12)).await;
    b.open(&model, 1, (13, 29)).await;
    // A prompt in two chunks, cut differently for each host, then single rows.
    let middle = a.run(1, &rows, model.width, &[40, 4, 1, 1, 1, 1]).await;
    let out = b.run(1, &middle, model.width, &[17, 27, 1, 1, 1, 1]).await;
    assert_same(&out, &whole);

    // The same rows again, from an earlier position: the first run leaves no trace.
    a.send(1, 20, &rows[20 * model.width..], model.width).await;
    assert_same(&a.rows().await, &middle[20 * model.width..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_share_batches_do_not_touch_each_other() {
    let model = Model::open();
    let rows = model.rows(24);
    let range = (3, 6);
    let host = model.host((2, 8), |_| {}).await;
    let width = model.width;
    let alone = model.computed(range, &rows);
    let mut tasks = tokio::task::JoinSet::new();
    for cuts in [vec![24], vec![9, 15], vec![1; 24], vec![12, 1, 1, 10]] {
        // Some streams use a part of the host's layers, some use all of them.
        for layers in [range, (2, 8)] {
            let mut caller = pipeline(&host).await;
            caller.open(&model, 7, layers).await;
            let (rows, cuts) = (rows.clone(), cuts.clone());
            tasks.spawn(async move { (layers, caller.run(7, &rows, width, &cuts).await) });
        }
    }
    let all = model.computed((2, 8), &rows);
    for (layers, out) in tasks.join_all().await {
        assert_same(&out, if layers == range { &alone } else { &all });
    }
    host.until(|stats| stats.streams == 0 && stats.kv_bytes == 0)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_signs_what_it_received_and_returned() {
    let model = Model::open();
    let (rows, layers, width) = (model.rows(40), (3, 6), model.width);
    let host = model.host((2, 8), |_| {}).await;
    let (host_id, caller_id) = host.ids();
    // The host signs no more often than every 64 positions, so only the end of the stream is signed.
    let mut caller = host.connect_for(PIPELINE, 1).await;
    caller.open(&model, 1, layers).await;
    let (mut inputs, mut chain, mut position) = (Inputs::default(), [0; 32], 0);
    for count in [24, 15, 1] {
        let sent = &rows[position * width..(position + count) * width];
        caller.send(1, position, sent, width).await;
        let result = caller.result().await;
        let mut data = Vec::new();
        common::BOUNDARY.encode(sent, &mut data);
        assert!(inputs.extend(position as u32, &data, 2 * width));
        let claim = Claim::new(&inputs, result.rows, &result.data).unwrap();
        chain = claim.after(chain);
        position += count;
    }
    caller.close(1).await;
    let Message::Receipt(receipt) = caller.0.recv().await.unwrap() else {
        panic!("no receipt");
    };
    let statement = Statement {
        host: host_id,
        caller: caller_id,
        weights: model.weights.0,
        layers,
        arithmetic: ARITHMETIC.into(),
        stream: 1,
        epoch: 1,
        claims: 3,
        chain,
    };
    assert_eq!((receipt.claims.get(), receipt.chain), (3, chain));
    assert_eq!(statement.verify(&receipt.signature), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preempted_stream_is_replayed_to_the_same_bits() {
    let model = Model::open();
    let (rows, layers, width) = (model.rows(100), (3, 6), model.width);
    let all = model.computed(layers, &rows);
    let (head, tail) = rows.split_at(96 * width);
    // Eight pages of 32 positions, enough for one stream at its limit; each of three streams comes
    // to need four.
    let memory = model.host(layers, |_| {}).await.running.memory();
    let budget = memory.kv_bytes_per_position * 256;
    let host = model
        .host(layers, |config| config.serve.kv_budget_bytes = budget)
        .await;
    assert_eq!(host.running.stats().kv_pages_left, 8);
    let mut caller = pipeline(&host).await;
    for stream in 1..=3 {
        caller.open(&model, stream, layers).await;
        // Three pages each: the third finds only two, and is the least progressed.
        caller.send(stream, 0, head, width).await;
        if stream < 3 {
            assert_eq!(caller.result().await.rows, 96);
        }
    }
    match caller.0.recv().await.unwrap() {
        Message::StreamError(e) => assert_eq!((e.stream, e.code.as_str()), (3, "preempted")),
        other => panic!("{other:?}"),
    }
    // The host frees the slot after it has told the caller the cause.
    host.until(|stats| (stats.preempted, stats.streams, stats.kv_pages_used) == (1, 2, 6))
        .await;
    // The others go on into a fourth page; then one ends, and the third opens again.
    for stream in 1..=2 {
        caller.send(stream, 96, tail, width).await;
        assert_same(&caller.rows().await, &all[96 * width..]);
        assert!(host.running.stats().kv_bytes <= budget);
    }
    caller.close(1).await;
    caller.open(&model, 4, layers).await;
    let out = caller.run(4, &rows, width, &[64, 32, 4]).await;
    assert_same(&out, &all);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_takes_memory_for_its_layers_only() {
    let model = Model::open();
    let small = model.host((0, 2), |_| {}).await.running.memory();
    let large = model.host((0, 29), |_| {}).await.running.memory();
    assert_eq!(small.weight_bytes * 10, large.weight_bytes);
    assert_eq!(
        small.kv_bytes_per_position * 10,
        large.kv_bytes_per_position
    );
    let in_file: u64 = (0..3).map(|layer| model.file.layer_bytes(layer)).sum();
    assert!(small.weight_bytes >= in_file && small.weight_bytes < in_file * 2);
}

#[tokio::test]
async fn unservable_layers_fail_the_start() {
    let model = Model::open();
    let key = hearthnet_bus::NodeKey::from_secret(&[1; 32]);
    let start = |config: ShardConfig| ShardHost::start(config, &key, |_| {});
    for layers in [(0, 30), (30, 30), (5, 4), (0, u32::MAX)] {
        let error = start(ShardConfig::new(&model.path, layers, "127.0.0.1:0"))
            .await
            .unwrap_err();
        assert!(
            matches!(error, StartError::LayerRange { total: 30, .. }),
            "{error}"
        );
    }
    let mut config = ShardConfig::new(&model.path, (0, 1), "127.0.0.1:0");
    config.expected_weights = Some(hearthnet_files::WeightsId([0; 32]));
    assert_eq!(start(config).await.unwrap_err().code(), "weights_mismatch");
    let config = ShardConfig::new("/nonexistent/model.gguf", (0, 1), "127.0.0.1:0");
    assert_eq!(start(config).await.unwrap_err().code(), "model_unusable");
}
