//! Order among refused callers that return: the one refused first is served first. Pure.
//!
//! A caller refused because the queue is full is told when to retry, and is recorded until
//! `GRACE_MS` after that time. Free queue slots are reserved for recorded requests, in the order
//! of refusal; a new request only gets a slot beyond these. Retrying early or often thus gains
//! nothing, and a caller that stays away delays others only briefly. While the queue is empty and a
//! running slot is free, every request runs: slots are only reserved in the queue.
//!
//! A retry is recognised by its caller, its request digest and its connection:
//!
//! - on the same connection, the same request is the refused one;
//! - on another connection it is, if the refused one's connection is closed and its retry time has
//!   come. Among several identical ones, the oldest matches.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::fair_queue::quota_key;

/// Maximum numbers of recorded requests: in total, and per verified caller.
const MOST: (usize, usize) = (1024, 512);

/// How long after its retry time a request stays recorded, in milliseconds.
const GRACE_MS: u64 = 10_000;

/// Identity of a request, to recognise its retry.
#[derive(Debug, Clone, Default)]
#[allow(clippy::exhaustive_structs)] // Made by every interface.
pub struct RetryKey {
    /// Digest of the request. Kept in memory only, while the request is recorded.
    pub request: u64,
    /// Connection of the request, if there is one: the same `Arc` while it lasts.
    pub connection: Option<Arc<()>>,
}

#[derive(Debug)]
struct Refused {
    caller: String,
    request: u64,
    connection: Weak<()>,
    due_ms: u64,
}

/// Room in the queue for one caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// True if the request can run at once, or is the owner's and may always wait.
    pub(super) idle: bool,
    /// Free waiting slots.
    pub(super) all: usize,
    /// Free waiting slots that this caller may use.
    pub(super) own: usize,
}

/// Recorded requests, in the order of refusal.
#[derive(Debug, Default)]
pub(super) struct RetryQueue(Vec<Refused>);

impl RetryQueue {
    /// Admits a request and removes its record, or returns the number of requests ahead of it.
    /// `room_of` returns the room for a caller.
    pub(super) fn admit(
        &mut self,
        caller: &str,
        mark: &RetryKey,
        now_ms: u64,
        room_of: impl Fn(&str) -> Room,
    ) -> Result<(), usize> {
        self.0
            .retain(|refused| now_ms <= refused.due_ms.saturating_add(GRACE_MS));
        let own = self.find(caller, mark, now_ms);
        let ahead = own.unwrap_or(self.0.len());
        let mut before: BTreeMap<&str, usize> = BTreeMap::new();
        for refused in self.0.iter().take(ahead) {
            *before.entry(&refused.caller).or_default() += 1;
        }
        let own_before = before.get(caller).copied().unwrap_or_default();
        // A caller that has used up its own limits reserves no slots.
        let kept = before
            .into_iter()
            .map(|(name, count)| count.min(room_of(name).own));
        let (room, kept) = (room_of(caller), kept.sum::<usize>());
        if room.idle || (room.all > kept && room.own > own_before) {
            if let Some(own) = own {
                self.0.remove(own);
            }
            return Ok(());
        }
        Err(ahead)
    }

    /// Records a refused request, to be retried at `due_ms`.
    pub(super) fn remember(&mut self, caller: &str, mark: &RetryKey, now_ms: u64, due_ms: u64) {
        let own = self.find(caller, mark, now_ms);
        let connection = mark.connection.as_ref();
        let connection = connection.map_or_else(Weak::new, Arc::downgrade);
        if let Some(refused) = own.and_then(|own| self.0.get_mut(own)) {
            (refused.due_ms, refused.connection) = (due_ms, connection);
            return;
        }
        // Counts all full names of the caller.
        let alike = |r: &&Refused| quota_key(&r.caller) == quota_key(caller);
        let of_caller = self.0.iter().filter(alike).count();
        if self.0.len() < MOST.0 && of_caller < MOST.1 {
            self.0.push(Refused {
                caller: caller.to_owned(),
                request: mark.request,
                connection,
                due_ms,
            });
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    fn find(&self, caller: &str, mark: &RetryKey, now_ms: u64) -> Option<usize> {
        let alike = |r: &Refused| r.caller == caller && r.request == mark.request;
        let at = mark.connection.as_ref().map(Arc::as_ptr);
        let same = |r: &Refused| alike(r) && at.is_some_and(|at| r.connection.as_ptr() == at);
        let due = |r: &Refused| alike(r) && r.connection.strong_count() == 0 && r.due_ms <= now_ms;
        let same = self.0.iter().position(same);
        same.or_else(|| self.0.iter().position(due))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn room(all: usize) -> impl Fn(&str) -> Room {
        move |_| Room {
            idle: false,
            all,
            own: all,
        }
    }

    fn mark(request: u64) -> RetryKey {
        RetryKey {
            request,
            connection: None,
        }
    }

    #[test]
    fn retries_are_admitted_in_order_and_new_requests_after_them() {
        let mut returns = RetryQueue::default();
        for n in 0..3 {
            assert_eq!(returns.admit("a", &mark(n), 0, room(0)), Err(n as usize));
            returns.remember("a", &mark(n), 0, 1000);
        }
        // A single slot is free, and the third in order retries first: it is refused.
        assert_eq!(returns.admit("a", &mark(2), 1000, room(1)), Err(2));
        assert_eq!(returns.admit("b", &mark(9), 1000, room(3)), Err(3));
        assert_eq!(returns.admit("a", &mark(0), 1000, room(1)), Ok(()));
        assert_eq!(returns.admit("a", &mark(1), 1000, room(1)), Ok(()));
        assert_eq!(returns.admit("b", &mark(9), 1000, room(2)), Ok(()));
        assert_eq!(returns.0.len(), 1);
    }

    #[test]
    fn coming_back_early_and_often_keeps_a_place_and_gains_none() {
        let mut returns = RetryQueue::default();
        let connection = Some(Arc::new(()));
        let eager = RetryKey {
            request: 2,
            connection,
        };
        returns.remember("a", &mark(1), 0, 1000);
        for now in 0..50 {
            assert_eq!(returns.admit("a", &eager, now, room(1)), Err(1));
            returns.remember("a", &eager, now, 1000);
        }
        assert_eq!(returns.0.len(), 2);
        assert_eq!(returns.admit("a", &mark(1), 1000, room(1)), Ok(()));
        assert_eq!(returns.admit("a", &eager, 1000, room(1)), Ok(()));
    }

    #[test]
    fn callers_that_stay_away_are_forgotten() {
        let mut returns = RetryQueue::default();
        returns.remember("a", &mark(1), 0, 1000);
        assert_eq!(
            returns.admit("b", &mark(2), 1000 + GRACE_MS, room(1)),
            Err(1)
        );
        assert_eq!(
            returns.admit("b", &mark(2), 1001 + GRACE_MS, room(1)),
            Ok(())
        );
    }

    #[test]
    fn an_open_connection_keeps_its_own_place_among_requests_that_are_alike() {
        let mut returns = RetryQueue::default();
        let of = |connection: &Arc<()>| RetryKey {
            request: 7,
            connection: Some(Arc::clone(connection)),
        };
        let (first, second, third) = (Arc::new(()), Arc::new(()), Arc::new(()));
        returns.remember("a", &of(&first), 0, 1000);
        returns.remember("a", &of(&second), 0, 1000);
        // A caller that was just answered repeats its request: it matches no refused one.
        assert_eq!(returns.admit("a", &of(&third), 2000, room(2)), Err(2));
        assert_eq!(returns.admit("a", &of(&second), 2000, room(2)), Ok(()));
        // A retry on a new connection matches once the old one is closed and the time has come.
        drop(first);
        assert_eq!(returns.admit("a", &of(&third), 999, room(1)), Err(1));
        assert_eq!(returns.admit("a", &of(&third), 1000, room(1)), Ok(()));
        assert!(returns.0.is_empty());
    }

    #[test]
    fn one_caller_with_many_refused_requests_takes_nothing_from_others() {
        let mut returns = RetryQueue::default();
        // It already has the maximum number of waiting items.
        let room_of = |caller: &str| Room {
            idle: false,
            all: 4,
            own: if caller == "hog" { 0 } else { 4 },
        };
        for n in 0..10_000 {
            assert!(returns.admit("hog", &mark(n), 0, room_of).is_err());
            returns.remember("hog", &mark(n), 0, 1000);
        }
        assert_eq!(returns.0.len(), MOST.1);
        assert_eq!(returns.admit("other", &mark(1), 0, room_of), Ok(()));
    }

    #[test]
    fn an_idle_service_admits_every_request() {
        let mut returns = RetryQueue::default();
        returns.remember("a", &mark(1), 0, 1000);
        let idle = |_: &str| Room {
            idle: true,
            all: 0,
            own: 0,
        };
        assert_eq!(returns.admit("b", &mark(2), 0, idle), Ok(()));
    }

    proptest! {
            /// Closed loop: every client retries when told to, or asks again once answered. No
            /// client starves at any size. If the queue is long enough to bridge the seconds until
            /// the next retry, no client gets much more than others.
            #[test]
            fn callers_that_retry_when_told_are_served_equally(
                clients in 2usize..60,
                places in 1usize..4,
                waiting in 1usize..12,
                connected in any::<bool>(),
            ) {
                let mut returns = RetryQueue::default();
                let marks: Vec<RetryKey> = (0..clients as u64)
                    .map(|n| RetryKey {
                        // With connections, all clients send the same request.
                        request: if connected { 0 } else { n },
                        connection: connected.then(|| Arc::new(())),
                    })
                    .collect();
                let mut queue = std::collections::VecDeque::new();
                let mut running: Vec<(u64, usize)> = Vec::new();
                let mut wakes = vec![0u64; clients];
                let mut answered = vec![0u32; clients];
                let rounds = 20;
                // An answer takes a second; time advances in steps of 0.1 s.
                for now in (0..rounds * 1000 * clients as u64 / places as u64).step_by(100) {
                    let ended: Vec<usize> =
                        running.extract_if(.., |(end, _)| *end <= now).map(|(_, n)| n).collect();
                    for n in ended {
                        answered[n] += 1;
                        wakes[n] = now;
                    }
                    while running.len() < places && let Some(n) = queue.pop_front() {
                        running.push((now + 1000, n));
                    }
                    for n in 0..clients {
                        if wakes[n] > now {
                            continue;
                        }
                        let room = Room {
                            idle: running.len() < places && queue.is_empty(),
                            all: waiting - queue.len(),
                            own: waiting - queue.len(),
                        };
                        match returns.admit("all", &marks[n], now, |_| room) {
                            Ok(()) if room.idle => {
                                running.push((now + 1000, n));
                                wakes[n] = u64::MAX;
                            }
                            Ok(()) => {
                                queue.push_back(n);
                                wakes[n] = u64::MAX;
                            }
                            Err(ahead) => {
                                // In whole seconds, like HTTP's `Retry-After`.
                                let after = (ahead as u64 + 1).div_ceil(places as u64) * 1000;
                                returns.remember("all", &marks[n], now, now + after);
                                wakes[n] = now + after;
                            }
                        }
                    }
                }
                let (least, most) = (answered.iter().min().unwrap(), answered.iter().max().unwrap());
                prop_assert!(*least >= 5, "{answered:?}");
    prop_assert!(waiting < 2 * places || *most <= 3 * *least, "{answered:?}");
            }
        }
}
