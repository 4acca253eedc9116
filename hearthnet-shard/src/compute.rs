//! The compute thread: a loop around the [`Scheduler`].

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hearthnet_transport::stand_back;
use tokio::sync::{mpsc, watch};

use crate::engine::{EngineSource, Footprint, LayerEngine, LoadFault, StartProgress};
use crate::fault::StreamFault;
use crate::inbox::Inbox;
use crate::sched::Scheduler;

/// Reports of the first load.
#[derive(Debug)]
pub(crate) enum Loading {
    Progress(StartProgress),
    /// The weights are loaded.
    Done(Footprint),
    /// The weights could not be loaded; the thread has ended.
    Failed(LoadFault),
}

/// State of the compute thread, for other threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Running {
    /// Computing, or waiting for commands.
    Yes,
    /// Ended on request.
    Ended,
    /// It panicked (a defect), or the engine's device is gone.
    Failed,
}

/// Handle of the compute thread. The thread ends when the handle is dropped.
#[derive(Debug)]
pub(crate) struct Compute {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) running: watch::Receiver<Running>,
}

impl Compute {
    /// Starts the thread, which first loads the weights and reports its progress.
    ///
    /// # Errors
    /// If the system cannot create a thread.
    pub(crate) fn start<S: EngineSource>(
        scheduler: impl FnOnce() -> Scheduler<S> + Send + 'static,
        inbox: Arc<Inbox>,
        niceness: i32,
    ) -> std::io::Result<(Self, mpsc::UnboundedReceiver<Loading>)> {
        // Unbounded: the reader is waiting for the start, and a load sends few reports.
        let (report, reports) = mpsc::unbounded_channel();
        let (state, running) = watch::channel(Running::Yes);
        let compute = Self {
            inbox: Arc::clone(&inbox),
            running,
        };
        thread::Builder::new()
            .name("shard-compute".into())
            .spawn(move || {
                // The engine computes for milliseconds at a time. At normal priority it would delay
                // network tasks on the same core, this host's own included.
                stand_back(niceness);
                let body = AssertUnwindSafe(|| run(scheduler(), &inbox, report));
                let end = match std::panic::catch_unwind(body) {
                    Ok(Ok(())) => Running::Ended,
                    Ok(Err(Lost)) => {
                        tracing::error!("the engine's device is gone; the host stops serving");
                        Running::Failed
                    }
                    Err(_) => {
                        tracing::error!("the compute thread failed; the host stops serving");
                        Running::Failed
                    }
                };
                inbox.close();
                drop(inbox_rest(&inbox));
                state.send_replace(end);
            })?;
        Ok((compute, reports))
    }
}

impl Drop for Compute {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

/// The engine's device is gone.
struct Lost;

fn run<S: EngineSource>(
    mut scheduler: Scheduler<S>,
    inbox: &Inbox,
    report: mpsc::UnboundedSender<Loading>,
) -> Result<(), Lost> {
    let loaded = scheduler.load(&mut |step| {
        // A failed send means that the start was abandoned, which also closes the inbox.
        let _ = report.send(Loading::Progress(step));
    });
    match loaded {
        Ok(engine) => {
            let _ = report.send(Loading::Done(engine.footprint()));
        }
        Err(fault) => {
            let _ = report.send(Loading::Failed(fault));
            return Ok(());
        }
    }
    drop(report);

    let mut commands = VecDeque::new();
    let mut gathering: Option<Instant> = None;
    loop {
        let open = inbox.take(&mut commands);
        for command in commands.drain(..) {
            scheduler.handle(command);
        }
        if !open {
            break;
        }
        if scheduler.may_grow() {
            let since = *gathering.get_or_insert_with(Instant::now);
            if since.elapsed() < BATCH_WINDOW && spin_until_ready(inbox, BATCH_GAP) {
                continue;
            }
        }
        match scheduler.awaited() {
            Some(longest) if longest > SPIN_LIMIT => {
                // When this time is over, the batch runs with the rows that have arrived.
                inbox.wait(Some(longest));
                continue;
            }
            Some(longest) if spin_until_ready(inbox, longest) => continue,
            _ => {}
        }
        gathering = None;
        let worked = scheduler.turn();
        if worked && scheduler.is_lost() {
            let reason = "its device is gone".into();
            scheduler.end_all(&StreamFault::Internal { reason });
            return Err(Lost);
        }
        let timeout = scheduler.upkeep();
        if worked {
            if scheduler.delays_decode() {
                std::thread::yield_now();
            }
            continue;
        }
        inbox.wait(timeout);
    }
    scheduler.end_all(&StreamFault::ShuttingDown);
    Ok(())
}

/// How long a decode batch waits for the next row of a burst, and in all.
///
/// Rows that travelled together arrive some 30 us apart, and a batch takes hardly longer than a
/// row. A batch that starts with the first row makes all others wait for it.
///
/// Tried without: a caller's rows handed over as one record, and no wait. Eight chats at once over
/// two hosts were slower by 8% (3.49 times one chat with the waits, 3.21 without; medians of 3 and
/// 10 runs of `bench mesh` on a Xeon with AVX-512). The caller's batches fall into halves that
/// drift apart, and nothing brings them together again.
const BATCH_GAP: Duration = Duration::from_micros(100);
const BATCH_WINDOW: Duration = Duration::from_micros(400);

/// Limit of spinning. A parked thread can wake up late, which matters less in longer waits.
const SPIN_LIMIT: Duration = Duration::from_millis(1);

/// Spins until the inbox has something; `false` after `limit`. A timer could be late by as much.
fn spin_until_ready(inbox: &Inbox, limit: Duration) -> bool {
    let since = Instant::now();
    while !inbox.has_something() {
        if since.elapsed() >= limit {
            return false;
        }
        thread::yield_now();
    }
    true
}

/// Takes the commands that came too late. Dropping them frees their slots and tickets.
fn inbox_rest(inbox: &Inbox) -> VecDeque<crate::sched::Command> {
    let mut rest = VecDeque::new();
    inbox.take(&mut rest);
    rest
}
