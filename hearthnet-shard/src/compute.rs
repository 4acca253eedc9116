//! The compute thread: a loop around the [`Scheduler`].

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use hearthnet_platform::machine::stand_back;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::engine::{EngineSource, Footprint, LayerEngine, LoadFault, StartProgress};
use crate::inbox::Inbox;
use crate::sched::{Command, Scheduler};
use crate::sync::mpsc::{Receiver, RecvTimeoutError};
use crate::sync::{Instant, recv_timeout, thread};

/// Reports of the first load.
#[derive(Debug)]
pub(crate) enum Loading {
    Progress(StartProgress),
    /// The weights are loaded.
    Done {
        weight_bytes: u64,
        footprint: Footprint,
    },
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
    /// It panicked (a defect), or the engine is lost for good.
    Failed,
}

/// Handle of the compute thread. The thread ends when the handle is dropped.
#[derive(Debug)]
pub(crate) struct Compute {
    pub(crate) inbox: Inbox,
    pub(crate) running: watch::Receiver<Running>,
}

impl Compute {
    /// Starts the thread, which first loads the weights and reports its progress.
    ///
    /// # Errors
    /// If the system cannot create a thread.
    pub(crate) fn start<S: EngineSource>(
        scheduler: impl FnOnce() -> Scheduler<S> + Send + 'static,
        niceness: i32,
    ) -> std::io::Result<(Self, UnboundedReceiver<Loading>)> {
        // Unbounded: the reader is waiting for the start, and a load sends few reports.
        let (report, reports) = unbounded_channel();
        let (inbox, commands) = Inbox::of_thread();
        let (state, running) = watch::channel(Running::Yes);
        let compute = Self { inbox, running };
        thread::Builder::new()
            .name("shard-compute".into())
            .spawn(move || {
                // The engine computes for milliseconds at a time. At normal priority it would delay
                // network tasks on the same core, this host's own included.
                stand_back(niceness);
                let body = AssertUnwindSafe(|| run(scheduler(), &commands, report));
                let end = match std::panic::catch_unwind(body) {
                    Ok(Ok(())) => Running::Ended,
                    Ok(Err(Lost)) => {
                        tracing::error!("the engine is lost; the host stops serving");
                        Running::Failed
                    }
                    Err(_) => {
                        tracing::error!("the compute thread failed; the host stops serving");
                        Running::Failed
                    }
                };
                // Frees the slots and tickets of commands that came too late.
                drop(commands);
                state.send_replace(end);
            })?;
        Ok((compute, reports))
    }

    /// Ends the thread after its current batch.
    pub(crate) fn stop(&self) {
        self.inbox.send(Command::Shutdown);
    }
}

impl Drop for Compute {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The engine is lost for good.
pub(crate) struct Lost;

/// Loads the weights for the first time, and reports it. Returns `false` if they cannot be loaded.
pub(crate) fn load<S: EngineSource>(
    scheduler: &mut Scheduler<S>,
    report: &UnboundedSender<Loading>,
) -> bool {
    let loaded = scheduler.load(&mut |step| {
        // A failed send means that the start was abandoned, which also stops this thread.
        let _ = report.send(Loading::Progress(step));
    });
    match loaded {
        Ok(engine) => {
            let _ = report.send(Loading::Done {
                weight_bytes: engine.weight_bytes(),
                footprint: engine.footprint(),
            });
        }
        Err(fault) => {
            let _ = report.send(Loading::Failed(fault));
            return false;
        }
    }
    true
}

/// Applies the commands that wait. Returns `false` after the last one of the host.
pub(crate) fn take_in<S: EngineSource>(
    scheduler: &mut Scheduler<S>,
    waiting: impl Iterator<Item = Command>,
) -> bool {
    for command in waiting {
        let is_last = matches!(command, Command::Shutdown);
        scheduler.handle(command);
        if is_last {
            return false;
        }
    }
    true
}

fn run<S: EngineSource>(
    mut scheduler: Scheduler<S>,
    inbox: &Receiver<Command>,
    report: UnboundedSender<Loading>,
) -> Result<(), Lost> {
    if !load(&mut scheduler, &report) {
        return Ok(());
    }
    drop(report);

    let mut gathering: Option<Instant> = None;
    // A command that ended a wait.
    let mut first = None;
    loop {
        // Before any command: an open after a loss finds no engine, and loads one.
        if !scheduler.survives_loss() {
            return Err(Lost);
        }
        let waiting = first.take().into_iter().chain(inbox.try_iter());
        if !take_in(&mut scheduler, waiting) {
            return Ok(());
        }
        if scheduler.may_grow() {
            let since = gathering.get_or_insert_with(Instant::now);
            if since.elapsed() < BATCH_WINDOW {
                first = spin(inbox, BATCH_GAP);
                if first.is_some() {
                    continue;
                }
            }
        }
        match scheduler.awaited() {
            Some(longest) if longest > SPIN_LIMIT => {
                // When this time is over, the batch runs with the rows that have arrived.
                first = park(inbox, Some(longest));
                continue;
            }
            Some(longest) => {
                first = spin(inbox, longest);
                if first.is_some() {
                    continue;
                }
            }
            None => {}
        }
        gathering = None;
        let worked = scheduler.turn();
        let timeout = scheduler.upkeep();
        if worked {
            if scheduler.delays_decode() {
                std::thread::yield_now();
            }
            continue;
        }
        first = park(inbox, timeout);
    }
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

/// Spins until a command comes; `None` after `limit`. A timer could be late by as much.
fn spin(inbox: &Receiver<Command>, limit: Duration) -> Option<Command> {
    let since = Instant::now();
    loop {
        if let Ok(command) = inbox.try_recv() {
            return Some(command);
        }
        if since.elapsed() >= limit {
            return None;
        }
        thread::yield_now();
    }
}

/// Sleeps until a command comes; `None` after `limit`.
fn park(inbox: &Receiver<Command>, limit: Option<Duration>) -> Option<Command> {
    let received = match limit {
        Some(limit) => recv_timeout(inbox, limit),
        None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
    };
    match received {
        Ok(command) => Some(command),
        Err(RecvTimeoutError::Timeout) => None,
        // The host is gone.
        Err(RecvTimeoutError::Disconnected) => Some(Command::Shutdown),
    }
}
