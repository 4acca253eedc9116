//! A session that is being opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use tokio::runtime::Handle;

use crate::error::ChatError;
use crate::link::HostLink;

/// What an attempt comes to.
pub(super) type Outcome = Result<Arc<HostLink>, ChatError>;

/// Whether the host has answered within an attempt: its key is proved, and it is only slow from then on.
/// Clones are the same one.
#[derive(Debug, Clone, Default)]
pub(super) struct SignOfLife(Arc<AtomicBool>);

impl SignOfLife {
    pub(super) fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A session that is being opened, in a task that goes on when nobody waits for it any more: what it
/// opens is at hand for the next search. Clones wait for the same one.
#[derive(Clone)]
pub(super) struct Opening {
    since: Instant,
    heard: SignOfLife,
    outcome: Shared<BoxFuture<'static, Outcome>>,
}

impl Opening {
    pub(super) fn begin(
        runtime: &Handle,
        heard: SignOfLife,
        attempt: impl Future<Output = Outcome> + Send + 'static,
    ) -> Self {
        let task = runtime.spawn(attempt);
        let outcome = async move {
            task.await.unwrap_or_else(|ended| {
                let why = format!("a connection task failed: {ended}");
                Err(ChatError::Engine(why))
            })
        };
        Self {
            since: Instant::now(),
            heard,
            outcome: outcome.boxed().shared(),
        }
    }

    /// When it began.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Whether the host has given a sign of life.
    pub(super) fn is_heard(&self) -> bool {
        self.heard.0.load(Ordering::Relaxed)
    }

    /// What it has come to, if it has.
    pub(super) fn now(&self) -> Option<Outcome> {
        self.outcome.clone().now_or_never()
    }

    /// Waits for what it comes to.
    pub(super) fn wait(&self) -> impl Future<Output = Outcome> + Unpin + use<> {
        self.outcome.clone()
    }
}
