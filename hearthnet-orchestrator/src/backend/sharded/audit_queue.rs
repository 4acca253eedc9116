//! Queue of the calls whose spans wait for their audit, and the thread that takes them from it.

use std::sync::OnceLock;

use hearthnet_transport::background;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Sender, channel};

use super::PumpSettings;
use super::audit::{Candidate, count};
use crate::hosts::receipts::Ledger;
use crate::steps::chat_loop;

/// Calls whose spans wait for their draw. Further ones are not audited, so that their rows take no
/// memory.
const WAITING: usize = 16;

/// Queue of the thread, a low-priority one that starts with the first candidate.
fn of_process() -> &'static Sender<Candidate> {
    static QUEUE: OnceLock<Sender<Candidate>> = OnceLock::new();
    QUEUE.get_or_init(|| {
        let (queue, mut candidates) = channel::<Candidate>(WAITING);
        background().spawn_blocking(move || {
            while let Some(candidate) = candidates.blocking_recv() {
                chat_loop::block_on(candidate.audit());
            }
        });
        queue
    })
}

fn queue(settings: &PumpSettings) -> Sender<Candidate> {
    #[cfg(feature = "testing")]
    if let Some(own) = &settings.audits {
        return own.queue.clone();
    }
    let _ = settings;
    of_process().clone()
}

impl Candidate {
    /// Hands the spans to the thread.
    pub(super) fn offer(self) {
        let runtime = self.runtime.clone();
        let _context = runtime.enter();
        // A full queue means that audits are behind: this call is left out.
        if let Err(TrySendError::Full(left_out)) = queue(&self.settings).try_send(self) {
            for span in left_out.spans.iter().filter(|span| left_out.is_drawn(span)) {
                let signed = span.receipts.look(Ledger::take_signed);
                left_out.not_auditable(span, count(&signed));
            }
        }
    }
}

/// For tests: audits in a task of the test instead of the thread of the process, with random numbers
/// of the test.
#[cfg(feature = "testing")]
pub(super) mod testing {
    use std::fmt;
    use std::sync::Arc;

    use tokio::sync::mpsc::{Receiver, Sender, channel};

    use super::super::audit::Candidate;
    use super::WAITING;
    use crate::run_in_task;

    /// Queue of the audits of a caller. Clones share it.
    #[derive(Clone)]
    pub struct AuditQueue {
        pub(super) queue: Sender<Candidate>,
        lot: Arc<dyn Fn() -> f64 + Send + Sync>,
    }

    impl AuditQueue {
        /// `lot` returns a number of at least 0 and below 1 for each draw.
        pub fn new(lot: impl Fn() -> f64 + Send + Sync + 'static) -> (Self, Audits) {
            let (queue, candidates) = channel(WAITING);
            let lot = Arc::new(lot);
            (Self { queue, lot }, Audits(candidates))
        }

        pub(in super::super) fn is_drawn(&self, share: f64) -> bool {
            (self.lot)() < share
        }
    }

    impl fmt::Debug for AuditQueue {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("AuditQueue").finish_non_exhaustive()
        }
    }

    /// Calls that wait for their audit.
    #[derive(Debug)]
    pub struct Audits(Receiver<Candidate>);

    impl Audits {
        /// Audits the spans of all calls, one call after the other, until all clones of the queue are
        /// dropped.
        pub async fn run(mut self) {
            while let Some(candidate) = self.0.recv().await {
                run_in_task(candidate.audit()).await;
            }
        }
    }
}
