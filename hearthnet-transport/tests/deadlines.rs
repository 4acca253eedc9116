//! Peers that do nothing, or next to nothing, in each phase. Time is virtual: it passes when
//! everybody waits.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use futures_util::SinkExt;
use hearthnet_transport::wire::{Flags, FrameType, Header};
use hearthnet_transport::{
    Acceptor, Admission, CloseCode, Config, ConnectError, Hello, Identity, NodeId, Phase,
    RefusedConnection, connect_over,
};
use support::raw::{Raw, pkcs8, tls};
use tokio::io::{AsyncWriteExt, DuplexStream, duplex};
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message as WsMessage;

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

fn host(config: Config) -> (Acceptor, DuplexStream, Box<DuplexStream>) {
    let identity = Identity::from_secret(&HOST).unwrap();
    let acceptor = Acceptor::new(&identity, Arc::new(Everyone), config).unwrap();
    let (theirs, ours) = duplex(64 * 1024);
    (acceptor, theirs, Box::new(ours))
}

async fn raw(io: DuplexStream) -> Raw {
    let identity = Identity::from_secret(&CALLER).unwrap();
    Raw::connect(Box::new(io), &identity, &CALLER).await
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_never_begins_tls_is_dropped() {
    let (acceptor, _theirs, ours) = host(Config::default());
    let begin = Instant::now();
    let refused = acceptor.accept(ours).await.unwrap_err();
    assert!(
        matches!(refused, RefusedConnection::Timeout(Phase::Tls)),
        "{refused}"
    );
    assert_eq!(begin.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_trickles_its_tls_handshake_is_dropped() {
    let (acceptor, mut theirs, ours) = host(Config::default());
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
    let refused = acceptor.accept(ours).await.unwrap_err();
    assert!(matches!(
        refused,
        RefusedConnection::Timeout(Phase::Tls) | RefusedConnection::Tls { .. }
    ));
    trickle.abort();
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_never_asks_for_the_upgrade_is_dropped() {
    let (acceptor, theirs, ours) = host(Config::default());
    let accepting = tokio::spawn(async move { acceptor.accept(ours).await });
    let identity = Identity::from_secret(&CALLER).unwrap();
    let auth = (identity.certificate().to_vec(), pkcs8(&CALLER));
    let _stream = tls(Box::new(theirs), Some(auth)).await.unwrap();
    let refused = accepting.await.unwrap().unwrap_err();
    assert!(
        matches!(refused, RefusedConnection::Timeout(Phase::Upgrade)),
        "{refused}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_trickles_its_upgrade_is_dropped() {
    let (acceptor, theirs, ours) = host(Config::default());
    let accepting = tokio::spawn(async move { acceptor.accept(ours).await });
    let identity = Identity::from_secret(&CALLER).unwrap();
    let auth = (identity.certificate().to_vec(), pkcs8(&CALLER));
    let mut stream = tls(Box::new(theirs), Some(auth)).await.unwrap();
    let trickle = tokio::spawn(async move {
        for byte in b"GET /tensor/v1 HTTP/1.1\r\nHost: a-host-of-hosts\r\n"
            .iter()
            .cycle()
        {
            tokio::time::sleep(Duration::from_millis(500)).await;
            if stream.write_all(&[*byte]).await.is_err() || stream.flush().await.is_err() {
                break;
            }
        }
    });
    let refused = accepting.await.unwrap().unwrap_err();
    assert!(
        matches!(refused, RefusedConnection::Timeout(Phase::Upgrade)),
        "{refused}"
    );
    trickle.abort();
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_never_says_hello_is_dropped() {
    let (acceptor, theirs, ours) = host(Config::default());
    let accepting = tokio::spawn(async move { acceptor.accept(ours).await });
    let raw = raw(theirs).await;
    assert_eq!(raw.close_code().await, CloseCode::PipelineStalled.number());
    match accepting.await.unwrap().unwrap_err() {
        RefusedConnection::Closed(closed) => {
            assert_eq!(
                (closed.code, closed.by_us),
                (CloseCode::PipelineStalled, true)
            );
        }
        other => panic!("{other}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_trickles_a_message_is_dropped() {
    let (acceptor, theirs, ours) = host(Config::default());
    let accepting = tokio::spawn(async move { acceptor.accept(ours).await });
    let mut raw = raw(theirs).await;
    raw.hello("raw").await;
    let mut session = accepting.await.unwrap().unwrap();
    let begin = Instant::now();
    // A WebSocket header of one megabyte, and then a few bytes a second.
    let trickle = tokio::spawn(async move {
        let stream = raw.socket.get_mut();
        stream
            .write_all(&[0x82, 0xff, 0, 0, 0, 0, 0, 0x0f, 0xff, 0xff, 0, 0, 0, 0])
            .await
            .unwrap();
        stream.flush().await.unwrap();
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            if stream.write_all(&[0; 100]).await.is_err() || stream.flush().await.is_err() {
                break;
            }
        }
    });
    let closed = session.recv().await.unwrap_err();
    assert_eq!(
        (closed.code, closed.by_us),
        (CloseCode::PipelineStalled, true)
    );
    assert!(
        begin.elapsed() <= Duration::from_secs(21),
        "{:?}",
        begin.elapsed()
    );
    trickle.abort();
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_announces_rows_and_keeps_them_is_dropped() {
    let (acceptor, theirs, ours) = host(Config::default());
    let accepting = tokio::spawn(async move { acceptor.accept(ours).await });
    let mut raw = raw(theirs).await;
    raw.hello("raw").await;
    let mut session = accepting.await.unwrap().unwrap();
    // STEP: 16,384 rows of 512 fp16 values as tensor 1, which never comes. Pings go on.
    let mut body = Vec::new();
    for field in [1u32, 0, 0, 16_384, 512] {
        body.extend_from_slice(&field.to_be_bytes());
    }
    body.extend_from_slice(&[1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    raw.frame(FrameType::Step, &body).await;
    let pings = tokio::spawn(async move {
        let mut sequence = 3;
        loop {
            let header = Header {
                kind: FrameType::Ping,
                sequence,
                length: 8,
                flags: Flags::NONE,
            };
            let mut message = header.encode().to_vec();
            message.extend_from_slice(&[0; 8]);
            if raw
                .socket
                .send(WsMessage::Binary(message.into()))
                .await
                .is_err()
            {
                break;
            }
            sequence += 1;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let closed = session.recv().await.unwrap_err();
    assert_eq!(
        (closed.code, closed.by_us),
        (CloseCode::PipelineStalled, true)
    );
    pings.abort();
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_stops_reading_is_dropped() {
    let (acceptor, theirs, ours) = host(Config::default());
    let accepting = tokio::spawn(async move { acceptor.accept(ours).await });
    let mut raw = raw(theirs).await;
    raw.hello("raw").await;
    let mut session = accepting.await.unwrap().unwrap();
    let begin = Instant::now();
    // It is silent, and does not answer the PING.
    let closed = session.recv().await.unwrap_err();
    assert_eq!((closed.code, closed.by_us), (CloseCode::KeepAlive, true));
    assert!(begin.elapsed() <= Duration::from_secs(61));
}

#[tokio::test(start_paused = true)]
async fn a_host_that_never_answers_is_given_up_in_each_phase() {
    let identity = Identity::from_secret(&CALLER).unwrap();
    let key = Identity::from_secret(&HOST).unwrap().key();
    // TLS.
    let (ours, theirs) = duplex(64 * 1024);
    let hello = Hello::new("raw", Vec::new());
    let config = Config::default();
    let refused = connect_over(
        Box::new(ours),
        "host",
        &identity,
        key,
        hello.clone(),
        config.clone(),
    )
    .await;
    assert!(
        matches!(refused, Err(ConnectError::Timeout(Phase::Tls))),
        "{refused:?}"
    );
    drop(theirs);
}

#[tokio::test(start_paused = true)]
async fn closing_does_not_wait_for_a_peer_that_is_gone() {
    let (acceptor, theirs, ours) = host(Config::default());
    let sessions = acceptor.clone();
    let accepting = tokio::spawn(async move { acceptor.accept(ours).await });
    let mut raw = raw(theirs).await;
    raw.hello("raw").await;
    let session = accepting.await.unwrap().unwrap();
    assert_eq!(sessions.sessions(), 1);
    // The peer neither reads nor closes.
    drop(session);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(sessions.sessions(), 0);
    drop(raw);
}
