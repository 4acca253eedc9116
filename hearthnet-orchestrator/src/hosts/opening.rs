//! Session that is being opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, select_all};
use tokio::runtime::Handle;
use tokio::time::timeout_at;

use crate::error::ChatError;
use crate::hosts::link::HostLink;

/// Result of an attempt.
pub(super) type Outcome = Result<Arc<HostLink>, ChatError>;

/// Set once the host has answered within an attempt: its key is proved, so it is slow rather than
/// offline. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub(super) struct SignOfLife(Arc<AtomicBool>);

impl SignOfLife {
    pub(super) fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Session that is being opened by a task. The task continues when no search waits for it any more,
/// so that the next search finds the session. Clones wait for the same task.
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

    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Returns true if the host has given a sign of life.
    pub(super) fn is_heard(&self) -> bool {
        self.heard.0.load(Ordering::Relaxed)
    }

    /// The result, if there is one yet.
    pub(super) fn now(&self) -> Option<Outcome> {
        self.outcome.clone().now_or_never()
    }
}

/// Waits until one of the attempts has ended, at most until `until`. Returns at once if there are
/// none.
pub(super) async fn any_of<'a>(
    openings: impl IntoIterator<Item = &'a Opening>,
    until: Option<Instant>,
) {
    let outcomes = openings.into_iter().map(|one| one.outcome.clone());
    let outcomes: Vec<_> = outcomes.collect();
    if outcomes.is_empty() {
        return;
    }
    let any = select_all(outcomes);
    match until {
        Some(until) => drop(timeout_at(until.into(), any).await),
        None => drop(any.await),
    }
}
