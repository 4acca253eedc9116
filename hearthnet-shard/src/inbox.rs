//! Queue of commands to the thread, or the task, that computes.

use std::fmt;
use std::sync::Arc;

use tokio::sync::Notify;

use crate::sched::Command;
use crate::sync::mpsc::{self, Receiver, Sender};

/// Sending half. Clones share the queue.
#[derive(Clone)]
pub(crate) struct Inbox {
    commands: Sender<Command>,
    /// Wakes a task; a thread waits on the queue itself.
    task: Option<Arc<Notify>>,
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").finish_non_exhaustive()
    }
}

impl Inbox {
    /// Queue of a thread.
    pub(crate) fn of_thread() -> (Self, Receiver<Command>) {
        let (commands, queue) = mpsc::channel();
        let task = None;
        (Self { commands, task }, queue)
    }

    /// Queue of a task, which `Notify` wakes after each command.
    pub(crate) fn of_task() -> (Self, Receiver<Command>, Arc<Notify>) {
        let (commands, queue) = mpsc::channel();
        let woken = Arc::new(Notify::new());
        let task = Some(Arc::clone(&woken));
        (Self { commands, task }, queue, woken)
    }

    /// Hands over a command. Returns `false` if the thread or task has ended.
    pub(crate) fn send(&self, command: Command) -> bool {
        let sent = self.commands.send(command).is_ok();
        if let Some(task) = &self.task {
            task.notify_one();
        }
        sent
    }
}
