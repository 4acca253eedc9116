//! Return to an earlier position on hosts with recurrent layers.
//!
//! Such a host can return to some positions only. It is asked to return, and tells how many
//! positions it kept. It gets the rows behind them again, from the history of its span. A host
//! without this message ends its stream if it cannot return, and all rows are replayed.
//!
//! ```text
//! caller   TRUNCATE to 300 ──▶ A    TRUNCATE to 300 ──▶ B
//! A        TRUNCATED 300            steps from 300 on
//! B        TRUNCATED 256            rows 256 to 299 again, then what comes from A
//! ```

use tokio::time::Instant;

use super::ShardedBackend;
use super::failure::HopFailure;

/// Distance of the positions to which every host may return (`specs/shard-host.md` 3.1).
const CHECKPOINTS: u32 = 64;

impl ShardedBackend {
    /// Asks the hosts to return to `position`, to which the pipeline has just returned. Their spans
    /// get no rows until they have answered.
    pub(super) fn rewind_hosts(&mut self, position: u32) {
        // Every host can return to the beginning.
        if !self.model.recurrent || position == 0 {
            return;
        }
        for (index, hop) in self.hops.iter_mut().enumerate() {
            if hop.span.link.descriptor.answers_truncation() {
                self.pipeline.hold(index, position);
                self.hop_failures.extend(hop.truncate(position).err());
            }
        }
    }

    /// Processes the answer of a host that was asked to return.
    pub(super) fn on_truncated(&mut self, index: usize, kept: u32) -> Result<(), HopFailure> {
        let Some(hop) = self.hops.get_mut(index) else {
            return Ok(());
        };
        let Some(asked) = self.pipeline.returns_to(index) else {
            return Err(hop.violation("it answered a truncation that was not requested"));
        };
        if kept > asked || (kept < asked && !kept.is_multiple_of(CHECKPOINTS)) {
            return Err(hop.violation(format!(
                "it kept {kept} positions where {asked}, or fewer by whole checkpoints of \
                 {CHECKPOINTS}, were asked for"
            )));
        }
        hop.truncated_at = None;
        hop.progressed(Instant::now());
        if !self.pipeline.kept(index, kept) {
            let span = hop.span.clone();
            self.replace(index, vec![span]);
        }
        Ok(())
    }
}
