//! Locks, queues, threads and short waits of the compute thread and of what it shares with
//! connections.
//!
//! With the feature `shuttle` they are those of the `shuttle` crate, whose tests decide at each of
//! them which thread runs next (`tests/schedules.rs`). They work in such tests only.

#[cfg(not(feature = "shuttle"))]
mod real {
    use std::sync::mpsc::{Receiver, RecvTimeoutError};
    use std::time::Duration;

    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32};
    pub(crate) use std::sync::mpsc;
    pub(crate) use std::thread;
    pub(crate) use std::time::Instant;

    pub(crate) use parking_lot::{Mutex, MutexGuard};

    pub(crate) fn recv_timeout<T>(
        queue: &Receiver<T>,
        limit: Duration,
    ) -> Result<T, RecvTimeoutError> {
        queue.recv_timeout(limit)
    }
}

#[cfg(feature = "shuttle")]
mod explored {
    use std::cell::Cell;
    use std::sync::PoisonError;
    use std::time::Duration;

    pub(crate) use shuttle::sync::MutexGuard;
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32};
    pub(crate) use shuttle::sync::mpsc;
    pub(crate) use shuttle::thread;

    use self::mpsc::{Receiver, RecvTimeoutError, TryRecvError};

    /// Mutex with the interface of `parking_lot`.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// A moment after which 200 us pass with each look at the time: a schedule has no clock.
    #[derive(Debug)]
    pub(crate) struct Instant(Cell<u32>);

    impl Instant {
        pub(crate) fn now() -> Self {
            Self(Cell::new(0))
        }

        pub(crate) fn elapsed(&self) -> Duration {
            self.0.set(self.0.get() + 1);
            Duration::from_micros(200) * self.0.get()
        }
    }

    /// A short wait ends when another thread has run; one of seconds does not end.
    pub(crate) fn recv_timeout<T>(
        queue: &Receiver<T>,
        limit: Duration,
    ) -> Result<T, RecvTimeoutError> {
        if limit >= Duration::from_secs(1) {
            return queue.recv().map_err(|_| RecvTimeoutError::Disconnected);
        }
        thread::yield_now();
        queue.try_recv().map_err(|error| match error {
            TryRecvError::Empty => RecvTimeoutError::Timeout,
            TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
        })
    }
}

#[cfg(feature = "shuttle")]
pub(crate) use explored::*;
#[cfg(not(feature = "shuttle"))]
pub(crate) use real::*;
