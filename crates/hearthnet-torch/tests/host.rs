//! Host with a libtorch engine.
#![cfg(feature = "libtorch")]
#![allow(clippy::unwrap_used)]

mod common;

use common::options;
use hearthnet_bus::NodeKey;
use hearthnet_shard::{ShardConfig, ShardHost};
use hearthnet_testkit::TinyLlama;
use hearthnet_torch::{Dtype, start};

#[tokio::test(flavor = "multi_thread")]
async fn a_host_advertises_its_arithmetic() {
    let folder = tempfile::tempdir().unwrap();
    let path = TinyLlama::default().write(folder.path());
    let config = ShardConfig::new(path, (0, 1), "127.0.0.1:0");
    let key = NodeKey::generate().unwrap();
    let exact = ShardHost::start(config.clone(), &key, |_| {})
        .await
        .unwrap();
    let torch = start(config, options(Dtype::Bf16), &key, |_| {})
        .await
        .unwrap();
    let (exact, torch) = (exact.descriptor(), torch.descriptor());
    assert_eq!(exact.arithmetic, "canonical-1");
    assert_eq!(torch.arithmetic, "torch-cpu-bf16");
    assert_eq!(torch.weights_sha256, exact.weights_sha256);
    assert_eq!(torch.boundary_dtype, exact.boundary_dtype);
}
