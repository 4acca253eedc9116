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

/// What the first load reports.
#[derive(Debug)]
pub(crate) enum Loading {
    Progress(StartProgress),
    /// The weights are there.
    Done(Footprint),
    /// They could not be loaded; the thread has ended.
    Failed(LoadFault),
}

/// State of the compute thread, as the others see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Running {
    /// At work or waiting for some.
    Yes,
    /// It has ended as it was told to.
    Ended,
    /// It panicked, which is a defect, or what the engine computes on is gone.
    Failed,
}

/// A handle on the compute thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Compute {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) running: watch::Receiver<Running>,
}

impl Compute {
    /// Starts the thread, which first loads the weights and reports on it.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(crate) fn start<S: EngineSource>(
        scheduler: impl FnOnce() -> Scheduler<S> + Send + 'static,
        inbox: Arc<Inbox>,
        niceness: i32,
    ) -> std::io::Result<(Self, mpsc::UnboundedReceiver<Loading>)> {
        // Unbounded, for the reader is the one who waits for the start, and the reports
        // of a load are few.
        let (report, reports) = mpsc::unbounded_channel();
        let (state, running) = watch::channel(Running::Yes);
        let compute = Self {
            inbox: Arc::clone(&inbox),
            running,
        };
        thread::Builder::new()
            .name("shard-compute".into())
            .spawn(move || {
                // The engine computes for milliseconds at a time; whoever wants to send or take a
                // message on the same core, this host's own tasks included, would wait for that.
                stand_back(niceness);
                let body = AssertUnwindSafe(|| run(scheduler(), &inbox, report));
                let end = match std::panic::catch_unwind(body) {
                    Ok(Ok(())) => Running::Ended,
                    Ok(Err(Lost)) => {
                        tracing::error!("the engine's device is gone; the host serves no more");
                        Running::Failed
                    }
                    Err(_) => {
                        tracing::error!("the compute thread failed; the host serves no more");
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

/// What the engine computes on is gone.
struct Lost;

fn run<S: EngineSource>(
    mut scheduler: Scheduler<S>,
    inbox: &Inbox,
    report: mpsc::UnboundedSender<Loading>,
) -> Result<(), Lost> {
    let loaded = scheduler.load(&mut |step| {
        // Nobody listens any more: the start was given up, and the inbox closed.
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
            if since.elapsed() < GATHER && soon(inbox, GAP) {
                continue;
            }
        }
        match scheduler.awaited() {
            Some(longest) if longest > AWAKE => {
                // Nobody is awaited any more when that time is over.
                inbox.wait(Some(longest));
                continue;
            }
            Some(longest) if soon(inbox, longest) => continue,
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
            if scheduler.holds_up() {
                std::thread::yield_now();
            }
            continue;
        }
        inbox.wait(timeout);
    }
    scheduler.end_all(&StreamFault::ShuttingDown);
    Ok(())
}

/// How long a batch of decode rows waits for the next row of a burst, and how long in all.
///
/// Rows that travelled together come one after the other, some 30 us apart, and a batch takes
/// hardly longer than a row: whoever begins with the first makes all others wait for it.
///
/// It was tried without: what the caller sends in one piece handed over in one piece, and nobody
/// waited for. Eight chats at once over two hosts were slower by 8% (3.49 times one chat with
/// the waits, 3.21 without; medians of 3 and 10 runs of `bench mesh` on a Xeon with AVX-512), for the
/// halves into which the caller's batches fall drift apart, and nothing brings them together again.
const GAP: Duration = Duration::from_micros(100);
const GATHER: Duration = Duration::from_micros(400);

/// What is waited for longer, a timer may be late for.
const AWAKE: Duration = Duration::from_millis(1);

/// Whether something comes within `limit`; awake, for a timer would be late by as much.
fn soon(inbox: &Inbox, limit: Duration) -> bool {
    let since = Instant::now();
    while !inbox.has_something() {
        if since.elapsed() >= limit {
            return false;
        }
        thread::yield_now();
    }
    true
}

/// Commands that came too late; dropping them gives back what they hold.
fn inbox_rest(inbox: &Inbox) -> VecDeque<crate::sched::Command> {
    let mut rest = VecDeque::new();
    inbox.take(&mut rest);
    rest
}
