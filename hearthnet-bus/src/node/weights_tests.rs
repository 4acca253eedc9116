//! Transfer of weights between whole nodes over loopback.

use std::sync::Arc;

use hearthnet_transport::{CloseCode, Frame};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::tests::{Home, TIMEOUT, founder_of, member, never_busy, refusal, until};
use super::weights::{Held, Object, Request, WeightsError, WeightsPeer, WeightsStore, path_rule};
use crate::community::log::Body;
use crate::testing::{ROOT, Shelf, id};

const WEIGHTS: [u8; 32] = [7; 32];

/// A founder with this store, and a member that is connected to it.
async fn with_store(store: impl WeightsStore) -> (Home, Home, WeightsPeer) {
    let first = founder_of(&[2]).await;
    first.node.serve_weights(Arc::new(store), never_busy());
    let second = member(2, &first).await;
    let peer = second.node.weights_of(&id(1)).await.unwrap();
    (first, second, peer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_fetches_weights_and_their_bytes_are_counted() {
    let shelf = Shelf::of(WEIGHTS, 20);
    let (first, second, peer) = with_store(shelf.clone()).await;
    assert_eq!(peer.held(&WEIGHTS).await.unwrap(), shelf.held(&WEIGHTS));
    let peer = Arc::new(peer);
    let fetched = (0..20).map(|index| {
        let peer = Arc::clone(&peer);
        tokio::spawn(async move { peer.piece(&WEIGHTS, index).await })
    });
    for (index, piece) in fetched.collect::<Vec<_>>().into_iter().enumerate() {
        let piece = timeout(TIMEOUT, piece).await.unwrap().unwrap();
        assert_eq!(piece.unwrap(), shelf.piece(&WEIGHTS, index as u32));
    }
    assert_eq!(first.node.weights_sent(), 19 * 262_144 + 1000);
    assert_eq!(second.node.weights_sent(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_members_get_weights_and_only_from_a_node_that_serves_them() {
    let first = founder_of(&[2]).await;
    let second = member(2, &first).await;
    let refused = second.node.weights_of(&id(1)).await.unwrap_err();
    assert_eq!(refused.code(), "not_served");
    let unknown = second.node.weights_of(&id(66)).await.unwrap_err();
    assert_eq!(unknown.code(), "unauthorized");

    let shelf = Shelf::of(WEIGHTS, 2);
    first.node.serve_weights(Arc::new(shelf), never_busy());
    // A stranger, also while there is an open invite; the root key.
    for seed in [66, ROOT] {
        let refused = first.dial(seed, &path_rule()).await;
        assert_eq!(refusal(refused), CloseCode::Unauthorized);
    }
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(second.node.weights_of(&id(1)).await.unwrap());
    }
    let full = second.node.weights_of(&id(1)).await.unwrap_err();
    assert!(matches!(full, WeightsError::Busy), "{full}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_is_revoked_in_the_middle_gets_nothing_more() {
    let gate = Arc::new(Mutex::new(()));
    let (first, _second, peer) = with_store(Blocked(Arc::clone(&gate))).await;
    let held_back = gate.lock().await;
    let asked = tokio::spawn(async move { peer.piece(&WEIGHTS, 0).await });
    until(|| gate_is_awaited(&gate)).await;
    first.revoke(2);
    let error = timeout(TIMEOUT, asked).await.unwrap().unwrap().unwrap_err();
    let WeightsError::ConnectionLost(closed) = error else {
        panic!("another error: {error}");
    };
    assert_eq!((closed.code, closed.by_us), (CloseCode::Revoked, false));
    drop(held_back);
    let again = first.dial(2, &path_rule()).await;
    assert_eq!(refusal(again), CloseCode::Revoked);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_blocks_does_not_stall_gossip() {
    let gate = Arc::new(Mutex::new(()));
    let (first, second, peer) = with_store(Blocked(Arc::clone(&gate))).await;
    let held_back = gate.lock().await;
    let peer = Arc::new(peer);
    let asked: Vec<_> = (0..16)
        .map(|index| {
            let peer = Arc::clone(&peer);
            tokio::spawn(async move { peer.piece(&WEIGHTS, index).await })
        })
        .collect();
    // Another connection asks as well, so that every call of the store that may run does.
    let other = first.dial(2, &path_rule()).await.unwrap();
    let request = Request::Piece {
        weights: WEIGHTS,
        index: 0,
    };
    let frame = Frame::Binary(request.encode(1));
    other.send(frame).await.unwrap();
    until(|| gate_is_awaited(&gate)).await;

    let name = "Oak Street".to_owned();
    first.append(Body::Named { name });
    let heads = |home: &Home| home.node.log().heads().to_cbor();
    until(|| heads(&first) == heads(&second)).await;
    assert!(asked.iter().all(|request| !request.is_finished()));
    drop(held_back);
    for request in asked {
        let answer = timeout(TIMEOUT, request).await.unwrap().unwrap();
        assert_eq!(answer.unwrap(), None);
    }
}

/// A store that holds nothing, and whose calls wait for a lock.
struct Blocked(Arc<Mutex<()>>);

/// Whether a call waits: the store's and the test's handle, and one for the call.
fn gate_is_awaited(gate: &Arc<Mutex<()>>) -> bool {
    Arc::strong_count(gate) > 2
}

impl WeightsStore for Blocked {
    fn held(&self, _: &[u8; 32]) -> Option<Held> {
        None
    }

    fn piece(&self, _: &[u8; 32], _: u32) -> Option<Vec<u8>> {
        let awaited = Arc::clone(&self.0);
        drop(awaited.blocking_lock());
        None
    }

    fn read(&self, _: &[u8; 32], _: Object, _: u64, _: u32) -> Option<Vec<u8>> {
        None
    }
}
