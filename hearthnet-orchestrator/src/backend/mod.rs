//! Where the layers run: on this machine, or on hosts.
//!
//! A [`Backend`] runs rows of one sequence through all of its blocks and returns the last row.
//! Local and remote backends compute the same result, to the bit.
//!
//! Backends nest: one that runs some of the layers passes its rows to one that runs the next. A
//! backend without the last layer returns all rows.
//!
//! | layers | where |
//! |---|---|
//! | on hosts | [`sharded`] |
//! | steps in flight, replay after a failure | `pipeline/` (pure) |
//! | on this machine | [`local`] |
//! | on this machine around those on hosts, so that no host sees their input | [`private_layers`] |
//! | on this machine when hosts fail in the middle of an answer | [`fallback`] |
//! | host events for flight record, metrics and readers | `events.rs` |

pub(crate) mod events;
pub mod fallback;
pub mod local;
mod pipeline;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use pipeline::fuzzing;
pub mod private_layers;
pub mod sharded;

use std::future::ready;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::PipelineId;

use crate::Cancel;
use crate::error::ChatError;
use crate::frames::Frame;
pub use crate::frames::{HopTimes, RouteHop};

/// Cancellation and notifications of a run.
pub struct Run<'a> {
    pub cancel: &'a Cancel,
    /// Receives frames about the sequence and its hosts: prompt progress after every chunk (the
    /// receiver may thin it out), hosts that failed or are waited for, failovers.
    pub notify: &'a mut dyn FnMut(Frame),
}

/// Rows submitted to a backend.
#[derive(Clone, Copy)]
#[allow(clippy::exhaustive_structs)] // Built by every caller, read by every backend.
pub struct Rows<'a> {
    /// Position of the first row. The backend first truncates the sequence to it, so that a caller
    /// can go back and continue differently.
    pub position: u32,
    /// At least one row, boundary-representable, each with the values of
    /// [`RowShape::before`](hearthnet_files::spec::RowShape::before) all layers of the backend.
    pub values: &'a [f32],
    /// Number of rows that further calls submit before the output is requested; hosts start with
    /// the first ones.
    pub more: u32,
    /// Whether the output has all rows, and not only the last one.
    pub all: bool,
}

impl<'a> Rows<'a> {
    /// All rows of a call, starting at `position`.
    pub fn at(position: u32, values: &'a [f32]) -> Self {
        Self {
            position,
            values,
            more: 0,
            all: false,
        }
    }
}

/// Future of the rows that have passed every block.
pub type Output<'a> = LocalBoxFuture<'a, Result<Vec<f32>, ChatError>>;

/// Runs the blocks of a model over one sequence, on its chat's step loop (`chat_loop.rs`). The
/// default methods of a wrapper forward to [`Backend::inner`].
pub trait Backend: Send {
    /// Submits rows. They are sent to hosts by the next boundary (`chat_loop.rs`), so that the
    /// hosts compute while the caller does other work. Errors are reported by [`Backend::output`],
    /// which must follow.
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()>;

    /// Waits until the submitted rows have passed every block, and returns the last row
    /// (`[width]`). With [`Rows::all`], and from a backend without the model's last block, it returns
    /// all rows submitted since the last output, possibly preceded by earlier ones.
    ///
    /// # Errors
    /// Any [`ChatError`]; the backend must then be dropped.
    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a>;

    /// Goes back to `position`, between an output and the next submission. Returns the position
    /// from which rows have to be submitted again: an earlier one if the state of a layer can only
    /// return to that.
    fn rewind(&mut self, position: u32) -> LocalBoxFuture<'_, Result<u32, ChatError>> {
        match self.inner_mut() {
            Some(inner) => inner.rewind(position),
            None => ready(Ok(position)).boxed_local(),
        }
    }

    /// The wrapped backend, if there is one.
    fn inner(&self) -> Option<&dyn Backend> {
        None
    }

    /// The wrapped backend, mutable.
    fn inner_mut(&mut self) -> Option<&mut dyn Backend> {
        None
    }

    /// Sets this machine's own time per row and layer. It is the reference for hosts that have no
    /// other host to be compared with.
    fn set_reference_speed(&mut self, per_layer: Duration) {
        if let Some(inner) = self.inner_mut() {
            inner.set_reference_speed(per_layer);
        }
    }

    /// Hops in layer order.
    fn route(&self) -> Vec<RouteHop> {
        self.inner().map_or_else(Vec::new, Backend::route)
    }

    /// Times per hop since [`Backend::begin_call`]; one entry per hop of the route.
    fn times(&self) -> Vec<HopTimes> {
        self.inner().map_or_else(Vec::new, Backend::times)
    }

    /// Starts a call: resets its times and failures. Before the first row, hosts are asked for room
    /// for `positions`; more may be submitted.
    fn begin_call(&mut self, positions: u32) {
        if let Some(inner) = self.inner_mut() {
            inner.begin_call(positions);
        }
    }

    /// Copy of the sequence within the same call, after an output. Both continue by themselves.
    /// `None` if there is no room for another sequence, or the backend cannot be copied now.
    fn fork(&mut self) -> LocalBoxFuture<'_, Option<Box<dyn Backend>>> {
        ready(None).boxed_local()
    }

    /// Ends the call: the sequence is idle until the next one, so hosts that leave need not wait
    /// for it.
    fn end_call(&mut self) {
        if let Some(inner) = self.inner_mut() {
            inner.end_call();
        }
    }

    /// Id of the pipeline in the flight record, if it is recorded there.
    fn pipeline(&self) -> Option<PipelineId> {
        self.inner().and_then(Backend::pipeline)
    }

    /// Returns true if the backend could take another call, judged by local state only.
    fn is_alive(&self) -> bool {
        self.inner().is_none_or(Backend::is_alive)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::steps::chat_loop::block_on;

    /// Runs [`Backend::submit`] and [`Backend::output`] on their own loop.
    pub(crate) fn run_rows(
        backend: &mut dyn Backend,
        position: u32,
        rows: &[f32],
        run: &mut Run<'_>,
    ) -> Result<Vec<f32>, ChatError> {
        block_on(async {
            backend.submit(Rows::at(position, rows), run.cancel).await;
            backend.output(run).await
        })
    }

    /// As [`run_rows`], without events.
    pub(crate) fn run_quietly(
        backend: &mut dyn Backend,
        position: u32,
        rows: &[f32],
        cancel: &Cancel,
    ) -> Result<Vec<f32>, ChatError> {
        let notify = &mut |_| {};
        run_rows(backend, position, rows, &mut Run { cancel, notify })
    }

    /// Runs a prompt, and returns the rows of all its positions.
    pub(crate) fn run_all(
        backend: &mut dyn Backend,
        rows: &[f32],
        cancel: &Cancel,
    ) -> Result<Vec<f32>, ChatError> {
        let notify = &mut |_| {};
        let all = Rows {
            all: true,
            ..Rows::at(0, rows)
        };
        block_on(async {
            backend.submit(all, cancel).await;
            backend.output(&mut Run { cancel, notify }).await
        })
    }
}
