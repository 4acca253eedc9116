//! Request bodies, each copied into one buffer as it arrives.
//!
//! hyper yields a body in the frames that the client sent, each with its own bookkeeping: if they
//! were kept, a body of 1-byte chunks would cost 35 bytes of memory per byte. Here a frame is
//! dropped once copied. The first [`FREE_BYTES`] of each body are bounded by the number of
//! concurrent requests; the rest of a buffer is counted in pieces, over all connections and per
//! caller.

use axum::body::{Body, HttpBody as _};
use hearthnet_transport::Place;

use super::permits::PermitPool;

/// Bytes of each body outside of the common store. 256 requests use 16 MiB of them.
const FREE_BYTES: usize = 64 << 10;

/// Allocation unit of the common store.
const PIECE_BYTES: usize = 64 << 10;

/// Minimum size of the common store: 32 bodies of the default limit, 1 MiB.
const STORE_BYTES: usize = 32 << 20;

/// Minimum number of maximum-size bodies in the store; one caller may use three of them.
const GREATEST_BODIES: usize = 4;

/// Reads request bodies, and counts large responses, within a limit per body and a limit on all concurrent ones.
pub(super) struct Bodies {
    limit: usize,
    store: PermitPool,
}

/// Reason that a body was not read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotRead {
    /// The body exceeds its limit.
    TooLarge,
    /// The common store is full.
    Full,
    /// The client disconnected or violated HTTP.
    Broken,
}

/// Part of the store that a body takes, until it is dropped.
pub(super) type Room = Vec<Place<String>>;

impl Bodies {
    /// Creates a reader for bodies of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        let pieces = |bytes: usize| bytes.div_ceil(PIECE_BYTES);
        let store = STORE_BYTES.max(limit.saturating_mul(GREATEST_BODIES));
        Self {
            limit,
            store: PermitPool::new(pieces(store), pieces(limit)),
        }
    }

    /// Limit for one body, in bytes.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Reads a body of the caller `who` to its end. Trailers are dropped. The room is held for the
    /// bytes, or for what is parsed from them.
    ///
    /// # Errors
    /// [`NotRead`]; the bytes read so far are dropped.
    pub(super) async fn read(&self, body: Body, who: &str) -> Result<(Vec<u8>, Room), NotRead> {
        let mut body = std::pin::pin!(body);
        let (mut bytes, mut room) = (Vec::new(), Vec::new());
        while let Some(frame) = std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            let Ok(data) = frame.map_err(|_| NotRead::Broken)?.into_data() else {
                continue;
            };
            let needed = bytes.len().saturating_add(data.len());
            if needed > self.limit {
                return Err(NotRead::TooLarge);
            }
            if needed > bytes.capacity() {
                // Doubling bounds the number of copies; the limit bounds the memory.
                let doubled = bytes.capacity().saturating_mul(2).max(FREE_BYTES);
                let capacity = doubled.max(needed).min(self.limit);
                let beyond = capacity.saturating_sub(FREE_BYTES);
                while room.len() < beyond.div_ceil(PIECE_BYTES) {
                    let piece = self.store.take(who.to_owned());
                    room.push(piece.map_err(|_| NotRead::Full)?);
                }
                bytes.reserve_exact(capacity - bytes.len());
            }
            bytes.extend_from_slice(&data);
        }
        Ok((bytes, room))
    }

    /// Room for `bytes` of a response to the caller `who`.
    ///
    /// # Errors
    /// [`NotRead::Full`].
    pub(super) fn reserve(&self, bytes: usize, who: &str) -> Result<Room, NotRead> {
        let pieces = bytes.saturating_sub(FREE_BYTES).div_ceil(PIECE_BYTES);
        (0..pieces)
            .map(|_| self.store.take(who.to_owned()).map_err(|_| NotRead::Full))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::Bytes;
    use futures_util::{FutureExt as _, stream};

    use super::*;
    use crate::service::fair_queue::OWNER;

    fn in_pieces(bytes: usize, piece: usize) -> Body {
        let pieces = bytes.div_ceil(piece);
        let one = move |n| Bytes::from(vec![b'x'; piece.min(bytes - n * piece)]);
        Body::from_stream(stream::iter(
            (0..pieces).map(move |n| Ok::<_, std::io::Error>(one(n))),
        ))
    }

    fn read(bodies: &Bodies, body: Body, who: &str) -> Result<(Vec<u8>, Room), NotRead> {
        bodies.read(body, who).now_or_never().expect("all is there")
    }

    /// Frame that counts its live instances.
    struct Counted(Arc<AtomicUsize>);

    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            b"x"
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_body_in_pieces_of_one_byte_keeps_none_of_them() {
        let (alive, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let (of_frames, seen) = (Arc::clone(&alive), Arc::clone(&most));
        let frames = (0..10_000).map(move |_| {
            seen.fetch_max(
                1 + of_frames.fetch_add(1, Ordering::Relaxed),
                Ordering::Relaxed,
            );
            let frame = Bytes::from_owner(Counted(Arc::clone(&of_frames)));
            Ok::<_, std::io::Error>(frame)
        });
        let bodies = Bodies::new(1 << 20);
        let (whole, _) = read(&bodies, Body::from_stream(stream::iter(frames)), "a").unwrap();
        assert_eq!(whole, vec![b'x'; 10_000]);
        assert_eq!(most.load(Ordering::Relaxed), 1);
        assert!(whole.capacity() <= FREE_BYTES);
    }

    #[test]
    fn a_body_is_whole_up_to_its_limit_and_takes_no_more_memory_than_it() {
        let bodies = Bodies::new(200_000);
        for piece in [1, 7, 60_000, 200_000] {
            let (whole, _) = read(&bodies, in_pieces(200_000, piece), "a").unwrap();
            assert_eq!((whole.len(), whole.capacity()), (200_000, 200_000));
            let long = read(&bodies, in_pieces(200_001, piece), "a");
            assert_eq!(long.unwrap_err(), NotRead::TooLarge);
        }
        let broken = stream::iter([
            Ok(Bytes::from_static(b"{")),
            Err(std::io::Error::other("gone")),
        ]);
        let broken = read(&bodies, Body::from_stream(broken), "a");
        assert_eq!(broken.unwrap_err(), NotRead::Broken);
    }

    #[test]
    fn bodies_that_arrive_together_are_bounded_and_small_ones_and_the_owners_are_let_in() {
        let bodies = Bodies::new(1 << 20);
        let large = |who: &str| read(&bodies, in_pieces(1 << 20, 60_000), who);
        let hog: Vec<_> = std::iter::from_fn(|| large("hog").ok()).collect();
        assert_eq!(
            hog.len(),
            25,
            "three quarters of 32 MiB, and what is free of each"
        );
        let others: Vec<_> = std::iter::from_fn(|| large("other").ok()).collect();
        assert_eq!(others.len(), 9);
        assert_eq!(large("third").unwrap_err(), NotRead::Full);
        assert!(read(&bodies, in_pieces(FREE_BYTES, 1000), "third").is_ok());
        assert!(large(OWNER).is_ok());
        drop((hog, others));
        assert!(large("third").is_ok());
    }

    #[test]
    fn room_for_a_response_is_that_of_bodies() {
        let bodies = Bodies::new(1 << 20);
        assert!(bodies.reserve(FREE_BYTES, "a").unwrap().is_empty());
        let room = bodies.reserve(24 << 20, "a").unwrap();
        assert_eq!(bodies.reserve(1 << 20, "a").unwrap_err(), NotRead::Full);
        let body = in_pieces(1 << 20, 60_000);
        assert_eq!(read(&bodies, body, "a").unwrap_err(), NotRead::Full);
        drop(room);
        assert!(bodies.reserve(24 << 20, "a").is_ok());
    }

    #[test]
    fn of_the_greatest_bodies_that_may_be_configured_several_fit() {
        let bodies = Bodies::new(64 << 20);
        let whole: Vec<_> = (0..3)
            .map(|_| read(&bodies, in_pieces(64 << 20, 1 << 20), "a").unwrap())
            .collect();
        drop(whole);
    }
}
