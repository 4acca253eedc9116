//! Handles signals that end the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_orchestrator::Cancel;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::cli::failure::{Failure, Kind, no_thread};
use crate::cli::runtime::runtime;

/// The first Ctrl-C (or SIGTERM) cancels the running answer; the second ends the program.
pub(crate) fn watch_interrupt(runtime: &Runtime, cancel: Cancel) {
    runtime.spawn(async move {
        let Ok(mut term) = signal(SignalKind::terminate()) else {
            return;
        };
        loop {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = term.recv() => {}
            }
            if cancel.is_cancelled() {
                std::process::exit(i32::from(Kind::Interrupted.exit_code()));
            }
            cancel.cancel();
        }
    });
}

/// Returns a flag that is set by Ctrl-C or SIGTERM.
pub(crate) fn cancel_on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let runtime = runtime()?;
    let (seen, cancel) = (Arc::clone(&flag), Cancel::default());
    watch_interrupt(&runtime, cancel.clone());
    let thread = std::thread::Builder::new().name("signals".into());
    let watching = thread.spawn(move || {
        // This thread keeps the runtime alive until the program ends, so that signals are handled.
        runtime.block_on(cancel.cancelled());
        seen.store(true, Ordering::Release);
        runtime.block_on(std::future::pending::<()>());
    });
    watching.map(|_| flag).map_err(|e| no_thread(&e))
}

/// Requests to stop: the first is orderly, the second immediate.
#[derive(Debug, Clone)]
pub(crate) struct Stop {
    /// Any of these counts as the first request.
    asked: Vec<Cancel>,
    twice: Cancel,
}

impl Stop {
    /// Counts SIGINT, SIGTERM and SIGHUP from now on, and with `lifeline` the end of standard
    /// input. SIGHUP (the terminal was closed) acts as SIGTERM: open streams are served to their
    /// end.
    pub(crate) fn listen(lifeline: bool) -> Result<Self, Failure> {
        let (sender, mut requests) = mpsc::channel(4);
        let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate()];
        if !hangup_is_ignored() {
            kinds.push(SignalKind::hangup());
        }
        for kind in kinds {
            let mut signals = signal(kind).map_err(Failure::internal)?;
            let sender = sender.clone();
            tokio::spawn(async move {
                while signals.recv().await.is_some() && sender.send(()).await.is_ok() {}
            });
        }
        if lifeline {
            let thread = std::thread::Builder::new().name("lifeline".into());
            let watching = thread.spawn(move || {
                let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                // No receiver: the program is already ending.
                let _ = sender.blocking_send(());
            });
            watching.map_err(|e| no_thread(&e))?;
        }
        let (once, twice) = (Cancel::default(), Cancel::default());
        let stop = Self {
            asked: vec![once.clone()],
            twice: twice.clone(),
        };
        tokio::spawn(async move {
            for cancel in [once, twice] {
                if requests.recv().await.is_some() {
                    cancel.cancel();
                }
            }
        });
        Ok(stop)
    }

    /// Returns a handle that also stops when the returned guard is dropped.
    pub(crate) fn or_dropped(&self) -> (Self, StopWhenDropped) {
        let (mut either, dropped) = (self.clone(), Cancel::default());
        either.asked.push(dropped.clone());
        (either, StopWhenDropped(dropped))
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.asked.iter().any(Cancel::is_cancelled)
    }

    /// Resolves at the first request.
    pub(crate) async fn asked(&self) {
        let asked = self.asked.iter().map(|cancel| Box::pin(cancel.cancelled()));
        futures_util::future::select_all(asked).await;
    }

    /// Resolves at the second request.
    pub(crate) async fn asked_twice(&self) {
        self.twice.cancelled().await;
    }
}

/// Requests a stop when dropped.
pub(crate) struct StopWhenDropped(Cancel);

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Whether the parent process ignores SIGHUP for this program, as `nohup` does.
fn hangup_is_ignored() -> bool {
    // If the system does not report it, SIGHUP is handled.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signal 1 is the lowest bit.
    ignored.is_some_and(|mask| mask & 1 == 1)
}
