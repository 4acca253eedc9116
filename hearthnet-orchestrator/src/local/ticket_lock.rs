//! One thing for many, first come, first served.
//!
//! A plain mutex would not do: whoever gives it back and wants it again at once gets it before
//! those whom it wakes, and a long prompt would keep all other chats out until its end.

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Whoever asks is served in the order of asking.
#[derive(Debug)]
pub(super) struct TicketLock<T> {
    state: Mutex<State<T>>,
    moved: Condvar,
}

#[derive(Debug)]
struct State<T> {
    /// `None` while it is in use, and for good once somebody has panicked over it.
    thing: Option<T>,
    /// The number that the next one to ask draws.
    next: u64,
    /// The number whose turn it is.
    serving: u64,
}

/// A turn; the next one begins when it is dropped, whatever became of it.
struct Turn<'a, T> {
    line: &'a TicketLock<T>,
    thing: Option<T>,
    /// How many asked when it began, this one included.
    asking: usize,
}

impl<T> TicketLock<T> {
    pub(super) fn new(thing: T) -> Self {
        let state = State {
            thing: Some(thing),
            next: 0,
            serving: 0,
        };
        Self {
            state: Mutex::new(state),
            moved: Condvar::new(),
        }
    }

    /// Waits for a turn and uses it. `f` is told how many asked when the turn began, its own
    /// caller included. `None` if somebody has panicked over the thing, which is gone then.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut T, usize) -> R) -> Option<R> {
        let mut turn = self.wait();
        let mut thing = turn.thing.take()?;
        let result = f(&mut thing, turn.asking);
        turn.thing = Some(thing);
        Some(result)
    }

    fn wait(&self) -> Turn<'_, T> {
        let mut state = self.lock();
        let mine = state.next;
        state.next += 1;
        while state.serving != mine {
            self.moved.wait(&mut state);
        }
        Turn {
            line: self,
            thing: state.thing.take(),
            asking: usize::try_from(state.next - mine).unwrap_or(usize::MAX),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock()
    }

    /// How many have or await a turn.
    #[cfg(test)]
    pub(super) fn asking(&self) -> u64 {
        let state = self.lock();
        state.next - state.serving
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        let mut state = self.line.lock();
        state.thing = self.thing.take();
        state.serving += 1;
        drop(state);
        // Of those who wait one goes on, and only each of them knows whether it is the one.
        self.line.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn whoever_asks_again_at_once_comes_after_those_who_wait() {
        let line = TicketLock::new(Vec::new());
        let (hold, held) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let line = &line;
            scope.spawn(move || {
                line.with(|order, _| {
                    hold.send(()).unwrap();
                    released.recv().unwrap();
                    order.push("a");
                });
                line.with(|order, _| order.push("a again"));
            });
            held.recv().unwrap();
            for (name, ahead) in [("b", 1), ("c", 2)] {
                scope.spawn(move || line.with(|order, _| order.push(name)));
                while line.asking() == ahead {
                    thread::yield_now();
                }
            }
            release.send(()).unwrap();
        });
        let order = line.with(|order, asking| {
            assert_eq!(asking, 1);
            order.clone()
        });
        assert_eq!(order.unwrap(), ["a", "b", "c", "a again"]);
    }

    #[test]
    fn a_turn_knows_how_many_ask() {
        let line = TicketLock::new(());
        let (hold, held) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let line = &line;
            scope.spawn(move || {
                line.with(|(), asking| {
                    hold.send(()).unwrap();
                    released.recv().unwrap();
                    assert_eq!(asking, 1);
                })
            });
            held.recv().unwrap();
            let waiting: Vec<_> = (0..2)
                .map(|_| scope.spawn(move || line.with(|(), asking| asking).unwrap()))
                .collect();
            while line.asking() < 3 {
                thread::yield_now();
            }
            release.send(()).unwrap();
            let mut asking: Vec<_> = waiting.into_iter().map(|t| t.join().unwrap()).collect();
            asking.sort_unstable();
            assert_eq!(asking, [1, 2]);
        });
    }

    #[test]
    fn a_panic_loses_the_thing_and_holds_nobody_up() {
        let line = TicketLock::new(7);
        let panics = || line.with(|_, _| panic!("as told"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(line.with(|n, _| *n), None);
        assert_eq!(line.with(|n, _| *n), None);
    }
}
