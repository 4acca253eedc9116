//! Where the layers run: on this machine, or on hosts.
//!
//! A [`Backend`] takes rows of one sequence and gives back the last one, having
//! been through every block. The chat above it cannot tell one from another, and
//! neither can the answer: the arithmetic is the same to the bit.
//!
//! Backends nest: one that runs some of the layers hands its rows to one that runs the next ones
//! ([`private_layers`](crate::private_layers)). One that does not have the last layer gives back all rows.

use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::PipelineId;

use crate::Cancel;
use crate::error::ChatError;
use crate::frames::Frame;
pub use crate::frames::{HopTimes, RouteHop};

/// What a run needs of its caller.
pub struct Run<'a> {
    /// Set when the caller gives up.
    pub cancel: &'a Cancel,
    /// Hears what becomes of the sequence and of its hosts: how much of a prompt is through, after
    /// every piece (whoever listens passes on what it has use for); which host has failed, or is
    /// waited for; who took over.
    pub notify: &'a mut dyn FnMut(Frame),
}

/// Rows that are handed in.
#[derive(Clone, Copy)]
#[allow(clippy::exhaustive_structs)] // Built by every caller, read by every backend.
pub struct Rows<'a> {
    /// Of the first of them, in the sequence. What it held from there on is forgotten first, so that
    /// a caller can go back and continue differently.
    pub position: u32,
    /// `[n, width]`, boundary-representable, `n >= 1`.
    pub values: &'a [f32],
    /// So many follow behind these, in further calls, before the output is asked for: hosts begin
    /// with what is there.
    pub more: u32,
}

impl<'a> Rows<'a> {
    /// All rows of a call, from `position` on.
    pub fn at(position: u32, values: &'a [f32]) -> Self {
        Self {
            position,
            values,
            more: 0,
        }
    }
}

/// Rows that have been through every block, on their way.
pub type Output<'a> = LocalBoxFuture<'a, Result<Vec<f32>, ChatError>>;

/// Runs the blocks of a model over one sequence, on the loop (`steps.rs`) of its chat. One that wraps
/// another does what [`Backend::inner`] does wherever it does not say otherwise.
pub trait Backend: Send {
    /// Hands in rows. What can be sent to hosts is on its way at the next boundary (`steps.rs`) after
    /// this, so that they work while the caller does something else; what goes wrong is told by
    /// [`Backend::output`], which must follow.
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()>;

    /// Waits until the rows handed in have been through every block; the last one, as it leaves the
    /// last block (`[width]`). Where the last block is not the model's, all rows handed in since the
    /// last output, and those before them may precede them.
    ///
    /// # Errors
    /// Any [`ChatError`]; the backend is then fit for nothing but being dropped.
    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a>;

    /// The backend that this one wraps, if it wraps one.
    fn inner(&self) -> Option<&dyn Backend> {
        None
    }

    /// The same, to be told something.
    fn inner_mut(&mut self) -> Option<&mut dyn Backend> {
        None
    }

    /// What a row takes a layer that this machine runs itself: hosts are measured by it where they
    /// have nobody else beside them.
    fn beside(&mut self, per_layer: Duration) {
        if let Some(inner) = self.inner_mut() {
            inner.beside(per_layer);
        }
    }

    /// The hosts in order of layers.
    fn route(&self) -> Vec<RouteHop> {
        self.inner().map_or_else(Vec::new, Backend::route)
    }

    /// Times per hop since [`Backend::begin_call`]; one entry per hop of the route.
    fn times(&self) -> Vec<HopTimes> {
        self.inner().map_or_else(Vec::new, Backend::times)
    }

    /// A new call begins: times and failures are counted from here on. It may come to so many
    /// positions: hosts are asked whether they could hold them, before the first row is sent. More
    /// may be submitted all the same.
    fn begin_call(&mut self, positions: u32) {
        if let Some(inner) = self.inner_mut() {
            inner.begin_call(positions);
        }
    }

    /// The call has ended, and nothing is asked until the next one begins: hosts that want to
    /// leave need not wait for this sequence.
    fn end_call(&mut self) {
        if let Some(inner) = self.inner_mut() {
            inner.end_call();
        }
    }

    /// Its name in the flight record, if it is kept there.
    fn pipeline(&self) -> Option<PipelineId> {
        self.inner().and_then(Backend::pipeline)
    }

    /// Whether it could take another call, as far as is known here without asking anyone.
    fn is_alive(&self) -> bool {
        self.inner().is_none_or(Backend::is_alive)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::steps::block_on;

    /// [`Backend::submit`], then [`Backend::output`], on a loop of its own.
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
}
