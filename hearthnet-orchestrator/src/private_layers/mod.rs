//! Layers that the caller computes itself: the first ones, so that no host sees the rows of the
//! embedding table, and, where it is asked for, the last ones.
//!
//! Rows that enter layer 0 are rows of a public table: looking them up gives the prompt back, word
//! by word. Rows that have been through some layers here are not in any table. What they still
//! tell is measured by `cargo run --release -p hearthnet-model --example leakage`.
//!
//! ```text
//!           embed     first layers       layers on hosts       last layers     head
//! tokens ────────► here ──────────► here ───────────────► ... ─────────► here ────► logits
//!                        boundary k                      boundary n - m
//! ```
//!
//! [`PrivateLayers`] is one engine per end, with the weights once for all chats of the process.
//! [`PrivateLayers::around`] wraps what runs the layers in between: hosts, or this machine when it
//! has taken over from them. Either is given the rows of boundary `k`, and keeps those for replay;
//! the layers here keep their keys and values whatever becomes of the hosts. A prompt goes in
//! pieces: while a piece is with the hosts the next one is computed here. Each end is a sequence on
//! an engine as any other of this machine ([`local`](crate::local)): rows of several chats are
//! computed as one batch.
//!
//! The residual stream is rounded after every block, so where the layers run cannot change a bit
//! of an answer.

use std::ops::Range;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_model::ModelFile;
use hearthnet_model::engine::{Engine, EngineOptions, Head, LoadError};

use crate::Cancel;
use crate::backend::{Backend, HopTimes, Output, RouteHop, Rows, Run};
use crate::error::ChatError;
use crate::local::{LocalBackend, SharedEngine};
use crate::pipeline::even_cut;

/// Rows of a piece for the last layers: as many as the engine takes through its layers at once.
const LAST_PIECE: usize = 64;

/// The first and last layers of a model on this machine, for all chats of this process that run
/// the others on hosts. Clones share them.
#[derive(Debug, Clone)]
pub struct PrivateLayers {
    total: u32,
    /// Rows of prompt that are handed on at a time.
    piece_rows: usize,
    first: Option<SharedEngine>,
    last: Option<SharedEngine>,
}

impl PrivateLayers {
    /// No layers of a model that has `total`: hosts run all of them.
    pub fn none(total: u32) -> Self {
        Self {
            total,
            piece_rows: 1,
            first: None,
            last: None,
        }
    }

    /// Loads the first `first` and the last `last` layers of a model, which must leave at least
    /// one for hosts. `options` bound the memory for keys and values of each end, and the number
    /// of conversations. A prompt is handed on `piece_rows` rows at a time, at least 1.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(
        file: &ModelFile,
        model_id: &str,
        (first, last): (u32, u32),
        piece_rows: usize,
        options: &EngineOptions,
    ) -> Result<Self, LoadError> {
        let total = file.spec().layers;
        let load = |range: Range<u32>| {
            (!range.is_empty())
                .then(|| Engine::load(file, range, options, &mut |_, _| {}))
                .transpose()
                // The engine's own options bound its memory.
                .map(|engine| engine.map(|engine| SharedEngine::new(engine, model_id, u64::MAX)))
        };
        if first.saturating_add(last) >= total {
            return Err(LoadError::Layers {
                range: first..total.saturating_sub(last),
                layers: total,
            });
        }
        Ok(Self {
            total,
            piece_rows: piece_rows.max(1),
            first: load(0..first)?,
            last: load(total - last..total)?,
        })
    }

    /// The layers in between, which hosts run, half-open.
    pub fn hosted(&self) -> Range<u32> {
        let first = self.first.as_ref().map_or(0, |first| first.0.layers.end);
        let last = self.last.as_ref();
        first..last.map_or(self.total, |last| last.0.layers.start)
    }

    /// Memory that the weights take, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        let ends = self.first.iter().chain(&self.last);
        ends.map(|end| end.0.weight_bytes).sum()
    }

    /// What lies outside the blocks, on the threads of the layers here if there are any: they take
    /// turns.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn head(&self, file: &ModelFile, options: &EngineOptions) -> Result<Head, LoadError> {
        let end = self.first.as_ref().or(self.last.as_ref());
        match end.map(|end| end.0.with(|engine| Head::beside(file, engine))) {
            Some(Ok(head)) => head,
            Some(Err(_)) | None => Head::load(file, options),
        }
    }

    /// A sequence that runs the first and last layers here, and those in between in `between`.
    ///
    /// # Errors
    /// [`ChatError::Busy`] when there are as many conversations as may be.
    pub fn around(&self, between: Box<dyn Backend>) -> Result<Box<dyn Backend>, ChatError> {
        if self.first.is_none() && self.last.is_none() {
            return Ok(between);
        }
        let open = |end: &Option<SharedEngine>| -> Result<_, ChatError> {
            let Some(end) = end else { return Ok(None) };
            let mut backend = end.open()?;
            backend.hosted = true;
            Ok(Some(backend))
        };
        Ok(Box::new(Around {
            piece_rows: self.piece_rows,
            first: open(&self.first)?,
            between,
            last: open(&self.last)?,
            submitted: Submitted::default(),
        }))
    }
}

/// What was submitted since the last output.
#[derive(Default)]
struct Submitted {
    /// Of the first of them.
    position: u32,
    /// How many there are, handed on or not.
    count: usize,
    /// Those that have not been through the first layers.
    waiting: Vec<f32>,
    /// Announced to follow.
    more: u32,
    /// What went wrong, to be told by the output.
    failed: Option<ChatError>,
}

/// One sequence: its first and last layers here, those in between elsewhere.
struct Around {
    piece_rows: usize,
    first: Option<LocalBackend>,
    between: Box<dyn Backend>,
    last: Option<LocalBackend>,
    submitted: Submitted,
}

impl Around {
    fn ends(&mut self) -> impl Iterator<Item = &mut LocalBackend> {
        self.first.iter_mut().chain(&mut self.last)
    }

    /// What runs the layers, in their order.
    fn parts(&self) -> impl Iterator<Item = &dyn Backend> {
        let first = self.first.iter().map(|first| first as &dyn Backend);
        let last = self.last.iter().map(|last| last as &dyn Backend);
        first.chain([self.between.as_ref()]).chain(last)
    }

    /// Takes the next waiting rows through the first layers, and hands them on.
    async fn hand_on(&mut self, rows: usize, cancel: &Cancel) -> Result<(), ChatError> {
        let width = self.width();
        let submitted = &mut self.submitted;
        let waiting = submitted.waiting.len() / width;
        let rest = submitted.waiting.split_off(rows.min(waiting) * width);
        let mut piece = std::mem::replace(&mut submitted.waiting, rest);
        let position = submitted.position + (submitted.count - waiting) as u32;
        let more = (submitted.waiting.len() / width) as u32 + submitted.more;
        if let Some(first) = &mut self.first {
            piece = first.rows(position, piece, true, cancel).await?;
            if let Some(per_layer) = first.per_layer {
                self.between.beside(per_layer);
            }
        }
        let rows = Rows {
            position,
            values: &piece,
            more,
        };
        self.between.submit(rows, cancel).await;
        Ok(())
    }

    fn width(&self) -> usize {
        let mut ends = self.first.iter().chain(&self.last);
        ends.next().map_or(1, |end| end.engine.0.width)
    }

    /// Takes what was submitted through all layers.
    async fn through(&mut self, run: &mut Run<'_>) -> Result<Vec<f32>, ChatError> {
        let width = self.width();
        if let Some(failed) = self.submitted.failed.take() {
            return Err(failed);
        }
        let piece = even_cut(self.submitted.waiting.len() / width, self.piece_rows);
        while !self.submitted.waiting.is_empty() {
            // Whoever gave up takes no further turn.
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            self.hand_on(piece, run.cancel).await?;
        }
        let mut rows = self.between.output(run).await?;
        let Some(last) = &mut self.last else {
            return Ok(rows);
        };
        // Whoever took over in between gives all rows there are.
        let (mut at, count) = (self.submitted.position, self.submitted.count);
        rows.drain(..rows.len().saturating_sub(count * width));
        let mut out = Vec::new();
        while !rows.is_empty() {
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let rest = rows.split_off(rows.len().min(LAST_PIECE * width));
            let piece = (rows.len() / width) as u32;
            out = last.rows(at, rows, true, run.cancel).await?;
            (at, rows) = (at + piece, rest);
        }
        out.drain(..out.len().saturating_sub(width));
        Ok(out)
    }
}

impl Backend for Around {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        let count = rows.values.len() / self.width();
        let submitted = &mut self.submitted;
        if submitted.more == 0 {
            *submitted = Submitted {
                position: rows.position,
                ..Submitted::default()
            };
        }
        submitted.count += count;
        submitted.waiting.extend_from_slice(rows.values);
        submitted.more = rows.more;
        // A prompt is worked on while its output is waited for.
        let at_once = self.first.is_none() || submitted.count == 1;
        async move {
            if at_once {
                self.submitted.failed = self.hand_on(count, cancel).await.err();
            }
        }
        .boxed_local()
    }

    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        self.through(run).boxed_local()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.between.as_ref())
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Backend> {
        Some(self.between.as_mut())
    }

    fn route(&self) -> Vec<RouteHop> {
        self.parts().flat_map(Backend::route).collect()
    }

    fn times(&self) -> Vec<HopTimes> {
        self.parts().flat_map(Backend::times).collect()
    }

    fn begin_call(&mut self, positions: u32) {
        self.ends().for_each(|end| end.begin_call(positions));
        self.between.begin_call(positions);
    }

    fn end_call(&mut self) {
        self.ends().for_each(Backend::end_call);
        self.between.end_call();
    }
}

#[cfg(test)]
mod tests;
