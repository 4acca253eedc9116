//! Chats that move from host to host together.
//!
//! A host computes the rows of several chats as one batch, for hardly more than one of them would
//! cost, and their answers come back together. Each chat then sees to its own, on its own thread,
//! and some are ready sooner than others: without more ado the first would be computed alone at the
//! next host, and batches would crumble from hop to hop. So those whose answers came together hold
//! a [`WriteBatch`]: what one of them sends goes out when the last one has sent, or has let go.
//!
//! ```text
//! host A: batch of a, b, c --> one record --> a, b, c --- c has sent ---> one record --> host B
//! ```
//!
//! Whoever is about to wait for anything else lets go first, so that nobody waits for a chat that
//! waits.

use std::sync::Arc;

use hearthnet_transport::{Message, SendError, Sender};
use parking_lot::{Mutex, MutexGuard};

/// Membership in a group of chats whose messages go out together, until it is dropped.
#[derive(Debug, Clone, Default)]
pub struct WriteBatch(Arc<Held>);

/// The sessions in which messages wait for the last member.
#[derive(Debug, Default)]
struct Held(Mutex<Vec<Sender>>);

impl WriteBatch {
    /// Members that have not let go.
    pub fn members(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Whether everybody else has let go.
    pub fn is_complete(&self) -> bool {
        self.members() == 1
    }

    /// Sends when the last member is through, or earlier if something else is sent in the same
    /// session; gives the message back where there is no room for it.
    ///
    /// # Errors
    /// As [`Sender::try_send`].
    pub(crate) fn send(
        &self,
        sender: &Sender,
        message: Message,
    ) -> Result<Option<Message>, SendError> {
        if self.is_complete() {
            return sender.try_send(message);
        }
        let back = sender.try_queue(message)?;
        let mut held = self.0.lock();
        if !held.iter().any(|other| other.is_same_session(sender)) {
            held.push(sender.clone());
        }
        Ok(back)
    }
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, Vec<Sender>> {
        self.0.lock()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.lock().drain(..).for_each(|sender| sender.flush());
    }
}
