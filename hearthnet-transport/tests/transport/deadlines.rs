//! Peers that do nothing, or next to nothing, in each phase. Time is virtual: it advances when all
//! tasks wait.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use hearthnet_testkit::raw::{Credentials, Frame, Hello as RawHello, Message, Peer, Step};
use hearthnet_transport::{
    Acceptor, Admission, Arrival, CloseCode, Config, ConnectError, Connection, Hello, Identity,
    NodeId, PATH, Phase, RefusedConnection, connect_over,
};
use tokio::io::{AsyncWriteExt, DuplexStream, duplex};
use tokio::time::{Instant, interval};

use crate::support::ended;

const CALLER: [u8; 32] = [1; 32];
const HOST: [u8; 32] = [2; 32];

struct Everyone;

impl Admission for Everyone {
    fn admit_peer(&self, _: &NodeId) -> bool {
        true
    }

    fn admit_hello(&self, _: &NodeId, _: &Hello, _: u64) -> Result<(), CloseCode> {
        Ok(())
    }
}

fn host() -> (Acceptor, DuplexStream, Box<DuplexStream>) {
    let identity = Identity::from_secret(&HOST).unwrap();
    let acceptor = Acceptor::new(&identity, Arc::new(Everyone), Config::default(), &[]).unwrap();
    let (theirs, ours) = duplex(64 * 1024);
    (acceptor, theirs, Box::new(ours))
}

#[track_caller]
fn is_timeout(refused: RefusedConnection, phase: Phase) {
    let is_it = matches!(refused, RefusedConnection::Timeout(it) if it == phase);
    assert!(is_it, "{refused}");
}

/// A peer after the TLS handshake.
async fn secured(io: DuplexStream) -> Peer {
    let credentials = Credentials::of(&CALLER);
    let peer = Peer::secured_over(Box::new(io), &credentials).await;
    peer.unwrap()
}

/// A peer after the WebSocket upgrade.
async fn upgraded(io: DuplexStream) -> Peer {
    secured(io).await.upgraded_at(PATH).await.unwrap()
}

/// An open session: the peer, and the host's end of it.
async fn session() -> (Peer, Connection, Acceptor) {
    let (acceptor, theirs, ours) = host();
    let sessions = acceptor.clone();
    let accepting = tokio::spawn(async move { acceptor.arrive(ours).await });
    let hello = RawHello::new("raw", Vec::new());
    let peer = upgraded(theirs).await.greeted(&hello).await.unwrap();
    match accepting.await.unwrap().unwrap() {
        Arrival::Session(session) => (peer, session, sessions),
        other => panic!("{other:?}"),
    }
}

async fn stalls(mut session: Connection) {
    ended(session.recv().await, CloseCode::PipelineStalled, true);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_never_begins_tls_is_dropped() {
    let (acceptor, _theirs, ours) = host();
    let begin = Instant::now();
    is_timeout(acceptor.arrive(ours).await.unwrap_err(), Phase::Tls);
    assert_eq!(begin.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_trickles_its_tls_handshake_is_dropped() {
    let (acceptor, mut theirs, ours) = host();
    // The header of a ClientHello record of 512 bytes, then a byte a second.
    let trickle = tokio::spawn(async move {
        theirs.write_all(&[0x16, 3, 1, 2, 0]).await.unwrap();
        for _ in 0..512 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            if theirs.write_all(&[1]).await.is_err() {
                break;
            }
        }
    });
    let refused = acceptor.arrive(ours).await.unwrap_err();
    assert!(matches!(
        refused,
        RefusedConnection::Timeout(Phase::Tls) | RefusedConnection::Tls { .. }
    ));
    trickle.abort();
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_never_asks_for_the_upgrade_is_dropped() {
    let (acceptor, theirs, ours) = host();
    let accepting = tokio::spawn(async move { acceptor.arrive(ours).await });
    let _peer = secured(theirs).await;
    is_timeout(accepting.await.unwrap().unwrap_err(), Phase::Upgrade);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_trickles_its_upgrade_is_dropped() {
    let (acceptor, theirs, ours) = host();
    let accepting = tokio::spawn(async move { acceptor.arrive(ours).await });
    let mut peer = secured(theirs).await;
    let trickle = tokio::spawn(async move {
        let head = b"GET /tensor/v1 HTTP/1.1\r\nHost: a-host-of-hosts\r\n";
        let pause = Duration::from_millis(500);
        peer.trickle(&head.repeat(9), pause).await
    });
    is_timeout(accepting.await.unwrap().unwrap_err(), Phase::Upgrade);
    trickle.abort();
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_never_says_hello_is_dropped() {
    let (acceptor, theirs, ours) = host();
    let accepting = tokio::spawn(async move { acceptor.arrive(ours).await });
    let ending = upgraded(theirs).await.ending().await;
    assert_eq!(ending.close, Some(CloseCode::PipelineStalled.number()));
    match accepting.await.unwrap().unwrap_err() {
        RefusedConnection::Closed(closed) => {
            ended::<()>(Err(closed), CloseCode::PipelineStalled, true);
        }
        other => panic!("{other}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_trickles_a_message_is_dropped() {
    let (mut peer, session, _) = session().await;
    let begin = Instant::now();
    // A megabyte, a hundred bytes a second.
    let message = Message::binary(vec![0; 0xfffff]).encode();
    let trickle =
        tokio::spawn(async move { peer.trickle(&message, Duration::from_millis(10)).await });
    stalls(session).await;
    let took = begin.elapsed();
    assert!(took <= Duration::from_secs(21), "{took:?}");
    trickle.abort();
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_announces_rows_and_keeps_them_is_dropped() {
    let (mut peer, session, _) = session().await;
    // 16,384 rows of 512 fp16 values as tensor 1, which is never sent. Pings continue.
    let step = Step {
        rows: 16_384,
        width: 512,
        tensor: Some(1),
        data: Vec::new(),
        ..Step::default()
    };
    peer.send(step.frame()).await;
    let pings = tokio::spawn(async move {
        let mut seconds = interval(Duration::from_secs(1));
        loop {
            seconds.tick().await;
            peer.send(Frame::ping()).await;
        }
    });
    stalls(session).await;
    pings.abort();
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_stops_reading_is_dropped() {
    let (_peer, mut session, _) = session().await;
    let begin = Instant::now();
    // The peer is silent, and does not answer the PING.
    ended(session.recv().await, CloseCode::KeepAlive, true);
    assert!(begin.elapsed() <= Duration::from_secs(61));
}

#[tokio::test(start_paused = true)]
async fn a_host_that_never_answers_is_given_up_in_each_phase() {
    let identity = Identity::from_secret(&CALLER).unwrap();
    let key = Identity::from_secret(&HOST).unwrap().key();
    // TLS.
    let (ours, theirs) = duplex(64 * 1024);
    let (io, hello) = (Box::new(ours), Hello::new("raw", Vec::new()));
    let refused = connect_over(io, "host", &identity, key, hello, Config::default()).await;
    assert!(
        matches!(refused, Err(ConnectError::Timeout(Phase::Tls))),
        "{refused:?}"
    );
    drop(theirs);
}

#[tokio::test(start_paused = true)]
async fn closing_does_not_wait_for_a_peer_that_is_gone() {
    let (peer, session, sessions) = session().await;
    assert_eq!(sessions.sessions(), 1);
    // The peer neither reads nor closes.
    drop(session);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(sessions.sessions(), 0);
    drop(peer);
}
