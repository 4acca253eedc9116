//! Sessions over real TCP, TLS and WebSockets on the loopback interface.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use hearthnet_testkit::raw::{
    Credentials, Frame as RawFrame, Hello as RawHello, Message as RawMessage, Peer, connector,
    kind, opcode,
};
use hearthnet_transport::{
    Admission, CloseCode, Code, Config, ConnectError, Connection, DType, Deadlines, Handler, Hello,
    Identity, Listener, Message, NodeId, RefusedConnection, SendError, StreamClose, StreamOpened,
    connect,
};
use parking_lot::Mutex;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{answer, ended, next_step, noise, open_stream, row, serve_echo, step, tensor};

const TOKEN: &[u8] = b"let me in";

fn secret() -> [u8; 32] {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).unwrap();
    secret
}

fn identity() -> Identity {
    Identity::from_secret(&secret()).unwrap()
}

/// Admits one key, with one token, for two purposes, and records why connections were refused.
struct Admit(NodeId, Arc<Mutex<Vec<Code>>>);

impl Admission for Admit {
    fn admit_peer(&self, key: &NodeId) -> bool {
        *key == self.0
    }

    fn admit_hello(&self, key: &NodeId, hello: &Hello, now: u64) -> Result<(), CloseCode> {
        assert_eq!(*key, self.0);
        assert!(now > 1_700_000_000);
        match (hello.purpose.as_str(), hello.token.as_slice()) {
            ("bench", TOKEN) | ("raw", b"") => Ok(()),
            ("bench", _) => Err(CloseCode::TokenInvalid),
            _ => Err(CloseCode::PurposeUnknown),
        }
    }

    fn connection_refused(&self, why: &RefusedConnection) {
        self.1.lock().push(why.code());
    }
}

struct Net {
    host: NodeId,
    caller: Identity,
    caller_secret: [u8; 32],
    addr: String,
    listener: Listener,
    refused: Arc<Mutex<Vec<Code>>>,
}

async fn net(config: Config) -> Net {
    let host = identity();
    let caller_secret = secret();
    let caller = Identity::from_secret(&caller_secret).unwrap();
    let refused = Arc::<Mutex<Vec<Code>>>::default();
    let admission = Arc::new(Admit(caller.key(), refused.clone()));
    let listening = Listener::bind("127.0.0.1:0", &host, admission, config, &[]);
    let listener = listening.await.unwrap();
    let addr = listener.local_addr().to_string();
    Net {
        host: host.key(),
        caller,
        caller_secret,
        addr,
        listener,
        refused,
    }
}

impl Net {
    async fn connect(&self) -> Result<Connection, ConnectError> {
        let hello = Hello::new("bench", TOKEN);
        connect(
            &self.addr,
            &self.caller,
            self.host,
            hello,
            Config::default(),
        )
        .await
    }

    /// Both ends of an open session.
    async fn pair(&mut self) -> (Connection, Connection) {
        let caller = self.connect().await.unwrap();
        (caller, self.listener.session().await)
    }

    /// A raw peer with the caller's key, after the WebSocket upgrade.
    async fn raw(&self) -> Peer {
        let addr = self.addr.parse().unwrap();
        let credentials = Credentials::of(&self.caller_secret);
        Peer::upgraded(addr, &credentials).await.unwrap()
    }

    /// Codes of the connections that the host refused, once they are `count`.
    async fn refusals(&self, count: usize) -> Vec<Code> {
        let counted = async {
            while self.refused.lock().len() < count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let counted = tokio::time::timeout(Duration::from_secs(60), counted);
        counted.await.unwrap();
        self.refused.lock().clone()
    }

    /// In TLS 1.3 a client learns of its refusal when it first reads.
    async fn refuses_after_tls(&self, credentials: &Credentials) {
        let tcp = TcpStream::connect(&self.addr).await.unwrap();
        let name = ServerName::try_from("any.example").unwrap();
        let connector = connector(credentials).unwrap();
        if let Ok(mut stream) = connector.connect(name, tcp).await {
            let read = stream.read(&mut [0]).await;
            assert!(read.is_err(), "the connection goes on");
        }
    }
}

async fn next_result(connection: &mut Connection) -> hearthnet_transport::StepResult {
    match connection.recv().await.unwrap() {
        Message::StepResult(result) => result,
        other => panic!("{other:?}"),
    }
}

// ------------------------------------------------------------------ two processes

/// Host for the tests below, in a process of its own. Does nothing unless a test starts it.
#[test]
fn host_process() {
    let Ok(keys) = std::env::var("HEARTHNET_TRANSPORT_TEST_HOST") else {
        return;
    };
    let bytes = hex::decode(keys).unwrap();
    let identity = Identity::from_secret(&bytes[..32].try_into().unwrap()).unwrap();
    let caller = NodeId::from_bytes(bytes[32..].try_into().unwrap()).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let admission = Arc::new(Admit(caller, Arc::default()));
        let config = Config::default();
        let listening = Listener::bind("127.0.0.1:0", &identity, admission, config, &[]);
        let mut listener = listening.await.unwrap();
        println!("\nlistening {}", listener.local_addr());
        serve_echo(listener.session().await).await;
    });
}

/// A host process that ends with its handle.
struct HostProcess {
    child: Child,
    addr: String,
    key: NodeId,
    caller: Identity,
}

impl HostProcess {
    fn start() -> HostProcess {
        let (secret, caller) = (secret(), identity());
        let keys = hex::encode([secret, *caller.key().as_bytes()].concat());
        let args = "--exact loopback::host_process --nocapture --test-threads=1";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(args.split(' '))
            .env("HEARTHNET_TRANSPORT_TEST_HOST", keys)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let addr = lines
            .map(Result::unwrap)
            .find_map(|line| Some(line.strip_prefix("listening ")?.to_owned()))
            .unwrap();
        let key = Identity::from_secret(&secret).unwrap().key();
        HostProcess {
            child,
            addr,
            key,
            caller,
        }
    }

    async fn connect(&self) -> Connection {
        let hello = Hello::new("bench", TOKEN);
        connect(&self.addr, &self.caller, self.key, hello, Config::default())
            .await
            .unwrap()
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_tensors_cross_between_two_processes_and_back() {
    let host = HostProcess::start();
    let mut connection = host.connect().await;
    let sender = connection.sender();
    let small = [1, 100, 4096, 65_535, 65_536, 65_537];
    let large = [1 << 20, (1 << 20) + 1, 5 << 20, 9_999_991];
    let sent: Vec<_> = small
        .into_iter()
        .chain(large)
        .map(|size| tensor(&[u32::try_from(size).unwrap()], DType::I8, noise(size)))
        .collect();
    let to_send = sent.clone();
    let sending = tokio::spawn(async move {
        for tensor in to_send {
            sender.send(Message::Tensor(tensor)).await.unwrap();
        }
    });
    let mut left = sent;
    while !left.is_empty() {
        let Message::Tensor(got) = connection.recv().await.unwrap() else {
            panic!("no tensor")
        };
        let at = left.iter().position(|tensor| *tensor == got);
        left.remove(at.expect("a tensor nobody sent"));
    }
    sending.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_of_every_size_cross_between_two_processes() {
    let host = HostProcess::start();
    let mut connection = host.connect().await;
    let sender = connection.sender();
    let open = Message::StreamOpen(open_stream(1, 0));
    sender.send(open).await.unwrap();
    let (stream, epoch) = (1, 0);
    let opened = Message::StreamOpened(StreamOpened { stream, epoch });
    assert_eq!(connection.recv().await.unwrap(), opened);
    let mut position = 0;
    for rows in [1u32, 1, 56, 57, 1, 910, 4000, 1] {
        let asked = step(1, 0, position, rows, noise(rows as usize * 1152));
        sender.send(Message::Step(asked.clone())).await.unwrap();
        assert_eq!(next_result(&mut connection).await, asked.echo());
        position += rows;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_dies_is_noticed_at_once() {
    let mut host = HostProcess::start();
    let mut connection = host.connect().await;
    host.child.kill().unwrap();
    ended(connection.recv().await, CloseCode::Lost, false);
    let late = Message::StreamOpen(open_stream(1, 0));
    let late = connection.sender().send(late).await;
    assert!(matches!(late, Err(SendError::Closed(closed)) if closed.code == CloseCode::Lost));
}

// ---------------------------------------------------------------------- identity

#[tokio::test(flavor = "multi_thread")]
async fn another_hosts_key_is_an_identity_mismatch_that_names_both() {
    let net = net(Config::default()).await;
    let expected = identity().key();
    let hello = Hello::new("bench", TOKEN);
    match connect(&net.addr, &net.caller, expected, hello, Config::default()).await {
        Err(ConnectError::IdentityMismatch { expected: e, found }) => {
            assert_eq!((e, found), (expected, net.host));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_not_admitted_is_told_so_every_time() {
    let net = net(Config::default()).await;
    for _ in 0..20 {
        let stranger = identity();
        let hello = Hello::new("bench", TOKEN);
        let refused = connect(&net.addr, &stranger, net.host, hello, Config::default()).await;
        assert!(
            matches!(refused, Err(ConnectError::Refused { by, code: CloseCode::Unauthorized }) if by == net.host),
            "{refused:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_without_a_proved_ed25519_key_is_refused() {
    let net = net(Config::default()).await;
    let pair = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let certificate = CertificateParams::default().self_signed(&pair).unwrap();
    let of_another_kind = Credentials {
        certificate: Some(certificate.der().to_vec()),
        key: pair.serialize_der(),
    };
    // The certificate of another key, none at all, and one with a key that is not Ed25519.
    let forged = Credentials::forged(net.caller.certificate(), &secret());
    for credentials in [forged, Credentials::none(), of_another_kind] {
        net.refuses_after_tls(&credentials).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_purposes_and_tokens_end_with_their_own_codes() {
    let net = net(Config::default()).await;
    for (purpose, token, code) in [
        ("bench", &b"wrong"[..], CloseCode::TokenInvalid),
        ("coffee", TOKEN, CloseCode::PurposeUnknown),
    ] {
        let hello = Hello::new(purpose, token);
        let refused = connect(&net.addr, &net.caller, net.host, hello, Config::default())
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Some(code));
        assert!(matches!(refused, ConnectError::Closed(closed) if !closed.by_us));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_without_a_listener_is_unreachable() {
    let net = net(Config::default()).await;
    let addr = net.addr.clone();
    drop(net.listener);
    // The accept loop ends with the listener; until then, connections are reset.
    let hello = Hello::new("bench", TOKEN);
    match connect(&addr, &net.caller, net.host, hello, Config::default()).await {
        Err(ConnectError::Unreachable { .. } | ConnectError::Handshake { .. }) => {}
        other => panic!("{other:?}"),
    }
}

// ------------------------------------------------------------------------ limits

#[tokio::test(flavor = "multi_thread")]
async fn sessions_beyond_the_limit_are_refused_until_one_ends() {
    let mut net = net(Config {
        max_sessions: 2,
        ..Config::default()
    })
    .await;
    let first = net.pair().await;
    let _second = net.pair().await;
    let refused = net.connect().await.unwrap_err();
    assert_eq!(refused.code(), Some(CloseCode::SessionLimit));
    drop(first);
    // The permit is free when the connection is gone, shortly after.
    let again = async {
        loop {
            match net.connect().await {
                Ok(connection) => break connection,
                Err(error) => assert_eq!(error.code(), Some(CloseCode::SessionLimit)),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), again)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_connections_beyond_the_limit_make_room_for_new_ones() {
    // Longer than the test, so that idle connections are not closed by their deadline.
    let deadlines = Deadlines {
        tls: Duration::from_secs(600),
        ..Deadlines::default()
    };
    let config = Config {
        max_handshakes_per_address: 3,
        deadlines,
        ..Config::default()
    };
    let mut net = net(config).await;
    let mut idle = Vec::new();
    for _ in 0..10 {
        idle.push(TcpStream::connect(&net.addr).await.unwrap());
    }
    // They are accepted in order: the host closes all but the last three.
    for stream in &mut idle[..7] {
        let mut byte = [0];
        assert!(matches!(stream.read(&mut byte).await, Ok(0) | Err(_)));
    }
    // The idle ones keep no caller out: the oldest is evicted for the first caller, and from then
    // on an admitted peer is known at its address.
    for _ in 0..4 {
        let _caller = net.connect().await.unwrap();
        net.listener.session().await;
    }
    assert_eq!(
        net.refusals(8).await,
        vec![Code::new("connection_limit"); 8]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_that_is_no_http_is_refused_as_such() {
    let net = net(Config::default()).await;
    let tcp = TcpStream::connect(&net.addr).await.unwrap();
    let name = ServerName::try_from("any.example").unwrap();
    let connector = connector(&Credentials::of(&net.caller_secret)).unwrap();
    let mut stream = connector.connect(name, tcp).await.unwrap();
    stream.write_all(b"no http\r\n\r\n").await.unwrap();
    // The host closes the connection.
    while let Ok(1..) = stream.read(&mut [0; 64]).await {}
    assert_eq!(net.refusals(1).await, [Code::new("upgrade_failed")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_broken_below_the_frames_end_with_their_own_close_codes() {
    let mut net = net(Config::default()).await;
    let hello = RawHello::new("raw", Vec::new());
    let text = || RawMessage::of(opcode::TEXT, *b"hello");
    async fn ends(mut raw: Peer, code: CloseCode) {
        assert_eq!(raw.ending().await.close, Some(code.number()));
    }

    // Before HELLO.
    let mut raw = net.raw().await;
    raw.send(text()).await;
    ends(raw, CloseCode::WebSocket).await;
    let mut raw = net.raw().await;
    raw.send(RawMessage::binary(vec![0; 4097])).await;
    ends(raw, CloseCode::FrameTooBig).await;
    let mut raw = net.raw().await;
    raw.send(RawFrame::ping()).await;
    ends(raw, CloseCode::ProtocolState).await;
    let mut raw = net.raw().await;
    raw.send(RawFrame::new(kind::HELLO, *b"not a map")).await;
    ends(raw, CloseCode::BodyMalformed).await;
    let mut raw = net.raw().await;
    for _ in 0..100 {
        // (The host may close before all of them are written.)
        raw.send(RawMessage::of(opcode::PING, [])).await;
    }
    drop(raw);

    // After HELLO.
    let mut raw = net.raw().await.greeted(&hello).await.unwrap();
    let mut session = net.listener.session().await;
    assert_eq!(session.purpose(), "raw");
    raw.send(RawMessage::binary(vec![0; 2 << 20])).await;
    ends(raw, CloseCode::FrameTooBig).await;
    ended(session.recv().await, CloseCode::FrameTooBig, true);

    let mut raw = net.raw().await.greeted(&hello).await.unwrap();
    let mut session = net.listener.session().await;
    raw.send(text()).await;
    ends(raw, CloseCode::WebSocket).await;
    assert_eq!(session.recv().await.unwrap_err().code, CloseCode::WebSocket);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_paths_are_not_found() {
    let net = net(Config::default()).await;
    let addr = net.addr.parse().unwrap();
    let credentials = Credentials::of(&net.caller_secret);
    let mut peer = Peer::secured(addr, &credentials).await.unwrap();
    let answer = peer.upgrade_at("/other").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
}

// ----------------------------------------------------------------------- sending

#[tokio::test(flavor = "multi_thread")]
async fn sending_waits_for_a_slot_and_cancels_cleanly() {
    let config = Config {
        max_steps_in_flight: 1,
        ..Config::default()
    };
    let mut net = net(config).await;
    let (mut caller, mut host) = net.pair().await;
    let sender = caller.sender();
    let asked = |position| Message::Step(row(1, 0, position));
    sender.send(asked(0)).await.unwrap();
    let frames = caller.stats().frames_sent;
    // Polled once, then dropped: nothing was sent.
    assert!(sender.send(asked(1)).now_or_never().is_none());
    assert!(sender.try_send(asked(1)).unwrap().is_some());
    assert_eq!(caller.stats().frames_sent, frames);
    assert_eq!(caller.stats().steps_in_flight, 1);

    let waiting = tokio::spawn({
        let sender = sender.clone();
        async move { sender.send(asked(2)).await }
    });
    let first = next_step(&mut host).await;
    let answer = answer(&first);
    host.sender().send(answer).await.unwrap();
    next_result(&mut caller).await;
    waiting.await.unwrap().unwrap();
    let second = next_step(&mut host).await;
    assert_eq!(second.position, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thread_outside_of_the_runtime_can_answer() {
    let mut net = net(Config::default()).await;
    let (mut caller, mut host) = net.pair().await;
    let asked = step(1, 0, 0, 2000, noise(2000 * 1152));
    let sent = Message::Step(asked.clone());
    caller.sender().send(sent).await.unwrap();
    let got = next_step(&mut host).await;
    let sender = host.sender();
    let thread = std::thread::spawn(move || {
        let back = sender.try_send(answer(&got));
        assert!(back.unwrap().is_none());
    });
    assert_eq!(next_result(&mut caller).await, asked.echo());
    thread.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn several_messages_leave_together_in_order_and_those_without_room_are_counted() {
    let config = Config {
        max_steps_in_flight: 3,
        ..Config::default()
    };
    let mut net = net(config).await;
    let (caller, mut host) = net.pair().await;
    let sender = caller.sender();
    let asked = |position| Message::Step(row(1, 0, position));
    assert_eq!(sender.try_send_all(&[]).unwrap(), 0);
    let all: Vec<Message> = (0..5).map(asked).collect();
    assert_eq!(sender.try_send_all(&all).unwrap(), 2);
    for position in 0..3 {
        let got = next_step(&mut host).await;
        assert_eq!(got.position, position);
    }
    host.close(CloseCode::Shutdown);
    let mut caller = caller;
    assert_eq!(caller.recv().await.unwrap_err().code, CloseCode::Shutdown);
    let late = sender.try_send_all(&all);
    assert!(matches!(late, Err(SendError::Closed(_))));
}

// On one thread: the driver, which writes queued messages when it is woken, does not run before
// this test awaits.
#[tokio::test]
async fn queued_messages_wait_for_a_flush_or_another_message() {
    let mut net = net(Config::default()).await;
    let (caller, mut host) = net.pair().await;
    let sender = caller.sender();
    let asked = |stream| Message::Step(row(stream, 0, 0));
    let before = sender.stats().frames_sent;
    for stream in [1, 2] {
        assert!(sender.try_queue(asked(stream)).unwrap().is_none());
    }
    assert_eq!(sender.stats().frames_sent, before);
    sender.flush();
    assert_eq!(sender.stats().frames_sent, before + 2);
    for stream in [1, 2] {
        assert_eq!(host.recv().await.unwrap(), asked(stream));
    }

    // Closing a stream drops its queued messages.
    for stream in [3, 4] {
        assert!(sender.try_queue(asked(stream)).unwrap().is_none());
    }
    let (stream, epoch) = (3, 0);
    let close = Message::StreamClose(StreamClose { stream, epoch });
    assert!(sender.try_send(close.clone()).unwrap().is_none());
    let came = [host.recv().await.unwrap(), host.recv().await.unwrap()];
    assert!(came.contains(&asked(4)) && came.contains(&close));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_row_gets_through_while_a_large_tensor_is_on_its_way() {
    let mut net = net(Config::default()).await;
    let (mut caller, host) = net.pair().await;
    let echo = tokio::spawn(serve_echo(host));
    let sender = caller.sender();
    let large = step(1, 0, 0, 20_000, noise(20_000 * 1152));
    sender.send(Message::Step(large.clone())).await.unwrap();
    let small = row(2, 0, 0);
    sender.send(Message::Step(small.clone())).await.unwrap();
    assert_eq!(next_result(&mut caller).await, small.echo());
    assert_eq!(next_result(&mut caller).await, large.echo());
    drop(caller);
    assert_eq!(echo.await.unwrap().code, CloseCode::Normal);
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_in_the_middle_leaves_the_session_usable() {
    let mut net = net(Config::default()).await;
    let (mut caller, host) = net.pair().await;
    let echo = tokio::spawn(serve_echo(host));
    let sender = caller.sender();
    for epoch in 0..10 {
        let large = step(1, epoch, 0, 20_000, noise(20_000 * 1152));
        sender.send(Message::Step(large)).await.unwrap();
        let close = StreamClose { stream: 1, epoch };
        sender.send(Message::StreamClose(close)).await.unwrap();
    }
    let small = row(1, 10, 0);
    sender.send(Message::Step(small.clone())).await.unwrap();
    assert_eq!(next_result(&mut caller).await, small.echo());
    assert_eq!(caller.stats().steps_in_flight, 0);
    assert!(caller.stats().queued_bytes < 1000);
    drop(caller);
    echo.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn both_sides_learn_how_a_session_ended() {
    let mut net = net(Config::default()).await;
    let (mut caller, mut host) = net.pair().await;
    host.close(CloseCode::Shutdown);
    ended(caller.recv().await, CloseCode::Shutdown, false);
    ended(host.recv().await, CloseCode::Shutdown, true);

    let (caller, mut host) = net.pair().await;
    let sender = caller.sender();
    drop(caller);
    assert_eq!(host.recv().await.unwrap_err().code, CloseCode::Normal);
    assert_eq!(sender.closed().unwrap().code, CloseCode::Normal);
    let late = Message::StreamOpen(open_stream(1, 0));
    let late = sender.send(late).await;
    assert!(matches!(late, Err(SendError::Closed(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_sessions_run_side_by_side() {
    let mut net = net(Config::default()).await;
    let mut working = Vec::new();
    for stream in 0..12u32 {
        let (mut caller, host) = net.pair().await;
        tokio::spawn(serve_echo(host));
        working.push(tokio::spawn(async move {
            for position in 0..100 {
                let rows = if position % 10 == 0 { 200 } else { 1 };
                let asked = step(stream, 0, position, rows, noise(rows as usize * 1152));
                let sent = Message::Step(asked.clone());
                caller.sender().send(sent).await.unwrap();
                assert_eq!(next_result(&mut caller).await, asked.echo());
            }
        }));
    }
    for work in working {
        work.await.unwrap();
    }
    // No further session was opened.
    assert!(net.listener.session().now_or_never().is_none());
}

// ------------------------------------------------------------------ priorities

/// Threads on which a session was admitted and its messages were handled.
#[derive(Clone, Default)]
struct Threads(Arc<Mutex<Vec<String>>>);

impl Threads {
    fn note(&self) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        self.0.lock().push(name);
    }

    fn noted(&self) -> usize {
        self.0.lock().len()
    }

    fn aside(&self, place: usize) -> bool {
        self.0.lock()[place] == "background"
    }
}

impl Admission for Threads {
    fn admit_peer(&self, _key: &NodeId) -> bool {
        self.note();
        true
    }

    fn admit_hello(&self, _key: &NodeId, _hello: &Hello, _now: u64) -> Result<(), CloseCode> {
        self.note();
        Ok(())
    }
}

impl Handler for Threads {
    fn message(&mut self, _message: Message) -> Result<(), CloseCode> {
        self.note();
        Ok(())
    }
}

/// Handshakes of strangers, and connections that send faster than they are read, run on
/// low-priority threads, behind open sessions, and move back from there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_and_floods_run_at_low_priority() {
    let (host, caller) = (identity(), identity());
    let (door, heard) = (Threads::default(), Threads::default());
    let admission = Arc::new(door.clone());
    // No limit, so that the session is not closed for its many messages.
    let config = Config {
        control_frames_per_second: u32::MAX,
        ..Config::default()
    };
    let listening = Listener::bind("127.0.0.1:0", &host, admission, config.clone(), &[]);
    let mut listener = listening.await.unwrap();
    let addr = listener.local_addr().to_string();
    let hello = Hello::new("bench", TOKEN);
    let connected = connect(&addr, &caller, host.key(), hello, config).await;
    let sender = connected.as_ref().unwrap().sender();
    let mut session = listener.session().await;
    assert!(door.noted() >= 2);
    assert!((0..door.noted()).all(|place| door.aside(place)));

    session.attend(heard.clone());
    let message = || {
        let (stream, epoch) = (9, 9);
        sender.send(Message::StreamClose(StreamClose { stream, epoch }))
    };
    message().await.unwrap();
    while heard.noted() < 1 {
        tokio::task::yield_now().await;
    }
    assert!(!heard.aside(0), "one message");
    // For a while the host may read as fast as the messages come.
    let mut sent = 1;
    while (0..heard.noted()).all(|place| !heard.aside(place)) {
        for _ in 0..200 {
            message().await.unwrap();
        }
        sent += 200;
    }
    while heard.noted() < sent {
        tokio::task::yield_now().await;
    }
    while heard.aside(heard.noted() - 1) {
        let noted = heard.noted();
        tokio::time::sleep(Duration::from_millis(50)).await;
        message().await.unwrap();
        while heard.noted() == noted {
            tokio::task::yield_now().await;
        }
    }
}
