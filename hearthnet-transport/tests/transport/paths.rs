//! Sockets on the other paths of a listener: over real TCP and TLS, and in virtual time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use hearthnet_testkit::raw::{Credentials, Message, Peer, opcode};
use hearthnet_transport::{
    Acceptor, Admission, Arrival, CloseCode, Config, ConnectError, Connection, Frame, Hello,
    Identity, Io, Listener, NodeId, PathRule, PeerSocket, SendError, SessionClosed, connect,
    connect_path,
};
use parking_lot::Mutex;
use tokio::io::{DuplexStream, duplex};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::support::ended;

const HOST: [u8; 32] = [2; 32];
const MEMBER: [u8; 32] = [3; 32];
const STRANGER: [u8; 32] = [4; 32];
const REVOKED: [u8; 32] = [5; 32];

fn identity(secret: &[u8; 32]) -> Identity {
    Identity::from_secret(secret).unwrap()
}

fn bus() -> PathRule {
    PathRule::new("/bus/v1", 10_000).with_text()
}

fn sync() -> PathRule {
    PathRule::new("/sync/v1", 100_000).with_sockets(8, 2)
}

fn bulk() -> PathRule {
    PathRule::new("/weights/v1", 100_000).with_low_priority()
}

/// Members may do everything, strangers may use the bus, revoked keys are told so.
#[derive(Default)]
struct Community {
    ended: Mutex<Vec<(&'static str, CloseCode)>>,
    /// Names of the threads on which sockets ended.
    threads: Mutex<Vec<String>>,
}

impl Admission for Community {
    fn admit_peer(&self, _: &NodeId) -> bool {
        true
    }

    fn admit_path(&self, key: &NodeId, path: &str) -> Result<(), CloseCode> {
        if *key == identity(&REVOKED).key() {
            Err(CloseCode::Revoked)
        } else if *key == identity(&MEMBER).key() || path == "/bus/v1" {
            Ok(())
        } else {
            Err(CloseCode::Unauthorized)
        }
    }

    fn admit_hello(&self, _: &NodeId, _: &Hello, _: u64) -> Result<(), CloseCode> {
        Ok(())
    }

    fn session_ended(&self, _: &NodeId, closed: &SessionClosed) {
        self.ended.lock().push(("/tensor/v1", closed.code));
    }

    fn path_ended(&self, _: &NodeId, path: &str, closed: &SessionClosed) {
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        self.threads.lock().push(thread);
        let paths = [bus().path, sync().path, bulk().path];
        let known = paths.into_iter().find(|it| *it == path);
        self.ended.lock().push((known.unwrap(), closed.code));
    }
}

struct Net {
    listener: Listener,
    community: Arc<Community>,
    addr: String,
}

impl Net {
    async fn new() -> Net {
        let community = Arc::new(Community::default());
        let (host, config, paths) = (identity(&HOST), Config::default(), [bus(), sync(), bulk()]);
        let listening = Listener::bind("127.0.0.1:0", &host, community.clone(), config, &paths);
        let listener = listening.await.unwrap();
        let addr = listener.local_addr().to_string();
        Net {
            listener,
            community,
            addr,
        }
    }

    async fn dial(&self, secret: &[u8; 32], rule: &PathRule) -> Result<PeerSocket, ConnectError> {
        let host = Some(identity(&HOST).key());
        let config = Config::default();
        connect_path(&self.addr, &identity(secret), host, rule, &config).await
    }

    /// Opens a tensor session.
    async fn session(&self, secret: &[u8; 32]) -> Result<Connection, ConnectError> {
        let (own, host) = (identity(secret), identity(&HOST).key());
        let hello = Hello::new("pipeline", b"");
        connect(&self.addr, &own, host, hello, Config::default()).await
    }

    async fn arrive(&mut self) -> PeerSocket {
        match self.listener.accept().await {
            Arrival::Peer(socket) => socket,
            other => panic!("{other:?}"),
        }
    }

    async fn pair(&mut self, rule: &PathRule) -> (PeerSocket, PeerSocket) {
        (self.dial(&MEMBER, rule).await.unwrap(), self.arrive().await)
    }

    async fn raw(&self, path: &str) -> Peer {
        raw(TcpStream::connect(&self.addr).await.unwrap(), path).await
    }
}

/// A member's raw peer, at a path.
async fn raw(io: impl Io + 'static, path: &str) -> Peer {
    let peer = Peer::secured_over(Box::new(io), &Credentials::of(&MEMBER)).await;
    peer.unwrap().upgraded_at(path).await.unwrap()
}

fn text(text: &str) -> Frame {
    Frame::Text(text.to_owned())
}

fn binary(len: usize) -> Frame {
    Frame::Binary(Bytes::from(vec![7; len]))
}

#[tokio::test]
async fn one_listener_serves_sockets_and_tensor_sessions_side_by_side() {
    let mut net = Net::new().await;
    let (mut caller, mut host) = net.pair(&bus()).await;
    assert_eq!((caller.path(), host.path()), ("/bus/v1", "/bus/v1"));
    assert_eq!(caller.peer(), identity(&HOST).key());
    assert_eq!(host.peer(), identity(&MEMBER).key());
    for frame in [text("grüezi"), binary(10_000), text(""), binary(0)] {
        caller.send(frame.clone()).await.unwrap();
        assert_eq!(host.recv().await.unwrap(), frame);
        host.send(frame.clone()).await.unwrap();
        assert_eq!(caller.recv().await.unwrap(), frame);
    }
    let (gossip, gossip_host) = net.pair(&sync()).await;
    assert_eq!(gossip_host.path(), "/sync/v1");
    drop(gossip);

    let session = net.session(&MEMBER).await.unwrap();
    let Arrival::Session(arrived) = net.listener.accept().await else {
        panic!("no session")
    };
    assert_eq!(arrived.peer(), identity(&MEMBER).key());
    // The end of one connection does not affect the others.
    drop(session);
    caller.send(text("still here")).await.unwrap();
    assert_eq!(host.recv().await.unwrap(), text("still here"));
    // No further session or socket was opened.
    assert!(net.listener.accept().now_or_never().is_none());
}

#[tokio::test]
async fn a_path_that_a_peer_may_not_use_is_refused_with_the_code() {
    let net = Net::new().await;
    for (secret, rule, code) in [
        (STRANGER, sync(), CloseCode::Unauthorized),
        (REVOKED, bus(), CloseCode::Revoked),
        (REVOKED, sync(), CloseCode::Revoked),
    ] {
        let error = net.dial(&secret, &rule).await.unwrap_err();
        assert_eq!(error.code(), Some(code), "{error}");
    }
    let refused = net.session(&REVOKED).await.unwrap_err();
    assert_eq!(refused.code(), Some(CloseCode::Revoked));
    net.dial(&STRANGER, &bus()).await.unwrap();
    // Refusals are reported, like ends of sessions.
    let ended = net.community.ended.lock().clone();
    let refused = [
        ("/sync/v1", CloseCode::Unauthorized),
        ("/bus/v1", CloseCode::Revoked),
        ("/sync/v1", CloseCode::Revoked),
        ("/tensor/v1", CloseCode::Revoked),
    ];
    assert_eq!(ended[..4], refused);
}

#[tokio::test]
async fn an_unserved_path_is_not_found() {
    let net = Net::new().await;
    let error = net.dial(&MEMBER, &PathRule::new("/other", 10)).await;
    assert!(matches!(error, Err(ConnectError::NotServed)), "{error:?}");
}

#[tokio::test]
async fn another_key_than_expected_is_an_identity_mismatch_and_none_is_reported() {
    let mut net = Net::new().await;
    let (own, config) = (identity(&MEMBER), Config::default());
    let wrong = Some(identity(&STRANGER).key());
    let error = connect_path(&net.addr, &own, wrong, &bus(), &config).await;
    match error.unwrap_err() {
        ConnectError::IdentityMismatch { expected, found } => {
            assert_eq!(Some(expected), wrong);
            assert_eq!(found, identity(&HOST).key());
        }
        other => panic!("{other}"),
    }
    let unpinned = connect_path(&net.addr, &own, None, &bus(), &config).await;
    assert_eq!(unpinned.unwrap().peer(), identity(&HOST).key());
    net.arrive().await;
}

#[tokio::test]
async fn messages_above_the_limit_of_their_path_end_the_socket() {
    let mut net = Net::new().await;
    let (caller, _host) = net.pair(&bus()).await;
    // The caller's own limit refuses the message.
    let refused = caller.send(binary(10_001)).await.unwrap_err();
    assert!(matches!(&refused, SendError::Message(why) if why.code == CloseCode::FrameTooBig));
    // The host's limit refuses it: this caller has a larger one.
    let bolder = PathRule::new("/bus/v1", 1_000_000);
    let (mut bolder, mut host) = net.pair(&bolder).await;
    bolder.send(binary(10_001)).await.unwrap();
    ended(host.recv().await, CloseCode::FrameTooBig, true);
    ended(bolder.recv().await, CloseCode::FrameTooBig, false);
}

#[tokio::test]
async fn a_declared_length_reserves_nothing_and_ends_the_socket() {
    let mut net = Net::new().await;
    let mut raw = net.raw("/sync/v1").await;
    let mut host = net.arrive().await;
    raw.send(Message::binary([]).declaring(u64::MAX >> 1)).await;
    assert_eq!(host.recv().await.unwrap_err().code, CloseCode::FrameTooBig);
    let ending = raw.ending().await;
    assert_eq!(ending.close, Some(CloseCode::FrameTooBig.number()));
}

#[tokio::test]
async fn text_on_a_binary_path_ends_the_socket() {
    let mut net = Net::new().await;
    let mut raw = net.raw("/sync/v1").await;
    let mut host = net.arrive().await;
    raw.send(Message::of(opcode::TEXT, *b"hello")).await;
    assert_eq!(host.recv().await.unwrap_err().code, CloseCode::WebSocket);
    let ending = raw.ending().await;
    assert_eq!(ending.close, Some(CloseCode::WebSocket.number()));
    let refused = host.send(text("no")).await.unwrap_err();
    assert!(matches!(refused, SendError::Message(_)), "{refused}");
}

#[tokio::test]
async fn ping_floods_end_the_socket() {
    let mut net = Net::new().await;
    let mut raw = net.raw("/bus/v1").await;
    let mut host = net.arrive().await;
    for _ in 0..100 {
        raw.send(Message::of(opcode::PING, [])).await;
    }
    assert_eq!(host.recv().await.unwrap_err().code, CloseCode::FrameRate);
}

#[tokio::test]
async fn a_peer_has_no_more_sockets_than_its_share_and_gets_it_back() {
    let mut net = Net::new().await;
    let first = net.pair(&sync()).await;
    let _second = net.pair(&sync()).await;
    let refused = net.dial(&MEMBER, &sync()).await.unwrap_err();
    assert_eq!(refused.code(), Some(CloseCode::SessionLimit), "{refused}");
    // Another path has its own count.
    let _other = net.pair(&bus()).await;
    drop(first);
    // The permit is free when the connection is gone, which takes a moment.
    let deadline = Instant::now() + Duration::from_secs(20);
    while let Err(refused) = net.dial(&MEMBER, &sync()).await {
        assert_eq!(refused.code(), Some(CloseCode::SessionLimit), "{refused}");
        assert!(Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_members_connection_rate_is_limited_without_affecting_others() {
    let mut net = Net::new().await;
    let mut made = 0;
    let refused = loop {
        match net.dial(&MEMBER, &bus()).await {
            Ok(socket) => {
                made += 1;
                socket.close(CloseCode::Normal);
                let mut there = net.arrive().await;
                while there.recv().await.is_ok() {}
            }
            // The permit of a socket is free a moment after its end.
            Err(_) if made < 256 => tokio::task::yield_now().await,
            Err(error) => break error,
        }
        assert!(made < 5_000, "nothing bounds how often a member connects");
    };
    assert_eq!(refused.code(), Some(CloseCode::SessionLimit), "{refused}");
    // From the same address, where connections are now delayed by a second.
    net.dial(&STRANGER, &bus()).await.unwrap();
}

#[tokio::test]
async fn a_closer_ends_a_socket_and_drops_its_queues() {
    let mut net = Net::new().await;
    let (mut caller, mut host) = net.pair(&bus()).await;
    caller.send(text("first")).await.unwrap();
    caller.send(text("never acted upon")).await.unwrap();
    assert_eq!(host.recv().await.unwrap(), text("first"));
    let closer = host.closer();
    assert_eq!(closer.peer(), identity(&MEMBER).key());
    assert!(!closer.is_closed());
    closer.close(CloseCode::Revoked);
    assert!(closer.is_closed());
    ended(host.recv().await, CloseCode::Revoked, true);
    ended(caller.recv().await, CloseCode::Revoked, false);
    let late = caller.send(text("more")).await;
    assert!(matches!(late, Err(SendError::Closed(why)) if why.code == CloseCode::Revoked));
    drop(host);
    assert!(closer.is_closed());
}

#[tokio::test]
async fn a_closer_ends_a_tensor_session() {
    let mut net = Net::new().await;
    let mut session = net.session(&MEMBER).await.unwrap();
    let Arrival::Session(mut arrived) = net.listener.accept().await else {
        panic!("no session")
    };
    let closer = arrived.closer();
    closer.close(CloseCode::Revoked);
    assert_eq!(arrived.recv().await.unwrap_err().code, CloseCode::Revoked);
    ended(session.recv().await, CloseCode::Revoked, false);
    assert!(closer.is_closed());
}

#[tokio::test]
async fn messages_queued_before_close_still_arrive() {
    let mut net = Net::new().await;
    let (mut caller, host) = net.pair(&bus()).await;
    for n in 0..20 {
        host.send(text(&n.to_string())).await.unwrap();
    }
    host.close(CloseCode::Shutdown);
    for n in 0..20 {
        assert_eq!(caller.recv().await.unwrap(), text(&n.to_string()));
    }
    assert_eq!(caller.recv().await.unwrap_err().code, CloseCode::Shutdown);
}

#[tokio::test]
async fn a_receiver_that_waits_slows_the_sender_down_and_loses_nothing() {
    const MESSAGES: u64 = 2_000;
    let mut net = Net::new().await;
    let (caller, mut host) = net.pair(&sync()).await;
    let sender = caller.sender();
    let sending = tokio::spawn(async move {
        let mut refused = 0;
        for n in 0..MESSAGES {
            let mut message = vec![0; 20_000];
            message[..8].copy_from_slice(&n.to_be_bytes());
            let frame = Frame::Binary(message.into());
            if let Some(back) = sender.try_send(frame).unwrap() {
                refused += 1;
                sender.send(back).await.unwrap();
            }
        }
        refused
    });
    for n in 0..MESSAGES {
        let Frame::Binary(message) = host.recv().await.unwrap() else {
            panic!()
        };
        assert_eq!(message[..8], n.to_be_bytes());
    }
    // 40 MB exceed two queues and the system's buffers.
    assert!(sending.await.unwrap() > 0);
    drop(caller);
    assert_eq!(host.recv().await.unwrap_err().code, CloseCode::Normal);
}

#[tokio::test]
async fn a_pair_in_memory_keeps_the_rules_of_its_path() {
    let keys = [identity(&MEMBER).key(), identity(&HOST).key()];
    let (mut left, mut right) = PeerSocket::pair(keys, &bus()).await;
    assert_eq!((left.peer(), right.peer()), (keys[1], keys[0]));
    left.send(text("to the right")).await.unwrap();
    right.send(binary(10)).await.unwrap();
    assert_eq!(right.recv().await.unwrap(), text("to the right"));
    assert_eq!(left.recv().await.unwrap(), binary(10));
    left.close(CloseCode::Unauthorized);
    ended(right.recv().await, CloseCode::Unauthorized, false);
}

// ------------------------------------------------------------------ virtual time

/// A socket of the host, with an attacker at its other end.
async fn attacked() -> (PeerSocket, Peer) {
    let community = Arc::new(Community::default());
    let config = Config::default();
    let acceptor = Acceptor::new(&identity(&HOST), community, config, &[sync()]).unwrap();
    let (theirs, ours): (DuplexStream, DuplexStream) = duplex(64 * 1024);
    let accepting = tokio::spawn(async move { acceptor.arrive(Box::new(ours)).await });
    let raw = raw(theirs, "/sync/v1").await;
    match accepting.await.unwrap().unwrap() {
        Arrival::Peer(socket) => (socket, raw),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn idle_sockets_live_as_long_as_both_sides_answer() {
    let keys = [identity(&MEMBER).key(), identity(&HOST).key()];
    let (left, mut right) = PeerSocket::pair(keys, &sync()).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    left.send(binary(1)).await.unwrap();
    assert_eq!(right.recv().await.unwrap(), binary(1));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_answers_no_ping_is_given_up() {
    let (mut socket, _raw) = attacked().await;
    let begin = Instant::now();
    ended(socket.recv().await, CloseCode::KeepAlive, true);
    assert_eq!(begin.elapsed().as_secs(), 60);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_trickles_a_message_is_given_up() {
    let (mut socket, mut raw) = attacked().await;
    let begin = Instant::now();
    // 64 KiB, ten bytes a second.
    let message = Message::binary(vec![0; 1 << 16]).encode();
    let trickle =
        tokio::spawn(async move { raw.trickle(&message, Duration::from_millis(100)).await });
    ended(socket.recv().await, CloseCode::PipelineStalled, true);
    let took = begin.elapsed();
    assert!(took <= Duration::from_secs(11), "{took:?}");
    trickle.abort();
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_does_not_read_is_given_up() {
    let (mut socket, raw) = attacked().await;
    let sender = socket.sender();
    let sending = tokio::spawn(async move {
        loop {
            if let Err(error) = sender.send(binary(50_000)).await {
                return error;
            }
        }
    });
    ended(socket.recv().await, CloseCode::PipelineStalled, true);
    assert!(matches!(sending.await.unwrap(), SendError::Closed(_)));
    drop(raw);
}

// On a current-thread runtime, as in a simulation, that thread drives all paths.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_low_priority_path_is_driven_by_the_low_priority_threads() {
    let mut net = Net::new().await;
    for rule in [sync(), bulk()] {
        let (caller, mut host) = net.pair(&rule).await;
        caller.send(binary(50_000)).await.unwrap();
        assert_eq!(host.recv().await.unwrap(), binary(50_000));
        drop(caller);
        host.recv().await.unwrap_err();
        drop(host);
    }
    let threads = async {
        loop {
            let threads = net.community.threads.lock().clone();
            if threads.len() == 2 {
                return threads;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let threads = tokio::time::timeout(Duration::from_secs(60), threads)
        .await
        .unwrap();
    let low = threads.iter().filter(|name| *name == "background");
    assert_eq!(low.count(), 1, "{threads:?}");
}
