//! Both sides over sockets in memory, against each other and against peers that break the rules.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hearthnet_transport::{CloseCode, Frame, PeerSocket};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::message::MAX_MESSAGE_BYTES;
use super::*;
use crate::node::tests::{TIMEOUT, end_of, never_busy};
use crate::testing::{Shelf, id};

const WEIGHTS: [u8; 32] = [7; 32];
const OTHER: [u8; 32] = [8; 32];

/// The serving side of a connection; returns the socket of the other side.
async fn served(store: impl WeightsStore, busy: Busy) -> (PeerSocket, Arc<Weights>) {
    let weights = Arc::<Weights>::default();
    weights.serve(Arc::new(store), busy);
    (connect_to(&weights, 2).await, weights)
}

/// A further connection of key `seed`.
async fn connect_to(weights: &Arc<Weights>, seed: u8) -> PeerSocket {
    let (ours, theirs) = PeerSocket::pair([id(seed), id(1)], &path_rule()).await;
    let weights = Arc::clone(weights);
    tokio::spawn(async move { weights.attend(theirs, id(seed)).await });
    ours
}

fn asks(socket: PeerSocket) -> WeightsPeer {
    WeightsPeer::new(socket, Arc::<Weights>::default())
}

async fn reply(socket: &mut PeerSocket) -> (u32, Reply) {
    let frame = timeout(TIMEOUT, socket.recv()).await.unwrap().unwrap();
    let Frame::Binary(message) = frame else {
        panic!("a text message");
    };
    Reply::decode(&message).unwrap()
}

fn piece(index: u32) -> Request {
    Request::Piece {
        weights: WEIGHTS,
        index,
    }
}

async fn send(socket: &PeerSocket, message: impl Into<bytes::Bytes>) {
    socket.send(Frame::Binary(message.into())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_gives_what_it_holds_and_nothing_of_other_weights() {
    let shelf = Shelf::of(WEIGHTS, 40);
    let (socket, weights) = served(shelf.clone(), never_busy()).await;
    let peer = Arc::new(asks(socket));
    assert_eq!(peer.held(&WEIGHTS).await.unwrap(), shelf.held(&WEIGHTS));
    assert_eq!(peer.held(&OTHER).await.unwrap(), None);
    // More requests than may be in flight: the others wait.
    let all = (0..41).map(|index| {
        let peer = Arc::clone(&peer);
        tokio::spawn(async move { peer.piece(&WEIGHTS, index).await.unwrap() })
    });
    let all: Vec<_> = all.collect();
    let mut bytes = 0;
    for (index, got) in all.into_iter().enumerate() {
        let got = got.await.unwrap();
        assert_eq!(got, shelf.piece(&WEIGHTS, index as u32));
        bytes += got.map_or(0, |it| it.len());
    }
    assert_eq!(peer.piece(&OTHER, 0).await.unwrap(), None);
    let (object, offset, len) = (Object::Manifest, 5, 100);
    let got = peer.read(&WEIGHTS, object, offset, len).await.unwrap();
    assert_eq!(got, shelf.read(&WEIGHTS, object, offset, len));
    assert_eq!(got.unwrap().len(), 100);
    let beyond = peer.read(&WEIGHTS, object, 1000, 1).await.unwrap();
    assert_eq!(beyond, None);
    assert_eq!(weights.sent(), bytes as u64 + 100);
    for len in [0, MAX_DATA_BYTES as u32 + 1] {
        let refused = peer.read(&WEIGHTS, object, 0, len).await.unwrap_err();
        assert_eq!(refused.code(), "bad_request");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_node_sends_small_parts() {
    let shelf = Shelf::of(WEIGHTS, 2);
    let (mut socket, _) = served(shelf.clone(), Arc::new(|| true)).await;
    send(&socket, piece(0).encode(1)).await;
    let mut whole = Vec::new();
    loop {
        let (1, Reply::Data { more, bytes }) = reply(&mut socket).await else {
            panic!("another answer");
        };
        assert!(bytes.len() <= 16 * 1024);
        whole.extend_from_slice(&bytes);
        if !more {
            break;
        }
    }
    assert_eq!(Some(whole), shelf.piece(&WEIGHTS, 0));
    // The asking side joins them.
    let (socket, _) = served(shelf.clone(), Arc::new(|| true)).await;
    let got = asks(socket).piece(&WEIGHTS, 1).await.unwrap();
    assert_eq!(got, shelf.piece(&WEIGHTS, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_asks_against_the_rules_is_closed_with_the_code_of_the_rule() {
    let first = piece(0).encode(1);
    let cases: [(&[bytes::Bytes], CloseCode); 5] = [
        (&[vec![0xff; 40].into()], CloseCode::FrameUnknown),
        (&[first.slice(..40)], CloseCode::FrameLength),
        (&[Reply::None.encode(1)], CloseCode::ProtocolState),
        (&[vec![1; MAX_MESSAGE_BYTES].into()], CloseCode::FrameLength),
        (
            &[piece(0).encode(5), piece(1).encode(5)],
            CloseCode::ProtocolState,
        ),
    ];
    for (messages, code) in cases {
        let (store, gate) = Gated::new();
        let (mut socket, _) = served(store, never_busy()).await;
        for message in messages {
            send(&socket, message.clone()).await;
        }
        let closed = end_of(&mut socket).await;
        assert_eq!((closed.code, closed.by_us), (code, false));
        gate.open();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_seventeenth_unanswered_request_closes_the_connection() {
    let (store, gate) = Gated::new();
    let (mut socket, _) = served(store, never_busy()).await;
    for number in 0..17 {
        send(&socket, piece(number).encode(number)).await;
    }
    assert_eq!(end_of(&mut socket).await.code, CloseCode::CreditOverrun);
    gate.open();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_answers_against_the_rules_is_closed_and_every_request_fails() {
    let data = |len| Reply::Data {
        more: false,
        bytes: vec![0; len].into(),
    };
    let data = |number, len| data(len).encode(number);
    let cases = [
        (data(9, 5), CloseCode::ProtocolState), // an answer without a request
        (data(1, 9), CloseCode::FrameLength),   // too long: 8 bytes were asked for
        (data(1, 262_145), CloseCode::FrameTooBig), // longer than any piece
        (
            Reply::Held(Held::default()).encode(1),
            CloseCode::ProtocolState,
        ),
        (piece(0).encode(1), CloseCode::ProtocolState), // a request
        (vec![0xff; 200].into(), CloseCode::FrameUnknown), // no message
    ];
    for (message, code) in cases {
        let (ours, mut theirs) = PeerSocket::pair([id(2), id(1)], &path_rule()).await;
        let peer = asks(ours);
        let liar = async {
            theirs.recv().await.unwrap();
            send(&theirs, message).await;
            end_of(&mut theirs).await
        };
        let asked = peer.read(&WEIGHTS, Object::Head, 0, 8);
        let (answer, closed) = tokio::join!(asked, liar);
        assert_eq!((closed.code, closed.by_us), (code, false));
        let WeightsError::ProtocolViolation(violation) = answer.unwrap_err() else {
            panic!("another error");
        };
        assert_eq!(violation.code, code);
        let later = peer.held(&WEIGHTS).await.unwrap_err();
        assert_eq!(later.code(), "protocol_violation");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_fail_when_the_peer_closes_and_cancelled_ones_free_their_place() {
    let (ours, mut theirs) = PeerSocket::pair([id(2), id(1)], &path_rule()).await;
    let peer = asks(ours);
    // Sixteen requests are sent and cancelled; their answers come later.
    for number in 1..=16 {
        let asked = peer.piece(&WEIGHTS, 0);
        tokio::select! {
            _ = asked => panic!("nobody has answered"),
            sent = theirs.recv() => drop(sent.unwrap()),
        }
        if number == 16 {
            for number in 1..=16 {
                send(&theirs, Reply::None.encode(number)).await;
            }
        }
    }
    let close = async {
        let Frame::Binary(request) = theirs.recv().await.unwrap() else {
            panic!("a text message");
        };
        assert_eq!(Request::decode(&request), Ok((17, piece(3))));
        theirs.close(CloseCode::Shutdown);
    };
    let (answer, ()) = tokio::join!(peer.piece(&WEIGHTS, 3), close);
    let error = answer.unwrap_err();
    assert_eq!(error.code(), "connection_lost");
    assert!(error.to_string().contains("shutdown"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_does_not_answer_is_given_up() {
    let (ours, mut theirs) = PeerSocket::pair([id(2), id(1)], &path_rule()).await;
    let soon = Duration::from_millis(20);
    let peer = WeightsPeer::with_patience(ours, Arc::default(), soon);
    let error = peer.piece(&WEIGHTS, 0).await.unwrap_err();
    assert_eq!(error.code(), "timeout");
    let closed = end_of(&mut theirs).await;
    assert_eq!(closed.code, CloseCode::PipelineStalled);
    // Without a request, silence is no fault.
    let (ours, theirs) = PeerSocket::pair([id(2), id(1)], &path_rule()).await;
    let _peer = WeightsPeer::with_patience(ours, Arc::default(), soon);
    tokio::time::sleep(3 * soon).await;
    assert_eq!(theirs.closed(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_party_has_one_request_answered_at_a_time_however_many_connections_it_has() {
    let (store, gate) = Gated::new();
    let (first, weights) = served(store, never_busy()).await;
    let second = connect_to(&weights, 2).await;
    let mut neighbour = connect_to(&weights, 3).await;
    for number in 0..10 {
        send(&first, piece(number).encode(number)).await;
    }
    gate.until_entered(1).await;
    for number in 10..20 {
        send(&second, piece(number).encode(number)).await;
    }
    send(&neighbour, piece(500).encode(1)).await;
    gate.until_entered(2).await;
    assert_eq!(*gate.0.entered.lock(), [0, 500]);
    gate.open();
    assert_eq!(reply(&mut neighbour).await, (1, Reply::None));
    for (mut socket, numbers) in [(first, 0..10), (second, 10..20)] {
        for number in numbers {
            assert_eq!(reply(&mut socket).await, (number, Reply::None));
        }
    }
    assert!(gate.0.most.load(Ordering::SeqCst) <= 2);
}

/// A store that holds nothing, and whose calls wait until it is opened.
struct Gated(Gate);

#[derive(Clone, Default)]
struct Gate(Arc<GateState>);

#[derive(Default)]
struct GateState {
    open: AtomicBool,
    /// Pieces in the order in which they were asked for.
    entered: Mutex<Vec<u32>>,
    /// Calls now, and the most at once.
    calls: AtomicUsize,
    most: AtomicUsize,
}

impl Gated {
    fn new() -> (Gated, Gate) {
        let gate = Gate::default();
        (Gated(gate.clone()), gate)
    }
}

impl Gate {
    fn open(&self) {
        self.0.open.store(true, Ordering::SeqCst);
    }

    async fn until_entered(&self, calls: usize) {
        let wait = async {
            while self.0.entered.lock().len() < calls {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(TIMEOUT, wait).await.unwrap();
    }
}

impl WeightsStore for Gated {
    fn held(&self, _: &[u8; 32]) -> Option<Held> {
        None
    }

    fn piece(&self, _: &[u8; 32], index: u32) -> Option<Vec<u8>> {
        let state = &*self.0.0;
        let calls = state.calls.fetch_add(1, Ordering::SeqCst) + 1;
        state.most.fetch_max(calls, Ordering::SeqCst);
        state.entered.lock().push(index);
        while !state.open.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        state.calls.fetch_sub(1, Ordering::SeqCst);
        None
    }

    fn read(&self, _: &[u8; 32], _: Object, _: u64, _: u32) -> Option<Vec<u8>> {
        None
    }
}
