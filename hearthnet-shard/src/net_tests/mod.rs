//! Hosts over real loopback sockets, on the arithmetic engine.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hearthnet_bus::{Capability, Descriptor, Grant, NodeId, NodeKey};
use hearthnet_files::BoundaryDtype;
use hearthnet_transport::{
    CloseCode, ConnectError, Connection, DType, Dims, Hello, Message, Step, StepResult,
    StreamClose, StreamError, StreamOpen, Tensor, Want, connect, connect_over,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::fake::{
    FakeSource, HandClock, LOSES, PANICS, Probe, WEIGHT_BYTES, WEIGHTS, WIDTH, expected, served,
};
use crate::host::{Place, start};
use crate::{BENCH, PIPELINE, RunningHost, ServeConfig, StartError};

mod ending;
mod peers;
mod record;
mod rows;
mod settings;

const STREAMS: u32 = 5;

pub(crate) fn host_key() -> NodeKey {
    NodeKey::from_secret(&[1; 32])
}

pub(crate) fn caller_key() -> NodeKey {
    NodeKey::from_secret(&[2; 32])
}

struct Host {
    running: RunningHost,
    probe: Arc<Probe>,
    clock: Arc<HandClock>,
}

fn config() -> ServeConfig {
    let mut config = ServeConfig::new("127.0.0.1:0");
    config.admitted = vec![caller_key().id()];
    config.max_concurrent_streams = STREAMS;
    config.transport.stream_opens_per_second = 10_000;
    config
}

impl Host {
    async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    async fn start_with(change: impl FnOnce(&mut ServeConfig)) -> Self {
        let mut config = config();
        change(&mut config);
        let (probe, clock) = (Arc::new(Probe::default()), Arc::new(HandClock::default()));
        let source = FakeSource(probe.clone());
        let running = start(
            config,
            Place::Alone(&host_key()),
            served(),
            source,
            clock.clone(),
            &mut |_| {},
        )
        .await;
        let running = running.unwrap();
        clock.drives(running.inbox());
        Self {
            running,
            probe,
            clock,
        }
    }

    async fn connect(&self, purpose: &str) -> Caller {
        self.try_connect(
            &caller_key(),
            purpose,
            token(&caller_key(), host_key().id()),
        )
        .await
        .unwrap()
    }

    async fn try_connect(
        &self,
        key: &NodeKey,
        purpose: &str,
        token: Vec<u8>,
    ) -> Result<Caller, ConnectError> {
        let addr = self.running.local_addr().to_string();
        let (identity, hello) = (key.identity().unwrap(), Hello::new(purpose, token));
        let config = config().transport;
        connect(&addr, &identity, host_key().id(), hello, config)
            .await
            .map(Caller)
    }

    /// Waits until the host's numbers satisfy `reached`.
    async fn until(&self, reached: impl Fn(&crate::Stats) -> bool) {
        let wait = async {
            while !reached(&self.running.stats()) {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(30), wait).await;
        assert!(waited.is_ok(), "{:?}", self.running.stats());
    }

    async fn until_empty(&self) {
        let streams = |stats: &crate::Stats| stats.streams + stats.steps_waiting;
        // Slots are free at once, the engine's memory after its next batch.
        let sequences = || self.probe.sequences.load(Ordering::SeqCst);
        self.until(|stats| streams(stats) == 0 && stats.kv_pages_used + sequences() as u64 == 0)
            .await;
        assert_eq!(self.running.stats().kv_bytes, 0);
    }
}

/// A fresh self-issued session token.
fn token(key: &NodeKey, host: NodeId) -> Vec<u8> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).unwrap();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let grant = Grant {
        issuer: key.id(),
        subject: key.id(),
        audience: host,
        scope: Capability::shard_serve(),
        not_before: now,
        expires: now + 60,
        id,
    };
    grant.sign(key).unwrap()
}

pub(crate) struct Caller(pub(crate) Connection);

impl Caller {
    pub(crate) async fn send(&self, message: Message) {
        self.0.sender().send(message).await.unwrap();
    }

    pub(crate) async fn recv(&mut self) -> Message {
        self.0.recv().await.unwrap()
    }

    pub(crate) async fn open(&mut self, stream: u32) -> Result<(), StreamError> {
        self.send(open(stream)).await;
        match self.recv().await {
            Message::StreamOpened(opened) if opened.stream == stream => Ok(()),
            Message::StreamError(error) if error.stream == stream => Err(error),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn result(&mut self) -> StepResult {
        match self.recv().await {
            Message::StepResult(result) => result,
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn open(stream: u32) -> Message {
    let (weights, epoch) = (WEIGHTS, 1);
    Message::StreamOpen(StreamOpen {
        stream,
        epoch,
        weights,
        lo: 2,
        hi: 5,
        max_positions: 2048,
    })
}

pub(crate) fn encode(rows: &[[f32; 4]]) -> Bytes {
    let mut data = Vec::new();
    BoundaryDtype::F16.encode(rows.as_flattened(), &mut data);
    data.into()
}

pub(crate) fn step(stream: u32, position: u32, rows: &[[f32; 4]]) -> Message {
    Message::Step(Step {
        stream,
        epoch: 1,
        position,
        rows: rows.len() as u32,
        width: WIDTH,
        dtype: DType::F16,
        want: Want::All,
        data: encode(rows),
    })
}

pub(crate) fn close(stream: u32) -> Message {
    Message::StreamClose(StreamClose { stream, epoch: 1 })
}

pub(crate) fn rows(count: u32) -> Vec<[f32; 4]> {
    (0..count)
        .map(|i| [(i % 50) as f32, 1.0, -2.0, 0.5])
        .collect()
}
