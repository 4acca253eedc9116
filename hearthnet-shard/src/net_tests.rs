//! Hosts over real loopback sockets, on the arithmetic engine.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hearthnet_bus::{Capability, Descriptor, Grant, NodeId, NodeKey};
use hearthnet_model::BoundaryDtype;
use hearthnet_transport::{
    CloseCode, ConnectError, Connection, DType, Dims, Hello, Message, Step, StepResult,
    StreamClose, StreamError, StreamOpen, Tensor, Want, connect, connect_over,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::fake::{
    FakeSource, HandClock, PANICS, Probe, WEIGHT_BYTES, WEIGHTS, WIDTH, expected, served,
};
use crate::host::{Place, start};
use crate::life::lock;
use crate::{BENCH, PIPELINE, RunningHost, ServeConfig, StartError, StartProgress};

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
        connect(&addr, &identity, host_key().id().into(), hello, config)
            .await
            .map(Caller)
    }

    /// Waits until the host's numbers are as they should come to be.
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
        self.until(|stats| streams(stats) == 0 && stats.kv_pages_used == 0)
            .await;
        assert_eq!(self.running.stats().kv_bytes, 0);
        assert_eq!(self.probe.sequences.load(Ordering::SeqCst), 0);
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

#[tokio::test(flavor = "multi_thread")]
async fn rows_cross_the_wire_and_come_back_computed() {
    let host = Host::start().await;
    let mut caller = host.connect(PIPELINE).await;
    caller.open(1).await.unwrap();
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
    let host = Host::start().await;
    let mut caller = host.connect(PIPELINE).await;
    caller.open(1).await.unwrap();
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
    assert_eq!(descriptor.host.parse::<NodeId>(), Ok(host_key().id()));
    assert_eq!(descriptor.endpoint, host.running.local_addr().to_string());
    assert_eq!(
        (descriptor.max_concurrent_streams, descriptor.queue_depth),
        (STREAMS, 1)
    );
    assert_eq!(descriptor.vram_required_mb, 1025);
    assert_eq!(descriptor.boundary_dtype, "fp16");
    let memory = host.running.memory();
    assert_eq!(
        (memory.weight_bytes, memory.kv_bytes_per_position),
        (WEIGHT_BYTES, 10)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_does_not_get_past_the_handshake() {
    let host = Host::start().await;
    let stranger = NodeKey::from_secret(&[9; 32]);
    let token = token(&stranger, host_key().id());
    let refused = host.try_connect(&stranger, PIPELINE, token).await;
    assert!(
        matches!(refused, Err(ConnectError::NotAdmitted)),
        "{refused:?}",
        refused = refused.err()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_without_a_good_token_is_closed_with_the_tokens_code() {
    let host = Host::start().await;
    let (key, id) = (caller_key(), host_key().id());
    let used = token(&key, id);
    host.try_connect(&key, PIPELINE, used.clone())
        .await
        .unwrap();
    for (purpose, token, code) in [
        (PIPELINE, used, CloseCode::TokenReplayed),
        (PIPELINE, token(&key, key.id()), CloseCode::TokenAudience),
        (PIPELINE, token(&host_key(), id), CloseCode::TokenSubject),
        (PIPELINE, vec![1, 2, 3], CloseCode::TokenInvalid),
        ("other", token(&key, id), CloseCode::PurposeUnknown),
    ] {
        match host.try_connect(&key, purpose, token).await {
            Err(ConnectError::Closed(closed)) => assert_eq!(closed.code, code),
            other => panic!("{:?}", other.err()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_limit_holds_however_many_ask_at_once() {
    let host = Host::start().await;
    for round in 1..=5u32 {
        let mut asking = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let mut caller = host.connect(PIPELINE).await;
            asking.spawn(async move {
                // All opens are on their way before the first answer is read.
                for stream in 1..=4 {
                    caller.send(open(stream)).await;
                }
                let (mut opened, mut refused) = (0, 0);
                for _ in 0..4 {
                    match caller.recv().await {
                        Message::StreamOpened(_) => opened += 1,
                        Message::StreamError(error) if error.code == "stream_limit" => refused += 1,
                        other => panic!("{other:?}"),
                    }
                }
                (opened, refused, caller)
            });
        }
        // The callers stay connected until all have their answers.
        let callers = asking.join_all().await;
        let count = |of: fn(&(u32, u32, Caller)) -> u32| callers.iter().map(of).sum::<u32>();
        assert_eq!((count(|c| c.0), count(|c| c.1)), (STREAMS, 16 - STREAMS));
        assert_eq!(host.running.stats().streams, STREAMS);
        assert_eq!(
            host.running.stats().errors["stream_limit"],
            u64::from(round * (16 - STREAMS))
        );
        drop(callers);
        host.until_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_does_not_wait_for_the_engine() {
    let host = Host::start().await;
    let mut caller = host.connect(PIPELINE).await;
    for stream in 1..=STREAMS {
        caller.open(stream).await.unwrap();
    }
    host.probe.shut_gate();
    caller.send(step(1, 0, &rows(1))).await;
    host.probe.wait_inside();
    // The compute thread stands still, and the answer comes.
    assert_eq!(caller.open(9).await.unwrap_err().code, "stream_limit");
    host.probe.open_gate();
    assert_eq!(caller.result().await.rows, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_stream_leaves_nothing_behind_and_is_not_computed() {
    let host = Host::start().await;
    let mut caller = host.connect(PIPELINE).await;
    caller.open(1).await.unwrap();
    caller.open(2).await.unwrap();
    host.probe.shut_gate();
    caller.send(step(1, 0, &rows(1))).await;
    host.probe.wait_inside();
    for position in 0..5 {
        caller.send(step(2, position, &rows(1))).await;
    }
    host.until(|stats| stats.bytes_in == 6 * 8).await;
    caller.send(close(2)).await;
    // Its place is free while the engine still stands.
    host.until(|stats| stats.streams == 1).await;
    host.probe.open_gate();
    assert_eq!(caller.result().await.stream, 1);
    host.until(|stats| stats.dropped_steps == 5).await;
    assert_eq!(*lock(&host.probe.batches), [[1]]);
    caller.send(close(1)).await;
    host.until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_frees_its_streams_and_spares_the_others() {
    let host = Host::start().await;
    let mut lost = host.connect(PIPELINE).await;
    let mut kept = host.connect(PIPELINE).await;
    lost.open(1).await.unwrap();
    lost.open(2).await.unwrap();
    kept.open(1).await.unwrap();
    lost.send(step(1, 0, &rows(30))).await;
    lost.result().await;
    host.probe.shut_gate();
    lost.send(step(1, 30, &rows(1))).await;
    host.probe.wait_inside();
    lost.send(step(2, 0, &rows(900))).await;
    host.until(|stats| stats.bytes_in == 931 * 8).await;
    drop(lost);
    host.until(|stats| stats.sessions == 1).await;
    assert_eq!(host.running.stats().streams, 1);
    host.probe.open_gate();
    kept.send(step(1, 0, &rows(3))).await;
    assert_eq!(
        kept.result().await.data,
        encode(&expected(0.0, 0, &rows(3)))
    );
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), 1);
    drop(kept);
    host.until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_are_put_away_when_nobody_comes_and_back_when_somebody_does() {
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
    // Idle streams go first, and the weights after them.
    host.clock.advance(Duration::from_secs(300));
    assert!(matches!(caller.recv().await, Message::StreamError(e) if e.code == "idle_timeout"));
    host.clock.advance(Duration::from_secs(600));
    host.until(|stats| stats.evictions == 2).await;
}

/// Skips nothing: the next message says that the host leaves, within so many milliseconds.
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
    // Nobody gets in any more, and nobody gets a stream.
    while tokio::net::TcpStream::connect(addr).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert_eq!(caller.open(3).await.unwrap_err().code, "shutting_down");
    probe.open_gate();
    assert_eq!(caller.result().await.rows, 1);
    // What is open goes on for as long as it takes, and the echo as well.
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
    let host = Host::start().await;
    let mut caller = host.connect(PIPELINE).await;
    caller.open(1).await.unwrap();
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
    let host = Host::start().await;
    let mut caller = host.connect(PIPELINE).await;
    caller.open(1).await.unwrap();
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
    let host = Host::start().await;
    let mut caller = host.connect(PIPELINE).await;
    caller.open(1).await.unwrap();
    caller.send(step(1, 0, &[[PANICS; 4]])).await;
    assert_eq!(caller.0.recv().await.unwrap_err().code, CloseCode::Internal);
    host.running.failed().await;
    let report = host.running.shutdown(Duration::from_secs(30)).await;
    assert_eq!(report.streams_cut, 0);
}

/// A socket that can be told to read no more.
struct Deaf {
    socket: tokio::net::TcpStream,
    deaf: Arc<AtomicBool>,
}

impl AsyncRead for Deaf {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.deaf.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        Pin::new(&mut self.socket).poll_read(cx, into)
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_reads_no_answers_is_cut_off_before_they_pile_up() {
    let unread = 1 << 20;
    let host = Host::start_with(|config| {
        config.transport.send_buffer_bytes = unread;
        config.transport.max_steps_in_flight = 60_000;
    })
    .await;
    let (key, deaf) = (caller_key(), Arc::new(AtomicBool::new(false)));
    let socket = tokio::net::TcpStream::connect(host.running.local_addr())
        .await
        .unwrap();
    let io = Box::new(Deaf {
        socket,
        deaf: deaf.clone(),
    });
    let hello = Hello::new(PIPELINE, token(&key, host_key().id()));
    let identity = key.identity().unwrap();
    let id = host_key().id().into();
    let connection = connect_over(io, "host", &identity, id, hello, Default::default());
    let mut caller = Caller(connection.await.unwrap());
    caller.open(1).await.unwrap();
    deaf.store(true, Ordering::SeqCst);
    // 16 KiB each, one after the other, far more than the system's buffers hold.
    let mut sent = 0;
    while host.running.stats().sessions == 1 {
        assert!(
            sent < 8192,
            "128 MiB of answers were kept for a peer that reads none"
        );
        caller.send(step(1, 0, &rows(2048))).await;
        sent += 1;
        host.until(|stats| stats.steps == sent || stats.sessions == 0)
            .await;
    }
    host.until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bench_session_gets_back_what_it_sends() {
    let host = Host::start().await;
    let mut caller = host.connect(BENCH).await;
    for bytes in [1u32, 1168, 3 << 20] {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let dims = Dims::new(&[bytes]).unwrap();
        let tensor = Message::Tensor(Tensor {
            dtype: DType::I8,
            dims,
            data: data.into(),
        });
        caller.send(tensor.clone()).await;
        assert_eq!(caller.recv().await, tensor);
    }
    // Streams and widths of the caller's choosing; the engine is not asked.
    caller.open(1).await.unwrap();
    let data: Bytes = (0..2000u32).map(|i| i as u8).collect::<Vec<_>>().into();
    for (want, range) in [
        (Want::All, 0..2000),
        (Want::Last, 1600..2000),
        (Want::None, 0..0),
    ] {
        caller
            .send(Message::Step(Step {
                stream: 1,
                epoch: 1,
                position: 3,
                rows: 5,
                width: 200,
                dtype: DType::F16,
                want,
                data: data.clone(),
            }))
            .await;
        let result = caller.result().await;
        assert_eq!(result.rows as usize * 400, range.len());
        assert_eq!(result.data, data.slice(range));
    }
    assert_eq!(host.running.stats().turns, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_said_before_anything_is_loaded() {
    let host = Host::start().await;
    let mut config = config();
    config.listen = host.running.local_addr().to_string();
    let probe = Arc::new(Probe::default());
    let mut progress = Vec::new();
    let error = crate::ShardHost::start_on(
        config,
        &host_key(),
        served(),
        FakeSource(probe.clone()),
        &mut |step| progress.push(step),
    )
    .await
    .unwrap_err();
    assert!(matches!(error, StartError::Listen(_)), "{error}");
    assert_eq!(error.code(), "listen");
    assert_eq!(progress, []);
    assert_eq!(probe.loaded.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_reports_its_progress_and_its_failure() {
    let probe = Arc::new(Probe::default());
    *lock(&probe.load_error) = Some("tensor x is damaged".into());
    let mut progress = Vec::new();
    let source = FakeSource(probe.clone());
    let error = crate::ShardHost::start_on(config(), &host_key(), served(), source, &mut |step| {
        progress.push(step);
    })
    .await
    .unwrap_err();
    assert!(error.to_string().contains("tensor x is damaged"), "{error}");
    assert_eq!(error.code(), "weights_unavailable");
    let total = WEIGHT_BYTES;
    assert_eq!(progress, [StartProgress::Verifying { done: total, total }]);
}

#[tokio::test]
async fn nonsense_settings_are_refused_by_name() {
    type Change = fn(&mut ServeConfig);
    let cases: [(&str, Change); 9] = [
        ("max_concurrent_streams", |c| c.max_concurrent_streams = 0),
        ("max_streams_per_caller", |c| c.max_streams_per_caller = 0),
        ("max_positions", |c| c.max_positions = Some(0)),
        ("max_waiting_steps", |c| c.max_waiting_steps = 0),
        ("max_waiting_steps_per_caller", |c| {
            c.max_waiting_steps_per_caller = 0;
        }),
        ("kv_share_per_caller", |c| c.kv_share_per_caller = 0),
        ("kv_share_per_caller", |c| c.kv_share_per_caller = 101),
        ("stream_idle", |c| c.stream_idle = Duration::ZERO),
        ("clock_skew_secs", |c| c.clock_skew_secs = 301),
    ];
    for (name, change) in cases {
        let mut config = config();
        change(&mut config);
        let source = FakeSource(Arc::new(Probe::default()));
        let started =
            crate::ShardHost::start_on(config, &host_key(), served(), source, &mut |_| {}).await;
        assert!(started.unwrap_err().to_string().starts_with(name));
    }
}
