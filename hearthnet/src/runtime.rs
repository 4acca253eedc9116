//! The runtime for network I/O, and the signals that end what runs there.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearthnet_orchestrator::Cancel;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::failure::{Failure, Kind};

/// The runtime for network I/O. Chats and engines run on threads of their own.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Failure::internal)
}

/// Runs something to its end on a runtime of its own. What it leaves behind, as connections that say
/// goodbye, has half a second.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = runtime()?;
    let outcome = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}

/// A message for every SIGINT, SIGTERM and SIGHUP (the terminal was closed: open streams are served
/// to their end as with SIGTERM), and for the end of standard input when it is the lifeline.
pub(crate) fn stop_requests(lifeline: bool) -> Result<mpsc::Receiver<()>, Failure> {
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
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signal 1 is the lowest bit.
    ignored.is_some_and(|mask| mask & 1 == 1)
}

/// The first Ctrl-C (or SIGTERM) cancels what is being answered; the second ends the program.
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
