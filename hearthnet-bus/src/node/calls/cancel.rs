//! A flag by which a caller gives up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Shared between the caller and the thread that answers. Cancelling is final.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<State>);

#[derive(Debug, Default)]
struct State {
    flag: AtomicBool,
    notify: Notify,
}

impl Cancel {
    /// Gives up; every clone sees it.
    pub fn cancel(&self) {
        self.0.flag.store(true, Ordering::Release);
        self.0.notify.notify_waiters();
    }

    /// Whether somebody gave up.
    pub fn is_cancelled(&self) -> bool {
        self.0.flag.load(Ordering::Acquire)
    }

    /// What a future comes to; `None` when somebody gives up first.
    pub async fn or<F: Future>(&self, future: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            () = self.cancelled() => None,
            output = future => Some(output),
        }
    }

    /// Waits until somebody gives up.
    pub async fn cancelled(&self) {
        let mut notified = std::pin::pin!(self.0.notify.notified());
        // Listening begins before looking, so that no cancellation falls in between.
        notified.as_mut().enable();
        if !self.is_cancelled() {
            notified.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_is_seen_by_every_clone() {
        let cancel = Cancel::default();
        let clone = cancel.clone();
        assert!(!clone.is_cancelled());
        cancel.cancel();
        assert!(clone.is_cancelled());
    }
}
