//! Queue of the calls whose spans wait for their audit, and the thread that takes them from it.

use std::panic::AssertUnwindSafe;
use std::sync::OnceLock;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_transport::background;
use tokio::sync::mpsc::{Sender, channel};

use crate::steps::chat_loop;

/// Calls whose spans wait for their draw. Further ones are not audited, so that their rows take no
/// memory.
const WAITING: usize = 16;

/// Audits all spans of a call. The future runs on a chat loop.
pub(super) type Audit = Box<dyn FnOnce() -> LocalBoxFuture<'static, ()> + Send>;

/// Queue of the thread, a low-priority one that starts with the first call.
pub(super) fn of_process() -> &'static Sender<Audit> {
    static QUEUE: OnceLock<Sender<Audit>> = OnceLock::new();
    QUEUE.get_or_init(|| {
        let (queue, mut audits) = channel::<Audit>(WAITING);
        background().spawn_blocking(move || {
            while let Some(audit) = audits.blocking_recv() {
                // A panic is a bug. It must not end the audits of this process for good.
                let audit = async move { audit().await };
                let _ = chat_loop::block_on(AssertUnwindSafe(audit).catch_unwind());
            }
        });
        queue
    })
}

/// For tests: queue of the audits of a caller, which run in a task of the test instead of the thread
/// of the process, with random numbers of the test. Clones share it.
#[cfg(feature = "testing")]
#[derive(Clone)]
pub struct AuditQueue {
    pub(super) queue: Sender<Audit>,
    lot: std::sync::Arc<dyn Fn() -> f64 + Send + Sync>,
}

#[cfg(feature = "testing")]
impl AuditQueue {
    /// `lot` returns a number of at least 0 and below 1 for each draw.
    pub fn new(lot: impl Fn() -> f64 + Send + Sync + 'static) -> (Self, Audits) {
        let (queue, audits) = channel(WAITING);
        let lot = std::sync::Arc::new(lot);
        (Self { queue, lot }, Audits(audits))
    }

    pub(super) fn is_drawn(&self, share: f64) -> bool {
        (self.lot)() < share
    }
}

#[cfg(feature = "testing")]
impl std::fmt::Debug for AuditQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuditQueue").finish_non_exhaustive()
    }
}

/// For tests: calls that wait for their audit.
#[cfg(feature = "testing")]
pub struct Audits(tokio::sync::mpsc::Receiver<Audit>);

#[cfg(feature = "testing")]
impl std::fmt::Debug for Audits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Audits").finish_non_exhaustive()
    }
}

#[cfg(feature = "testing")]
impl Audits {
    /// Audits the spans of all calls, one call after the other, until all clones of the queue are
    /// dropped.
    pub async fn run(mut self) {
        while let Some(audit) = self.0.recv().await {
            crate::run_in_task(audit()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_audit_that_panics_does_not_end_those_behind_it() {
        let (done, ended) = channel();
        let panics: Audit = Box::new(|| async { panic!("a bug") }.boxed_local());
        let ends: Audit = Box::new(|| async move { done.send(()).unwrap() }.boxed_local());
        for audit in [panics, ends] {
            of_process().blocking_send(audit).ok().unwrap();
        }
        ended.recv_timeout(Duration::from_secs(60)).unwrap();
    }
}
