//! A file that changes while its weights are unloaded.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use hearthnet_transport::Message;

use crate::common::{Model, pipeline};

#[tokio::test(flavor = "multi_thread")]
async fn weights_that_changed_on_disk_are_not_served_again() {
    let model = Model::open();
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("model.gguf");
    let mut bytes = std::fs::read(&model.path).unwrap();
    std::fs::write(&copy, &bytes).unwrap();
    let host = model
        .host((29, 29), |config| {
            config.model = copy.clone();
            config.serve.evict_after = Some(Duration::from_millis(1));
        })
        .await;
    host.until(|stats| stats.evictions == 1).await;
    // Flip a bit in the last tensor of the last layer.
    let gguf = model.file.gguf();
    let last = model.file.layer_tensors(29).last().unwrap();
    let data = gguf.data(last);
    let at = bytes
        .windows(data.len())
        .position(|window| window == data)
        .unwrap();
    bytes[at + data.len() / 2] ^= 1;
    let other = folder.path().join("other");
    std::fs::write(&other, &bytes).unwrap();
    std::fs::rename(&other, &copy).unwrap();
    let mut caller = pipeline(&host).await;
    match caller.asked_to_open(&model, 1, (29, 29)).await {
        Message::StreamError(error) => {
            assert_eq!(error.code, "weights_unavailable");
            assert!(error.message.contains(&last.name), "{}", error.message);
        }
        other => panic!("{other:?}"),
    }
    let reason = host.running.unavailable().await;
    assert!(reason.contains(&last.name), "{reason}");
}
