//! Hosts over real loopback sockets, on the arithmetic engine.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hearthnet_bus::{Descriptor, NodeKey};
use hearthnet_transport::{
    CloseCode, ConnectError, Connection, DType, Dims, Hello, Message, Step, StepResult,
    StreamClose, StreamError, Tensor, Want, connect, connect_over,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::fake::{
    FakeSource, HandClock, LOSES, PANICS, Probe, WEIGHT_BYTES, encode, expected, open_for, served,
    step_of,
};
use super::{caller_key, host_key, rows, step};
use crate::host::{Place, start};
use crate::{BENCH, PIPELINE, RunningHost, ServeConfig, StartError};

mod ending;
mod peers;
mod record;
mod rows;
mod settings;

const STREAMS: u32 = 5;

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
        let key = caller_key();
        self.try_connect(&key, purpose, token(&key)).await.unwrap()
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

/// A host, and a caller with the streams 1 to `count`.
async fn with_streams(count: u32) -> (Host, Caller) {
    let host = Host::start().await;
    let mut caller = host.connect(PIPELINE).await;
    for stream in 1..=count {
        caller.open(stream).await.unwrap();
    }
    (host, caller)
}

/// A fresh self-issued session token.
fn token(key: &NodeKey) -> Vec<u8> {
    super::token(key, key, |_| {})
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
    Message::StreamOpen(open_for(stream, 1, 2048))
}

pub(crate) fn close(stream: u32) -> Message {
    Message::StreamClose(StreamClose { stream, epoch: 1 })
}
