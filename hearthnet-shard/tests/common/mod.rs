//! Hosts of the real model and a caller, for the tests in this folder.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::expect_used)]

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use hearthnet_bus::{Grant, NodeId, NodeKey};
use hearthnet_engine::{Engine, EngineOptions, Head, Span};
use hearthnet_files::{BoundaryDtype, ModelFile, WeightsId};
use hearthnet_shard::{PIPELINE, RunningHost, ShardConfig, ShardHost};
use hearthnet_transport::{
    Config, Connection, DType, Hello, Message, Step, StepResult, StreamClose, StreamOpen, Want,
    connect,
};

pub(crate) const BOUNDARY: BoundaryDtype = BoundaryDtype::F16;

/// The real model, and its properties that the caller needs.
pub(crate) struct Model {
    pub(crate) path: PathBuf,
    pub(crate) file: ModelFile,
    pub(crate) weights: WeightsId,
    pub(crate) width: usize,
}

impl Model {
    pub(crate) fn open() -> Self {
        let path = hearthnet_testkit::smollm2();
        let file = ModelFile::open(&path).unwrap();
        let weights = file.manifest(&mut |_, _| {}).weights_id();
        let width = file.spec().width as usize;
        Self {
            path,
            file,
            weights,
            width,
        }
    }

    /// Embeddings of some tokens, as the input of the first host.
    pub(crate) fn rows(&self, count: u32) -> Vec<f32> {
        let head = Head::load(&self.file, &EngineOptions::default()).unwrap();
        let ids: Vec<u32> = (0..count)
            .map(|i| i * 7919 % self.file.spec().vocab)
            .collect();
        let mut rows = Vec::new();
        head.embed(&ids, &mut rows).unwrap();
        rows
    }

    /// Output of one engine with these layers (inclusive), for all rows at once.
    pub(crate) fn computed(&self, (lo, hi): (u32, u32), rows: &[f32]) -> Vec<f32> {
        let options = EngineOptions::default();
        let mut engine = Engine::load(&self.file, lo..hi + 1, &options, &mut |_, _| {}).unwrap();
        let (seq, mut x) = (engine.open().unwrap(), rows.to_vec());
        let rows = (x.len() / self.width) as u32;
        engine
            .forward(
                &[Span {
                    seq,
                    position: 0,
                    rows,
                }],
                &mut x,
            )
            .unwrap();
        x
    }

    pub(crate) async fn host(
        &self,
        layers: (u32, u32),
        change: impl FnOnce(&mut ShardConfig),
    ) -> Host {
        let key = NodeKey::generate().unwrap();
        let caller = NodeKey::generate().unwrap();
        let mut config = ShardConfig::new(&self.path, layers, "127.0.0.1:0");
        config.serve.admitted = vec![caller.id()];
        config.expected_weights = Some(self.weights);
        change(&mut config);
        let running = ShardHost::start(config, &key, |_| {}).await.unwrap();
        Host {
            running,
            key,
            caller,
        }
    }
}

pub(crate) struct Host {
    pub(crate) running: RunningHost,
    key: NodeKey,
    caller: NodeKey,
}

impl Host {
    /// Session without receipts.
    pub(crate) async fn connect(&self, purpose: &str) -> Caller {
        self.connect_for(purpose, 0).await
    }

    /// Session with a receipt for so many positions each.
    pub(crate) async fn connect_for(&self, purpose: &str, receipts: u32) -> Caller {
        let caller = self.caller.id();
        let grant = Grant::of_session(caller, caller, self.key.id(), 60).unwrap();
        let hello = Hello::new(purpose, grant.sign(&self.caller).unwrap());
        let addr = self.running.local_addr().to_string();
        let identity = self.caller.identity().unwrap();
        let config = Config {
            receipts,
            ..Config::default()
        };
        let connection = connect(&addr, &identity, self.key.id(), hello, config).await;
        Caller(connection.unwrap())
    }

    /// Keys of the host and of the caller.
    pub(crate) fn ids(&self) -> (NodeId, NodeId) {
        (self.key.id(), self.caller.id())
    }

    /// Waits until the host's numbers satisfy `reached`.
    pub(crate) async fn until(&self, reached: impl Fn(&hearthnet_shard::Stats) -> bool) {
        let wait = async {
            while !reached(&self.running.stats()) {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(60), wait).await;
        assert!(waited.is_ok(), "{:?}", self.running.stats());
    }
}

pub(crate) struct Caller(pub(crate) Connection);

impl Caller {
    async fn tell(&self, message: Message) {
        self.0.sender().send(message).await.unwrap();
    }

    pub(crate) async fn open(&mut self, model: &Model, stream: u32, layers: (u32, u32)) {
        match self.asked_to_open(model, stream, layers).await {
            Message::StreamOpened(opened) => assert_eq!(opened.stream, stream),
            other => panic!("{other:?}"),
        }
    }

    /// The host's answer to the open of a stream.
    pub(crate) async fn asked_to_open(
        &mut self,
        model: &Model,
        stream: u32,
        layers: (u32, u32),
    ) -> Message {
        let open = StreamOpen {
            stream,
            epoch: 1,
            weights: model.weights.0,
            lo: layers.0,
            hi: layers.1,
            max_positions: 256,
            fork: None,
        };
        self.tell(Message::StreamOpen(open)).await;
        self.0.recv().await.unwrap()
    }

    pub(crate) async fn send(&self, stream: u32, position: usize, rows: &[f32], width: usize) {
        let mut data = Vec::new();
        BOUNDARY.encode(rows, &mut data);
        let step = Step {
            stream,
            epoch: 1,
            position: position as u32,
            rows: (rows.len() / width) as u32,
            width: width as u32,
            dtype: DType::F16,
            want: Want::All,
            data: Bytes::from(data),
        };
        self.tell(Message::Step(step)).await;
    }

    pub(crate) async fn close(&self, stream: u32) {
        let close = StreamClose { stream, epoch: 1 };
        self.tell(Message::StreamClose(close)).await;
    }

    pub(crate) async fn result(&mut self) -> StepResult {
        match self.0.recv().await.unwrap() {
            Message::StepResult(result) => result,
            other => panic!("{other:?}"),
        }
    }

    /// Rows of the next result.
    pub(crate) async fn rows(&mut self) -> Vec<f32> {
        let mut rows = Vec::new();
        let result = self.result().await;
        BOUNDARY.decode(&result.data, &mut rows).unwrap();
        rows
    }

    /// Runs rows through the host in steps of these lengths.
    pub(crate) async fn run(
        &mut self,
        stream: u32,
        rows: &[f32],
        width: usize,
        cuts: &[usize],
    ) -> Vec<f32> {
        let (mut out, mut position) = (Vec::new(), 0);
        for count in cuts {
            let step = &rows[position * width..(position + count) * width];
            self.send(stream, position, step, width).await;
            out.extend(self.rows().await);
            position += count;
        }
        out
    }
}

pub(crate) async fn pipeline(host: &Host) -> Caller {
    host.connect(PIPELINE).await
}

/// Equality to the bit, without printing activations.
pub(crate) fn assert_same(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    let differing = a
        .iter()
        .zip(b)
        .filter(|(a, b)| a.to_bits() != b.to_bits())
        .count();
    assert_eq!(differing, 0, "of {} values", a.len());
}
