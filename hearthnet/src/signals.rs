//! What ends the program from outside.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_orchestrator::Cancel;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};

use crate::failure::{Failure, Kind};
use crate::runtime::runtime;

/// The first Ctrl-C (or SIGTERM) cancels what is being answered; the second ends the program.
pub(crate) fn watch_interrupt(runtime: &Runtime, cancel: Cancel) {
    runtime.spawn(async move {
        let Ok(mut term) =
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        else {
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

/// A flag that Ctrl-C and SIGTERM set.
pub(crate) fn cancel_on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let runtime = runtime()?;
    let (seen, cancel) = (Arc::clone(&flag), Cancel::default());
    watch_interrupt(&runtime, cancel.clone());
    std::thread::spawn(move || {
        // The runtime lives here for as long as the program does: it waits for the signals.
        runtime.block_on(cancel.cancelled());
        seen.store(true, Ordering::Release);
        runtime.block_on(std::future::pending::<()>());
    });
    Ok(flag)
}

/// A message for every SIGINT, SIGTERM and SIGHUP (the terminal was closed: open streams are served
/// to their end as with SIGTERM), and for the end of standard input when it is the lifeline.
pub(crate) fn stop_requests(lifeline: bool) -> Result<mpsc::Receiver<()>, Failure> {
    use tokio::signal::unix::{SignalKind, signal};
    let (sender, receiver) = mpsc::channel(4);
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
        std::thread::spawn(move || {
            let mut sink = [0; 64];
            while matches!(std::io::stdin().read(&mut sink), Ok(n) if n > 0) {}
            // The receiver is gone when the program is ending anyway.
            let _ = sender.blocking_send(());
        });
    }
    Ok(receiver)
}

/// Whether whoever started this program wants it to outlive the terminal, as `nohup` does.
fn hangup_is_ignored() -> bool {
    // Where the system does not tell, it is taken for one that was not asked to.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signal 1 is the lowest bit.
    ignored.is_some_and(|mask| mask & 1 == 1)
}

/// How often it was asked to stop: a second time means at once.
#[derive(Debug, Clone)]
pub(crate) struct Stop(Vec<watch::Receiver<u32>>);

impl Stop {
    /// Counts the requests.
    pub(crate) fn of(mut requests: mpsc::Receiver<()>) -> Self {
        let (count, counted) = watch::channel(0);
        tokio::spawn(async move {
            while requests.recv().await.is_some() {
                count.send_modify(|n| *n += 1);
            }
            // Nobody can ask any more, and nobody has to think so.
            std::future::pending::<()>().await;
        });
        Self(vec![counted])
    }

    /// What is asked of this one, and to stop when the other that is returned is dropped.
    pub(crate) fn or_dropped(&self) -> (Self, StopWhenDropped) {
        let (asked, either) = watch::channel(0);
        let mut all = self.0.clone();
        all.push(either);
        (Self(all), StopWhenDropped(asked))
    }

    async fn times(&self, least: u32) {
        let asked = self.0.iter().cloned().map(|mut count| {
            Box::pin(async move {
                if count.wait_for(|n| *n >= least).await.is_err() {
                    std::future::pending::<()>().await;
                }
            })
        });
        futures_util::future::select_all(asked).await;
    }

    /// Resolves when it was asked to stop.
    pub(crate) async fn asked(&self) {
        self.times(1).await;
    }

    /// Resolves when it was asked twice.
    pub(crate) async fn asked_twice(&self) {
        self.times(2).await;
    }
}

/// Asks something to stop when dropped.
pub(crate) struct StopWhenDropped(watch::Sender<u32>);

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        self.0.send_replace(1);
    }
}
