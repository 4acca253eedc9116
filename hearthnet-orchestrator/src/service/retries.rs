//! Callers that were refused and come back: who has been trying for longest is next. Pure.
//!
//! Whoever is refused for want of a place in the queue is told when to ask again, and remembered
//! until a while after. Places in the queue that become free are kept for those who are remembered,
//! the one that was refused first before the others; a newcomer has one that is left over. So asking
//! again earlier, or more often, gains nothing, and staying away holds nobody up for long. While
//! nothing waits, whoever asks runs: places are kept in the queue, and never an engine idle.
//!
//! What comes again is known by its caller, by what it asks, and by its connection:
//!
//! - on the same connection, the same request is the one that was refused;
//! - on another one it is, if the connection of the refused one is gone and its time has come. Of
//!   several that are alike in everything, the oldest.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::fair_queue::who_of;

/// Most requests that are remembered, and most of one caller.
const MOST: (usize, usize) = (1024, 512);

/// How long after it was to come back a request is remembered, in milliseconds.
const GRACE_MS: u64 = 10_000;

/// What tells one request of a caller from others when it comes again.
#[derive(Debug, Clone, Default)]
#[allow(clippy::exhaustive_structs)] // Made by every interface.
pub struct Mark {
    /// A digest of what is asked. Kept in memory only, and for as long as the request is remembered.
    pub request: u64,
    /// The connection that it came on, where that means anything: the same as long as it lasts.
    pub connection: Option<Arc<()>>,
}

#[derive(Debug)]
struct Refused {
    caller: String,
    request: u64,
    connection: Weak<()>,
    due_ms: u64,
}

/// Room in the queue, as a caller finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// Nothing waits, and a place to run is free; or it is the owner's turn in any case.
    pub(super) idle: bool,
    /// Places to wait.
    pub(super) all: usize,
    /// Those of them that the caller may have.
    pub(super) own: usize,
}

/// Who is remembered, the first refused first.
#[derive(Debug, Default)]
pub(super) struct Retries(Vec<Refused>);

impl Retries {
    /// Whether a request may have its place now; then it is remembered no more. `room_of` says what
    /// room a caller finds. `Err` with how many are to come before it.
    pub(super) fn admit(
        &mut self,
        caller: &str,
        mark: &Mark,
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
        // Who could not wait anyhow, for want of places of its own, keeps no other's.
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

    /// A request was refused, and told to come back at `due_ms`.
    pub(super) fn remember(&mut self, caller: &str, mark: &Mark, now_ms: u64, due_ms: u64) {
        let own = self.find(caller, mark, now_ms);
        let connection = mark.connection.as_ref();
        let connection = connection.map_or_else(Weak::new, Arc::downgrade);
        if let Some(refused) = own.and_then(|own| self.0.get_mut(own)) {
            (refused.due_ms, refused.connection) = (due_ms, connection);
            return;
        }
        // However many names it has.
        let alike = |r: &&Refused| who_of(&r.caller) == who_of(caller);
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

    /// Nobody need come back.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    fn find(&self, caller: &str, mark: &Mark, now_ms: u64) -> Option<usize> {
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

    fn mark(request: u64) -> Mark {
        Mark {
            request,
            connection: None,
        }
    }

    #[test]
    fn who_was_refused_first_is_next_and_a_newcomer_has_what_is_left() {
        let mut returns = Retries::default();
        for n in 0..3 {
            assert_eq!(returns.admit("a", &mark(n), 0, room(0)), Err(n as usize));
            returns.remember("a", &mark(n), 0, 1000);
        }
        // One place, and the third comes back first: it is not its turn.
        assert_eq!(returns.admit("a", &mark(2), 1000, room(1)), Err(2));
        assert_eq!(returns.admit("b", &mark(9), 1000, room(3)), Err(3));
        assert_eq!(returns.admit("a", &mark(0), 1000, room(1)), Ok(()));
        assert_eq!(returns.admit("a", &mark(1), 1000, room(1)), Ok(()));
        assert_eq!(returns.admit("b", &mark(9), 1000, room(2)), Ok(()));
        assert_eq!(returns.0.len(), 1);
    }

    #[test]
    fn coming_back_early_and_often_keeps_a_place_and_gains_none() {
        let mut returns = Retries::default();
        let connection = Some(Arc::new(()));
        let eager = Mark {
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
    fn whoever_stays_away_is_forgotten() {
        let mut returns = Retries::default();
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
        let mut returns = Retries::default();
        let of = |connection: &Arc<()>| Mark {
            request: 7,
            connection: Some(Arc::clone(connection)),
        };
        let (first, second, third) = (Arc::new(()), Arc::new(()), Arc::new(()));
        returns.remember("a", &of(&first), 0, 1000);
        returns.remember("a", &of(&second), 0, 1000);
        // Who has just been answered asks the same once more: it is nobody who was refused.
        assert_eq!(returns.admit("a", &of(&third), 2000, room(2)), Err(2));
        assert_eq!(returns.admit("a", &of(&second), 2000, room(2)), Ok(()));
        // What comes on a new connection, when the old one is gone and its time has come, is it.
        drop(first);
        assert_eq!(returns.admit("a", &of(&third), 999, room(1)), Err(1));
        assert_eq!(returns.admit("a", &of(&third), 1000, room(1)), Ok(()));
        assert!(returns.0.is_empty());
    }

    #[test]
    fn one_caller_with_many_refused_requests_takes_nothing_from_others() {
        let mut returns = Retries::default();
        // It waits with as many as it may already.
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
    fn nobody_is_kept_waiting_where_nothing_runs() {
        let mut returns = Retries::default();
        returns.remember("a", &mark(1), 0, 1000);
        let idle = |_: &str| Room {
            idle: true,
            all: 0,
            own: 0,
        };
        assert_eq!(returns.admit("b", &mark(2), 0, idle), Ok(()));
    }

    proptest! {
            /// A closed loop: everybody asks again when told to, or at once when answered. Whatever the
            /// sizes, nobody starves; and where the queue bridges the seconds in which those who were
            /// told to come back do not, nobody has much more than others.
            #[test]
            fn everybody_who_comes_back_when_told_is_answered_as_often_as_others(
                clients in 2usize..60,
                places in 1usize..4,
                waiting in 1usize..12,
                connected in any::<bool>(),
            ) {
                let mut returns = Retries::default();
                let marks: Vec<Mark> = (0..clients as u64)
                    .map(|n| Mark {
                        // With connections all ask the same.
                        request: if connected { 0 } else { n },
                        connection: connected.then(|| Arc::new(())),
                    })
                    .collect();
                let mut queue = std::collections::VecDeque::new();
                let mut running: Vec<(u64, usize)> = Vec::new();
                let mut wakes = vec![0u64; clients];
                let mut answered = vec![0u32; clients];
                let rounds = 20;
                // An answer takes a second; time goes by tenths.
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
                                // In whole seconds, as HTTP tells it.
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
