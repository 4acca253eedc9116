//! Copy of a sequence, for another answer to the same prompt.
//!
//! Each host opens a stream that begins with the positions of the sequence's own stream. The copy has
//! the history of its rows, which both share. So if a host refuses or fails, the rows are replayed as
//! in any sequence: a fork costs time at worst.
//!
//! ```text
//! sequence  stream 7 at host A ── rows ──▶ stream 4 at host B
//!               │ fork                         │ fork
//! copy      stream 8 at host A ── rows ──▶ stream 5 at host B
//! ```

use std::time::Duration;

use hearthnet_transport::Fork;
use tokio::time::Instant;

use super::ShardedBackend;

impl ShardedBackend {
    /// See [`Backend::fork`](crate::backend::Backend::fork). The source's streams must stay open, and
    /// as long as they are, until the hosts have opened those of the copy; otherwise its rows are
    /// replayed.
    pub(crate) fn forked(&self) -> Option<Self> {
        // Steps in flight, or a failure that was not handled, belong to this sequence only.
        let is_settled = self.running
            && self.pending.is_empty()
            && self.hop_failures.is_empty()
            && self.pipeline.is_idle()
            && self.pipeline.is_through();
        if !is_settled {
            return None;
        }
        let source = self.source.as_ref()?.fork()?;
        let (runtime, settings) = (self.runtime.clone(), self.settings.clone());
        let mut fork = Self::new(runtime, source, self.dtype, settings, Instant::now());
        fork.pipeline = self.pipeline.clone();
        fork.inputs = self.inputs.clone();
        fork.running = true;
        fork.positions = self.positions;
        fork.here = self.here.clone();
        fork.per_layer = self.per_layer;
        let position = self.pipeline.length();
        for (index, own) in self.hops.iter().enumerate() {
            let mut hop = fork.hop(index, own.span.clone());
            hop.fork = own.span.link.descriptor.forks().then_some(Fork {
                stream: own.stream,
                epoch: own.epoch,
                position,
            });
            if let (Some(receipts), Some(source)) = (&hop.receipts, &own.receipts) {
                receipts.fork_of(source, position);
            }
            fork.hops.push(hop);
        }
        let forks: Vec<bool> = fork.hops.iter().map(|hop| hop.fork.is_some()).collect();
        for (index, forks) in forks.into_iter().enumerate() {
            match forks {
                true => fork.open_streams(index..index + 1),
                // The host does not announce forks: its rows are replayed.
                false => {
                    let span = fork.hops.get(index).map(|hop| hop.span.clone());
                    fork.replace(index, span.into_iter().collect());
                }
            }
        }
        fork.report_built(Duration::ZERO);
        Some(fork)
    }
}
