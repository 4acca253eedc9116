//! Handles signals that end the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_orchestrator::Cancel;
use hearthnet_platform::process::hangup_is_ignored;
use hearthnet_platform::signals::{hangup, interrupt, terminate};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_util::sync::DropGuard;

use crate::cli::failure::{Failure, Kind, no_thread};
use crate::cli::runtime::runtime;

/// The first Ctrl-C (or SIGTERM) sets the returned request; the second ends the program.
pub(crate) fn watch_interrupt(runtime: &Runtime) -> Cancel {
    let asked = Cancel::default();
    let cancel = asked.clone();
    runtime.spawn(async move {
        let Ok(mut term) = terminate() else {
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
    asked
}

/// Returns a flag that is set by Ctrl-C or SIGTERM.
pub(crate) fn cancel_on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    // Signals are handled until the program ends, so the runtime is never dropped.
    let runtime = Box::leak(Box::new(runtime()?));
    let (seen, cancel) = (Arc::clone(&flag), watch_interrupt(runtime));
    runtime.spawn(async move {
        cancel.cancelled().await;
        seen.store(true, Ordering::Release);
    });
    Ok(flag)
}

/// Requests to stop: the first is orderly, the second immediate.
#[derive(Debug, Clone)]
pub(crate) struct Stop {
    asked: Cancel,
    twice: Cancel,
}

impl Stop {
    /// Counts SIGINT, SIGTERM and SIGHUP from now on, and with `lifeline` the end of standard
    /// input. SIGHUP (the terminal was closed) acts as SIGTERM: open streams are served to their
    /// end.
    pub(crate) fn listen(lifeline: bool) -> Result<Self, Failure> {
        let (sender, mut requests) = mpsc::channel(4);
        let mut kinds = vec![interrupt(), terminate()];
        if !hangup_is_ignored() {
            kinds.push(hangup());
        }
        for signals in kinds {
            let mut signals = signals.map_err(Failure::internal)?;
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
            asked: once.clone(),
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
    pub(crate) fn or_dropped(&self) -> (Self, DropGuard) {
        let (asked, twice) = (self.asked.child_token(), self.twice.clone());
        let dropped = asked.clone().drop_guard();
        (Self { asked, twice }, dropped)
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.asked.is_cancelled()
    }

    /// Resolves at the first request.
    pub(crate) async fn asked(&self) {
        self.asked.cancelled().await;
    }

    /// Resolves at the second request.
    pub(crate) async fn asked_twice(&self) {
        self.twice.cancelled().await;
    }
}
