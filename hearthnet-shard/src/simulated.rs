//! A host in a simulation: its sessions run over byte streams that the simulated network hands to
//! it, and its batches in a task. All else is the code of any other host.
//!
//! A simulation runs all its nodes in one thread, in virtual time, so a host in it must not start a
//! thread: the virtual clock would go on while that thread computes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::NodeKey;
use hearthnet_transport::{Acceptor, Arrival, Connection, Io, RefusedConnection};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::compute::{Compute, Loading, Lost, Running, load, take_in};
use crate::engine::EngineSource;
use crate::inbox::Inbox;
use crate::sched::{Command, Scheduler};
use crate::sync::mpsc::Receiver;

/// Place of a host in a simulated network. It outlives the host, which may be started again there.
#[allow(clippy::exhaustive_structs)] // Built by the simulator.
pub struct Simulated {
    pub key: NodeKey,
    /// Connections to this host.
    pub streams: Mutex<UnboundedReceiver<Box<dyn Io>>>,
    /// Duration of the next batch.
    pub pace: Box<dyn Fn() -> Duration + Send + Sync>,
}

impl fmt::Debug for Simulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulated").finish_non_exhaustive()
    }
}

/// Source of a host's sessions.
pub(crate) struct Handshakes {
    acceptor: Acceptor,
    place: Arc<Simulated>,
    /// Dropping this set aborts the handshakes.
    running: JoinSet<Result<Arrival, RefusedConnection>>,
}

impl Handshakes {
    pub(crate) fn new(acceptor: Acceptor, place: &Arc<Simulated>) -> Self {
        Self {
            acceptor,
            place: Arc::clone(place),
            running: JoinSet::new(),
        }
    }

    /// Returns the next open session. Cancel safe.
    pub(crate) async fn next(&mut self) -> Connection {
        let Self {
            acceptor,
            place,
            running,
        } = self;
        loop {
            let next_stream = async { place.streams.lock().await.recv().await };
            tokio::select! {
                biased;
                Some(arrived) = running.join_next() => {
                    if let Ok(Ok(Arrival::Session(connection))) = arrived {
                        return connection;
                    }
                }
                Some(io) = next_stream => {
                    let acceptor = acceptor.clone();
                    running.spawn(async move { acceptor.arrive(io).await });
                }
                else => std::future::pending().await,
            }
        }
    }
}

/// Starts the task that computes, instead of a thread. It needs a `LocalSet`.
pub(crate) fn compute<S: EngineSource>(
    mut scheduler: Scheduler<S>,
    place: Arc<Simulated>,
) -> (Compute, UnboundedReceiver<Loading>) {
    let (report, reports) = unbounded_channel();
    let (inbox, commands, woken) = Inbox::of_task();
    let (state, running) = watch::channel(Running::Yes);
    tokio::task::spawn_local(async move {
        let mut end = Running::Ended;
        if load(&mut scheduler, &report) {
            drop(report);
            if let Err(Lost) = run(&mut scheduler, &commands, &woken, &place).await {
                end = Running::Failed;
            }
        }
        drop((scheduler, commands));
        state.send_replace(end);
    });
    (Compute { inbox, running }, reports)
}

/// The loop of the compute thread, without its busy waits.
async fn run<S: EngineSource>(
    scheduler: &mut Scheduler<S>,
    commands: &Receiver<Command>,
    woken: &tokio::sync::Notify,
    place: &Simulated,
) -> Result<(), Lost> {
    loop {
        if !scheduler.survives_loss() {
            return Err(Lost);
        }
        if !take_in(scheduler, commands.try_iter()) {
            return Ok(());
        }
        if let Some(longest) = scheduler.awaited()
            && timeout(longest, woken.notified()).await.is_ok()
        {
            continue;
        }
        let worked = scheduler.turn();
        let again = scheduler.upkeep();
        match (worked, again) {
            (true, _) => sleep((place.pace)()).await,
            (false, Some(again)) => drop(timeout(again, woken.notified()).await),
            (false, None) => woken.notified().await,
        }
    }
}
